# SPDX-License-Identifier: Apache-2.0
"""Clips of recordings as training samples: the contract of a source of recordings, and the data set that reads one."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.actions.statistics import (
    MOST_ROWS,
    STATISTICS,
    DatasetStatistics,
    declared_transform,
    fitted_transform,
    sampled_statistics,
)
from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.conditioner import SHOWN_KEY, STATE_KEY
from cosmos_predict2.data.samples import CURE, BadSamples, FrameRule, evenly, frame_item, place_of, text_item
from cosmos_predict2.data.video.clips import CROPS, Clip, Fit, choose_decoder
from cosmos_predict2.data.views import stacked
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, find_embedding_dir
from cosmos_predict2.tokenizers.sizes import size_problem
from imaginaire.data.facts import DataFacts, facts_of
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.findings import CheckContext, Finding, errors

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Numbers = NDArray[Any]
GivenTransform = ActionTransform | Mapping[str, Any] | str | None

EVERY = "every"  # sampling: every window of every recording is a sample
# Label of the frame rate in every sample with actions: published action-conditioned weights were trained with no other,
# whatever rate the robot was recorded at.
ACTION_FPS = 4.0

TRANSFORM_KEY = "action_transform"  # of a sample: the ActionTransform of its actions, as JSON


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a clip."""

    caption: str | None = None
    embedding: tuple[Tensor, Tensor] | None = None  # float32 [num_tokens, width] and its mask int64 [num_tokens]
    path: str = ""  # of the embedding

    def item(self) -> dict[str, Any]:
        """Its entries in a sample."""
        item: dict[str, Any] = {} if self.embedding is None else text_item(*self.embedding)
        return item if self.caption is None else {**item, "ai_caption": self.caption}


class Source(Protocol):
    """Recordings, counted from 0. Frames and actions are read when they are asked for; ``str(source)`` names it."""

    lengths: Sequence[int] | Numbers | None = None  # frames of each, for every window; None: known to the opened clip
    num_cameras: int = 1
    # Of an ActionTransform kind, accumulate, quaternion and rot6d, and of raw numbers ``known`` ranges and the
    # ``contract``; None: no actions.
    action_form: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return type(self).__name__

    def __len__(self) -> int: ...

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        """Its pictures: how many, at which rate, and chosen ones of them."""
        ...

    def text(self, i: int, frame: int) -> Text:
        """Its text, at a frame."""
        return Text()

    def actions(self, i: int, frames: NDArray[numpy.int64]) -> Numbers:
        """Unscaled actions [len(frames) - 1, d] that lead along these frames."""
        raise DataError(f"{self} has no actions.")

    def states(self, i: int, frames: NDArray[numpy.int64]) -> Numbers | None:
        """The robot's state [F, S] at these frames; None where nobody asked for it."""
        return None

    def shown(self, i: int) -> Sequence[bool] | None:
        """True for each view that was filmed; None: all of them, always."""
        return None

    def starts(self, i: int) -> NDArray[numpy.bool_] | None:
        """[F], true for the frames that a window may begin with; None: all of them."""
        return None

    def names(self, i: int, camera: int) -> dict[str, str]:
        """Further strings of a sample: video_path, __key__ and others; messages show video_path."""
        return {"video_path": f"{self}, recording {i}"}

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        """Facts that are known before it is built (`imaginaire.data.facts`)."""
        return DataFacts(kind=cls.__name__)


@dataclass
class FramesOf:
    """A `Clip` that a function reads."""

    num_frames: int
    fps: float
    function: Callable[[Sequence[int], Fit | None], Tensor]

    def read(self, frames: Sequence[int], fit: Fit | None = None) -> Tensor:
        return self.function(frames, fit)


@contextmanager
def opened_views(views: Sequence[AbstractContextManager[Clip]], name: str) -> Iterator[Clip]:
    """One clip of several cameras, their pictures below each other; ``name`` is for messages."""
    with ExitStack() as opened:
        clips = [opened.enter_context(view) for view in views]
        forms = [(clip.num_frames, clip.fps) for clip in clips]
        if len(set(forms)) > 1:
            found = ", ".join(f"{count} at {fps:g} a second" for count, fps in forms)
            raise DataError(f"{name}: its cameras have frames that do not go together: {found}.")
        yield FramesOf(*forms[0], lambda frames, fit: stacked([clip.read(frames, fit) for clip in clips]))


