# SPDX-License-Identifier: Apache-2.0
"""Actions of a recording: those of training, from where they are there, along the frames that are asked for."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from cosmos_predict2.actions.transforms import controller, pose_differences, relative_pose
from cosmos_predict2.checkpoints.card import ModelCard
from cosmos_predict2.data.video import media
from cosmos_predict2.pipelines import action_requests
from cosmos_predict2.pipelines.action_inputs import (
    ActionInput,
    raw_actions,
    read_episode,
)
from cosmos_predict2.pipelines.action_requests import ActionJob, ActionRequest, compared, imagine, prepare, read_texts
from cosmos_predict2.world_model.options import Reading, RequestText, RolloutSettings
from imaginaire.errors import ConfigError, DataError

RANDOM = numpy.random.RandomState(0)
POSES = RANDOM.randn(20, 6) * 0.1
CLOSED = RANDOM.rand(20)
FIELD = RANDOM.randn(19, 7)
ANNOTATION: dict[str, Any] = {
    "state": POSES.tolist(),
    "continuous_gripper_state": CLOSED.tolist(),
    "action": FIELD.tolist(),
}


def test_poses_are_differenced_as_in_training() -> None:
    raw, source, frames, *_ = raw_actions(ANNOTATION, Reading(relative_pose()))
    assert numpy.array_equal(raw, pose_differences(POSES, CLOSED))
    assert source == "differences of 'state', gripper of 'continuous_gripper_state'"
    assert frames.tolist() == list(range(20))


def test_a_stride_and_a_start_choose_frames_before_they_are_differenced() -> None:
    raw, _, frames, *_ = raw_actions(ANNOTATION, Reading(relative_pose(), stride=3, start=2, most_actions=4))
    assert frames.tolist() == [2, 5, 8, 11, 14]
    assert numpy.array_equal(raw, pose_differences(POSES[frames], CLOSED[frames]))


def test_the_recorded_actions_have_the_gripper_of_the_later_frame() -> None:
    raw, source, *_ = raw_actions(ANNOTATION, Reading(relative_pose(), source="action", start=4))
    assert numpy.allclose(raw[:, :6], FIELD[4:, :6]) and numpy.allclose(raw[:, 6], CLOSED[5:])
    assert source == "rows of 'action', gripper of 'continuous_gripper_state'"
    without = {"action": ANNOTATION["action"]}
    raw, source, *_ = raw_actions(without, Reading(relative_pose()))
    assert numpy.array_equal(raw, FIELD) and source == "rows of 'action'"


def test_differences_to_a_first_frame_begin_anew_with_every_chunk() -> None:
    transform = relative_pose(accumulate="window")
    raw, *_ = raw_actions(ANNOTATION, Reading(transform, chunk_size=8))
    expected = [pose_differences(POSES[i : i + 9], CLOSED[i : i + 9], accumulate="window") for i in (0, 8, 16)]
    assert numpy.array_equal(raw, numpy.concatenate(expected))


def test_a_controller_s_actions_are_those_with_as_many_numbers() -> None:
    toy = {**ANNOTATION, "toy_actions": RANDOM.randn(19, 4).tolist()}
    raw, source, *_ = raw_actions(toy, Reading(controller(4, 1.0)))
    assert source == "rows of 'toy_actions'" and numpy.array_equal(raw, toy["toy_actions"])
    raw, source, *_ = raw_actions(toy, Reading(controller(7)))
    assert source == "rows of 'action'" and numpy.array_equal(raw, FIELD)
    raw, _, frames, *_ = raw_actions(toy, Reading(controller(7), stride=2))
    assert numpy.allclose(raw[0, :6], FIELD[:2, :6].sum(axis=0)) and raw[0, 6] == FIELD[1, 6]
    assert frames.tolist() == list(range(0, 20, 2))
    raw, *_ = raw_actions(toy, Reading(controller(7), stride=2, combine="last"))
    assert numpy.array_equal(raw, numpy.asarray(FIELD)[1::2][: len(raw)])
    with pytest.raises(ConfigError, match="combine_actions has 2 words, but an action 7 numbers"):
        raw_actions(toy, Reading(controller(7), stride=2, combine=["sum", "last"]))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, str]]:
    """ANNOTATION as a file, and a video of so many frames."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "0.json").write_text(json.dumps(ANNOTATION))

    def made(num_frames: int) -> tuple[str, str]:
        video = folder / f"{num_frames}.mp4"
        if not video.exists():
            media.write_video(video, torch.zeros(3, num_frames, 16, 16, dtype=torch.uint8), 5)
        return str(folder / "0.json"), str(video)

    return made


@pytest.mark.parametrize(
    ("changes", "num_frames", "fits"),
    [
        (dict(), 20, True),
        (dict(), 7, False),
        (dict(), 19, False),  # a pose for every frame
        (dict(), 1, True),  # a picture in a video
        (dict(start=4), 5, True),  # nothing behind the first frame
        (dict(num_given=5, stride=2), 9, True),
        (dict(num_given=5), 1, False),
        (dict(source="action"), 19, True),  # an action for the last frame, too
        (dict(source="action"), 18, False),
    ],
)
def test_a_video_of_another_recording_is_told(changes: Any, num_frames: int, fits: bool, recording: Any) -> None:
    annotation, video = recording(num_frames)
    reading = Reading(relative_pose(), **changes)
    if fits:
        episode = read_episode(annotation, reading, video)
        assert episode.has_truth == (num_frames >= 19) and episode.fps == 5 / reading.stride
        return
    rows = "19 rows of 'action'" if changes.get("source") else "20 rows of 'state'"
    with pytest.raises(DataError, match=rf"0\.json has {rows}, .*/{num_frames}\.mp4 has {num_frames}\. "):
        read_episode(annotation, reading, video)


