# SPDX-License-Identifier: Apache-2.0
"""The set-up of the world-model guide: environments by requirements/install.sh, a cluster by ray_utils/start_ray.sh."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs import finished

ROOT = Path(__file__).resolve().parents[2]
INSTALL, START_RAY = "requirements/install.sh", "ray_utils/start_ray.sh"


def shell(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished("bash", ROOT / script, *words, **variables)


def a_program(folder: Path, name: str, text: str) -> str:
    """A PATH on which ``name`` is that shell script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("target", ["cosmos_world_model", "openvla_oft", "openvla", "openpi"])
def test_a_dry_run_of_the_installer_prints_its_commands_and_makes_nothing(target: str) -> None:
    venv = f".venv_{target.removesuffix('_world_model')}"
    made = shell(INSTALL, target, "--dry-run")
    assert made.returncode == 0 and not (ROOT / venv).exists()
    lines = [line for line in made.stdout.splitlines() if line.startswith("+ ")]
    assert lines[0].endswith(f"venv {venv}") and all("pip install" in line for line in lines[1:-1])
    (without,) = [line for line in lines if "--no-deps" in line]  # its dependencies bring CUDA
    assert "hf-libero==0.1.4" in without
    assert ",vla" in made.stdout and ",vla" not in shell(INSTALL, target, "--dry-run", "--no-libero").stdout


def test_a_folder_of_ones_own_lies_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = shell(INSTALL, "openvla_oft", "--dry-run", "--no-libero", "--venv", "mine")
    assert f"venv {tmp_path}/mine\n" in made.stdout


@pytest.mark.parametrize(("gpus", "index"), [("exit 0", False), ("exit 9", True)])
def test_torch_is_the_build_for_the_machine(gpus: str, index: bool, tmp_path: Path) -> None:
    path = a_program(tmp_path / "bin", "nvidia-smi", gpus)
    printed = shell(INSTALL, "cosmos_world_model", "--dry-run", PATH=path).stdout
    assert ("whl/cpu" in printed) == index and (",gpu" in printed) != index


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "which target?"),
        (("openp1",), "Targets: cosmos_world_model, openvla_oft, openvla, openpi"),
        (("cosmos_world_modle",), "Targets: cosmos_world_model"),
        (("cosmos_world_model", "openvla_oft"), "one target at a time"),
        (("openvla_oft", "--dryrun"), "--dry-run"),
        (("openvla_oft", "--venv"), "--venv needs a folder"),
    ],
)
def test_a_wrong_call_of_the_installer_is_explained(words: tuple[str, ...], named: str) -> None:
    made = shell(INSTALL, *words)
    assert made.returncode == 2 and named in made.stderr


def test_an_interpreter_that_is_too_old_and_a_command_that_fails_end_the_installer(tmp_path: Path) -> None:
    old = a_program(tmp_path / "old", "python3", '[ "$1" = --version ] && echo Python 3.9.1; exit 1')
    made = shell(INSTALL, "openvla_oft", "--dry-run", PATH=old)
    assert made.returncode == 2 and "Python 3.9.1, but 3.10" in made.stderr
    fails = a_program(tmp_path / "fails", "python3", '[ "$1" = -m ] && exit 3; exit 0')
    made = shell(INSTALL, "openvla_oft", "--venv", str(tmp_path / "venv"), PATH=fails)
    assert made.returncode == 1 and "this command failed" in made.stderr and made.stdout.count("+ ") == 1


def test_machines_meet_by_the_address_that_the_first_writes(tmp_path: Path) -> None:
    path = a_program(tmp_path / "bin", "ray", f'echo "$@" >> {tmp_path}/asked; [[ "$*" != *stale* ]]')
    settings = dict(PATH=path, RAY_HEAD_IP_FILE=str(tmp_path / "address"), RAY_HEAD_ADDRESS="10.0.0.7", RAY_PORT="1234")
    (tmp_path / "address").write_text("stale\n")  # of an earlier cluster
    waits = shell(START_RAY, RANK="1", RAY_WAIT_SECONDS="1", **settings)
    assert waits.returncode == 2 and "no head answers" in waits.stderr and "RANK=0" in waits.stderr
    assert shell(START_RAY, "--num-gpus=4", RANK="0", **settings).returncode == 0
    assert shell(START_RAY, RANK="1", **settings).returncode == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-2:] == ["start --head --node-ip-address=10.0.0.7 --port=1234 --num-gpus=4",
                          "start --address=10.0.0.7:1234"]  # fmt: skip
    again = shell(START_RAY, "--stale", RANK="0", **settings)  # the head runs already, which Ray refuses
    assert again.returncode == 1 and (tmp_path / "address").read_text() == "10.0.0.7\n"


def test_a_machine_without_a_number_or_without_ray_is_told(tmp_path: Path) -> None:
    path = a_program(tmp_path / "bin", "ray", "exit 0")
    assert "RANK is 'first'" in shell(START_RAY, RANK="first", PATH=path).stderr
    made = shell(START_RAY, RANK="0", PATH="/usr/bin:/bin")
    assert made.returncode == 2 and "pip install -e '.[rl]'" in made.stderr
