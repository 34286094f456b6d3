# SPDX-License-Identifier: Apache-2.0
"""Several parts of a model with an optimizer and a schedule each, as one optimizer and one schedule.

A step is that of the parts that have gradients: a batch trains one part, and leaves the weights, the moments and the
learning rate of the others as they are. Parameters must not be shared between parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from imaginaire.optim.schedules import ConfiguredLR, Schedule


class PartsOptimizer(Optimizer):
    """The optimizers of the parts, by name. Groups and states are theirs."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})
        for part in self.parts.values():
            part.state = self.state
        self.stepped: list[str] = []  # the parts of the last step, or of one that was left out

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("PartsOptimizer takes no closure.")
        self.stepped = self._with_gradients() or self.stepped
        for name in self.stepped:
            self.parts[name].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stepped = self._with_gradients() or self.stepped
        super().zero_grad(set_to_none)

    def _with_gradients(self) -> list[str]:
        return [
            name
            for name, part in self.parts.items()
            if any(p.grad is not None for group in part.param_groups for p in group["params"])
        ]


class PartsScheduler:
    """The schedules of the parts; each counts the steps of its own part."""

    def __init__(self, optimizer: PartsOptimizer, schedules: Mapping[str, Schedule]) -> None:
        self.optimizer = optimizer
        self.parts = {name: ConfiguredLR(part, schedules[name]) for name, part in optimizer.parts.items()}

    def step(self) -> None:
        for name in self.optimizer.stepped:
            self.parts[name].step()

    def get_last_lr(self) -> list[float | Tensor]:
        return [rate for part in self.parts.values() for rate in part.get_last_lr()]

    @property
    def lr_lambdas(self) -> list[Callable[[int], float]]:
        return [f for part in self.parts.values() for f in part.lr_lambdas]

    @property
    def base_lrs(self) -> list[Any]:
        return [rate for part in self.parts.values() for rate in part.base_lrs]

    @base_lrs.setter
    def base_lrs(self, rates: list[Any]) -> None:
        left = list(rates)
        for part in self.parts.values():
            part.base_lrs, left = left[: len(part.base_lrs)], left[len(part.base_lrs) :]

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue each part at its saved step."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict.get(name, {}))
