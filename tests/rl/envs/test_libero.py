# SPDX-License-Identifier: Apache-2.0
"""LIBERO: of a package in its layout with a scene of numbers, and of the published one where it is installed.

The published package has no assets: `PLACEHOLDERS` are boxes for the things of one task.
"""

import importlib.metadata
import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.simulators import Seen, axis_angle, libero, rendering
from cosmos_predict2.rl.envs.simulators.libero import LiberoTask
from cosmos_predict2.rl.policies.files import write_policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.errors import ConfigError, DataError
from scripts import evaluate_policy

PUBLISHED = importlib.util.find_spec("libero") is not None
WITHOUT = "LIBERO is not installed (pip install --no-deps hf-libero==0.1.4)"
NAMES = {
    "libero_spatial": ["pick_up_the_bowl"],
    "libero_object": ["pick_up_the_milk"],
    "libero_goal": ["open_the_drawer"],
    "libero_90": ["KITCHEN_SCENE10_close_the_drawer", "pick_up_the_bowl"],
    "libero_10": ["LIVING_ROOM_SCENE2_put_both_in_the_basket", "STUDY_SCENE1_pick_up_the_book"],
}


SCENE = """
import numpy
BUILT = []
class RandomizationError(Exception):
    pass
class Gripper:
    dof = 1
    current_action = None
class Scene:
    fails = ()
    def __init__(self, log): self.log = log
    def reset(self):
        for error in self.fails:
            self.fails = self.fails[1:]
            raise error
        self.log.append("reset")
class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, camera_heights, camera_widths, ignore_done, hard_reset, **other):
        self.shape, self.is_hard, self.log = (camera_heights, camera_widths, 3), hard_reset, []
        assert ignore_done, "robosuite would end an episode by itself"
        self.env, self.robots = Scene(self.log), [type("Robot", (), {"gripper": Gripper()})]
        BUILT.append((bddl_file_name.rsplit("/", 1)[1], self))
    def seed(self, seed): self.log.append(f"seed {seed}")
    def set_init_state(self, state):
        self.log.append(f"start {state[1]:.0f}")
        self.sum = numpy.zeros(7)
        return self.observed()
    def step(self, action):
        self.sum = self.sum + action
        return self.observed(), float(self.sum[0] > 1), bool(self.sum[0] > 1), {}
    def observed(self):
        image = numpy.zeros(self.shape, dtype=numpy.uint8)
        image[0, 0] = 255
        return {"agentview_image": image, "robot0_eye_in_hand_image": image // 5, "robot0_eef_pos": self.sum[:3],
                "robot0_eef_quat": numpy.array([0, 0, 1.0, 0]), "robot0_gripper_qpos": self.sum[5:]}
    def close(self): self.log.append("close")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a few tasks."""
    root = tmp_path / "libero" / "libero"
    (root / "benchmark").mkdir(parents=True)
    for folder in (root.parent, root):
        (folder / "__init__.py").write_text("_assets_path_cache = None\n")
    (root / "benchmark" / "libero_suite_task_map.py").write_text(f"libero_task_map = {NAMES!r}\n")
    for suite, names in NAMES.items():
        (root / "init_files" / suite).mkdir(parents=True)
        for i, name in enumerate(names):
            states = numpy.arange(50 * 4, dtype=numpy.float64).reshape(50, 4) + i
            torch.save(states, root / "init_files" / suite / f"{name}.pruned_init")
    (root / "envs").mkdir()
    (root / "envs" / "__init__.py").write_text(SCENE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    _forget()
    yield root
    _forget()
    for name in ("libero", "libero.libero", "libero.libero.envs"):
        sys.modules.pop(name, None)


def _forget() -> None:
    for each in (libero.package, libero.tasks_of, libero._task_names):
        each.cache_clear()


def test_sentences_are_those_of_the_names(package: Path) -> None:
    found = {name: [task.language for task in libero.tasks_of(name)] for name in libero.SUITES}
    assert found["libero_10"] == ["put both in the basket", "pick up the book"]
    assert found["libero_90"] == ["close the drawer", "pick up the bowl"]
    names = ["pick up the bowl", "pick up the milk", "open the drawer", "close the drawer"]
    assert found["libero_all"] == [*names, *found["libero_10"]]
    assert libero.tasks_of("libero_all")[0].init_file.parent.name == "libero_spatial"  # of one in two suites, the first
    assert [LiberoTask(name).max_steps for name in libero.SUITES] == [220, 280, 300, 400, 520, 520]
    assert not any(name.split(".")[0] == "libero" for name in sys.modules)
    with pytest.raises(ConfigError, match=r"no suite 'libero_gaol'.*libero_goal"):
        libero.tasks_of("libero_gaol")


def test_starts_are_read_without_running_the_file(package: Path, tmp_path: Path) -> None:
    task = libero.tasks_of("libero_90")[1]
    states = libero.initial_states(task)
    assert states.dtype == numpy.float64 and states.shape == (50, 4) and states[3, 2] == 3 * 4 + 2 + 1
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(ran),)

    torch.save(Evil(), task.init_file)
    with pytest.raises(DataError, match=r"pick_up_the_bowl.pruned_init holds no starts"):
        libero.initial_states(task)
    assert not ran.exists()
    for content in (b"", pickle.dumps([1])):
        task.init_file.write_bytes(content)
        with pytest.raises(DataError, match="holds no starts"):
            libero.initial_states(task)
    torch.save(numpy.arange(3.0), task.init_file)
    with pytest.raises(DataError, match="no table of numbers"):
        libero.initial_states(task)


