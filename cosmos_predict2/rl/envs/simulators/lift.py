# SPDX-License-Identifier: Apache-2.0
"""Lift of robosuite: an arm takes a cube off a table. MuJoCo's physics, and all that it needs is in the wheel."""

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy

from cosmos_predict2.rl.envs.simulators import (
    ROBOSUITE_CAMERAS,
    Floats,
    Pictures,
    Seen,
    rendering,
    robosuite_state,
    seeded,
)
from imaginaire.errors import ConfigError, missing_package

SENTENCE = "lift the cube"
ACTION_DIM = 7  # position, rotation, gripper (-1 open)
CONTROL_HZ = 20
SIZE_SEED = 0  # of the cube's size, which is drawn when the scene is built
NUM_TRIALS = 2**31  # each a place of the cube and a posture of the arm


class LiftTask:
    """A Panda arm before a cube, which is to be lifted by 4 cm.

    With ``shaped_reward`` the hand is paid for how near it is (up to .44), for holding the cube (.11 more) and for
    success (1); without, for success alone. A trial is all that is drawn: ``seed`` has no effect.
    """

    num_tasks, num_trials, action_dim = 1, NUM_TRIALS, ACTION_DIM

    def __init__(self, image_size: int = 128, max_steps: int = 100, shaped_reward: bool = True) -> None:
        if image_size < 8 or max_steps < 1:
            raise ConfigError(f"image_size={image_size} must be at least 8, and max_steps={max_steps} at least 1.")
        self.max_steps = max_steps
        self.metadata = {"suite": "lift", "control_hz": CONTROL_HZ}
        self._size = image_size
        rendering.prepare()
        robosuite = _robosuite()
        with seeded(SIZE_SEED):
            self._env: Any = robosuite.make(
                "Lift",
                robots="Panda",
                controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                use_camera_obs=False,  # see `Seen`
                control_freq=CONTROL_HZ,
                has_renderer=False,
                reward_shaping=shaped_reward,
                hard_reset=False,  # which compiles the model anew: 1.3 s
                ignore_done=True,
            )

    def reset(self, task_id: int, trial_id: int, seed: int) -> Mapping[str, Any]:
        gripper = self._env.robots[0].gripper
        gripper.current_action = numpy.zeros(gripper.dof)  # which robosuite keeps from the episode before
        with seeded(trial_id):
            return self._observed(self._env.reset())

    def step(self, action: Floats) -> tuple[Mapping[str, Any], float, bool]:
        raw, reward, _, _ = self._env.step(action)
        return self._observed(raw), float(reward), bool(self._env._check_success())

    def _observed(self, raw: Any) -> Mapping[str, Any]:
        sim, size = self._env.sim, self._size

        def drawn(camera: str) -> Pictures:  # OpenGL begins at the bottom
            return numpy.ascontiguousarray(sim.render(camera_name=camera, width=size, height=size)[::-1])

        pictures = {
            "full_image": lambda: drawn(ROBOSUITE_CAMERAS[0]),
            "wrist_image": lambda: drawn(ROBOSUITE_CAMERAS[1])[None],
        }
        return Seen(pictures, {"state": robosuite_state(raw), "task_description": SENTENCE})

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _robosuite() -> Any:
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it asks for a file of settings, which nobody needs
    try:
        return importlib.import_module("robosuite")
    except ImportError as error:
        if error.name == "robosuite":
            raise missing_package("robosuite", "vla") from error
        raise ConfigError(f"robosuite cannot be imported: {error}. For libGL.so.1: apt-get install libgl1") from error
