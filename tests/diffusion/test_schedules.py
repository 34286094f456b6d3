# SPDX-License-Identifier: Apache-2.0
"""Lists of noise levels."""

import pytest
import torch

from cosmos_predict2.diffusion.schedules import flow_sigmas, karras_sigmas


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
