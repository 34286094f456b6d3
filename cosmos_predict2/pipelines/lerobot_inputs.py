# SPDX-License-Identifier: Apache-2.0
"""Rollouts of episodes of a LeRobot data set: first frames and actions as training reads them, and the true frames."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.card import mappings
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.info import VAL_FRACTION, choose_episodes
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.video.clips import stretch
from cosmos_predict2.pipelines.action_inputs import Episode, chosen_frames, require_sixteenths
from cosmos_predict2.pipelines.evaluation_data import own_arguments, warn_of_other_range
from cosmos_predict2.pipelines.flags import Reading
from imaginaire.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeRobotRecordings:
    """An open data set: which camera is shown, and which columns are the action."""

    data: LeRobotActionDataset

    @classmethod
    def open(
        cls, root: str, transform: ActionTransform, trained: Mapping[str, Any] | None = None, **given: Any
    ) -> "LeRobotRecordings":
        """The data set of a folder, read like ``trained``, that of the model's run; what is ``given`` goes first."""
        if transform.kind != "controller":
            raise DataError(f"{root} has commands of a controller, but this model was trained with {transform}.")
        own = {**own_arguments(LeRobotActionDataset, trained or {}, {}), **given}
        if "action_keys" in given:
            own.pop("embodiment", None)
        if "stride" in given:
            own.pop("frame_rate", None)
        source = LeRobotSource.open(root)
        parts = source.action_parts(own.get("action_keys"), own.get("embodiment"))
        if (width := source.width(parts)) != transform.dim:
            raise DataError(
                f"{root}: an action has {width} numbers, but this model was trained with {transform.dim}: --action_key."
            )
        own |= dict(num_frames=2, start_interval=1, skip_bad_samples=True)  # a broken episode raises its own error
        data = LeRobotActionDataset(root, data_split="full", action_transform=transform, **own)
        warn_of_other_range(root, data, transform)
        return cls(data)

    def chosen(self, numbers: Sequence[int], trained: Mapping[str, Any] | None = None) -> list[int]:
        """These episodes, by the numbers that the files have; without numbers those that training holds out."""
        source = self.data.source.files
        known = source.episodes.numbers.tolist()
        if wrong := [number for number in numbers if number not in known]:
            raise DataError(f"--episodes {wrong[0]}: {source.info.root} has those from {min(known)} to {max(known)}.")
        if numbers:
            return list(numbers)
        share = (trained or {}).get("val_fraction", VAL_FRACTION)
        held_out = choose_episodes(source.info.splits, len(known), "val", share).tolist()
        if not held_out:
            log.warning("%s: no episode is held out of training; all %d are imagined", source.info.root, len(known))
            return known
        log.info("%s: %d of %d episodes, which training holds out", source.info.root, len(held_out), len(known))
        return [known[place] for place in held_out]

    def read(self, number: int, reading: Reading) -> Episode:
        """The episode of this number, from its chosen first frame on."""
        data, own, source = self.data, self.data.source, self.data.source.files
        place = source.episodes.numbers.tolist().index(number)
        name = f"{source.info.root}: {source.name(place)}"
        if place not in data.recordings:
            missing = ", ".join(map(str, source.missing_files(own.camera, [place])))
            raise DataError(f"{name}: its files are missing: {missing}.")
        try:
            frames = chosen_frames(int(source.episodes.lengths[place]), reading, stride=data.stride)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        fit = None if reading.size is None else partial(stretch, size=reading.size)
        first = source.frames(place, own.camera, frames[: reading.num_given].tolist(), fit=fit)
        size = (first.shape[2], first.shape[3])
        require_sixteenths(name, size)
        actions = data.action_transform.apply(own.actions(place, frames))
        columns = ", ".join(repr(part.column) for part in own.parts)
        how = own.combine if isinstance(own.combine, str) else ", ".join(own.combine)
        combined = f", {how} of every {data.stride} rows" if data.stride > 1 else ""
        return Episode(
            first,
            torch.from_numpy(numpy.asarray(actions)).float(),
            f"rows of {columns}{combined}, camera '{own.camera}'",
            str(source.file_of(place, own.camera)),
            frames.tolist(),
            lambda numbers: source.frames(place, own.camera, numbers, fit=partial(stretch, size=size)),
            source.info.fps / data.stride,
        )


def dataset_of_run(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The LeRobot data set that a run was trained on, as its config.yaml has it; nothing where there was none."""
    name = f".{LeRobotActionDataset.__name__}"
    nodes = mappings(tree.get("dataloader_train"))
    return next((node for node in nodes if str(node.get("_target_")).endswith(name)), {})
