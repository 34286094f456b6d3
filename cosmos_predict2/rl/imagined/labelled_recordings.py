# SPDX-License-Identifier: Apache-2.0
"""Pictures of recordings with success known: what a success classifier learns from, and is measured on.

True ones, the same as the world model's tokenizer leaves them, and the recordings' own actions imagined. The last are
labelled by what truly happened, so that the classifier learns how a success looks that is imagined, and how a failure
does that the world model makes look like one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.info import held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import split_of, success_of_frames
from cosmos_predict2.data.video.clips import Fit
from cosmos_predict2.rl.envs.replays import BATCH, held, recorded_actions, replayed, round_trip, whole_chunks
from cosmos_predict2.rl.rewards.success_training import OUTCOME, ROUND_TRIP, TRUE, LabelledPictures
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import DataError
from imaginaire.log import Progress
from imaginaire.random import derive_seed

LEAST_HELD_OUT = 2  # episodes: one half calibrates, the other measures
MEMORY = 4 * 2**30  # bytes of pictures that are kept of a part
FAR = 0.1  # progress at the start of a recording that succeeds after as long as usual

# Pictures of each episode by their kind: TRUE, and with a world model ROUND_TRIP and OUTCOME.
Kinds = Mapping[str, list[LabelledPictures]]


def parts_of(
    source: LeRobotSource, split_file: str, val_fraction: float
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Numbers of the episodes to learn from, to calibrate with and to measure: of a split file, but for unknown
    outcomes; without one a share is held out as the readers of the data do, by turns."""
    if split_file:
        split = split_of(split_file, source)
        return [i for i in split.train if split.outcomes[i] is not None], split.calibrate, split.test
    is_held_out = held_out(len(source), val_fraction)
    others = numpy.flatnonzero(is_held_out).tolist()
    if len(others) < LEAST_HELD_OUT:
        found = f"{source.info.root}: {len(others)} of {len(source)} episodes are held out"
        cure = "give more episodes, a larger --val_fraction, or --split"
        raise DataError(f"{found}, but {LEAST_HELD_OUT} are needed, to calibrate and to measure: {cure}.")
    return numpy.flatnonzero(~is_held_out).tolist(), others[::2], others[1::2]


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
        self.source, self.column, self.near_misses, self.fit = source, column, near_misses, fit
        self.camera = source.camera(camera)
        firsts = [int(found[0]) for i in train if len(found := self.success(i).nonzero()[:, 0])]
        self.discount = FAR ** (1 / max(1.0, median(firsts))) if firsts else FAR

    def success(self, i: int) -> Tensor:
        """bool [F] of an episode."""
        success, unknown = success_of_frames(self.source, i, self.column)
        if unknown.any():
            raise DataError(f"{self.source.info.root}: {self.source.name(i)} has frames without '{self.column}'.")
        return torch.from_numpy(success)

    def episode(self, i: int) -> LabelledPictures:
        success = self.success(i)
        soon, progress = torch.zeros_like(success), success.float()
        for step in range(1, self.near_misses + 1):
            soon[:-step] |= success[step:]
        for k in range(len(success) - 2, -1, -1):
            progress[k] = max(float(progress[k]), self.discount * float(progress[k + 1]))
        pictures_C_F_H_W = self.source.frames(i, self.camera, range(len(success)), fit=self.fit)
        pictures_F_H_W_C = pictures_C_F_H_W.permute(1, 2, 3, 0).contiguous()
        return LabelledPictures(pictures_F_H_W_C, success, soon & ~success, progress)

    def labelled(self, episodes: Sequence[int], imagination: Imagination | None = None, seed: int = 0) -> Kinds:
        """The pictures of these episodes, one entry for each; those behind a world model begin with the second one.

        Of recordings too large for `MEMORY` every so many pictures are kept, counted from an episode's last one.
        """
        kinds: dict[str, dict[int, LabelledPictures]] = {}
        lengths = self.source.episodes.lengths[list(episodes)]
        chunk = 1 if imagination is None else imagination.config.chunk_size
        size = self.source.frames(episodes[0], self.camera, [0], fit=self.fit).nbytes
        every = -(-size * int(lengths.sum()) * (1 if imagination is None else 3) // MEMORY)

        def together(count: int) -> int:  # whole episodes, shown in several ways
            return min(BATCH, max(1, MEMORY // (8 * size * (1 + count))))

        with Progress("recordings", len(episodes), unit="episode", leave=False) as progress:
            for count, chosen in whole_chunks((lengths - 1).tolist(), chunk, together):
                true = [self.episode(episodes[k]) for k in chosen]
                shown = {TRUE: true}
                if imagination is not None:
                    shown |= self._imagined(imagination, true, [episodes[k] for k in chosen], count, seed)
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
        frames = [one.pictures_N_H_W_C for one in true]  # the last one again behind the others
        pictures = torch.stack(
            [torch.cat([one, one[-1:].expand(1 + num_actions - len(one), -1, -1, -1)]) for one in frames]
        )
        actions = torch.stack([held(recorded_actions(self.source, i), num_actions) for i in numbers])
        seeds = [derive_seed(seed, i, "recorded actions") % 2**31 for i in numbers]
        imagined = replayed(imagination, pictures[:, 0], actions, seeds=seeds)[:, 1:]
        rest = [one.rows(slice(1, None)) for one in true]
        return {
            kind: [replace(one, pictures_N_H_W_C=of[: len(one)].clone()) for one, of in zip(rest, video, strict=True)]
            for kind, video in ((ROUND_TRIP, round_trip(imagination, pictures)), (OUTCOME, imagined))
        }
