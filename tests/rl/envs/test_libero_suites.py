# SPDX-License-Identifier: Apache-2.0
"""LIBERO's tasks, sentences and starts: of a package in its layout, and of the published one where it is installed."""

import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.rl.envs.simulators import libero_suites as libero
from imaginaire.errors import ConfigError, DataError

PUBLISHED = importlib.util.find_spec("libero") is not None
NAMES = {
    "libero_spatial": ["pick_up_the_bowl"],
    "libero_object": ["pick_up_the_milk"],
    "libero_goal": ["open_the_drawer"],
    "libero_90": ["KITCHEN_SCENE10_close_the_drawer", "pick_up_the_bowl"],
    "libero_10": ["LIVING_ROOM_SCENE2_put_both_in_the_basket", "STUDY_SCENE1_pick_up_the_book"],
}


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
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    _forget()
    yield root
    _forget()
    for name in ("libero", "libero.libero"):
        sys.modules.pop(name, None)


def _forget() -> None:
    for each in (libero.package, libero.suite, libero._task_names):
        each.cache_clear()


def test_sentences_are_those_of_the_names(package: Path) -> None:
    found = {name: [task.language for task in libero.suite(name).tasks] for name in libero.SUITES}
    assert found["libero_10"] == ["put both in the basket", "pick up the book"]
    assert found["libero_90"] == ["close the drawer", "pick up the bowl"]
    assert (
        found["libero_all"]
        == ["pick up the bowl", "pick up the milk", "open the drawer", "close the drawer"] + (found["libero_10"])
    )
    assert libero.suite("libero_all").tasks[0].suite == "libero_spatial"  # of tasks that are in two, the first
    assert libero.suite("libero_10").max_steps == 520
    assert not any(name.split(".")[0] == "libero" for name in sys.modules)
    with pytest.raises(ConfigError, match=r"no suite 'libero_gaol'.*libero_goal"):
        libero.suite("libero_gaol")


def test_starts_are_read_without_running_the_file(package: Path, tmp_path: Path) -> None:
    task = libero.suite("libero_90").tasks[1]
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


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps hf-libero"):
        libero.suite("libero_10")
    _forget()


@pytest.mark.skipif(not PUBLISHED, reason="LIBERO is not installed (pip install --no-deps hf-libero==0.1.4)")
def test_all_published_tasks_are_read() -> None:
    tasks = libero.suite("libero_all").tasks
    assert len(tasks) == 130 and [len(libero.suite(name).tasks) for name in libero.MAX_STEPS] == [10, 10, 10, 90, 10]
    assert all(task.bddl_file.is_file() and libero.initial_states(task).shape[0] == 50 for task in tasks)
    assert all(task.language[0].islower() and "SCENE" not in task.language for task in tasks)
    bowls = libero.suite("libero_spatial").tasks
    assert bowls[3].language == "pick up the black bowl on the cookie box and place it on the plate"
    assert libero.suite("libero_10").tasks[1].language == "put both the cream cheese box and the butter in the basket"
