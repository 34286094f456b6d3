# SPDX-License-Identifier: Apache-2.0
"""Starts out of recordings: one file, `starts.safetensors`, of which a start is read when it is asked for.

`write_starts` makes it, of two sources. `starts_of` cuts recordings: the first picture of an episode, and keyframes,
moments shortly before contact, from which a world model need not imagine the whole way to where it matters.
`read_published` reads the reset states that others published: `.npy` files of an object array of dictionaries, one for
each frame, with ``image`` (uint8 [H, W, 3]), ``instruction`` or ``task``, ``delta_action`` or ``abs_action``, and
perhaps ``init_ee_pose``. Such an array is a pickle, which is read as plain data: no code of the file is run.
"""

import io
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from cosmos_predict2.data.action_conditioned.recorded_episodes import RecordedEpisode
from cosmos_predict2.data.split import ANY_PART
from cosmos_predict2.data.views import stretched
from cosmos_predict2.rl.envs.first_frames import FirstFrames, RecordedFacts
from imaginaire import foreign_json, storage
from imaginaire.checkpoint.plain_pickle import Refused, read_arrays
from imaginaire.distributed.parallel import not_finite
from imaginaire.errors import MISSHAPEN, ConfigError, DataError, disk_fault, near, raised_as

log = logging.getLogger(__name__)

KEYFRAME_MARK = "_kir"  # in the name of a file whose episode begins in the middle of a recording
NUM_LAST = 4  # pictures before the moment, and actions
Keyframes = float | str | None  # a fraction of the episode, GRIPPER, or none
GRIPPER = "gripper"
HELD_OUT_EVERY = 5  # episodes
BEFORE = 4  # frames between a keyframe and the moment that it is taken for
FILE = "starts.safetensors"
_FORMAT = "starts 1"


@dataclass(frozen=True)
class RecordedStart:
    """One start of a recording. A keyframe start has five pictures, the recording's first one and then the last four
    before the moment, and the actions of those four; another has its first picture."""

    name: str
    task: str
    pictures_F_H_W_C: NDArray[numpy.uint8]
    actions_A_D: NDArray[numpy.float32] | None = None
    context: Mapping[str, NDArray[numpy.float32]] = field(default_factory=dict)  # what else is known then
    part: str = ""  # of a split

    @property
    def is_keyframe(self) -> bool:
        return len(self.pictures_F_H_W_C) > 1


def facts_of(episodes: Iterable[RecordedEpisode]) -> RecordedFacts:
    """Length and actions of recordings."""
    long = [episode for episode in episodes if episode.num_frames > 1]
    if not long:
        raise DataError("No recording has two pictures, and an action between them.")
    return RecordedFacts.of([episode.actions()[: episode.num_frames - 1] for episode in long], long[0].contract)


def write_starts(
    path: Path,
    starts: Iterable[RecordedStart],
    sources: Mapping[str, int] | None = None,
    recorded: RecordedFacts | None = None,
    split: str = "",
    views: Sequence[str] = ("",),
) -> int:
    """Write starts to one file, complete or not at all; gives their number. ``sources`` are the files they are of,
    ``split`` is the digest of the split that their parts are of, ``views`` are those of the pictures."""
    tensors: dict[str, NDArray[Any]] = {}
    rows: list[dict[str, Any]] = []
    for i, start in enumerate(starts):
        tensors[f"{i}.pictures"] = numpy.ascontiguousarray(start.pictures_F_H_W_C)
        known = {f"context.{name}": value for name, value in start.context.items()}
        if start.actions_A_D is not None:
            known["actions"] = start.actions_A_D
        for name, value in known.items():
            tensors[f"{i}.{name}"] = numpy.ascontiguousarray(value, dtype=numpy.float32)
        of_split = {"part": start.part} if start.part else {}
        rows.append({"name": start.name, "task": start.task, "is_keyframe": start.is_keyframe, **of_split})
    header = {"format": _FORMAT, "starts": json.dumps(rows), "sources": json.dumps(sources or {})}
    if recorded is not None:
        header["recorded"] = json.dumps(asdict(recorded))
    if split:
        header["split"] = split
    if len(views) > 1:
        header["views"] = json.dumps(views)
    content = save(tensors, metadata=header)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(path, content)
    return len(rows)


