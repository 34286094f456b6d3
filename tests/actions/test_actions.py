# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.{actions, rotations}: poses to actions and back."""

import json
from typing import Any

import attrs
import numpy
import pytest

from cosmos_predict2.actions.rotations import (
    axis_angle_to_matrix,
    euler_to_matrix,
    matrix_to_euler,
    matrix_to_quaternion,
    matrix_to_rot6d,
    quaternion_to_matrix,
    rot6d_to_matrix,
    wrap,
)
from cosmos_predict2.actions.transforms import (
    ACTION_SCALE,
    ActionTransform,
    actions_from_field,
    controller,
    pose_differences,
    relative_pose,
)
from imaginaire.errors import ConfigError, DataError
from tests.actions.integrated import integrate


def _poses(num: int, seed: int = 0, turns: float = 0.3) -> numpy.ndarray:
    generator = numpy.random.default_rng(seed)
    return numpy.cumsum(generator.normal(0, [0.02] * 3 + [turns] * 3, (num, 6)), axis=0)


def test_rotations_survive_every_form() -> None:
    angles = numpy.random.default_rng(0).uniform(-numpy.pi, numpy.pi, (500, 3))
    matrices = euler_to_matrix(angles)
    assert numpy.allclose(matrices @ matrices.swapaxes(-1, -2), numpy.eye(3), atol=1e-14)
    assert numpy.allclose(euler_to_matrix(matrix_to_euler(matrices)), matrices, atol=1e-12)
    assert numpy.allclose(quaternion_to_matrix(matrix_to_quaternion(matrices)), matrices, atol=1e-12)
    small = angles * [1, 0.49, 1]  # a pitch inside (-pi/2, pi/2): the angles are unique
    assert numpy.allclose(matrix_to_euler(euler_to_matrix(small)), small, atol=1e-10)


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_a_rot6d_is_the_two_rows_or_columns_that_it_is_said_to_be(of: str) -> None:
    """A quarter turn about z takes x to y: the first column is (0, 1, 0), the first row (0, -1, 0)."""
    quarter = euler_to_matrix([0, 0, numpy.pi / 2])
    by_hand = {"rows": [0, -1, 0, 1, 0, 0], "columns": [0, 1, 0, -1, 0, 0]}
    assert numpy.allclose(matrix_to_rot6d(quarter, of), by_hand[of], atol=1e-15)
    assert numpy.allclose(rot6d_to_matrix(by_hand[of], of), quarter, atol=1e-15)
    other = {"rows": "columns", "columns": "rows"}[of]
    assert numpy.allclose(rot6d_to_matrix(by_hand[of], other), quarter.T, atol=1e-15), "one name, the inverse turn"

    draws = numpy.random.default_rng(0)
    matrices = euler_to_matrix(draws.uniform(-numpy.pi, numpy.pi, (50, 2, 3)))
    rot6d = matrix_to_rot6d(matrices, of)
    assert rot6d.shape == (50, 2, 6) and numpy.allclose(rot6d_to_matrix(rot6d, of), matrices, atol=1e-12)
    noisy = 3 * rot6d + draws.normal(0, 0.05, rot6d.shape)
    found = rot6d_to_matrix(noisy, of)
    assert numpy.allclose(found @ found.swapaxes(-1, -2), numpy.eye(3), atol=1e-12)
    assert numpy.allclose(numpy.linalg.det(found), 1) and numpy.abs(found - matrices).max() < 0.15
    kept = matrix_to_rot6d(found, of)[..., :3]
    assert numpy.allclose(kept, noisy[..., :3] / numpy.linalg.norm(noisy[..., :3], axis=-1, keepdims=True))


