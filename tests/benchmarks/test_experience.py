# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a whole experience of the published policies, on their tiny twins."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import experience, machine
from cosmos_predict2.rl.policies.openvla.model import OpenVLASizes
from cosmos_predict2.tools.plan.policies import POLICIES


@pytest.fixture(autouse=True)
def _as_benchmarks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "unused")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(machine, "quiet_trainer", lambda: None)  # which changes the whole process


def flags(folder: Path, **changes: Any) -> argparse.Namespace:
    plain = dict(policies=["openvla", "pi05"], size="tiny", envs=2, groups_of=2, decisions=1, experiences=1)
    plain |= dict(adapters=False, folder=str(folder), overrides=[])
    return argparse.Namespace(**{**plain, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "adapters"), [("openvla", False), ("pi05", True)])
def test_both_policies_roll_out_and_learn(
    policy: str, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experience, "planned", lambda *_: {})
    assert experience.run(flags(tmp_path, policies=[policy], adapters=adapters)) == 0
    found = capsys.readouterr().out
    phases = ("policy", "imagination", "reward", "forward", "backward", "optimizer", "probabilities", "away")
    for phase in phases:
        seconds = re.findall(rf": {phase} +(\d+\.\d+)", found)
        assert len(seconds) == 1, phase
    assert not any(tmp_path.iterdir())  # policies are large


@pytest.mark.slow
def test_the_plan_is_of_the_changed_configuration(tmp_path: Path) -> None:
    found = experience.planned("openvla", "2B", flags(tmp_path, envs=16, groups_of=8, decisions=2))
    assert {"whole", "adapters"} <= found.keys() and found["whole"]["total"] > found["adapters"]["total"] > 1e10


def test_a_policy_that_fails_does_not_stop_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(policy: str, *_: Any) -> None:
        if policy == "openvla":
            raise RuntimeError("one\n\ntwo")
        print("pi05 ran")

    monkeypatch.setattr(experience, "measure", measure)
    assert experience.run(flags(tmp_path)) == 1
    found = capsys.readouterr().out
    assert "openvla FAILED: RuntimeError: one\n    two" in found and "pi05 ran" in found


def test_the_written_sizes_are_the_published_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seven billion numbers are drawn on a GPU only; here they are counted."""
    import torch

    from cosmos_predict2.rl.policies.openvla import tiny
    from cosmos_predict2.rl.policies.openvla.model import OpenVLAModel

    counted = []

    def model(sizes: OpenVLASizes, proprio_dim: int) -> Any:
        with torch.device("meta"):
            counted.append(sum(weight.numel() for weight in OpenVLAModel(sizes, proprio_dim).parameters()))
        raise StopIteration

    monkeypatch.setattr(tiny, "OpenVLAModel", model)
    with pytest.raises(StopIteration):
        experience.write_policy(tmp_path / "openvla", "openvla", "2B")
    assert counted[0] == pytest.approx(POLICIES["openvla_oft"].parameters, rel=0.01)
