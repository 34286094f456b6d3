# SPDX-License-Identifier: Apache-2.0
"""Clips with actions from a LeRobot data set: LIBERO as it is published there, GR1 and other robots of GR00T, and own
recordings."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.statistics import controller_transform, declared_transform
from cosmos_predict2.actions.transforms import COMBINATIONS, ActionTransform, combined_actions
from cosmos_predict2.data.clip_dataset import (
    ACTION_FPS,
    ClipDataset,
    FramesOf,
    GivenTransform,
    Source,
    Text,
    embedded,
    shape_problems,
    state_range,
    task_embeddings,
)
from cosmos_predict2.data.lerobot.info import SPLITS, VAL_FRACTION, Info, Part, choose_episodes, read_info
from cosmos_predict2.data.lerobot.reader import LeRobotSource, choose_action, choose_camera, choose_state, part_width
from cosmos_predict2.data.lerobot.robots import KNOWN_ROBOTS, Form, choose_form, known_ranges, units_of
from cosmos_predict2.data.split import SUCCESS_COLUMN, read_split, recorded_outcomes, split_of
from cosmos_predict2.data.video.clips import Clip, Fit, choose_decoder
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.trained_text import encode_commands
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.findings import CheckContext, Finding, errors, refusals

log = logging.getLogger(__name__)

HELD_OUT = ("val", "test")
OUTCOMES = {"success": True, "failure": False}
MISSING = ("error", MASK := "mask")
SkipIdle = bool | Mapping[str, Any] | None
PART_OF = {"train": "train", "val": "calibrate", "test": "test"}  # of a split file, by data_split


@dataclass(frozen=True, kw_only=True)
class IdleRule:
    """Frames at which nothing moves, so that training windows begin elsewhere; episodes stay. The rule is that of
    openpi for DROID (``compute_droid_nonidle_ranges.py``), with its values.

    A frame is idle where no command differs from that of the frame before by ``below`` or more. ``idle_run`` idle
    frames in a row are left out. What remains between them is kept if it has ``moving_run`` frames, without its last
    ``cut``: a window that begins there would mostly show the rest that follows.
    """

    below: float = 1e-3
    idle_run: int = 7
    moving_run: int = 16
    cut: int = 10

    def starts(self, commands: NDArray[numpy.floating]) -> NDArray[numpy.bool_]:
        """[F], true for the frames that a window may begin with, of commands [F, d]."""
        is_idle = numpy.zeros(len(commands), dtype=bool)
        is_idle[1:] = (numpy.abs(numpy.diff(commands, axis=0)) < self.below).all(axis=1)
        is_moving = numpy.ones(len(commands), dtype=bool)
        for first, end in _runs(is_idle):
            is_moving[first:end] = end - first < self.idle_run
        may_begin = numpy.zeros(len(commands), dtype=bool)
        for first, end in _runs(is_moving):
            may_begin[first : max(first, end - self.cut)] = end - first >= self.moving_run
        return may_begin


def _runs(flags: NDArray[numpy.bool_]) -> list[tuple[int, int]]:
    """(first, end) of each run of true values; ``end`` is the first place behind it."""
    edges = numpy.flatnonzero(numpy.diff(flags, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


class LeRobotActionDataset(ClipDataset):
    """Every window of ``num_frames`` frames, ``stride`` apart, of every episode of the split, in order.

    ``camera`` and ``action_keys`` are optional where the data set has only one camera and one column ``action`` or
    ``actions``. Several cameras, front+wrist, are views of one picture (`data.views`), each of ``video_size``.
    ``action_keys`` are columns or the names that modality.json gives to parts of the action; ``embodiment`` is a list
    of such names: "gr1" is left arm, left hand, right arm, right hand and waist, 29 numbers.
    "droid", "agibot_world" and "so100" are data sets in a published form (`data.lerobot.robots`), which has columns,
    the usual camera, and the ends of grippers; ``units`` of joints are required where the files do not record them.
    Row k of the action leads from frame k to frame k + 1, scaled by ``action_transform``; by default (or "statistics")
    by one fitted to the actions of all episodes (`order_one_transform`), whatever the split is. With a stride,
    ``combine_actions`` determines what becomes of the rows in between: "sum" adds moves up and keeps the last number, a
    gripper's, of the last row; "first" and "last" take one row, as is right for absolute targets; a list has a word for
    each number. By default it is "last" or "sum" as modality.json has "absolute" for each number, else it is required.
    ``frame_rate`` gives the stride by frames per second.

    ``split_file`` of scripts.split_recordings holds episodes out in place of ``val_fraction`` and of the data set's own
    splits: train, val, which is its part calibrate, and test.

    ``state`` names columns of the robot's state, or parts of them by modality.json, with + between several: samples
    have it at each frame, for a world model that predicts it.

    ``load_t5_embeddings`` reads the text from episode_000000.pickle and so on in ``embedding_dir`` (ROOT/t5_xxl by
    default); without it the text is zeros. ``fps`` is the label in the items, whatever the rate of the recording.
    """

    source: "LeRobotClips"
    recordings: NDArray[numpy.int64]
    action_transform: ActionTransform

    def __init__(
        self,
        root: str,
        camera: str | None = None,
        num_frames: int = 13,
        video_size: Sequence[int] = (256, 320),
        *,
        data_split: str = "train",
        val_fraction: float = VAL_FRACTION,
        split_file: str | None = None,
        action_keys: str | Sequence[str] | None = None,
        embodiment: str | None = None,
        units: str | None = None,
        action_transform: ActionTransform | Mapping[str, Any] | str | None = None,
        stride: int = 1,
        frame_rate: float | None = None,
        combine_actions: str | Sequence[str] | None = None,
        start_interval: int = 1,
        skip_idle: SkipIdle = False,
        outcome: str | None = None,
        success_column: str | None = None,
        state: str = "",
        missing_cameras: str = "error",
        annotation: str | None = None,
        load_t5_embeddings: bool = False,
        embedding_dir: str | None = None,
        num_tokens: int = 512,
        text_width: int = 1024,
        fps: float = ACTION_FPS,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        decoder: str = "auto",
        num_threads: int = 1,
    ) -> None:
        problems = _problems(
            dict(data_split=data_split, embodiment=embodiment, outcome=outcome, missing_cameras=missing_cameras)
            | dict(stride=stride, start_interval=start_interval, combine_actions=combine_actions)
            | dict(num_frames=num_frames, video_size=video_size)
        )
        if text := "; ".join(problems):
            raise ConfigError(text)
        files = LeRobotSource.open(root)
        form = choose_form(files.info, embodiment)
        stride = _stride(files.info.fps, stride, frame_rate)
        parts = files.action_parts(action_keys, embodiment)
        states = choose_state(files.info, state) if state else ()
        known, idle = known_ranges(embodiment, units), _idle_rule(skip_idle, files.info, form)
        left_out = f"{', '.join(part.column for part in idle[1])}: {idle[0]}" if idle else ""
        contract = files.action_contract(parts, stride, states)
        contract = replace(contract, units=units_of(embodiment, units), idle=left_out)
        source = LeRobotClips(
            files,
            files.camera(camera or form.camera),
            parts,
            _combination(combine_actions, stride, files.info, parts),
            annotation,
            _embeddings(root, embedding_dir) if load_t5_embeddings else None,
            num_tokens,
            dict(decoder=choose_decoder(decoder), num_threads=num_threads),
            idle,
            dict(known=known, contract=contract),
            states,
            missing_cameras == MASK,
        )
        given = _given_transform(action_transform, files.width(parts))
        if load_t5_embeddings and (note := files.episodes.several_tasks()) is not None:
            log.warning(
                "%s: %s. An embedding is of a whole episode, so the later tasks have the text of the first", root, note
            )
        if split_file is None or data_split not in PART_OF:
            episodes = choose_episodes(files.info.splits, len(files), data_split, val_fraction)
        else:
            episodes = numpy.array(split_of(split_file, files).of(PART_OF[data_split]), dtype=numpy.int64)
        if outcome is not None:
            outcomes = recorded_outcomes(files, success_column or form.success or SUCCESS_COLUMN)
            episodes = episodes[[outcomes[i] is OUTCOMES[outcome] for i in episodes.tolist()]]
        is_training = data_split not in HELD_OUT  # notes are logged once, by the data of training, which has the same
        episodes = _with_files(source, episodes, skip_bad_samples, is_training)
        if not len(episodes):
            which = f"data_split='{data_split}' with val_fraction={val_fraction}, outcome={outcome}"
            raise DataError(f"{root} has no episode for {which}.")
        if not skip_bad_samples:
            files.require_lengths(source.camera, episodes.tolist())
        if is_training and (note := files.rate_note()) is not None:
            log.warning("%s: %s", root, note)
        super().__init__(
            source,
            num_frames,
            video_size,
            stride=stride,
            start_interval=start_interval,
            action_transform=given or action_transform,
            fps=fps,
            num_tokens=num_tokens,
            text_width=text_width,
            is_training=is_training,
            recordings=episodes,
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )
        log.info(
            "%s: %d windows of %d episodes for %s; camera %s, %d numbers per action",
            *(root, len(self), len(episodes), data_split, source.camera, files.width(parts)),
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments; the episodes are not read."""
        options = with_defaults(cls, {"root": "", **arguments})
        yield from errors(context.key, _problems(options))

        def look() -> None:
            info = read_info(Path(options["root"]))
            parts = choose_action(info, options["action_keys"], options["embodiment"])
            form = choose_form(info, options["embodiment"])
            known_ranges(options["embodiment"], options["units"])
            _idle_rule(options["skip_idle"], info, form)
            stride = _stride(info.fps, options["stride"], options["frame_rate"])
            _combination(options["combine_actions"], stride, info, parts)
            choose_camera(info, options["camera"] or form.camera)
            for part in [*parts, *(choose_state(info, options["state"]) if options["state"] else ())]:
                part_width(info, part)
            if options["split_file"] is not None:
                read_split(options["split_file"])

        yield from refusals(context.key, look, lambda: declared_transform(options["action_transform"]))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        options = with_defaults(cls, arguments)

        def action_dim() -> int:
            info = read_info(Path(options["root"]))
            parts = choose_action(info, options["action_keys"], options["embodiment"])
            return sum(part_width(info, part) for part in parts)

        def states() -> list[list[float]]:
            files = LeRobotSource.open(options["root"])
            parts = choose_state(files.info, options["state"])
            return state_range(
                (files.parts(i, parts) for i in range(len(files))), f"{options['root']}, {options['state']}"
            )

        def rate() -> float:
            info = read_info(Path(options["root"]))
            return info.fps / _stride(info.fps, options["stride"], options["frame_rate"])

        return DataFacts(
            kind="LeRobot recordings",
            has_actions=True,
            transform=known(lambda: declared_transform(options["action_transform"])),
            action_dim=known(action_dim),
            read_rate=rate,
            read_state_range=states if options["state"] else None,
        )

    def first_picture(self, i: int) -> Tensor:
        """The first picture of episode i as samples show it, uint8 [H, W, 3]."""
        with self.source.open(i) as clip:
            return clip.read([0], self._fit)[:, 0].permute(1, 2, 0).contiguous()

    def _rows(self, i: int) -> NDArray[Any]:
        if not self.source.files.layout.rows(i).path.is_file():  # of a split that was not fetched
            return numpy.empty((0, 1))
        return super()._rows(i)


