# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.lerobot.robots: public data sets in every form, and what is said of other folders."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from cosmos_predict2.actions.transforms import ActionContract, ActionTransform
from cosmos_predict2.data.action_conditioned.dataset_lerobot import IdleRule, LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.robots import ROBOTS
from cosmos_predict2.data.lerobot.writer import write_table
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStarts
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from imaginaire.errors import ConfigError, DataError
from scripts import make_reset_states
from tests.data import sources_robots as made

EPISODES = 3
Folder = Callable[..., Path]
pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    written: dict[tuple[str, str], Path] = {}

    def of(name: str, version: str = "v2.1") -> Path:
        if (name, version) not in written:
            root = tmp_path_factory.mktemp("robots") / name
            written[name, version] = made.write_robot(root, name, version, episodes=EPISODES)
        return written[name, version]

    return of


def data(root: Path, embodiment: str | None, **arguments: Any) -> LeRobotActionDataset:
    own = dict(video_size=(16, 32), data_split="full", embodiment=embodiment) | arguments
    return LeRobotActionDataset(str(root), **own)


# name, version -> robot, further arguments, camera
CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("droid_lerobot", "v2.1", "droid", {}, "observation.images.exterior_1_left"),
    ("droid_lerobot", "v3.0", "droid", {}, "observation.images.exterior_1_left"),
    ("droid_cosmos3", "v3.0", "droid", {}, "observation.image.exterior_image_1_left"),
    ("droid_openpi", "v2.1", "droid", {}, "exterior_image_1_left"),
    ("agibot_world", "v2.1", "agibot_world", {}, "observation.images.head"),
    ("so100_degrees", "v2.1", "so100", dict(units="degrees"), "observation.images.front"),
    ("so100_m100", "v2.1", "so100", dict(units="m100", camera="front"), "observation.images.front"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}_{case[1]}")
def test_a_public_form_is_read_by_the_name_of_the_robot(case: Any, folder: Folder) -> None:
    name, version, robot, arguments, camera = case
    found = data(folder(name, version), robot, **arguments)
    motion = made.motion(0, made.WIDTHS.get(name, 7), made.LAYOUTS[name].fps)
    assert found.source.camera == camera and found[0]["action"].shape == (12, ROBOTS[robot].action_dim)
    raw = found.source.actions(0, numpy.arange(made.LENGTH))
    has_moves = name == "droid_openpi"
    unit = {"so100_degrees": 180 / numpy.pi, "so100_m100": 20.0}.get(name, 1.0)
    joints = motion.velocity if has_moves else unit * motion.position
    assert numpy.allclose(raw[:, : joints.shape[1]], joints[:-1], atol=1e-4)
    for k in ROBOTS[robot].grippers:  # a model sees 1 for a closed gripper
        closed = motion.held if robot == "agibot_world" else motion.gripper  # a state there
        assert numpy.allclose(found.action_transform.apply(raw)[:, k], closed[:-1, 0])
    combined = data(folder(name, version), robot, stride=3, **arguments).source
    assert next(iter(combined.combine)) == ("sum" if has_moves else "last")


@pytest.mark.parametrize("name", ["droid_lerobot", "droid_cosmos3", "droid_openpi"])
def test_windows_of_droid_begin_where_it_moves(name: str, folder: Folder) -> None:
    found = data(folder(name), "droid", skip_idle=True)
    assert found.windows is not None and 0 < len(found) < len(data(folder(name), "droid"))
    for episode in range(EPISODES):
        starts = found.windows.rows[found.windows.rows[:, 0] == episode, 1].tolist()
        motion = made.motion(episode, 7, 15)
        commands = (motion.position if name == "droid_cosmos3" else motion.velocity).astype(numpy.float32)
        allowed = numpy.flatnonzero(IdleRule().starts(commands)).tolist()
        assert starts == [k for k in allowed if k + 13 <= made.LENGTH]
        assert not set(range(made.REST.start + 1, made.REST.stop)) & set(starts)


def test_own_data_have_a_rule_of_their_own(folder: Folder) -> None:
    root = folder("so100_degrees")
    assert len(data(root, None, skip_idle=None)) == len(data(root, None))
    rule = dict(columns="action", below=0.05, idle_run=5, moving_run=8, cut=0)
    found = data(root, None, skip_idle=rule)
    assert found.windows is not None and 0 < len(found) < len(data(root, None))
    assert 25 not in found.windows.rows[:, 1]
    with pytest.raises(DataError, match="skip_idle"):
        data(root, None, skip_idle=dict(columns=["action"], below=1e6))


def test_only_what_is_recorded_is_a_success_or_a_failure(folder: Folder) -> None:
    root = folder("droid_lerobot")
    found = {outcome: data(root, "droid", outcome=outcome).recordings for outcome in ("success", "failure")}
    assert {outcome: numbers.tolist() for outcome, numbers in found.items()} == {"success": [0, 2], "failure": [1]}
    with pytest.raises(DataError, match=r"next\.success"):
        data(folder("droid_openpi"), "droid", outcome="failure")
    with pytest.raises(ConfigError, match=r"outcome is 'succes'\. Did you mean success"):
        data(root, "droid", outcome="succes")


def test_quantiles_become_the_ends(folder: Folder) -> None:
    found = data(folder("droid_openpi"), "droid", action_transform="quantiles")
    columns = found.action_statistics().action
    assert found.action_transform.proposed
    ends = found.action_transform.apply([columns.q01, columns.q99])
    assert numpy.allclose(ends[:, :7], [[-1.0] * 7, [1.0] * 7]) and numpy.allclose(ends[:, 7], [0, 1])
    kept = ActionTransform.from_json(found[0]["action_transform"])
    assert kept == found.action_transform and kept.stats is not None and kept.stats["q99"] == columns.q99.tolist()


