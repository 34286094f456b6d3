# SPDX-License-Identifier: Apache-2.0
"""Run a function on several processes that form one gloo group, and bring values or errors back.

    values = run_distributed(_sum_of_ranks, world_size=2, args=(tmp_path,))

The function lives at module level (it travels by name). The rendezvous is a store that the parent holds on a port given
by the system, as torchrun does it, so two tests never meet on one port. Processes are forked from one that has nothing
but imported, since importing is most of what a short-lived rank would do. So they have one seed of hashes in common,
unlike those of torchrun: what depends on the order of a set shows in the tests with torchrun alone.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.programs import HANG_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *(
            "torch._dynamo",
            "torch.distributed.checkpoint",
            "torch.distributed.tensor.parallel",
            "torch.utils.tensorboard",
        ),
        *("cosmos_predict2.models.video2world_model", "tests.preloaded"),
    ]
)


class RankError(RuntimeError):
    """A rank failed: ``rank`` says which, ``error`` is the exception's text, the message holds the traceback."""

    def __init__(self, rank: int, world_size: int, error: str, details: str = "") -> None:
        super().__init__(f"rank {rank} of {world_size}: {error}\n{details}".rstrip())
        self.rank = rank
        self.error = error


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    timeout: float = HANG_S,
    env: Mapping[str, str] | None = None,
    lost: Collection[int] = (),
) -> list[Any]:
    """``fn(*args)`` of every rank, in rank order; the first rank that fails decides the error, the others are ended.

    Ranks in ``lost`` are meant to die: the others go on, and their value is None.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    deadline = time.time() + timeout
    called = pickle.dumps((fn, args))  # by value: tensors would travel as open files, of which there may be too many
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                environment = {**os.environ, **_rank_environment(rank, world_size, store.port), **(env or {})}
                arguments = (called, rank, folder, deadline, environment)
                process = CONTEXT.Process(target=_run_rank, args=arguments, daemon=False)
                process.start()
                processes.append(process)
            _wait([p for rank, p in enumerate(processes) if rank not in lost], Path(folder), deadline, timeout)
            paths = [Path(folder) / f"{rank}.value" for rank in range(world_size)]
            return [None if rank in lost else _read(path) for rank, path in enumerate(paths)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            del store


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the parent's store instead of opening one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that comes about (a killed test run leaves no ranks)."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_rank(called: bytes, rank: int, folder: str, deadline: float, environment: dict[str, str]) -> None:
    """In the child: join, run, leave the value or the error in a file."""
    os.environ.clear()
    os.environ.update(environment)
    end_with_parent()
    torch.set_num_threads(1)
    with open(Path(folder) / f"{rank}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(max(0.05, deadline - time.time() - 0.5), file=stacks)
        try:
            from imaginaire import distributed

            fn, args = pickle.loads(called)
            distributed.init()
            value = fn(*args)
            _write(Path(folder) / f"{rank}.value", value)
            distributed.shutdown()
        except BaseException as error:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            _write(Path(folder) / f"{rank}.error", (time.time(), text, traceback.format_exc()))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the others may hang in a collective: no orderly farewell
        finally:
            faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is done; now and then torch's own teardown of a group's threads aborts the process


def _wait(processes: list[BaseProcess], folder: Path, deadline: float, timeout: float) -> None:
    world_size = len(processes)
    while True:
        codes = [process.exitcode for process in processes]
        if None not in codes or any(codes):
            break
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        # A sentinel may fire a moment before the exit code is there: look at the codes again before a longer wait.
        multiprocessing.connection.wait(running, min(1.0, max(0.0, deadline - time.time())))
        if time.time() >= deadline and (late := [i for i, p in enumerate(processes) if p.exitcode is None]):
            stacks = "\n".join(f"--- rank {i}\n{_text(folder / f'{i}.stacks')}" for i in late)
            ranks = ", ".join(map(str, late))
            raise TimeoutError(f"rank {ranks} of {world_size} still ran after {timeout:g} s. Where:\n{stacks}")
    # A rank that fails takes others down with it: the earliest error is the cause.
    errors = [(*_read(path), int(path.stem)) for path in folder.glob("*.error")]
    if errors:
        _, text, details, rank = min(errors)
        raise RankError(rank, world_size, text, details)
    for rank, process in enumerate(processes):
        if process.exitcode:
            how = f"ended by signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            raise RankError(rank, world_size, how)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_bytes(pickle.dumps(value))
    temporary.rename(path)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
