# SPDX-License-Identifier: Apache-2.0
"""Side channels are work that a run can do without: trackers, log files, samples, traces.

Their failure, whatever it is, costs one warning and their data, never the run. Nothing of the training itself belongs
inside: its errors must not be swallowed.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from imaginaire import distributed
from imaginaire.distributed import places
from imaginaire.training.watchdog import lost_peer

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_IN_STEP_S = 60.0  # within which ranks that run a sharded network together meet an error that is common to them


class SideChannel:
    """One side channel. Its first failure is a warning with the reason; later ones are logged at level debug.

    A full disk may be emptied, so what fails is tried again at its next turn.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context in which an exception is this channel's failure."""
        try:
            yield
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException | str) -> None:
        self.failures += 1
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        log.log(
            logging.WARNING if self.failures == 1 else logging.DEBUG,
            "%s failed; training goes on without it (reported once): %s",
            self.name,
            " ".join(reason.split())[:500],
            stacklevel=2,
        )
        if not isinstance(error, str):
            log.debug("where %s failed", self.name, exc_info=error)

    def together(self, turn: str, work: Callable[[], Result], *, in_step: bool) -> Result | None:
        """The result of what all ranks do, each its part; None on all of them where it failed on any.

        ``turn`` names this turn and no other. ``in_step``: the parts wait for each other, as those of a sharded network
        do. An error that not all ranks meet then ends the run, since the others may wait in it for ever.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            if lost_peer(error):  # not this channel's failure: the run cannot go on
                raise
            failure = error
        patience = _IN_STEP_S if failure is not None and in_step else distributed.timeout_s()
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = places.exchange(f"{self.name} {turn}", reason, patience)
        if reasons is None or (in_step and failure is not None and not all(reasons)):
            raise failure or RuntimeError(f"{self.name}: waited in vain for the other ranks at {turn}")
        if not any(reasons):
            return result
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
        if distributed.is_rank0():
            where = f"on rank {rank}, " if len(reasons) > 1 else ""
            self.failed(failure if failure is not None and rank == 0 else f"{where}{reason}")
        return None
