# SPDX-License-Identifier: Apache-2.0
"""OmniGibson 3.7.2 (Isaac Sim) as `BehaviorEnv` uses it: tasks of the BEHAVIOR challenge of 2025, and all its calls.

The simulator is one to a process, and lives in the main one: Isaac Sim can neither be forked nor run in a spawned
worker. All of its scenes move together, also those that no action is meant for.
"""

import csv
import functools
import importlib
import importlib.util
import multiprocessing
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.envs.scoring import Bounds
from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, near, raised_as

NUM_TASKS, TRIALS = 50, 10  # and the starts of each that the challenge evaluates
INSTANCES, DEMONSTRATIONS = "2025-challenge-task-instances", "2025-challenge-demos"
EPISODES_OF_A_TASK = 10_000  # an episode's number is its task's times this, and more
UNKNOWN_LENGTH = 2000  # of a human's episode
_TABLE = f"{DEMONSTRATIONS}/meta/tasks.jsonl"
ROBOT = "R1Pro"
SETTLING_STEPS = 25  # of physics, while objects are kept still: loading a state makes small ones jump
RENDERS = 4  # until a picture shows the present: rendering is asynchronous
HEAD_APERTURE = 40.0  # mm, of the robot that recorded the demonstrations
_EVALUATION = "omnigibson.learning.utils.eval_utils"
_FLAGS = {
    "HEADLESS": True,
    "ENABLE_OBJECT_STATES": True,
    "ENABLE_FLATCACHE": True,
    "USE_GPU_DYNAMICS": False,
    "ENABLE_TRANSITION_RULES": True,
}
INSTALL = (
    "  git clone -b v3.7.2 https://github.com/StanfordVL/BEHAVIOR-1K.git && cd BEHAVIOR-1K\n"
    "  ./setup.sh --omnigibson --bddl --joylo --dataset --confirm-no-conda\n"
    "It needs an NVIDIA GPU with RT cores (L20, L40, RTX), which A100 and H100 do not have."
)
Size = tuple[int, int] | None


@dataclass(frozen=True)
class BehaviorTask:
    """``instances`` are the numbers of its recorded starts; ``max_steps`` twice what humans took on average."""

    index: int
    name: str
    language: str
    instances: tuple[int, ...]
    max_steps: int


@functools.cache
def simulator() -> "OmniGibson":
    """The one of this process."""
    return OmniGibson()


