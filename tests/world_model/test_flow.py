# SPDX-License-Identifier: Apache-2.0
"""Predict2.5 networks: sampling by flow times, in batches, with and without given frames, and by other solvers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion.solvers import FLOW_SOLVERS, SOLVERS
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.world_model.config import FlowConfig, SolverConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, initial_noise
from imaginaire.errors import ConfigError
from tests.models.parts import LIMITS, NET, PooledPixels, awaken

TWO, THREE = (SamplingOptions(num_steps=number) for number in (2, 3))
GUIDED = SamplingOptions(num_steps=3, guidance=2.0)


def make_pipeline(**flow: Any) -> Video2WorldPipeline:
    torch.manual_seed(0)
    net = Video2WorldDiT(crossattn_proj_in_channels=12, **NET, **LIMITS)
    awaken(net, "fc2", std=0.2)
    config = Video2WorldPipelineConfig(
        state_t=3, fps=10, resolution="48", precision="float32", min_num_conditional_frames=0, flow=FlowConfig(**flow)
    )
    return Video2WorldPipeline(WorldModel(config, net.eval(), PooledPixels()))


def frames(size: int = 2, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (size, 3, count, 32, 32), dtype=torch.uint8, generator=generator)


def text(size: int = 2, seed: int = 4) -> Tensor:
    return torch.randn(size, 6, 12, generator=torch.Generator().manual_seed(seed))


def calls(pipe: Video2WorldPipeline) -> list[tuple[int, Tensor]]:
    """(batch, timesteps) of every forward pass from now on."""
    seen: list[tuple[int, Tensor]] = []
    pipe.dit.register_forward_pre_hook(lambda _, inputs: seen.append((len(inputs[0]), inputs[1].clone())))
    return seen


def test_the_network_is_told_whole_timesteps() -> None:
    pipe = make_pipeline()
    seen = calls(pipe)
    pipe.generate(frames(), text(), options=SamplingOptions(num_steps=5))
    expected = pipe.config.flow.levels(5).timesteps  # type: ignore[union-attr]
    assert expected[0] == 999
    assert [timesteps[0].item() for _, timesteps in seen] == pytest.approx((expected * 0.001).tolist())
    assert all(timesteps.shape == (2, 1) for _, timesteps in seen)


@pytest.mark.parametrize("schedule", ["shift", "karras"])
@pytest.mark.parametrize("own_timestep", [-1.0, 0.1])
def test_a_sample_does_not_depend_on_its_batch(schedule: str, own_timestep: float) -> None:
    pipe = make_pipeline(schedule=schedule, conditional_frame_timestep=own_timestep)
    inputs = (frames(), text(), text(seed=5))
    both = pipe.generate(*inputs, seed=[7, 8], options=GUIDED)  # type: ignore[arg-type]
    for i in range(2):
        alone = pipe.generate(*(one[i : i + 1] for one in inputs), seed=7 + i, options=GUIDED)
        torch.testing.assert_close(both[i : i + 1], alone, rtol=0, atol=2e-5)


def test_without_the_replacement_the_network_speaks_for_given_frames_too() -> None:
    noise = initial_noise((2, 16, 3, 4, 4), 0)
    states: dict[bool, list[Tensor]] = {True: [], False: []}
    for replaces, kept in states.items():
        pipe = make_pipeline(replace_given_frames=replaces)
        pipe.generate(frames(), text(), on_step=lambda _, s, kept=kept: kept.append(s.x_next_B_C_T_H_W), options=THREE)
    gone = pipe.config.flow.levels(3).sigmas[1] - 1  # type: ignore[union-attr]
    line = (noise + gone * (noise - pipe.world.given_latents(frames())))[:, :, 0]
    torch.testing.assert_close(states[True][0][:, :, 0], line.float(), rtol=0, atol=1e-3)
    assert not torch.allclose(states[False][0][:, :, 0], line.float(), atol=1e-2)


def test_a_video_may_begin_with_the_prompt_alone() -> None:
    pipe = make_pipeline()
    video = pipe.generate(frames(count=0), text(), options=GUIDED)
    assert video.shape == (2, 3, 9, 32, 32) and torch.isfinite(video).all()
    pipe.config.min_num_conditional_frames = 1
    with pytest.raises(ConfigError, match=r"0 conditioning frames, but.* 1 at least"):
        pipe.generate(frames(count=0), text(), options=TWO)


def test_the_same_weights_are_sampled_by_every_solver() -> None:
    pipe = make_pipeline()
    chosen = pipe.generate(frames(), text(), options=TWO)
    for solver in SOLVERS:
        video = pipe.generate(frames(), text(), options=SamplingOptions(num_steps=2, solver=solver))
        # Two steps of both flow solvers are the same: the first is Euler's, the last gives the estimate.
        assert torch.isfinite(video).all()
        assert torch.allclose(video, chosen, atol=1e-5) == (solver in FLOW_SOLVERS), solver


def test_both_ways_of_asking_agree_in_the_limit_of_many_steps() -> None:
    pipe = make_pipeline()
    pipe.config.timestamps = SolverConfig(t_max=8000.0)  # as near to noise alone as flow times begin
    options = (SamplingOptions(num_steps=60, solver=name) for name in ("unipc", "2ab"))
    noise_alike = [pipe.generate(frames(1), text(1), options=one) for one in options]
    torch.testing.assert_close(*noise_alike, rtol=0, atol=0.03)  # whole timesteps are left


@pytest.mark.parametrize(("solver", "first"), [("2ab", 80 / 81), ("unipc", 0.999)])
def test_conditioning_frames_have_the_level_of_training(solver: str, first: float) -> None:
    for own, expected in ((-1.0, [first] * 3), (0.1, [1e-4, first, first])):
        pipe = make_pipeline(conditional_frame_timestep=own, timestep_scale=0.002)  # so times are asked for doubled
        seen = calls(pipe)
        pipe.generate(frames(1), text(1), options=SamplingOptions(num_steps=1, solver=solver))
        torch.testing.assert_close(seen[0][1].expand(1, 3), 2 * torch.tensor([expected]), rtol=1e-5, atol=1e-7)


def test_rectified_flow_is_of_unit_data() -> None:
    with pytest.raises(ConfigError, match=r"sigma_data=0\.5"):
        WorldModel(Video2WorldPipelineConfig(sigma_data=0.5), Video2WorldDiT(**NET, **LIMITS), PooledPixels())
