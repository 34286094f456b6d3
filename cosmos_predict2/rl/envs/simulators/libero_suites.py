# SPDX-License-Identifier: Apache-2.0
"""LIBERO's suites, read from its package without importing it: tasks, sentences, starts, and where its assets lie.

    task = suite("libero_10").tasks[3]
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

from imaginaire.errors import ConfigError, DataError, near

# steps of an episode: by the published evaluations; reinforcement learning has 512 throughout
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_90": 400, "libero_10": 520}
ALL = "libero_all"
TRIALS = 50  # starts of a task
SUITES = (*MAX_STEPS, ALL)
RL_MAX_STEPS = 512
ASSETS = "LIBERO_ASSETS"  # the environment variable that names their folder
INSTALL = "pip install --no-deps hf-libero==0.1.4 (what it needs: pip install -e '.[vla]')"

_PARTS = ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects", "scenes")
_SCENE = re.compile(r"^[A-Z_]*SCENE\d+_")


@dataclass(frozen=True)
class Task:
    """``language`` is what policies are told; the sentence in the BDDL file reads differently."""

    name: str
    language: str
    suite: str
    bddl_file: Path
    init_file: Path


@dataclass(frozen=True)
class Suite:
    """Tasks in the published order; ``max_steps`` are those of evaluations."""

    name: str
    tasks: tuple[Task, ...]
    max_steps: int


@cache
def package() -> Path:
    """The folder of the installed LIBERO, with bddl_files and init_files."""
    spec = importlib.util.find_spec("libero")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(place) / "libero").is_dir():
            return folder
    raise ConfigError(f"LIBERO is not installed: {INSTALL}.")


@cache
def suite(name: str) -> Suite:
    """Of this name; ``libero_all`` has the tasks of all, each once."""
    if name not in SUITES:
        raise ConfigError(f"LIBERO has no suite '{name}'.{near(name, SUITES)}")
    if name == ALL:
        tasks: dict[str, Task] = {}
        for task in (task for part in MAX_STEPS for task in suite(part).tasks):
            tasks.setdefault(task.name, task)
        return Suite(name, tuple(tasks.values()), max(MAX_STEPS.values()))
    names = _task_names().get(name)
    if not names:
        raise DataError(f"{package()} knows no tasks of {name}: reinstall LIBERO, {INSTALL}.")
    return Suite(name, tuple(_task(name, each) for each in names), MAX_STEPS[name])


def chosen_tasks(name: str, wanted: Sequence[str] = ()) -> tuple[Task, ...]:
    """The tasks of a suite, or those of these numbers or names."""
    tasks = suite(name).tasks
    places = {task.name: task for task in tasks} | {str(i): task for i, task in enumerate(tasks)}
    if unknown := [each for each in wanted if each not in places]:
        raise ConfigError(
            f"{name} has no task '{unknown[0]}': its tasks are 0 to {len(tasks) - 1}."
            f"{near(unknown[0], [task.name for task in tasks], 3)}"
        )
    return tuple(places[each] for each in wanted) or tasks


def initial_states(task: Task) -> NDArray[numpy.float64]:
    """MuJoCo's state (time, qpos, qvel) at each start [50, n]; n differs between tasks."""
    from imaginaire.checkpoint import plain_arrays  # brings torch, which a worker that reads nothing does without
    from imaginaire.checkpoint.plain_pickle import FAULTS, Refused

    try:
        with zipfile.ZipFile(task.init_file) as file:
            (inside,) = (name for name in file.namelist() if name.endswith("data.pkl"))
            states = plain_arrays.read(file.read(inside))
    except (*FAULTS, TypeError, LookupError, RecursionError, Refused) as error:
        raise DataError(f"{task.init_file} holds no starts of LIBERO, or is damaged: {error}") from error
    if not isinstance(states, numpy.ndarray) or states.ndim != 2 or states.dtype.kind != "f":
        raise DataError(f"{task.init_file} holds no table of numbers, which the starts of a task are.")
    return states.astype(numpy.float64)


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


def _task(suite_name: str, name: str) -> Task:
    root = package()
    return Task(
        name=name,
        language=_SCENE.sub("", name).replace("_", " "),
        suite=suite_name,
        bddl_file=root / "bddl_files" / suite_name / f"{name}.bddl",
        init_file=root / "init_files" / suite_name / f"{name}.pruned_init",
    )