@dataclass(frozen=True)
class LeRobotClips(Source):
    """The episodes of a LeRobot data set as a camera shows them, or several, with parts of their rows as actions."""

    files: LeRobotSource
    camera: str
    parts: Sequence[Part]
    combine: str | Sequence[str]  # what becomes of rows between two frames, see `combined_actions`
    annotation: str | None = None
    embeddings: EmbeddingFolder | None = None
    num_tokens: int = 512
    decoding: Mapping[str, Any] = field(default_factory=dict)  # decoder and num_threads
    idle: tuple[IdleRule, Sequence[Part]] | None = None  # and the commands that it looks at
    action_form: Mapping[str, Any] | None = field(default_factory=dict)
    state_parts: Sequence[Part] = ()
    masks: bool = False  # cameras that an episode lacks

    def __str__(self) -> str:
        return str(self.files.info.root)

    @property
    def lengths(self) -> NDArray[numpy.int64]:  # type: ignore[override]
        return self.files.episodes.lengths

    def __len__(self) -> int:
        return len(self.files)

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        def read(frames: Sequence[int], fit: Fit | None) -> Tensor:
            shown = self.files.shown(i, self.camera) if self.masks else ()
            return self.files.frames(i, self.camera, frames, fit=fit, shown=shown, **self.decoding)

        return nullcontext(FramesOf(int(self.lengths[i]), self.files.info.fps, read))

    def starts(self, i: int) -> NDArray[numpy.bool_] | None:
        if self.idle is None or not self.files.layout.rows(i).path.is_file():
            return None
        rule, commands = self.idle
        return rule.starts(self.files.parts(i, commands))

    def text(self, i: int, frame: int) -> Text:
        caption = self.files.caption(i, frame, self.annotation)
        return embedded(caption, self.embeddings, self.files.name(i), self.num_tokens)

    def names(self, i: int, camera: int) -> dict[str, str]:
        annotation, video = self.files.layout.rows(i).path, self.files.file_of(i, self.camera)
        return {"video_path": str(video), "annotation_file": str(annotation), "__key__": self.files.name(i)}

    def actions(self, i: int, frames: NDArray[numpy.int64]) -> NDArray[Any]:
        rows = self.files.parts(i, self.parts).astype(numpy.float64)
        if not numpy.isfinite(rows[frames[0] : frames[-1]]).all():
            raise DataError(f"{self.files.layout.rows(i).path}: {self.files.name(i)} has actions that are not finite.")
        return combined_actions(rows, frames, self.combine)

    def shown(self, i: int) -> Sequence[bool] | None:
        return self.files.shown(i, self.camera) if self.masks else None

    def states(self, i: int, frames: NDArray[numpy.int64]) -> NDArray[Any] | None:
        return self.files.parts(i, self.state_parts)[frames] if self.state_parts else None


