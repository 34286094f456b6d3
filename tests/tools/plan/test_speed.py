# SPDX-License-Identifier: Apache-2.0
"""Predicted times against published ones, and the operations that policies add."""

from dataclasses import replace

import pytest

from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.tools.plan.speed import GPUS, PUBLISHED, find_gpu, predict_speed
from imaginaire.errors import ConfigError
from tests.tools.plan.test_activations import workload
from tests.tools.plan.test_memory import AGIBOT, read


def test_published_times_come_out() -> None:
    for i, (size, num_gpus) in enumerate((("2b", 8), ("14b", 32))):
        work = read(AGIBOT.format(size), num_gpus)
        for name, seconds in PUBLISHED.items():
            assert predict_speed(work, GPUS[name]).seconds == pytest.approx(seconds[i], rel=0.11), (size, name)


def test_recomputing_everything_costs_a_forward_pass_of_the_blocks() -> None:
    none, block_wise = (predict_speed(workload(mode=mode), GPUS["H100"]) for mode in ("none", "block_wise"))
    work = workload()
    sizes = dict(text_tokens=work.text_tokens, timestep_rows=work.latent_shape[0], batch_size=work.batch_size)
    forward = forward_flops(work.net, work.latent_shape, **sizes).total
    assert none.flops_per_gpu == none.model_flops_per_gpu == block_wise.model_flops_per_gpu == 3 * forward
    assert block_wise.flops_per_gpu == pytest.approx(4 * forward, rel=0.03)  # less the ends of the network


def test_modes_cost_as_much_as_they_forget() -> None:
    order = ("none", "mm_only", "linear_selfattn", "predict2_2b_720", "predict2_2b_720_aggressive", "block_wise")
    flops = [predict_speed(workload(mode=mode), GPUS["H100"]).flops_per_gpu for mode in order]
    assert flops == sorted(flops) and flops[0] == flops[1] < flops[2]


def test_splitting_clips_and_adding_micro_batches() -> None:
    work = read(AGIBOT.format("2b"), 8)
    alone = predict_speed(replace(work, context_parallel=1), GPUS["H100"])
    split = predict_speed(work, GPUS["H100"])
    twice = predict_speed(replace(work, grad_accum=2), GPUS["H100"])
    assert split.seconds == pytest.approx(alone.seconds / 2)
    assert twice.seconds == pytest.approx(2 * split.seconds)
    assert split.clips_per_hour == pytest.approx(alone.clips_per_hour) == pytest.approx(twice.clips_per_hour)


def test_gpus_are_found_in_any_spelling() -> None:
    assert find_gpu("h100_nvl") is GPUS["H100-NVL"] and find_gpu("a6000") is GPUS["RTX-A6000"]
    with pytest.raises(ConfigError, match="--gpu H10"):
        find_gpu("H10")
