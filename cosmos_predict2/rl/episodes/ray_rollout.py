# SPDX-License-Identifier: Apache-2.0
"""Episodes played in processes of their own, on this machine or on others: actors of Ray.

    model.config.rollout=L(RayRollout)(num_workers=4)

Each actor has the policy and the environments of its own. Before every rollout it gets what was trained, by shards
where the policy is sharded. An episode is the same as in this process, since what it draws follows from its own number;
to the last bit with as many threads (OMP_NUM_THREADS; an actor has as many as num_cpus) and as many episodes at once.
A cluster must be there before: `ray start --head`, or ray_utils/start_ray.sh on each machine. An actor that dies, or
raises an exception after episodes came back, costs the episodes that it was playing. They are invalid, which is not the
same as failed, and another actor takes its place.
"""

import io
import logging
import math
import pickle
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from cosmos_predict2.rl.episodes.episodes import BAR, LocalRollout, RolloutDefaults, Starts, Trajectories, release
from cosmos_predict2.rl.episodes.weight_shards import CHANGING, FROZEN, SharedObjects, fill, shards_of, without_weights
from cosmos_predict2.rl.interfaces import EnvDefaults, Mode, Policy, VecEnv, completed
from imaginaire import distributed
from imaginaire.distributed.parallel import is_dtensor
from imaginaire.errors import ConfigError, TrainingError, UserError, optional_module
from imaginaire.log import LINES_S, Progress

log = logging.getLogger(__name__)

KEY = "model.config.rollout"
POLICY, WORLD_MODEL = "policy", "world_model"


