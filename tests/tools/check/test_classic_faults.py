# SPDX-License-Identifier: Apache-2.0
"""Each classic fault that is planted is found, and named with its cure; clean sets of seven kinds have none."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosmos_predict2.tools.check.classic_faults import classic_faults
from cosmos_predict2.tools.check.clips import kind_of
from cosmos_predict2.tools.check.episodes import motion
from scripts import check_dataset as script
from tests.programs import call
from tests.tools.check import robot_sets as sets

OF_FILES = ("other_rate", "fewer_rows_than_frames")


def findings(made: sets.RobotSet) -> list:
    names = (sets.names_of(made, column) for column in (sets.ACTION, sets.STATE))
    return [*classic_faults("robot", made.fps, sets.as_episodes(made), *names)]


def kinds(made: sets.RobotSet) -> list[str]:
    return sorted({kind_of(found) for found in findings(made) if found.level == "error"})


@pytest.mark.parametrize("name", sets.CLEAN)
def test_a_clean_set_has_no_fault(name: str) -> None:
    assert kinds(sets.clean(name)) == []


@pytest.mark.parametrize("name", [name for name in sets.PLANTED if name not in OF_FILES])
def test_a_planted_fault_is_found_alone(name: str) -> None:
    assert kinds(sets.planted(name)) == [sets.PLANTED[name][2]]


def test_notes_tell_what_may_be_meant() -> None:
    """A gripper whose command and state are of other units may be opposite, and a robot may answer a row later."""
    made = sets.clean("delta_gripper")
    (note,) = findings(made)
    assert note.level == "note" and "command gripper (-1 to 1) makes the state gripper (0 to 0.08) smaller" in note.text
    for columns in made.columns:
        columns[sets.ACTION] = np.roll(columns[sets.ACTION], -1, axis=0)
    assert any("as the action of row t - 1 says" in found.text for found in findings(made))


def test_a_mirrored_camera_in_a_hand_is_not_named() -> None:
    """The motion in its picture depends on how the hand is turned; another camera is judged beside it, also alone."""
    made = sets.clean("arm")
    for videos in made.videos[sets.ODD]:
        videos[sets.WRIST] = videos[sets.WRIST][:, :, ::-1].copy()
    assert findings(made) == []
    for columns in made.columns:
        del columns[sets.STATE]
    for videos in made.videos[sets.ODD]:
        videos[sets.TOP] = videos[sets.TOP][:, :, ::-1].copy()
    (found,) = findings(made)
    assert f"'{sets.TOP}' is mirrored in 5 of 32 episodes" in found.text


def test_few_episodes_are_not_compared() -> None:
    made = sets.planted("late_by_state")
    assert kinds(sets.RobotSet(made.columns[:5], made.videos[:5])) == []


@pytest.mark.parametrize(("count", "level"), [(2, "note"), (3, "error")])
def test_few_odd_episodes_of_many_are_noted(count: int, level: str) -> None:
    """Two of a hundred clean ones of a public simulator fitted by chance."""
    made = sets.moving_dot()
    for other in (sets.moving_dot(3), sets.moving_dot(4)):
        made.columns += other.columns
        made.videos += other.videos
    for videos in made.videos[:count]:
        videos[sets.TOP] = videos[sets.TOP][:, :, ::-1].copy()
    (found,) = findings(made)
    assert found.level == level and f"'{sets.TOP}' is mirrored in {count} of 48 episodes" in found.text


def test_motion_has_the_sign_of_its_direction() -> None:
    """In both ways to see it; and mirrored pictures have the other sign in the first and the third number."""
    films = [film[sets.TOP][..., 0].astype(float) for film in sets.clean("moving_dot").videos[:3]]
    small = [film.reshape(len(film), 24, 2, 24, 2).mean(axis=(2, 4)) for film in films]
    padded = [np.pad(film, ((0, 0), (4, 4), (4, 4)), mode="edge") for film in small]
    for film in padded:
        found = motion(film)
        np.testing.assert_allclose(motion(film[:, :, ::-1]), found * [-1, 1, -1, 1], atol=1e-9)
        np.testing.assert_allclose(motion(film[:, ::-1]), found * [1, -1, 1, -1], atol=1e-9)
        assert np.abs(found[:, 2:]).max() > 0.05


@pytest.mark.parametrize("name", [*OF_FILES, "mirrored_by_motion", "two_cameras"])
def test_check_dataset_reports_them(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
    is_clean = name in sets.CLEAN
    made = sets.clean(name) if is_clean else sets.planted(name)
    if name in OF_FILES:  # each of them shows it
        made = replace(made, columns=made.columns[:4], videos=made.videos[:4])
    folder = sets.write(made, tmp_path / "robot", name)
    code = call(script, folder, "--json", tmp_path / "check.json", "--workers", 0)
    found = json.loads((tmp_path / "check.json").read_text())
    faults = found["faults"]
    assert not is_clean or any("episodes succeed (next.success), " in note for note in found["notes"])
    assert code == (0 if is_clean else 1)
    assert {fault["kind"] for fault in faults} == (set() if is_clean else {sets.PLANTED[name][2]})
    assert is_clean or name in OF_FILES or call(script, folder, "--fast", "--workers", 0) == 0, "it looks at no motion"
