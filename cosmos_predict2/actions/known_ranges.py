# SPDX-License-Identifier: Apache-2.0
"""Numbers of an action whose raw range is known before any recording is read: grippers, joints in a stated unit."""

from collections.abc import Mapping
from dataclasses import dataclass

import attrs

from cosmos_predict2.actions.transforms import ActionTransform


@dataclass(frozen=True, slots=True)
class KnownRange:
    """The raw value ``low`` becomes ``to`` for a model, and ``high`` 1: of a gripper the open and the closed one.

    Usual values that lie beyond either end by more than ``slack`` of the range contradict it.
    """

    low: float
    high: float
    to: float = 0.0
    slack: float = 0.1

    def problem(self, q01: float, q99: float) -> str | None:
        """Say what contradicts the range if 98 % of the raw values lie between these; null: nothing."""
        least, most = sorted((self.low, self.high))
        slack = self.slack * (most - least)
        is_inside = q01 >= least - slack and q99 <= most + slack
        return None if is_inside else f"98 % lie in {q01:.4g}..{q99:.4g}, but {least:g} to {most:g} is the range"


def with_known_ranges(transform: ActionTransform, known: Mapping[int, KnownRange]) -> ActionTransform:
    """The transform with these numbers by their ranges. If that is all of them it is no proposal any more, so that
    weights of other units are refused."""
    scale, offset = list(transform.scale), list(transform.offset or (0.0,) * transform.dim)
    for k, of_number in known.items():
        scale[k] = (1.0 - of_number.to) / (of_number.high - of_number.low)
        offset[k] = of_number.to - of_number.low * scale[k]
    is_open = transform.proposed and len(known) < transform.dim
    return attrs.evolve(transform, scale=scale, offset=offset, proposed=is_open)
