# SPDX-License-Identifier: Apache-2.0
"""A world model on a stochastic chain: what of the options reaches it, which noise and levels its steps have; and the
losses of a micro-batch: what objectives are given, and at which levels the network is asked."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import karras_sigmas
from cosmos_predict2.diffusion.transitions import ChurnChain, FlowChain, Normal
from cosmos_predict2.rl.clips import rollout
from cosmos_predict2.rl.clips.rollout import (
    ChainPath,
    Data,
    Forward,
    KeptStep,
    Losses,
    MicroBatch,
    chain_path,
    check_chain,
    judge,
    of_whole_clip,
    roll_out,
)
from cosmos_predict2.rl.config import AdvantageConfig, RLConfig
from cosmos_predict2.rl.objectives import (
    FreshNoise,
    RatioStep,
    WithoutRatio,
    clipped,
    forward_objective,
    ratio_objective,
)
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
        step = judge(path, one)
        torch.testing.assert_close(step.mean_B_C_T_H_W, one.mean_B_C_T_H_W)
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


# --- losses

SHAPE = (2, 1, 2, 1, 2)
X0, EPSILON = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
given: list[Any] = []


@forward_objective
def noted(fresh: FreshNoise) -> WithoutRatio:
    given.append(fresh)
    return WithoutRatio(fresh.v_B_C_T_H_W.flatten(1).mean(dim=1))


@ratio_objective
def noted_ratio(step: RatioStep) -> Any:
    given.append(step)
    return clipped(step.log_ratio_B, step.advantage_B, step.limit)


def losses_of(clean: Tensor, sigma_data: float = 1.0, **options: Any) -> tuple[Losses, list[Any]]:
    """Losses of a world model that estimates these clean latents; and what it is asked."""
    asked: list[Any] = []

    def denoiser(x: Tensor, sigma_B_1: Tensor, condition: Any) -> Any:
        asked.append((x, sigma_B_1, condition))
        return clean

    same = lambda value: value  # noqa: E731
    context = SimpleNamespace(is_on=False, activate=same, split_frames=same, part_of=same)
    world: Any = SimpleNamespace(context=context, denoiser=denoiser, config=SimpleNamespace(sigma_data=sigma_data))
    given.clear()
    return Losses(world, RLConfig(**options)), asked


def part_of(**values: Any) -> MicroBatch:
    whole: dict[str, Any] = dict(condition="text", unconditional=None, noise_B_C_T_H_W=EPSILON, window=(0, 3))
    return MicroBatch(**whole | dict(advantage_B=torch.tensor([2.0, -1.0])) | values)


def test_a_velocity_is_asked_for_at_the_level_of_its_time() -> None:
    """The clean estimate x_0 at (1 - t) x_0 + t eps is that of the velocity eps - x_0."""
    t_B = torch.tensor([0.25, 0.8])
    ours, asked = losses_of(X0)
    torch.testing.assert_close(ours.velocity("text", Forward(X0, EPSILON, t_B)), EPSILON - X0)  # type: ignore[arg-type]
    sigma = torch.tensor([[1 / 3], [4.0]])
    (seen,) = asked
    torch.testing.assert_close(seen[:2], (X0 + sigma[..., None, None, None] * EPSILON, sigma))
    assert seen[2] == "text"


def test_a_forward_objective_gets_what_sampled_and_the_numbers_of_the_options() -> None:
    objective = f"{__name__}:noted"
    numbers = dict(clip_ratio=0.1, nft_beta=0.5, clip_ratio_high=0.3, dual_clip=3.0)
    ours, _ = losses_of(X0, objective=objective, kl_beta=2.0, advantage=AdvantageConfig(adv_clip_max=4.0), **numbers)
    forward = Forward(X0, EPSILON, torch.tensor([0.25, 0.8]), X0 + 1, EPSILON - X0 - 0.5)
    output, loss = ours.of(part_of(forward=forward))
    (fresh,) = given
    assert (fresh.limit, fresh.beta, fresh.largest_advantage) == (0.1, 0.5, 4.0)
    assert (fresh.limit_high, fresh.dual_clip) == (0.3, 3.0)
    assert torch.equal(fresh.v_old_B_C_T_H_W, X0 + 1) and fresh.advantage_B.tolist() == [2.0, -1.0]
    torch.testing.assert_close(fresh.v_B_C_T_H_W, EPSILON - X0)
    assert float(output["kl_loss"]) == pytest.approx(0.25, rel=1e-4)
    assert float(loss) == pytest.approx(float((EPSILON - X0).mean()) + 2.0 * 0.25, rel=1e-4)
    ours.of(part_of(forward=replace(forward, v_old_B_C_T_H_W=None)))
    assert torch.equal(given[1].v_old_B_C_T_H_W, given[1].v_B_C_T_H_W)


def ratio_part(shift: float = 0.0, **values: Any) -> MicroBatch:
    zeros = torch.zeros(SHAPE)
    return part_of(kept=KeptStep(3, zeros, zeros + 1.0, zeros - shift, None), **values)


def judged(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Losses, list[Any]]:
    """Whose network judges that the mean of each next state is 0, with a deviation of 0.5."""
    ours, _ = losses_of(X0, **options)
    paths: list[Any] = []

    def noted_path(*arguments: Any) -> Any:
        paths.append(arguments)
        return SimpleNamespace(chain=SimpleNamespace(length=lambda k: 0.1 * k))

    monkeypatch.setattr(rollout, "chain_path", noted_path)
    monkeypatch.setattr(rollout, "judge", lambda path, kept: Normal(torch.zeros(SHAPE), 0.5))
    return ours, paths


def test_a_ratio_objective_gets_the_step_as_it_was_rolled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = dict(clip_ratio=0.1, clip_ratio_high=0.3, dual_clip=3.0, guidance=2.0)
    ours, paths = judged(monkeypatch, objective=f"{__name__}:noted_ratio", **numbers)
    ours.of(ratio_part(0.2, is_before_update=False, unconditional="none"))
    assert paths[0][2:4] == ("text", "none") and paths[0][4] is EPSILON and paths[0][5] == (0, 3)
    (step,) = given
    assert (step.std, step.limit, step.limit_high, step.dual_clip) == (0.5, 0.1, 0.3, 3.0)
    assert step.dt == pytest.approx(0.3)
    torch.testing.assert_close(step.mean_drift_B, torch.full((2,), 0.04))
    torch.testing.assert_close(step.log_ratio_B, torch.full((2,), (1.2**2 - 1.0) / (2 * 0.5**2)))
    ours, _ = judged(monkeypatch, objective=f"{__name__}:noted_ratio", ratio_normalisation="cosmos_rl")
    ours.of(ratio_part(0.2, is_before_update=False))
    torch.testing.assert_close(given[0].log_ratio_B, torch.full((2,), 1.2**2 - 1.0))


def test_ratios_are_one_before_the_first_update_of_weights_that_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, is_before, is_refused in (
        (dict(), True, True),
        (dict(), False, False),
        (dict(on_policy=False), True, False),
    ):
        ours, _ = judged(monkeypatch, **options)
        ours.of(ratio_part(is_before_update=is_before))
        if is_refused:
            with pytest.raises(TrainingError, match="ratio_tolerance"):
                ours.of(ratio_part(0.2, is_before_update=is_before))
        else:
            ours.of(ratio_part(0.2, is_before_update=is_before))


def test_the_loss_adds_the_distance_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """(mean - reference mean)^2 / (2 std^2), times kl_beta; the clipped part has the advantage's sign reversed."""
    zeros = torch.zeros(SHAPE)
    part = part_of(kept=KeptStep(3, zeros, zeros + 1.0, zeros, None, zeros + 0.2))
    ours, _ = judged(monkeypatch, kl_beta=10.0)
    output, loss = ours.of(part)
    assert float(output["kl_loss"]) == pytest.approx(0.2**2 / (2 * 0.5**2))
    assert float(output["policy_loss"]) == -0.5
    assert float(loss) == pytest.approx(-0.5 + 10 * 0.08)
    ours, _ = judged(monkeypatch, objective="guard")
    assert float(ours.of(part)[0]["policy_loss"]) == pytest.approx(-0.5 / 0.3), "divided by the length of the step"


