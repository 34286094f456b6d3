# SPDX-License-Identifier: Apache-2.0
"""Weights that are not finite are told from constants that may be so."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from imaginaire.checkpoint import weights
from imaginaire.checkpoint.checkpointer import StandardCheckpointer
from imaginaire.config.schema import CheckpointConfig
from imaginaire.errors import TrainingError
from imaginaire.optim.ema import PowerEMA
from imaginaire.training.callbacks import CallbackGroup
from imaginaire.training.model import ImaginaireModel


class Masked(ImaginaireModel):
    """Holds what may be in a checkpoint beside weights: masks of -inf, a count, and an average of all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.net.register_buffer("mask", torch.full((2,), -math.inf))
        self.net.register_buffer("count", torch.tensor(7))
        self.net.register_parameter("empty", nn.Parameter(torch.zeros(0)))
        self.net.register_parameter("frozen", nn.Parameter(torch.full((2,), -math.inf), requires_grad=False))
        self.ema = PowerEMA(self.net)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["net.weight", "net.bias", "net_ema.weight"])
def test_each_part_counts_but_for_what_training_does_not_change(tmp_path: Path, part: str, value: float) -> None:
    checkpointer = StandardCheckpointer(CheckpointConfig(), str(tmp_path), callbacks=CallbackGroup)
    model = Masked()
    model.ema.update(model.net, 3)
    assert torch.equal(model.ema.shadows["frozen"], model.net.frozen), "no NaN, of inf - inf"
    checkpointer._require_finite(model, 5)
    model.checkpoint_state()[part].view(-1)[-1] = value
    with pytest.raises(TrainingError, match=rf"Iteration 5 is not saved: 1 of 6 tensors .*such as {part}\. .*Nothing"):
        checkpointer._require_finite(model, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_floating_dtype_is_looked_at(dtype: torch.dtype) -> None:
    fine = torch.linspace(-3, 3, 7).to(dtype)
    broken = torch.tensor([1.0, math.nan, 2.0]).to(dtype)
    found = {"fine": fine, "broken": broken, "whole": torch.tensor([1, 2]), "empty": fine[:0]}
    assert weights.not_finite(found) == ("broken",) and weights.not_finite({}) == ()
