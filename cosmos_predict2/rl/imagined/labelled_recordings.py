# SPDX-License-Identifier: Apache-2.0
"""Pictures of recordings with success known: what a success classifier learns from, and is measured on.

True ones, the same as the world model's tokenizer leaves them, and the recordings' own actions imagined. The last are
labelled by what truly happened, so that the classifier learns how a success looks that is imagined, and how a failure
does that the world model makes look like one.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.info import held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import read_split
from cosmos_predict2.data.video.clips import Fit
from cosmos_predict2.rl.envs.replays import BATCH, replayed, round_trip
from cosmos_predict2.rl.rewards.success_quality import OUTCOME, ROUND_TRIP, TRUE
from cosmos_predict2.rl.rewards.success_training import LabelledPictures
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import DataError, near
from imaginaire.progress import Progress
from imaginaire.random import derive_seed

LEAST_HELD_OUT = 2  # episodes: one half calibrates, the other measures
MEMORY = 4 * 2**30  # bytes of pictures that are kept of a part
FAR = 0.1  # progress at the start of a recording that succeeds after as long as usual

# Pictures of each episode by their kind: TRUE, and with a world model ROUND_TRIP and OUTCOME.
Kinds = Mapping[str, list[LabelledPictures]]


@dataclass(frozen=True)
class Parts:
    """Numbers of the episodes to learn from, to calibrate with and to measure."""

    train: Sequence[int]
    calibrate: Sequence[int]
    test: Sequence[int]


def parts_of(source: LeRobotSource, split_file: str, val_fraction: float) -> Parts:
    """The parts of a split file, but for episodes of unknown outcome; without one a share is held out as the readers of
    the data do, by turns."""
    if split_file:
        split = read_split(split_file)
        split.require(source)
        return Parts([i for i in split.train if split.outcomes[i] is not None], split.calibrate, split.test)
    is_held_out = held_out(len(source), val_fraction)
    if is_held_out.sum() < LEAST_HELD_OUT:
        raise DataError(
            f"{source.info.root}: {int(is_held_out.sum())} of {len(source)} episodes are held out, but"
            f" {LEAST_HELD_OUT} are needed, to calibrate and to measure: give more episodes, or a larger"
            " --val_fraction."
        )
    others = numpy.flatnonzero(is_held_out).tolist()
    return Parts(numpy.flatnonzero(~is_held_out).tolist(), others[::2], others[1::2])


class LabelledRecordings:
    """The episodes of a LeRobot data set; success is a number above 0.5 in ``column``.

    Of the other frames, those at most ``near`` before a success are near misses. Progress is the discount to the power
    of the frames until the next success, and 0 of those after which none comes; ``discount`` follows from how long the
    recordings of ``train`` take, see `FAR`. ``fit`` brings pictures to the size of a world model.
    """

    def __init__(
        self,
        source: LeRobotSource,
        column: str,
        camera: str | None,
        train: Sequence[int],
        *,
        near_misses: int,
        fit: Fit | None = None,
    ) -> None:
        if column not in source.info.features:
            raise DataError(
                f"{source.info.root} has no column '{column}', which marks success.{near(column, source.info.features)}"
            )
        self.source, self.column, self.near_misses, self.fit = source, column, near_misses, fit
        self.camera = source.camera(camera)
        firsts = [int(found[0]) for i in train if len(found := self.success(i).nonzero()[:, 0])]
        self.discount = FAR ** (1 / max(1.0, median(firsts))) if firsts else FAR

    def success(self, i: int) -> Tensor:
        """bool [F] of an episode."""
        return torch.from_numpy(numpy.asarray(self.source.columns(i, [self.column])[self.column]).reshape(-1) > 0.5)

    def episode(self, i: int) -> LabelledPictures:
        success = self.success(i)
        soon, progress = torch.zeros_like(success), success.float()
        for step in range(1, self.near_misses + 1):
            soon[:-step] |= success[step:]
        for k in range(len(success) - 2, -1, -1):
            progress[k] = max(float(progress[k]), self.discount * float(progress[k + 1]))
        pictures_C_F_H_W = self.source.frames(i, self.camera, range(len(success)), fit=self.fit)
        pictures = pictures_C_F_H_W.permute(1, 2, 3, 0).contiguous()
        return LabelledPictures(pictures, success, soon & ~success, progress)

    def actions(self, i: int) -> Tensor:
        """[F - 1, D], raw."""
        rows = self.source.parts(i, self.source.action_parts(None))
        return torch.from_numpy(rows.astype(numpy.float32))[: int(self.source.episodes.lengths[i]) - 1]

    def require_actions_of(self, imagination: Imagination) -> None:
        """Raise where the actions are not those of the world model, or there are none."""
        found, wanted = self.source.width(self.source.action_parts(None)), imagination.transform.dim
        if int(self.source.episodes.lengths.min()) < 2:
            raise DataError(
                f"{self.source.info.root} has an episode of one picture: nothing can be imagined of it. Remove it."
            )
        if found != wanted:
            raise DataError(
                f"{self.source.info.root}: its actions have {found} numbers, but those of the world model have"
                f" {wanted}: it is of another robot. Give one that was trained on these recordings (--world_model)."
            )

    def labelled(self, episodes: Sequence[int], imagination: Imagination | None = None, seed: int = 0) -> Kinds:
        """The pictures of these episodes, one entry for each; those behind a world model begin with the second one.

        Of recordings too large for `MEMORY` every so many pictures are kept, counted from an episode's last one.
        """
        kinds: dict[str, dict[int, LabelledPictures]] = {}
        lengths = self.source.episodes.lengths[list(episodes)]
        chunk = 1 if imagination is None else imagination.config.chunk_size
        chunks = [-(-(int(length) - 1) // chunk) for length in lengths]
        size = self.source.frames(episodes[0], self.camera, [0], fit=self.fit).nbytes
        every = -(-size * int(lengths.sum()) * (1 if imagination is None else 3) // MEMORY)
        with Progress("recordings", len(episodes), unit="episode", leave=False) as progress:
            in_order = sorted(range(len(episodes)), key=chunks.__getitem__)
            for num, group in itertools.groupby(in_order, key=chunks.__getitem__):
                fit_in = MEMORY // (8 * size * (1 + num * chunk))  # whole episodes, shown in several ways
                for rows in torch.tensor(list(group)).split(min(BATCH, max(1, fit_in))):
                    chosen = rows.tolist()
                    true = [self.episode(episodes[k]) for k in chosen]
                    shown = {TRUE: true}
                    if imagination is not None:
                        numbers = [episodes[k] for k in chosen]
                        shown |= self._imagined(imagination, true, numbers, num * chunk, seed)
                    for kind, found in shown.items():
                        thinned = [one.thinned(every) for one in found]
                        kinds.setdefault(kind, {}).update(zip(chosen, thinned, strict=True))
                    progress.update(len(chosen))
        return {kind: [found[k] for k in sorted(found)] for kind, found in kinds.items()}

    def _imagined(
        self,
        imagination: Imagination,
        true: Sequence[LabelledPictures],
        numbers: Sequence[int],
        num_actions: int,
        seed: int,
    ) -> dict[str, list[LabelledPictures]]:
        """Episodes of as many chunks, as the tokenizer leaves them and with their actions imagined."""
        pictures = torch.stack([_lengthened(one.pictures_N_H_W_C, 1 + num_actions) for one in true])
        actions = torch.stack([_held(self.actions(i), num_actions) for i in numbers])
        seeds = [derive_seed(seed, i, "recorded actions") % 2**31 for i in numbers]
        shown = {
            ROUND_TRIP: round_trip(imagination, pictures),
            OUTCOME: replayed(imagination, pictures[:, 0], actions, seeds=seeds)[:, 1:],
        }
        rest = [one.rows(slice(1, None)) for one in true]
        return {
            kind: [one.shown_as(frames) for one, frames in zip(rest, video, strict=True)]
            for kind, video in shown.items()
        }


def _lengthened(frames_F: Tensor, count: int) -> Tensor:
    """The last one again behind the others."""
    return torch.cat([frames_F, frames_F[-1:].expand(count - len(frames_F), *frames_F.shape[1:])])


def _held(actions_L_D: Tensor, count: int) -> Tensor:
    """Behind the others actions that do not move and keep the last number, as `WorldModelEnv` fills a chunk."""
    rest = torch.zeros(count - len(actions_L_D), actions_L_D.shape[1])
    rest[:, -1] = actions_L_D[-1, -1]
    return torch.cat([actions_L_D, rest])
