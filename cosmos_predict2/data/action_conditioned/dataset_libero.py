# SPDX-License-Identifier: Apache-2.0
"""LIBERO's demonstrations as clips with controller actions, read from the HDF5 files as they are published."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.statistics import controller_transform
from cosmos_predict2.actions.transforms import ActionTransform, Floats, controller, summed_actions
from cosmos_predict2.data.action_conditioned.libero_files import (
    FPS,
    SUFFIX,
    Demo,
    find_suites,
    is_success,
    is_validation,
    list_demos,
    read_actions,
    read_pictures,
)
from cosmos_predict2.data.clip_dataset import (
    ACTION_FPS,
    ClipDataset,
    FramesOf,
    GivenTransform,
    Source,
    Text,
    embedded,
    shape_problems,
    task_embeddings,
)
from cosmos_predict2.data.samples import PackedStrings
from cosmos_predict2.data.video.clips import Clip, Fit
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.trained_text import encode_commands
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.findings import CheckContext, Finding, errors, refusals

log = logging.getLogger(__name__)

MODES = ("train", "val", "all")
OUTCOMES = ("success", "failure")


class LiberoDataset(ClipDataset):
    """Every window of ``num_frames`` frames, ``stride`` apart, of every demonstration of the suites, in order.

    Of each task, the demonstrations whose number divided by ``val_every`` leaves ``val_every - 1`` are for validation
    (0: none). ``suites`` are all that lie in ``root`` unless some are named. Pictures are turned by 180 degrees with
    ``rotate``, as policies see them. With several ``cameras`` one is drawn for each item in training, and they take
    turns otherwise.

    ``outcome`` takes only what ended in success or in failure, by its ``rewards``, as a policy's own attempts may.

    Actions are those of the controller, scaled by ``action_transform`` (by default all seven by 20; "statistics": by
    a transform fitted to them); with a stride, moves in between are added up and the gripper's number is the last.
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
            for demo in _all_demos(Path(root), suites, skip_bad_samples)
            if mode == "all" or is_validation(demo.number, val_every) == (mode == "val")
            if outcome is None or is_success(demo) == (outcome == "success")
        ]
        if not demos:
            which = f" that ended in {outcome}" if outcome else ""
            raise DataError(f"{root} has no demonstration{which} for mode='{mode}' with val_every={val_every}.")
        encode = f"python -m scripts.prepare_libero_data --source {root} --form keep, then {encode_commands(root)}"
        embeddings = task_embeddings(root, encode) if load_t5_embeddings else None
        super().__init__(
            LiberoSource(root, demos, cameras, rotate, embeddings, num_tokens),
            num_frames,
            video_size,
            stride=stride,
            start_interval=start_interval,
            action_transform=given,
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
        return DataFacts(
            kind="LIBERO's files",
            has_actions=True,
            transform=known(lambda: _transform(arguments.get("action_transform"))),
            read_rate=lambda: FPS / int(arguments.get("stride", 1)),
        )


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
    ) -> None:
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
            pictures = read_pictures(demo, self._cameras[camera], step, rotate=self._rotate)
            video = torch.from_numpy(numpy.ascontiguousarray(pictures.transpose(3, 0, 1, 2)))
            return video if fit is None else fit(video)

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


def _all_demos(root: Path, suites: Sequence[str] | None, skip_bad: bool) -> list[Demo]:
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
    if isinstance(cameras, str) or not cameras:
        yield f"cameras={cameras!r}; it is a list of one name or more"
    if outcome is not None and outcome not in OUTCOMES:
        yield f"There is no outcome '{outcome}'.{near(str(outcome), OUTCOMES)}"
    if mode not in MODES:
        yield f"There is no mode '{mode}'.{near(str(mode), MODES)}"
    if val_every < 0 or val_every == 1:
        yield f"val_every={val_every}; every so many demonstrations one is for validation: 2 or more, or 0 for none"
    if stride < 1 or start_interval < 1:
        yield f"stride={stride}, start_interval={start_interval}: 1 at least"
