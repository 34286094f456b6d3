# SPDX-License-Identifier: Apache-2.0
"""One split of recordings, by episode, in one JSON file that every program reads.

    write_split(path, make_split(folder))
    split = read_split(path)
    split.require(source)                # refuses another data set
    split.of("train"), split.held_out

Both outcomes are in every part. The world model, the policy and the reward learn from ``train``; thresholds and stop
rules look at ``calibrate``, and figures of a reward are of ``test``. The gate reports on both, which makes what its
verdict decides a choice by ``test``, too: success that is to be published is of later episodes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.data.lerobot.info import Part, held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from imaginaire import foreign_json, storage
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.random import derive_seed

PARTS = ("train", "calibrate", "test")
ANY_PART = (*PARTS, "held_out")
SUCCESS_COLUMN = "next.success"
HELD_OUT = 0.3
LEAST_IN_PART = 2  # episodes of either outcome: one alone gives no area under a curve and no spread
LEAST = LEAST_IN_PART * len(PARTS)
_FORMAT = "split 1"
_NUM_LOOKED_INTO = 8  # episodes whose numbers identify a data set
_WORDS = {True: "succeeded", False: "failed"}


@dataclass(frozen=True)
class Split:
    """Episode numbers of each part, in the order of the data set."""

    data: str  # the folder, as it was given
    train: tuple[int, ...]
    calibrate: tuple[int, ...]
    test: tuple[int, ...]
    outcomes: tuple[bool | None, ...]  # of every episode; None is unknown
    lengths: tuple[int, ...]  # frames of every episode
    contents: str  # digest of the numbers of some episodes
    judged_by: str  # what the outcomes were read from

    @property
    def held_out(self) -> tuple[int, ...]:
        return tuple(sorted(self.calibrate + self.test))

    @property
    def digest(self) -> str:
        """The same for the same episodes, parts and outcomes, wherever the data lie."""
        content = {key: value for key, value in asdict(self).items() if key != "data"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def of(self, part: str) -> tuple[int, ...]:
        """The episodes of a part: train, calibrate, test, or held_out, the last two together."""
        if part not in ANY_PART:
            raise ConfigError(f"There is no part '{part}' of a split.{near(part, ANY_PART)}")
        numbers: tuple[int, ...] = getattr(self, part)
        return numbers

    def count(self, part: str, outcome: bool | None) -> int:
        return sum(self.outcomes[i] is outcome for i in self.of(part))

    def successes(self, part: str) -> tuple[int, ...]:
        return tuple(i for i in self.of(part) if self.outcomes[i])

    def require(self, source: LeRobotSource) -> None:
        """Raise if the split is of another data set than ``source``."""
        root, cure = source.info.root, "Make one of this data set: python -m scripts.split_recordings"
        if len(source) != len(self.lengths):
            raise DataError(
                f"{root} has {len(source)} episodes, but the split is of {len(self.lengths)} ({self.data}). {cure}."
            )
        lengths = tuple(source.episodes.lengths.tolist())
        if lengths != self.lengths:
            i = next(k for k, (found, known) in enumerate(zip(lengths, self.lengths, strict=True)) if found != known)
            raise DataError(
                f"{root}: episode {i} has {lengths[i]} frames, but {self.lengths[i]} in the split of {self.data}, which"
                f" is of other recordings. {cure}."
            )
        if _contents(source) != self.contents:
            raise DataError(
                f"{root} has episodes as long as those of {self.data}, of which the split is, but other numbers in"
                f" them. {cure}."
            )


def make_split(
    folder: Path | str,
    *,
    success_column: str = SUCCESS_COLUMN,
    held_out: float = HELD_OUT,
    seed: int = 0,
    outcomes: Sequence[bool | None] | None = None,
    judged_by: str = "",
    before: Split | None = None,
) -> Split:
    """A split of a LeRobot data set with both outcomes in every part, and its tasks spread over the parts.

    ``outcomes`` stand in for those of the column. An episode whose outcome is unknown is for training. Episodes of the
    split ``before``, the first ones, keep their parts and outcomes, so that nothing which was held out is learnt from.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out}; it is a share above 0 and below 1.")
    source = LeRobotSource.open(folder)
    if outcomes is None:
        outcomes, judged_by = recorded_outcomes(source, success_column), f"{success_column}, any frame"
    _require_both(source, outcomes)
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    num_before = 0
    if before is not None:
        num_before = _require_continued(before, source)
        outcomes = [*before.outcomes, *outcomes[num_before:]]
        parts = {part: [*before.of(part)] for part in PARTS}
    new = range(num_before, len(outcomes))
    parts["train"] += [i for i in new if outcomes[i] is None]
    for outcome in (True, False):
        found = [i for i in new if outcomes[i] is outcome]
        generator = numpy.random.default_rng(derive_seed(seed, int(outcome), "split of recordings"))
        drawn = [found[k] for k in generator.permutation(len(found)).tolist()]
        of_outcome = sorted(drawn, key=lambda i: list(source.episodes.tasks(i)))  # task by task, in a random order
        for part, numbers in _parts_of(of_outcome, held_out, least=2 * LEAST_IN_PART if before is None else 0).items():
            parts[part] += numbers
    return Split(
        data=str(folder),
        **{part: tuple(sorted(numbers)) for part, numbers in parts.items()},
        outcomes=tuple(outcomes),
        lengths=tuple(source.episodes.lengths.tolist()),
        contents=_contents(source),
        judged_by=judged_by,
    )


