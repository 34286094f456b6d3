# SPDX-License-Identifier: Apache-2.0
"""Training videos that are made while they are read: episodes of the toy world with captions and actions.

On disk an episode is its states and actions, a few kilobytes, from which every frame can be drawn:

FOLDER/states-000000.npz    episodes 0, 1, ...: states [n, T + 1, 10], actions [n, T, d], captions and what else
FOLDER/states-000256.npz    is known of them; no pickles
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform, controller
from cosmos_predict2.data.clip_dataset import ClipDataset, FramesOf, Source, Text
from cosmos_predict2.data.dataset_forms import TOY_STATES
from cosmos_predict2.data.video.clips import Clip, Fit
from cosmos_predict2.data.views import stacked
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.trained_text import NO_TEXT
from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.physics import STATE_SIZE
from imaginaire import foreign_json, storage
from imaginaire.checkpoint.plain_pickle import FAULTS
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError, DataError, near, raised_as
from imaginaire.findings import CheckContext, Finding, errors, refusals

# Where each split's episodes begin in the endless series of a seed: far enough apart that none is in both.
SPLITS = {"train": 0, "val": 2**40}
_ROWS = ("states", "actions", "rewards", "success", "ever", "captions", "tasks", "drivers", "skill")
_SAME = ("size", "setting", "seed")  # in all files of a folder


class EpisodeVideos(ClipDataset):
    """Each item is a random window of ``num_frames`` frames of one episode, drawn when it is asked for.

    The window's start comes from NumPy's global generator, which the loader seeds per sample; ``start`` fixes it. Items
    have the keys of a folder of videos, and ``action`` [num_frames - 1, action_dim]: row k leads from frame k to frame
    k + 1. Without ``captions`` the text is zeros, as action-conditioned models have it: a caption would reveal how
    the episode ends. ``hide_actions`` replaces actions by zeros, to see what a model predicts without them. ``views``:
    so many cameras around the table, each a quarter turn further, below each other (`data.views`); the first has the
    text. Two of a covered table are the camera above and that at the wrist.
    """

    source: "EpisodeSource"
    fps: float
    action_transform: ActionTransform

    def __init__(
        self,
        episodes: Episodes,
        name: str,
        *,
        num_frames: int,
        num_tokens: int,
        width: int,
        fps: float,
        start: int | None = None,
        captions: bool = True,
        hide_actions: bool = False,
        views: int = 1,
    ) -> None:
        last = episodes.states.shape[1] - num_frames
        if last < 0 or not 0 <= (start or 0) <= last:
            raise ConfigError(
                f"Frames {start or 0} to {(start or 0) + num_frames - 1} of episodes with {last + num_frames} frames: "
                "lower num_frames or start, or raise num_steps."
            )
        self.episodes = episodes
        self._hides_actions = hide_actions
        text = _embeddings(BytesEncoder(num_tokens, width), episodes.captions, views) if captions else {}
        super().__init__(
            EpisodeSource(episodes, name, start or 0, text, views),
            num_frames,
            None,
            sampling="random" if start is None else "first",
            fps=fps,
            num_tokens=views * num_tokens,
            text_width=width,
        )
        self.action_transform = controller(episodes.actions.shape[-1], scale=1.0)  # they lie in [-1, 1] already

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        options = with_defaults(cls, arguments)
        has_text = options.get("captions", True)
        return DataFacts(
            kind="the toy world",
            has_actions=True,
            transform=known(lambda: controller(cls._action_dim(options), scale=1.0)),
            encoder=known(lambda: BytesEncoder(options["num_tokens"], options["width"]).name) if has_text else NO_TEXT,
            read_rate=lambda: float(options["fps"]),
        )

    @classmethod
    def _action_dim(cls, options: Mapping[str, Any]) -> int:
        return int(options["action_dim"])

    def _actions(self, i: int, frames: NDArray[numpy.int64], transform: ActionTransform) -> Tensor:
        first = self.source.first + int(frames[0])
        action = torch.from_numpy(self.episodes.actions[i, first : first + len(frames) - 1].copy())
        return torch.zeros_like(action) if self._hides_actions else action


@dataclass(frozen=True)
class EpisodeSource(Source):
    """Episodes of the toy world from frame ``first`` on; ``embedded`` has the embedding of each caption, if any."""

    episodes: Episodes
    name: str
    first: int
    embedded: Mapping[str, tuple[Tensor, Tensor]]
    views: int = 1

    def __len__(self) -> int:
        return len(self.episodes)

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        def read(frames: Sequence[int], fit: Fit | None) -> Tensor:
            films = self.episodes.cameras(i, self.first + frames[0], self.first + frames[-1] + 1).values()
            videos = [torch.from_numpy(numpy.ascontiguousarray(film.transpose(3, 0, 1, 2))) for film in films]
            if len(videos) != self.views:
                videos = [videos[0].rot90(k, (-2, -1)) for k in range(self.views)]
            return stacked(videos)

        return nullcontext(FramesOf(self.episodes.states.shape[1] - self.first, 1.0, read))

    def text(self, i: int, frame: int) -> Text:
        caption = self.episodes.captions[i]
        return Text(caption, self.embedded.get(caption))

    def names(self, i: int, camera: int) -> dict[str, str]:
        return {"video_path": f"{self.name}/{i:06d}.mp4"}


class ToyWorldVideos(EpisodeVideos):
    """``num_episodes`` simulated episodes. Only compact states are kept, so a large data set costs little memory."""

    def __init__(
        self,
        num_episodes: int = 2048,
        num_frames: int = 13,
        size: int = 48,
        mix: str = "expert",
        seed: int = 0,
        num_tokens: int = 64,
        width: int = 64,
        fps: float = 10.0,
        split: str = "train",
        tasks: Sequence[str] = ("push_puck",),
        setting: str = "default",
        action_dim: int = 4,
        num_steps: int | None = None,
        start: int | None = None,
        ring_elsewhere: float | None = None,
        captions: bool = True,
        hide_actions: bool = False,
        views: int = 1,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"The toy world has no split '{split}'.{near(split, SPLITS)}")
        counts = dict(num_episodes=num_episodes, num_frames=num_frames, num_steps=num_steps, seed=seed)
        for problem in count_problems(counts | dict(views=views)):
            raise ConfigError(f"{problem}.")
        try:
            episodes = make_episodes(
                num_episodes,
                seed,
                mix=mix,
                length=num_steps,
                size=size,
                setting=setting,
                tasks=tuple(tasks),
                action_dim=action_dim,
                ring_elsewhere=ring_elsewhere,
                first=SPLITS[split],
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        name = f"toy_world/{setting}/{mix}/seed{seed}/{split}"
        super().__init__(
            episodes,
            name,
            num_frames=num_frames,
            num_tokens=num_tokens,
            width=width,
            fps=fps,
            start=start,
            captions=captions,
            hide_actions=hide_actions,
            views=views,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments, before any episode is made."""
        return errors(context.key, count_problems(arguments))


