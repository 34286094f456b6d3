# SPDX-License-Identifier: Apache-2.0
"""LIBERO's demonstrations as clips with controller actions, read from the HDF5 files as they are published.

    ROOT/<suite>/<task>_demo.hdf5
        data/demo_<k>/actions                  [T, 7] in [-1, 1]: moves, turns, gripper (-1 opens, 1 closes)
        data/demo_<k>/obs/<camera>             uint8 [T, H, W, 3], upside down
        data/demo_<k>/obs/{ee_pos, ee_ori, gripper_states}    [T, 3] metres, [T, 3] axis-angle, [T, 2] finger positions

actions[t] leads from obs[t] to obs[t + 1]. The pictures are turned by 180 degrees against those that policies see.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.rotations import axis_angle_to_matrix, matrix_to_euler
from cosmos_predict2.actions.statistics import controller_transform
from cosmos_predict2.actions.transforms import ActionTransform, Floats, controller, summed_actions
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
from cosmos_predict2.data.samples import PackedStrings
from cosmos_predict2.data.video.clips import Clip, Fit
from cosmos_predict2.data.views import AND, cameras_in, stacked
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.trained_text import encode_commands
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError, DataError, near, optional_module, raised_as
from imaginaire.findings import CheckContext, Finding, errors, refusals

log = logging.getLogger(__name__)

SUFFIX = "_demo.hdf5"
PROPRIO = "proprio"
FPS = 20.0  # of the simulation's control loop
OPEN_FINGERS = 0.08  # metres between the fingers of the open gripper

_SCENE = re.compile(r"^[A-Z_]+_SCENE\d+_")  # names of the long suites begin with where it happens
MODES = ("train", "val", "all")
OUTCOMES = ("success", "failure")
_OF_ROBOT = ("obs/ee_pos", "obs/ee_ori", "obs/gripper_states")


class LiberoDataset(ClipDataset):
    """Every window of ``num_frames`` frames, ``stride`` apart, of every demonstration of the suites, in order.

    Of each task, the demonstrations whose number divided by ``val_every`` leaves ``val_every - 1`` are for validation
    (0: none). ``suites`` are all that lie in ``root`` unless some are named. Pictures are turned by 180 degrees with
    ``rotate``, as policies see them. With several ``cameras`` one is drawn for each item in training, and they take
    turns otherwise; agentview_rgb+eye_in_hand_rgb are views of one picture (`data.views`), each of ``video_size``.

    ``outcome`` takes only what ended in success or in failure, by its ``rewards``, as a policy's own attempts may.

    Actions are those of the controller, scaled by ``action_transform`` (by default all seven by 20; "statistics": by
    a transform fitted to them); with a stride, moves in between are added up and the gripper's number is the last.
    ``state`` "proprio" adds position, axis-angle turn and fingers of the gripper at each frame to the samples; other
    observations of the files are named, joint_states+gripper_states.
    ``load_t5_embeddings`` takes the text from ROOT/t5_xxl/<task>.pickle; without it the text is zeros.
    """

    def __init__(
        self,
        root: str,
        suites: Sequence[str] | None = None,
        cameras: Sequence[str] = ("agentview_rgb",),
        num_frames: int = 13,
        video_size: Sequence[int] = (256, 320),
        *,
        rotate: bool = True,
        mode: str = "train",
        val_every: int = 10,
        outcome: str | None = None,
        state: str = "",
        stride: int = 1,
        start_interval: int = 1,
        action_transform: ActionTransform | Mapping[str, Any] | str | None = None,
        load_t5_embeddings: bool = False,
        num_tokens: int = 512,
        text_width: int = 1024,
        fps: float = ACTION_FPS,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
    ) -> None:
        problems = [*_problems(cameras, mode, val_every, stride, start_interval, outcome)]
        if problems := [*problems, *shape_problems(num_frames, video_size)]:
            raise ConfigError("; ".join(problems))
        given = _transform(action_transform)
        demos = [
            demo
            for demo in all_demos(Path(root), suites, skip_bad_samples)
            if mode == "all" or is_validation(demo.number, val_every) == (mode == "val")
            if outcome is None or is_success(demo) == (outcome == "success")
        ]
        if not demos:
            which = f" that ended in {outcome}" if outcome else ""
            raise DataError(f"{root} has no demonstration{which} for mode='{mode}' with val_every={val_every}.")
        encode = f"python -m scripts.prepare_libero_data --source {root} --form keep, then {encode_commands(root)}"
        embeddings = task_embeddings(root, encode) if load_t5_embeddings else None
        super().__init__(
            LiberoSource(root, demos, cameras, rotate, embeddings, num_tokens, state),
            num_frames,
            video_size,
            stride=stride,
            start_interval=start_interval,
            action_transform=given or action_transform,
            fps=fps,
            num_tokens=num_tokens,
            text_width=text_width,
            is_training=mode == "train",
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )
        log.info("%s: %d windows of %d demonstrations for %s", root, len(self), len(demos), mode)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments; the files are not opened."""
        options = with_defaults(cls, {"root": "", **arguments})
        names = ("cameras", "mode", "val_every", "stride", "start_interval", "outcome")
        yield from errors(context.key, _problems(*(options[name] for name in names)))
        yield from errors(context.key, shape_problems(options["num_frames"], options["video_size"]))
        yield from refusals(
            context.key,
            lambda: find_suites(Path(options["root"]), options["suites"]),
            lambda: _transform(options["action_transform"]),
        )

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        def states() -> list[list[float]]:
            root, state = str(arguments["root"]), arguments["state"]
            return state_range((read_state(one, state) for one in all_demos(Path(root), arguments.get("suites"))), root)

        return DataFacts(
            kind="LIBERO's files",
            has_actions=True,
            transform=known(lambda: _transform(arguments.get("action_transform"))),
            read_rate=lambda: FPS / int(arguments.get("stride", 1)),
            read_state_range=states if arguments.get("state") else None,
        )


