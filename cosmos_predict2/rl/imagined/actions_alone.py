# SPDX-License-Identifier: Apache-2.0
"""Success predicted from the actions alone, without a picture: what an imagination has to beat.

Recorded drivers often fail by coarse mistakes, which their actions show. An imagination that judges a policy's attempts
no better than this has added nothing to them. Letters: N known episodes, E others, d numbers of an episode's actions.
"""

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.envs.replays import held, recorded_actions
from imaginaire.errors import ConfigError, DataError

Values = NDArray[numpy.float64]

RIDGE = 0.5  # of the kernel's regression; .1 and 2 changed areas by .01 on two tasks


class ActionsAlone:
    """A kernel's regression of success on the actions of known episodes; far from all of them it is their mean."""

    def __init__(self, actions: Sequence[Tensor], success_N: NDArray[numpy.bool_]) -> None:
        self._length, self._width_of_action = max(len(rows) for rows in actions), actions[0].shape[1]
        rows_N_d = self._rows(actions)
        self._mean, self._std = rows_N_d.mean(axis=0), rows_N_d.std(axis=0) + 1e-6
        self._known_N_d = (rows_N_d - self._mean) / self._std
        self._width = float(numpy.median(self._distance(self._known_N_d))) or 1.0
        self._prior = float(success_N.mean())
        kernel_N_N = self._kernel(self._known_N_d) + RIDGE * numpy.eye(len(success_N))
        self._weights_N = numpy.linalg.solve(kernel_N_N, success_N - self._prior)

    @classmethod
    def of(cls, source: LeRobotSource, numbers: Sequence[int], outcomes: Sequence[bool | None]) -> "ActionsAlone":
        """Learnt from those of these recordings that have an action and a known outcome."""
        known = [i for i in numbers if outcomes[i] is not None and source.episodes.lengths[i] > 1]
        if not known:
            raise DataError(f"{source.info.root}: no recording to learn from has an action and a known outcome.")
        success_N = numpy.array([bool(outcomes[i]) for i in known])
        return cls([recorded_actions(source, i) for i in known], success_N)

    def __call__(self, actions: Sequence[Tensor]) -> Values:
        """[E], larger where success is likelier."""
        if (width := actions[0].shape[1]) != self._width_of_action:
            raise ConfigError(
                f"The recordings have actions of {self._width_of_action} numbers, but these have {width}: name the"
                " columns that make an action (--action_keys)."
            )
        rows_E_d = (self._rows(actions) - self._mean) / self._std
        found: Values = self._prior + self._kernel(rows_E_d) @ self._weights_N
        return found

    def _rows(self, actions: Sequence[Tensor]) -> Values:
        """Actions and their sums so far, which are places where actions are motions; behind an end the last ones."""
        rows = [part[: self._length].double() for part in actions]
        rows = [held(torch.cat([part, part.cumsum(dim=0)], dim=1), self._length) for part in rows]
        return torch.stack(rows).flatten(1).numpy()

    def _distance(self, rows_E_d: Values) -> Values:
        squares = (rows_E_d**2).sum(axis=1)[:, None] + (self._known_N_d**2).sum(axis=1)
        found: Values = (squares - 2 * rows_E_d @ self._known_N_d.T).clip(0)
        return found

    def _kernel(self, rows_E_d: Values) -> Values:
        return numpy.asarray(numpy.exp(-self._distance(rows_E_d) / self._width))
