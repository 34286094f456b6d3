# SPDX-License-Identifier: Apache-2.0
"""Starts cut out of recordings: the first picture of an episode, and keyframes, moments shortly before contact.

From a keyframe a world model need not imagine the whole way to where it matters. It is taken where the gripper is about
to open or close, or at a fraction of the episode.
"""

import logging
from collections.abc import Iterable, Iterator

import numpy
from numpy.typing import NDArray

from cosmos_predict2.data.action_conditioned.recorded_episodes import RecordedEpisode
from cosmos_predict2.rl.envs.published_starts import KEYFRAME_MARK, NUM_LAST
from cosmos_predict2.rl.envs.starts import RecordedStart
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

Keyframes = float | str | None  # a fraction of the episode, GRIPPER, or none
GRIPPER = "gripper"
BEFORE = 4  # frames between a keyframe and the moment that it is taken for


def starts_of(
    episodes: Iterable[RecordedEpisode], keyframes: Keyframes = None, before: int = BEFORE
) -> Iterator[RecordedStart]:
    """The first picture of each episode, and with ``keyframes`` a start ``before`` frames ahead of each moment."""
    found, early = 0, 0
    for episode in episodes:
        yield _start(episode, [0])
        for number, moment in enumerate(moments_of(episode, keyframes)):
            if (frame := moment - before) < NUM_LAST:
                early += 1
                continue
            found += 1
            yield _start(episode, [0, *range(frame - NUM_LAST + 1, frame + 1)], f"_{number}{KEYFRAME_MARK}")
    if keyframes is not None and not found:
        raise DataError(
            f"No episode has a keyframe (--keyframes {keyframes})."
            + (f" {early} moments lie within {NUM_LAST + before} frames of the start (--before)." if early else "")
            + (" The gripper never opens or closes: give a fraction, such as 0.5." if keyframes == GRIPPER else "")
        )
    if early:
        log.warning("%d keyframes lie within %d frames of a start and are left out", early, NUM_LAST + before)


def moments_of(episode: RecordedEpisode, keyframes: Keyframes) -> list[int]:
    """The frames that keyframes of an episode are taken for."""
    if keyframes is None:
        return []
    if keyframes == GRIPPER:
        return gripper_changes(episode.gripper()[: episode.num_frames])
    return [round(float(keyframes) * (episode.num_frames - 1))]


def gripper_changes(gripper: NDArray[numpy.float64]) -> list[int]:
    """The frames at which a gripper's number crosses the middle of its range; none where it hardly moves."""
    low, high = float(gripper.min()), float(gripper.max())
    if high - low < 1e-3 * max(1.0, abs(low), abs(high)):
        return []
    is_high = gripper > (low + high) / 2
    return (numpy.flatnonzero(is_high[1:] != is_high[:-1]) + 1).tolist()


def _start(episode: RecordedEpisode, frames: list[int], suffix: str = "") -> RecordedStart:
    """The start that ends at the last of these frames."""
    if episode.num_frames < 1:
        raise DataError(f"{episode.path} has no picture.")
    if not episode.task:
        raise DataError(f"{episode.path} names no task: its sentence is what a policy is asked for.")
    actions = episode.actions()[[k - 1 for k in frames[1:]]]  # each leads to one of these pictures
    if not numpy.isfinite(actions).all():
        raise DataError(f"{episode.path} has actions that are not finite before frame {frames[-1]}.")
    return RecordedStart(
        f"{episode.name}{suffix}",
        episode.task,
        episode.pictures(frames),
        actions.astype(numpy.float32),
        {name: value.astype(numpy.float32) for name, value in episode.known(frames[-1]).items()},
    )
