# SPDX-License-Identifier: Apache-2.0
"""The plan of a recipe of Cosmos-RL: what fits 8 GPUs, what an iteration is, and what is no recipe of a policy."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cosmos_predict2.tools.plan.simulated import HOST_GB, SimulatedRun, estimate
from cosmos_predict2.tools.plan.speed import GPUS
from scripts import plan
from tests.programs import call

OFT = "configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml"
LIBERO, B1K = "configs/pi05/pi05-libero10-grpo-colocate.toml", "configs/pi05/pi05-b1k-grpo-colocate.toml"
WEIGHT = 7_541_237_184


def planned(capsys: pytest.CaptureFixture[str], recipe: str, *words: str) -> dict:
    call(plan, "--recipe", recipe, "--json", "-", *words)
    return json.loads(capsys.readouterr().out)


def test_a_policy_of_7b_fits_8_gpus_where_it_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, OFT)
    forms = found["forms"]
    assert found["gpus"] == 8 and forms["sharded"]["fits"] and not forms["whole"]["fits"]
    whole = 16 * WEIGHT + 2 * WEIGHT  # in bfloat16 with gradient, master and moments; and the gradients on their way
    assert forms["whole"]["policy"] == whole
    assert forms["sharded"]["policy"] == 2 * WEIGHT  # an eighth of it
    assert forms["sharded"]["at work"] == 2 * WEIGHT  # where each rank has all to decide
    assert not planned(capsys, OFT, "--gpu_memory", "24")["forms"]["sharded"]["fits"]
    assert call(plan, "--recipe", OFT) == 0
    shown = capsys.readouterr().out
    assert "128 episodes of 64 decisions" in shown and "64 simulators" in shown and "An estimate" in shown


def test_episodes_that_find_no_place_take_another_wave() -> None:
    run = SimulatedRun("openvla-oft", "libero", 2, 8, 1, 8, 8, 64, 512, 16, 1, True, 100)
    gpu = GPUS["H100"]

    def seconds(**changes: Any) -> dict[str, float]:
        return estimate(replace(run, **changes), gpu, "whole").seconds

    one = seconds()
    assert seconds(episodes=9)["simulating"] == seconds(episodes=16)["simulating"] == 2 * one["simulating"]
    assert seconds(policy="openvla")["deciding"] == 7 * one["deciding"]  # token after token
    assert seconds(updates=3)["training"] > 2 * one["training"]
    assert estimate(run, gpu, "whole").host_gb == pytest.approx(8 * 8 * HOST_GB)


def test_the_expert_alone_fits_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    libero, b1k = planned(capsys, LIBERO), planned(capsys, B1K)
    assert list(libero["forms"]) == ["whole"] and libero["forms"]["whole"]["fits"] and b1k["forms"]["whole"]["fits"]
    assert libero["forms"]["whole"]["policy"] < 16e9
    assert b1k["forms"]["whole"]["episodes"] > 3 * libero["forms"]["whole"]["episodes"]  # longer, and three views


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("configs/openvla-oft/tiny-openvla-oft-grpo.toml", "a tiny policy"),
        ("configs/wfm/tiny_grpo_mock_data.toml", "[vla]"),
        ("configs/pi05/none.toml", "none.toml"),
    ],
)
def test_what_cannot_be_planned_is_an_error(recipe: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(plan, "--recipe", recipe) == 2
    assert named in capsys.readouterr().err
