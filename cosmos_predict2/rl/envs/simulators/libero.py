# SPDX-License-Identifier: Apache-2.0
"""LIBERO's tasks as environments, each in a process of its own, and its suites, read without importing its package.

    task = tasks_of("libero_10")[3]
    task.language, initial_states(task)[0]      # a sentence, MuJoCo's state of the first start

Importing LIBERO asks a question on the terminal the first time, and fetches 150 MB of assets when a scene is built.
`prepare` answers the first and sees to the second.
"""

import ast
import importlib
import importlib.util
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import yaml
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import ROBOSUITE_CAMERAS, Floats, robosuite_state
from imaginaire.errors import ConfigError, DataError, near

# steps of an episode: by the published evaluations; reinforcement learning has 512 throughout
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_90": 400, "libero_10": 520}
ALL = "libero_all"
TRIALS = 50  # starts of a task
SUITES = (*MAX_STEPS, ALL)
ASSETS = "LIBERO_ASSETS"  # the environment variable that names their folder
INSTALL = "pip install --no-deps hf-libero==0.1.4 (what it needs: pip install -e '.[vla]')"
_PARTS = ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects", "scenes")
_SCENE = re.compile(r"^[A-Z_]*SCENE\d+_")
ACTION_DIM = 7  # position, rotation, gripper (-1 open)
CONTROL_HZ = 20
NO_OP = (0.0,) * 6 + (-1.0,)
RESET_CHUNKS = 6  # 3 of eight actions, drawn in software, at another start of a task, 8 to 14 at another task
PLACEMENT_SEED = 0  # of what LIBERO draws when a scene is built: published results have it constant


@dataclass(frozen=True)
class BddlTask:
    """``language`` is the instruction of policies; the sentence in the BDDL file reads differently."""

    name: str
    language: str
    bddl_file: Path
    init_file: Path


class LiberoTask:
    """A suite's tasks, or the ``tasks`` of these numbers or names, as the published evaluations play them.

    Each episode begins with ``num_steps_wait`` steps in which the scene comes to rest (reinforcement learning in
    Cosmos-RL and RLinf has 15). ``max_steps`` are null those of the suite. Pictures are turned by 180 degrees, as those
    of the training data are. ``fast_reset`` keeps the compiled scene between the episodes of a task, 0.3 s in place of
    1.5 s; published results have it compiled anew. What an environment draws does not matter here.
    """

    def __init__(
        self,
        suite: str = "libero_spatial",
        tasks: Sequence[int | str] | None = None,
        image_size: int = 256,
        height: int | None = None,
        width: int | None = None,
        num_steps_wait: int = 10,
        max_steps: int | None = None,
        fast_reset: bool = False,
        render_gpu: int = -1,
    ) -> None:
        if num_steps_wait < 0:
            raise ConfigError(f"num_steps_wait={num_steps_wait} must be at least 0.")
        sizes = dict(image_size=image_size, height=height, width=width, max_steps=max_steps)
        if wrong := {name: number for name, number in sizes.items() if number is not None and number < 1}:
            raise ConfigError(f"{wrong} must be at least 1.")
        self.tasks = chosen_tasks(suite, [str(task) for task in tasks or ()])
        self.num_tasks, self.num_trials, self.action_dim = len(self.tasks), TRIALS, ACTION_DIM
        self.max_steps = max_steps or MAX_STEPS.get(suite, max(MAX_STEPS.values()))
        self.metadata = {
            "suite": suite,
            "control_hz": CONTROL_HZ,
            "reset_chunks": RESET_CHUNKS,
            "tasks": [task.language for task in self.tasks],
        }
        self.num_steps_wait, self.fast_reset = num_steps_wait, fast_reset
        self._sizes = dict(
            camera_heights=height or image_size, camera_widths=width or image_size, render_gpu_device_id=render_gpu
        )
        self._env: Any = None
        self._task: BddlTask | None = None
        self._states: Any = None

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        task = self.tasks[task_id % self.num_tasks]
        if task != self._task:
            self._build(task)
        self._env.seed(PLACEMENT_SEED)
        self._lay_out()
        raw = self._env.set_init_state(self._states[trial_id % len(self._states)])
        for _ in range(self.num_steps_wait):
            raw, *_ = self._env.step(list(NO_OP))
        return self._observed(raw)

    def step(self, action: Floats) -> tuple[dict[str, Any], float, bool]:
        if self._env is None:
            raise DataError("No episode of LIBERO has begun: call reset before step.")
        raw, reward, is_done, _ = self._env.step(action)
        return self._observed(raw), float(reward), bool(is_done)

    def close(self) -> None:
        env, self._env, self._task = self._env, None, None
        if env is not None:
            env.close()

    def _build(self, task: BddlTask) -> None:
        """The scene of a task: five to nine seconds."""
        self.close()
        prepare()
        states = initial_states(task)
        module = importlib.import_module("libero.libero.envs")
        self._env = module.OffScreenRenderEnv(
            bddl_file_name=str(task.bddl_file),
            ignore_done=True,  # of robosuite's own horizon: the steps are counted elsewhere
            hard_reset=not self.fast_reset,
            **self._sizes,
        )
        self._task, self._states = task, states

    def _lay_out(self) -> None:
        """A reset of the scene. LIBERO's own goes on for ever where it fails."""
        gripper = self._env.robots[0].gripper
        gripper.current_action = numpy.zeros(gripper.dof)  # which robosuite keeps where it does not compile anew
        while True:
            try:
                self._env.env.reset()
                return
            except Exception as error:  # of places that overlap, which are drawn again
                if type(error).__name__ != "RandomizationError":
                    raise

    def _observed(self, raw: Any) -> dict[str, Any]:
        scene, hand = (numpy.ascontiguousarray(raw[f"{name}_image"][::-1, ::-1]) for name in ROBOSUITE_CAMERAS)
        assert self._task is not None
        return {
            "full_image": scene,
            "wrist_image": hand[None],
            "state": robosuite_state(raw),
            "task_description": self._task.language,
        }


