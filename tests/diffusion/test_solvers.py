# SPDX-License-Identifier: Apache-2.0
"""The sampling loop, what every solver keeps to, and lists of noise levels; their numbers are in tests/parity."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion.rectified_flow import flow_sigmas, karras_sigmas
from cosmos_predict2.diffusion.solvers import SOLVERS, AdamsBashforth2, SameNoise, Step, Stepper, UniPC, guide, sample

SHAPE = (2, 3, 2, 4, 4)


def _noise(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gaussian(x: Tensor, sigma_B: Tensor) -> Tensor:
    """The best estimate of data from N(0.7, 0.5^2)."""
    sigma = sigma_B[:, None, None, None, None]
    return (0.25 * x + sigma**2 * 0.7) / (0.25 + sigma**2)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_last_step_to_zero_gives_the_last_estimate(name: str) -> None:
    seen: list[Tensor] = []

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        assert (sigma_B > 0).all()
        seen.append(x * 0.3 + 0.1)
        return seen[-1]

    result = sample(denoise, _noise(), torch.tensor([0.9, 0.5, 0.2, 0.0]), name)
    torch.testing.assert_close(result, seen[-1])


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    ("noise", "inside"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_dtypes(name: str, noise: torch.dtype, inside: torch.dtype) -> None:
    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        assert x.dtype == sigma_B.dtype == inside and sigma_B.shape == (2,)
        return x * 0.5

    steps: list[Step] = []
    levels = torch.tensor([0.9, 0.5, 0.2, 0.1])
    result = sample(denoise, _noise(dtype=noise), levels, name, lambda i, step: steps.append(step))
    assert result.dtype == inside
    state = inside if name in ("2ab", "unipc") else torch.float64
    assert {step.x_next_B_C_T_H_W.dtype for step in steps} == {state}
    assert isinstance(steps[0].sigma, float)


@pytest.mark.parametrize(
    ("name", "calls"), [("2ab", 6), ("1euler", 6), ("2mid", 11), ("2mid_stable", 11), ("2heun_edm", 11), ("unipc", 6)]
)
def test_number_of_evaluations(name: str, calls: int) -> None:
    levels_seen: list[float] = []

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        levels_seen.append(sigma_B[0].item())
        return x * 0

    levels = torch.tensor([0.9, 0.7, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64)
    sample(denoise, _noise(), levels, name)
    assert len(levels_seen) == calls and levels_seen[-1] == 0.1


def test_on_step_sees_the_whole_trajectory() -> None:
    steps: list[tuple[int, Step]] = []
    start, levels = _noise(), torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    sample(gaussian, start, levels, on_step=lambda i, step: steps.append((i, step)))
    assert [i for i, _ in steps] == [0, 1]
    (_, first), (_, second) = steps
    assert torch.equal(first.x_B_C_T_H_W, start)
    assert torch.equal(second.x_B_C_T_H_W, first.x_next_B_C_T_H_W)
    assert [(step.sigma, step.sigma_next) for _, step in steps] == [(4.0, 2.0), (2.0, 1.0)]
    expected = gaussian(first.x_next_B_C_T_H_W, torch.full((2,), 2.0, dtype=torch.float64))
    assert torch.equal(second.x0_B_C_T_H_W, expected)


def test_the_same_noise_is_put_back_at_the_next_time() -> None:
    noise, x0 = torch.ones(2, 1, 1, 1, 1), torch.full((2, 1, 1, 1, 1), 5.0)
    step = SameNoise(noise).step(torch.zeros_like(x0), x0, 0.8, 0.25)
    torch.testing.assert_close(step.x_next_B_C_T_H_W, (0.25 * noise + 0.75 * x0).double())
    assert (step.sigma, step.sigma_next) == (0.8, 0.25)


def test_a_scale_of_zero_is_no_guidance() -> None:
    conditional, unconditional = _noise(0), _noise(1)
    assert torch.equal(guide(conditional, unconditional, 0.0), conditional)
    torch.testing.assert_close(guide(conditional, unconditional, -1.0), unconditional)
    torch.testing.assert_close(
        guide(conditional, unconditional, 7.0), unconditional + 8 * (conditional - unconditional)
    )


@pytest.mark.parametrize("levels", [[0.0], [1.0, 1.0], [1.0, 2.0], [1.0, -0.5], []])
def test_levels_that_do_not_decrease_are_refused(levels: list[float]) -> None:
    with pytest.raises(ValueError, match="decreasing"):
        sample(gaussian, _noise(), torch.tensor(levels))


def test_an_unknown_solver_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'3ab'.*2ab.*unipc"):
        sample(gaussian, _noise(), torch.tensor([2.0, 1.0]), "3ab")


@pytest.mark.parametrize("make", [AdamsBashforth2, UniPC])
def test_a_stepper_with_history_serves_one_run(make: Callable[[], Stepper]) -> None:
    stepper, levels = make(), torch.tensor([0.9, 0.5, 0.2])
    sample(gaussian, _noise(), levels, stepper)
    with pytest.raises(ValueError, match="served a run"):
        sample(gaussian, _noise(), levels, stepper)


@pytest.mark.parametrize("num_steps", [1, 6, 35])
@pytest.mark.parametrize("order", [1.0, 7.0])
def test_levels_run_down_between_the_given_ends(num_steps: int, order: float) -> None:
    sigmas = karras_sigmas(num_steps, 0.01, 50.0, order)
    assert sigmas.shape == (num_steps + 1,) and sigmas.dtype == torch.float64
    assert (sigmas.diff() < 0).all()
    assert sigmas[0].item() == pytest.approx(50, rel=1e-12) and sigmas[-1].item() == pytest.approx(0.01, rel=1e-9)
    torch.testing.assert_close((sigmas ** (1 / order)).diff().diff(), torch.zeros(num_steps - 1).double())


def test_the_last_level_may_be_none() -> None:
    assert karras_sigmas(4, 0.0, 80.0)[-1] == 0


@pytest.mark.parametrize(("kind", "evaluations"), [("shift", 35), ("karras", 36)])
def test_flow_lists_end_in_zero_and_tell_whole_timesteps(kind: str, evaluations: int) -> None:
    schedule = flow_sigmas(35, kind)  # type: ignore[arg-type]
    assert schedule.sigmas.shape == (evaluations + 1,) and schedule.timesteps.shape == (evaluations,)
    assert schedule.sigmas[0] < 1 and schedule.sigmas[-1] == 0 and (schedule.sigmas.diff() < 0).all()
    assert torch.equal(schedule.sigmas.float().double(), schedule.sigmas)
    gap = schedule.sigmas[:-1] * 1000 - schedule.timesteps
    assert gap.min() > -1e-4 and gap.max() < 1


@pytest.mark.parametrize("num_steps", [1, 3, 10, 35, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_timesteps_are_found_by_level(num_steps: int, dtype: torch.dtype) -> None:
    schedule = flow_sigmas(num_steps, shift=1.0)  # the shift with most levels on whole timesteps
    found = schedule.timesteps_at(schedule.sigmas[:-1].to(dtype))
    assert found.dtype == dtype and found.tolist() == schedule.timesteps.tolist()
    for factor in (0.9999, 1.0001):  # as another precision has them
        assert schedule.timesteps_at(factor * schedule.sigmas[:-1].to(dtype)).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: karras_sigmas(0), "at least 1 step"),
        (lambda: karras_sigmas(5, 2.0, 1.0), "sigma_max to sigma_min"),
        (lambda: flow_sigmas(5, "linear"), "'linear'"),  # type: ignore[arg-type]
        (lambda: flow_sigmas(0), "at least 1 step"),
    ],
)
def test_wrong_settings_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
