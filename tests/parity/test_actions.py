# SPDX-License-Identifier: Apache-2.0
"""Actions of annotated robot recordings against golden values."""

import numpy
import pytest

from cosmos_predict2.actions.rotations import euler_to_matrix, matrix_to_euler
from cosmos_predict2.actions.transforms import ActionTransform, actions_from_field, pose_differences
from tests.goldens import Value
from tests.parity.test_frame_selection import windows_of

AREA = "training"
SCALED = 2e-5  # float32 numbers up to 20 pi
AS_MATRICES = 1e-5
NEAR = 0.05  # radians from a pitch of +-pi/2, where rounding moves roll and yaw


def _compare(value: Value, actual: numpy.ndarray, scale: numpy.ndarray) -> None:
    """Numbers within the tolerance; angles near the singularity may be others of the same rotation."""
    expected = numpy.asarray(value.expected())
    assert actual.shape == expected.shape, value.entry
    differs = numpy.abs(actual - expected) > SCALED
    assert not differs[:, [0, 1, 2, *range(6, actual.shape[1])]].any(), value.entry
    for row in numpy.flatnonzero(differs.any(axis=1)):
        found, wanted = (actions[row, 3:6] / scale[3:6] for actions in (actual, expected))
        assert abs(abs(wanted[1]) - numpy.pi / 2) < NEAR, f"{value.entry}/{row}: {found}, expected {wanted}"
        assert numpy.allclose(euler_to_matrix(found), euler_to_matrix(wanted), rtol=0, atol=AS_MATRICES), value.entry


@pytest.mark.golden_cases("actions.json", "cases")
def test_windows_and_actions_match(case: Value) -> None:
    annotation = case["annotation"].use()
    states, gripper = (numpy.asarray(annotation[key]) for key in ("state", "continuous_gripper_state"))
    accumulate = "window" if case["accumulate_action"].use() else None
    transform = ActionTransform(kind="relative_pose", scale=case["scale"].use(), accumulate=accumulate)
    windows = windows_of(
        len(states), case["num_frames"].use(), case["sequence_interval"].use(), case["start_frame_interval"].use()
    )
    assert len(windows) == len(case["samples"])
    for frames, sample in zip(windows, case["samples"]):
        sample["frame_ids"].compare(frames)
        raw = pose_differences(states[frames], gripper[frames], accumulate=accumulate)
        _compare(sample["action"], transform.apply(raw), numpy.asarray(transform.scale))


@pytest.mark.golden_cases("actions.json", "cases")
def test_the_recorded_actions_match(case: Value) -> None:
    annotation = case["annotation"].use()
    scale = case["scale"].use()
    actions = actions_from_field(
        annotation["action"], annotation["continuous_gripper_state"], scale=scale[0], gripper_scale=scale[-1]
    )
    case["inference_actions_from_action_field"].compare(actions, atol=SCALED)


@pytest.mark.golden_cases("actions.json", "rotations")
def test_rotations_match(case: Value) -> None:
    matrix = euler_to_matrix(case["euler"].use())
    case["rotm"].compare(matrix, atol=1e-9)
    case["euler_back"].compare(matrix_to_euler(matrix), atol=1e-9)