def recorded_outcomes(source: LeRobotSource, column: str, *, last: bool = False) -> list[bool | None]:
    """Success of each episode: of any of its frames, as a split reads it, or with ``last`` of the last one, by which
    the gate compares ends and a reward is calibrated.

    None where no frame shows success and some have no number: what is not recorded is no failure either.
    """
    found: list[bool | None] = []
    for i in range(len(source)):
        success, unknown = (part[-1:] if last else part for part in success_of_frames(source, i, column))
        found.append(True if success.any() else None if unknown.any() else False)
    return found


def require_column(source: LeRobotSource, column: str, other: str = "") -> None:
    """Raise where there is no such column of success; ``other`` is what else would do."""
    if column not in source.info.features:
        raise DataError(
            f"{source.info.root} has no column '{column}', which marks success.{near(column, source.info.features)}"
            f" Name it (--success_column), or write it: 1 on frames that show success.{other}"
        )


def success_of_frames(source: LeRobotSource, i: int, column: str) -> tuple[NDArray[numpy.bool_], NDArray[numpy.bool_]]:
    """[F], true for the frames of an episode that show success, by a number above 0.5 in ``column``; and [F], true
    where none is recorded."""
    require_column(source, column)
    values = source.columns(i, [column], gaps=True)[column].astype(numpy.float64)
    values = values.reshape(int(source.episodes.lengths[i]), -1)
    return numpy.any(values > 0.5, axis=1), numpy.any(numpy.isnan(values), axis=1)


def require_usable(source: LeRobotSource, camera: str | None = None, action_keys: Sequence[str] | None = None) -> None:
    """Raise for recordings of which nothing can be learnt: one episode, several cameras and none chosen, actions that
    are not finite."""
    if len(source) < 2:
        raise DataError(f"{source.info.root} has {len(source)} episode: record at least {2 * LEAST}.")
    if camera is None and len(cameras := source.info.cameras) > 1:
        raise DataError(
            f"{source.info.root} has {len(cameras)} cameras: name one, --camera {', '.join(cameras)}, or several views"
            " with + between them."
        )
    source.camera(camera)
    parts: list[Part] = source.action_parts(list(action_keys) if action_keys else None)
    for i in range(len(source)):
        rows = source.parts(i, parts, gaps=True).astype(numpy.float64)[: int(source.episodes.lengths[i]) - 1]
        wrong = numpy.argwhere(~numpy.isfinite(rows))
        if len(wrong):
            row, number = wrong[0]
            raise DataError(
                f"{source.layout.rows(i).path}: {source.name(i)} has actions that are not finite: number {number} of"
                f" row {row} is {rows[row, number]}. Mend or remove the episode; python -m scripts.check_dataset"
                " names all of them."
            )


def write_split(path: Path | str, split: Split) -> None:
    storage.write_json(path, {"format": _FORMAT, "digest": split.digest, **asdict(split)}, indent=4)


