# SPDX-License-Identifier: Apache-2.0
"""The command: verdicts, advice that holds when it is followed, errors as in training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_predict2.nn.flops import num_parameters
from cosmos_predict2.tools.plan.report import Plan, as_text, make_plan
from cosmos_predict2.tools.plan.speed import GPUS
from cosmos_predict2.tools.plan.workload import read_workload
from imaginaire.config.compose import compose
from scripts import plan
from tests.models.rank_bytes import CONFIG
from tests.programs import python
from tests.tools.plan.test_memory import AGIBOT

TINY = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
GROOT = "experiment=predict2_video2world_training_2b_groot_gr1_480"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    return plan.main()


def planned(num_gpus: int, gpu_memory: float, *overrides: str) -> Plan:
    work = read_workload(compose(CONFIG, [GROOT, *overrides]), num_gpus)
    return make_plan(work, "H100", GPUS["H100"], gpu_memory)


def test_a_tiny_run_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(monkeypatch, "--gpus", "2", "--json", str(tmp_path / "plan.json"), "--", TINY) == 0
    shown = capsys.readouterr().out
    assert "fits in 79" in shown and "32 clips: 16 in a micro-batch" in shown and "An estimate" in shown
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] and values["memory_bytes"]["total"] > values["memory_bytes"]["activations"] > 0


def test_json_is_all_that_is_printed_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--gpus", "1", "--gpu_memory", "10", "--json", "-", "--", GROOT) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(("num_gpus", "gpu_memory"), [(8, 20), (1, 30)])
def test_advice_holds_when_it_is_followed(num_gpus: int, gpu_memory: float) -> None:
    before = planned(num_gpus, gpu_memory)
    assert not before.fits and before.nearest is not None and "DOES NOT FIT" in as_text(before)
    overrides = dict.fromkeys(before.nearest.overrides)
    for line in [line for line in overrides if line.startswith("--gpus ")]:
        del overrides[line]
        num_gpus = int(line.removeprefix("--gpus "))
    after = planned(num_gpus, gpu_memory, *overrides)
    assert after.fits and after.memory.total == before.nearest.bytes
    assert all(override in as_text(before) for override in overrides)


def test_single_changes_are_what_they_say() -> None:
    batch = "dataloader_train.batch_size=2"
    before = planned(4, 24, batch)
    last = {change.overrides[-1]: change for change in before.singles}
    assert {key.partition("=")[0].rpartition(".")[2] for key in last} == {
        "fsdp_shard_size", "mode", "grad_accum_iter", "train_architecture",
    }  # fmt: skip
    split = next(c for c in before.singles if c.overrides[0] == "model_parallel.context_parallel_size=4")
    after = planned(4, 24, batch, *split.overrides)
    assert after.memory.total == split.bytes < before.memory.total
    assert after.work.clips_per_step == before.work.clips_per_step


@pytest.mark.parametrize("num_gpus", [1, 6])
def test_more_gpus_are_told_with_the_override_that_shards_over_them(num_gpus: int) -> None:
    more = [c for c in planned(num_gpus, 10).singles if c.overrides[0].startswith("--gpus ")]
    flag, *overrides = more[-1].overrides
    after = planned(int(flag.removeprefix("--gpus ")), 10, *overrides)
    assert after.memory.total == more[-1].bytes


def test_room_is_used_for_speed() -> None:
    found = planned(8, 80, "model.config.pipe_config.net.sac_config.mode=block_wise")
    assert found.fits and found.faster is not None
    assert found.faster.seconds < found.speed.seconds and found.faster.bytes < found.limit
    assert "Faster, and fits" in as_text(found)


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("does not divide the 6 processes", ("--gpus", "6", "--", f"experiment={AGIBOT.format('14b')}")),
        ("heads", ("--", TINY, "model_parallel.context_parallel_size=8")),
        ("block_wise", ("--", TINY, "model.config.pipe_config.net.sac_config.mode=block")),
        ("Did you mean H100", ("--gpu", "H1000", "--", TINY)),
        ("--gpu_memory 0:", ("--gpu_memory", "0", "--", TINY)),
        ("--gpu_memory nan:", ("--gpu_memory", "nan", "--", TINY)),
        ("--json /none_such/plan.json cannot be written", ("--json", "/none_such/plan.json", "--", TINY)),
    ],
)
def test_what_training_would_refuse_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sentence: str, arguments: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_file_runs_by_its_path() -> None:
    done = subprocess.run([python(), plan.__file__, "--", TINY], capture_output=True, text=True, check=True)
    assert "memory of a GPU" in done.stdout


@pytest.mark.parametrize(
    ("experiment", "parameters"),
    [  # published counts of the flat network of Predict2 and the chunk network of Predict2.5
        ("predict2_video2world_2b_action_conditioned_training", 2_024_923_136),
        ("ac_reason_embeddings_rectified_flow_2b_256_320", 2_126_767_104),
    ],
)
def test_networks_with_actions_are_planned(experiment: str, parameters: int) -> None:
    work = read_workload(compose(CONFIG, [f"experiment={experiment}", "model.config.fsdp_shard_size=0"]), 1)
    plan = make_plan(work, "H100", GPUS["H100"], 79)
    assert num_parameters(work.net) == parameters and plan.memory.parameters == 2 * parameters
    assert work.latent_shape[0] == 4 and plan.fits
