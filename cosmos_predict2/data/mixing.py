# SPDX-License-Identifier: Apache-2.0
"""Several data sets by ratio, as one: sample by sample, or in whole batches that each come from one data set.

Turn i of a mixture belongs to a data set by a fixed pattern, in which after n turns each had its share of them to less
than one. A data set's own n-th turn is sample ``permutation(seed, n // size)[n % size]`` of it: it is gone through
without repeats, and then again in another order. All of this is a pure function of i.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from imaginaire import random
from imaginaire.data import workers
from imaginaire.data.stream import ResumableLoader, with_positions
from imaginaire.data.workers import Indices
from imaginaire.distributed.parallel import ParallelDims, current_dims
from imaginaire.errors import ConfigError, DataError

LONGEST_PATTERN = 10_000


class DatasetTurns:
    """An endless series of turns: the data set of any turn, and its own count of turns before it."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self.weights = _integers(ratios)
        self.period = sum(self.weights)
        self.pattern = _even_pattern(self.weights)
        self._earlier: list[tuple[int, ...]] = []  # turns of each before a place of the pattern
        counts = [0] * len(ratios)
        for which in self.pattern:
            self._earlier.append(tuple(counts))
            counts[which] += 1

    def __getitem__(self, turn: int) -> tuple[int, int]:
        """(number of the data set, its own turn)."""
        rounds, place = divmod(turn, self.period)
        which = self.pattern[place]
        return which, rounds * self.weights[which] + self._earlier[place][which]

    def covering(self, sizes: Sequence[int]) -> int:
        """Whole rounds of the pattern, in turns, after which each data set was gone through at least once."""
        return self.period * max(-(-size // weight) for size, weight in zip(sizes, self.weights, strict=True))


class JoinedDatasets(Dataset[Any]):
    """Data sets side by side, indexed by (number of the data set, index in it); items have their ``dataset_name``.

    With ``keys`` nothing else is kept of an item. With ``alike`` the items of all must have the same keys and shapes.
    """

    def __init__(
        self, datasets: Mapping[str, Any] | Sequence[Any], *, keys: Sequence[str] | None = None, alike: bool = True
    ) -> None:
        self.datasets = _named(datasets)
        self.names = list(self.datasets)
        self._members = list(self.datasets.values())
        self._keys = keys
        self._alike = alike
        self._seen: dict[int, Any] = {}  # the shapes of the first item of each, in this process

    @property
    def sizes(self) -> list[int]:
        return [len(member) for member in self._members]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        which, index = place
        item = self._members[which][index]
        if not isinstance(item, Mapping):
            raise DataError(f"{self._what(which)} gives a {type(item).__name__}; mixed data sets give dictionaries.")
        if self._keys is not None:
            if missing := [key for key in self._keys if key not in item]:
                raise DataError(f"Items of {self._what(which)} have no {', '.join(missing)}, which keys= requires.")
            item = {key: item[key] for key in self._keys}
        if self._alike and which not in self._seen:
            self._compare(which, item)
        return {**item, "dataset_name": item.get("dataset_name", self.names[which])}

    def _compare(self, which: int, item: Mapping[str, Any]) -> None:
        self._seen[which] = {key: value for key, value in _form(item).items() if key != "dataset_name"}
        first = next(iter(self._seen))
        if (found := workers.difference(self._seen[first], self._seen[which])) is not None:
            del self._seen[which]
            raise DataError(
                f"{self._what(first)} (the first) and {self._what(which)} (the second) cannot be mixed sample by"
                f" sample: {found}. Give them one size and one length, keep the keys that both have (keys=[...]), or"
                " mix whole batches (MixedLoader)."
            )

    def _what(self, which: int) -> str:
        return f"the data set '{self.names[which]}' ({type(self._members[which]).__name__})"


class SampleOrders:
    """The orders in which the samples of each data set are read, pass after pass."""

    def __init__(self, sizes: Sequence[int], names: Sequence[str], shuffle: bool) -> None:
        self._sizes = sizes
        self._names = names
        self._shuffle = shuffle
        self._permutations: dict[int, tuple[int, int, torch.Tensor]] = {}

    def index(self, seed: int, which: int, turn: int) -> int:
        """The index of a data set's own turn."""
        size = self._sizes[which]
        epoch, place = divmod(turn, size)
        if not self._shuffle:
            return place
        known = self._permutations.get(which)
        if known is None or known[:2] != (seed, epoch):
            generator = random.generator(seed, epoch, f"mixing/{self._names[which]}")
            known = self._permutations[which] = (seed, epoch, torch.randperm(size, generator=generator))
        return int(known[2][place])


class MixedLoader(ResumableLoader):
    """Endless batches of several data sets by ratio, and one pass over them for validation.

    ``by="batch"``: each batch comes from one data set, so these may differ in everything (images and videos) and
    have batch sizes of their own; ratios count batches. ``by="sample"``: each batch is mixed. A resumed run goes on
    exactly; with another number of ranks ``by="batch"`` goes on at the turn that was reached, to within one round of
    its pattern.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any] | Sequence[Any],
        ratios: Mapping[str, float] | Sequence[float],
        batch_size: int | Mapping[str, int] = 1,
        by: Literal["batch", "sample"] = "batch",
        shuffle: bool = True,
        keys: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if by not in ("batch", "sample"):
            raise ConfigError(f"by={by!r}: a mixture is made by 'batch' or by 'sample'.")
        if by == "sample" and isinstance(batch_size, Mapping):
            raise ConfigError("batch_size has one number for each data set, which needs by='batch'.")
        members = JoinedDatasets(datasets, keys=keys, alike=by == "sample")
        sizes = batch_size if isinstance(batch_size, Mapping) else [batch_size] * len(members.names)
        each = _in_order(sizes, members.names)
        super().__init__(members, min(each), shuffle=shuffle, **options)
        self.members = members
        self._by_batch = by == "batch"
        self._sizes = [int(size) for size in each]
        self._turns = DatasetTurns(_in_order(ratios, members.names))
        self._orders = SampleOrders(members.sizes, members.names, shuffle)
        # samples of a rank before each turn of the pattern, and in all of it
        self._before = [0, *itertools.accumulate(self._sizes[which] for which in self._turns.pattern)]

    def __len__(self) -> int:
        """Batches of one pass: until every sample of every data set was read."""
        ranks = current_dims().dp_size
        if self._by_batch:
            batches = [-(-size // (batch * ranks)) for size, batch in zip(self.members.sizes, self._sizes, strict=True)]
            return self._turns.covering(batches)
        return -(-self._turns.covering(self.members.sizes) // (self.batch_size * ranks))

    def __iter__(self) -> Iterator[Any]:
        batches = list(itertools.islice(self.batches(0, 0, current_dims()), len(self)))
        read = workers.load(self.dataset, batches, 0, "validation", self._options)
        end = None if self._by_batch else self._turns.covering(self.members.sizes)
        for batch, indices in zip(read, batches, strict=True):
            yield with_positions(batch, indices, end)

    def batches(self, seed: int, start: int, dims: ParallelDims) -> Iterator[Indices]:
        return self._whole(seed, start, dims) if self._by_batch else self._mixed(seed, start, dims)

    def _mixed(self, seed: int, start: int, dims: ParallelDims) -> Iterator[Indices]:
        for first in itertools.count(start + dims.dp_rank * self.batch_size, self.batch_size * dims.dp_size):
            batch = []
            for position in range(first, first + self.batch_size):
                which, turn = self._turns[position]
                batch.append((position, (which, self._orders.index(seed, which, turn))))
            yield batch

    def _whole(self, seed: int, start: int, dims: ParallelDims) -> Iterator[Indices]:
        rounds, samples = divmod(start, self._before[-1] * dims.dp_size)
        place = bisect_right(self._before, samples / dims.dp_size) - 1
        for number in itertools.count(rounds * self._turns.period + place):
            which, turn = self._turns[number]
            size = self._sizes[which]
            offset = dims.dp_rank * size
            first = turn * size * dims.dp_size + offset
            indices = [self._orders.index(seed, which, own) for own in range(first, first + size)]
            yield [(start + offset + k, (which, index)) for k, index in enumerate(indices)]
            start += size * dims.dp_size


def _named(datasets: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    named = dict(datasets) if isinstance(datasets, Mapping) else {str(i): d for i, d in enumerate(datasets)}
    if not named:
        raise ConfigError("A mixture needs at least one data set.")
    for name, dataset in named.items():
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ConfigError(f"The data set '{name}' ({type(dataset).__name__}) has no __len__ and __getitem__.")
        if len(dataset) == 0:
            raise DataError(f"The data set '{name}' ({type(dataset).__name__}) is empty (0 samples).")
    return {str(name): dataset for name, dataset in named.items()}


def _in_order(values: Any, names: Sequence[str]) -> list[Any]:
    """One value for each data set, in their order."""
    if isinstance(values, Mapping):
        by_name = {str(name): value for name, value in values.items()}
        if by_name.keys() != set(names):
            raise ConfigError(f"Given are numbers for {', '.join(sorted(by_name))}; the data sets: {', '.join(names)}.")
        return [by_name[name] for name in names]
    if len(values) != len(names):
        raise ConfigError(f"Given are {len(values)} numbers for {len(names)} data sets ({', '.join(names)}).")
    return list(values)


def _integers(ratios: Sequence[float]) -> list[int]:
    """The smallest whole numbers with these ratios."""
    bad = [r for r in ratios if isinstance(r, bool) or not isinstance(r, int | float) or not 0 < r < math.inf]
    if bad:
        raise ConfigError(f"The ratios {list(ratios)} must be numbers above 0; leave a data set out to not use it.")
    exact = [Fraction(str(ratio)) for ratio in ratios]
    whole = [int(value * math.lcm(*(f.denominator for f in exact))) for value in exact]
    smallest = [value // math.gcd(*whole) for value in whole]
    if sum(smallest) > LONGEST_PATTERN:
        raise ConfigError(
            f"The ratios {list(ratios)} repeat after {sum(smallest)} turns (at most {LONGEST_PATTERN}). Round them."
        )
    return smallest


def _even_pattern(weights: Sequence[int]) -> list[int]:
    """Each number k ``weights[k]`` times, as evenly as can be (Tijdeman's rule for the chairman assignment problem)."""
    period = sum(weights)
    given = [0] * len(weights)
    pattern = []
    for turn in range(period):
        # Of those with less than their share, the one that would be the first to be a whole turn behind.
        behind = [k for k, weight in enumerate(weights) if given[k] * period < weight * (turn + 1)]
        chosen = min(behind, key=lambda k: (Fraction((given[k] + 1) * period, weights[k]), k))
        given[chosen] += 1
        pattern.append(chosen)
    return pattern


def _form(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item without its data: tensors on the meta device."""
    return {
        key: _form(value) if isinstance(value, Mapping) else value.to("meta") if hasattr(value, "to") else value
        for key, value in item.items()
    }
