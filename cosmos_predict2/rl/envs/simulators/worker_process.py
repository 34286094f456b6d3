# SPDX-License-Identifier: Apache-2.0
"""The worker's side: it builds its environment and answers requests, until the connection ends.

A request is (name, arguments...), an answer (kind, content...). A failure is answered, too; only a process that dies
sends nothing. This imports neither torch nor a simulator: the latter reads the environment variables that are set
first.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import Floats, TaskEnv
from imaginaire.errors import DataError, UserError

DONE, FAILED, STEPPED = "done", "failed", "stepped"
DTYPES = {"full_image": numpy.uint8, "wrist_image": numpy.uint8, "state": numpy.float32}
_DIMENSIONS = {"full_image": 3, "wrist_image": 4, "state": 1}


def serve(connection: Connection, factory: bytes, variables: Mapping[str, str]) -> None:
    """Build an environment and answer for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers too, but is for the parent to answer
    os.environ.update(variables)
    worker: _ServedEnv | None = None
    try:
        worker = _ServedEnv(connection, build(pickle.loads(factory)))
        connection.send((DONE, worker.facts()))
        while (request := connection.recv())[0] != "close":
            worker.answer(*request)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        pass
    except Exception as error:  # of the environment's constructor
        connection.send(_failure(error))
    finally:
        if worker is not None:
            worker.env.close()


def build(factory: Any) -> TaskEnv:
    """The environment that a node (``_target_`` and arguments) or a callable makes."""
    if not isinstance(factory, Mapping):
        return factory()  # type: ignore[no-any-return]
    from imaginaire.config.lazy_config import instantiate

    return instantiate(factory)  # type: ignore[no-any-return]


class _ServedEnv:
    def __init__(self, connection: Connection, env: TaskEnv) -> None:
        self.connection, self.env = connection, env

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

    def reset(self, task_id: int, trial_id: int, seed: int) -> tuple[str, dict[str, NDArray[Any]]]:
        """The sentence and the observation."""
        observed = self.env.reset(task_id, trial_id, seed)
        return str(observed["task_description"]), arrays_of(observed)

    def play(self, actions: Floats, ends_on_success: bool, num_views: int) -> dict[str, NDArray[Any]]:
        """Execute actions, and report each of them, with so many pictures; the last observation."""
        for action in actions:
            observed, reward, is_success = self.env.step(action)
            if not numpy.isfinite(reward):  # costs the episode; it would leave its group without an advantage
                raise ValueError(f"a step paid {float(reward)}, where a finite number is expected")
            shown = None
            if num_views:
                shown = dict(full_image=observed["full_image"], wrist_image=observed["wrist_image"][: num_views - 1])
            self.connection.send((STEPPED, float(reward), bool(is_success), shown))
            if is_success and ends_on_success:
                break
        return arrays_of(observed)


def _failure(error: Exception) -> tuple[str, type | None, str, str]:
    """The answer for an error: its class if it is one of ours, its message, and where it came from."""
    if isinstance(error, UserError):
        return FAILED, type(error), f"{error}", traceback.format_exc()
    methods = [
        (frame.f_locals.get("self"), frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    of_envs = [(env, name) for env, name in methods if hasattr(env, "step") and hasattr(env, "reset")]
    raised_by = [f" ({type(env).__qualname__}.{name})" for env, name in of_envs[-1:]]
    return FAILED, None, f"{type(error).__name__}: {error}{''.join(raised_by)}", traceback.format_exc()


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
        if not numpy.isfinite(value).all():
            raise ValueError(f"an observation's {name} has numbers that are not finite: did the simulation diverge?")
        arrays[name] = value.astype(dtype, copy=False)
    return arrays