def _with_files(
    source: LeRobotClips, episodes: NDArray[numpy.int64], skip: bool, is_training: bool
) -> NDArray[numpy.int64]:
    """The episodes whose files are there; with ``skip`` the others are excluded, else they are an error."""
    files, camera = source.files, source.camera
    if source.masks:
        counts = numpy.array([sum(files.shown(i, camera)) for i in episodes.tolist()], dtype=int)
        is_partial = (counts > 0) & (counts < len(cameras_in(camera)))
        if is_partial.any():
            what = "that is masked" if is_training else "they are left out of the held-out ones"
            log.info("%s: %d of %d episodes lack a camera: %s", source, is_partial.sum(), len(episodes), what)
        partial, episodes = episodes[is_partial & is_training], episodes[~is_partial]
    else:
        partial = episodes[:0]
    missing = set(files.missing_files(camera, episodes.tolist()))
    if not missing:
        return numpy.sort(numpy.concatenate([partial, episodes]))
    some = ", ".join(str(path) for path in sorted(missing)[:3])
    is_there = [not files.missing_files(camera, [i]) for i in episodes.tolist()]
    if not skip:
        raise DataError(
            f"{len(missing)} files that the index of {source} names are not there:"
            f" {some}.{files.lack(int(episodes[is_there.index(False)]), camera)} Fetch them, or set"
            " skip_bad_samples=True."
        )
    excluded = len(episodes) - sum(is_there)
    log.warning("%d of %d episodes are excluded, their files are missing: %s", excluded, len(episodes), some)
    return numpy.sort(numpy.concatenate([partial, episodes[numpy.array(is_there)]]))


