# SPDX-License-Identifier: Apache-2.0
"""Windows of recordings, one at a time: a picture, and the chunk of actions that followed it.

Actions are read at once; a picture is read when its window is asked for, and kept while there is room.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.rl.policies.cloning import CloneWindows, recorded_demonstrations
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TRAIN = "train"
_MIB = 2**20


class RecordedWindows(Dataset[dict[str, Any]]):
    """Windows of ``chunk`` actions of a part of the recordings in a folder; ``camera`` may name several views.

    With ``split_file`` they are of the part's successes alone. Without, they are of every recording, but for a share
    that is held out. ``num`` are the first so many of these. ``starts`` are the
    steps at which windows begin; null: every step. ``most`` windows are taken, evenly. ``cache_mib`` bounds the
    pictures that each reader keeps. With ``state`` the policy reads the robot's state, too. ``embodiment`` and
    ``units`` are of a robot that is known by name, as of `LeRobotActionDataset`.
    """

    def __init__(
        self,
        path: str,
        split_file: str = "",
        part: str = TRAIN,
        chunk: int = 12,
        starts: Sequence[int] | None = None,
        num: int | None = None,
        most: int | None = None,
        camera: str | None = None,
        action_keys: Sequence[str] | None = None,
        held_out_share: float = 0.1,
        cache_mib: float = 1024,
        state: bool = False,
        embodiment: str | None = None,
        units: str | None = None,
    ) -> None:
        if not path:
            raise ConfigError(
                "There are no recordings to clone: give their folder, dataloader_train.dataset.path=DIR, and their"
                " split, dataloader_train.dataset.split_file=FILE (python -m scripts.split_recordings DIR --out FILE)."
            )
        if chunk < 1 or not 0 <= held_out_share < 1 or cache_mib < 0 or min(num or 1, most or 1) < 1:
            raise ConfigError(
                f"RecordedWindows(chunk={chunk}, num={num}, most={most}, held_out_share={held_out_share},"
                f" cache_mib={cache_mib}): at least 1, 1, 1, from 0 to below 1, and 0."
            )
        self.part, self.chunk = part, chunk

        self.demonstrations = recorded_demonstrations(
            Path(path), num, camera, action_keys, split_file, part, held_out_share, state, embodiment, units
        )
        self.places = self.demonstrations.places(chunk, starts)
        if most is not None and most < len(self.places):
            self.places = [self.places[k * len(self.places) // most] for k in range(most)]
        self._steps: dict[int, list[int]] = {}  # of each episode
        for i, start in self.places:
            self._steps.setdefault(i, []).append(start)
        self._kept: dict[int, dict[int, Tensor]] = {}  # pictures of an episode, by step
        self._room = int(cache_mib * _MIB)
        i, start = self.places[0]
        self._shape = self.demonstrations.picture(i, [start]).shape[1:]
        log.info("%s: %d windows of %d recordings (%s)", path, len(self.places), len(self._steps), part)

    @classmethod
    def facts(cls, arguments: Any) -> DataFacts:
        return DataFacts(kind="windows of recordings")

    @property
    def windows(self) -> CloneWindows:
        """All of them, without pictures."""
        height, width = self._shape[0] // len(self.demonstrations.views), self._shape[1]
        found = self.demonstrations.without_pictures(self.chunk, self.places)
        return replace(found, recorded_size=(height, width))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        i, start = self.places[index]
        actions = torch.from_numpy(self.demonstrations.actions[i][start : start + self.chunk])
        picture, task = self._picture(i, start), self.demonstrations.tasks[i]
        states = self.demonstrations.states
        known = {} if states is None else {"state": torch.from_numpy(states[i][start])}
        return {"full_image": picture, "actions": actions, "task": task, "episode": i, **known}

    def _picture(self, i: int, start: int) -> Tensor:
        """uint8 [H, W, 3]. What all windows of an episode show is read together where there is room to keep it."""
        if i in self._kept:
            return self._kept[i][start]
        size = len(self._steps[i]) * self._shape.numel()
        is_kept = size <= self._room
        steps = self._steps[i] if is_kept else [start]
        pictures = self.demonstrations.picture(i, steps)
        if pictures.shape[1:] != self._shape:
            sizes = sorted({tuple(self._shape[:2]), tuple(pictures.shape[1:3])})
            raise DataError(
                f"{self.demonstrations.source}: pictures of different sizes, {sizes}: clone recordings of one size."
            )
        if is_kept:
            self._room -= size
            self._kept[i] = dict(zip(steps, pictures, strict=True))
        return pictures[steps.index(start)]