class RecordedStarts:
    """Starts out of ``path``: a `starts.safetensors`, or a folder with one or with published `.npy` files.

    Published files are converted once, into a `starts.safetensors` beside them or in ``cache_dir``. Trials are counted
    within a task, or with ``by_task`` off over all starts as one task. ``history`` pictures are given of each start:
    1, or 5, where a start that has one repeats it with actions of zeros. Without ``keyframes`` their starts are left
    out. ``part`` of a split takes its starts alone. ``size`` is what each view is stretched to, (height, width);
    without it all must be alike.
    """

    def __init__(
        self,
        path: str,
        *,
        history: int = 1,
        keyframes: bool = True,
        by_task: bool = True,
        part: str | None = None,
        size: Sequence[int] | None = None,
        cache_dir: str | None = None,
    ) -> None:
        if history not in (1, 5):
            raise ConfigError(f"history={history} pictures of a start: 1, or 5 of a world model that begins with five.")
        self.history, self.size = history, None if size is None else (int(size[0]), int(size[1]))
        self.path = _file_of(Path(path), None if cache_dir is None else Path(cache_dir))
        rows = [(i, row) for i, row in enumerate(self._header) if keyframes or not row["is_keyframe"]]
        if not rows:
            raise DataError(f"{self.path} has no starts{'' if keyframes else ' but keyframes, and keyframes=false'}.")
        self.split = _metadata(self.path).get("split", "")  # its digest; empty where recordings were not split
        if part is not None:
            rows = self._of_part(rows, part)
        tasks: dict[str, list[int]] = {}
        for i, row in rows:
            tasks.setdefault(row["task"] if by_task else "", []).append(i)
        self.views = tuple(foreign_json.loads(_metadata(self.path).get("views", '[""]')))
        self.names = {i: row["name"] for i, row in rows}
        self._known = self._known_of_all()
        self._trials = list(tasks.values())
        self.num_tasks = len(self._trials)

    def __len__(self) -> int:
        return len(self.names)

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        of_tasks = [self._trials[int(task) % self.num_tasks] for task in task_ids]
        numbers = [numbers[int(trial) % len(numbers)] for numbers, trial in zip(of_tasks, trial_ids, strict=True)]
        distinct = {i: self._start(i) for i in dict.fromkeys(numbers)}
        shapes = {tuple(pictures.shape[1:3]): self.names[i] for i, (pictures, _, _) in distinct.items()}
        if len(shapes) > 1:
            (one, first), (other, second) = [*shapes.items()][:2]
            found = f"{self.path}: the pictures of {first} are {one}, those of {second} {other} (height, width)"
            raise DataError(f"{found}: give the size that they are stretched to (starts.size).")
        pictures, actions, contexts = zip(*(distinct[i] for i in numbers), strict=True)
        known = next((rows for rows in actions if rows is not None), None)
        return FirstFrames(
            torch.stack(pictures),
            None if known is None else torch.stack([torch.zeros_like(known) if a is None else a for a in actions]),
            [self._header[i]["task"] for i in numbers],
            {name: torch.stack([context[name] for context in contexts]) for name in self._known},
        )

    def numbers(self, part: str) -> list[int]:
        """The numbers of starts of a part of the recordings, "train" or "held_out", where number n is trial
        n // num_tasks of task n % num_tasks. Of a file that records no parts every fifth episode is held out."""
        episode, is_held_out = -1, {}
        for i, row in enumerate(self._header):
            episode += not row["is_keyframe"]
            is_held_out[i] = row["part"] != "train" if row["part"] else episode % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        wanted = part == "held_out"
        return sorted(
            trial * self.num_tasks + task
            for task, rows in enumerate(self._trials)
            for trial, i in enumerate(rows)
            if is_held_out[i] == wanted
        )

    @cached_property
    def recorded(self) -> RecordedFacts | None:
        """Facts of the recordings; None of published starts and of files that older versions wrote."""
        text = _metadata(self.path).get("recorded")
        with raised_as(DataError, f"{self.path}: its facts of the recordings are damaged", ValueError, TypeError):
            return None if text is None else RecordedFacts(**foreign_json.loads(text))

    def _of_part(self, rows: list[tuple[int, dict[str, Any]]], part: str) -> list[tuple[int, dict[str, Any]]]:
        if part not in ANY_PART:
            raise ConfigError(f"part='{part}' of recorded starts.{near(part, ANY_PART)}")
        wanted = ("calibrate", "test") if part == "held_out" else (part,)
        if not (chosen := [(i, row) for i, row in rows if row["part"] in wanted]):
            cure = "Write them with a split: python -m scripts.make_reset_states --split FILE."
            raise DataError(f"{self.path} has no starts of the part '{part}'. {cure}")
        return chosen

    def _known_of_all(self) -> list[str]:
        """The names of what is known of every start, in one shape; others would keep the values of old episodes."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        with safe_open(self.path, framework="pt") as file:
            for key in set(file.keys()):
                if not key.endswith(".pictures") and not_finite({key: file.get_tensor(key)}):
                    raise DataError(f"{self.path}: {key} holds NaN or infinite numbers. Write the starts again.")
                number, is_context, name = key.partition(".context.")
                if is_context and int(number) in self.names:
                    shapes.setdefault(name, []).append(tuple(file.get_slice(key).get_shape()))
        partly = {name for name, found in shapes.items() if len(found) < len(self.names) or len(set(found)) > 1}
        if partly:
            log.warning("%s: not all starts have %s in one shape, so none does", self.path, ", ".join(sorted(partly)))
        return sorted(shapes.keys() - partly)

    @cached_property
    def _header(self) -> list[dict[str, Any]]:
        metadata = _metadata(self.path)
        if metadata.get("format") != _FORMAT:
            raise DataError(f"{self.path} is no file of starts: python -m scripts.make_reset_states writes them.")
        with raised_as(DataError, f"{self.path}: its list of starts is damaged", *MISSHAPEN, cure="Write it again."):
            rows = foreign_json.loads(metadata["starts"])
            keys = ("name", "task", "is_keyframe")
            return [{**{key: row[key] for key in keys}, "part": row.get("part", "")} for row in rows]

    def _start(self, i: int) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Pictures [F, H, W, 3], the actions between them and what else is known; only this start is read."""
        with safe_open(self.path, framework="pt") as file:
            names, own = set(file.keys()), f"{i}.context."
            pictures: Tensor = file.get_tensor(f"{i}.pictures")
            actions = file.get_tensor(f"{i}.actions") if f"{i}.actions" in names else None
            context = {name.removeprefix(own): file.get_tensor(name) for name in names if name.startswith(own)}
        if self.history == 1:
            pictures, actions = pictures[-1:], None
        elif len(pictures) == 1:
            pictures = pictures.expand(self.history, -1, -1, -1)
            actions = None if actions is None else torch.zeros(self.history - 1, actions.shape[1])
        if self.size is not None:
            pictures = stretched(pictures.permute(3, 0, 1, 2), self.size, len(self.views)).permute(1, 2, 3, 0)
        return pictures, actions, context


