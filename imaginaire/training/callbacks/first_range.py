# SPDX-License-Identifier: Apache-2.0
"""Whether a figure of training has left the range of its first steps, and what in the configuration may be why."""

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

FIRST, LAST = 5, 5  # steps that make the first range, and whose median is compared with it


class FirstRange:
    """Whether the median of a figure's last five values lies ``factor`` times above the largest of its first five, or
    ten times as far above the very first, since the first five may have been growing already.

    One value that is far out is no finding, and a figure that begins at zero or below has no scale to leave. What has
    been found once is not found again.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST)
        self._is_found = False

    def add(self, value: float) -> tuple[float, float, float] | None:
        """(median now, the very first, largest of the first) where this value makes the figure leave its range."""
        if len(self._first) < FIRST:
            self._first.append(value)
            return None
        self._last.append(value)
        if self._is_found or len(self._last) < LAST or min(self._first) <= 0:
            return None
        now, begin, largest = median(self._last), self._first[0], max(self._first)
        self._is_found = now > self.factor * min(largest, 10 * begin)
        return (now, begin, largest) if self._is_found else None

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first), "is_found": self._is_found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first, self._is_found = [float(value) for value in state["first"]], bool(state["is_found"])


def causes_in(config: Any) -> list[str]:
    """The keys of a configuration that decide how large steps are, with their values."""
    found = []
    for key, why in (
        ("optimizer.lr", "lower it"),
        ("optimizer.adam_lr", "lower it"),
        ("scheduler.warm_up_steps", "raise it"),
        ("trainer.callbacks.grad_clip.clip_norm", "lower it"),
        ("dataloader_train.batch_size", "raise it, or trainer.grad_accum_iter"),
    ):
        value = _value(config, key)
        if value is not None:
            found.append(f"{key}={value} ({why})")
    return found


def _value(config: Any, key: str) -> Any:
    """What stands under a dotted key; None where there is nothing."""
    for name in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        else:
            config = getattr(config, name, None)
    return config
