# SPDX-License-Identifier: Apache-2.0
"""The queue of an address, of one machine or of several."""

from cosmos_predict2.rl.rewards.service.queue import Limits, Queue
from imaginaire.errors import ConfigError


def open_queue(place: str, limits: Limits) -> Queue:
    """The queue at ``place``: redis://HOST:PORT/DB (or rediss://, unix://), else a file of SQLite."""
    if place.startswith(("redis://", "rediss://", "unix://")):
        from cosmos_predict2.rl.rewards.service.redis_queue import RedisQueue

        return RedisQueue(place, limits)
    if "://" in place:
        raise ConfigError(f"--queue {place}: expected redis://HOST:PORT/DB, or the path of a file for SQLite.")
    from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue

    return SQLiteQueue(place, limits)