def _metadata(path: Path) -> dict[str, str]:
    with raised_as(DataError, f"{path} cannot be read as starts, or is damaged", OSError, SafetensorError):
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})


def _file_of(path: Path, cache_dir: Path | None) -> Path:
    """The file of starts that a path means; published files are converted first unless they were."""
    if path.is_file():
        return path
    published = sorted(path.glob("*.npy")) if path.is_dir() else []
    if not published:
        if (path / FILE).is_file():
            return path / FILE
        cure = "Write them of recordings: python -m scripts.make_reset_states --dataset RECORDINGS --out STARTS."
        raise DataError(f"{path} holds neither {FILE} nor published .npy files. {cure}")
    sources, place = {file.name: file.stat().st_size for file in published}, (cache_dir or path) / FILE
    if place.is_file() and foreign_json.loads(_metadata(place).get("sources", "{}")) in (sources, {}):
        return place
    try:
        write_starts(place, (read_published(file) for file in published), sources)
    except OSError as error:
        if fault := disk_fault(error):
            raise DataError(f"The starts of {path} cannot be converted: {fault} Name a cache_dir.") from error
        raise
    return place


# --- cut out of recordings


def starts_of(
    episodes: Iterable[RecordedEpisode],
    keyframes: Keyframes = None,
    before: int = BEFORE,
    parts: Mapping[str, str] | None = None,
) -> Iterator[RecordedStart]:
    """The first picture of each episode, and with ``keyframes`` a start ``before`` frames ahead of each moment; with
    the part of each episode's name, where recordings were split."""
    parts = parts or {}
    found, early = 0, 0
    for episode in episodes:
        part = parts.get(episode.name, "")
        yield _start(episode, [0], part=part)
        for number, moment in enumerate(moments_of(episode, keyframes)):
            if (frame := moment - before) < NUM_LAST:
                early += 1
                continue
            found += 1
            yield _start(episode, [0, *range(frame - NUM_LAST + 1, frame + 1)], f"_{number}{KEYFRAME_MARK}", part)
    if keyframes is not None and not found:
        raise DataError(
            f"No episode has a keyframe (--keyframes {keyframes})."
            + (f" {early} moments lie within {NUM_LAST + before} frames of the start (--before)." if early else "")
            + (" The gripper never opens or closes: give a fraction, such as 0.5." if keyframes == GRIPPER else "")
        )
    if early:
        log.warning("%d keyframes lie within %d frames of a start and are left out", early, NUM_LAST + before)


def moments_of(episode: RecordedEpisode, keyframes: Keyframes) -> list[int]:
    """The frames that keyframes of an episode are taken for."""
    if keyframes is None:
        return []
    if keyframes == GRIPPER:
        return gripper_changes(episode.gripper()[: episode.num_frames])
    return [round(float(keyframes) * (episode.num_frames - 1))]


