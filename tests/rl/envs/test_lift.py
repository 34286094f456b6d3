# SPDX-License-Identifier: Apache-2.0
"""robosuite's Lift in workers: real physics, drawn without a screen."""

from functools import partial

import pytest

from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.simulators.lift import LiftTask
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv

pytest.importorskip("robosuite", reason="robosuite is not installed: pip install -e '.[vla]'")


@pytest.mark.slow
def test_lift_keeps_the_contract() -> None:
    check_environment(WorkerEnv(partial(LiftTask, image_size=32, max_steps=4), 3, chunk=2, render="auto"))
