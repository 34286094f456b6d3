# SPDX-License-Identifier: Apache-2.0
"""An actor of Ray with little to import: the references that ranks exchange."""

from typing import Any


class ReferenceTable:
    """References of each rank by the number of the exchange, kept until all ranks have taken them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.references: dict[int, dict[int, Any]] = {}
        self.num_taken: dict[int, int] = {}

    def put(self, number: int, rank: int, references: list[Any]) -> None:
        """One reference in a list, by which Ray passes it on as it is."""
        self.references.setdefault(number, {})[rank] = references[0]

    def take(self, number: int) -> list[Any]:
        """The references of all ranks, in their order."""
        found = self.references[number]
        self.num_taken[number] = self.num_taken.get(number, 0) + 1
        if self.num_taken[number] == self.num_ranks:
            del self.references[number], self.num_taken[number]
        return [found[rank] for rank in range(self.num_ranks)]
