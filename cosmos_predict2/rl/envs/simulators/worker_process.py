# SPDX-License-Identifier: Apache-2.0
"""The worker's side: it builds its environment and answers requests, until the connection ends.

A request is (name, arguments...), an answer (kind, content...). A failure is answered, too; only a process that dies
sends nothing. Observations are not sent: workers write them to memory that the environment shares (`Buffers`). This
imports neither torch nor a simulator: the latter reads the environment variables that are set first.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import Floats, TaskEnv
from imaginaire.errors import DataError, UserError

DONE, FAILED, STEPPED = "done", "failed", "stepped"
DTYPES = {"full_image": numpy.uint8, "wrist_image": numpy.uint8, "state": numpy.float32}
_DIMENSIONS = {"full_image": 3, "wrist_image": 4, "state": 1}
Shapes = dict[str, tuple[int, ...]]


def serve(
    connection: Connection, number: int, factory: bytes, variables: Mapping[str, str], memory: tuple[Any, ...] | None
) -> None:
    """Build environment ``number`` and answer for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers too, but is for the parent to answer
    os.environ.update(variables)
    worker: _Worker | None = None
    try:
        worker = _Worker(connection, number, build(pickle.loads(factory)))
        if memory is not None:
            worker.attach(memory)
        connection.send((DONE, worker.facts()))
        while (request := connection.recv())[0] != "close":
            worker.answer(*request)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        pass
    except Exception as error:  # of the environment's constructor
        connection.send(_failure(error))
    finally:
        if worker is not None:
            worker.close()


def build(factory: Any) -> TaskEnv:
    """The environment that a node (``_target_`` and arguments) or a callable makes."""
    if not isinstance(factory, Mapping):
        return factory()  # type: ignore[no-any-return]
    from imaginaire.config.lazy_config import instantiate

    return instantiate(factory)  # type: ignore[no-any-return]


class _Worker:
    def __init__(self, connection: Connection, number: int, env: TaskEnv) -> None:
        self.connection, self.number, self.env = connection, number, env
        self._buffers: Buffers | None = None

    def facts(self) -> dict[str, Any]:
        names = ("num_tasks", "num_trials", "max_steps", "action_dim")
        return {**{name: int(getattr(self.env, name)) for name in names}, "metadata": dict(self.env.metadata)}

    def answer(self, name: str, *arguments: Any) -> None:
        try:
            content = getattr(self, name)(*arguments)
        except Exception as error:  # of the simulator's own code: the parent raises it
            self.connection.send(_failure(error))
        else:
            self.connection.send((DONE, content))

    def attach(self, about: tuple[Any, ...]) -> None:
        self._buffers = Buffers(*about)

    def reset(self, task_id: int, trial_id: int, seed: int) -> tuple[str, Any]:
        """The sentence; and the observation, where there is no memory for it yet."""
        observed = self.env.reset(task_id, trial_id, seed)
        return str(observed["task_description"]), self._shown(observed)

    def play(self, actions: Floats, ends_on_success: bool, keeps_frames: bool) -> None:
        """Execute actions, and report each of them."""
        for action in actions:
            observed, reward, is_success = self.env.step(action)
            frame = observed["full_image"] if keeps_frames else None
            self.connection.send((STEPPED, float(reward), bool(is_success), frame))
            if is_success and ends_on_success:
                break
        self._shown(observed)

    def close(self) -> None:
        self.env.close()
        if self._buffers is not None:
            self._buffers.detach()

    def _shown(self, observed: Mapping[str, Any]) -> Any:
        arrays = arrays_of(observed)
        if self._buffers is None:
            return arrays
        self._buffers.write(self.number, arrays)
        return None


def _failure(error: Exception) -> tuple[str, type | None, str, str]:
    """The answer for an error: its class if it is one of ours, its message, and where it came from."""
    kind = type(error) if isinstance(error, UserError) else None
    return FAILED, kind, f"{error}" if kind else f"{type(error).__name__}: {error}", traceback.format_exc()


def arrays_of(observed: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays of an observation of one environment, checked."""
    arrays = {}
    for name, dtype in DTYPES.items():
        value = numpy.asarray(observed[name])
        is_picture = dtype is numpy.uint8
        if value.ndim != _DIMENSIONS[name] or (is_picture and (value.dtype != dtype or value.shape[-1] != 3)):
            raise DataError(
                f"An observation's {name} is {value.dtype} {list(value.shape)}: {numpy.dtype(dtype)} with"
                f" {_DIMENSIONS[name]} dimensions is expected{', the last of them RGB' if is_picture else ''}."
            )
        arrays[name] = value.astype(dtype, copy=False)
    return arrays


class Buffers:
    """One row of each array for each environment. Without ``name`` the memory is new, and `remove` frees it."""

    def __init__(self, num_envs: int, shapes: Shapes, name: str | None = None) -> None:
        sizes = {key: num_envs * int(numpy.prod(shape)) * DTYPES[key]().itemsize for key, shape in shapes.items()}
        offsets = numpy.cumsum([0, *(-(-size // 64) * 64 for size in sizes.values())]).tolist()
        self.memory = SharedMemory(name, create=name is None, size=max(offsets[-1], 1))
        self.about = (num_envs, shapes, self.memory.name)
        self._shapes = shapes
        self._arrays = {
            key: numpy.ndarray((num_envs, *shape), DTYPES[key], self.memory.buf, offset)
            for (key, shape), offset in zip(shapes.items(), offsets)
        }

    def write(self, env: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        for key, value in arrays.items():
            if value.shape != self._shapes[key]:
                raise DataError(
                    f"An observation's {key} has shape {list(value.shape)}, others had {list(self._shapes[key])}: all"
                    " of an environment are alike."
                )
            self._arrays[key][env] = value

    def read(self, env_ids: Sequence[int]) -> dict[str, NDArray[Any]]:
        return {key: array[env_ids] for key, array in self._arrays.items()}

    def detach(self) -> None:
        self._arrays = {}  # which hold on to the memory
        self.memory.close()

    def remove(self) -> None:
        self.detach()
        self.memory.unlink()
