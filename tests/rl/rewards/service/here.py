# SPDX-License-Identifier: Apache-2.0
"""A service in the process of the test."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.rl.rewards.service.scoring import Scorer, build_decoder
from cosmos_predict2.rl.rewards.service.server import Service
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings, RewardSettings, ServiceSettings, open_queue
from cosmos_predict2.rl.rewards.service.supervisor import READY, Supervisor
from cosmos_predict2.rl.rewards.service.worker import Worker
from tests.rl.rewards.doubles import HERE, mean


class Here:
    """A service with rewards of these names, the k-th of k workers; the first is a thread of the test."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("mean",),
        function: Any = mean,
        decode: DecodeSettings | None = None,
        **options: Any,
    ) -> None:
        rewards = [
            RewardSettings(reward_type=name, make=f"{HERE}:mean", timeout_s=120.0 + k, device=["cpu"] * (k + 1))
            for k, name in enumerate(names)
        ]
        self.settings = ServiceSettings(queue=str(folder / "queue.sqlite3"), rewards=rewards, **options)
        self.queue = open_queue(self.settings.queue, self.settings.limits())
        self.supervisor = Supervisor(self.settings, self.queue)
        for slot in self.supervisor.slots:
            slot.state = READY
        self.service = Service(self.settings, self.queue, self.supervisor)
        version = self.supervisor.version(names[0])
        self.reports: list[dict[str, Any]] = []
        scorer = Scorer(names[0], function, lambda: build_decoder(decode or DecodeSettings(), "cpu"))
        own = attrs.evolve(self.settings, rewards=rewards[:1])
        self.worker = Worker("w", version, own, self.queue, scorer, self.reports.append)
        self.thread = threading.Thread(target=self.worker.run)

    def work(self) -> None:
        self.thread.start()

    def close(self) -> None:
        if self.thread.ident is not None:
            self.worker.draining.set()
            self.thread.join()
        self.queue.close()