def _problems(options: Mapping[str, Any]) -> Iterator[str]:
    optional = {"embodiment": (None, *KNOWN_ROBOTS), "outcome": (None, *OUTCOMES)}
    for name, words in {"missing_cameras": MISSING, "data_split": SPLITS, **optional}.items():
        if options[name] not in words:
            yield f"{name} is '{options[name]}'.{near(str(options[name]), filter(None, words))}"
    combine = options["combine_actions"]
    for word in [combine] if isinstance(combine, str | int | None) else combine:
        if word is not None and word not in COMBINATIONS:
            yield f"combine_actions is '{word}'.{near(str(word), COMBINATIONS)}"
    for name in ("stride", "start_interval"):
        if not isinstance(options[name], int) or options[name] < 1:
            yield f"{name}={options[name]}; a whole number of 1 at least is needed"
    yield from shape_problems(options["num_frames"], options["video_size"])


def _stride(fps: float, stride: int, frame_rate: float | None) -> int:
    if frame_rate is None:
        return stride
    if stride != 1:
        raise ConfigError(f"frame_rate={frame_rate} and stride={stride} mean the same: give one.")
    if not frame_rate > 0 or abs(fps / frame_rate - round(fps / frame_rate)) > 1e-6 or frame_rate > fps:
        raise ConfigError(
            f"frame_rate={frame_rate}, but the recording has {fps:g} frames per second: take {fps:g}, {fps / 2:g},"
            f" {fps / 3:g} and so on, for which every so many frames are taken."
        )
    return round(fps / frame_rate)


