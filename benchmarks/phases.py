# SPDX-License-Identifier: Apache-2.0
"""Seconds of the trainer's phases, and what experiences of reinforcement learning have in common."""

import time
from typing import Any, ClassVar

from benchmarks import machine
from cosmos_predict2.models.passes import Passes
from cosmos_predict2.tools.plan.workload import Workload
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import Callback

CONFIG = "cosmos_predict2/configs/base/config.py"
RL = "model.config.rl"
QUIET = ["ckpt_type=dummy", "trainer.run_validation=false"]
ROWS = {  # what is shown -> phases of the trainer
    "data": ("data",),
    "rollout": ("rollout",),
    "reward": ("reward", "reward_wait"),
    "gradient": ("forward", "backward", "comm"),
    "update": ("optimizer",),
}


def passes_of(work: Workload) -> Passes:
    """The passes of an experience; raises for an experiment that makes none."""
    if work.passes is None:
        raise ConfigError(
            "The experiment makes no clips to learn from. --experiment takes one that learns from rewards of clips,"
            " such as tiny_flow_grpo_toy_world."
        )
    return work.passes


class PhaseClock(Callback):
    """Seconds of each phase of each step, and of the whole step."""

    steps: ClassVar[list[dict[str, float]]] = []

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._mark = time.perf_counter()

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        machine.wait()
        phases, now = self.trainer.timers.read_and_reset(), time.perf_counter()
        self.steps.append({**phases, "all": now - self._mark})
        self._mark = now
