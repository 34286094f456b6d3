# SPDX-License-Identifier: Apache-2.0
"""The part of OmniGibson 3.7.2 that BEHAVIOR's environment calls, with a robot that is a few numbers.

Faithful where it matters: one simulator whose scenes all move, with or without an action, and are set back by a stop;
pictures RGBA and three renders late; measurements of the real length and order; nested observations; objects that jump
when their state is loaded, until they are kept still; Ctrl-C taken on import.
"""

import csv
import json
import signal
import sys
from collections import deque
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

LATE = 4  # renders until a picture is of the present
GOAL = 0.022  # metres that the robot has to drive
CAMERAS = {
    "left_wrist": "robot_r1::robot_r1:left_realsense_link:Camera:0",
    "right_wrist": "robot_r1::robot_r1:right_realsense_link:Camera:0",
    "head": "robot_r1::robot_r1:zed_link:Camera:0",
}
_SIZES = dict(
    **dict(joint_qpos=28, joint_qpos_sin=28, joint_qpos_cos=28, joint_qvel=28, joint_qeffort=28, robot=18),
    **dict(arm_left_qpos=7, arm_left_other=28, gripper_left_qpos=2, gripper_left_qvel=2),
    **dict(arm_right_qpos=7, arm_right_other=28, gripper_right_qpos=2, gripper_right_qvel=2),
    **dict(trunk_qpos=4, trunk_qvel=4, base=9, base_qvel=3),
)
_ENDS = torch.tensor(list(_SIZES.values())).cumsum(0).tolist()
SLICES = {name: slice(end - size, end) for (name, size), end in zip(_SIZES.items(), _ENDS)}
ACTIONS = dict(base=3, torso=4, left_arm=7, left_gripper=1, right_arm=7, right_gripper=1)
RANGES = {name: (torch.full((size,), -0.5 - size), torch.full((size,), 0.25 + size)) for name, size in ACTIONS.items()}
TASKS = {"turning_on_radio": "Turn on the radio.", "picking_up_trash": "Put the cans into the bin.", "unknown": "?"}
INSTANCES = {0: range(301, 321), 1: range(401, 412), 2: range(5)}
LENGTHS = {0: [3, 5], 1: [2, 4]}  # of humans; nobody has done the third


class Simulator:
    """``log`` has what it was asked, in order."""

    def __init__(self) -> None:
        self.scenes: list[Scene] = []
        self.is_playing, self.log = False, list[str]()

    def is_stopped(self) -> bool:
        return not self.is_playing

    def play(self) -> None:
        self.is_playing = True
        self.log.append("play")

    def stop(self) -> None:
        self.is_playing = False
        self.log.append("stop")
        for scene in self.scenes:
            scene.values = torch.zeros_like(scene.values)

    def step_physics(self) -> None:
        assert self.is_playing
        self.log.append("physics")
        for scene in self.scenes:
            scene.move()

    def step(self) -> None:
        self.step_physics()
        self.render()

    def render(self) -> None:
        self.log.append("render")
        for scene in self.scenes:
            scene.shown.append(scene.values.clone())


class Scene:
    """``values``: position (1), targets of the joints (23), joints (23), an object's place and speed, the goal."""

    def __init__(self) -> None:
        self.values = torch.zeros(50)
        self.file = self.values.clone()
        self.shown: deque[Tensor] = deque([self.values] * LATE, maxlen=LATE)
        self.metadata: dict[str, Any] = {}

    def move(self) -> None:
        position, targets, joints, thing, _ = self.values.split([1, 23, 23, 2, 1])
        position += targets[0] / 30
        joints += 0.3 * (targets - joints)
        thing[0] += thing[1]

    def dump_state(self, serialized: bool) -> Tensor:
        assert serialized
        return self.values  # a view, as a careless simulator gives it

    def load_state(self, state: Tensor, serialized: bool) -> None:
        assert serialized and state.shape == self.values.shape
        self.values = state.clone()

    def update_initial_file(self) -> None:
        self.file = self.values.clone()

    def reset(self) -> None:
        self.values = self.file.clone()

    def write_task_metadata(self, key: str, data: Any) -> None:
        self.metadata[key] = data


