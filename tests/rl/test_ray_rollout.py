# SPDX-License-Identifier: Apache-2.0
"""Rollouts on Ray: the episodes of this process, in their order; a dead worker costs its own."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardedOver
from torch.testing import assert_close

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes import weight_shards
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Trajectories
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.ray_rollout import RayRollout, _modules, _packed, _Player, _unpacked
from cosmos_predict2.rl.episodes.weight_shards import (
    CHANGING,
    FROZEN,
    SharedObjects,
    fill,
    reference_table,
    shards_of,
    without_weights,
)
from cosmos_predict2.rl.policies.network import deciding
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from imaginaire import distributed
from imaginaire.config import L
from imaginaire.distributed.parallel import init_dims
from imaginaire.errors import ConfigError, DataError, TrainingError
from tests.multiprocess import run_distributed
from tests.programs import HANG_S, warm_python
from tests.rl.vla_runs import starts, tensors_of

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
    def train(self, mode: bool = True) -> Any:
        raise DataError("these weights do not fit")


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="rollouts on Ray need the extra rl: pip install -e '.[rl]'")


# A worker imports torch and more, for most of the time that it is there: it is forked where that is imported.
INTERPRETER = """#!/bin/sh
case "$1" in */default_worker.py) exec {warm_python} "$@" ;; *) exec {python} "$@" ;; esac
"""


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[None]:
    """A Ray of two cores on this machine, with its sockets where their paths are short enough."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path has at most 107 characters
    interpreter = Path(folder) / "python"
    interpreter.write_text(INTERPRETER.format(python=sys.executable, warm_python=warm_python()))
    interpreter.chmod(0o700)
    try:
        with mock.patch.object(sys, "executable", str(interpreter)):
            _begin(ray, address="local", num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _begin(ray: Any, **options: Any) -> None:
    """`ray.init`, which waits 30 s for its own processes, and again where a busy machine takes longer."""
    limits = dict(agent_register_timeout_ms=int(1000 * HANG_S), worker_register_timeout_seconds=int(HANG_S))
    ends = time.monotonic() + HANG_S
    while True:
        try:
            ray.init(**options, _system_config=limits)
            return
        except Exception as error:  # Ray has no class of its own for it
            ray.shutdown()
            if "timed out during startup" not in str(error) or time.monotonic() > ends:
                raise


@pytest.fixture
def policy() -> Iterator[ToyPolicy]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an actor with one core has
    yield ToyPolicy()
    torch.set_num_threads(num_threads)


@pytest.mark.slow
def test_episodes_on_two_workers_are_those_of_this_process_and_a_killed_one_costs_its_own(
    cluster: None, policy: ToyPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after an update; the worker that takes the place of the killed one has the newest weights."""
    env = Deadly(NUM // 4, str(tmp_path))
    local = LocalRollout(policy, env)
    with closing(RayRollout(policy, env, num_workers=2)) as remote:
        for mode in ("greedy", "sample"):
            remote.sync(policy)
            together, expected = (each.collect(starts(NUM), mode) for each in (remote, local))
            assert_close(tensors_of(together), tensors_of(expected), rtol=0, atol=0)
            alone = LocalRollout(policy, ToyEnv(NUM)).collect(starts(NUM), mode)  # in other company
            assert_close(together.actions_M_E_A_D, alone.actions_M_E_A_D, rtol=0, atol=1e-5)
            assert torch.equal(together.success_E, alone.success_E)
            with torch.no_grad():
                policy.mlp[0].weight += 0.1
        remote.sync(policy)
        (tmp_path / "once").touch()
        with caplog.at_level(logging.WARNING):
            played = remote.collect(starts(NUM))
        is_lost = torch.zeros(NUM, dtype=torch.bool)
        is_lost[6:9] = True  # the part of trial 7
        assert torch.equal(~played.is_valid_E, is_lost) and (remote.lost, remote.restarts) == (3, 1)
        assert "its 3 episodes are invalid" in caplog.text
        expected = tensors_of(whole := local.collect(starts(NUM)))  # which nothing kills any more
        kept = (~is_lost).nonzero().flatten()
        assert_close(tensors_of(played.rows(kept)), tensors_of(whole.rows(kept)), rtol=0, atol=0)
        assert not played.success_E[is_lost].any() and not played.executed_M_E_A[:, is_lost].any()
        assert_close(tensors_of(remote.collect(starts(NUM))), expected, rtol=0, atol=0)  # it was started again


@pytest.mark.long
def test_a_world_model_that_is_refined_is_refined_in_the_workers_too(cluster: None, policy: ToyPolicy) -> None:
    env = WorldModelEnv(imagination_of(device="cpu"), ToyStarts(), ToyDetectorReward(), num_envs=2, max_steps=24)
    local = LocalRollout(policy, env)
    few = starts(4)
    with closing(RayRollout(policy, env, num_workers=2)) as remote:
        before = remote.collect(few)
        assert_close(tensors_of(before), tensors_of(local.collect(few)), rtol=0, atol=0)
        net = env.imagination.world.net.requires_grad_()  # as what a refinement trains
        with torch.no_grad():
            for parameter in net.parameters():
                parameter *= 1.05
        remote.sync(policy)
        after = remote.collect(few)
        assert_close(tensors_of(after), tensors_of(local.collect(few)), rtol=0, atol=0)
        assert not torch.equal(after.reward_M_E_A, before.reward_M_E_A)


@pytest.mark.long
def test_workers_that_die_again_and_again_end_the_run(cluster: None, policy: ToyPolicy, tmp_path: Path) -> None:
    for life in range(2):
        (tmp_path / str(life)).touch()
    with closing(RayRollout(policy, Deadly(NUM, str(tmp_path)), num_workers=1)) as remote:
        with pytest.raises(TrainingError, match="twice in a row"):
            remote.collect(starts(NUM))


@pytest.mark.long
def test_an_error_in_a_worker_is_that_error(cluster: None, policy: ToyPolicy) -> None:
    with closing(RayRollout(policy, Broken(NUM), num_workers=1)) as remote:
        with pytest.raises(DataError, match="three legs"):
            remote.collect(starts(NUM))
        assert remote.lost == 0


@pytest.mark.long
def test_workers_that_cannot_take_the_weights_do_not_play_with_others(cluster: None) -> None:
    with closing(RayRollout(Deaf(width=16), ToyEnv(NUM), num_workers=1)) as remote:
        with pytest.raises(DataError, match="do not fit"):
            remote.collect(starts(NUM))


def expert(root: Path) -> Any:
    """Adapters of the action expert are trained, and its noise follows from the trainer's step."""
    options: dict[str, Any] = dict(noise_anneal=True, noise_params=[0.3, 0.1, 4], noise_method="flow_sde")
    return L("cosmos_predict2.rl.policies.pi05.policy.Pi05Policy")(
        path=str(root / "pi05"), train_expert_only=True, lora_rank=2, **options
    )


def trained_in_shards(address: str, root: Path) -> list[Trajectories]:
    """Episodes by workers before a step and after it, of the first rank by one that was started again besides; and what
    they are here, after the step."""
    torch.manual_seed(0)
    rollout = L(RayRollout)(num_workers=2, address=address)
    config = dict(policy=expert(root), env=L(ToyEnv)(num_envs=4), rollout=rollout, fsdp_shard_size=-1, recompute=True)
    model = VLAGRPOModel(VLAGRPOConfig(rl=VLARLConfig(group_size=2), **config))
    model.parallelize(init_dims())
    source: Any = model.source
    few, first = starts(4), distributed.rank() * 2
    gathers = count_gathers(model.net)
    trials = torch.arange(first, first + 2)
    decided = next(model.train_batches([{"task_id": trials * 0, "trial_id": trials, "sample_position": trials}]))
    assert len(gathers) == 1  # for the probabilities before the update: nobody decided here
    found = [source.collect(few)]
    _, loss = model.training_step(decided, 0)
    loss.backward()
    torch.optim.SGD([weight for weight in model.net.parameters() if weight.requires_grad], lr=1.0).step()
    model.on_before_zero_grad(None, None, 3)
    source.sync(model.policy)
    found.append(source.collect(few))
    if distributed.is_rank0():  # the other one is not there to give its shards again
        source._ray.kill(source._workers[0])
        found.append(source.collect(few))
        assert source.restarts == 1
    with deciding(model.net):
        found.append(LocalRollout(model.policy, ToyEnv(4)).collect(few))
    return found


def count_gathers(net: Any) -> list[int]:
    """Grows with every `unshard` of the whole network."""
    found: list[int] = []
    root = next(module for module in net.modules() if hasattr(module, "unshard"))
    own = root.unshard
    root.unshard = lambda *args, **kwargs: (found.append(1), own(*args, **kwargs))[1]
    return found


@pytest.mark.long
def test_workers_of_a_sharded_policy_have_its_weights_from_all_ranks(ray: Any, cluster: None, tmp_path: Path) -> None:
    from cosmos_predict2.rl.policies.pi05.tiny import write_tiny

    write_tiny(tmp_path / "pi05", action_horizon=4, hold=3)
    address = ray.get_runtime_context().gcs_address
    torch.manual_seed(0)
    config = VLAGRPOConfig(policy=expert(tmp_path), env=L(ToyEnv)(num_envs=4))
    whole = tensors_of(LocalRollout(VLAGRPOModel(config).policy, ToyEnv(4)).collect(starts(4)))
    for before, *afterwards, here in run_distributed(trained_in_shards, world_size=2, args=(address, tmp_path)):
        assert_close(tensors_of(before), whole, rtol=0, atol=1e-5)
        for after in afterwards:
            assert_close(tensors_of(after), tensors_of(here), rtol=0, atol=1e-5)
            assert (after.actions_M_E_A_D - before.actions_M_E_A_D).abs().max() > 1e-3
            assert (after.record["noise_level"] != before.record["noise_level"]).all()


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


class Imagines(SimpleNamespace):
    """An environment with a world model alone."""


def test_what_is_trained_reaches_the_workers_and_is_in_evaluation_mode_there(
    ray: Any, policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda value: value)
    network = torch.nn.Linear(2, 2)
    env: Any = Imagines(imagination=SimpleNamespace(world=SimpleNamespace(net=network)))
    ours = _modules(policy.train(), env)
    with without_weights(policy), without_weights(network):
        player = _Player(_packed(policy), _packed(env), None, "cpu")
    theirs = _modules(player.rollout.policy, player.rollout.env)
    assert ours.keys() == theirs.keys() == {"policy", "world_model"}
    assert not sum(weight.numel() for part in theirs.values() for weight in part.parameters())
    policy.mlp[0].requires_grad_(False)
    network.requires_grad_(False)
    for kinds in ((FROZEN, CHANGING), (CHANGING,)):
        with torch.no_grad():
            for weight in policy.mlp[2].parameters():
                weight += 1
        sent = [{name: shards_of(part, kind) for name, part in ours.items()} for kind in kinds]
        player.sync(sent)
        for name, part in theirs.items():
            assert not part.training
            assert_close(part.state_dict(), ours[name].state_dict())
    assert "mlp.0.weight" not in sent[0]["policy"] and not sent[0]["world_model"]  # what is only held was sent once


def test_the_gpu_of_the_process_that_packs_is_not_named_where_it_is_unpacked(ray: Any) -> None:
    env = dict(world=torch.device("cuda", 3), host=torch.device("cpu"), empty=torch.device("meta"), at=torch.zeros(1))
    found = _unpacked(_packed(env), torch.device("cuda"))
    assert (found["world"], found["host"], found["empty"]) == (torch.device("cuda"), env["host"], env["empty"])
    assert found["at"].device.type == "cpu" and torch.device("cuda", 3) == env["world"]


def test_a_worker_that_answers_is_forgiven_its_deaths(ray: Any) -> None:
    ours: Any = SimpleNamespace(_ray=SimpleNamespace(exceptions=ray.exceptions, get=bytes), _deaths=[2, 1])
    ours.device = torch.device("cpu")
    assert RayRollout._answer(ours, _packed("episodes"), 0, 4, is_late=False) == "episodes"
    assert ours._deaths == [0, 1]


def test_an_exception_of_a_worker_that_has_played_costs_its_episodes(ray: Any) -> None:
    """Before any episode came back it is the configuration's, and what the user must mend is raised at any time."""
    ours: Any = mock.Mock(_has_played=False, _workers=["one"])
    ours._ray.exceptions = ray.exceptions
    raised = [RuntimeError("the simulation is unstable"), DataError("the table has three legs")]
    for has_played, error in [(False, raised[0]), (False, raised[1]), (True, raised[1])]:
        ours._has_played = has_played
        ours._ray.get.side_effect = ray.exceptions.RayTaskError("collect", "in _step", error)
        with pytest.raises(type(error), match=str(error)):
            RayRollout._answer(ours, "answer", 0, 3, is_late=False)
    ours._ray.get.side_effect = ray.exceptions.RayTaskError("collect", "in _step", raised[0])
    assert RayRollout._answer(ours, "answer", 0, 3, is_late=False) is None
    ours._ray.kill.assert_called_once_with("one")
    (worker, lost, why), _ = ours._bury.call_args
    assert (worker, lost) == (0, 3) and "in _step" in why


def test_the_next_worker_in_a_place_has_the_newest_weights() -> None:
    ours: Any = SimpleNamespace(_deaths=[0, 0], max_deaths=1, lost=0, restarts=0, execute=None, _ray=mock.Mock())
    ours.device, ours._policy, ours._env, ours._options = torch.device("cpu"), "policy", "env", {}
    ours._frozen, ours._weights = ["frozen of 0", "frozen of 1"], ["newest of 0", "newest of 1"]
    ours._workers, ours._synced, ours._started = ["one", "two"], ["old", "old"], lambda: RayRollout._started(ours)
    worker = ours._ray.remote.return_value.options.return_value.remote.return_value
    RayRollout._bury(ours, 1, 3, "gone")
    worker.sync.remote.assert_called_once_with([*ours._frozen, *ours._weights])
    assert ours._workers == ["one", worker] and ours._synced == ["old", worker.sync.remote.return_value]
    assert (ours.lost, ours.restarts, ours._deaths) == (3, 1, [0, 1])
    with pytest.raises(TrainingError, match=r"died 2 times in a row \(max_deaths=1\): gone"):
        RayRollout._bury(ours, 1, 3, "gone")


def test_a_weight_that_workers_do_not_know_is_named() -> None:
    with pytest.raises(TrainingError, match="has 'bias', which it had not"):
        fill(torch.nn.Linear(2, 2, bias=False), [shards_of(torch.nn.Linear(2, 2), CHANGING)])


def test_ranks_of_two_clusters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(world_size=2, rank=1, is_rank0=False).items():
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    ray = mock.Mock()
    ray.get_actor.side_effect = ValueError("Failed to look up actor")
    with pytest.raises(ConfigError, match=r"Process 1 .*model\.config\.rollout\.address"):
        SharedObjects(ray).of_all_ranks({})


def test_without_ray_the_extra_is_named(policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[rl\]'"):
        RayRollout(policy, ToyEnv(2))


@pytest.mark.slow
def test_without_a_cluster_the_command_that_starts_one_is_named(
    ray: Any, policy: ToyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # others of this file have one
    monkeypatch.setattr(
        ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("Could not find any running Ray"))
    )
    with pytest.raises(ConfigError, match=r"ray start --head.*start_ray\.sh"):
        RayRollout(policy, ToyEnv(2))


class Partly(nn.Module):
    """One weight that is trained, one that is not, and a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2, 3), value))
        self.frozen = nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("step", torch.full((), int(value)))


def test_what_is_trained_and_buffers_travel_every_time_and_the_rest_once() -> None:
    ours, there = Partly(3.0), Partly(0.0)
    with without_weights(there):
        assert there.trained.numel() == there.frozen.numel() == 0
        fill(there, [{**shards_of(ours, CHANGING), **shards_of(ours, FROZEN)}])
        assert torch.equal(there.trained, ours.trained) and torch.equal(there.frozen, ours.frozen)
    assert set(shards_of(ours, CHANGING)) == {"trained", "step"} and set(shards_of(ours, FROZEN)) == {"frozen"}
    with torch.no_grad():
        ours.trained += 1
        ours.frozen += 1
    ours.step += 1
    fill(there, [shards_of(ours, CHANGING)])
    assert there.trained.unique().tolist() == [4.0] and there.step == 4
    assert there.frozen.unique().tolist() == [0.0]


@pytest.mark.parametrize(
    ("place", "placements", "sends"),
    [
        ((0, 1), [Replicate(), ShardedOver(0)], True),
        ((1, 0), [Replicate(), ShardedOver(0)], False),
        ((1, 0), [ShardedOver(0), Replicate()], True),
        ((1, 1), [ShardedOver(0), Replicate()], False),
        ((1, 1), [ShardedOver(0), ShardedOver(1)], True),
        ((0, 0), [Replicate(), Replicate()], True),
    ],
)
def test_of_replicas_the_first_sends_and_every_shard_is_sent(
    place: tuple[int, int], placements: list[Any], sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Placed(SimpleNamespace):
        __class__ = DTensor  # type: ignore[assignment]

    mesh = SimpleNamespace(get_coordinate=lambda: place)
    assert weight_shards._sends(Placed(device_mesh=mesh, placements=placements)) is sends  # type: ignore[arg-type]


def test_references_are_in_the_order_of_ranks_and_kept_until_all_have_taken_them() -> None:
    table = reference_table()(3)
    for number in (1, 2):
        for rank in (2, 0, 1):
            table.put(number, rank, [(number, rank)])
    for _ in range(3):
        assert set(table.references) == {1, 2}
        assert table.take(1) == [(1, 0), (1, 1), (1, 2)]
    assert set(table.references) == {2} and not table.num_taken