def test_it_is_imported_without_a_question(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", "before")  # is set back
    monkeypatch.delenv(libero.ASSETS, raising=False)
    with pytest.raises(DataError, match=r"neither in .*assets.*\n.*hf download lerobot/libero-assets"):
        libero.prepare()
    assets = tmp_path / "assets"
    monkeypatch.setenv(libero.ASSETS, str(assets))
    with pytest.raises(DataError, match="does not exist"):
        libero.prepare()
    (assets / "scenes").mkdir(parents=True)
    with pytest.raises(DataError, match="lacks articulated_objects"):
        libero.prepare()
    for part in libero._PARTS:
        (assets / part).mkdir(exist_ok=True)
    assert libero.prepare() == assets.resolve()
    assert sys.modules["libero.libero"]._assets_path_cache == str(assets.resolve())
    config = Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml"
    assert f"bddl_files: {package / 'bddl_files'}" in config.read_text()


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for part in (*libero._PARTS, "textures"):
        (tmp_path / "assets" / part).mkdir(parents=True)
    monkeypatch.setenv(libero.ASSETS, str(tmp_path / "assets"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", "before")
    return tmp_path / "assets"


def test_a_suite_is_50_starts_of_each_task_and_its_settings_reach_the_workers(package: Path) -> None:
    policy = SimpleNamespace(action_dim=7, chunk=5)
    for tasks, names in (([], NAMES["libero_10"]), (["1"], NAMES["libero_10"][1:])):
        place = suites.find("libero_10", tasks, render="osmesa", max_steps=3, num_steps_wait=0, image_size=None)
        assert (list(place.tasks), place.episodes, place.in_blocks) == (names, 50 * len(names), True)
        with mock.patch.object(suites, "WorkerEnv") as workers:
            workers.return_value.metadata = {"action_dim": 7}
            place.env(3, policy)
            with pytest.raises(ConfigError, match="4 numbers per action"):
                place.env(3, SimpleNamespace(action_dim=4, chunk=5))
        make, num = workers.call_args_list[0].args
        assert num == 3 and workers.call_args_list[0].kwargs == dict(render="osmesa", chunk=5)
        assert (make.func, make.args) == (LiberoTask, ("libero_10",))
        assert make.keywords == dict(tasks=names, max_steps=3, num_steps_wait=0)
    assert suites.find("lift").episodes == 50


def test_an_episode_begins_as_published(package: Path, assets: Path) -> None:
    env = LiberoTask("libero_10", image_size=8, num_steps_wait=3)
    seen = env.reset(0, 52, seed=7)
    built = sys.modules["libero.libero.envs"].BUILT
    name, scene = built[0]
    assert name == "LIVING_ROOM_SCENE2_put_both_in_the_basket.bddl" and env.num_trials == 50
    assert scene.log == ["seed 0", "reset", f"start {2 * 4 + 1}"] and scene.is_hard and env.max_steps == 520
    assert seen["task_description"] == "put both in the basket"
    # three steps of rest with an open gripper; pictures turned by 180 degrees
    assert seen["state"].tolist() == pytest.approx([0, 0, 0, 0, 0, numpy.pi, 0, -3])
    assert seen["full_image"][-1, -1, 0] == 255 and seen["full_image"].sum() == 3 * 255
    assert seen["wrist_image"].shape == (1, 8, 8, 3) and seen["wrist_image"][0, -1, -1, 0] == 51
    assert env.step(numpy.full(7, 0.6, dtype=numpy.float32))[1:] == (0.0, False)
    assert env.step(numpy.full(7, 0.6, dtype=numpy.float32))[1:] == (1.0, True)
    env.reset(0, 0, seed=8)
    assert scene.log[3:] == ["seed 0", "reset", "start 1"] and len(built) == 1
    env.reset(1, 0, seed=8)  # another task is another scene
    assert scene.log[-1] == "close" and len(built) == 2
    env.close()
    env.close()


def test_pictures_may_be_higher_than_wide(package: Path, assets: Path) -> None:
    env = LiberoTask("libero_10", height=12, width=8, num_steps_wait=0)
    seen = env.reset(0, 0, 0)
    assert seen["full_image"].shape == (12, 8, 3) and seen["wrist_image"].shape == (1, 12, 8, 3)
    env.close()


def test_a_fast_reset_compiles_no_scene_and_leaves_nothing_of_the_episode_before(package: Path, assets: Path) -> None:
    env = LiberoTask("libero_10", image_size=8, fast_reset=True, num_steps_wait=0, max_steps=9)
    env.reset(0, 0, 0)
    scene = sys.modules["libero.libero.envs"].BUILT[0][1]
    gripper = scene.robots[0].gripper
    gripper.current_action = numpy.ones(2)  # closed
    env.reset(0, 1, 0)
    assert gripper.current_action.tolist() == [0.0] and not scene.is_hard
    assert scene.log == ["seed 0", "reset", "start 1", "seed 0", "reset", "start 5"]
    assert env.max_steps == 9


def test_places_that_overlap_are_drawn_again_and_other_failures_are_raised(package: Path, assets: Path) -> None:
    env = LiberoTask("libero_10", image_size=8, num_steps_wait=0)
    env.reset(0, 0, 0)
    module = sys.modules["libero.libero.envs"]
    scene = module.BUILT[0][1]
    scene.env.fails = (module.RandomizationError(), module.RandomizationError())
    env.reset(0, 1, 0)
    assert scene.log[3:] == ["seed 0", "reset", "start 5"]
    scene.env.fails = (RuntimeError("no context of OpenGL"),)
    with pytest.raises(RuntimeError, match="no context"):
        env.reset(0, 1, 0)


def test_what_a_task_cannot_be_is_named(package: Path) -> None:
    assert [task.language for task in LiberoTask("libero_10", tasks=[1]).tasks] == ["pick up the book"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(num_steps_wait=-1), "num_steps_wait=-1"),
        (dict(tasks=[5]), "no task '5': its tasks are 0 to 1"),
        (dict(max_steps=0), "'max_steps': 0.* at least 1"),
        (dict(image_size=0), "'image_size': 0.* at least 1"),
    )
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            LiberoTask("libero_10", **options)
    with pytest.raises(DataError, match="call reset before step"):
        LiberoTask("libero_10").step(numpy.zeros(7, dtype=numpy.float32))


@pytest.mark.slow
def test_a_policy_is_evaluated_by_the_published_protocol(
    package: Path, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendering, "works", lambda render: ("osmesa", 1))
    torch.manual_seed(0)
    policy = ToyPolicy(action_dim=7, width=8)
    with torch.no_grad():  # forward at full speed: two steps to success
        policy.mlp[-1].bias.view(4, 2)[:, 0] = 9.0
    write_policy(tmp_path / "policy", policy, {})
    words = ["--suite", "libero_10", "--tasks", "1", "0", "--policy", str(tmp_path / "policy"), "--out", str(tmp_path)]
    words += ["--image_size", "8", "--workers", "1", "--max_steps", "3", "--num_steps_wait", "0"]

    def evaluated(*more: str) -> int:
        return evaluate_policy.command_line.main(evaluate_policy.parser, evaluate_policy.run, [*words, *more])

    assert evaluated("--episodes", "3", "--videos", "1") == 0
    printed = capsys.readouterr().out
    assert "STUDY_SCENE1_pick_up_the_book: 1.000" in printed and "of 3" in printed
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["renderer"] == "osmesa" and found["max_steps"] == 3 and found["success"]["episodes"] == 3
    assert found["videos"] == ["task=STUDY_SCENE1_pick_up_the_book_trial_0--success=true.mp4"]
    for more, message in (
        (["--tasks", "5"], "libero_10 has no task '5': its tasks are 0 to 1"),
        (["--tasks", "0", "0"], "names 0 twice"),
        (["--setting", "hard"], "--suite libero_10: --setting has no meaning here"),
        (["--world_model", "W"], "--world_model PATH --reward PATH go together in --suite libero_10"),
        (["--suite", "libero_01"], "Did you mean"),
    ):
        assert evaluated(*more) == 2
        assert message in capsys.readouterr().err


def test_a_picture_is_drawn_when_it_is_looked_at() -> None:
    drawn: list[str] = []

    def picture(camera: str) -> Any:
        return lambda: drawn.append(camera) or numpy.zeros((4, 6, 3), numpy.uint8)

    seen = Seen({"full_image": picture("agentview"), "wrist_image": picture("eye_in_hand")}, {"state": 5})
    assert list(seen) == ["full_image", "wrist_image", "state"] and len(seen) == 3
    assert seen["state"] == 5 and not drawn
    assert seen["wrist_image"].shape == (4, 6, 3) and drawn == ["eye_in_hand"]


def test_the_version_of_libero_is_recorded_by_whatever_name_its_wheel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"hf_libero": "0.1.4", "mujoco": "3.8.1", "torch": "2.13.0", None: "0"}
    installed = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in names.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    assert suites._versions() == {"hf-libero": "0.1.4", "mujoco": "3.8.1"}


def test_rotations_are_axis_times_angle() -> None:
    half = numpy.sqrt(0.5)
    assert axis_angle(numpy.array([half, 0, 0, half])) == pytest.approx([numpy.pi / 2, 0, 0])
    assert axis_angle(numpy.array([0, half, 0, -half])) == pytest.approx([0, 1.5 * numpy.pi, 0])  # no canonical sign
    given = numpy.array([0, 0, 0, 1.0000001])
    assert (axis_angle(given) == 0).all() and given[3] == 1.0000001


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps hf-libero"):
        libero.tasks_of("libero_10")
    _forget()


@pytest.mark.skipif(not PUBLISHED, reason=WITHOUT)
def test_all_published_tasks_are_read() -> None:
    tasks = libero.tasks_of("libero_all")
    sizes = [len(libero.tasks_of(name)) for name in libero.MAX_STEPS]
    assert len(tasks) == 130 and sizes == [10, 10, 10, 90, 10]
    assert all(task.bddl_file.is_file() and libero.initial_states(task).shape[0] == 50 for task in tasks)
    assert all(task.language[0].islower() and "SCENE" not in task.language for task in tasks)
    bowls = libero.tasks_of("libero_spatial")
    assert bowls[3].language == "pick up the black bowl on the cookie box and place it on the plate"
    baskets = libero.tasks_of("libero_10")
    assert baskets[1].language == "put both the cream cheese box and the butter in the basket"


BOX = """<mujoco model="{name}"><asset/><worldbody><body><body name="object">
<geom name="seen" type="box" size="{size}" rgba="{color} 1" group="1" contype="0" conaffinity="0" density="0"/>
<geom name="felt" type="box" size="{size}" group="0" density="100"/>{inside}</body>
<site name="bottom_site" pos="0 0 -.03" size=".005" rgba="0 0 0 0"/>
<site name="top_site" pos="0 0 .03" size=".005" rgba="0 0 0 0"/>
<site name="horizontal_radius_site" pos=".02 .02 0" size=".005" rgba="0 0 0 0"/></body></worldbody></mujoco>"""
INSIDE = '<site name="contain_region" type="box" pos="0 0 .04" quat="1 0 0 0" size=".05 .05 .03" rgba="0 0 0 0"/>'
FLOOR = """<mujoco model="floor"><asset>
<texture type="2d" file="../textures/x.png" name="texplane"/><material name="floorplane" texture="texplane"/>
<texture type="2d" file="../textures/x.png" name="tex-wall"/></asset><worldbody>
<light pos="0 0 3" dir="0 0 -1" directional="true"/>
<body name="floor"><geom name="floor" type="plane" size="3 3 .1" material="floorplane" group="1"/></body>
<camera mode="fixed" name="frontview" pos="1.6 0 1.4" quat=".56 .43 .43 .56"/></worldbody></mujoco>"""
PLACEHOLDERS = (
    *("milk", "cream_cheese", "tomato_sauce", "butter", "orange_juice", "chocolate_pudding"),
    *("alphabet_soup", "salad_dressing", "bbq_sauce", "ketchup"),
)
HAS_MUJOCO = PUBLISHED and importlib.util.find_spec("robosuite") is not None


def _boxes(assets: Path) -> None:
    from PIL import Image

    for name in ("light-gray-floor-tile", "light-gray-plaster"):
        Image.new("RGB", (8, 8), (200, 200, 190)).save(assets / "textures" / f"{name}.png")
    (assets / "scenes" / "libero_floor_base_style.xml").write_text(FLOOR)
    things = {
        f"stable_hope_objects/{name}": (".02 .02 .03", f"{i / 10} .5 .5", "") for i, name in enumerate(PLACEHOLDERS)
    }
    things["stable_scanned_objects/basket"] = (".06 .06 .01", ".6 .4 .2", INSIDE)
    for place, (size, color, inside) in things.items():
        folder = assets / place
        folder.mkdir()
        text = BOX.format(name=folder.name, size=size, color=color, inside=inside)
        (folder / f"{folder.name}.xml").write_text(text)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MUJOCO, reason=WITHOUT + " with robosuite (pip install -e '.[vla]')")