class RayRollout(RolloutDefaults):
    """Plays on ``num_workers`` actors, each with ``num_cpus`` cores and ``num_gpus`` GPUs (a share: 0.5).

    They are those of all ranks, each of which has its part of them for its own episodes.
    ``timeout`` is how many seconds a worker may take for its episodes before it counts as dead. After ``max_deaths`` of
    one worker in a row, without an episode between, the run ends. ``lost`` counts the invalid episodes, ``restarts``
    the workers that were started again.
    """

    is_elsewhere: bool = True  # this process needs no whole policy for it

    def __init__(
        self,
        policy: Policy,
        env: VecEnv,
        execute: int | None = None,
        *,
        num_workers: int = 2,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        address: str = "auto",
        timeout: float = 3600.0,
        max_deaths: int = 5,
    ) -> None:
        ranks = distributed.world_size()
        if num_workers < ranks:
            each = "" if ranks == 1 else f", one for each of the {ranks} processes that train"
            raise ConfigError(f"{KEY}.num_workers is {num_workers}, but it is at least {ranks}{each}.")
        self.policy, self.env, self.execute = policy, completed(env, EnvDefaults), execute
        self.num_workers = num_workers // ranks + (distributed.rank() < num_workers % ranks)  # of this rank
        self.timeout, self.max_deaths = timeout, max_deaths
        self._ray = _connected(address)
        _require_resources(self._ray, num_workers, num_cpus, num_gpus)
        self._options = dict(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy="SPREAD", max_restarts=0)
        self._workers: list[Any] = []
        self._synced: list[Any] = []  # of each worker, the answer that it has the weights
        self._deaths = [0] * self.num_workers
        self._has_played = False  # episodes came back
        self._why = ""  # the last worker died
        self._shared = SharedObjects(self._ray)
        with without_weights(policy):  # before it is sharded
            self._policy = self._ray.put(_packed(policy))
        self._env: Any = None
        self._frozen: list[Any] = []  # references of all ranks' shards, as long as workers may need them
        self._weights: list[Any] = []
        self.lost = 0
        self.restarts = 0

    @property
    def device(self) -> torch.device:
        first = next(self.policy.parameters(), None) if isinstance(self.policy, nn.Module) else None
        return torch.device("cpu") if first is None else first.device

    def sync(self, policy: Policy) -> None:
        """The weights to decide with from now on; of a world model that is trained, those to imagine with.

        Where several processes train, all must call it.
        """
        self.policy, modules = policy, _modules(policy, self.env)
        if not self._workers:
            self._require_playable(modules.get(WORLD_MODEL))
        self._weights = []  # gives their memory back first
        self._weights = self._shared.of_all_ranks({name: shards_of(part, CHANGING) for name, part in modules.items()})
        if self._workers:
            self._synced = [worker.sync.remote(self._weights) for worker in self._workers]
            return
        self._frozen = self._shared.of_all_ranks({name: shards_of(part, FROZEN) for name, part in modules.items()})
        with without_weights(modules.get(WORLD_MODEL)):
            self._env = self._ray.put(_packed(self.env))
        started = [self._started() for _ in range(self.num_workers)]
        self._workers, self._synced = [worker for worker, _ in started], [synced for _, synced in started]

    def collect(self, starts: Starts, mode: Mode = "sample", on_progress: Any = None) -> Trajectories:
        if not self._workers:
            self.sync(self.policy)
        size = min(self.env.num_envs, math.ceil(len(starts) / self.num_workers))
        parts = [starts.part(slice(first, first + size)) for first in range(0, len(starts), size)]
        for _ in range(2):  # where nothing came back, once more
            played = self._played(parts, mode, on_progress)
            if found := next((one for one in played if one is not None), None):
                whole = [_lost(found, len(part)) if one is None else one for part, one in zip(parts, played)]
                return whole[0].with_others(whole[1:])
        raise TrainingError(
            f"All workers of {KEY} died, twice in a row: no episode came back. `ray status` and the log above say more;"
            f" each needs memory for the policy and the environments. The last one: {self._why}"
        )

    def release(self) -> None:
        """The workers' simulators end, so that others have their memory, and start again with the next episodes."""
        if released := [worker.release.remote() for worker in self._workers]:
            self._ray.wait(released, num_returns=len(released), timeout=60)

    def close(self) -> None:
        """End the workers; the cluster stays."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []

    def _require_playable(self, world_model: nn.Module | None) -> None:
        if self.device.type == "cuda" and not self._options["num_gpus"]:
            raise ConfigError(f"{KEY}.num_gpus is 0, but the policy is on {self.device}: give each worker a part.")
        if world_model is not None and any(is_dtensor(weight) for weight in world_model.parameters()):
            cure = f"Set model.config.world_model.config.fsdp_shard_size=0, or play in this process: {KEY}=null."
            raise ConfigError(f"{KEY}: workers imagine with a whole world model, but it is sharded. {cure}")

    def _started(self) -> tuple[Any, Any]:
        """A worker, and its answer that it has the weights."""
        arguments = (self._policy, self._env, self.execute, self.device.type)
        worker = self._ray.remote(_Player).options(**self._options).remote(*arguments)
        return worker, worker.sync.remote([*self._frozen, *self._weights])

    def _played(self, parts: list[Starts], mode: Mode, on_progress: Any) -> list[Trajectories | None]:
        """The episodes of each part, in order; None where the worker that played them died."""
        played: list[Trajectories | None] = [None] * len(parts)
        waiting, idle = deque(range(len(parts))), deque(range(self.num_workers))
        busy: dict[Any, tuple[int, int]] = {}  # the worker and the part of each answer that is awaited
        is_shown = on_progress is not None and distributed.is_rank0()
        progress = Progress(BAR, len(parts), is_shown=is_shown, leave=False, as_bar=True)
        while waiting or busy:
            while waiting and idle:
                worker, number = idle.popleft(), waiting.popleft()
                answer = self._workers[worker].collect.remote(parts[number], mode, self._synced[worker])
                busy[answer] = worker, number
            done: list[Any] = []
            late, end = list(busy), time.monotonic() + self.timeout
            while not done and (left := end - time.monotonic()) > 0:
                done, late = self._ray.wait(list(busy), num_returns=1, timeout=min(left, LINES_S))
                progress.set(progress.done)  # a line in the log
            for answer in done or late:
                worker, number = busy.pop(answer)
                played[number] = self._answer(answer, worker, len(parts[number]), is_late=not done)
                idle.append(worker)
            progress.set(len(parts) - len(waiting) - len(busy))
            if on_progress is not None:
                on_progress(f"part {progress.done} of {len(parts)}")
        progress.close()
        return played

    def _answer(self, answer: Any, worker: int, num_episodes: int, *, is_late: bool) -> Trajectories | None:
        errors = self._ray.exceptions
        try:
            if is_late:
                self._ray.kill(self._workers[worker])
            else:
                content = self._ray.get(answer)
                self._deaths[worker], self._has_played = 0, True
                return _unpacked(content, self.device)
            why = f"no answer in {self.timeout:g} seconds"
        except errors.RayTaskError as error:  # it lives, and reports what is wrong
            if isinstance(error.cause, UserError) or not self._has_played:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            self._ray.kill(self._workers[worker])
            why = str(error).strip()  # with its traceback
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError) as error:
            why = str(error).strip().splitlines()[0]
        self._bury(worker, num_episodes, why)
        return None

    def _bury(self, worker: int, num_episodes: int, why: str) -> None:
        """Count what is lost with a dead worker, and start another one in its place."""
        self._deaths[worker] += 1
        self.lost += num_episodes
        self._why = why
        if self._deaths[worker] > self.max_deaths:
            often = f"died {self._deaths[worker]} times in a row (max_deaths={self.max_deaths})"
            raise TrainingError(f"Worker {worker} of {KEY} {often}: {why}")
        self.restarts += 1
        text = "rollout worker %d died: %s; its %d episodes are invalid (%d lost so far), and it is started again"
        log.warning(text, worker, why, num_episodes, self.lost)
        self._workers[worker], self._synced[worker] = self._started()


class _Player:
    """An actor: it plays episodes. Its methods run in the order of their calls."""

    def __init__(self, policy: bytes, env: bytes, execute: int | None, device: str) -> None:
        where = torch.device(device)
        found = _unpacked(policy, where)
        if isinstance(found, nn.Module):
            found.to(where)
        self.rollout = LocalRollout(found, _unpacked(env, where), execute)

    def sync(self, references: list[Any]) -> None:
        import ray

        modules = _modules(self.rollout.policy, self.rollout.env)
        for name, part in modules.items():
            fill(part, (ray.get(reference)[name] for reference in references))
            part.eval()

    def release(self) -> None:
        release(self.rollout.env)

    def collect(self, starts: Starts, mode: Mode, synced: None) -> bytes:
        """``synced`` is what `sync` gave: where that failed, Ray fails this call with its error."""
        return _packed(self.rollout.collect(starts, mode))


def _connected(address: str) -> Any:
    """The module ``ray``, connected to a cluster."""
    ray = optional_module("ray", "rl")
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=address, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{KEY}: no Ray cluster answers at address={address} ({str(error).strip().splitlines()[0].rstrip('.')})."
            " Start one: `ray start --head` on this machine, or `RANK=0 bash ray_utils/start_ray.sh` on the first of"
            f" several; `ray stop --force` ends one that is stuck. Or play in this process: {KEY}=null."
        ) from error
    return ray


def _require_resources(ray: Any, num_workers: int, num_cpus: float, num_gpus: float) -> None:
    """Raise where the cluster will never have room for the workers, which would wait for ever."""
    there = ray.cluster_resources()
    for name, kind, each in (("num_cpus", "CPU", num_cpus), ("num_gpus", "GPU", num_gpus)):
        if num_workers * each > there.get(kind, 0):
            wanted = f"num_workers={num_workers} with {name}={each:g} each"
            cure = f"Lower one of them, or start Ray with more: ray start --head --{name.replace('_', '-')}=N."
            raise ConfigError(f"{KEY}: {wanted}, but the cluster has {there.get(kind, 0):g} {kind}s. {cure}")


def _modules(policy: Policy, env: VecEnv) -> dict[str, nn.Module]:
    """The modules whose weights workers need: the policy, and the network of a world model's environment."""
    is_elsewhere = env.imagination is None or isinstance(env.imagination, str)  # at a server's address
    found = {POLICY: policy, WORLD_MODEL: None if is_elsewhere else env.imagination.world.net}
    return {name: part for name, part in found.items() if isinstance(part, nn.Module)}


