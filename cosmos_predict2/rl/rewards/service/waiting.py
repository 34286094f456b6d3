# SPDX-License-Identifier: Apache-2.0
"""Pulls that wait: one look at the queue for all of them at a time."""

import asyncio
import contextlib
import logging
from collections import defaultdict

from cosmos_predict2.rl.rewards.service.queue import Queue

log = logging.getLogger(__name__)

LOOK_S = 0.02


class Waiting:
    """Wakes those that wait for a job when it is settled."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._woken: dict[tuple[str, str], list[asyncio.Event]] = defaultdict(list)
        self._is_closing = False

    async def wait(self, ticket: str, reward: str, seconds: float) -> None:
        """Until the job is settled, ``seconds`` are over, or the service stops."""
        if self._is_closing:
            return
        event, key = asyncio.Event(), (ticket, reward)
        self._woken[key].append(event)
        try:
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
        finally:
            self._woken[key].remove(event)
            if not self._woken[key]:
                del self._woken[key]

    def close(self) -> None:
        """Answer all that wait, now."""
        self._is_closing = True
        for events in list(self._woken.values()):
            for event in events:
                event.set()

    async def watch(self) -> None:
        """For as long as the service runs."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._woken:
                continue
            try:
                for key in await asyncio.to_thread(self.queue.settled, list(self._woken)):
                    for event in self._woken.get(key, ()):
                        event.set()
            except Exception:  # the next look may succeed; until then pulls wait to their end
                log.exception("the queue could not be looked at")
                await asyncio.sleep(1.0)