@pytest.mark.parametrize(
    ("reading", "annotation", "words"),
    [
        (Reading(relative_pose(), source="action", stride=2), ANNOTATION, "action_source state"),
        (Reading(relative_pose(accumulate="window")), {"action": FIELD.tolist()}, "accumulate=window.*source state"),
        (Reading(relative_pose(accumulate=4), source="action"), ANNOTATION, "accumulate=4.*source state"),
        (Reading(relative_pose(), source="state"), {"action": FIELD.tolist()}, "it has no 'state'"),
        (Reading(controller(5)), ANNOTATION, "takes actions of 5 numbers.*'action' of 7.*--action_key"),
        (Reading(controller(7), action_key="actoin"), ANNOTATION, "no 'actoin'.*action"),
        (Reading(relative_pose(), start=19), ANNOTATION, "1 are left with --start_frame_idx 19"),
        (Reading(relative_pose(), num_given=5, most_actions=3), ANNOTATION, "5 are needed at least"),
        (Reading(controller(7)), {"action": [[1.0] * 7, [2.0] * 6]}, "not rows of equally many numbers"),
        (Reading(controller(7)), {"action": [[0.0] * 7, [0.0] * 6 + [float("nan")]]}, "nan in row 1, column 6"),
    ],
)
def test_what_is_missing_is_told(reading: Reading, annotation: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        raw_actions(annotation, reading)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(relative_pose(), stride=0), "--fps_downsample_ratio 0"),
        (Reading(relative_pose(), size=(40, 48)), "--resolution 40,48"),
        (Reading(controller(7), source="state"), "--action_source state"),
    ],
)
def test_a_reading_that_cannot_be_meant_is_refused(reading: Reading, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reading.check()


# Requests of rollouts -------------------------------------------------------------------------------------------------


def test_jobs_are_imagined_as_if_each_were_alone() -> None:
    jobs = []
    for seed, count in ((3, 15), (8, 24)):
        first = torch.full((3, 1, 4, 4), seed, dtype=torch.uint8)
        episode = ActionInput(first, torch.full((count, 1), float(seed)), "rows", "a.mp4", list(range(count + 1)))
        jobs.append(ActionJob(ActionRequest("a.json", "a.mp4", seed=seed), episode))
    rollout = mock.Mock(return_value=torch.zeros(2, 3, 25, 4, 4, dtype=torch.uint8))
    pipe: Any = SimpleNamespace(
        rollout=rollout,
        transform=SimpleNamespace(dim=1),
        transformed=lambda rows: torch.tensor(rows) - 1,
        config=SimpleNamespace(chunk_size=12),
        guardrail=None,
    )
    text, negative = torch.ones(1, 2, 8), torch.zeros(1, 2, 8)
    settings = RolloutSettings(history=2, float_hand_over=True)
    videos = imagine(pipe, jobs, settings, (text, negative))
    assert [video.shape[1] for video in videos] == [16, 25]
    (frames, actions, seeds, sampling), told = rollout.call_args
    assert frames[:, 0, 0, 0, 0].tolist() == seeds == [3, 8] and sampling is settings.sampling
    assert actions[:, :, 0].tolist() == [[3.0] * 15 + [-1.0] * 9, [8.0] * 24]
    assert told["text_B_S_E"] is text and told["negative_text_B_S_E"] is negative
    assert (told["history"], told["reference"], told["float_hand_over"]) == (2, False, True)


def test_frames_behind_the_given_ones_are_compared_and_the_last_of_these_stands_for_no_motion() -> None:
    true, made = (torch.tensor(greys, dtype=torch.uint8)[None, :, None, None].expand(3, -1, 4, 4) for greys in GREYS)
    ours, still = compared(made, true, 2) or (0.0, 0.0)
    decibels = [20 * math.log10(255 / error) for error in (10, 20, 30)]
    assert ours == pytest.approx(decibels[0], abs=0.01) and still == pytest.approx(sum(decibels[1:]) / 2, abs=0.01)
    assert compared(made[:, :2], true, 2) is None


GREYS = [100, 100, 120, 130, 140], [0, 100, 110, 120]  # true ones, and those that were made


def test_a_text_and_a_negative_one_have_their_own_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(name="", values=list, encode=lambda texts: torch.full((1, 2, 4), float(len(texts[0]))))
    monkeypatch.setattr(action_requests, "read_prompt_embeddings", lambda path: known)
    monkeypatch.setattr(action_requests, "other_text", lambda *_: None)
    wanted = RequestText(prompt="push", negative_prompt="no", prompt_embeddings="a.safetensors")
    config: Any = SimpleNamespace(text_encoder_name="")
    text, negative = read_texts(wanted, config, ModelCard(), 4)
    assert text.shape == negative.shape == (1, 2, 4) and (text == 4).all() and (negative == 2).all()
    assert read_texts(replace(wanted, negative_prompt=""), config, ModelCard(), 4)[1] is None


@pytest.mark.parametrize(("combine", "warns"), [(None, True), ("sum", False)])
def test_rows_that_are_summed_unasked_are_a_warning(
    combine: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reading = Reading(transform=controller(4, scale=1.0), stride=2, combine=combine)
    with pytest.raises(DataError):  # there is no request
        prepare([], reading, RolloutSettings())
    assert ("--combine_actions last" in caplog.text) == warns
