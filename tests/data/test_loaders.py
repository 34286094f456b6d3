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


def _first_samples() -> list[tuple[list[str], list[int]]]:
    """For groups of two ranks and of one: the clips of three batches by our loader, and the indices of its sampler."""
    dataset, found = ToyWorldVideos(num_episodes=8, num_steps=16), []
    for context_parallel_size in (2, 1):
        stream = iter(DataStream(ResumableLoader(dataset), seed=0, dims=parallel.init_dims(context_parallel_size)))
        clips = [next(stream)["video_name"]["video_path"][0] for _ in range(3)]
        found.append((clips, list(get_sampler(dataset))))
    return found


@pytest.mark.slow
def test_ranks_of_a_group_share_samples_across_processes() -> None:
    shared, apart = zip(*run_distributed(_first_samples, 2), strict=True)
    assert shared[0] == shared[1]
    assert not set(apart[0][0]) & set(apart[1][0])
    assert not set(apart[0][1]) & set(apart[1][1])
