# SPDX-License-Identifier: Apache-2.0
"""Optional packages: without all of them the rest is imported and composes; each is imported without the others.

Each may so be removed from a copy of the tree, together with those that need it by the table, its programs and tests.
"""

import json
from pathlib import Path

import pytest

from tests.programs import finished, python

SIMULATORS = "rl.envs.simulators"
LEAVES = {  # packages and modules of cosmos_predict2, and the leaves that each needs
    "compat": "",
    "evaluation.reports": "",
    "rl.envs.simulators.behavior": f"{SIMULATORS}.omnigibson",
    "rl.envs.simulators.gym": "",
    "rl.envs.simulators.libero": "",
    "rl.envs.simulators.lift": "",
    "rl.envs.simulators.omnigibson": "",
    "rl.episodes.ray_rollout": "",
    "rl.imagined": "",
    "rl.policies.openvla": "",
    "rl.policies.pi05": "",
    "rl.policies.remote": "",
    "rl.rewards.service": "",
    "tools.check": "",
    "tools.doctor": "",
    "tools.drive": "rl.imagined",
    "tools.improve": "evaluation.reports rl.imagined",
    "tools.plan": "",
    "tools.prepare": "",
    "tools.serve": "rl.policies.remote",
}
PROGRAMS = "scripts.train scripts.train_policy scripts.evaluate_policy scripts.convert examples.video2world"
EXPERIMENTS = "predict2_video2world_training_tiny_groot_gr1_480 tiny_flow_grpo_toy_world tiny_vla_grpo_world_model"
CODE = """
import importlib, json, os, pkgutil, sys
leaves, programs, experiments = json.loads(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split()
absent, failed = {f"cosmos_predict2.{name}" for name in leaves}, []

class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == leaf or name.startswith(f"{leaf}.") for leaf in absent):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name not in absent:
                failed.append(f"{name}: {error}")

def below(package):
    found = importlib.import_module(package)
    yield from (module.name for module in pkgutil.walk_packages(getattr(found, "__path__", []), f"{package}."))

sys.meta_path.insert(0, Absent())
load([*below("imaginaire"), *below("cosmos_predict2"), *programs])
from imaginaire.config.compose import compose
for name in experiments:
    compose("cosmos_predict2/configs/base/config.py", [f"experiment={name}"])
print("".join(f"{line}\\n" for line in failed), end="", flush=True)
for leaf, needs in leaves.items():
    if os.fork() == 0:
        absent -= {f"cosmos_predict2.{name}" for name in (leaf, *needs.split())}
        failed = []
        load([f"cosmos_predict2.{leaf}"])
        load(below(f"cosmos_predict2.{leaf}"))
        print("".join(f"{line}\\n" for line in failed), end="", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_the_rest_is_imported_without_leaves_and_each_without_the_others() -> None:
    words = (json.dumps(LEAVES), PROGRAMS, EXPERIMENTS)
    run = finished(python(), "-c", CODE, *words, cwd=Path(__file__).parent.parent)
    assert run.returncode == 0 and not run.stdout.split() and not run.stderr, run.stdout + run.stderr