@dataclass(frozen=True, slots=True)
class Demo:
    """One demonstration: where it is, and how long."""

    suite: str
    file: Path
    name: str  # demo_<k>
    length: int

    @property
    def task(self) -> str:
        return self.file.name.removesuffix(SUFFIX)

    @property
    def caption(self) -> str:
        return caption(self.task)

    @property
    def number(self) -> int:
        return int(self.name.rpartition("_")[2])


class LiberoSource(Source):
    """Demonstrations in LIBERO's files."""

    action_form: Mapping[str, Any] | None = {}
    lengths: NDArray[numpy.int32]

    def __init__(
        self,
        root: str,
        demos: Sequence[Demo],
        cameras: Sequence[str],
        rotate: bool,
        embeddings: EmbeddingFolder | None,
        num_tokens: int,
        state: str = "",
    ) -> None:
        self._state = state
        if state:
            read_state(demos[0], state)  # a name that there is not
        self._root, self._cameras, self._rotate = root, tuple(cameras), rotate
        self._embeddings, self._num_tokens = embeddings, num_tokens
        self.num_cameras = len(cameras)
        self._files = PackedStrings(str(demo.file) for demo in demos)
        self._numbers = numpy.asarray([demo.number for demo in demos], dtype=numpy.int32)
        self.lengths = numpy.asarray([demo.length for demo in demos], dtype=numpy.int32)

    def __str__(self) -> str:
        return self._root

    def __len__(self) -> int:
        return len(self._files)

    def demo(self, i: int) -> Demo:
        """Demonstration i of those that are used."""
        file = Path(self._files[i])
        return Demo(file.parent.name, file, f"demo_{self._numbers[i]}", int(self.lengths[i]))

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        demo = self.demo(i)

        def read(frames: Sequence[int], fit: Fit | None) -> Tensor:
            step = slice(frames[0], frames[-1] + 1, frames[1] - frames[0])
            return read_views(demo, self._cameras[camera], step, rotate=self._rotate, fit=fit)

        return nullcontext(FramesOf(demo.length, FPS, read))

    def text(self, i: int, frame: int) -> Text:
        demo = self.demo(i)
        return embedded(demo.caption, self._embeddings, demo.task, self._num_tokens)

    def names(self, i: int, camera: int) -> dict[str, str]:
        demo = self.demo(i)
        return {
            "video_path": f"{demo.file}/data/{demo.name}/obs/{self._cameras[camera]}",
            "annotation_file": str(demo.file),
            "__key__": f"{demo.suite}/{demo.task}/{demo.name}",
        }

    def actions(self, i: int, frames: NDArray[numpy.int64]) -> Floats:
        return summed_actions(read_actions(self.demo(i)), frames)

    def states(self, i: int, frames: NDArray[numpy.int64]) -> Floats | None:
        return read_state(self.demo(i), self._state)[frames] if self._state else None


