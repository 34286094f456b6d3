# SPDX-License-Identifier: Apache-2.0
"""States of a rollout have the noise of their level: every transition on every shipped schedule, against theory.

The clean latents are normal with a known deviation, so that the right estimate is a formula and every state is normal.
"""

import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS, karras_sigmas
from cosmos_predict2.diffusion.transitions import KINDS, Chain, ChurnChain, FlowChain, Normal, flow_std
from cosmos_predict2.models.config import model_config
from cosmos_predict2.rl.clips.rollout import ChainPath, chain_path, check_chain, roll_out
from cosmos_predict2.rl.config import RLConfig, rl_of
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import objective_of, velocity_by
from imaginaire.config.compose import compose, experiment_names
from imaginaire.config.registry import node_of
from imaginaire.errors import ConfigError, TrainingError
from tests.rl.runs import CONFIG

OF_DATA = 1.0  # the deviation of clean latents
SHAPE = (16, 1, 1, 32, 32)  # deviations of so many numbers are known to 0.6 %


def _gain(alpha: float, sigma: float) -> float:
    """The right estimate of the clean latents is so many times the state alpha x_0 + sigma eps."""
    return alpha * OF_DATA**2 / ((alpha * OF_DATA) ** 2 + sigma**2)


def _world(pipe_config: Any) -> Any:
    """A world model of this config, but for its network: it knows the right answer."""
    objective = objective_of(pipe_config)

    def answers(predict: Any) -> Any:
        if predict is not velocity_by:
            return lambda x, sigma_B: _gain(1.0, float(sigma_B[0])) * x

        def velocity(y: Tensor, timesteps_B: Tensor) -> Tensor:
            t = float(timesteps_B[0]) / NUM_TIMESTEPS
            return (1 - _gain(1 - t, t)) * y / t if t > 0 else y

        return velocity

    def sampling_path(condition: Any, other: Any, noise: Tensor, options: Any) -> Any:
        given = SimpleNamespace(gt_frames_B_C_T_H_W=None, condition_mask_B_1_T_H_W=None, is_image=True)
        assert options.is_repeatable, "a resumed run may have less free memory"
        return objective.sampling_path(answers, given, noise, options.solver, options.num_steps)

    return SimpleNamespace(objective=objective, sampling_path=sampling_path)


def _path(pipe_config: Any, rl: RLConfig) -> ChainPath:
    return chain_path(_world(pipe_config), rl, None, None, torch.zeros(1))