def gripper_changes(gripper: NDArray[numpy.float64]) -> list[int]:
    """The frames at which a gripper's number crosses the middle of its range; none where it hardly moves."""
    low, high = float(gripper.min()), float(gripper.max())
    if high - low < 1e-3 * max(1.0, abs(low), abs(high)):
        return []
    is_high = gripper > (low + high) / 2
    return (numpy.flatnonzero(is_high[1:] != is_high[:-1]) + 1).tolist()


def _start(episode: RecordedEpisode, frames: list[int], suffix: str = "", part: str = "") -> RecordedStart:
    """The start that ends at the last of these frames."""
    if episode.num_frames < 1:
        raise DataError(f"{episode.path} has no picture.")
    if not episode.task:
        raise DataError(f"{episode.path} names no task: its sentence is what a policy is asked for.")
    actions = episode.actions()[[k - 1 for k in frames[1:]]]  # each leads to one of these pictures
    if not numpy.isfinite(actions).all():
        raise DataError(f"{episode.path} has actions that are not finite before frame {frames[-1]}.")
    return RecordedStart(
        f"{episode.name}{suffix}",
        episode.task,
        episode.pictures(frames),
        actions.astype(numpy.float32),
        {name: value.astype(numpy.float32) for name, value in episode.known(frames[-1]).items()},
        part,
    )


# --- published files


def read_published(path: Path) -> RecordedStart:
    """The start that a file stands for: its first frame, or of a keyframe file the first and the last four."""
    try:
        items = _items(path.read_bytes())
    except (OSError, ValueError, TypeError, LookupError, RecursionError, Refused) as error:
        raise DataError(f"{path} is no published reset state, an array of dictionaries: {error}") from error
    is_keyframe = KEYFRAME_MARK in path.stem
    if is_keyframe and len(items) < NUM_LAST + 1:
        raise DataError(f"{path} has {len(items)} frames: a keyframe start needs the first one and {NUM_LAST} last.")
    chosen = [items[0], *items[-NUM_LAST:]] if is_keyframe else items[:1]
    pictures = [_picture(path, i, item) for i, item in enumerate(chosen)]
    if len({picture.shape for picture in pictures}) > 1:
        raise DataError(f"{path}: its pictures have different sizes, {sorted({p.shape for p in pictures})}.")
    found = [_numbers(item, "delta_action", "abs_action") for item in chosen]
    actions = [row for row in found if row is not None]
    if is_keyframe and (len(actions) < len(found) or len({row.shape for row in actions}) > 1):
        raise DataError(f"{path}: each frame of a keyframe start needs delta_action or abs_action, all of one size.")
    between = numpy.stack(actions)[1:] if actions else None  # of another start [0, D]
    pose = _numbers(items[0], "init_ee_pose", "abs_action")
    context = {} if pose is None else {"init_ee_pose": pose}
    return RecordedStart(path.stem, _task(path, items[0]), numpy.stack(pictures), between, context)


def _picture(path: Path, number: int, item: Mapping[str, Any]) -> NDArray[numpy.uint8]:
    picture = item.get("image")
    if isinstance(picture, numpy.ndarray) and picture.dtype == numpy.uint8 and picture.shape[2:] == (3,):
        return picture
    found = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, numpy.ndarray) else repr(picture)[:40]
    raise DataError(f"{path}: image of frame {number} is {found}; uint8 [H, W, 3] is expected.")


def _task(path: Path, item: Mapping[str, Any]) -> str:
    for key in ("instruction", "task"):
        value = item.get(key)
        if isinstance(value, numpy.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, str):
            return value
    raise DataError(f"{path}: its frames have neither instruction nor task, which name what is to be done.")


def _numbers(item: Mapping[str, Any], *keys: str) -> NDArray[numpy.float32] | None:
    value = next((item[key] for key in keys if item.get(key) is not None), None)
    if value is None:
        return None
    array = numpy.asarray(value)
    return array.reshape(-1).astype(numpy.float32) if array.dtype.kind in "biuf" else None


def _items(content: bytes) -> list[Mapping[str, Any]]:
    """The dictionaries of a file, in order."""
    file = io.BytesIO(content)
    version = npy.read_magic(file)
    readers: dict[Any, Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of .npy is not known")
    shape, _, dtype = readers[version](file, max_header_size=10_000)
    if dtype.kind != "O":
        raise ValueError(f"its array is of {dtype}, not of objects")
    tree = read_arrays(content[file.tell() :])
    items = tree if isinstance(tree, list) else [tree]
    if len(items) != math.prod(shape) or not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"its array of shape {list(shape)} does not hold dictionaries")
    return items
