# SPDX-License-Identifier: Apache-2.0
"""LIBERO's tasks, one environment in a process of its own."""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy

from cosmos_predict2.rl.envs.simulators import Floats, libero_suites
from cosmos_predict2.rl.envs.simulators.robosuite_state import CAMERAS, state_of
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

ACTION_DIM = 7  # position, rotation, gripper (-1 open)
CONTROL_HZ = 20
NO_OP = (0.0,) * 6 + (-1.0,)
RESET_CHUNKS = 6  # 3 of eight actions, drawn in software, at another start of a task, 8 to 14 at another task
PLACEMENT_SEED = 0  # of what LIBERO draws when a scene is built: published results have it constant


class LiberoTask:
    """A suite's tasks, or the ``tasks`` of these numbers or names, as the published evaluations play them.

    Each episode begins with ``num_steps_wait`` steps in which the scene comes to rest (reinforcement learning in
    Cosmos-RL and RLinf has 15). ``max_steps`` are null those of the suite. Pictures are turned by 180 degrees, as those
    of the training data are. ``fast_reset`` keeps the compiled scene between the episodes of a task, 0.3 s in place of
    1.5 s; published results have it compiled anew. What an environment draws does not matter here.
    """

    def __init__(
        self,
        suite: str = "libero_spatial",
        tasks: Sequence[int | str] | None = None,
        image_size: int = 256,
        height: int | None = None,
        width: int | None = None,
        num_steps_wait: int = 10,
        max_steps: int | None = None,
        fast_reset: bool = False,
        render_gpu: int = -1,
    ) -> None:
        found = libero_suites.suite(suite)
        if num_steps_wait < 0:
            raise ConfigError(f"num_steps_wait={num_steps_wait} must be at least 0.")
        sizes = dict(image_size=image_size, height=height, width=width, max_steps=max_steps)
        if wrong := {name: number for name, number in sizes.items() if number is not None and number < 1}:
            raise ConfigError(f"{wrong} must be at least 1.")
        self.tasks = libero_suites.chosen_tasks(suite, [str(task) for task in tasks or ()])
        self.num_tasks, self.num_trials, self.action_dim = len(self.tasks), libero_suites.TRIALS, ACTION_DIM
        self.max_steps = max_steps or found.max_steps
        self.metadata = {
            "suite": suite,
            "control_hz": CONTROL_HZ,
            "reset_chunks": RESET_CHUNKS,
            "tasks": [task.language for task in self.tasks],
        }
        self.num_steps_wait, self.fast_reset = num_steps_wait, fast_reset
        self._sizes = dict(
            camera_heights=height or image_size, camera_widths=width or image_size, render_gpu_device_id=render_gpu
        )
        self._env: Any = None
        self._task: libero_suites.Task | None = None
        self._states: Any = None

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        task = self.tasks[task_id % self.num_tasks]
        if task != self._task:
            self._build(task)
        self._env.seed(PLACEMENT_SEED)
        self._lay_out()
        raw = self._env.set_init_state(self._states[trial_id % len(self._states)])
        for _ in range(self.num_steps_wait):
            raw, *_ = self._env.step(list(NO_OP))
        return self._observed(raw)

    def step(self, action: Floats) -> tuple[dict[str, Any], float, bool]:
        if self._env is None:
            raise DataError("No episode of LIBERO has begun: call reset before step.")
        raw, reward, is_done, _ = self._env.step(action)
        return self._observed(raw), float(reward), bool(is_done)

    def close(self) -> None:
        env, self._env, self._task = self._env, None, None
        if env is not None:
            env.close()

    def _build(self, task: libero_suites.Task) -> None:
        """The scene of a task: five to nine seconds."""
        self.close()
        libero_suites.prepare()
        states = libero_suites.initial_states(task)
        module = importlib.import_module("libero.libero.envs")
        self._env = module.OffScreenRenderEnv(
            bddl_file_name=str(task.bddl_file),
            ignore_done=True,  # of robosuite's own horizon: the steps are counted elsewhere
            hard_reset=not self.fast_reset,
            **self._sizes,
        )
        self._task, self._states = task, states

    def _lay_out(self) -> None:
        """A reset of the scene. LIBERO's own goes on for ever where it fails."""
        gripper = self._env.robots[0].gripper
        gripper.current_action = numpy.zeros(gripper.dof)  # which robosuite keeps where it does not compile anew
        while True:
            try:
                self._env.env.reset()
                return
            except Exception as error:  # of places that overlap, which are drawn again
                if type(error).__name__ != "RandomizationError":
                    raise

    def _observed(self, raw: Any) -> dict[str, Any]:
        scene, hand = (numpy.ascontiguousarray(raw[f"{name}_image"][::-1, ::-1]) for name in CAMERAS)
        assert self._task is not None
        return {
            "full_image": scene,
            "wrist_image": hand[None],
            "state": state_of(raw),
            "task_description": self._task.language,
        }