def _combination(wanted: str | Sequence[str] | None, stride: int, info: Info, parts: Sequence[Part]) -> str | list[str]:
    if wanted is not None or stride == 1:
        return list(wanted) if wanted is not None and not isinstance(wanted, str) else wanted or "first"
    places = [(part, part.start + k) for part in parts for k in range(part_width(info, part))]
    kinds = [
        info.modality.is_absolute(part.column, place) if part.absolute is None else part.absolute
        for part, place in places
    ]
    if None in kinds:
        raise ConfigError(
            f"With stride {stride}, set what becomes of the actions in between: combine_actions (--combine_actions) is"
            " last for absolute targets, such as positions of joints, sum for moves, which add up, or a list with a"
            ' word for each number, [sum,sum,last]. meta/modality.json of the data set has no "absolute" for them.'
        )
    return ["last" if kind else "sum" for kind in kinds]


def _idle_rule(wanted: SkipIdle, info: Info, form: Form) -> tuple[IdleRule, Sequence[Part]] | None:
    """The rule and the commands that it looks at; None where no window is left out."""
    if wanted is None or wanted is False:
        return None
    if wanted is not True and not isinstance(wanted, Mapping):
        raise ConfigError(f"skip_idle is {wanted!r}; True, False, or {{columns: [action], below: 0.001}} is expected.")
    values = {} if wanted is True else dict(wanted)
    columns = values.pop("columns", None)
    names = [field.name for field in fields(IdleRule)]
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"skip_idle has no '{unknown[0]}'.{near(unknown[0], ['columns', *names])}")
    if wrong := [name for name, value in values.items() if not isinstance(value, int | float) or value < 0]:
        raise ConfigError(f"skip_idle.{wrong[0]} is {values[wrong[0]]!r}; a number of 0 or more is expected.")
    commands = form.commands if columns is None else choose_action(info, columns)
    if not commands:
        raise ConfigError("skip_idle needs the columns of commands: skip_idle={columns: [action], below: 0.001}.")
    if absent := [part.column for part in commands if part.column not in info.features]:
        raise ConfigError(f"{info.root} has no column '{absent[0]}', which skip_idle looks at: set skip_idle=False.")
    return IdleRule(**values), commands


def _given_transform(given: GivenTransform, width: int) -> ActionTransform | None:
    transform = controller_transform(given, "Use 'controller'.")
    if transform is not None and transform.dim != width:
        raise ConfigError(
            f"action_transform.scale has {transform.dim} numbers, but an action of this data set {width}."
        )
    return transform


def _embeddings(root: str, folder: str | None) -> EmbeddingFolder:
    if folder is not None:
        return EmbeddingFolder(folder)
    commands = (
        f"python -m scripts.prepare_lerobot_data --source {root} --out FOLDER, {encode_commands('FOLDER/train')}, and"
        " then embedding_dir=FOLDER/train/t5_xxl."
    )
    return task_embeddings(root, commands)
