# SPDX-License-Identifier: Apache-2.0
"""Training samples with actions, the same for every source of robot data: which there are, and what one holds."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.data.samples import BadSamples, evenly, frame_item, place_of, text_item
from cosmos_predict2.data.sizes import size_problem
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, find_embedding_dir
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

Item = TypeVar("Item")

# Label of the frame rate in every sample with actions: published action-conditioned weights were trained with no other,
# whatever rate the robot was recorded at.
ACTION_FPS = 4.0

TRANSFORM_KEY = "action_transform"  # of a sample: the ActionTransform of its actions, as JSON


def no_text(num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """The embedding float32 [num_tokens, width] of "no text" and its mask int64 [num_tokens]."""
    return torch.zeros(num_tokens, width), torch.ones(num_tokens, dtype=torch.int64)


class ActionDataset(Dataset[dict[str, Any]]):
    """Data sets of recordings: a subclass sets ``windows`` and ``action_transform``, and reads an item."""

    windows: "Windows"
    action_transform: ActionTransform

    def __init__(
        self,
        *,
        video_size: Sequence[int],
        fps: float,
        num_tokens: int,
        text_width: int,
        skip_bad_samples: bool,
        most_bad_samples: int,
        embeddings: EmbeddingFolder | None = None,
    ) -> None:
        self.video_size = (int(video_size[0]), int(video_size[1]))
        self.fps = float(fps)
        self._num_tokens, self._text_width = num_tokens, text_width
        self._embeddings = embeddings
        self._bad = BadSamples(skip_bad_samples, most_bad_samples)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.windows.read(index, self._bad, self._item)

    def _item(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _sample(
        self,
        video: Tensor,
        actions: NDArray[Any],
        *,
        key: str,
        annotation: str,
        caption: str,
        video_path: str,
        embedding: tuple[Tensor, Tensor] | None = None,
        embedding_path: str = "",
    ) -> dict[str, Any]:
        """The sample of a clip uint8 [3, F, H, W] and its scaled actions [F - 1, d].

        ``embedding`` is the text's [num_tokens, text_width] with its mask; without one the text is zeros that are all
        seen (mask of ones), which is what action-conditioned weights are trained and run with.
        """
        _, num_frames, height, width = video.shape
        action = torch.as_tensor(actions, dtype=torch.float32)
        assert video.dtype == torch.uint8, f"pixels are bytes; those of {video_path} are {video.dtype}"
        assert action.ndim == 2 and len(action) == num_frames - 1, f"{key}: {list(action.shape)} of {num_frames} frames"
        text, mask = no_text(self._num_tokens, self._text_width) if embedding is None else embedding
        return {
            "video": video,
            "action": action,
            TRANSFORM_KEY: self.action_transform.to_json(),
            **text_item(text, mask),
            "fps": self.fps,
            "num_frames": num_frames,
            **frame_item((height, width)),
            "ai_caption": caption,
            "annotation_file": annotation,
            "__key__": key,
            "video_name": {"video_path": video_path, "t5_embedding_path": embedding_path},
        }

    def _text_of(self, stem: str) -> dict[str, Any]:
        """The arguments of a sample for the text of this embedding; without embeddings none."""
        if self._embeddings is None:
            return {}
        path = self._embeddings.find(stem)
        return {"embedding": self._embeddings.read(stem, self._num_tokens), "embedding_path": str(path or "")}


def task_embeddings(root: str, command: str) -> EmbeddingFolder:
    """The embeddings of a data set's tasks."""
    folder = find_embedding_dir(root)
    if folder is None:
        raise DataError(f"{root} has no t5_xxl/ with embeddings of the tasks. Write it: {command}")
    return EmbeddingFolder(folder)


def camera_of(index: int, count: int, is_drawn: bool) -> int:
    """Which of ``count`` cameras an item shows: drawn from NumPy's global generator, or in turns."""
    return int(numpy.random.randint(count)) if is_drawn and count > 1 else index % count


class Windows:
    """Every window of ``num_frames`` frames, ``stride`` apart, of recordings with these lengths; one at least.

    ``what`` names the recordings in the error for the case that all are too short.
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
        self._firsts = numpy.unique(self.rows[:, 0], return_index=True)[1]  # of each recording that has windows
        if short := len(lengths) - len(self._firsts):
            log.info("%s: %d of %d recordings are too short for a window", what, short, len(lengths))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, NDArray[numpy.int64]]:
        """The recording of a window, and its frames."""
        recording, start = (int(number) for number in self.rows[index])
        return recording, start + self._frames

    @property
    def num_recordings(self) -> int:
        """How many recordings have windows."""
        return len(self._firsts)

    @property
    def num_apart(self) -> int:
        """How many windows there are that do not overlap."""
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
        of_each = zip(self._firsts.tolist(), counts.tolist(), shares.tolist())
        return [first + place for first, count, share in of_each for place in evenly(count, share)]

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


def shape_problems(num_frames: Any, video_size: Any) -> Iterator[str]:
    """What is wrong with the wished shape of a clip with actions."""
    if not isinstance(num_frames, int) or num_frames < 2:
        yield f"num_frames={num_frames}; a clip with actions has 2 frames at least"
    if problem := size_problem("video_size", video_size):
        yield problem
