# SPDX-License-Identifier: Apache-2.0
"""The plan of a policy in a world model: the published figures, what offloading and adapters save, errors."""

import json

import pytest

from scripts import plan
from tests.programs import call

OFT, PI05 = "cosmos_libero_spatial_grpo_openvlaoft", "cosmos_libero_spatial_grpo_openpi05"
WEIGHTS = 7_541_237_184


def planned(capsys: pytest.CaptureFixture[str], gpus: int, gpu: str, name: str, *overrides: str) -> dict:
    call(plan, "--gpus", gpus, "--gpu", gpu, "--json", "-", "--embodied", name, *overrides)
    return json.loads(capsys.readouterr().out)["forms"]


def test_four_a100_hold_what_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    forms = planned(capsys, 4, "A100", OFT)
    assert 30e9 < forms["sharded"]["total"] < 50e9  # published are about 50 GB, with moments in float32
    assert forms["sharded"]["policy"] + forms["sharded"]["at work"] > 2 * WEIGHTS  # whole, where it decides
    assert not forms["whole"]["fits"] and forms["adapters"]["total"] < forms["sharded"]["total"]
    assert 2.4 / 2 < forms["sharded"]["hours_per_epoch"] < 2.4  # half the passes, and the training
    assert call(plan, "--gpus", 4, "--gpu", "A100", "--embodied", OFT) == 0
    shown = capsys.readouterr().out
    assert "1,024 episodes of 32 decisions" in shown and "An estimate" in shown


def test_one_card_of_80_and_one_of_24_gb(capsys: pytest.CaptureFixture[str]) -> None:
    forms = planned(capsys, 1, "A100", OFT)
    assert forms["whole"]["fits"] and "sharded" not in forms
    resident = planned(capsys, 1, "A100", OFT, "env.enable_offload=false")
    assert resident["whole"]["total"] > forms["whole"]["total"]
    small = ("actor.micro_batch_size=4", "env.train.world_model_cfg.cosmos.batch_size=4")
    forms = planned(capsys, 1, "RTX-4090", OFT, *small)
    assert forms["adapters"]["fits"] and not forms["whole"]["fits"]
    assert planned(capsys, 1, "A100", PI05)["whole"]["fits"]


def test_a_plan_follows_the_precision_and_what_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    """The published PI0.5 has precision null, which is float32."""
    wide, narrow = (
        planned(capsys, 1, "A100", PI05, f"actor.model.precision={precision}")["whole"]
        for precision in ("null", "bf16")
    )
    assert wide["policy"] == 4 * (3_350_000_000 + 3 * 430_000_000)
    assert narrow["policy"] == 2 * (3_350_000_000 + 2 * 430_000_000)  # while it imagines, which needs more then
    assert wide["total"] > 1.5 * narrow["total"]
    one, many = (planned(capsys, 1, "A100", OFT, f"actor.micro_batch_size={size}")["whole"] for size in (1, 32))
    assert one["policy"] == many["policy"] == 8 * WEIGHTS  # with gradients and two moments
    kept = planned(capsys, 1, "A100", OFT, "actor.fsdp_config.gradient_checkpointing=false")["whole"]
    assert 5e9 < many["at work"] < 9e9 and kept["at work"] > 10 * many["at work"] and not kept["fits"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--embodied", "tiny_toy_grpo"), 'its policy is "toy"'),
        (("--embodied", "cosmos_libero"), "--config-name cosmos_libero"),
        (("--gpus", "3", "--embodied", OFT), "no multiple of --gpus 3"),
        (("--embodied", OFT, "algorithm.gruop_size=4"), "group_size"),
    ],
)
def test_what_cannot_be_planned_is_an_error(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(plan, *words) == 2
    assert named in capsys.readouterr().err
