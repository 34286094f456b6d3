# SPDX-License-Identifier: Apache-2.0
"""Environments of a simulator, each in a process of its own: `VecEnv` over `TaskEnv`.

Workers are spawned, never forked: contexts of OpenGL do not survive a fork. They begin with the first call. A worker
that dies, hangs or whose simulator raises an exception costs its episode, which is invalid and not failed, and another
takes its place. An error that the user must mend (`UserError`), or one of a first start, is raised here at once.
"""

import contextlib
import logging
import multiprocessing
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.envs.scoring import Book, Chunk, Ids
from cosmos_predict2.rl.envs.simulators import Floats, rendering
from cosmos_predict2.rl.envs.simulators.worker_process import FAILED, STEPPED, serve
from cosmos_predict2.rl.interfaces import EnvDefaults, Info, Observation
from imaginaire.errors import ConfigError, DataError, TrainingError

log = logging.getLogger(__name__)

NO_START = (
    "its process ended as it began (exit code 1; its output is above). A script of yours that makes a WorkerEnv is"
    ' imported by each worker, so what it runs goes below `if __name__ == "__main__":`.'
)
_PATIENCE = 5.0  # seconds that workers have to end by themselves

Request = tuple[Any, ...] | None  # None: only wait for an answer
OnStep = Callable[[int, float, bool, Any], None]


class WorkerError(TrainingError):
    """A simulator could not start, or was lost too often. ``env`` is its number, ``what`` a sentence, ``traceback`` the
    worker's; ``is_in_episode`` is true where it was to play actions."""

    is_in_episode = False

    def __init__(self, env: int, message: str, traceback: str = "") -> None:
        self.env, self.what, self.traceback = env, f"Environment {env}: {message}", traceback
        super().__init__(f"{self.what}\n{traceback}".rstrip())


