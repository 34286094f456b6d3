# SPDX-License-Identifier: Apache-2.0
"""A mean over steps that never waits for the device until it is asked for."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MAX_PENDING = 1024


class RunningMean:
    """Weighted mean of the finite values added, and the number of the others. Sums are floats, in order of arrival."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._non_finite = 0
        self._pending: list[tuple[Tensor, float]] = []

    def add(self, value: Tensor | float, weight: float = 1.0) -> None:
        if isinstance(value, Tensor):
            value = value.detach()
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._pending.append((value.reshape(()).clone(), weight))  # a copy: the model may reuse its tensor
            if len(self._pending) >= _MAX_PENDING:
                self._fold()
        else:
            self._add(float(value), weight)

    def totals(self) -> tuple[float, float, int]:
        """(weighted sum, weight, number of non-finite values): what ranks add up."""
        self._fold()
        return self._sum, self._weight, self._non_finite

    def mean(self) -> float | None:
        """None when nothing finite was added."""
        total, weight, _ = self.totals()
        return total / weight if weight else None

    def state_dict(self) -> dict[str, Any]:
        total, weight, non_finite = self.totals()
        return {"sum": total, "weight": weight, "non_finite": non_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._sum, self._weight, self._non_finite = state["sum"], state["weight"], state["non_finite"]

    def _add(self, value: float, weight: float) -> None:
        if math.isfinite(value):
            self._sum += value * weight
            self._weight += weight
        else:
            self._non_finite += 1

    def _fold(self) -> None:
        if not self._pending:
            return
        values = torch.stack([value.double() for value, _ in self._pending]).tolist()
        for value, (_, weight) in zip(values, self._pending, strict=True):
            self._add(value, weight)
        self._pending = []