def all_demos(root: Path, suites: Sequence[str] | None = None, skip_bad: bool = False) -> list[Demo]:
    """The demonstrations of these suites; a broken file is an error, or with ``skip_bad`` excluded with a warning."""
    demos, broken, count = [], [], 0
    for folder in find_suites(root, suites):
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            count += 1
            try:
                demos += list_demos(file)
            except DataError as error:
                if not skip_bad:
                    raise
                broken.append(error)
    if broken:
        log.warning("%s: %d of %d files are excluded. First: %s", root, len(broken), count, broken[0])
    return demos


def _transform(given: GivenTransform) -> ActionTransform | None:
    """The given transform, or by default the published one as a proposal; None where it is fitted to the data."""
    if given is None:
        return attrs.evolve(controller(), proposed=True)
    cure = "For actions from poses write them in the Bridge layout: python -m scripts.prepare_libero_data --form bridge"
    return controller_transform(given, cure)


def _problems(cameras: Any, mode: str, val_every: int, stride: int, start_interval: int, outcome: Any) -> Iterator[str]:
    if isinstance(cameras, str) or not cameras or len({len(cameras_in(str(camera))) for camera in cameras}) > 1:
        yield f"cameras={cameras!r}; it is a list of one name or more, of as many views each"
    if outcome is not None and outcome not in OUTCOMES:
        yield f"There is no outcome '{outcome}'.{near(str(outcome), OUTCOMES)}"
    if mode not in MODES:
        yield f"There is no mode '{mode}'.{near(str(mode), MODES)}"
    if val_every < 0 or val_every == 1:
        yield f"val_every={val_every}; every so many demonstrations one is for validation: 2 or more, or 0 for none"
    if stride < 1 or start_interval < 1:
        yield f"stride={stride}, start_interval={start_interval}: 1 at least"


# ---- the files -------------------------------------------------------------------------------------------------------


def caption(task: str) -> str:
    """The sentence that a task's name spells."""
    return _SCENE.sub("", task).replace("_", " ")


def find_suites(root: Path, suites: Sequence[str] | None = None) -> list[Path]:
    """The folders with task files below ``root``: those named, or all there are."""
    if not root.is_dir():
        raise DataError(f"The LIBERO folder {root} does not exist.")
    present = sorted(path.name for path in root.iterdir() if path.is_dir() and any(path.glob(f"*{SUFFIX}")))
    if suites is not None:
        for suite in suites:
            if suite not in present:
                raise DataError(f"{root} has no suite '{suite}' with *{SUFFIX} files.{near(suite, present)}")
        return [root / suite for suite in suites]
    if not present:
        raise DataError(f"{root} has no folder with *{SUFFIX} files; the suites of LIBERO lie in one each.")
    return [root / suite for suite in present]


def list_demos(file: Path) -> list[Demo]:
    """The demonstrations of a task's file, by number."""
    with opened(file) as content:
        groups = content.get("data")
        names = [name for name in groups if re.fullmatch(r"demo_\d+", name)] if hasattr(groups, "keys") else []
        if not names:
            raise DataError(f"{file} has no data/demo_<k>; it has {', '.join(content) or 'nothing'}.")
        names.sort(key=lambda name: int(name.rpartition("_")[2]))
        lengths = [len(_table(groups[name], "actions", file, name)) for name in names]
    return [Demo(file.parent.name, file, name, length) for name, length in zip(names, lengths)]


def read_actions(demo: Demo) -> Floats:
    """[T, d] as recorded."""
    (actions,) = _columns(demo, "actions")
    if actions.ndim != 2 or not numpy.isfinite(actions).all():
        raise DataError(
            f"{demo.file}: {demo.name}/actions, {list(actions.shape)}, is not rows [T, d] of finite numbers."
        )
    return actions


def read_pictures(demo: Demo, camera: str, frames: slice, *, rotate: bool) -> numpy.ndarray:
    """uint8 [F, H, W, 3]; ``rotate`` turns them by 180 degrees, as policies see them."""
    with opened(demo.file) as content:
        pictures = _table(content["data"][demo.name], f"obs/{camera}", demo.file, demo.name)
        if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != numpy.uint8:
            raise DataError(
                f"{demo.file}: {demo.name}/obs/{camera} is {pictures.dtype} {list(pictures.shape)}; pictures are uint8"
                " [T, H, W, 3]."
            )
        if len(pictures) != demo.length:
            raise DataError(
                f"{demo.file}: {demo.name} has {demo.length} actions, but {len(pictures)} pictures of {camera}."
            )
        found = pictures[frames]
    return found[:, ::-1, ::-1] if rotate else found


