# SPDX-License-Identifier: Apache-2.0
"""Validation: fixed noise levels, noise that follows from the sample, and samples that do not count."""

from typing import Any

import pytest
import torch

from imaginaire.errors import ConfigError
from tests.models.parts import make_batch, make_model, part

LEVELS = [0.5, 4.0, 80.0]


def test_each_level_has_the_loss_of_that_level() -> None:
    model = make_model(validation_sigmas=LEVELS)
    batch = make_batch(positions=[0, 1])
    output, loss = model.validation_step(batch, 0)
    generators = model._generators(batch, "validation")
    x0, condition = model.data_and_condition(batch, generators, is_fixed=True)
    epsilon, _ = model.draw_noise(x0, False, generators)
    singly = [model.loss(x0, epsilon, torch.full((2, 1), sigma), condition)[1] for sigma in LEVELS]
    found = [output[name] for name in ("loss_sigma_0.5", "loss_sigma_4", "loss_sigma_80")]
    assert torch.equal(torch.stack(found), torch.stack(singly))
    assert torch.equal(loss, torch.stack(singly).mean())
    assert len({value.item() for value in found}) == 3


def test_every_validation_and_every_batch_draws_the_same_for_a_sample() -> None:
    model = make_model(validation_sigmas=LEVELS)
    batch = make_batch(positions=[7, 40])
    first, again = (model.validation_step(batch, iteration)[1] for iteration in (0, 5))
    alone = [model.validation_step(part(batch, i), 0)[1] for i in range(2)]
    assert torch.equal(first, again)
    torch.testing.assert_close(first, torch.stack(alone).mean())
    assert not torch.equal(first, model.validation_step({**batch, "sample_position": torch.tensor([8, 40])}, 0)[1])


def test_as_few_frames_are_given_as_the_config_allows_or_as_the_batch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(validation_sigmas=LEVELS, max_num_conditional_frames=2)
    given: list[int] = []
    loss = model.loss

    def watched(x0: Any, epsilon: Any, sigma: Any, condition: Any) -> Any:
        given.append(int(condition.condition_mask_B_1_T_H_W[:, 0, :, 0, 0].sum()))
        return loss(x0, epsilon, sigma, condition)

    monkeypatch.setattr(model, "loss", watched)
    for position in range(8):
        model.validation_step(make_batch(size=1, positions=[position]), 0)
    assert set(given) == {1}
    model.validation_step({**make_batch(size=1, positions=[0]), "num_conditional_frames": 2}, 0)
    assert given[-1] == 2
    given.clear()
    for position in range(8):
        model.training_step(make_batch(size=1, positions=[position]), 0)
    assert set(given) == {1, 2}, "training draws every number, the largest too"


def test_without_levels_they_are_drawn_as_in_training() -> None:
    model = make_model(validation_sigmas=[])
    batch = make_batch(positions=[0, 1])
    output, loss = model.validation_step(batch, 0)
    assert output["sigma"].shape == (2, 1)
    assert output["sigma"][0] != output["sigma"][1]
    assert torch.equal(loss, model.validation_step(batch, 3)[1])


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("levels", [LEVELS, []], ids=["fixed", "drawn"])
def test_samples_of_weight_zero_do_not_count(reduce: str, levels: list[float]) -> None:
    model = make_model(validation_sigmas=levels, loss_reduce=reduce)
    batch = make_batch(positions=[3, 0])
    weighted, loss = model.validation_step({**batch, "sample_weight": torch.tensor([1.0, 0.0])}, 0)
    single, expected = model.validation_step(part(batch, 0), 0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weighted["edm_loss"], single["edm_loss"])
    nothing, none = model.validation_step({**batch, "sample_weight": torch.zeros(2)}, 0)
    assert none == 0 and torch.isfinite(nothing["edm_loss"])


@pytest.mark.parametrize(
    ("levels", "text"), [([0.0, 1.0], "above 0"), ([1.0, float("inf")], "above 0"), ([2.0, 2.0], "a level twice")]
)
def test_levels_that_are_none_are_refused(levels: list[float], text: str) -> None:
    with pytest.raises(ConfigError, match=f"validation_sigmas.*{text}"):
        make_model(validation_sigmas=levels)
