# SPDX-License-Identifier: Apache-2.0
"""The command: verdicts, advice that holds when it is followed, errors as in training."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_predict2.configs.rl.experiment.one_card import RUNS
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.mixing import MixedLoader
from cosmos_predict2.tools.plan.advice import Forecast
from cosmos_predict2.tools.plan.memory import activations, predict_memory
from cosmos_predict2.tools.plan.report import CARDS, MARGIN, Plan, as_text, make_plan
from cosmos_predict2.tools.plan.speed import GPUS
from cosmos_predict2.tools.plan.workload import GB, _clip_size
from imaginaire.config.lazy_config import LazyCall as L
from scripts import plan
from tests.programs import call
from tests.tools.plan.test_memory import AGIBOT, read

TINY = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
GROOT = "predict2_video2world_training_2b_groot_gr1_480"


def planned(num_gpus: int, gpu_memory: float, *overrides: str) -> Plan:
    return make_plan(read(GROOT, num_gpus, *overrides), "H100", GPUS["H100"], gpu_memory)


def test_a_tiny_run_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(plan, "--gpus", "2", "--json", str(tmp_path / "plan.json"), "--", TINY) == 0
    shown = capsys.readouterr().out
    assert "fits in 79" in shown and "32 clips: 16 in a micro-batch" in shown and "An estimate" in shown
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] and values["memory_bytes"]["total"] > values["memory_bytes"]["activations"] > 0


def test_a_plan_of_reinforcement_learning_has_its_passes_and_advice_that_holds() -> None:
    def plan_of(*overrides: str) -> Plan:
        return make_plan(read("predict2p5_2b_flow_grpo", 8, *overrides), "H100", GPUS["H100"], 40)

    before = plan_of()
    text = as_text(before)
    assert "11 passes to generate, 8 of other weights" in text and "8 forward and backward" in text
    assert before.memory.copies == before.memory.gradients and before.memory.trajectories > 0
    for name in ("copies", "trajectories", "batch", "tokenizer", "ema", "optimizer", "parameters"):
        left = before.memory.total - getattr(before.memory, name)
        assert replace(before.memory, **{name: 0}).total == left, name
    assert before.work.passes is not None
    graphs = replace(before.work.passes, graphs=before.work.passes.graphs + 1)
    more = predict_memory(replace(before.work, passes=graphs)).activations - before.memory.activations
    assert more == activations(before.work).kept
    assert before.nearest is not None
    after = plan_of(*before.nearest.overrides)
    assert after.fits and after.memory.total == before.nearest.bytes
    alone = plan_of("model.config.rl.kl_beta=0", "model.config.rl.offload_trajectories=true")
    assert alone.memory.copies == 0 and alone.memory.trajectories < before.memory.trajectories
    assert alone.speed.seconds < before.speed.seconds


def followed(outcome: Forecast, num_gpus: int, gpu_memory: float, *overrides: str) -> Plan:
    """The plan of a run with the overrides of a proposal pasted."""
    lines = [line for line in outcome.overrides if not line.startswith("--gpus ")]
    flags = [int(line.removeprefix("--gpus ")) for line in outcome.overrides if line.startswith("--gpus ")]
    return planned(flags[0] if flags else num_gpus, gpu_memory, *overrides, *lines)


@pytest.mark.parametrize(("num_gpus", "gpu_memory"), [(8, 20), (1, 30), (1, 14)])
def test_advice_holds_when_it_is_followed(num_gpus: int, gpu_memory: float) -> None:
    before = planned(num_gpus, gpu_memory)
    text = as_text(before)
    assert not before.fits and before.nearest is not None and "DOES NOT FIT" in text
    assert not any("--gpus" in override for override in before.nearest.overrides)
    for found in filter(None, (before.nearest, before.more_gpus)):
        after = followed(found, num_gpus, gpu_memory)
        assert after.fits and after.memory.total == found.bytes and after.speed.hours == found.hours
        assert all(line in text for line in found.overrides if not line.startswith("--gpus"))
    is_other_training = "train_architecture=lora" in " ".join(before.nearest.overrides)
    assert (before.more_gpus is not None) == is_other_training


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [  # what is changed last for cards of 12, 16, 24, 48 and 80 GB: "" as configured, None: it does not fit
        (f"experiment={GROOT}", ["state_t", "optimizer.offload", "optimizer.offload", "block_wise", ""]),
        (
            "experiment=predict2_video2world_2b_action_conditioned_training",
            ["lora", "optimizer.offload", "optimizer.offload", "", ""],
        ),
        (f"experiment={AGIBOT.format('14b')}", [None, None, "swap_blocks", "swap_blocks", "optimizer.offload"]),
    ],
)
def test_one_card(experiment: str, expected: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(plan, "--one_card", "--json", "-", "--", experiment) == 0
    found = json.loads(capsys.readouterr().out)
    for size, last in zip(("12", "16", "24", "48", "80"), expected, strict=True):
        overrides = " ".join(found[size]["overrides"])
        assert found[size]["fits"] == (last is not None)
        assert last is None or (last in overrides if last else overrides == "")


def test_a_workstation_card_is_alone_and_the_whole_run_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(plan, "--gpu", "rtx 4090", "--json", "-", "--", TINY, "trainer.max_iter=7200") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["gpus"] == 1 and values["hours"] == pytest.approx(2 * values["seconds_per_iteration"])


def test_room_is_used_for_speed() -> None:
    found = planned(8, 80, "model.config.pipe_config.net.sac_config.mode=block_wise")
    assert found.fits and found.faster is not None
    assert found.faster.seconds < found.speed.seconds and found.faster.bytes < found.limit
    assert "Faster, and fits" in as_text(found)
    no_room = planned(
        8, found.faster.bytes / GB / (1 - MARGIN / 2), "model.config.pipe_config.net.sac_config.mode=block_wise"
    )
    assert no_room.faster is None or no_room.faster.bytes < (1 - MARGIN) * no_room.limit, "with the estimate's error"


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("model_parallel.context_parallel_size", ("--gpus", "6", "--", f"experiment={AGIBOT.format('14b')}")),
        ("model_parallel.context_parallel_size", ("--", TINY, "model_parallel.context_parallel_size=8")),
        ("sac_config.mode", ("--", TINY, "model.config.pipe_config.net.sac_config.mode=block")),
        ("--gpu H1000", ("--gpu", "H1000", "--", TINY)),
        ("--gpu_memory: 0", ("--gpu_memory", "0", "--", TINY)),
        ("/none_such/plan.json", ("--json", "/none_such/plan.json", "--", TINY)),
    ],
)
def test_what_training_would_refuse_is_an_error(
    capsys: pytest.CaptureFixture[str], named: str, arguments: tuple[str, ...]
) -> None:
    assert call(plan, *arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "parameters"),
    [  # published counts of the flat network of Predict2 and the chunk network of Predict2.5
        ("predict2_video2world_2b_action_conditioned_training", 2_024_923_136),
        ("ac_reason_embeddings_rectified_flow_2b_256_320", 2_126_767_104),
    ],
)
def test_networks_with_actions_are_planned(experiment: str, parameters: int) -> None:
    work = read(experiment, 1, "model.config.fsdp_shard_size=0")
    plan = make_plan(work, "H100", GPUS["H100"], 79)
    assert sum(p.numel() for p in work.net.parameters()) == parameters and plan.memory.parameters == 2 * parameters
    assert work.latent_shape[0] == 4 and plan.fits


def test_the_largest_clips_of_several_data_sets_are_planned() -> None:
    sizes = ([48, 64], [96, 128], [64, 64])
    data = {f"set {i}": L(LeRobotActionDataset)(root="gone", video_size=size) for i, size in enumerate(sizes)}
    config: Any = SimpleNamespace(dataloader_train=L(MixedLoader)(datasets=data, ratios=[1, 1, 1]))
    assert _clip_size(config, "480") == (96, 128)


@pytest.mark.parametrize("name", RUNS)
def test_presets_of_one_card_fit_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = GPUS[CARDS[24]]
    memory = f"{(1 - MARGIN) * card.memory:.2f}"
    preset = f"experiment=one_card_24gb_{name}"
    assert call(plan, "--gpus", "1", "--gpu", CARDS[24], "--gpu_memory", memory, "--json", "-", "--", preset) == 0
    values = json.loads(capsys.readouterr().out)
    found = values["memory_bytes"] if "memory_bytes" in values else values["forms"]["whole"]
    print(name, found["total"] / GB, found.get("host", 0) / GB)
    assert 7 * GB < found["total"] < (1 - MARGIN) * card.memory * GB
