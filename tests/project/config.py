# SPDX-License-Identifier: Apache-2.0
"""The example project made harder to resume.

It draws from every generator, has a callback whose state steers training, two workers, gradient accumulation, bfloat16
with float32 masters, and an average of the weights.
"""

import math
import random
from typing import Any

import numpy
from torch import Tensor

from cosmos_predict2.configs.base.config import make_config as base_config
from examples.minimal.data import Waves
from examples.minimal.model import MinimalModel
from imaginaire.config.compose import register_experiment
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.data.stream import ResumableLoader
from imaginaire.training.callbacks import Callback


class RestlessModel(MinimalModel):
    def training_step(self, batch: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        output, loss = super().training_step(batch, iteration)  # dropout draws from torch
        return output, loss * (1 + 0.1 * random.random()) * (1 + 0.1 * numpy.random.random())


class Sway(Callback):
    """Scales gradients by a number that follows from how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def on_before_optimizer_step(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 0.5 * math.sin(self.calls))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Explosive(MinimalModel):
    """Gives a loss that is not finite at the iterations in ``bad``."""

    bad: tuple[int, ...] = ()

    def training_step(self, batch: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        output, loss = super().training_step(batch, iteration)
        return output, loss * math.inf if iteration + 1 in self.bad else loss


def restless() -> dict[str, Any]:
    return dict(
        defaults=[
            {"override /optimizer": "fusedadamw"},
            {"override /scheduler": "lambdalinear"},
            {"override /ckpt_type": "standard"},
            "_self_",
        ],
        job=dict(project="tests", group="engine", name="restless"),
        model=L(RestlessModel)(width=16),
        optimizer=dict(lr=3e-3),
        scheduler=dict(warm_up_steps=[4], cycle_lengths=[1000], f_min=[0.0]),
        dataloader_train=L(ResumableLoader)(dataset=L(Waves)(num_waves=20, length=60), batch_size=2, num_workers=2),
        dataloader_val=L(ResumableLoader)(dataset=L(Waves)(num_waves=4, length=60), batch_size=2),
        trainer=dict(
            max_iter=11,
            logging_iter=2,
            grad_accum_iter=2,
            run_validation=True,
            validation_iter=4,
            callbacks=dict(sway=L(Sway)()),
        ),
        checkpoint=dict(save_iter=1000),
    )


def make_config() -> Any:
    config = base_config()
    register_experiment("restless", restless)
    return config