def test_a_published_task_is_played(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv

    _boxes(assets)
    env = WorkerEnv(partial(LiberoTask, "libero_object", image_size=32), num_envs=1, render="auto", chunk=10)
    names = [task.name for task in libero.tasks_of("libero_object")]
    task = names.index("pick_up_the_milk_and_place_it_in_the_basket")
    actions = torch.rand(2, 10, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def played(trial: int) -> list[Any]:
        seen, _ = env.reset(options={"env_ids": [0], "task_ids": [task], "trial_ids": [trial]})
        assert seen["task_description"] == ["pick up the milk and place it in the basket"]
        for chunk in actions:
            seen, reward, terminated, *_ = env.chunk_step(chunk[None])
            assert not reward.any() and not terminated.any()
        return [seen["full_image"], seen["state"]]

    first, again, other = played(0), played(0), played(1)
    env.close()
    make = partial(LiberoTask, "libero_object", image_size=32, fast_reset=True, max_steps=25)
    env = WorkerEnv(make, num_envs=1, render="auto", chunk=10)
    fast = [played(trial) for trial in (1, 0)][1]
    env.close()
    assert torch.equal(first[0], fast[0]) and torch.equal(first[1], fast[1])
    assert first[0].float().std() > 10  # there is something on the picture
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MUJOCO, reason=WITHOUT + " with robosuite (pip install -e '.[vla]')")
def test_two_published_tasks_are_evaluated(assets: Path, tmp_path: Path) -> None:
    _boxes(assets)
    torch.manual_seed(0)
    write_policy(tmp_path / "policy", ToyPolicy(action_dim=7, width=8), {})
    words = ["--suite", "libero_object", "--tasks", "0", "1", "--episodes", "2", "--policy", str(tmp_path / "policy")]
    words += ["--image_size", "32", "--workers", "1", "--max_steps", "12", "--out", str(tmp_path)]
    assert evaluate_policy.command_line.main(evaluate_policy.parser, evaluate_policy.run, words) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    names = [task.name for task in libero.tasks_of("libero_object")[:2]]
    assert list(found["tasks"]) == names and [found["tasks"][name]["episodes"] for name in names] == [1, 1]
    assert found["packages"]["mujoco"] and found["packages"]["hf-libero"] and found["renderer"] in ("egl", "osmesa")
