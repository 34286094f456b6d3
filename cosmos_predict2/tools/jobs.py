# SPDX-License-Identifier: Apache-2.0
"""Long preparation work: the same function over many items, on several cores, with a progress bar and a summary."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from imaginaire.errors import DataError, UserError, disk_fault
from imaginaire.log import Progress

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Outcome(Generic[Result]):
    """Results of many items, in the order of the items, and a sentence for each one that failed."""

    results: list[Result] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def report(self, what: str, most: int = 10) -> int:
        """Log the faults; the exit code, 1 if there are any."""
        for fault in self.faults[:most]:
            log.error("%s", fault)
        if len(self.faults) > most:
            log.error("... and %d more", len(self.faults) - most)
        if self.faults:
            log.error("%d of %d %s failed", len(self.faults), len(self.faults) + len(self.results), what)
        return int(bool(self.faults))


def run_jobs(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    what: str,
    workers: int | None = None,
    in_threads: bool = False,
) -> Outcome[Result]:
    """Apply a function of a module to every item, in ``workers`` processes (default: one a core; 0: in this one).

    ``in_threads`` is for functions that wait for others to work: no processes are started for them.

    An item that raises one of our errors, or that the disk refuses, becomes a fault, and the others go on; any other
    exception is a bug and ends the work with its own traceback.
    """
    workers = min(len(items), num_cores() if workers is None else workers)
    done: dict[int, Result] = {}
    faults: dict[int, str] = {}
    with Progress(what, len(items)) as bar:
        for index, result in _finished(function, items, workers, in_threads):
            if isinstance(result, UserError):
                faults[index] = str(result)
            else:
                done[index] = result
            bar.update()
    return Outcome([done[i] for i in sorted(done)], [faults[i] for i in sorted(faults)])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, in_threads: bool
) -> Iterator[tuple[int, Result | UserError]]:
    if workers <= 1:
        for index, item in enumerate(items):
            yield index, _tried(function, item)
        return
    with _pool(workers, in_threads) as pool:
        running: dict[Future[Result | UserError], int] = {}
        todo = iter(enumerate(items))
        try:
            while True:
                while len(running) < 4 * workers and (following := next(todo, None)) is not None:
                    running[pool.submit(_tried, function, following[1])] = following[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process ended without a word: most often memory ran out. Run it again with fewer --workers."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pool(workers: int, in_threads: bool) -> Executor:
    if in_threads:
        return ThreadPoolExecutor(workers)
    # spawn: forked children of a process with running threads may hang
    context = multiprocessing.get_context("spawn")
    leave_interrupts = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches them too, but is for the parent to answer
    return ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=leave_interrupts)


def _tried(function: Callable[[Item], Result], item: Item) -> Result | UserError:
    try:
        return function(item)
    except UserError as error:
        return error
    except OSError as error:
        if (fault := disk_fault(error)) is None:
            raise
        return DataError(fault)
