# SPDX-License-Identifier: Apache-2.0
"""Simulators: single environments that `WorkerEnv` runs in processes of their own. Importing this imports no torch."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy import float32, uint8
from numpy.typing import NDArray

Floats = NDArray[float32]
Pictures = NDArray[uint8]


class TaskEnv(Protocol):
    """One environment of a simulator, with one episode at a time.

    An observation has ``full_image`` uint8 [H, W, 3] and ``wrist_image`` uint8 [V, H, W, 3], both upright, ``state``
    float32 [S] and ``task_description``. The same task, trial, seed and actions lead to the same. Pictures may be drawn
    when they are looked at, which is before the next step.
    """

    num_tasks: int
    num_trials: int  # starts of a task
    max_steps: int
    action_dim: int
    metadata: Mapping[str, Any]  # suite, and chunk where policies decide on several actions at once

    def reset(self, task_id: int, trial_id: int, seed: int) -> Mapping[str, Any]: ...

    def step(self, action: Floats) -> tuple[Mapping[str, Any], float, bool]:
        """Observation, reward and success after one action in [-1, 1]."""

    def close(self) -> None: ...
