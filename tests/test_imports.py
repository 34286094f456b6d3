# SPDX-License-Identifier: Apache-2.0
"""Importing starts nothing, and building an experiment imports none of the heavy optional packages."""

import ast
import re
import sys
from pathlib import Path

import pytest

import imaginaire
from tests.programs import finished

REPOSITORY = Path(__file__).parent.parent
BASE = "cosmos_predict2/configs/base/config.py"
HEAVY = "diffusers transformers peft av wandb ray sympy"  # torch.distributed.tensor has the last
COMPOSED = (  # an experiment of each kind of model and data
    "predict2_video2world_lora_training_tiny_cosmos_nemo_assets predict2p5_video2world_training_tiny_groot_gr1_480"
    " predict2_video2world_tiny_action_conditioned_training predict2_2b_action_flow_grpo tiny_flow_grpo_toy_world"
    " tiny_vla_grpo_world_model tiny_vla_grpo_openvla_oft_simulator tiny_vla_grpo_pi05_world_model"
)


def _python(code: str, *arguments: str) -> str:
    run = finished(sys.executable, "-c", code, *arguments, cwd=REPOSITORY)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not run.stderr, run.stderr
    return run.stdout


def test_importing_the_engine_starts_nothing_and_composing_imports_nothing_heavy() -> None:
    """No process group, no device, no thread, no output, no handler, no argument parsing."""
    code = """
import importlib, os, pkgutil, signal, sys, threading, logging
import torch, torch.distributed as dist
threads, handler, handlers = threading.active_count(), signal.getsignal(signal.SIGTERM), list(logging.root.handlers)
state, environment = torch.get_rng_state(), dict(os.environ)
config, heavy, composed = (argument.split() for argument in sys.argv[1:])
if os.fork() == 0:
    from imaginaire.config.compose import compose
    for name in composed:
        compose(*config, [f"experiment={name}"])
    loaded = {module.partition(".")[0] for module in sys.modules} & set(heavy)
    assert not loaded, loaded
    os._exit(0)
assert os.wait()[1] == 0
sys.argv = ["program", "--no-such-flag"]
import imaginaire, cosmos_predict2
for module in pkgutil.walk_packages(imaginaire.__path__, "imaginaire."):
    importlib.import_module(module.name)
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert dict(os.environ) == environment
assert threading.active_count() == threads, threading.enumerate()
assert signal.getsignal(signal.SIGTERM) is handler
assert logging.root.handlers == handlers
assert torch.equal(torch.get_rng_state(), state)
"""
    assert _python(code, BASE, HEAVY, COMPOSED) == ""


def test_outside_the_environment_every_program_says_in_one_line_how_to_enter_it() -> None:
    """-S: an interpreter without any package, as that of a system. Files that find the checkout also run as files:
    the first package that they import is one of ours, and one of each kind shows that it says so."""
    files = [*REPOSITORY.glob("scripts/*.py"), *REPOSITORY.glob("examples/*.py")]
    files = [path for path in files if "__main__" in path.read_text()]
    assert len(files) > 25
    of_each_kind: dict[tuple[str, str], Path] = {}
    for path in files:
        first = _first_package(path) if "sys.path.insert" in path.read_text() else ""
        assert first in ("imaginaire", "cosmos_predict2", "examples", ""), path
        of_each_kind[path.parent.name, first] = path
    for (folder, first), path in of_each_kind.items():
        words = [str(path)] if first else ["-m", f"{folder}.{path.stem}", "--help"]
        run = finished(sys.executable, "-S", *words, cwd=REPOSITORY)
        assert run.returncode == 2 and run.stderr.count("\n") == 1, (path, run.stderr)
        assert "has no torch, numpy, attrs and" in run.stderr and "source .venv/bin/activate" in run.stderr, path


def _first_package(path: Path) -> str:
    """The package that a file imports first, but for Python's own."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    return next(name for name in (full.split(".")[0] for full in names) if name not in sys.stdlib_module_names)


def test_what_is_looked_for_is_what_the_core_needs() -> None:
    text = (REPOSITORY / "setup.py").read_text()
    core = next(node.value for node in ast.parse(text).body if isinstance(node, ast.Assign))  # the first is CORE
    names = {re.split("[<>=]", requirement)[0] for requirement in ast.literal_eval(core)}
    modules = {"hydra-core": "hydra", "PyYAML": "yaml", "pillow": "PIL"}
    assert {modules.get(name, name) for name in names} == set(imaginaire._NEEDED)


def test_uv_is_held_to_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==\S+", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert f'constraint-dependencies = ["{pinned}"]' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.long
def test_building_every_experiment_imports_nothing_heavy() -> None:
    code = """
import sys
from imaginaire.config.compose import experiment_names
from imaginaire.config.registry import entries, groups, node_of
config, heavy = (argument.split() for argument in sys.argv[1:])
experiment_names(*config)
for group in groups():
    for name in entries(group):
        node_of(group, name)
print(sorted({module.partition(".")[0] for module in sys.modules} & set(heavy)))
"""
    assert _python(code, BASE, HEAVY).strip().splitlines()[-1] == "[]"
