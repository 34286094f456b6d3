# SPDX-License-Identifier: Apache-2.0
"""The doctor finds what is wrong, says how to mend it, and is quiet about what is right."""

import ast
import json
import os
import sys
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cosmos_predict2.tools.doctor import collectives, machine, released
from imaginaire import distributed
from imaginaire.findings import Finding, as_data, as_lines, worst
from imaginaire.training import provenance
from scripts import doctor
from scripts.doctor import show
from tests.multiprocess import run_distributed
from tests.programs import HANG_S, call, finished, warm_python

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
Usage = namedtuple("Usage", "total used free")


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.key.partition("/")[2]: finding for finding in findings}


# --- findings


def test_lines_show_areas_levels_cures_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Finding("a/x", "1"), Finding("a/y", "2", "error", "mend it"), Finding("b/z", "3", "warning")]
    expected = ["a", "  ok      x: 1", "  ERROR   y: 2", "          -> mend it", "b", "  warning z: 3"]
    assert list(as_lines(found))[:-1] == expected
    assert list(as_lines(found))[-1] == "something is wrong: 1 ok, 1 warnings, 1 errors"
    assert worst(found) == "error" and worst(found[2:]) == "warning" and worst([]) == "note"
    assert show(found) == 1 and show(found[2:]) == 0
    capsys.readouterr()
    assert show(found, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == as_data(found)


def test_one_line_is_enough_where_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("a/x", "1"), Finding("a/y", "2", "warning", "better")]
    monkeypatch.setattr("scripts.doctor.findings", lambda: found)
    assert call(doctor, "--brief") == 0
    said = capsys.readouterr().out
    assert said.startswith("ready: Python 3.") and torch.__version__ in said and said.count("\n") == 1
    found.append(Finding("b/z", "3", "error", "mend it"))
    assert call(doctor, "--brief") == 1
    assert "ERROR   z: 3\n          -> mend it\nnot ready: 1 errors" in capsys.readouterr().out


# --- packages


def test_every_package_of_the_extras_is_described() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    extras = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "EXTRAS"
        and isinstance(node.value, ast.Dict)
    )
    described = {(package.extra, package.distribution.lower()) for package in machine.OPTIONAL}
    of_learning_from_rewards = {"rl", "vla", "reward", "drive", "serve", "gym", "metaworld", "gym-pusht"}
    listed = {
        (extra, requirement.partition(">")[0].partition("=")[0].partition("[")[0].lower())
        for extra, requirements in extras.items()
        for requirement in requirements
        if extra not in of_learning_from_rewards
    }
    assert described == listed


def test_a_core_package_that_is_missing_or_old_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(machine.required()) == "note"
    old = {"torch": "2.5.1+cu121", "hydra-core": "1.4.0", "einops": None}
    version = provenance.version_of
    monkeypatch.setattr(provenance, "version_of", lambda name: old.get(name, version(name)))
    found = by_name(machine.required())
    assert {name for name, finding in found.items() if finding.level == "error"} == set(old)
    assert "2.5.1+cu121, but torch>=2.6 is needed" in found["torch"].text
    assert "pip install" in found["einops"].cure


def test_a_driver_without_a_torch_for_it_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver", lambda: "570.86")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (found,) = machine.accelerators()
    assert found.level == "error" and "is for CPUs" in found.text and "pip install" in found.cure
    monkeypatch.setattr(machine, "_driver", lambda: None)
    (found,) = machine.accelerators()
    assert found.level == "note" and found.text.startswith("none")


@pytest.mark.parametrize(
    ("capability", "architectures", "level"),
    [
        ((9, 0), ["sm_80", "sm_90"], "note"),
        ((8, 6), ["sm_80", "sm_90"], "note"),  # binaries run on later devices of their generation
        ((10, 0), ["sm_80", "sm_90"], "error"),
        ((12, 0), ["sm_90", "compute_90"], "note"),  # compiled at run time
        ((7, 5), ["sm_75"], "warning"),
        ((9, 0), ["sm_90a"], "note"),
    ],
)
def test_a_gpu_without_kernels_is_a_fault(capability: tuple[int, int], architectures: list[str], level: str) -> None:
    properties = SimpleNamespace(name="GPU", total_memory=80e9, major=capability[0], minor=capability[1])
    assert machine.gpu(0, properties, architectures).level == level


# --- the machine