class OmniGibson:
    """Scenes with a robot each. ``owner`` is whose episodes they show."""

    def __init__(self) -> None:
        if multiprocessing.parent_process() is not None:
            raise ConfigError(
                "BEHAVIOR-1K runs in the main process of a rank, not in a worker: Isaac Sim starts in no other. Name"
                " BehaviorEnv itself as the environment."
            )
        if importlib.util.find_spec("omnigibson") is None:
            raise ConfigError(f"OmniGibson is not installed. From a folder of your choice:\n{INSTALL}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os.environ.setdefault("OMNIGIBSON_GPU_ID", os.environ.get("LOCAL_RANK", "0"))
        with _keeping_interrupts():
            self._og: Any = importlib.import_module("omnigibson")
            globals_ = importlib.import_module("omnigibson.macros").gm
            self._evaluation: Any = importlib.import_module(_EVALUATION)
            self._teleoperation: Any = importlib.import_module("gello.robots.sim_robot.og_teleop_utils")
        for name, value in _FLAGS.items():
            setattr(globals_, name, value)
        self.data = Path(globals_.DATA_PATH)
        self.owner: object = None
        self._tasks: tuple[BehaviorTask, ...] = ()  # of the scenes
        self._envs: list[Any] = []

    # --- what it has

    @property
    def bounds(self) -> Bounds:
        """The bounds of an action: velocities of the base, joints of trunk and arms in radians, grippers in [-1, 1]."""
        ranges = self._evaluation.JOINT_RANGE[ROBOT]
        parts = [ranges[name] for name in self._evaluation.ACTION_QPOS_INDICES[ROBOT]]
        low, high = ([float(value) for part in parts for value in part[end]] for end in (0, 1))
        return low, high

    @property
    def slices(self) -> Mapping[str, slice]:
        """The place of each quantity in the robot's own measurements."""
        return self._evaluation.PROPRIOCEPTION_INDICES[ROBOT]

    # --- episodes

    def load(self, tasks: Sequence[BehaviorTask]) -> None:
        """One scene for each of the tasks. Other ones than before are built anew, all of them: minutes."""
        if tuple(tasks) == self._tasks:
            return
        og = self._og
        self._tasks, self._envs = (), []
        with _keeping_interrupts():
            if og.sim is not None:
                og.sim.stop()
                og.clear()
            self._envs = [og.Environment(configs=self._config(task), in_vec_env=True) for task in tasks]
        og.sim.play()
        for env in self._envs:
            env.post_play_load()
        self._tasks = tuple(tasks)

    def begin(self, instances: Mapping[int, int], size: Size) -> None:
        """Set these scenes to recorded starts; pictures have this size, or the published ones."""
        og = self._og
        og.sim.stop()
        og.sim.play()
        for env in self._envs:
            self._set_cameras(env, size)
        for i in instances:
            self._envs[i].post_play_load()  # which moves all scenes
        for i, instance in instances.items():
            self._place(self._envs[i], self._recorded_start(i, instance))
        for _ in range(SETTLING_STEPS):
            og.sim.step_physics()
            for i in instances:
                for entity in self._envs[i].task.object_scope.values():
                    if not entity.is_system and entity.exists:
                        entity.keep_still()
        for i in instances:
            self._envs[i].scene.update_initial_file()
            self._envs[i].scene.reset()
        self.render(RENDERS)

    def step(self, actions: Mapping[int, Tensor], renders: int) -> dict[int, tuple[Any, float, bool]]:
        """Observation, OmniGibson's own reward and success of each scene that has an action."""
        for i, action in actions.items():
            self._envs[i]._pre_step(action)
        self._og.sim.step()
        self.render(renders - 1)
        found = {}
        for i, action in actions.items():
            raw, reward, _, _, info = self._envs[i]._post_step(action)
            found[i] = raw, float(reward), bool(info["done"]["success"])
        return found

    def render(self, times: int) -> None:
        for _ in range(times):
            self._og.sim.render()

    def observe(self, i: int) -> Any:
        return self._envs[i].get_obs()[0]

    # --- states

    def save(self, i: int) -> Tensor:
        return torch.as_tensor(self._envs[i].scene.dump_state(serialized=True)).cpu().clone()

    def restore(self, states: Mapping[int, Tensor]) -> None:
        for i, state in states.items():
            self._envs[i].scene.load_state(state, serialized=True)
        self.render(RENDERS)

    def stop(self) -> None:
        self.owner = None
        if self._og.sim is not None and not self._og.sim.is_stopped():
            self._og.sim.stop()

    # --- parts of a start

    def _config(self, task: BehaviorTask) -> dict[str, Any]:
        """The config of an environment, as the challenge's evaluation has it."""
        available = self._teleoperation.load_available_tasks()
        if task.name not in available:
            raise DataError(f"joylo/sampled_task/available_tasks.yaml of BEHAVIOR-1K has no {task.name}:\n{INSTALL}")
        about = dict(task_name=task.name, task_cfg=available[task.name][0])
        config: dict[str, Any] = self._evaluation.generate_basic_environment_config(**about)
        robot = self._teleoperation.generate_robot_config(**about)
        robot |= {"obs_modalities": ["proprio", "rgb"], "proprio_obs": list(self.slices)}
        config["robots"] = [robot]
        config["task"]["termination_config"]["max_steps"] = task.max_steps
        config["task"]["include_obs"] = False
        return config

    def _set_cameras(self, env: Any, size: Size) -> None:
        constants = self._evaluation
        for part, name in constants.ROBOT_CAMERA_NAMES[ROBOT].items():
            camera = env.robots[0].sensors[name.split("::")[1]]
            published = constants.HEAD_RESOLUTION if part == "head" else constants.WRIST_RESOLUTION
            if part == "head":
                camera.horizontal_aperture = HEAD_APERTURE
            camera.image_height, camera.image_width = size or published
        env.load_observation_space()  # which has their sizes

    def _recorded_start(self, i: int, instance: int) -> Mapping[str, Any]:
        """States of the objects that the task is about, and where the robot stands."""
        task = self._envs[i].task
        scene, activity = task.scene_name, task.activity_name
        file = task.get_cached_activity_scene_filename(
            scene_model=scene,
            activity_name=activity,
            activity_definition_id=task.activity_definition_id,
            activity_instance_id=instance,
        )
        folder = importlib.import_module("omnigibson.utils.asset_utils").get_task_instance_path(scene)
        path = Path(folder) / "json" / f"{scene}_task_{activity}_instances" / f"{file}-tro_state.json"
        with raised_as(DataError, f"Start {instance} of {activity} cannot be read", OSError, ValueError):
            content = foreign_json.load(path)
        return importlib.import_module("omnigibson.utils.python_utils").recursively_convert_to_torch(content)

    def _place(self, env: Any, start: Mapping[str, Any]) -> None:
        for name, state in start.items():
            if name == "robot_poses":
                pose = state[ROBOT][0]
                env.robots[0].set_position_orientation(pose["position"], pose["orientation"])
                env.scene.write_task_metadata(key=name, data=state)
            else:
                env.task.object_scope[name].load_state(state, serialized=False)


@contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Inside, OmniGibson takes Ctrl-C for itself, and would shut down without a checkpoint; then it is ours again."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


# --- the challenge's tasks: sentences, starts, lengths


def read_tasks(data: Path, names: Sequence[str] | None = None, table: str = "") -> tuple[BehaviorTask, ...]:
    """The tasks of these names, or all in the order of their numbers.

    ``table`` is a file of lines with task_index, task_name and task, the sentence: by default that of the
    demonstrations.
    """
    lines = _lines(Path(table) if table else data / _TABLE, data, ("task_index", "task_name", "task"))
    rows = sorted(lines, key=lambda row: int(row["task_index"]))
    lengths, starts = _lengths(data), _starts(data)
    tasks = {}
    for row in rows:
        index = int(row["task_index"])
        steps = int(2 * fmean(lengths.get(index) or [UNKNOWN_LENGTH]))
        tasks[row["task_name"]] = BehaviorTask(index, row["task_name"], row["task"], starts.get(index, ()), steps)
    for name in names or ():
        if name not in tasks:
            raise ConfigError(f"BEHAVIOR has no task '{name}'.{near(name, tasks)}")
    chosen = tuple(tasks[name] for name in names) if names else tuple(tasks.values())
    if without := [task.name for task in chosen if not task.instances]:
        raise DataError(f"{data / INSTANCES}/metadata/test_instances.csv has no starts of {', '.join(without)}.")
    return chosen


def _lengths(data: Path) -> Mapping[int, list[int]]:
    """Steps that humans took, by task."""
    found = defaultdict(list)
    for row in _lines(data / INSTANCES / "metadata" / "episodes.jsonl", data, ("episode_index", "length")):
        found[int(row["episode_index"]) // EPISODES_OF_A_TASK].append(int(row["length"]))
    return found


def _starts(data: Path) -> Mapping[int, tuple[int, ...]]:
    """The numbers of the published starts for evaluations, by task: the third column."""
    path = data / INSTANCES / "metadata" / "test_instances.csv"
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1:]
        return {int(row[0]): tuple(int(number) for number in row[2].split(",")) for row in rows if row}
    except (OSError, ValueError, IndexError) as error:
        raise _missing(path, data, error) from error


def _lines(path: Path, data: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    try:
        rows = [foreign_json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [{key: row[key] for key in keys} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _missing(path, data, error) from error


def _missing(path: Path, data: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is missing or damaged ({error}). The data of BEHAVIOR's tasks are fetched by\n"
        f"  hf download behavior-1k/{INSTANCES} --repo-type dataset --local-dir {data / INSTANCES}\n"
        f"  hf download behavior-1k/{DEMONSTRATIONS} meta/tasks.jsonl --repo-type dataset --local-dir"
        f" {data / DEMONSTRATIONS}"
    )