def test_a_rot6d_that_is_ambiguous_or_no_rotation_is_refused() -> None:
    for wrong in ("row", True):
        with pytest.raises(ConfigError, match=r"rot6d is .*rows or columns"):
            relative_pose(rot6d=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one form"):
        relative_pose(rot6d="rows", quaternion=True)
    for axes in ([0, 0, 0, 1, 0, 0], [1, 0, 0, 2, 0, 0], [numpy.nan] * 6):
        with pytest.raises(DataError, match="no rotation"):
            rot6d_to_matrix(axes, "rows")
    rows, columns = relative_pose(rot6d="rows"), relative_pose(rot6d="columns")
    assert rows.scale == (20.0,) * 3 + (1.0,) * 7 and "rot6d of rows" in str(rows)
    assert not attrs.evolve(rows, proposed=True).yields_to(columns)
    assert ActionTransform.from_json(rows.to_json()) == rows and "rot6d" not in relative_pose().to_json()


def test_an_axis_angle_turns_about_its_axis() -> None:
    assert numpy.allclose(axis_angle_to_matrix([0, 0, 0.3]), euler_to_matrix([0, 0, 0.3]), atol=1e-15)
    assert numpy.allclose(axis_angle_to_matrix([3.0, 0, 0]), euler_to_matrix([3.0, 0, 0]), atol=1e-15)
    assert numpy.array_equal(axis_angle_to_matrix(numpy.zeros((2, 3))), numpy.stack([numpy.eye(3)] * 2))
    vector = numpy.array([0.4, -1.1, 0.7])
    assert numpy.allclose(axis_angle_to_matrix(vector) @ vector, vector, atol=1e-14)


def test_angles_lie_in_the_half_open_circle() -> None:
    pi = numpy.pi
    assert numpy.allclose(wrap([-pi, pi, 3 * pi, -3.5 * pi, 0.25]), [pi, pi, pi, 0.5 * pi, 0.25])
    many = numpy.random.default_rng(0).uniform(-50, 50, 1000)
    assert ((wrap(many) > -pi) & (wrap(many) <= pi)).all() and numpy.allclose(numpy.sin(wrap(many)), numpy.sin(many))


def test_what_is_no_rotation_is_refused() -> None:
    for matrix in (numpy.eye(3) * 1.001, numpy.diag([1, 1, -1]), numpy.full((3, 3), numpy.nan)):
        with pytest.raises(DataError, match="no rotation"):
            matrix_to_euler(matrix)
    with pytest.raises(DataError, match="3x3"):
        matrix_to_quaternion(numpy.eye(2))


@pytest.mark.parametrize(
    ("rotation", "dim"), [({}, 7), ({"quaternion": True}, 8), ({"rot6d": "rows"}, 10), ({"rot6d": "columns"}, 10)]
)
@pytest.mark.parametrize("accumulate", [None, "window", 4])
def test_integrated_actions_are_the_poses_again(
    accumulate: str | int | None, rotation: dict[str, Any], dim: int
) -> None:
    poses, gripper = _poses(14), numpy.random.default_rng(1).uniform(0, 1, 14)
    form = dict(accumulate=accumulate, **rotation)
    actions = relative_pose(20.0, 0.5, **form).apply(pose_differences(poses, gripper, **form))
    assert actions.shape == (13, dim)
    again, closed = integrate(poses[0], actions, **form, scale=20.0, gripper_scale=0.5)
    assert numpy.allclose(again[:, :3], poses[:, :3], atol=1e-12)
    assert numpy.allclose(euler_to_matrix(again[:, 3:]), euler_to_matrix(poses[:, 3:]), atol=1e-11)
    assert numpy.allclose(closed, gripper[1:], atol=1e-15)


def test_what_recordings_may_get_wrong_is_refused() -> None:
    poses, gripper = _poses(5), numpy.zeros(5)
    assert pose_differences(poses[:1], gripper[:1]).shape == (0, 7)
    assert numpy.array_equal(pose_differences(numpy.hstack([poses, gripper[:, None]]), gripper[:, None])[:, 6], [0] * 4)
    broken = poses.copy()
    broken[3, 2] = numpy.inf
    for states, closed, message in [
        (poses, gripper[1:], "5 states, but 4 gripper states"),
        (poses[:, :5], gripper, "rows of 6 numbers"),
        (broken, gripper, "not finite in row 3"),
        ([[0.0] * 6, [0.0] * 5], [0, 0], "equally many"),
        (poses, ["a"] * 5, "not numbers"),
        (poses, numpy.full(5, numpy.nan), "gripper states have nan in row 0"),
    ]:
        with pytest.raises(DataError, match=message):
            pose_differences(states, closed)
    with pytest.raises(DataError, match="5 actions need the gripper states of 6 frames; there are 5"):
        actions_from_field(numpy.zeros((5, 7)), gripper)


def test_a_transform_is_kept_as_plain_values_and_undone() -> None:
    for transform in (
        relative_pose(quaternion=True),
        relative_pose(gripper_scale=0.5, accumulate=4),
        controller(29),
        ActionTransform(kind="controller", scale=[2.0, 3.0], offset=[1.0, -1.0]),
    ):
        assert ActionTransform.from_dict(json.loads(json.dumps(transform.to_dict()))) == transform
        raw = numpy.random.default_rng(0).normal(size=(4, transform.dim))
        assert numpy.allclose(transform.undo(transform.apply(raw)), raw, atol=1e-15)
    assert relative_pose().scale == (ACTION_SCALE,) * 6 + (1.0,)
    assert relative_pose(quaternion=True).scale == (20.0,) * 3 + (1.0,) * 5
    assert controller().apply([[1.0] * 7]).tolist() == [[20.0] * 7]


def test_a_wrong_transform_is_refused() -> None:
    for row, message in [
        ({"kind": "relative", "scale": [1.0] * 7}, "relative_pose"),
        ({"kind": "controller", "scale": []}, "a number other than 0"),
        ({"kind": "controller", "scale": [1.0, 0.0]}, "a number other than 0"),
        ({"kind": "controller", "scale": [1.0], "offset": [1.0, 2.0]}, "offset has 2 numbers"),
        ({"kind": "relative_pose", "scale": [1.0] * 8}, "scale has 8 numbers"),
        ({"kind": "controller", "scale": [1.0], "accumulate": 4}, "belong to kind"),
        *(
            ({"kind": "relative_pose", "scale": [1.0] * 7, "accumulate": x}, "accumulate is")
            for x in (0, True, "first")
        ),
        ({"kind": "controller", "scales": [1.0]}, "Did you mean scale"),
        ({"kind": "controller"}, "lacks scale"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ActionTransform.from_dict(row)
    with pytest.raises(DataError, match=r"\[4, 8\].*7 numbers"):
        controller().apply(numpy.zeros((4, 8)))