@pytest.mark.parametrize(("free", "level"), [(8 * 2**20, "error"), (64 * 2**20, "warning"), (8 * 2**30, "note")])
def test_little_shared_memory_is_told(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    found = machine.shared_memory(tmp_path)
    assert found.level == level
    assert ("--shm-size" in found.cure) == (level != "note")


def test_a_full_or_read_only_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "runs")
    name = "disk of runs (runs)"
    for free, level in ((0.5e9, "error"), (40e9, "warning"), (100e9, "note")):
        monkeypatch.setattr(machine.storage, "free_bytes", lambda path, free=free: int(free))
        assert by_name(machine.disks())[name].level == level
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert by_name(machine.disks())[name].level == "error"
    monkeypatch.undo()
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "s3://bucket/runs")
    assert by_name(machine.disks())["disk of s3://bucket/runs (runs)"].level == "note"


def test_variables_that_slow_a_run_are_noted_and_secrets_are_not_shown() -> None:
    variables = {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0", "HF_TOKEN": "hf_secret", "HOME": "/root"}
    levels = {name: finding.level for name, finding in by_name(machine.environment(variables)).items()}
    assert levels == {"NCCL_P2P_DISABLE": "warning", "NCCL_SOCKET_IFNAME": "note", "HF_TOKEN": "note"}
    assert "hf_secret" not in str([*machine.environment(variables)])


# --- this project


def test_attention_is_chosen_and_compared() -> None:
    found = by_name(released.attention(CPU))
    assert found["auto"].text.startswith("takes torch in float32 on cpu")
    assert found["torch"].level == found["math"].level == "note" and "agrees" in found["torch"].text
    assert found["flash, flash2, flash3, transformer_engine"].text == "need a GPU"


def test_videos_are_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(released.videos()) == "note"
    monkeypatch.setattr(released.media, "read_video", lambda path: (torch.zeros(3, 5, 64, 64, dtype=torch.uint8), 16.0))
    assert by_name(released.videos())["a clip written and read"].level == "error"


def test_released_weights_are_looked_for_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_PREDICT2_ARGS", f"--checkpoints {tmp_path}")
    (found,), name = released.weights(), "2B Video2World 720p 16 fps"
    assert found.level == "warning" and name in found.text and "download_checkpoints" in found.cure
    file = tmp_path / "nvidia" / "Cosmos-Predict2-2B-Video2World" / "model-720p-16fps.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cut off")
    assert by_name(released.weights())[name].level == "error"
    torch.save({"net.x": torch.zeros(1)}, file)
    assert by_name(released.weights())[name].level == "note"


# --- processes


def test_a_process_that_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port())}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    (found,) = collectives.examine(limit_s=0.2)
    assert found.level == "error"
    assert found.text.startswith("ranks 1-2 of 3 did not arrive in 0.2 s")


def _examined() -> tuple[list[Finding], list[Finding]]:
    """The findings of two processes when all is well, and when one of them gets wrong sums."""
    distributed.shutdown()  # the doctor forms a group of its own
    collectives.SIZES = {"gloo": (2**12, 2**20), "nccl": (2**20,)}
    well = collectives.examine(HANG_S)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if distributed.rank() == 1:
        gather = collectives.OPERATIONS["all-gather"]
        collectives.OPERATIONS["all-gather"] = gather._replace(run=lambda values: gather.run(values) + 1)
    ill = collectives.examine(HANG_S)
    return well, ill


@pytest.mark.slow
def test_two_processes_talk_and_wrong_numbers_are_found() -> None:
    results = run_distributed(_examined, 2)
    for well, ill in results:
        assert worst(well) == "note", well
        gather = by_name(ill)["all-gather"]
        assert gather.level == "error" and "wrong numbers at 4 KiB" in gather.text
        assert by_name(ill)["all-to-all"].level == "note"
    found = by_name(results[0][0])
    assert {"barrier", *collectives.OPERATIONS} <= set(found)
    speeds = found["all-reduce"].text
    assert "4 KiB" in speeds and "1 MiB" in speeds and "GB/s" in speeds


@pytest.mark.slow
def test_the_commands_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    assert call(doctor, "--json") in (0, 1)  # a machine may have a fault
    areas = {finding["key"].partition("/")[0] for finding in json.loads(capfd.readouterr().out)["findings"]}
    assert {"packages", "device", "machine", "attention", "network", "videos", "weights"} <= areas
    result = finished(sys.executable, "scripts/test_environment.py", "--training", cwd=ROOT)
    assert ("[SUCCESS]" in result.stdout) == (result.returncode == 0), result.stderr
    assert call(doctor, "--dist", "--limit", 60) == 0
    out = capfd.readouterr().out
    assert "ranks 0-1" in out and "collectives over gloo" in out and "healthy" in out