def _found(path: ChainPath) -> list[float]:
    """The deviation of the state after each step of a rollout."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SHAPE, generator=generator)
    _, kept = roll_out(
        path, noise, lambda k: torch.randn(SHAPE, generator=generator), range(path.chain.num_steps), is_checked=True
    )
    return [float(kept[k].x_next_B_C_T_H_W.std()) for k in sorted(kept)]


def _of_flow(chain: Any) -> list[float]:
    """By the papers' formulas: y' = (1 - t') x_0 + c eps + std z of the estimates of x_0 and of the noise in y.

    Without new noise c = t'. DDIM and CPS take c^2 = t'^2 - std^2. By a differential equation with coefficient s,
    std^2 = s^2 |dt| and c = t' - s^2 |dt| / (2 t), where Flow-GRPO has s^2 = a^2 t / (1 - t), at the start t' below.
    """
    times, a, found = chain.levels, chain.amount, []
    deviation = 1.0 if times[-1] == 0 else times[0]
    for k, (t, t_next) in enumerate(itertools.pairwise(times)):
        dt, std, kept = t - t_next, 0.0, t_next
        if chain.kind == "cps":
            std = t_next * math.sin(a * math.pi / 2)
        elif chain.kind == "ddim":
            std = a * t_next * math.sqrt(1 - (t_next * (1 - t) / (t * (1 - t_next))) ** 2)
        if chain.kind in ("cps", "ddim"):
            kept = math.sqrt(t_next**2 - std**2)
        elif chain.kind in ("sde", "dance"):
            below = 1 - t_next if k == 0 and 1 - t < dt / 2 else 1 - t
            squared = a**2 * t / below if chain.kind == "sde" else a**2
            std, kept = math.sqrt(squared * dt), t_next - squared * dt / (2 * t)
        gain = _gain(1 - t, t)
        deviation = math.hypot(((1 - t_next) * gain + kept * (1 - (1 - t) * gain) / t) * deviation, std)
        found.append(deviation)
    return found


def _of_churn(chain: ChurnChain) -> list[float]:
    """By the exponential integrator of two points in -ln(sigma), and EDM's noise after each step but the last."""
    raised, covariance, found = chain.levels, numpy.zeros((2, 2)), []
    covariance[0, 0] = raised[0] ** 2
    for k in range(chain.num_steps):
        sigma, sigma_next, gain = raised[k], chain.sigmas[k + 1], _gain(1.0, raised[k])
        h = math.log(sigma / sigma_next)
        of_state, of_last = math.exp(-h), 0.0
        if k == 0 or chain.solver == "1euler":
            of_state += (1 - math.exp(-h)) * gain
        else:
            c = -math.log(raised[k - 1] / sigma) / h
            phi1 = (math.exp(-h) - 1) / -h
            phi2 = (phi1 - 1) / -h
            of_state += h * (phi1 - phi2 / c) * gain
            of_last = h * phi2 / c
        step = numpy.array([[of_state, of_last], [gain, 0.0]])
        covariance = step @ covariance @ step.T
        if k + 1 < chain.num_steps:
            covariance[0, 0] += (raised[k + 1] ** 2 - sigma_next**2) * chain.noise_scale**2
        found.append(math.sqrt(covariance[0, 0]))
    return found


@functools.cache
def _shipped() -> dict[str, tuple[Any, RLConfig]]:
    """The pipeline and the options of every experiment that learns from rewards of clips; alike ones once."""
    found: dict[str, tuple[Any, RLConfig]] = {}
    seen = set()
    for name in experiment_names(CONFIG):
        node: Any = node_of("experiment", name)
        config = (node.get("model") or {}).get("config") or {}
        rl, pipe = config.get("rl") or {}, config.get("pipe_config") or {}
        own = [node.defaults, pipe.get("flow"), pipe.get("timestamps")]
        own += [rl.get(key) for key in ("sample_steps", "noise_level", "s_churn")]
        if "sample_steps" not in rl or str(own) in seen:
            continue
        seen.add(str(own))
        model: Any = model_config(compose(CONFIG, [f"experiment={name}"]).model["config"])
        pipe, rl = model.pipe_config, rl_of(model)
        flow = None if pipe.flow is None else (pipe.flow.schedule, pipe.flow.shift)
        levels = (pipe.timestamps.t_min, pipe.timestamps.t_max, pipe.timestamps.order)
        found.setdefault(str((flow, levels, rl.sample_steps, rl.noise_level, rl.s_churn)), (pipe, rl))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_schedule_keeps_the_deviations_of_theory(kind: str) -> None:
    """Within 5 % of what the papers' formulas give for these steps, and never a factor of 2 from the exact ones."""
    assert len(_shipped()) >= 6
    for pipe, rl in _shipped().values():
        rl.transition = kind
        path = _path(pipe, rl)
        found = _found(path)
        theory = _of_churn if isinstance(path.chain, ChurnChain) else _of_flow
        assert found == pytest.approx(theory(path.chain), rel=0.05), rl
        exact = [path.chain.deviation_after(k, OF_DATA) for k in range(path.chain.num_steps)]
        assert all(0.5 < a / b < 2 for a, b in zip(found, exact, strict=True)), rl


FAMILIES = {
    "predict2": Video2WorldPipelineConfig(),
    "predict2p5": Video2WorldPipelineConfig(flow=FlowConfig()),
    "predict2p5, karras": Video2WorldPipelineConfig(flow=FlowConfig(schedule="karras")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fine_steps_have_the_exact_deviations(family: str, kind: str) -> None:
    """At 200 steps each state has the deviation of (1 - t) x_0 + t eps, or of x_0 + sigma eps, within 5 %.

    CPS renews the same share of the noise in every step, however short: that share is small here.
    """
    amount = 0.1 if kind == "cps" else 0.7
    path = _path(FAMILIES[family], RLConfig(transition=kind, sample_steps=200, noise_level=amount))
    exact = [path.chain.deviation_after(k, OF_DATA) for k in range(path.chain.num_steps)]
    assert _found(path) == pytest.approx(exact, rel=0.05)


def test_the_first_step_from_noise_alone_has_the_coefficient_of_the_next_time() -> None:
    """Predict2.5 begins at .9998: with 10 steps that step was -25.7 times its state. Other starts keep their own."""
    path = _path(FAMILIES["predict2p5"], RLConfig())
    times = path.chain.levels
    assert isinstance(path.chain, FlowChain) and 0.9997 < times[0] < 1
    assert flow_std("sde", times, 0, 0.7) == pytest.approx(0.7, rel=1e-2)  # as from t = 1 exactly
    assert _found(path)[0] == pytest.approx(1.0, rel=0.05)
    later = _path(FAMILIES["predict2"], RLConfig()).chain.levels
    own = 0.7 * math.sqrt(later[0] / (1 - later[0]) * (later[0] - later[1]))
    assert flow_std("sde", later, 0, 0.7) == pytest.approx(own)


WRONG = [
    ("sde", 2, 1.4, r"sample_steps=2: Step 1 .* deviation .* more steps"),
    ("dance", 2, 3.0, "Step . from time"),
    ("ddim", 10, 1.5, "Step 0"),
    ("cps", 10, 1.1, "above 1"),
]


@pytest.mark.parametrize(("kind", "steps", "amount", "told"), WRONG)
@pytest.mark.parametrize("family", FAMILIES)
def test_noise_that_a_step_has_no_room_for_is_refused(
    family: str, kind: str, steps: int, amount: float, told: str
) -> None:
    rl = RLConfig(transition=kind, sample_steps=steps, noise_level=amount)
    with pytest.raises(ConfigError, match=told):
        check_chain(objective_of(FAMILIES[family]), rl)
    rl.noise_level, rl.sample_steps = 0.7, 10
    check_chain(objective_of(FAMILIES[family]), rl)


class ThreeTimesTheNoise(FlowChain):
    def step(self, *arguments: Any) -> Normal:
        step = FlowChain.step(self, *arguments)
        return Normal(step.mean_B_C_T_H_W, 3 * step.std)


def test_a_rollout_whose_states_have_other_noise_than_their_levels_ends_the_run() -> None:
    times = _path(FAMILIES["predict2p5"], RLConfig()).chain.levels
    with pytest.raises(TrainingError, match=r"After step 0 .* 10 .*sample_steps"):
        _found(ChainPath(ThreeTimesTheNoise(times), lambda y, t: _gain(1 - t, t) * y, lambda y: y))


def test_a_rollout_begins_at_its_first_time_or_where_it_leads_to_time_0_with_the_noise_itself() -> None:
    """The models of noise levels begin at t = 80 / 81; the sampler of predict2.5 takes its .9998 for 1."""
    one = torch.ones(1)
    found = [FlowChain([0.9, 0.5, last], "ode").start(one, one).item() for last in (0.1, 0.0)]
    assert found == pytest.approx([0.9, 1.0])


def test_churn_follows_the_steps_of_the_window_with_its_scale() -> None:
    """The start is always churned; noise behind a step belongs to that step, and not to the one that it precedes."""
    sigmas = karras_sigmas(6).tolist()
    whole, some = ChurnChain(sigmas, noise_scale=1.5), ChurnChain(sigmas, noise_scale=1.5, window=(0, 3))
    steps, one = range(whole.num_steps), torch.ones(1, dtype=torch.float64)
    assert [k for k in steps if some.is_stochastic(k)] == [0, 3]
    assert [k for k in steps if some.levels[k] > sigmas[k]] == [0, 1, 4]
    added = [1.5 * math.sqrt(level**2 - sigma**2) for level, sigma in zip(whole.levels, sigmas, strict=False)]
    assert whole.start(0 * one, one).item() == pytest.approx(added[0])
    assert [whole.step(k, one, one, None).std for k in steps] == pytest.approx([*added[1:], 0.0])
    limited = ChurnChain(sigmas, 1e9, sigma_min=sigmas[-2], sigma_max=sigmas[0])
    factors = [level / sigma for level, sigma in zip(limited.levels, sigmas, strict=False)]
    assert factors == pytest.approx([1.0, *[math.sqrt(1.2)] * (whole.num_steps - 2), 1.0])


def test_the_deviation_after_a_step_is_that_of_noise_and_clean_latents_at_its_level() -> None:
    """(1 - t) x_0 + t eps of the next flow time, or x_0 + sigma eps of the next noise level with its churn."""
    flow, churn = FlowChain([0.9, 0.5, 0.2], "ode"), ChurnChain(karras_sigmas(3).tolist())
    for k, t in enumerate((0.5, 0.2)):
        assert flow.deviation_after(k, 3.0) == pytest.approx(math.sqrt((3 * (1 - t)) ** 2 + t**2))
    for k, sigma in enumerate((*churn.levels[1:], churn.sigmas[-1])):
        assert churn.deviation_after(k, 3.0) == pytest.approx(math.sqrt(9 + sigma**2))
    assert churn.levels[1] > churn.sigmas[1]


LENGTHS: list[Chain] = [FlowChain([1.0, 0.8, 0.5, 0.1], "ode"), ChurnChain(karras_sigmas(6).tolist(), solver="1euler")]


@pytest.mark.parametrize("chain", LENGTHS)
def test_the_length_of_a_step_is_what_it_takes_of_its_level(chain: Chain) -> None:
    """With clean latents of 0 a state is in proportion to its level, churned as it is."""
    one = torch.ones(1, dtype=torch.float64)
    for k in range(chain.num_steps):
        left = chain.step(k, one, 0 * one, None).mean_B_C_T_H_W.item()
        assert chain.length(k) == pytest.approx((1 - left) * chain.levels[k])