class ClipDataset(Dataset[dict[str, Any]]):
    """``num_frames`` frames of a source's recordings, in one size, with their text and actions.

    sampling ``every``: each window of each recording is a sample, its frames ``stride`` apart, from every
    ``start_interval``-th frame on. Otherwise a sample is a recording, and its frames are chosen when it is read
    (`FrameRule`; draws come from NumPy's global generator, which the loader seeds per sample). Of several cameras one
    is drawn in training; else they take turns.

    crop: ``stretch`` scales to ``video_size`` (height, width) whatever the shape, ``center`` keeps the shape and cuts
    off what is over; without a size pictures stay as they are. ``fps`` is a label of the samples; by default the rate
    of their frames. Where the source has no embedding the text is zeros of ``text_width`` that are all seen (mask of
    ones); none without a width.

    Actions go through ``action_transform``; by default, or "statistics", one fitted to those of the whole source, or
    "quantiles", by which q01 and q99 become -1 and 1. A bad recording is an error that names it, or with
    ``skip_bad_samples`` replaced by the next good one.
    """

    def __init__(
        self,
        source: Source,
        num_frames: int,
        video_size: Sequence[int] | None,
        *,
        sampling: str = EVERY,
        stride: int = 1,
        frame_rate: float | None = None,
        start_interval: int = 1,
        crop: str = "stretch",
        action_transform: GivenTransform = None,
        fps: float | None = None,
        num_tokens: int = 512,
        text_width: int | None = None,
        is_training: bool = True,
        recordings: NDArray[numpy.int64] | None = None,
        most_windows: int | None = None,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        cure: str = CURE,
    ) -> None:
        if problem := (video_size is not None and size_problem("video_size", video_size)) or crop_problem(crop):
            raise ConfigError(problem)
        self.source = source
        self.num_frames, self.stride = num_frames, stride
        self.video_size = None if video_size is None else (int(video_size[0]), int(video_size[1]))
        self.fps = None if fps is None else float(fps)
        self.recordings = recordings  # those of the source that are used; None: all
        self._crop = crop
        self._zeros = None if text_width is None else (num_tokens, text_width)
        self._draws_camera = is_training
        self._bad = BadSamples(skip_bad_samples, most_bad_samples, cure)
        self.windows: Windows | None = None
        self.rule = FrameRule(
            num_frames=num_frames, fps=frame_rate, stride=stride, sampling="first" if sampling == EVERY else sampling
        )
        if source.lengths is None and (sampling == EVERY or source.action_form is not None):
            what = f"sampling={EVERY}" if sampling == EVERY else "action_form"
            raise ConfigError(
                f"{what} needs the lengths of all recordings, but {type(source).__name__} has no lengths."
            )
        if sampling == EVERY:
            assert source.lengths is not None
            lengths = source.lengths if recordings is None else numpy.asarray(source.lengths)[recordings]
            self.windows = Windows(
                lengths, num_frames, stride, start_interval, what=str(source), most=most_windows, starts=self._starts
            )
        self.action_transform: ActionTransform | None = None
        if source.action_form is not None:
            self.action_transform = fitted_transform(
                declared_transform(action_transform),
                lambda most: self.action_statistics(skip_bad=skip_bad_samples, most_rows=most),
                what=str(source),
                is_logged=is_training,
                fit=action_transform if isinstance(action_transform, str) else STATISTICS,
                **source.action_form,
            )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments; the source has a check of its own."""
        own = {
            key: value for key, value in arguments.items() if value is not None and (key, value) != ("sampling", EVERY)
        }
        return errors(context.key, clip_problems({**own, "fps": arguments.get("frame_rate")}))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        source = arguments.get("source")
        facts = facts_of(source) if isinstance(source, Mapping) else DataFacts(kind=cls.__name__)

        def rate() -> float | None:
            own = arguments.get("frame_rate") or facts.rate
            return None if own is None else own / arguments.get("stride", 1)

        return replace(facts, read_rate=rate)

    def __len__(self) -> int:
        return len(self.source if self.windows is None else self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.windows is None:
            return self._bad.read(index, len(self), self._item)
        return self.windows.read(index, self._bad, self._item)

    def _starts(self, k: int) -> NDArray[numpy.bool_] | None:
        """The frames that a window of the k-th recording in use may begin with."""
        try:
            return self.source.starts(k if self.recordings is None else int(self.recordings[k]))
        except DataError:
            if not self._bad.skip:  # else it is replaced when it is read
                raise
        return None

    def _item(self, index: int) -> dict[str, Any]:
        i, frames = index, None
        if self.windows is not None:
            i, frames = self.windows[index]
            i = i if self.recordings is None else int(self.recordings[i])
        camera, count = index, self.source.num_cameras
        camera = int(numpy.random.randint(count)) if self._draws_camera and count > 1 else index % count
        with self.source.open(i, camera) as clip:
            if frames is None:
                frames = self._chosen(clip, self.source.names(i, camera)["video_path"])
            video = clip.read(frames.tolist(), None if self.video_size is None else self._fit)
            rate = self.rule.item_fps(frames.tolist(), clip.fps)
        return {"video": video, **self.described(i, frames, (video.shape[2], video.shape[3]), rate, camera)}

    def described(
        self, i: int, frames: NDArray[numpy.int64], size: tuple[int, int], rate: float, camera: int = 0
    ) -> dict[str, Any]:
        """All entries of a sample of these frames of recording i, besides its pictures."""
        names = self.source.names(i, camera)
        text = self.source.text(i, int(frames[0]))
        if text.embedding is None and self._zeros is not None:
            text = replace(text, embedding=no_text(*self._zeros))
        item = {
            "fps": rate if self.fps is None else self.fps,
            "num_frames": len(frames),
            **frame_item(size),
            "video_name": {"video_path": names.pop("video_path"), "t5_embedding_path": text.path},
            **names,
            **text.item(),
        }
        if self.action_transform is not None:
            actions = self._actions(i, frames, self.action_transform)
            item |= {"action": actions, TRANSFORM_KEY: self.action_transform.to_json()}
        if (shown := self.source.shown(i)) is not None:
            item[SHOWN_KEY] = torch.tensor(shown, dtype=torch.float32)
        if (states := self.source.states(i, frames)) is not None:
            if not numpy.isfinite(states).all():
                raise DataError(f"{self.source}: the state of recording {i} has numbers that are not finite.")
            item[STATE_KEY] = torch.as_tensor(states, dtype=torch.float32)
        return item

    def _chosen(self, clip: Clip, name: str) -> NDArray[numpy.int64]:
        try:
            return numpy.asarray(self.rule.choose(clip.num_frames, clip.fps, numpy.random.randint))
        except DataError as error:
            raise DataError(f"{name} has {error}") from error

    def _fit(self, frames: Tensor) -> Tensor:
        assert self.video_size is not None
        return CROPS[self._crop](frames, self.video_size)

    def _actions(self, i: int, frames: NDArray[numpy.int64], transform: ActionTransform) -> Tensor:
        """Scaled actions float32 [len(frames) - 1, d]."""
        actions = transform.apply(self.source.actions(i, frames))
        if actions.ndim != 2 or len(actions) != len(frames) - 1:
            raise DataError(
                f"{self.source}: recording {i} has actions {list(actions.shape)} for {len(frames)} frames; there is"
                f" one row from each frame to the next."
            )
        return torch.as_tensor(actions, dtype=torch.float32)

    def action_statistics(self, *, skip_bad: bool = False, most_rows: int = MOST_ROWS) -> DatasetStatistics:
        """Statistics of the unscaled actions of all recordings of the source, also of those that are not used, as they
        lead along its frames; of evenly spaced ones where there are more rows than ``most_rows``."""

        def rows_of(i: int) -> Numbers:
            try:
                return self._rows(i)
            except DataError:
                if skip_bad:
                    return numpy.empty((0, 1))
                raise

        assert self.source.lengths is not None, f"{self.source} has actions, but no lengths"
        return sampled_statistics(self.source.lengths, rows_of, most_rows)

    def _rows(self, i: int) -> Numbers:
        """Unscaled actions along recording i."""
        assert self.source.lengths is not None and self.source.action_form is not None
        frames = numpy.arange(0, int(self.source.lengths[i]), self.stride)
        if len(frames) < 2:
            return numpy.empty((0, 1))
        # Poses may be relative to the first frame of a window.
        size = self.num_frames - 1 if self.source.action_form.get("accumulate") else len(frames)
        parts = [frames[first : first + size + 1] for first in range(0, len(frames) - 1, size)]
        return numpy.concatenate([self.source.actions(i, part) for part in parts])


def state_range(tables: Iterable[Numbers], what: str) -> list[list[float]]:
    """Lowest and highest value of each number of the states [F, S] of recordings."""
    ends = numpy.array([[table.min(axis=0), table.max(axis=0)] for table in tables])
    if not ends.size:
        raise DataError(f"{what}: it has no recordings.")
    if len(bad := numpy.flatnonzero(~numpy.isfinite(ends).reshape(len(ends), -1).all(axis=1))):
        raise DataError(
            f"{what}: {len(bad)} of {len(ends)} recordings have numbers that are not finite, first {bad[0]}."
        )
    low, high = ends[:, 0].min(axis=0), ends[:, 1].max(axis=0)
    return [[float(first), float(last)] for first, last in zip(low, high, strict=True)]


def require_state(wanted: str, known: str) -> bool:
    """True if the robot's state is wanted, of a layout in which it has this name."""
    if wanted not in ("", known):
        raise ConfigError(f"there is no state '{wanted}'.{near(wanted, [known])}")
    return bool(wanted)


