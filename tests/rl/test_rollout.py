# SPDX-License-Identifier: Apache-2.0
"""A world model on a stochastic chain: what of the options reaches it, and which noise and levels its steps have."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.schedules import karras_sigmas
from cosmos_predict2.diffusion.transitions import ChurnChain, FlowChain
from cosmos_predict2.rl.clips.rollout import ChainPath, chain_path, check_chain, judge, of_whole_clip, roll_out
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import EDM
from imaginaire.errors import TrainingError

SIGMAS = karras_sigmas(5, 0.01, 80.0)
NOISE = torch.randn(1, 2, 1, 3, 3, generator=torch.Generator().manual_seed(0))


def path_of(rl: RLConfig, window: tuple[int, ...] | None = None) -> tuple[ChainPath, SimpleNamespace]:
    """The path of a model by noise levels that judges each state to be half of itself; and what it was asked."""
    asked = SimpleNamespace(options=None, seen=[])

    def denoise(x: Tensor, level_B: Tensor) -> Tensor:
        asked.seen.append((x, level_B))
        return 0.5 * x

    def sampling_path(condition: Any, unconditional: Any, noise: Tensor, options: Any) -> Any:
        asked.options = options
        return SimpleNamespace(denoise=denoise, sigmas=SIGMAS, finish=lambda x: x)

    world: Any = SimpleNamespace(objective=EDM(Video2WorldPipelineConfig()), sampling_path=sampling_path)
    return chain_path(world, rl, cast(Condition, None), None, NOISE, window), asked


def test_options_of_a_rollout_reach_its_chain() -> None:
    churn = dict(transition="churn", s_churn=0.5, s_noise=1.003, s_t_min=0.05, s_t_max=50.0, solver_option="1euler")
    path, asked = path_of(RLConfig(sample_steps=5, guidance=3.0, **churn), (1, 3))
    expected = ChurnChain(
        SIGMAS.tolist(), 0.5, "1euler", noise_scale=1.003, sigma_min=0.05, sigma_max=50.0, window=(1, 3)
    )
    assert path.chain == expected
    assert (asked.options.guidance, asked.options.num_steps, asked.options.is_repeatable) == (3.0, 5, True)
    for kind in ("sde", "cps", "dance", "ddim"):
        times = (SIGMAS / (1 + SIGMAS)).tolist()
        path, _ = path_of(RLConfig(sample_steps=5, transition=kind, noise_level=0.3), (0,))
        assert path.chain == FlowChain(times, kind, 0.3, (0,))


def test_a_model_by_noise_levels_sees_flow_states_at_their_levels() -> None:
    """The state y = (1 - t) x_0 + t eps is x / (1 + sigma) of t = sigma / (1 + sigma)."""
    x = torch.ones(2, 1)
    for kind, seen in (("sde", (x / 0.2, 4.0)), ("churn", (x, 0.8))):
        path, asked = path_of(RLConfig(sample_steps=5, transition=kind))
        assert torch.equal(path.denoise(x, 0.8), 0.5 * asked.seen[0][0])
        torch.testing.assert_close(asked.seen[0], (seen[0], torch.full((2,), seen[1])))


@pytest.mark.parametrize("options", [dict(transition="churn"), dict(transition="sde"), dict(transition="cps")])
def test_each_step_draws_once_and_is_judged_as_it_was_rolled_out(options: dict[str, str]) -> None:
    """Under the same weights the mean is the kept one; the next state is that much noise away from it."""
    asked: list[int] = []

    def noise_of(k: int) -> Tensor:
        asked.append(k)
        return torch.full_like(NOISE, 10.0 + k)

    path, _ = path_of(RLConfig(sample_steps=5, **options))
    final, kept = roll_out(path, NOISE, noise_of, range(5))
    chain = path.chain
    assert asked == [-1, *(k for k in range(5) if chain.is_stochastic(k))]
    for k, one in kept.items():
        step, x0 = judge(path, one)
        torch.testing.assert_close(step.mean_B_C_T_H_W, one.mean_B_C_T_H_W)
        torch.testing.assert_close(x0, path.denoise(one.x_B_C_T_H_W, chain.levels[k]))
        torch.testing.assert_close(one.x_next_B_C_T_H_W, one.mean_B_C_T_H_W + step.std * (10.0 + k))
        assert (one.previous_x0_B_C_T_H_W is not None) == (chain.uses_previous and k > 0)
    last = kept[4].x_next_B_C_T_H_W
    torch.testing.assert_close(final, last if chain.final_level is None else path.denoise(last, chain.final_level))
    start = chain.start(NOISE, torch.full_like(NOISE, 9.0))
    torch.testing.assert_close(kept[0].x_B_C_T_H_W, start)


@pytest.mark.parametrize(("gain", "is_refused"), [(0.02, True), (1.0, False), (50.0, True), (torch.inf, False)])
def test_states_are_as_large_as_their_levels_say(gain: float, is_refused: bool) -> None:
    """Smaller ones are refused as larger ones are; what training says of numbers that are not finite is left to it."""
    chain = ChurnChain(SIGMAS.tolist(), 0.0, "1euler")

    class Scaled(ChurnChain):
        def step(self, *arguments: Any) -> Any:
            step = ChurnChain.step(self, *arguments)
            return type(step)(gain * step.mean_B_C_T_H_W, step.std)

    scaled = Scaled(SIGMAS.tolist(), 0.0, "1euler")
    path = ChainPath(scaled, lambda x, level: x / (1 + level**2), lambda x: x)
    assert scaled.levels == chain.levels
    if is_refused:
        with pytest.raises(TrainingError, match="After step 0"):
            roll_out(path, NOISE, lambda k: NOISE, (), is_checked=True)
        roll_out(path, NOISE, lambda k: NOISE, ())
    else:
        roll_out(path, NOISE, lambda k: NOISE, (), is_checked=True)


def test_a_mean_over_a_whole_clip_is_that_of_the_means_of_all_ranks() -> None:
    """Two ranks, with as many frames each."""
    other = torch.tensor([[3.0], [8.0]])
    context = SimpleNamespace(is_on=True, gather_frames=lambda value, dim: torch.cat([value, other], dim=dim))
    world: Any = SimpleNamespace(context=context)
    assert of_whole_clip(world, torch.tensor([1.0, 2.0])).tolist() == [2.0, 5.0]
    context.is_on = False
    assert of_whole_clip(world, torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_forward_objectives_may_roll_out_without_noise() -> None:
    objective = EDM(Video2WorldPipelineConfig())
    check_chain(objective, RLConfig(objective="nft", transition="ode"))
    check_chain(objective, RLConfig(objective="nft", transition="churn", s_churn=0.0))
