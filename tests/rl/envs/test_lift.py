# SPDX-License-Identifier: Apache-2.0
"""robosuite's Lift in workers: real physics, drawn without a screen, and policies that learn in it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.simulators.lift import LiftTask
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.openvla.tiny import write_tiny as write_openvla
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.pi05.tiny import write_tiny as write_pi05
from tests.training import records, run_dir, saved, train

pytest.importorskip("robosuite", reason="robosuite is not installed: pip install -e '.[vla]'")

BASE = "cosmos_predict2/configs/base/config.py"
SMALL = [  # two groups of two episodes of two decisions, one update
    *("job.project=tests", "job.group=engine", "job.name=lift", "trainer.max_iter=1", "trainer.logging_iter=1"),
    *("model.config.rl.group_size=2", "model.config.rl.minibatches=1", "model.config.env.num_envs=2"),
    *("model.config.env.make.image_size=56", "model.config.env.make.max_steps=8", "model.config.env.chunk=4"),
    *("dataloader_train.batch_size=2", "checkpoint.save_iter=1"),
]


@pytest.mark.slow
def test_lift_keeps_the_contract() -> None:
    check_environment(WorkerEnv(partial(LiftTask, image_size=32, max_steps=4), 3, chunk=2, render="auto"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_a_tiny_policy_takes_an_update_in_lift(name: str, tmp_path: Path) -> None:
    path, sizes = tmp_path / "policy", dict(action_dim=7, action_chunk=4)
    statistics = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    before: Any
    if name == "openvla_oft":
        write_openvla(path, **sizes, sentences=["lift the cube"])  # type: ignore[arg-type]
        before = OpenVLAPolicy(str(path))
    else:
        of_lift = {"state": {"q01": [-1.0] * 8, "q99": [1.0] * 8}, "actions": statistics}
        write_pi05(path, norm_stats=of_lift, action_env_dim=7, action_horizon=4)
        before = Pi05Policy(str(path))
    words = [f"experiment=tiny_vla_grpo_{name}_lift", f"model.config.policy.path={path}", *SMALL]
    assert train(tmp_path, words, config=BASE) == 0
    (record,) = records(run_dir(tmp_path, "lift"))
    assert record["train/grad_norm"] > 0 and record["train/valid_rate"] == 1 and record["train/reward_std"] > 0
    after = saved(tmp_path, "lift")["model"]
    moved = [k for k, value in before.state_dict().items() if not torch.equal(after[f"net.{k}"], value)]
    assert len(moved) > 20
