# SPDX-License-Identifier: Apache-2.0
"""A LeRobot data set of any version as episodes: tables of numbers, pictures by frame number, and tasks.

Opening one reads its index only. Rows and pictures are read when they are asked for, and as few as possible.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.data.lerobot.info import COUNTERS, EMBODIMENTS, STATE, Info, Part, read_info
from cosmos_predict2.data.lerobot.layouts import EpisodeIndex, LayoutV2, LayoutV3, VideoLocation
from cosmos_predict2.data.lerobot.robots import KNOWN_ROBOTS, ROBOTS, choose_form
from cosmos_predict2.data.lerobot.tables import Numbers, TableReader, read_images
from cosmos_predict2.data.video.clips import Fit, open_clip, probe
from cosmos_predict2.data.views import AND, cameras_in, stacked
from imaginaire.errors import ConfigError, DataError, near

ACTIONS = ("action", "actions")
_PER_EPISODE = ("v2.0", "v2.1")
_EPISODE = "episode_index"
NUM_LOOKED_INTO = 64  # videos whose length is compared with the table before training


@dataclass(frozen=True)
class LeRobotSource:
    """An open data set; episodes are counted from 0 in the order of its index. ``action_keys`` make an action where
    nothing else is asked for."""

    info: Info
    layout: LayoutV2 | LayoutV3
    tables: TableReader
    action_keys: tuple[str, ...] | None = None

    @classmethod
    def open(cls, root: Path | str, action_keys: Sequence[str] | None = None) -> "LeRobotSource":
        info = read_info(Path(root))
        layout = LayoutV2(info) if info.version in _PER_EPISODE else LayoutV3(info)
        return cls(info, layout, TableReader(), tuple(action_keys) if action_keys else None)

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def episodes(self) -> EpisodeIndex:
        return self.layout.episodes

    @property
    def tasks(self) -> Mapping[int, str]:
        """Texts by task_index."""
        return self.layout.tasks

    def name(self, i: int) -> str:
        """Stem of the files of episode i."""
        return f"episode_{int(self.episodes.numbers[i]):06d}"

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def columns(self, i: int, names: Sequence[str], *, gaps: bool = False) -> dict[str, Numbers]:
        """Columns of episode i: [F] or [F, d] each; with ``gaps`` a number that is missing is NaN, not an error."""
        place, length = self.layout.rows(i), int(self.episodes.lengths[i])
        is_all = self.info.version in _PER_EPISODE
        is_numbered = not is_all or _EPISODE in self.info.features
        wanted = [*names, _EPISODE] if is_numbered and _EPISODE not in names else list(names)
        read = self.tables.read(place.path, wanted, place.first, length, is_all=is_all, gaps=gaps)
        number = self.episodes.numbers[i]
        if is_numbered and (read[_EPISODE] != number).any():
            other = int(read[_EPISODE][read[_EPISODE] != number][0])
            raise DataError(
                f"{place.path}, rows {place.first} to {place.first + length - 1}: episode {other} where the index has"
                f" {number}."
            )
        return {name: read[name] for name in names}

    def episode(self, i: int, *, gaps: bool = False) -> dict[str, Numbers]:
        """All columns of numbers of episode i."""
        names = [name for name, feature in self.info.features.items() if _is_numbers(feature)]
        return self.columns(i, names, gaps=gaps)

    def parts(self, i: int, parts: Sequence[Part], *, gaps: bool = False) -> Numbers:
        """[F, d]: these parts side by side."""
        columns = self.columns(i, list(dict.fromkeys(part.column for part in parts)), gaps=gaps)
        pieces = []
        for part in parts:
            table = columns[part.column]
            table = table[:, None] if table.ndim == 1 else table
            if table.ndim != 2 or (part.end is not None and part.end > table.shape[1]):
                raise DataError(
                    f"{self.layout.rows(i).path}: '{part.column}' has the shape {list(table.shape)} for {len(table)}"
                    f" frames, but numbers {part.start} to {part.end} of it are asked for."
                )
            piece, width = table[:, part.start : part.end], part_width(self.info, part)
            if piece.shape[1] != width:
                raise DataError(
                    f"{self.layout.rows(i).path}: {self.name(i)} has {piece.shape[1]} numbers of '{part.column}' in a"
                    f" row where meta/info.json says {width}. Mend or remove the episode."
                )
            pieces.append(piece)
        return numpy.concatenate(pieces, axis=1)

    def width(self, parts: Sequence[Part]) -> int:
        """Numbers that `parts` gives per frame."""
        return sum(part_width(self.info, part) for part in parts)

    def action_parts(self, keys: str | Sequence[str] | None = None, embodiment: str | None = None) -> list[Part]:
        own = self.action_keys if keys is None and embodiment is None else keys
        return choose_action(self.info, own, embodiment)

    @property
    def state_parts(self) -> list[Part]:
        """The state that policies and starts read, of one column; empty where there is none."""
        shape = self.info.features.get(STATE, {}).get("shape")
        return [Part(STATE)] if isinstance(shape, list) and len(shape) == 1 else []

    def action_contract(self, parts: Sequence[Part], stride: int = 1, state: Sequence[Part] = ()) -> ActionContract:
        """Rate of the actions of every so many frames, and names of actions and state if the data set has them all."""
        return ActionContract(self._names(parts), self.info.fps / stride, self._names(state))

    def _names(self, parts: Sequence[Part]) -> tuple[str, ...]:
        names = [name for part in parts for name in number_names(self.info, part)]
        is_named = not any(name.startswith(f"{part.column}[") for part in parts for name in names)
        return tuple(names) if is_named else ()

    # ---- texts -------------------------------------------------------------------------------------------------------

    def caption(self, i: int, frame: int = 0, annotation: str | None = None) -> str:
        """The task of the episode, at ``frame`` where it has several; empty where there is none.

        ``annotation`` names one of modality.json's texts instead.
        """
        listed = self.episodes.tasks(i)
        if annotation is None and len(listed) == 1:
            return listed[0]
        column = "task_index"
        if annotation is not None:
            known = self.info.modality.annotation
            if annotation not in known:
                raise ConfigError(f"{self.info.root}: there is no annotation '{annotation}'.{near(annotation, known)}")
            column = known[annotation]
        if not self.tasks or (annotation is None and column not in self.info.features):
            return listed[0] if listed else ""
        number = int(self.columns(i, [column])[column].reshape(-1)[frame])
        if number not in self.tasks:
            raise DataError(f"{self.layout.rows(i).path}: '{column}' names text {number}, which meta/tasks has not.")
        return self.tasks[number]

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def camera(self, wanted: str | None = None) -> str:
        """`choose_camera` of this data set; the functions below take keys of several, too."""
        return choose_camera(self.info, wanted)

    def frames(
        self,
        i: int,
        camera: str,
        indices: Sequence[int],
        *,
        fit: Fit | None = None,
        decoder: str = "auto",
        num_threads: int = 1,
        shown: Sequence[bool] = (),
    ) -> Tensor:
        """uint8 [3, F, H, W]: frames of episode i, counted from its first, in the order that is asked for.

        ``fit`` brings [3, 1, H, W] of each camera to another size on the way; see `views` for several, of which those
        that are not ``shown`` are black.
        """
        if len(several := cameras_in(camera)) > 1:
            read = partial(self.frames, i, indices=indices, fit=fit, decoder=decoder, num_threads=num_threads)
            views = [read(one) if is_shown else None for one, is_shown in zip(several, shown or [True] * len(several))]
            black = torch.zeros_like(next(view for view in views if view is not None))
            return stacked([black if view is None else view for view in views])
        length = int(self.episodes.lengths[i])
        if not len(indices) or min(indices) < 0 or max(indices) >= length:
            raise DataError(f"{self.info.root}: episode {self.episodes.numbers[i]} has {length} frames, not {indices}.")
        if not self.info.is_video(camera):
            place = self.layout.rows(i)
            rows = [place.first + int(k) for k in indices]
            return read_images(place.path, camera, rows, self.info.root, fit)
        clip = self.clip(i, camera)
        fps = self.info.video_fps(camera)
        numbers = [_frame_at(clip.start + int(k) / self.info.fps, fps) for k in indices]
        with open_clip(clip.path, decoder=decoder, num_threads=num_threads) as video:
            self.check_rate(camera, clip.path, video.num_frames, video.fps)
            return video.read(numbers, fit)

    def clip(self, i: int, camera: str) -> VideoLocation:
        """Place of episode i's video, after checking that the index agrees with itself."""
        clip = self.layout.clip(i, camera)
        seconds = int(self.episodes.lengths[i]) / self.info.fps
        if clip.seconds is not None and abs(clip.seconds - seconds) > 0.5 / self.info.fps:
            rate = int(self.episodes.lengths[i]) / clip.seconds if clip.seconds > 0 else 0.0
            raise DataError(
                f"{self.info.root}: episode {self.episodes.numbers[i]} has {self.episodes.lengths[i]} frames, but"
                f" {clip.seconds * self.info.fps:.2f} frames' time of video in {clip.path.name}. If all episodes differ"
                f" alike, fps in meta/info.json is not that of the videos (lerobot's converter cuts its decimals):"
                f" write {rate:.4g} there. Otherwise record the episode again or remove it."
            )
        if not clip.path.is_file():
            raise DataError(f"{clip.path} does not exist; the data set's index names it.{self.lack(i, camera)}")
        return clip

    def check_rate(self, camera: str, path: Path, num_frames: int, fps: float) -> None:
        """Raise if a camera's file has another rate than is stated, by which frames are found in it."""
        stated = self.info.video_fps(camera)
        if abs(fps / stated - 1) > 0.02 + 1.5 / num_frames:  # that of a short file may be off by a frame
            raise DataError(
                f"{path} has {fps:g} frames per second, but meta/info.json has {stated:g} for '{camera}' (features,"
                " info, video.fps; else the data set's fps): its frames would not be those of the table."
            )

    def require_lengths(self, camera: str, episodes: Sequence[int]) -> None:
        """Raise where the video of an episode is shorter than its table; of many episodes, evenly spread ones are
        looked at."""
        shown = [one for one in cameras_in(camera) if self.info.is_video(one)]
        looked_into = episodes[:: -(-len(episodes) // NUM_LOOKED_INTO)]
        for camera, i in product(shown, looked_into):
            clip = self.layout.clip(i, camera)
            if not clip.path.is_file():
                continue
            num_frames, rate = probe(clip.path)
            self.check_rate(camera, clip.path, num_frames, rate)
            if (problem := self.length_problem(i, camera, clip, num_frames)) is not None:
                raise DataError(
                    f"{problem} Record it again or remove the episode, or skip frames that cannot be read"
                    " (dataset.skip_bad_samples=True of the loader). python -m scripts.check_dataset finds all of them."
                )

    def length_problem(self, i: int, camera: str, clip: VideoLocation, num_frames: int) -> str | None:
        """The problem if a video file of so many frames ends before episode i does."""
        length = int(self.episodes.lengths[i])
        needed = _frame_at(clip.start + (length - 1) / self.info.fps, self.info.video_fps(camera)) + 1
        if needed <= num_frames:
            return None
        return f"{clip.path} has {num_frames} frames, but the {length} of {self.name(i)} end at frame {needed}."

    def rate_note(self) -> str | None:
        """A note where a camera's videos have another rate than the table's rows; None where they agree."""
        for camera in filter(self.info.is_video, self.info.cameras):
            rate, num_frames = self.info.video_fps(camera), int(self.episodes.lengths[0])
            with suppress(DataError):  # what is wrong with a file is reported where it is read
                num_frames, rate = probe(self.file_of(0, camera))
            if abs(rate / self.info.fps - 1) > 0.02 + 1.5 / num_frames:
                return (
                    f"meta/info.json has fps {self.info.fps:g}, but the videos of '{camera}' have {rate:g} frames per"
                    f" second: row k of the table is held to be {rate / self.info.fps:.3g} k frames into its"
                    f" video. If each row has a frame of its own, set fps to {rate:g} there"
                )
        return None

    def file_of(self, i: int, camera: str) -> Path:
        """The file that holds the pictures of episode i, of several cameras the first one's."""
        camera = cameras_in(camera)[0]
        return self.layout.clip(i, camera).path if self.info.is_video(camera) else self.layout.rows(i).path

    def missing_files(self, camera: str, episodes: Sequence[int] | None = None) -> list[Path]:
        """Files of these episodes that the index names and that are not there."""
        everything = range(len(self)) if episodes is None else episodes
        paths = {self.layout.rows(int(i)).path for i in everything}
        paths |= {self.file_of(int(i), one) for i in everything for one in cameras_in(camera)}
        return sorted(path for path in paths if not path.is_file())

    def shown(self, i: int, camera: str) -> list[bool]:
        """True for each camera whose file episode i has."""
        return [self.file_of(i, one).is_file() for one in cameras_in(camera)]

    def lack(self, i: int, camera: str) -> str:
        """A sentence on the cameras that episode i lacks and on those that it has; empty where it lacks none."""
        lacking = [one for one in cameras_in(camera) if not self.file_of(i, one).is_file()]
        there = [one for one in self.info.cameras if self.file_of(i, one).is_file()]
        return f" {self.name(i)} has no {', '.join(lacking)}, but {', '.join(there) or 'none'}." if lacking else ""


def choose_camera(info: Info, wanted: str | None) -> str:
    """The key of a camera: asked for in full, by its last word or by modality.json; without that the only one. Of
    several, such as front+wrist, their keys likewise."""
    named = info.modality.video
    if wanted is None:
        if len(info.cameras) != 1:
            raise ConfigError(
                f"{info.root}: which camera? Set it to one of {', '.join(info.cameras) or 'none'}, or to several views"
                " with + between them."
            )
        return info.cameras[0]
    if len(several := cameras_in(wanted)) > 1:
        return AND.join(cameras_in(AND.join(choose_camera(info, one) for one in several)))
    key = named.get(wanted, wanted)
    fitting = [camera for camera in info.cameras if camera == key]
    fitting = fitting or [camera for camera in info.cameras if camera.rpartition(".")[2] == key]
    if len(fitting) != 1:
        raise ConfigError(f"{info.root}: there is no camera '{wanted}'.{near(wanted, [*named, *info.cameras])}")
    return fitting[0]


def choose_action(info: Info, keys: str | Sequence[str] | None = None, embodiment: str | None = None) -> list[Part]:
    """The columns, or parts of them, that make an action: as asked for, or the only one that is called so."""
    if embodiment is not None:
        if keys is not None:
            raise ConfigError("action_keys and embodiment both define an action: give one of them.")
        return _parts_of_embodiment(info, embodiment)
    if keys is None:
        usual = [key for key in ACTIONS if key in info.features]
        if len(usual) != 1:
            numbers = [key for key, feature in info.features.items() if _is_numbers(feature)]
            those = ", ".join(key for key in numbers if key not in COUNTERS and not key.startswith("next."))
            raise ConfigError(
                f"{info.root}: which columns are the action? Set action_keys: {those}. For a program without it"
                " record all numbers of an action as one column, 'action'."
            )
        keys = usual
    listed = [keys] if isinstance(keys, str) else list(keys)
    named = info.modality.action
    for key in listed:
        if key not in named and key not in info.features:
            raise ConfigError(f"{info.root}: there is no action '{key}'.{near(key, [*named, *info.features])}")
    return [named.get(key) or Part(key) for key in listed]


def choose_state(info: Info, wanted: str) -> list[Part]:
    """The columns, or parts of them that modality.json names, of the robot's state; with + between several."""
    named = info.modality.state
    numbers = [key for key, feature in info.features.items() if _is_numbers(feature)]
    for key in (listed := wanted.split(AND)):
        if key not in named and key not in numbers:
            raise ConfigError(f"{info.root}: there is no state '{key}'.{near(key, [*named, *numbers])}")
    return [named.get(key) or Part(key) for key in listed]


def part_width(info: Info, part: Part) -> int:
    """Numbers of a part in each frame."""
    shape = info.features.get(part.column, {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int):
        raise DataError(f"{info.root}: '{part.column}' has the shape {shape}; a vector of numbers is needed.")
    return (shape[0] if part.end is None else part.end) - part.start


def number_names(info: Info, part: Part) -> list[str]:
    """Names of a part's numbers: modality.json's of a single one, or else info.json's, or their places in
    modality.json's part, or in the column."""
    width = part_width(info, part)
    names = [f"{part.column}[{part.start + k}]" for k in range(width)]
    named = _flat(info.features[part.column].get("names"))
    if is_named := len(named) >= part.start + width:
        names = named[part.start : part.start + width]
    for name, known in (*info.modality.state.items(), *info.modality.action.items()):
        if known.column == part.column and known.end is not None:
            is_one = known.end == known.start + 1
            for k in range(max(known.start, part.start), min(known.end, part.start + width)):
                if is_one or not is_named:
                    names[k - part.start] = name if is_one else f"{name}[{k - known.start}]"
    return names


def _parts_of_embodiment(info: Info, name: str) -> list[Part]:
    if name in ROBOTS:
        return list(choose_form(info, name).action)
    if name not in EMBODIMENTS:
        raise ConfigError(f"There is no embodiment '{name}'.{near(name, KNOWN_ROBOTS)}")
    place, named = info.root / "meta" / "modality.json", info.modality.action
    if not named:
        raise DataError(f"embodiment '{name}' needs {place}, which has the places of its parts; it has none.")
    parts = []
    for key, width in EMBODIMENTS[name].items():
        part = named.get(key)
        if part is None or part.end is None:
            raise DataError(f"{place} has no action '{key}', which '{name}' needs.{near(key, named)}")
        if part.end - part.start != width:
            raise DataError(f"{place}: '{key}' has {part.end - part.start} numbers, but that of '{name}' {width}.")
        parts.append(part)
    return parts


def _frame_at(seconds: float, fps: float) -> int:
    """The frame that is nearest to a time; of two the earlier, which is still shown."""
    return math.ceil(seconds * fps - 0.5 - 1e-6)


def _is_numbers(feature: Mapping[str, Any]) -> bool:
    dtype = str(feature.get("dtype", ""))
    return dtype.startswith(("float", "int", "uint", "bool"))


def _flat(names: Any) -> list[str]:
    """The names of info.json: a list, lists in a list, lists by group, or places by name."""
    if isinstance(names, Mapping) and all(isinstance(place, int) for place in names.values()):
        names = sorted(names, key=names.__getitem__)
    elif isinstance(names, Mapping):
        names = list(names.values())
    if not isinstance(names, list):
        return []
    return [text for name in names for text in (_flat(name) if isinstance(name, list | Mapping) else [str(name)])]