def _lost(like: Trajectories, num_episodes: int) -> Trajectories:
    """Episodes of which nothing is known, of the shapes of others."""
    rows = like.rows(torch.zeros(num_episodes, dtype=torch.long))
    blank = rows.changed(lambda values, _: torch.zeros_like(values[0]))
    return replace(blank, finish_step_E=torch.full_like(blank.finish_step_E, -1))


def _packed(value: Any) -> bytes:
    """Objects and tensors as bytes, whichever device these are on."""
    from ray import cloudpickle  # which takes functions inside functions, too

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=cloudpickle)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        cure = "Open files and connections at their first use, and leave them out of __getstate__."
        raise ConfigError(f"{KEY}: policy or environment cannot travel to another process: {error}. {cure}") from error
    return buffer.getvalue()


def _unpacked(content: bytes, device: torch.device) -> Any:
    """The value that `_packed` was given, in another process: what lay on a GPU is on the device, the rest on the CPU.

    A GPU's number, such as that of the rank that packed it, means nothing here: `torch.device` becomes the device, too.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    def device_here(kind: str, *index: int) -> torch.device:
        return torch.device(kind, *index) if kind in ("cpu", "meta") else device

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return device_here if (module, name) == ("torch", "device") else super().find_class(module, name)

    module = SimpleNamespace(Unpickler=Unpickler, __name__=pickle.__name__)
    return torch.load(io.BytesIO(content), map_location=place, pickle_module=module, weights_only=False)
