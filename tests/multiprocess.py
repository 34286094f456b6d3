# SPDX-License-Identifier: Apache-2.0
"""Run a function on several processes that form one gloo group, and bring values or errors back.

    values = run_distributed(_sum_of_ranks, world_size=2, args=(tmp_path,))

The function lives at module level (it travels by name). The rendezvous is a store that the parent holds on a port given
by the system, as torchrun does it, so two tests never meet on one port. Processes are forked as `tests.programs` does
it, since importing is most of what a short-lived rank would do. So they have one seed of hashes in common, unlike those
of torchrun: what depends on the order of a set shows in the tests with torchrun alone.
"""

import contextlib
import faulthandler
import multiprocessing.connection
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from tests.programs import HANG_S, warm_python

ROOT = str(Path(__file__).parent.parent)
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from tests import multiprocess; multiprocess.run_called()"


class Process:
    """``target(*args)`` in a process of its own. It travels by name, and its arguments by value: tensors would travel
    as open files, of which there may be too many."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str] | None = None) -> None:
        self._called, self._env = pickle.dumps((target, args)), env

    def start(self) -> None:
        command = [warm_python(), "-c", CHILD, ROOT, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=self._env)
        self.sentinel = os.pidfd_open(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(self._called)
            self._stdin.flush()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def end(self) -> None:
        """Kill it, and wait until nobody reads its standard input: `_process` is a stand-in for it."""
        self._process.kill()
        self._process.wait()
        readers = select.poll()
        readers.register(self._stdin, 0)
        readers.poll(1000 * HANG_S)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        os.close(self.sentinel)


def run_called() -> None:
    """In the child, which ends with its parent, however that comes about (a killed test run leaves no ranks)."""
    parent = os.pidfd_open(int(sys.argv[2]))

    def watch() -> None:
        select.select([parent], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    target, args = pickle.load(sys.stdin.buffer)
    target(*args)


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

    Ranks in ``lost`` are meant to die: the others go on, and their value is None. On a busy machine Gloo now and then
    closes a connection before a group is there, and nothing of ours has run: the ranks are started once more.
    """
    try:
        return _run(fn, world_size, args, timeout, env, lost)
    except RankError as error:
        if "connectFullMesh failed" not in error.error:
            raise
    return _run(fn, world_size, args, timeout, env, lost)


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    env: Mapping[str, str] | None,
    lost: Collection[int],
) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    deadline = time.time() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[Process] = []
        try:
            for rank in range(world_size):
                environment = {**os.environ, **_rank_environment(rank, world_size, store.port), **(env or {})}
                processes.append(Process(_run_rank, (fn, args, rank, folder, deadline), environment))
                processes[-1].start()
            _wait([p for rank, p in enumerate(processes) if rank not in lost], Path(folder), deadline, timeout)
            paths = [Path(folder) / f"{rank}.value" for rank in range(world_size)]
            return [None if rank in lost else _read(path) for rank, path in enumerate(paths)]
        finally:
            for process in processes:
                process.end()
            del store


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    place |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # rank 0 joins the parent's store instead of opening one
    return {**place, **one_thread, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _run_rank(fn: Callable[..., Any], args: tuple[Any, ...], rank: int, folder: str, deadline: float) -> None:
    """In the child: join, run, leave the value or the error in a file."""
    torch.set_num_threads(1)
    with open(Path(folder) / f"{rank}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(max(0.05, deadline - time.time() - 0.5), file=stacks)
        try:
            from imaginaire import distributed

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


def _wait(processes: list[Process], folder: Path, deadline: float, timeout: float) -> None:
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