def read_split(path: Path | str) -> Split:
    """The split of a file, whose parts are of all its episodes, each in one of them."""
    where = Path(path)
    try:
        content = foreign_json.load_object(where)
    except FileNotFoundError as error:
        raise DataError(
            f"{where} does not exist: python -m scripts.split_recordings DATA --out {where} writes it."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{where} cannot be read as a split: {error}") from error
    names = [field.name for field in fields(Split)]
    if content.get("format") != _FORMAT or (absent := [name for name in names if name not in content]):
        what = "it is of another format" if content.get("format") != _FORMAT else f"it has no '{absent[0]}'"
        raise DataError(f"{where} is no split: {what}. python -m scripts.split_recordings writes one.")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v := content[name], list) else v for name in names}
    split = Split(**values)
    is_whole = (
        all(isinstance(split.of(part), tuple) for part in PARTS)
        and sorted((*split.train, *split.held_out)) == list(range(len(split.lengths)))
        and len(split.outcomes) == len(split.lengths)
        and set(split.outcomes) <= {True, False, None}
    )
    if not is_whole or split.digest != content.get("digest"):
        raise DataError(f"{where} was changed or is damaged: python -m scripts.split_recordings writes it anew.")
    return split


def split_of(path: Path | str, source: LeRobotSource) -> Split:
    """The split of a file, which must be of this data set."""
    split = read_split(path)
    split.require(source)
    return split


def _require_continued(before: Split, source: LeRobotSource) -> int:
    """The number of episodes of a split, which must be the first ones of this data set."""
    num = len(before.lengths)
    lengths = tuple(source.episodes.lengths[:num].tolist())
    if num > len(source) or lengths != before.lengths or _contents(source, num) != before.contents:
        raise DataError(
            f"{source.info.root} does not begin with the {num} episodes of {before.data}, whose split is to be"
            " extended: new episodes belong behind them (scripts.collect --append or --base)."
        )
    return num


def _require_both(source: LeRobotSource, outcomes: Sequence[bool | None]) -> None:
    """Raise where an outcome has too few episodes for every part to have some."""
    if len(outcomes) != len(source):
        raise DataError(f"{source.info.root} has {len(source)} episodes, but {len(outcomes)} outcomes are given.")
    counts = {outcome: sum(found is outcome for found in outcomes) for outcome in (True, False)}
    unknown = len(outcomes) - sum(counts.values())
    few = [f"{LEAST - count} more that {_WORDS[outcome]}" for outcome, count in counts.items() if count < LEAST]
    if few:
        known = f"{counts[True]} succeeded and {counts[False]} failed"
        also = f"; of {unknown} the outcome is unknown" if unknown else ""
        why = "" if counts[False] else " Without failures an imagined one cannot be distinguished from a success."
        why = why if counts[True] else " Without successes there is nothing to learn from: is the column ever 1?"
        raise DataError(
            f"{source.info.root}: of {len(outcomes)} episodes {known}{also}, but {LEAST} of each are needed,"
            f" {LEAST_IN_PART} in every part. Record {' and '.join(few)}.{why}"
        )


def _parts_of(episodes: Sequence[int], share: float, least: int) -> dict[str, list[int]]:
    """Every so many of them, ``least`` at least, are held out, by turns to calibrate and to test."""
    num = min(len(episodes) - least // 2, max(least, round(share * len(episodes))))
    is_held_out = held_out(len(episodes), num / max(1, len(episodes)))
    others = [episodes[k] for k in numpy.flatnonzero(is_held_out).tolist()]
    train = [episodes[k] for k in numpy.flatnonzero(~is_held_out).tolist()]
    return {"train": train, "calibrate": others[::2], "test": others[1::2]}


def _contents(source: LeRobotSource, num: int | None = None) -> str:
    """A digest of the numbers of episodes that are evenly spread over the first ``num``, or all."""
    num = len(source) if num is None else num
    found = hashlib.sha256()
    for i in sorted({k * num // _NUM_LOOKED_INTO for k in range(_NUM_LOOKED_INTO)}):
        for name, values in sorted(source.episode(i, gaps=True).items()):
            found.update(f"{name} {values.shape}".encode() + values.astype(numpy.float64).tobytes())
    return found.hexdigest()[:32]
