# SPDX-License-Identifier: Apache-2.0
"""Rollouts on Ray: the episodes of this process, in their order; a dead worker costs its own."""

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.vla.episodes import LocalRollout, Starts, Trajectories
from cosmos_predict2.rl.vla.ray_rollout import RayRollout, _network_of, _packed, _Player
from imaginaire import distributed
from imaginaire.errors import ConfigError, DataError, TrainingError

NUM = 12


class Deadly(ToyEnv):
    """Kills its process at the second decision of trial 7, as often as ``folder`` has files for it."""

    def __init__(self, num_envs: int, folder: str) -> None:
        super().__init__(num_envs)
        self.folder = folder

    def chunk_step(self, actions_E_A_D: torch.Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        is_second = self._book.steps[list(env_ids)].max() > 0
        if is_second and 7 in self._book.trial_ids[list(env_ids)] and (lives := sorted(Path(self.folder).iterdir())):
            lives[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().chunk_step(actions_E_A_D, env_ids, execute)


class Broken(ToyEnv):
    def chunk_step(self, *arguments: Any, **options: Any) -> Any:
        raise DataError("the table has three legs")


class Deaf(ToyPolicy):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise DataError("these weights do not fit")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of two cores on this machine, with its sockets where their paths are short enough."""
    ray = pytest.importorskip("ray", reason="rollouts on Ray need the extra rl: pip install -e '.[rl]'")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path has at most 107 characters
    try:
        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def policy() -> Iterator[ToyPolicy]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an actor with one core has
    yield ToyPolicy()
    torch.set_num_threads(num_threads)


def starts(num: int = NUM) -> Starts:
    numbers = list(range(num))
    return Starts([0] * num, numbers, numbers, [100 + i for i in numbers])


def as_tensors(played: Trajectories) -> dict[str, torch.Tensor]:
    return {**played.record, **{key: value for key, value in vars(played).items() if torch.is_tensor(value)}}


@pytest.mark.slow
def test_episodes_on_two_workers_are_those_of_this_process_also_after_an_update(
    cluster: None, policy: ToyPolicy
) -> None:
    env = ToyEnv(NUM // 2)
    local, remote = LocalRollout(policy, env), RayRollout(policy, env, num_workers=2)
    try:
        for _ in range(2):
            remote.sync(policy)
            for mode in ("sample", "greedy"):
                assert_close(
                    as_tensors(remote.collect(starts(), mode)),
                    as_tensors(local.collect(starts(), mode)),
                    rtol=0,
                    atol=0,
                )
            alone = LocalRollout(policy, ToyEnv(NUM)).collect(starts())  # in other company
            together = remote.collect(starts())
            assert_close(together.actions_M_E_A_D, alone.actions_M_E_A_D, rtol=0, atol=1e-5)
            assert torch.equal(together.success_E, alone.success_E)
            with torch.no_grad():
                policy.mlp[0].weight += 0.1
    finally:
        remote.close()


@pytest.mark.long
def test_a_world_model_that_is_refined_is_refined_in_the_workers_too(cluster: None, policy: ToyPolicy) -> None:
    env = WorldModelEnv(imagination_of(device="cpu"), ToyStarts(), ToyDetectorReward(), num_envs=2, max_steps=24)
    local, remote = LocalRollout(policy, env), RayRollout(policy, env, num_workers=2)
    few = starts(4)
    try:
        before = remote.collect(few)
        assert_close(as_tensors(before), as_tensors(local.collect(few)), rtol=0, atol=0)
        net = env.imagination.world.net.requires_grad_()  # as what a refinement trains
        with torch.no_grad():
            for parameter in net.parameters():
                parameter *= 1.05
        remote.sync(policy)
        after = remote.collect(few)
        assert_close(as_tensors(after), as_tensors(local.collect(few)), rtol=0, atol=0)
        assert not torch.equal(after.reward_M_E_A, before.reward_M_E_A)
    finally:
        remote.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_rollout_costs_its_own_episodes(
    cluster: None, policy: ToyPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "once").touch()
    env = Deadly(3, str(tmp_path))
    remote = RayRollout(policy, env, num_workers=2)
    try:
        with caplog.at_level(logging.WARNING):
            played = remote.collect(starts())
        is_lost = torch.zeros(NUM, dtype=torch.bool)
        is_lost[6:9] = True  # the part of trial 7
        assert torch.equal(~played.is_valid_E, is_lost) and (remote.lost, remote.restarts) == (3, 1)
        assert "its 3 episodes are invalid" in caplog.text
        expected = LocalRollout(policy, env).collect(starts())  # which nothing kills any more
        kept = ~is_lost
        assert_close(as_tensors(played.rows(kept)), as_tensors(expected.rows(kept)), rtol=0, atol=0)
        assert not played.success_E[is_lost].any() and not played.executed_M_E_A[:, is_lost].any()
        assert_close(as_tensors(remote.collect(starts())), as_tensors(expected), rtol=0, atol=0)  # it was started again
    finally:
        remote.close()


@pytest.mark.long
def test_workers_that_die_again_and_again_end_the_run(cluster: None, policy: ToyPolicy, tmp_path: Path) -> None:
    for life in range(2):
        (tmp_path / str(life)).touch()
    remote = RayRollout(policy, Deadly(NUM, str(tmp_path)), num_workers=1)
    try:
        with pytest.raises(TrainingError, match="twice in a row"):
            remote.collect(starts())
    finally:
        remote.close()


@pytest.mark.long
def test_an_error_in_a_worker_is_that_error(cluster: None, policy: ToyPolicy) -> None:
    remote = RayRollout(policy, Broken(NUM), num_workers=1)
    try:
        with pytest.raises(DataError, match="three legs"):
            remote.collect(starts())
        assert remote.lost == 0
    finally:
        remote.close()


@pytest.mark.long
def test_workers_that_cannot_take_the_weights_do_not_play_with_others(cluster: None) -> None:
    remote = RayRollout(Deaf(width=16), ToyEnv(NUM), num_workers=1)
    try:
        with pytest.raises(DataError, match="do not fit"):
            remote.collect(starts())
    finally:
        remote.close()


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster: None, policy: ToyPolicy) -> None:
    with pytest.raises(ConfigError, match="num_workers=3 with num_cpus=1 each, but the cluster has 2 CPUs"):
        RayRollout(policy, ToyEnv(2), num_workers=3)
    with pytest.raises(ConfigError, match="ray start --head --num-gpus=N"):
        RayRollout(policy, ToyEnv(2), num_workers=1, num_gpus=1)


@pytest.mark.slow
def test_ranks_divide_the_workers(cluster: None, policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    counts = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        counts.append(RayRollout(policy, ToyEnv(2), num_workers=3, num_cpus=0.5).num_workers)
    assert counts == [2, 1]
    with pytest.raises(ConfigError, match="num_workers is 1, but it is at least 2, one for each of the 2 processes"):
        RayRollout(policy, ToyEnv(2), num_workers=1)


def test_what_is_trained_reaches_the_workers_and_is_in_evaluation_mode_there(policy: ToyPolicy) -> None:
    pytest.importorskip("ray", reason="rollouts on Ray need the extra rl: pip install -e '.[rl]'")
    network = torch.nn.Linear(2, 2)
    env = SimpleNamespace(imagination=SimpleNamespace(world=SimpleNamespace(net=network)))
    player = _Player(_packed((policy, env)), None, "cpu")
    ours: Any = SimpleNamespace(policy=policy.train(), env=env)
    with torch.no_grad():
        for weight in (*policy.parameters(), *network.parameters()):
            weight += 1
    trained = RayRollout._trained(ours)
    player.sync(_packed({name: part.state_dict() for name, part in trained.items()}))
    theirs = {"policy": player.rollout.policy, "world_model": _network_of(player.rollout.env)}
    assert trained.keys() == theirs.keys()
    for name, part in theirs.items():
        assert not part.training
        assert_close(part.state_dict(), trained[name].state_dict())
    network.requires_grad_(False)
    assert list(RayRollout._trained(ours)) == ["policy"]  # what is only held was sent once


def test_a_worker_that_answers_is_forgiven_its_deaths() -> None:
    ray = pytest.importorskip("ray", reason="rollouts on Ray need the extra rl: pip install -e '.[rl]'")
    ours: Any = SimpleNamespace(_ray=SimpleNamespace(exceptions=ray.exceptions, get=bytes), _deaths=[2, 1])
    ours.device = torch.device("cpu")
    assert RayRollout._answer(ours, _packed("episodes"), 0, 4, is_late=False) == "episodes"
    assert ours._deaths == [0, 1]


def test_the_next_worker_in_a_place_has_the_newest_weights() -> None:
    worker = mock.Mock()
    ours: Any = SimpleNamespace(_deaths=[0, 0], max_deaths=1, lost=0, restarts=0, _weights="newest")
    ours._workers, ours._synced, ours._started = ["one", "two"], ["old", "old"], lambda: worker
    RayRollout._bury(ours, 1, 3, "gone")
    worker.sync.remote.assert_called_once_with("newest")
    assert ours._workers == ["one", worker] and ours._synced == ["old", worker.sync.remote.return_value]
    assert (ours.lost, ours.restarts, ours._deaths) == (3, 1, [0, 1])
    with pytest.raises(TrainingError, match=r"died 2 times in a row \(max_deaths=1\): gone"):
        RayRollout._bury(ours, 1, 3, "gone")


def test_without_ray_the_extra_is_named(policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[rl\]'"):
        RayRollout(policy, ToyEnv(2))


@pytest.mark.slow
def test_without_a_cluster_the_command_that_starts_one_is_named(
    policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="rollouts on Ray need the extra rl: pip install -e '.[rl]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # others of this file have one
    monkeypatch.setattr(
        ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("Could not find any running Ray"))
    )
    with pytest.raises(ConfigError, match=r"ray start --head.*start_ray\.sh"):
        RayRollout(policy, ToyEnv(2))