def test_exponential_advantages_are_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """-exp(-A), which is -exp(5) of the worst sample."""
    ours, _ = judged(monkeypatch, objective=f"{__name__}:noted_ratio", exp_reward=True)
    ours.of(ratio_part(advantage_B=torch.tensor([1.0, -5.0])))
    torch.testing.assert_close(given[0].advantage_B, torch.tensor([-(torch.e**-1), -5.0]))


def test_the_data_term_weighs_each_clip_by_its_own_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """(sigma^2 + sigma_d^2) / (sigma sigma_d)^2 times the squared error of the clean clip, beside the policy's loss."""
    ours, asked = losses_of(
        X0 + torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1, 1), sigma_data=0.5, data_beta=3.0, loss_scale=2.0
    )
    judged(monkeypatch)
    sigma = torch.tensor([[0.5], [2.0]])
    data: Any = Data(X0, EPSILON, sigma, "data")  # type: ignore[arg-type]
    output, loss = ours.of(ratio_part(data=data))
    weights = [(0.25 + 0.25) / 0.25**2, (4 + 0.25) / 1.0]
    expected = (weights[0] * 1.0 + weights[1] * 4.0) / 2
    assert float(output["data_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(loss) == pytest.approx(2.0 * (float(output["policy_loss"]) + 3.0 * expected), rel=1e-5)
    torch.testing.assert_close(asked[0][0], X0 + sigma[..., None, None, None] * EPSILON)
    assert asked[0][2] == "data"
