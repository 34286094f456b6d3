# SPDX-License-Identifier: Apache-2.0
"""Actions of a Bridge recording against golden values, in both public rules of accumulation."""

import re

import numpy
import pytest

from cosmos_predict2.actions.rotations import euler_to_matrix, matrix_to_euler, matrix_to_quaternion
from cosmos_predict2.actions.transforms import pose_differences, relative_pose
from tests.goldens import Golden, Value
from tests.parity.test_training import windows_of

AREA = "action"
SAME_FORMULA = dict(rtol=0.0, atol=1e-9)


@pytest.fixture
def recording(golden: Golden) -> Value:
    return golden.json("bridge_actions.json")


@pytest.fixture
def states(recording: Value) -> numpy.ndarray:
    return numpy.asarray(recording["state"].use())


@pytest.fixture
def gripper(recording: Value) -> numpy.ndarray:
    return numpy.asarray(recording["continuous_gripper_state"].use())


def test_differences_match(recording: Value, states: numpy.ndarray, gripper: numpy.ndarray) -> None:
    recording["relative_actions_unscaled"].compare(pose_differences(states, gripper), **SAME_FORMULA)
    with_quaternions = pose_differences(states, gripper, quaternion=True)
    recording["relative_actions_quat_unscaled"].compare(with_quaternions, **SAME_FORMULA)


def test_accumulated_differences_match(recording: Value, states: numpy.ndarray, gripper: numpy.ndarray) -> None:
    to_first = pose_differences(states, gripper, accumulate="window")
    recording["accumulate_predict2_vs_first_frame"].compare(to_first, **SAME_FORMULA)
    for name in _matching(recording, r"accumulate_predict25_rebase_every_(\d+)"):
        renewed = pose_differences(states, gripper, accumulate=int(name[1]))
        recording[name[0]].compare(renewed, **SAME_FORMULA)


def test_scaled_actions_match(recording: Value, states: numpy.ndarray, gripper: numpy.ndarray) -> None:
    for name in _matching(recording, r"scaled_([\d.]+)_gripper([\d.]+)(?:_stride(\d+))?"):
        stride = int(name[3] or 1)
        differences = pose_differences(states[::stride], gripper[::stride])
        actions = relative_pose(float(name[1]), float(name[2])).apply(differences)
        recording[name[0]].compare(actions, **SAME_FORMULA)


def test_rotations_match(recording: Value, states: numpy.ndarray) -> None:
    matrix = euler_to_matrix(states[0, 3:6])
    recording["euler2rotm_first"].compare(matrix, **SAME_FORMULA)
    recording["rotm2euler_of_it"].compare(matrix_to_euler(matrix), **SAME_FORMULA)
    recording["rotm2quat_of_it"].compare(matrix_to_quaternion(matrix), **SAME_FORMULA)


def test_windows_match(recording: Value, states: numpy.ndarray) -> None:
    for name in _matching(recording["windows"], r"seq(\d+)_stride(\d+)_startevery(\d+)"):
        num_frames, stride, every = (int(number) for number in name.groups())
        recording["windows"][name[0]].compare(windows_of(len(states), num_frames, stride, every))


def _matching(value: Value, pattern: str) -> list[re.Match[str]]:
    matches = [match for key in value if (match := re.fullmatch(pattern, key))]
    assert matches, f"{value.entry} has no {pattern}"
    return matches
