# SPDX-License-Identifier: Apache-2.0
"""BEHAVIOR-1K on a stand-in for OmniGibson: the real one needs a GPU with RT cores."""

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.contract import check_environment, check_frames
from cosmos_predict2.rl.envs.simulators import omnigibson
from cosmos_predict2.rl.envs.simulators.behavior import BehaviorEnv
from cosmos_predict2.rl.episodes.policy_evaluation import evaluate, film, held_out_starts
from cosmos_predict2.rl.interfaces import Decision
from imaginaire.errors import ConfigError, DataError
from tests.rl.envs import fake_omnigibson as fake

SMALL: dict[str, Any] = dict(height=6, width=8, chunk=3)
RADIO, TRASH = 0, 1
FORWARD = torch.zeros(1, 3, 23).index_fill_(2, torch.tensor([0]), 0.15)  # .005 m in a step


@pytest.fixture
def og(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = signal.getsignal(signal.SIGINT)
    omnigibson.simulator.cache_clear()
    yield fake.install(monkeypatch, tmp_path)
    omnigibson.simulator.cache_clear()
    assert signal.getsignal(signal.SIGINT) is before


def _reset(env: BehaviorEnv, **options: Any) -> Any:
    return env.reset(options={key: [value] for key, value in options.items()})


def test_it_keeps_the_contract(og: Any) -> None:
    env = BehaviorEnv(num_envs=3, tasks=list(fake.TASKS)[:2], renders=fake.LATE, keep_frames=True, **SMALL)
    check_environment(env)
    env.views = ("head", "left", "right")
    check_frames(env, 0)


def test_policies_are_shown_the_cameras_and_23_numbers(og: Any) -> None:
    env = BehaviorEnv(**SMALL)
    seen, _ = _reset(env, task_ids=RADIO, trial_ids=2)
    assert seen["task_description"] == [fake.TASKS["turning_on_radio"]]
    assert seen["full_image"].shape == (1, 6, 8, 3) and seen["wrist_image"].shape == (1, 2, 6, 8, 3)
    assert [seen["full_image"][0, -1, -1, c] for c in range(3)] == [140] * 3
    assert seen["wrist_image"][0, :, -1, -1, 0].tolist() == [100, 120]  # left, right
    actions = torch.arange(23.0)[None, None] / 100
    state = env.chunk_step(actions)[0]["state"][0]
    # base, trunk, arms and then both grippers, although actions have each gripper behind its arm
    order = [*range(14), *range(15, 22), 14, 22]
    reached = 1 - 0.7  # of the way to where the action sends the joints
    assert torch.allclose(state, reached * actions[0, 0][order])


def test_pictures_have_the_published_sizes_or_those_that_are_asked_for(og: Any) -> None:
    seen, _ = _reset(BehaviorEnv(), task_ids=RADIO)
    assert seen["full_image"].shape == (1, 720, 720, 3) and seen["wrist_image"].shape == (1, 2, 480, 480, 3)
    cameras = omnigibson.simulator()._envs[0].robots[0].sensors.items()
    assert {name: vars(camera).get("horizontal_aperture") for name, camera in cameras} == {
        "robot_r1:left_realsense_link:Camera:0": None,
        "robot_r1:right_realsense_link:Camera:0": None,
        "robot_r1:zed_link:Camera:0": 40.0,
    }
    wrong: tuple[dict[str, Any], ...] = (dict(height=6), dict(height=0, width=8), dict(renders=0))
    for size in wrong:
        with pytest.raises(ConfigError, match=next(iter(size))):
            BehaviorEnv(**size)


def test_an_episode_begins_as_in_the_challenge(og: Any) -> None:
    env = BehaviorEnv(num_envs=2, **SMALL)
    seen, info = env.reset(options={"task_ids": [RADIO, RADIO], "trial_ids": [3, 24], "seeds": [1, 2]})
    instances = [fake.INSTANCES[RADIO][trial] for trial in (3, 4)]  # of 20 starts
    scenes = og.sim.scenes
    for scene, instance in zip(scenes, instances):
        assert scene.values[0] == pytest.approx(instance / 100) and torch.equal(scene.file, scene.values)
        assert scene.values[47] == pytest.approx(instance + 0.125)  # kept still from the second step on
        assert scene.metadata["robot_poses"]
    assert seen["full_image"][:, 0, 0, 0].tolist() == [int(instance) % 256 for instance in instances]  # no late picture
    log = og.sim.log
    begun = len(log) - log[::-1].index("stop") - 1
    assert log[begun : begun + 2] == ["stop", "play"] and log[-29:] == ["physics"] * 25 + ["render"] * 4
    assert info["active"].all()


def test_each_task_has_the_length_that_humans_need_twice(og: Any) -> None:
    names = list(fake.TASKS)
    env = BehaviorEnv(num_envs=3, tasks=names[:2], **SMALL)
    assert env.metadata["max_steps"] == 8 and env.metadata["tasks"] == names[:2]
    env.reset(options={"task_ids": [0, 1, 1]})
    ends = []
    for _ in range(3):
        *_, truncated, info = env.chunk_step(torch.zeros(3, 3, 23))
        ends.append(truncated.nonzero().tolist())
    assert ends == [[], [[1, 2], [2, 2]], [[0, 1]]] and info["finish_step"].tolist() == [8, 6, 6]
    assert BehaviorEnv(**SMALL).metadata["max_steps"] == 2 * 2000  # nobody has done the third
    assert BehaviorEnv(max_steps=5, **SMALL).metadata["max_steps"] == 5


def test_a_success_ends_an_episode_and_stays_one(og: Any) -> None:
    env = BehaviorEnv(keep_frames=True, renders=fake.LATE, **SMALL)
    _reset(env, task_ids=RADIO)
    _, reward, terminated, _, _ = env.chunk_step(FORWARD)
    assert not reward.any() and not terminated.any()
    last, reward, terminated, truncated, info = env.chunk_step(FORWARD)
    assert reward.tolist() == [[0, 1, 0]] and terminated.tolist() == [[False, True, False]] and not truncated.any()
    assert info["success"].all() and info["finish_step"].tolist() == [5] and info["frames"].shape == (1, 3, 6, 8, 3)
    assert torch.equal(info["frames"][0, 2], last["full_image"][0])
    steps = len(og.sim.log)
    for _ in range(3):  # beyond its last step
        *_, truncated, info = env.chunk_step(-FORWARD)
    assert info["success"].all() and not truncated.any() and len(og.sim.log) == steps
    shaped = BehaviorEnv(shaped_reward=True, **SMALL)
    _reset(shaped, task_ids=RADIO)
    assert shaped.chunk_step(FORWARD)[1].tolist() == [pytest.approx([-0.017, -0.012, -0.007], abs=1e-5)]
    assert "frames" not in shaped.chunk_step(FORWARD)[4]


@pytest.mark.parametrize("another", ["begins", "goes on"])
def test_an_episode_stays_where_it_is_while_another_moves(og: Any, another: str) -> None:
    def played(disturbed: bool) -> Any:
        env = BehaviorEnv(num_envs=2, renders=fake.LATE, **SMALL)
        env.reset(options={"task_ids": [RADIO, RADIO], "trial_ids": [0, 1]})
        env.chunk_step(FORWARD.expand(2, -1, -1), execute=1)
        if disturbed and another == "begins":  # a stop, 25 steps of physics, and other scenes in place of these
            env.reset(options={"env_ids": [1], "task_ids": [TRASH], "trial_ids": [5]})
        if disturbed:
            env.chunk_step(FORWARD, env_ids=[1])
        return env.chunk_step(FORWARD, env_ids=[0])

    (seen, *values, _), (expected, *others, _) = played(True), played(False)
    assert torch.equal(seen["full_image"], expected["full_image"])
    assert torch.allclose(seen["state"], expected["state"])
    assert all(torch.equal(value, other) for value, other in zip(values, others))


class Drives:
    """A policy that drives on, in the second task alone."""

    action_dim, chunk = 23, 3

    def act(self, observation: Any, **_: Any) -> Decision:
        drives = [sentence == fake.TASKS["picking_up_trash"] for sentence in observation["task_description"]]
        actions = torch.tensor(drives)[:, None, None] * FORWARD
        return Decision(actions, {"drives": torch.tensor(drives)})


def test_a_policy_is_evaluated_by_the_name_of_the_suite(og: Any) -> None:
    names = list(fake.TASKS)[:2]
    place = suites.find("b1k", names, image_size=8)
    assert (place.episodes, place.at_once, place.tasks) == (20, 1, names)
    policy: Any = Drives()
    env, starts = place.env(2, policy), held_out_starts(4, 2, seed=0, in_blocks=True)
    found = evaluate(policy, env, starts, names)
    assert [(rate.successes, rate.episodes) for rate in found.tasks.values()] == [(0, 2), (2, 2)]
    pictures = film(env, starts, found.played.actions_M_E_A_D)
    assert pictures.shape == (4, 3, 1 + 9, 8, 8)
    assert suites.find("b1k").tasks == list(fake.TASKS)
    policy.action_dim = 7
    with pytest.raises(ConfigError, match="decides on 7 numbers"):
        place.env(1, policy)
    with pytest.raises(ConfigError, match="--num_steps_wait has no meaning"):
        suites.find("b1k", num_steps_wait=3)


def test_two_share_the_simulator_by_turns(og: Any) -> None:
    first, second = BehaviorEnv(**SMALL), BehaviorEnv(num_envs=2, **SMALL)
    _reset(first, task_ids=RADIO)
    second.reset(options={"task_ids": [RADIO, RADIO]})
    assert len(og.sim.scenes) == 2
    with pytest.raises(DataError, match="never reset"):
        first.chunk_step(FORWARD)
    assert second.chunk_step(FORWARD.expand(2, -1, -1))[4]["executed"].all()
    first.close()  # which is not its owner
    assert og.sim.is_playing
    second.close()
    assert og.sim.is_stopped()


def test_it_lives_in_the_main_process(og: Any) -> None:
    with mock.patch.object(multiprocessing, "parent_process", lambda: "there is one"):
        with pytest.raises(ConfigError, match="main process"):
            BehaviorEnv().reset()


def test_without_omnigibson_the_cure_is_named() -> None:
    omnigibson.simulator.cache_clear()
    with pytest.raises(ConfigError, match=r"(?s)not installed.*git clone -b v3.7.2.*RT cores"):
        BehaviorEnv().reset()


def test_what_is_missing_or_damaged_is_named(og: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'turning_on_the_radio'.*Did you mean turning_on_radio"):
        BehaviorEnv(tasks=["turning_on_the_radio"]).reset()
    env = BehaviorEnv(instances=[301, 999], **SMALL)
    with pytest.raises(DataError, match="Start 999 of turning_on_radio"):
        _reset(env, task_ids=RADIO, trial_ids=1)
    (tmp_path / "2025-challenge-demos" / "meta" / "tasks.jsonl").rename(tmp_path / "table.jsonl")
    with pytest.raises(DataError, match=r"hf download behavior-1k/2025-challenge-demos meta/tasks.jsonl"):
        BehaviorEnv().reset()
    assert len(BehaviorEnv(task_table=str(tmp_path / "table.jsonl")).metadata["tasks"]) == 3
    (tmp_path / "short.jsonl").write_text('{"task_index": 0}')
    with pytest.raises(DataError, match=r"short.jsonl is missing or damaged .'task_name'"):
        BehaviorEnv(task_table=str(tmp_path / "short.jsonl")).reset()
    csv = tmp_path / "2025-challenge-task-instances" / "metadata" / "test_instances.csv"
    csv.write_text("task,name,instances\n0,turning_on_radio,301\n")
    with pytest.raises(DataError, match="no starts of picking_up_trash"):
        BehaviorEnv(task_table=str(tmp_path / "table.jsonl")).reset()