def read_views(demo: Demo, camera: str, frames: slice, *, rotate: bool, fit: Fit | None = None) -> Tensor:
    """uint8 [3, F, H, W] of a camera or of several (`data.views`); ``fit`` brings those of each to another size."""
    views = [read_pictures(demo, name, frames, rotate=rotate) for name in cameras_in(camera)]
    videos = [torch.from_numpy(numpy.ascontiguousarray(view.transpose(3, 0, 1, 2))) for view in views]
    return stacked([video if fit is None else fit(video) for video in videos])


def read_poses(demo: Demo) -> tuple[Floats, Floats]:
    """The gripper's poses [T, 6] (x, y, z, roll, pitch, yaw), and how far it is closed [T], 0 to 1."""
    position, turn, fingers = _columns(demo, *_OF_ROBOT)
    if not (position.shape == turn.shape == (demo.length, 3) and fingers.shape == (demo.length, 2)):
        raise DataError(
            f"{demo.file}: {demo.name} has ee_pos {list(position.shape)}, ee_ori {list(turn.shape)} and gripper_states"
            f" {list(fingers.shape)}; for {demo.length} actions they are [T, 3], [T, 3] and [T, 2]."
        )
    if not all(numpy.isfinite(table).all() for table in (position, turn, fingers)):
        raise DataError(f"{demo.file}: {demo.name} has ee_pos, ee_ori or gripper_states that are not finite.")
    angles = matrix_to_euler(axis_angle_to_matrix(turn))
    closed = 1 - numpy.abs(fingers[:, 0] - fingers[:, 1]) / OPEN_FINGERS
    return numpy.concatenate([position, angles], axis=1), numpy.clip(closed, 0.0, 1.0)


def is_success(demo: Demo) -> bool:
    """True if a reward was given, at its end or before: in every demonstration, but not in every try of a policy."""
    (rewards,) = _columns(demo, "rewards")
    return bool((rewards > 0).any())


def read_proprio(demo: Demo) -> Floats:
    """[T, 8] as policies see the robot: position, axis-angle turn, positions of the two fingers."""
    return read_state(demo, PROPRIO)


def read_state(demo: Demo, state: str) -> Floats:
    """[T, S]: "proprio", or observations by their names with + between them."""
    tables = _columns(demo, *(_OF_ROBOT if state == PROPRIO else [f"obs/{name}" for name in state.split(AND)]))
    if any(table.ndim != 2 or len(table) != demo.length for table in tables):
        shapes = ", ".join(str(list(table.shape)) for table in tables)
        raise DataError(f"{demo.file}: {demo.name} has {state} {shapes}; for {demo.length} actions tables [T, S].")
    return numpy.concatenate(tables, axis=1)


def is_validation(number: int, val_every: int) -> bool:
    """True if a task's demonstration of this number is for validation: the last of every ``val_every``; none for 0."""
    return val_every > 0 and number % val_every == val_every - 1


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The HDF5 file, open for reading. Opened anew each time: a forked worker must not share a handle."""
    h5py = optional_module("h5py", "data")
    with raised_as(DataError, f"{file} is not an HDF5 file that can be read", OSError, KeyError, RuntimeError):
        with h5py.File(file, "r", locking=False) as content:
            yield content


def _columns(demo: Demo, *keys: str) -> list[Floats]:
    with opened(demo.file) as content:
        group = content["data"][demo.name]
        return [numpy.asarray(_table(group, key, demo.file, demo.name), dtype=numpy.float64) for key in keys]


def _table(group: Any, key: str, file: Path, name: str) -> Any:
    if key not in group:
        folder, _, last = key.rpartition("/")
        parent = group[folder] if folder and folder in group else group
        names = list(parent) if hasattr(parent, "keys") else []
        raise DataError(f"{file}: {name} has no '{key}'.{near(last, names)}")
    table = group[key]
    if not getattr(table, "shape", None) or table.dtype.kind not in "biuf":
        raise DataError(f"{file}: {name}/{key} is no array of numbers.")
    return table