@dataclass(eq=False)
class WorkerEnv(EnvDefaults):
    """``num_envs`` workers; ``make`` is a callable that can be pickled, or a node, of a `TaskEnv`.

    ``step_timeout`` and ``reset_timeout`` are the seconds that a worker may take for one action and for a start or a
    reset, before it counts as dead. After ``max_deaths`` of one environment in a row, without an episode between, the
    run ends, with the last traceback where there is one. info also has ``valid`` [E], false of lost episodes. With
    ``keep_frames`` it has ``frames`` [E, A, H, W, 3], the pictures after each action. A state is an episode's start and
    its actions: loading plays it.
    """

    make: Any
    num_envs: int
    render: str | None = None  # how MuJoCo renders: see `rendering`; null: nothing is chosen
    chunk: int | None = None  # actions of a decision; null: the simulator's
    terminate_on_success: bool | None = True
    keep_frames: bool | None = False
    seed: int = 0
    step_timeout: float = 60.0
    reset_timeout: float = 600.0
    max_deaths: int = 3
    lost: int = field(default=0, init=False)  # invalid episodes
    restarts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not callable(self.make) and not (isinstance(self.make, Mapping) and "_target_" in self.make):
            raise ConfigError(
                f"The workers' make is a {type(self.make).__name__}, but they build their environment themselves:"
                " give a callable, or a node, with _recursive_=False beside it so that it is not built before."
            )
        try:
            self._factory = pickle.dumps(self.make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"What builds the workers' environments cannot travel to another process: {error}. Give a class, a"
                " functools.partial of one or a function of a module, not a lambda."
            ) from error
        self._workers: dict[int, _Worker] = {}
        self._seen: dict[int, dict[str, Any]] = {}  # the last observation of each
        self._book: Book | None = None
        self._metadata: dict[str, Any] = {}
        self._deaths = numpy.zeros(self.num_envs, dtype=numpy.int64)
        self._is_valid = numpy.ones(self.num_envs, dtype=bool)
        self._sentences = [""] * self.num_envs
        self._actions: list[list[Floats]] = [[] for _ in range(self.num_envs)]
        self._end = weakref.finalize(self, _end, self._workers)

    def __reduce__(self) -> Any:
        """Travels without its workers."""
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.init)

    # --- the contract

    @property
    def metadata(self) -> Mapping[str, Any]:
        self._ready()
        return self._metadata

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        book = self._ready()
        ids = book.begin(seed, options)
        self._is_valid[ids] = True
        self._begin(book, ids)
        return self._observation(ids), self._info(book, ids)

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        book = self._ready()
        ids = book.ids(env_ids)
        bounds = (self._metadata.get("action_low", -1.0), self._metadata.get("action_high", 1.0))
        checked, count = book.check_actions(actions_E_A_D, ids, self._metadata["action_dim"], execute, bounds=bounds)
        actions, chunk = checked.numpy(), Chunk.empty(len(ids), checked.shape[1])
        films = [[self._whole(self._seen[i])] for i in ids.tolist()] if self.keep_frames else []
        row_of = {int(i): row for row, i in enumerate(ids) if not book.is_over[i]}

        def on_step(env: int, reward: float, is_success: bool, shown: Mapping[str, Any] | None) -> None:
            row, k = row_of[env], int(chunk.executed_E_A[row_of[env]].sum())
            self._actions[env].append(actions[row, k])
            book.steps[env] += 1
            ends = book.end(numpy.array([env]), numpy.array([is_success]), self.terminate_on_success)
            chunk.put([row], k, [reward], ends)
            if shown is not None:
                films[row].append(self._whole(shown))

        left = book.max_steps - book.steps
        self._play(book, {i: actions[row, : min(count, left[i])] for i, row in row_of.items()}, on_step)
        info = self._info(book, ids, chunk)
        if films:  # each begins before its first action, and its last picture stays
            rows = [[*film[1:], *[film[-1]] * (checked.shape[1] + 1 - len(film))] for film in films]
            info["frames"] = torch.stack([torch.stack(row) for row in rows])
        return self._observation(ids), chunk.reward_E_A, chunk.terminated_E_A, chunk.truncated_E_A, info

    def get_state(self) -> bytes:
        book, size = self._ready(), self._metadata["action_dim"]
        played = {
            f"actions.{i}": numpy.array(actions, dtype=numpy.float32).reshape(-1, size)
            for i, actions in enumerate(self._actions)
        }
        return book.to_bytes(self._about, {"is_valid": self._is_valid, **played})

    def load_state(self, state: bytes) -> None:
        book = self._ready()
        arrays = book.from_bytes(state, self._about)
        self._is_valid[:] = arrays["is_valid"]
        self._actions = [list(arrays[f"actions.{i}"]) for i in range(self.num_envs)]
        begun = numpy.flatnonzero(book.has_begun)
        self._begin(book, begun, keeps_actions=True)
        self._play(book, {int(i): numpy.array(self._actions[i]) for i in begun if self._actions[i]})

    def close(self) -> None:
        """End the workers, so that others have their memory; the next call starts them again, without episodes."""
        _end(self._workers)
        self._book, self._seen = None, {}

    def release(self) -> None:
        self.close()

    # --- episodes

    @property
    def _about(self) -> dict[str, Any]:
        # States of before have no bounds to which actions are scaled.
        known = {key: value for key, value in self._metadata.items() if not key.startswith("scaled_")}
        return {"kind": "workers", "num_envs": self.num_envs, **known}

    def _begin(self, book: Book, ids: Ids, *, keeps_actions: bool = False) -> None:
        """Begin the episodes that the book has, in other workers where some die."""
        left = [int(i) for i in ids]
        if not keeps_actions:
            for i in left:
                self._actions[i] = []
        while left:
            self._ready()  # also those that took the place of others
            numbers = {i: (int(book.task_ids[i]), int(book.trial_ids[i]), int(book.seeds[i])) for i in left}
            begun = self._ask({i: ("reset", *numbers[i]) for i in left}, self.reset_timeout)
            for i, (sentence, arrays) in begun.items():
                self._sentences[i] = sentence
                self._see(i, arrays)
            left = [i for i in left if i not in begun]

    def _play(self, book: Book, actions: Mapping[int, Floats], on_step: OnStep | None = None) -> None:
        """Execute actions in some environments. The episode of a worker that dies is over, and invalid."""
        num_views = len(self.views) if self.keep_frames and on_step is not None else 0
        flags = (self.terminate_on_success, num_views)
        played = self._ask({i: ("play", one, *flags) for i, one in actions.items()}, self.step_timeout, on_step)
        for i in actions:
            if i in played:
                self._see(i, played[i])
            else:
                self.lost += 1
                book.is_over[i], book.is_success[i], self._is_valid[i] = True, False, False
            if i in played and book.is_over[i]:
                self._deaths[i] = 0

    def _info(self, book: Book, ids: Ids, chunk: Chunk | None = None) -> dict[str, Any]:
        return {**book.info(ids, chunk), "valid": torch.from_numpy(self._is_valid[ids])}

    def _whole(self, shown: Mapping[str, Any]) -> Tensor:
        """The picture of all views, uint8 [H, W, 3]."""
        pictures = {name: torch.from_numpy(numpy.array(shown[name]))[None] for name in ("full_image", "wrist_image")}
        return whole_pictures(pictures, len(self.views))[0]

    def _observation(self, ids: Ids) -> Observation:
        found: dict[str, Any] = {"task_description": [self._sentences[i] for i in ids]}
        for name, like in next(iter(self._seen.values())).items():
            rows = numpy.array([self._seen[i][name] for i in ids.tolist()], dtype=like.dtype)
            found[name] = torch.from_numpy(rows.reshape(len(ids), *like.shape))
        return found

    def _see(self, env: int, arrays: dict[str, Any]) -> None:
        """Keep an observation: it has the shapes of all others."""
        for name, like in next(iter(self._seen.values()), arrays).items():
            if arrays[name].shape != like.shape:
                raise DataError(
                    f"Environment {env}: an observation's {name} has shape {list(arrays[name].shape)}, others had"
                    f" {list(like.shape)}: all of an environment are alike."
                )
        self._seen[env] = arrays

    # --- workers

    def _ready(self) -> Book:
        """The book, once every environment is built."""
        for i in range(self.num_envs):
            if i not in self._workers:
                self._workers[i] = self._started(i)
        while to_build := [i for i, worker in self._workers.items() if not worker.is_built]:
            for i, facts in self._ask(dict.fromkeys(to_build), self.reset_timeout).items():
                self._workers[i].is_built = True
                self._book = self._book or self._new_book(facts)
        assert self._book is not None
        return self._book

    def _new_book(self, facts: Mapping[str, Any]) -> Book:
        about, max_steps = facts["metadata"], facts["max_steps"]
        chunk = min(self.chunk or about.get("chunk", 1), max_steps)
        self._metadata = {**about, "action_dim": facts["action_dim"], "chunk": chunk, "max_steps": max_steps}
        self._metadata |= {name: facts[name] for name in ("num_tasks", "num_trials")}
        numbers = {name: facts[name] for name in ("num_tasks", "num_trials", "max_steps")}
        return Book(self.num_envs, **numbers, seed=self.seed)

    def _started(self, env: int) -> "_Worker":
        variables = {} if self.render is None else rendering.variables(self.render, env)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, self._factory, variables), name=f"environment-{env}", daemon=True
        )
        process.start()
        theirs.close()  # so that the end of the worker is the end of the connection
        return _Worker(process, ours)

    def _ask(self, requests: Mapping[int, Request], timeout: float, on_step: OnStep | None = None) -> dict[int, Any]:
        """The answers of the workers that live on. All have answered when the first failure is raised."""
        answers: dict[int, Any] = {}
        failures: list[Exception] = []
        for i, request in requests.items():
            self._workers[i].send(request)
        deadlines = dict.fromkeys(requests, time.monotonic() + timeout)
        while deadlines:
            for i in self._heard(deadlines):
                kind, *content = self._workers[i].receive()
                if kind == STEPPED:
                    deadlines[i] = time.monotonic() + timeout
                    if on_step is not None:
                        on_step(i, *content)
                    continue
                del deadlines[i]
                if kind == FAILED:
                    failures += self._failed(i, *content)
                elif kind is None:
                    failures += self._bury(i, *content)
                else:
                    answers[i] = content[0]
            for i in [i for i, deadline in deadlines.items() if deadline < time.monotonic()]:
                del deadlines[i]
                failures += self._bury(i, f"no answer in {timeout:g} seconds")
        if failures:
            if isinstance(error := failures[0], WorkerError):
                error.is_in_episode = (requests[error.env] or ("",))[0] == "play"
            raise failures[0]
        return answers

    def _heard(self, deadlines: Mapping[int, float]) -> Iterable[int]:
        """The workers that have answered, or ended, before the next deadline."""
        of = {self._workers[i].connection: i for i in deadlines}
        left = min(deadlines.values()) - time.monotonic()
        return [of[one] for one in pipes.wait(list(of), max(left, 0.0)) if isinstance(one, Connection)]

    def _failed(self, env: int, kind: Any, message: str, traceback: str) -> list[Exception]:
        """The errors to raise for what a worker answered instead of a result."""
        is_built = self._workers[env].is_built
        if kind is None and (is_built or self._deaths[env]):  # of a simulator that has run
            return self._bury(env, message, traceback)
        if not is_built:  # it has ended
            self._workers.pop(env).end()
        return [WorkerError(env, message, traceback) if kind is None else kind(f"Environment {env}: {message}")]

    def _bury(self, env: int, why: str, traceback: str = "") -> list[Exception]:
        """Start another worker in the place of one that is lost; an error where that happens too often."""
        self._workers.pop(env).end()
        if why == NO_START and not self._deaths[env]:  # nor would another one
            return [WorkerError(env, why, traceback)]
        self._deaths[env] += 1
        if self._deaths[env] > self.max_deaths:
            often = f"its worker died {self._deaths[env]} times in a row (max_deaths={self.max_deaths}): "
            return [WorkerError(env, f"{often if self.max_deaths else ''}{why}", traceback)]
        self.restarts += 1
        log.warning(
            "the worker of environment %d died: %s; its episode is invalid, and it is started again%s",
            *(env, why, f"\n{traceback}".rstrip()),
        )
        self._workers[env] = self._started(env)
        return []


@dataclass
class _Worker:
    process: Any
    connection: Connection
    is_built: bool = False

    def send(self, request: Request) -> None:
        if request is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports why
                self.connection.send(request)

    def receive(self) -> tuple[Any, ...]:
        """The next answer; of a dead worker (None, why)."""
        try:
            return tuple(self.connection.recv())
        except (EOFError, ConnectionResetError):
            self.process.join(_PATIENCE)
            code = self.process.exitcode
            memory = " (often: memory ran out)" if code == -9 else ""
            if code == 1 and not self.is_built:
                return None, NO_START
            return None, f"signal {-code}{memory}" if code is not None and code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Kill it, where it still runs."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _end(workers: dict[int, _Worker]) -> None:
    """End all workers, in peace where they can."""
    for worker in workers.values():
        worker.send(("close",))
    deadline = time.monotonic() + _PATIENCE
    while workers:
        _, worker = workers.popitem()
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.end()