class Robot:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        names = [name.split("::")[1] for name in CAMERAS.values()]
        self.sensors = {name: SimpleNamespace(image_height=128, image_width=128) for name in names}

    def set_position_orientation(self, position: Tensor, orientation: Tensor) -> None:
        assert isinstance(position, Tensor) and isinstance(orientation, Tensor)
        self.scene.values[0] = position[0]
        self.scene.values[49] = position[0] + GOAL


class Thing:
    is_system, exists = False, True

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def load_state(self, state: Any, serialized: bool) -> None:
        assert not serialized
        self.scene.values[47] = state["root_link"]["pos"][0]
        self.scene.values[48] = 0.125  # it jumps

    def keep_still(self) -> None:
        self.scene.values[48] = 0


class Environment:
    def __init__(self, og: Any, configs: dict[str, Any], in_vec_env: bool) -> None:
        if og.sim is None:
            og.launch()
        assert in_vec_env and og.sim.is_stopped(), "the simulator must be stopped"
        self.og, self.config, self.scene = og, configs, Scene()
        og.sim.scenes.append(self.scene)
        self.robots = [Robot(self.scene)]
        missing = SimpleNamespace(is_system=False, exists=False)
        water = SimpleNamespace(is_system=True, exists=True)
        self.task = SimpleNamespace(
            scene_name=configs["scene"]["scene_model"],
            activity_name=configs["task"]["activity_name"],
            activity_definition_id=0,
            get_cached_activity_scene_filename=_file_name,
            object_scope={"radio.n.01_1": Thing(self.scene), "water.n.06_1": water, "knob.n.01_1": missing},
        )
        self.count, self.spaces = 0, 0

    def post_play_load(self) -> None:
        assert self.og.sim.is_playing
        self.scene.update_initial_file()
        self.og.sim.step()  # of `reset`

    def load_observation_space(self) -> None:
        self.spaces += 1

    def _pre_step(self, action: Tensor) -> None:
        assert action.shape == (23,)
        self.scene.values[1:24] = action

    def _post_step(self, action: Tensor) -> tuple[Any, ...]:
        self.count += 1
        left = float(self.scene.values[49] - self.scene.values[0])
        limit = self.config["task"]["termination_config"]["max_steps"]
        conditions = {"timeout": {"done": self.count >= limit}, "predicate": {"done": left <= 0}}
        done = {"success": left <= 0, "termination_conditions": conditions}
        ends = [condition["done"] for condition in conditions.values()]
        return self.get_obs()[0], torch.tensor(-left), ends[1], ends[0], {"done": done}

    def get_obs(self) -> tuple[Any, Any]:
        cameras = self.robots[0].sensors
        seen: dict[str, Any] = {name: {"rgb": self._picture(name, camera)} for name, camera in cameras.items()}
        joints, own = self.scene.values[24:47], torch.full((256,), float("nan"))
        parts = dict(zip(ACTIONS, joints.split(list(ACTIONS.values()))))
        for name, part in dict(base_qvel="base", trunk_qpos="torso").items():
            own[SLICES[name]] = parts[part]
        for side in ("left", "right"):
            own[SLICES[f"arm_{side}_qpos"]] = parts[f"{side}_arm"]
            own[SLICES[f"gripper_{side}_qpos"]] = parts[f"{side}_gripper"] / 2
        return {"robot_r1": {**seen, "proprio": own}}, {"robot_r1": {}}

    def _picture(self, name: str, camera: Any) -> Tensor:
        value = 100 + 20 * list(self.robots[0].sensors).index(name)
        picture = torch.full((camera.image_height, camera.image_width, 4), value, dtype=torch.uint8)
        picture[..., 3] = 255
        picture[0, 0, 0] = int(self.scene.shown[0][0] * 100) % 256
        return picture


