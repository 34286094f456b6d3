# SPDX-License-Identifier: Apache-2.0
"""One video by several processes equals the one of a single process."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.pipelines import video2world
from cosmos_predict2.pipelines.context_parallel import agreed  # as an example did
from cosmos_predict2.pipelines.requests import run_all
from cosmos_predict2.pipelines.video2world import LeadingWorld, SpreadError, Video2WorldPipeline, check_num_gpus
from cosmos_predict2.world_model.options import Settings, VideoRequest
from cosmos_predict2.world_model.world_model import SamplingOptions, build_world_model
from imaginaire import distributed
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from tests.multiprocess import run_distributed

ROOT = Path(__file__).parents[2]
PICTURE, CLIP = str(ROOT / "assets/toy_world/first_frame.png"), str(ROOT / "assets/toy_world/clip.mp4")
PROMPT = "push the red puck to the green ring"


def _config(state_t: int = 4) -> Any:
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    config.state_t = state_t
    config.guardrail_config.enabled = False
    return config


def _videos(pipe: Video2WorldPipeline, *, halves_apart: bool) -> dict[str, Tensor]:
    """One given frame and two latent ones, with guidance in one batch and apart, and without; two clips at once."""
    if halves_apart:
        pipe.world._fits_doubled = lambda latent: False  # type: ignore[method-assign]
    settings: dict[str, Any] = dict(aspect_ratio="1:1", num_sampling_step=3, seed=3)
    text = pipe.world.encode_text([PROMPT, "push the blue box up"])
    frames = torch.randint(0, 256, (2, 3, 5, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {
        "picture": pipe(PICTURE, PROMPT, guidance=3.0, negative_prompt="nothing moves", **settings),
        "clip": pipe(CLIP, PROMPT, num_conditional_frames=5, guidance=0.0, **settings),
        "two": pipe.generate(frames, text, seed=4, options=SamplingOptions(guidance=1.0, num_steps=3)),
    }


def _spread(folder: Path) -> dict[str, dict[str, Tensor]]:
    """On every rank: everything that is done with two of them, in one start of the processes."""
    group = parallel.init_dims(distributed.world_size()).cp_group
    results = {}
    for name, halves_apart in (("together", False), ("apart", True)):
        results[name] = _lead_or_follow(
            lambda make, apart=halves_apart: _videos(make(), halves_apart=apart), group, halves_apart
        )
    # a batch in which one input cannot be read, and one whose outputs are all there
    requests = [
        VideoRequest(path, PROMPT, str(folder / name)) for name, path in (("a.mp4", PICTURE), ("b.mp4", "absent"))
    ]
    settings = Settings(aspect_ratio="1:1", fps=10, weights="tiny", sampling=SamplingOptions(num_steps=2))
    for _ in range(2):
        failed = _lead_or_follow(lambda make: run_all(make, requests, settings, skip_existing=True), group, False)
        assert failed == (1 if distributed.is_rank0() else None)
    # what only rank 1 finds wrong is told to all, and nobody waits
    with pytest.raises(ConfigError, match="weights are missing here"):
        agreed(_prepared_on_rank_0)
    # an error before anything is sampled lets the followers go
    with pytest.raises(ConfigError, match="no such input") if distributed.is_rank0() else nullcontext():
        _lead_or_follow(_wrong_request, group, False)
    return results


def _prepared_on_rank_0() -> int:
    if not distributed.is_rank0():
        raise ConfigError("weights are missing here")
    return 1


def _wrong_request(make: Any) -> None:
    raise ConfigError("no such input")


def _lead_or_follow(work: Any, group: Any, halves_apart: bool) -> Any:
    def make() -> Video2WorldPipeline:
        is_follower = not distributed.is_rank0()
        pipe = Video2WorldPipeline.from_config(_config(), device="cpu", group=group, is_follower=is_follower)
        if halves_apart:
            pipe.world._fits_doubled = lambda latent: False  # type: ignore[method-assign]
        return pipe

    def make_leader() -> Video2WorldPipeline:
        video2world.announce()
        return make()

    if distributed.is_rank0():
        return video2world.lead(lambda: work(make_leader))
    video2world.follow(lambda: make().world)
    return None


@pytest.mark.slow
def test_two_processes_make_the_video_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    results, follower = run_distributed(_spread, 2, (tmp_path,))
    assert follower == {"together": None, "apart": None}
    for name, halves_apart in (("together", False), ("apart", True)):
        single = _videos(Video2WorldPipeline.from_config(_config(), device="cpu"), halves_apart=halves_apart)
        for case, video in single.items():
            torch.testing.assert_close(results[name][case], video, rtol=0, atol=1e-4, msg=f"{name}, {case}")
            assert video.std() > 0.01
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["a.mp4"]


def test_a_failure_in_the_middle_of_sampling_is_none_that_a_batch_goes_on_after() -> None:
    world = build_world_model(_config(), dtype=torch.float32, kind=LeadingWorld).load()
    with pytest.raises(SpreadError, match=r"Rank 0 failed in sampling: num_steps=0"):
        world.generate(
            torch.zeros(1, 3, 1, 48, 48), torch.zeros(1, 64, 64), options=SamplingOptions(guidance=7.0, num_steps=0)
        )
    assert not issubclass(SpreadError, ValueError)  # as those are that are logged, and the next request begun


@pytest.mark.parametrize(
    ("num_gpus", "num_heads", "state_t", "works"),
    [(3, 2, 4, "1, 2"), (16, 16, 24, "1, 2, 4, 8"), (6, 40, 16, "1, 2, 4, 8")],
)
def test_numbers_of_gpus_that_do_not_divide_are_refused_with_those_that_do(
    num_gpus: int, num_heads: int, state_t: int, works: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--num_gpus {num_gpus} .* These numbers do: {works}\."):
        check_num_gpus(num_gpus, num_heads, state_t)
    check_num_gpus(2, num_heads, state_t)
