# SPDX-License-Identifier: Apache-2.0
"""The contract of recorded actions: the names of their numbers, in order, and their rate.

What is trained on recordings keeps it as plain data: a world model in its action transform's ``stats``, starts beside
the range of actions, a clone in its card. Where two of them meet, another order or rate is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imaginaire.errors import ConfigError

SAME_RATE = 0.02  # a file's rate may be rounded: 29.97 and 30


@dataclass(frozen=True)
class ActionContract:
    """Empty and None: not recorded, which fits everything."""

    names: tuple[str, ...] = ()
    rate: float | None = None  # actions per second

    @classmethod
    def read(cls, record: Any) -> "ActionContract":
        """The contract that a record has; older ones and those of others have none."""
        if not isinstance(record, Mapping):
            return cls()
        rate = record.get("rate")
        return cls(tuple(map(str, record.get("names") or ())), float(rate) if isinstance(rate, int | float) else None)

    def to_dict(self) -> dict[str, Any]:
        found = {"names": list(self.names), "rate": self.rate}
        return {name: value for name, value in found.items() if value}

    def require(self, other: "ActionContract", what: str, and_what: str, cure: str) -> None:
        """Raise where ``what``, of this contract, takes actions of another order or rate than ``and_what`` has."""
        if self.names and other.names and self.names != other.names:
            ours, theirs = ", ".join(self.names), ", ".join(other.names)
            raise ConfigError(f"{what} takes the actions ({ours}), but {and_what} ({theirs}): {cure}")
        if self.rate and other.rate and abs(self.rate / other.rate - 1) > SAME_RATE:
            rates = f"{what} takes {self.rate:g} actions per second, but {and_what} {other.rate:g}"
            raise ConfigError(f"{rates}: {cure}")


UNKNOWN = ActionContract()