def _file_name(scene_model: str, activity_name: str, activity_definition_id: int, activity_instance_id: int) -> str:
    return f"{scene_model}_task_{activity_name}_{activity_definition_id}_{activity_instance_id}_template"


def install(monkeypatch: pytest.MonkeyPatch, data: Path) -> Any:
    """Let it be imported, with its data in ``data``; gives the module ``omnigibson``."""
    _write(data)
    og, constants = _module(monkeypatch, "omnigibson"), _module(monkeypatch, "omnigibson.learning.utils.eval_utils")
    og.sim = None

    def launch() -> None:
        og.sim = Simulator()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    og.launch = og.clear = launch
    og.Environment = lambda configs, in_vec_env: Environment(og, configs, in_vec_env)
    og.macros = _module(monkeypatch, "omnigibson.macros", gm=SimpleNamespace(DATA_PATH=str(data)))
    constants.PROPRIOCEPTION_INDICES, constants.JOINT_RANGE = {"R1Pro": SLICES}, {"R1Pro": RANGES}
    constants.ACTION_QPOS_INDICES, constants.ROBOT_CAMERA_NAMES = {"R1Pro": ACTIONS}, {"R1Pro": CAMERAS}
    constants.HEAD_RESOLUTION, constants.WRIST_RESOLUTION = (720, 720), (480, 480)
    constants.generate_basic_environment_config = lambda task_name, task_cfg: {
        "scene": {"scene_model": task_cfg["scene_model"]},
        "task": {"activity_name": task_name, "termination_config": {"max_steps": 5000}},
    }
    _module(monkeypatch, "omnigibson.utils.asset_utils", get_task_instance_path=lambda scene: str(data / scene))
    _module(monkeypatch, "omnigibson.utils.python_utils", recursively_convert_to_torch=_converted)
    _module(
        monkeypatch,
        "gello.robots.sim_robot.og_teleop_utils",
        load_available_tasks=lambda: {name: [{"scene_model": "house"}] for name in TASKS},
        generate_robot_config=lambda task_name, task_cfg: {"name": "robot_r1"},
    )
    return og


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def _converted(value: Any) -> Any:
    convert: Callable[[Any], Any] = _converted
    if isinstance(value, dict):
        return {key: convert(one) for key, one in value.items()}
    if isinstance(value, list) and isinstance(value[0], (int, float)):
        return torch.tensor(value)
    return [convert(one) for one in value] if isinstance(value, list) else value


def _write(data: Path) -> None:
    metadata = data / "2025-challenge-task-instances" / "metadata"
    metadata.mkdir(parents=True)
    episodes = [(1e4 * task + 10 * i, length) for task, of_task in LENGTHS.items() for i, length in enumerate(of_task)]
    lines = [json.dumps({"episode_index": int(number), "length": length}) for number, length in episodes]
    (metadata / "episodes.jsonl").write_text("\n".join(lines))
    with open(metadata / "test_instances.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["task", "name", "instances"]]
            + [[i, name, ",".join(map(str, INSTANCES[i]))] for i, name in enumerate(TASKS)]
        )
    table = data / "2025-challenge-demos" / "meta" / "tasks.jsonl"
    table.parent.mkdir(parents=True)
    rows = [dict(task_index=i, task_name=name, task=text) for i, (name, text) in enumerate(TASKS.items())]
    table.write_text("\n".join(json.dumps(row) for row in reversed(rows)) + "\n")
    for i, name in enumerate(TASKS):
        folder = data / "house" / "json" / f"house_task_{name}_instances"
        folder.mkdir(parents=True)
        for instance in INSTANCES[i]:
            poses = {"R1Pro": [{"position": [instance / 100, 0.0, 0.0], "orientation": [0.0, 0.0, 0.0, 1.0]}]}
            state = {"robot_poses": poses, "radio.n.01_1": {"root_link": {"pos": [float(instance), 0.0, 0.0]}}}
            (folder / f"house_task_{name}_0_{instance}_template-tro_state.json").write_text(json.dumps(state))
