# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning makes held-out clips better, and no hack goes unseen: the default runs, one seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policy_learning, rl_learning, second_camera
from cosmos_predict2.released import TINY_VIDEO2WORLD
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.policies.contract import check_policy
from tests.training import records

Row = dict[str, float]


@pytest.fixture(scope="module")
def clips() -> dict[str, Any]:
    return rl_learning.held_out()


@pytest.fixture(scope="module")
def base(clips: dict[str, Any]) -> Row:
    return rl_learning.measure(TINY_VIDEO2WORLD, "auto", clips)


def _after(experiment: str, root: Path, clips: dict[str, Any], *overrides: str) -> Row:
    path, seconds = rl_learning.train(experiment, 0, str(root), list(overrides))
    row = rl_learning.measure(path, "net_ema", clips)
    print(f"{experiment}: {seconds:.0f} core-seconds, {row}")
    return row


def test_spread_is_the_deviation_of_clips_where_the_true_one_moves() -> None:
    still = torch.zeros(1, 3, 3, 4, 4, dtype=torch.uint8)
    true, other = still.clone(), still.clone()
    true[:, :, 1:, 0] = 200  # one row moves
    other[:, :, 1:, 0], other[:, :, 1:, 1] = 20, 90
    assert rl_learning.spread(still, still, true) == 0
    assert rl_learning.spread(still, other, true) == pytest.approx(20 / 2**0.5)


@pytest.mark.long
@pytest.mark.parametrize("experiment", rl_learning.EXPERIMENTS)
def test_the_true_future_as_reward_makes_clips_better_in_every_respect(
    experiment: str, tmp_path: Path, clips: dict[str, Any], base: Row
) -> None:
    assert rl_learning.missed(_after(experiment, tmp_path, clips), base, experiment) == []


@pytest.mark.long
def test_from_chance_nothing_is_learnt(tmp_path: Path, clips: dict[str, Any], base: Row) -> None:
    row = _after("tiny_random_reward_toy_world", tmp_path, clips)
    assert row["psnr"] < base["psnr"] + rl_learning.GAIN_DB / 3
    assert row["gripper_px"] > base["gripper_px"] - rl_learning.GAIN_PX / 2


@pytest.mark.long
def test_the_alarm_sees_a_hack_that_psnr_does_not(tmp_path: Path, clips: dict[str, Any], base: Row) -> None:
    """The puck is imagined near the ring."""
    name = "tiny_hacked_reward_toy_world"
    row = _after(name, tmp_path, clips)
    assert row["puck_px"] > 1.1 * base["puck_px"]
    (folder,) = tmp_path.glob(f"*/*/{name}_0")
    alarms = [record["quality/alarm"] for record in records(folder) if "quality/alarm" in record]
    assert (alarms[0], alarms[-1]) == (0, 1)


@pytest.mark.long
def test_a_reward_without_gradient_or_true_future_teaches_what_it_measures(
    tmp_path: Path, clips: dict[str, Any], base: Row
) -> None:
    """The gripper passes through the puck less than half as deep."""
    row = _after("tiny_physics_reward_toy_world", tmp_path, clips)
    assert row["overlap_px"] < base["overlap_px"] / 2
    assert abs(row["motion"] - 1) <= rl_learning.MOTION


@pytest.mark.long
@pytest.mark.parametrize("experiment", [*policy_learning.EXPERIMENTS, "tiny_vla_grpo_openvla_oft_simulator"])
def test_a_clone_gets_better(experiment: str, tmp_path: Path) -> None:
    policy = policy_learning.clone(policy_learning.policy_of(experiment), 0, tmp_path)
    row = policy_learning.learn(experiment, 0, policy, tmp_path)
    print(row)
    assert policy_learning.missed([row]) == []


@pytest.mark.parametrize("num_views", [1, 2])
def test_the_policy_of_two_cameras_keeps_the_rules_and_one_of_one_sees_the_front_alone(num_views: int) -> None:
    observed, _ = ToyEnv(3, setting="covered", tasks=["reach_ring"]).reset()
    policy = second_camera.CameraPolicy(num_views=num_views)
    check_policy(policy, observed)
    other = observed | {"wrist_image": 255 - observed["wrist_image"]}
    assert torch.equal(policy.see(observed), policy.see(other)) == (num_views == 1)


def test_a_twin_learns_by_world_model_and_reward_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    monkeypatch.setattr(second_camera.machine, "program", lambda root, *given: words.extend(map(str, given)))
    monkeypatch.setattr(second_camera, "truth", lambda root, policy: float("learnt" in policy.name))
    for made in ("cloning/clone_both_1_7/policy", "reinforcement_learning/learnt_both_1_7"):
        (tmp_path / "of_all" / made).mkdir(parents=True)
    assert second_camera.learn(tmp_path, tmp_path / "both", 7, 1) == (0, 1), "before, after"
    asked = ["dataloader_train.dataset.camera=front+wrist", "+model.config.arguments.num_views=1"]
    for key, place in (("starts", "starts_both"), ("reward", "reward_both/reward_model.safetensors")):
        asked.append(f"model.config.env.{key}.path={tmp_path}/{place}")
    assert {*asked} <= {*words} and words.count("trainer.seed=7") == 2


@pytest.mark.long
def test_a_policy_that_needs_the_second_camera_learns_by_it_in_imagination(tmp_path: Path) -> None:
    """The twin sees the camera above alone; world model and reward are the same."""
    second_camera.record(tmp_path)
    world = second_camera.imagine(tmp_path, "both")
    assert second_camera.measure(tmp_path, world)["by_chunk"]["state error"][1] < 0.05
    second_camera.prepare(tmp_path, world)
    (before, after), twin = (second_camera.learn(tmp_path, world, 0, num_views) for num_views in (2, 1))
    print(before, after, *twin)
    assert after - before >= 0.15 and twin[1] - twin[0] < (after - before) / 2