# --- suites


@cache
def tasks_of(suite: str) -> tuple[BddlTask, ...]:
    """The tasks of a suite in the published order; ``libero_all`` has those of all, each once."""
    if suite not in SUITES:
        raise ConfigError(f"LIBERO has no suite '{suite}'.{near(suite, SUITES)}")
    if suite == ALL:
        tasks: dict[str, BddlTask] = {}
        for task in (task for part in MAX_STEPS for task in tasks_of(part)):
            tasks.setdefault(task.name, task)
        return tuple(tasks.values())
    names = _task_names().get(suite)
    if not names:
        raise DataError(f"{package()} knows no tasks of {suite}: reinstall LIBERO, {INSTALL}.")
    return tuple(_task(suite, name) for name in names)


def chosen_tasks(name: str, wanted: Sequence[str] = ()) -> tuple[BddlTask, ...]:
    """The tasks of a suite, or those of these numbers or names."""
    tasks = tasks_of(name)
    places = {task.name: task for task in tasks} | {str(i): task for i, task in enumerate(tasks)}
    if unknown := [each for each in wanted if each not in places]:
        raise ConfigError(
            f"{name} has no task '{unknown[0]}': its tasks are 0 to {len(tasks) - 1}."
            f"{near(unknown[0], [task.name for task in tasks], 3)}"
        )
    return tuple(places[each] for each in wanted) or tasks


@cache
def _task_names() -> dict[str, list[str]]:
    """The names of each suite, in order: a table in a file of Python, which is read and not run."""
    path = package() / "benchmark" / "libero_suite_task_map.py"
    try:
        (table,) = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
        found: dict[str, list[str]] = ast.literal_eval(table.value)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} holds no table of tasks ({error}): reinstall LIBERO, {INSTALL}.") from error
    return found


def _task(suite_name: str, name: str) -> BddlTask:
    root = package()
    return BddlTask(
        name=name,
        language=_SCENE.sub("", name).replace("_", " "),
        bddl_file=root / "bddl_files" / suite_name / f"{name}.bddl",
        init_file=root / "init_files" / suite_name / f"{name}.pruned_init",
    )


def initial_states(task: BddlTask) -> NDArray[numpy.float64]:
    """MuJoCo's state (time, qpos, qvel) at each start [50, n]; n differs between tasks."""
    # This brings torch, which a worker that reads nothing does without.
    from imaginaire.checkpoint.plain_pickle import FAULTS, Refused, read_arrays

    try:
        with zipfile.ZipFile(task.init_file) as file:
            (inside,) = (name for name in file.namelist() if name.endswith("data.pkl"))
            states = read_arrays(file.read(inside))
    except (*FAULTS, TypeError, LookupError, RecursionError, Refused) as error:
        raise DataError(f"{task.init_file} holds no starts of LIBERO, or is damaged: {error}") from error
    if not isinstance(states, numpy.ndarray) or states.ndim != 2 or states.dtype.kind != "f":
        raise DataError(f"{task.init_file} holds no table of numbers, which the starts of a task are.")
    return states.astype(numpy.float64)


# --- the package and its assets


@cache
def package() -> Path:
    """The folder of the installed LIBERO, with bddl_files and init_files."""
    spec = importlib.util.find_spec("libero")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(place) / "libero").is_dir():
            return folder
    raise ConfigError(f"LIBERO is not installed: {INSTALL}.")


def find_assets() -> Path:
    """The folder of meshes and textures: of $LIBERO_ASSETS, of the package, or of LIBERO's own download."""
    named = os.environ.get(ASSETS)
    places = [Path(named)] if named else [package() / "assets", Path.home() / ".cache" / "libero" / "assets"]
    for place in places:
        if place.is_dir() and not (missing := [part for part in _PARTS if not (place / part).is_dir()]):
            return place.resolve()
        if named:
            lack = f"lacks {', '.join(missing)}" if place.is_dir() else "does not exist"
            raise DataError(f"{ASSETS}={named} {lack}: it must be the folder of LIBERO's assets.")
    raise DataError(
        f"LIBERO's assets (meshes and textures) are neither in {' nor in '.join(map(str, places))}. Fetch them:\n"
        "  hf download lerobot/libero-assets --repo-type dataset --local-dir datasets/libero_assets\n"
        f"  export {ASSETS}=datasets/libero_assets"
    )


def prepare() -> Path:
    """Import LIBERO without its question and its download; gives the assets' folder. Once for each process."""
    assets, root = find_assets(), package()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosmos_predict2" / "libero"
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": root.parent / "datasets", "assets": assets}
    content = yaml.safe_dump({key: str(path) for key, path in paths.items()})
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"config.{os.getpid()}.yaml"  # several workers begin at once
    written.write_text(content, encoding="utf-8")
    written.replace(folder / "config.yaml")
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    libero: Any = importlib.import_module("libero.libero")
    libero._assets_path_cache = str(assets)  # it looks at no setting
    return assets
