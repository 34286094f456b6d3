# SPDX-License-Identifier: Apache-2.0
"""Imagined episodes of the toy world beside the simulator's: their ends.

Episodes are held out: they belong to a split of the series that training never draws from. The success of a whole
episode, imagined from its first picture and its actions, is judged from pixels alone: a detector of colours decides
whether the object lies in the ring. It is part of the toy world and learns nothing; the ring is looked for on the first
picture, which is the given one as the tokenizer leaves it, and the object on the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.toy_world.episodes import Episodes, Mix, make_episodes
from cosmos_predict2.toy_world.physics import GRIPPER, OBJECTS, STILL, Floats, find_setting, find_tasks, object_position
from cosmos_predict2.toy_world.rendering import Detection, Picture, detect, render
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.world_model import SamplingOptions

BATCH = 50  # divides the usual numbers of episodes: some kernels are made anew for each batch size
# Who shall be driven by a model that a policy learns in: weak, shaky, and often wrong about where to.
WEAK_DRIVER = Mix({"noisy": 1.0}, {"noisy": (0.1, 0.6)}, ring_elsewhere=0.0)
# Whole episodes of the validation split, every ring where the driver saw it.
held_out_episodes = partial(make_episodes, first=SPLITS["val"], ring_elsewhere=0.0)
_COLUMNS = ("base", "imagined", "agreement", "TPR", "FPR", "moved", "median", "still", "gripper", "lost", "episodes")
HEADER = " ".join(f"{name:>9}" for name in _COLUMNS)


def pictures(states: Floats, size: int) -> Tensor:
    """uint8 [B, 3, F, H, W] of states [B, F, 10]."""
    return torch.from_numpy(numpy.ascontiguousarray(render(states, size).transpose(0, 4, 1, 2, 3)))


def imagined(imagination: Imagination, first_B_C_1_H_W: Tensor, action_B_A_D: Tensor, num_steps: int = 1) -> Tensor:
    """Videos of the world's actions imagined from all first frames, some at a time: uint8 [B, 3, 1 + A, H, W]. A chunk
    hands its last frames to the next one as decoded floats."""
    videos = []
    for first, actions in zip(first_B_C_1_H_W.split(BATCH), action_B_A_D.split(BATCH), strict=True):
        options, seeds = SamplingOptions(num_steps=num_steps), range(len(actions))
        commanded = imagination.transformed(actions.numpy())
        videos.append(imagination.rollout(first, commanded, seeds, options, float_hand_over=True).cpu())
    return torch.cat(videos)


@dataclass(frozen=True)
class EndsAgreement:
    """Imagined ends of episodes against true ones. Distances are pixels."""

    num_episodes: int
    base_rate: float  # of true success
    imagined_rate: float
    agreement: float
    true_positive_rate: float
    false_positive_rate: float
    moved_mean: float  # how far the object is from its true place, where it truly moved
    moved_median: float
    still_mean: float  # and where it did not
    gripper_mean: float
    lost: float  # share of last pictures on which the object is not seen; its place counts as the first

    def as_row(self) -> str:
        """The figures after the name of a row of `HEADER`."""
        rates = (self.base_rate, self.imagined_rate, self.agreement, self.true_positive_rate, self.false_positive_rate)
        pixels = (self.moved_mean, self.moved_median, self.still_mean, self.gripper_mean)
        return " ".join([*(f"{rate:>9.3f}" for rate in rates), *(f"{error:>9.2f}" for error in pixels)]) + (
            f" {self.lost:>9.3f} {self.num_episodes:>9d}"
        )


def seen_success(first: Picture, last: Picture, tasks: Sequence[str], setting: str) -> NDArray[numpy.bool_]:
    """[N], true where the task looks done by the first and the last picture, uint8 [N, H, W, 3]."""
    todo = find_tasks(tasks)
    if touching := sorted({name for name, task in zip(tasks, todo, strict=True) if task.verb == "touch"}):
        raise ValueError(f"No picture shows whether a task of touching is done: {', '.join(touching)}.")
    constants, _ = find_setting(setting, None)
    begin, end = detect(first), detect(last)
    place = _chosen(end, [task.target for task in todo])
    away = numpy.hypot(*(place - begin.position["ring"]).T)
    is_open = numpy.array([task.verb != "carry" for task in todo]) | ~end.is_closed
    done: NDArray[numpy.bool_] = numpy.nan_to_num(away, nan=numpy.inf) < constants.success_distance
    return done & is_open


def agreement(episodes: Episodes, video_B_C_F_H_W: Tensor) -> EndsAgreement:
    """The ends of imagined videos of whole episodes, uint8, beside the simulator's."""
    frames = video_B_C_F_H_W[:, :, [0, -1]].permute(2, 0, 3, 4, 1).contiguous().numpy()
    done = seen_success(frames[0], frames[1], episodes.tasks, episodes.setting)
    truth: NDArray[numpy.bool_] = episodes.success
    target = [task.target for task in find_tasks(episodes.tasks)]
    where = numpy.stack([episodes.states[:, :, object_position(k)] for k in range(len(OBJECTS))])
    true_place = where[target, numpy.arange(len(episodes))]
    found = detect(frames[1])
    place = _chosen(found, target)
    is_lost: NDArray[numpy.bool_] = numpy.asarray(numpy.isnan(place).any(axis=1))
    place = numpy.where(is_lost[:, None], true_place[:, 0], place)
    error = numpy.hypot(*(place - true_place[:, -1]).T)
    moved: NDArray[numpy.bool_] = numpy.hypot(*(true_place[:, -1] - true_place[:, 0]).T) > STILL
    gripper = numpy.hypot(*(found.position["gripper"] - episodes.states[:, -1, GRIPPER]).T)
    return EndsAgreement(
        num_episodes=len(episodes),
        base_rate=mean_or_nan(truth),
        imagined_rate=mean_or_nan(done),
        agreement=1 - mean_or_nan(done ^ truth),
        true_positive_rate=mean_or_nan(done[truth]),
        false_positive_rate=mean_or_nan(done[~truth]),
        moved_mean=mean_or_nan(error[moved]),
        moved_median=float(numpy.median(error[moved])) if moved.any() else float("nan"),
        still_mean=mean_or_nan(error[~moved]),
        gripper_mean=mean_or_nan(gripper[~numpy.isnan(gripper)]),
        lost=mean_or_nan(is_lost),
    )


def _chosen(found: Detection, target: Sequence[int]) -> Floats:
    """[N, 2], the place of each picture's object."""
    both = numpy.stack([found.position[name] for name in OBJECTS])
    return both[list(target), numpy.arange(len(target))]


def mean_or_nan(values: NDArray[numpy.bool_] | Floats) -> float:
    return float(values.mean()) if values.size else float("nan")