class ToyWorldStates(EpisodeVideos):
    """Episodes from a folder with the states of the toy world (``OUT/train`` of the form "states")."""

    def __init__(
        self,
        folder: str,
        num_frames: int = 13,
        num_tokens: int = 64,
        width: int = 64,
        fps: float | None = None,
        start: int | None = None,
    ) -> None:
        if num_frames < 1:
            raise ConfigError(f"num_frames={num_frames}; a video has one frame at least.")
        episodes, recorded_fps = read_states(Path(folder))
        super().__init__(
            episodes,
            folder,
            num_frames=num_frames,
            num_tokens=num_tokens,
            width=width,
            fps=recorded_fps if fps is None else fps,
            start=start,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments; the files are not read."""
        return refusals(context.key, lambda: _state_files(Path(arguments.get("folder", ""))))

    @classmethod
    def _action_dim(cls, options: Mapping[str, Any]) -> int:
        return int(_read(_state_files(Path(options["folder"]))[0])[0]["actions"].shape[2])


def count_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """A problem for each number of `ToyWorldVideos` that is too small."""
    for name, least in (("num_episodes", 1), ("num_frames", 1), ("num_steps", 1), ("seed", 0), ("views", 1)):
        if isinstance(value := arguments.get(name), int) and value < least:
            yield f"{name}={value}; at least {least} is needed"


def _embeddings(encoder: BytesEncoder, captions: Sequence[str], views: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Embedding and mask of each distinct caption: the text of the first view, and zeros for the others."""
    distinct = sorted(set(captions))
    embeddings = encoder.encode(distinct)
    embeddings = torch.nn.functional.pad(embeddings, (0, 0, 0, (views - 1) * embeddings.shape[1]))
    masks = (embeddings != 0).any(dim=-1).long()
    return {caption: (embeddings[i], masks[i]) for i, caption in enumerate(distinct)}


# ---- episodes on disk ------------------------------------------------------------------------------------------------


def path_of(folder: Path, first: int) -> Path:
    """The file whose first episode has this number."""
    return folder / f"states-{first:06d}.npz"


def write_states(path: Path, episodes: Episodes, rows: slice, fps: float) -> None:
    """Write some of the episodes, complete or not at all."""
    arrays: dict[str, Any] = {name: numpy.asarray(getattr(episodes, name)[rows]) for name in _ROWS}
    about = {name: getattr(episodes, name) for name in _SAME}
    about |= {"first": episodes.first + (rows.start or 0), "fps": fps}
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomically(
        path, lambda file: numpy.savez_compressed(file, about=numpy.asarray(json.dumps(about)), **arrays)
    )


def _state_files(folder: Path) -> list[Path]:
    """The files of states in order, one at least."""
    paths = sorted(folder.glob(TOY_STATES)) if folder.is_dir() else []
    if not paths:
        raise DataError(
            f"{folder} holds no {TOY_STATES}; python -m scripts.make_toy_world --form states writes them to OUT/train."
        )
    return paths


def read_states(folder: Path) -> tuple[Episodes, float]:
    """All episodes of a folder in order, and their frames per second."""
    paths = _state_files(folder)
    parts = [_read(path) for path in paths]
    first = parts[0][1]
    for path, (_, about) in zip(paths, parts):
        for name in (*_SAME, "fps"):
            if about[name] != first[name]:
                raise DataError(
                    f"{path} has the {name} {about[name]}, but {paths[0]} {first[name]}: they are of two worlds."
                )
    if len({part["states"].shape[1] for part, _ in parts}) > 1:
        raise DataError(f"{folder} holds episodes of different lengths.")
    joined: dict[str, Any] = {name: numpy.concatenate([part[name] for part, _ in parts]) for name in _ROWS}
    for name in ("captions", "tasks", "drivers"):
        joined[name] = joined[name].tolist()
    return Episodes(**joined, **{name: first[name] for name in (*_SAME, "first")}), float(first["fps"])


def _read(path: Path) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
    with raised_as(DataError, f"{path} is not a file of the toy world's states, or is damaged", *FAULTS, TypeError):
        with numpy.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in _ROWS}
            about = foreign_json.loads(str(content["about"]))
            about = {name: about[name] for name in (*_SAME, "first", "fps")}
    if bad := [name for name, array in arrays.items() if array.dtype.kind == "f" and not numpy.isfinite(array).all()]:
        raise DataError(f"{path}: {bad[0]} hold NaN or infinite numbers. Write the data set again.")
    states, actions = arrays["states"], arrays["actions"]
    count = {len(array) for array in arrays.values()}
    if len(count) > 1 or states.ndim != 3 or states.shape[2] != STATE_SIZE or actions.shape[1] != states.shape[1] - 1:
        raise DataError(f"{path} has states {list(states.shape)} and actions {list(actions.shape)}, which do not fit.")
    return arrays, about