def clip_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Problems of these arguments of a data set of clips; one that is absent has its default."""
    size, crop = arguments.get("video_size", (16, 16)), arguments.get("crop", "stretch")
    yield from filter(None, (size_problem("video_size", size), crop_problem(crop)))
    names = ("num_frames", "fps", "stride", "sampling")
    try:
        FrameRule(**{"num_frames": 1} | {name: arguments[name] for name in names if name in arguments})
    except ConfigError as problem:
        yield str(problem)
    try:
        choose_decoder(arguments.get("decoder", "auto"))
    except ConfigError as problem:
        yield str(problem)


def crop_problem(crop: str) -> str | None:
    return None if crop in CROPS else f"There is no crop '{crop}'.{near(crop, CROPS)}"


def shape_problems(num_frames: Any, video_size: Any) -> Iterator[str]:
    """Problems of the requested shape of a clip with actions."""
    if not isinstance(num_frames, int) or num_frames < 2:
        yield f"num_frames={num_frames}; a clip with actions has 2 frames at least"
    if problem := size_problem("video_size", video_size):
        yield problem


def task_embeddings(root: str, command: str) -> EmbeddingFolder:
    """The embeddings of a data set's tasks."""
    folder = find_embedding_dir(root)
    if folder is None:
        raise DataError(f"{root} has no t5_xxl/ with embeddings of the tasks. Write it: {command}")
    return EmbeddingFolder(folder)


