# SPDX-License-Identifier: Apache-2.0
import pytest

from cosmos_predict2.data.loaders import get_sampler
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from imaginaire.data.stream import DataStream, ResumableLoader
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from tests.multiprocess import run_distributed


def test_the_sampler_divides_among_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for rank in range(4):
        monkeypatch.setattr(parallel, "_current", ParallelDims(world_size=4, rank=rank, context_parallel_size=2))
        read.append(list(get_sampler(range(8))))
    assert read[0] == read[1] != read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(8))


def _first_samples(context_parallel_size: int) -> tuple[list[str], list[int]]:
    """On each rank: the clips of three batches by our loader, and the indices of its sampler."""
    dims = parallel.init_dims(context_parallel_size)
    dataset = ToyWorldVideos(num_episodes=8, num_steps=16)
    stream = iter(DataStream(ResumableLoader(dataset), seed=0, dims=dims))
    return [next(stream)["video_name"]["video_path"][0] for _ in range(3)], list(get_sampler(dataset))


@pytest.mark.slow
def test_ranks_of_a_group_share_samples_across_processes() -> None:
    shared = run_distributed(_first_samples, 2, args=(2,))
    assert shared[0] == shared[1]
    apart = run_distributed(_first_samples, 2, args=(1,))
    assert not set(apart[0][0]) & set(apart[1][0])
    assert not set(apart[0][1]) & set(apart[1][1])
