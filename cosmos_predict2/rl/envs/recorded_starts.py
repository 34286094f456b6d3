# SPDX-License-Identifier: Apache-2.0
"""Starts out of recordings: one file, `starts.safetensors`, of which a start is read when it is asked for.

`write_starts` makes it, of recordings or of the `.npy` files that others published (`published_starts`).
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from cosmos_predict2.rl.envs.published_starts import read_published
from cosmos_predict2.rl.envs.starts import FirstFrames, RecordedStart
from imaginaire import foreign_json, storage
from imaginaire.checkpoint.weights import not_finite
from imaginaire.errors import ConfigError, DataError, disk_fault

FILE = "starts.safetensors"
_FORMAT = "starts 1"

log = logging.getLogger(__name__)


def write_starts(path: Path, starts: Iterable[RecordedStart], sources: Mapping[str, int] | None = None) -> int:
    """Write starts to one file, complete or not at all; gives their number. ``sources`` are the files they are of."""
    tensors: dict[str, NDArray[Any]] = {}
    rows: list[dict[str, Any]] = []
    for i, start in enumerate(starts):
        tensors[f"{i}.pictures"] = numpy.ascontiguousarray(start.pictures_F_H_W_C)
        known = {f"context.{name}": value for name, value in start.context.items()}
        if start.actions_A_D is not None:
            known["actions"] = start.actions_A_D
        for name, value in known.items():
            tensors[f"{i}.{name}"] = numpy.ascontiguousarray(value, dtype=numpy.float32)
        rows.append({"name": start.name, "task": start.task, "is_keyframe": start.is_keyframe})
    header = {"format": _FORMAT, "starts": json.dumps(rows), "sources": json.dumps(sources or {})}
    content = save(tensors, metadata=header)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomically(path, lambda file: file.write(content))
    return len(rows)


class RecordedStarts:
    """Starts out of ``path``: a `starts.safetensors`, or a folder with one or with published `.npy` files.

    Published files are converted once, into a `starts.safetensors` beside them or in ``cache_dir``. Trials are counted
    within a task, or with ``by_task`` off over all starts as one task. ``history`` pictures are given of each start:
    1, or 5, where a start that has one repeats it with actions of zeros. Without ``keyframes`` their starts are left
    out. ``size`` is what pictures are stretched to, (height, width); without it all must be alike.
    """

    def __init__(
        self,
        path: str,
        *,
        history: int = 1,
        keyframes: bool = True,
        by_task: bool = True,
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
        tasks: dict[str, list[int]] = {}
        for i, row in rows:
            tasks.setdefault(row["task"] if by_task else "", []).append(i)
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
            raise DataError(
                f"{self.path}: the pictures of {first} are {_size(one)}, those of {second} {_size(other)}: give the"
                " size that they are stretched to (starts.size)."
            )
        pictures, actions, contexts = zip(*(distinct[i] for i in numbers), strict=True)
        known = next((rows for rows in actions if rows is not None), None)
        return FirstFrames(
            torch.stack(pictures),
            None if known is None else torch.stack([torch.zeros_like(known) if a is None else a for a in actions]),
            [self._header[i]["task"] for i in numbers],
            {name: torch.stack([context[name] for context in contexts]) for name in self._known},
        )

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
        try:
            rows = foreign_json.loads(metadata["starts"])
            return [{key: row[key] for key in ("name", "task", "is_keyframe")} for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path}: its list of starts is damaged: {error!r}. Write the starts again."
            ) from error

    def _start(self, i: int) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Pictures [F, H, W, 3], the actions between them and what else is known; only this start is read."""
        with safe_open(self.path, framework="pt") as file:
            names, of_context = set(file.keys()), f"{i}.context."
            pictures: Tensor = file.get_tensor(f"{i}.pictures")
            actions = file.get_tensor(f"{i}.actions") if f"{i}.actions" in names else None
            context = {
                name.removeprefix(of_context): file.get_tensor(name) for name in names if name.startswith(of_context)
            }
        if self.history == 1:
            pictures, actions = pictures[-1:], None
        elif len(pictures) == 1:
            pictures = pictures.expand(self.history, -1, -1, -1)
            actions = None if actions is None else torch.zeros(self.history - 1, actions.shape[1])
        return self._resized(pictures), actions, context

    def _resized(self, pictures_F_H_W_C: Tensor) -> Tensor:
        if self.size is None or tuple(pictures_F_H_W_C.shape[1:3]) == self.size:
            return pictures_F_H_W_C
        pixels = pictures_F_H_W_C.permute(0, 3, 1, 2).float()
        pixels = torch.nn.functional.interpolate(pixels, self.size, mode="bilinear", antialias=True)
        return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as starts, or is damaged: {error}") from error


def _file_of(path: Path, cache_dir: Path | None) -> Path:
    """The file of starts that a path means; published files are converted first unless they were."""
    if path.is_file():
        return path
    published = sorted(path.glob("*.npy")) if path.is_dir() else []
    if not published:
        if (path / FILE).is_file():
            return path / FILE
        raise DataError(
            f"{path} holds neither {FILE} nor published .npy files. Of recordings they are written by"
            " python -m scripts.make_reset_states --dataset RECORDINGS --out STARTS."
        )
    sources = {file.name: file.stat().st_size for file in published}
    places = [path / FILE] if cache_dir is None else [cache_dir / FILE]
    for place in places:
        if place.is_file() and foreign_json.loads(_metadata(place).get("sources", "{}")) in (sources, {}):
            return place
    try:
        write_starts(places[0], (read_published(file) for file in published), sources)
    except OSError as error:
        if fault := disk_fault(error):
            raise DataError(f"The starts of {path} cannot be converted: {fault} Name a cache_dir.") from error
        raise
    return places[0]