def embedded(caption: str | None, embeddings: EmbeddingFolder | None, stem: str, num_tokens: int) -> Text:
    """The caption with its embedding, where there is a folder of them."""
    if embeddings is None:
        return Text(caption)
    return Text(caption, embeddings.read(stem, num_tokens), str(embeddings.find(stem) or ""))


def no_text(num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """The embedding float32 [num_tokens, width] of "no text" and its mask int64 [num_tokens]."""
    return torch.zeros(num_tokens, width), torch.ones(num_tokens, dtype=torch.int64)


class Windows:
    """Every window of ``num_frames`` frames, ``stride`` apart, of recordings with these lengths; one at least.

    ``what`` names the recordings in the error for the case that all are too short. ``starts(k)`` are the frames of
    recording k that a window may begin with, [F]; None: all of them.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        num_frames: int,
        stride: int = 1,
        every: int = 1,
        *,
        what: str,
        most: int | None = None,
        starts: Callable[[int], NDArray[numpy.bool_] | None] = lambda _: None,
    ) -> None:
        self._frames = stride * numpy.arange(num_frames)
        needed = stride * (num_frames - 1) + 1
        self._next = -(-needed // every)  # from one window to the first that it does not overlap
        counts = numpy.maximum(0, -(-(numpy.asarray(lengths, numpy.int64) - needed + 1) // every))
        recordings = numpy.repeat(numpy.arange(len(lengths)), counts)
        places = numpy.arange(len(recordings)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        # recording and first frame; in arrays, as a large data set has a hundred million
        self.rows = numpy.stack([recordings, every * places], axis=1).astype(numpy.int32)[:most]
        if not len(self.rows):
            raise DataError(
                f"{what}: {len(lengths)} recordings of at most {max(lengths, default=0)} frames, but"
                f" num_frames={num_frames} with stride {stride} needs {needed}. Lower num_frames or the stride."
            )
        if short := len(lengths) - numpy.count_nonzero(counts):
            log.info("%s: %d of %d recordings are too short for a window", what, short, len(lengths))
        self._leave_out(starts, what)
        self._firsts = numpy.unique(self.rows[:, 0], return_index=True)[1]  # of each recording that has windows

    def _leave_out(self, starts: Callable[[int], NDArray[numpy.bool_] | None], what: str) -> None:
        """Keep the windows that begin with a frame of ``starts``."""
        parts = numpy.split(self.rows, numpy.unique(self.rows[:, 0], return_index=True)[1][1:])
        masks = [starts(int(part[0, 0])) for part in parts]
        if all(mask is None for mask in masks):
            return
        kept = [part if mask is None else part[mask[part[:, 1]]] for part, mask in zip(parts, masks, strict=True)]
        before, self.rows = len(self), numpy.concatenate(kept)
        log.info("%s: %d of %d windows begin where something moves", what, len(self), before)
        if not len(self):
            raise DataError(f"{what}: in none of {before} windows does anything move (skip_idle).")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, NDArray[numpy.int64]]:
        """The recording of a window, and its frames."""
        recording, start = (int(number) for number in self.rows[index])
        return recording, start + self._frames

    @property
    def num_recordings(self) -> int:
        return len(self._firsts)

    @property
    def num_apart(self) -> int:
        """Number of windows that do not overlap."""
        return int((1 + (self._counts() - 1) // self._next).sum())

    def spread(self, num: int) -> list[int]:
        """At most ``num`` windows, of as many recordings as can be and evenly apart in each; they overlap only where
        there are too few others."""
        counts = self._counts()
        most = counts if num > self.num_apart else 1 + (counts - 1) // self._next
        shares = numpy.zeros_like(counts)
        while (left := min(num, int(most.sum())) - int(shares.sum())) > 0:
            more = numpy.flatnonzero(shares < most)
            shares[more[numpy.linspace(0, len(more) - 1, min(left, len(more))).round().astype(int)]] += 1
        recordings = zip(self._firsts.tolist(), counts.tolist(), shares.tolist())
        return [first + place for first, count, share in recordings for place in evenly(count, share)]

    def _counts(self) -> NDArray[numpy.int64]:
        """Windows of each recording that has some."""
        return numpy.diff(self._firsts, append=len(self))

    def read(self, index: int, bad: BadSamples, item: Callable[[int], Item]) -> Item:
        """``item(index)``; where that fails and may be skipped, of the first window of the recordings that follow.

        What breaks one window of a recording mostly breaks them all.
        """
        index = place_of(index, len(self))
        own = int(numpy.searchsorted(self._firsts, index, side="right")) - 1
        return bad.read(own, len(self._firsts), lambda place: item(index if place == own else int(self._firsts[place])))