def test_units_decide_the_scale_and_are_no_proposal(folder: Folder) -> None:
    degrees = data(folder("so100_degrees"), "so100", units="degrees").action_transform
    hundredths = data(folder("so100_m100"), "so100", units="m100", camera="front").action_transform
    assert numpy.allclose(degrees.apply([90, -90, 0, 0, 0, 100]), [1, -1, 0, 0, 0, 0])
    assert numpy.allclose(hundredths.apply([100, -100, 0, 0, 0, 0]), [1, -1, 0, 0, 0, 1])
    assert not degrees.proposed and not degrees.yields_to(hundredths)
    kept, other = ActionTransform.from_json(degrees.to_json()).contract, hundredths.contract
    assert kept.units == ("degrees",) * 5 + ("100 (open) to 0 (closed)",) and not kept.idle
    joint = kept.names[0]
    assert (
        kept.problem(other, "The run", "the data have") == f"The run takes {joint} in degrees, but the data have m100"
    )
    flipped = replace(kept, units=(*kept.units[:5], "0 (open) to 100 (closed)"))
    assert f"{kept.names[5]} in 100 (open) to 0" in str(kept.problem(flipped, "The run", "the data have"))
    own = data(folder("so100_degrees"), None).action_transform.contract
    assert not own.units and own.problem(kept, "", "") is None and kept.problem(own, "", "") is None


def test_starts_and_clones_have_the_units_that_are_stated(folder: Folder, tmp_path: Path) -> None:
    root, words = folder("so100_degrees"), ["--embodiment", "so100", "--units", "degrees"]
    parsed = make_reset_states.parser.parse_args(["--dataset", str(root), "--out", str(tmp_path), *words])
    assert make_reset_states.run(parsed) == 0
    starts = RecordedStarts(str(tmp_path / FILE)).recorded
    clone = RecordedWindows(str(root), chunk=4, embodiment="so100", units="degrees").windows
    wanted = data(root, "so100", units="degrees").action_transform.contract
    assert starts is not None and ActionContract.read(starts.contract).units == clone.contract.units == wanted.units
    with pytest.raises(ConfigError, match="units is required"):
        RecordedWindows(str(root), chunk=4, embodiment="so100")


def test_an_idle_filter_is_recorded_and_may_differ(folder: Folder) -> None:
    """It chooses moments; the numbers of an action mean the same."""
    filtered, whole = (
        data(folder("droid_lerobot"), "droid", skip_idle=skips).action_transform.contract for skips in (True, False)
    )
    assert "action.joint_velocity" in filtered.idle and "below=0.001, idle_run=7" in filtered.idle
    assert ActionContract.read(filtered.to_dict()) == filtered and not whole.idle
    assert filtered.problem(whole, "", "") is None


WRONG: list[tuple[str, str, dict[str, Any], type[Exception], str]] = [
    ("so100_degrees", "so100", {}, ConfigError, "units is required .* degrees or m100"),
    ("so100_degrees", "so100", dict(units="radians"), ConfigError, "units is 'radians'"),
    ("droid_lerobot", "droid", dict(units="m100"), ConfigError, "units"),
    ("so100_m100", "so100", dict(units="m100"), ConfigError, "camera"),
    ("so100_degrees", "droid", {}, DataError, r"'action' has the shape \[6\], not \[8\]"),
    ("droid_openpi", "so100", dict(units="m100"), DataError, "there is no column 'action'"),
    ("droid_lerobot", "agibot_world", {}, DataError, "there is no column 'actions.joint.position'"),
    ("agibot_world", "agibot_world", dict(skip_idle=True), ConfigError, "skip_idle needs the columns"),
    ("droid_lerobot", "droid", dict(skip_idle=dict(under=1)), ConfigError, "skip_idle has no 'under'"),
    ("droid_lerobot", "droid", dict(skip_idle=1), ConfigError, "skip_idle is 1"),
    ("droid_lerobot", "droid", dict(skip_idle=dict(below="1e-3")), ConfigError, "skip_idle.below is '1e-3'"),
    ("droid_lerobot", "droid", dict(skip_idle=dict(cut=-5)), ConfigError, "skip_idle.cut is -5"),
    ("droid_lerobot", "droid", dict(outcome="succes"), ConfigError, "success"),
    ("droid_lerobot", "droid", dict(outcome=["success"]), ConfigError, "outcome"),
    ("so100_degrees", "so100", dict(units=["m100"]), ConfigError, "units is"),
    ("droid_lerobot", "droids", {}, ConfigError, "droid"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}_{case[4][:12]}")
def test_what_differs_is_named(case: Any, folder: Folder) -> None:
    name, robot, arguments, error, message = case
    with pytest.raises(error, match=message):
        data(folder(name), robot, **arguments)


def test_idle_frames_need_their_column(folder: Folder, tmp_path: Path) -> None:
    root = Path(shutil.copytree(folder("droid_lerobot"), tmp_path / "set"))
    info = json.loads((root / "meta/info.json").read_text())
    del info["features"]["action.joint_velocity"]
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=r"no column 'action.joint_velocity', .* skip_idle=False"):
        data(root, "droid", skip_idle=True)


def test_other_units_are_named(tmp_path: Path) -> None:
    root = made.write_robot(tmp_path / "wide", "so100_degrees", episodes=2, length=20)
    source = LeRobotSource.open(root)
    for i in range(2):
        columns = source.episode(i)
        columns["action"] = 8 * columns["action"]
        write_table(root / f"data/chunk-000/episode_{i:06d}.parquet", columns)
    with pytest.raises(DataError, match=r"number \d of the actions has other units .* but -100 to 100 is the range"):
        data(root, "so100", units="m100")
