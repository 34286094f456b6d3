# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of weights, gradients, optimizer and EMA against those of the wrapped model and its optimizer."""

import functools
from dataclasses import replace

import pytest

from cosmos_predict2.tools.plan.memory import predict_memory
from cosmos_predict2.tools.plan.speed import GPUS, predict_speed
from cosmos_predict2.tools.plan.workload import Workload, read_workload
from imaginaire.config.compose import compose
from tests.models.rank_bytes import CONFIG, measured_rank_bytes
from tests.tools.plan.test_activations import workload

AGIBOT = "predict2_video2world_training_{}_agibot_head_center_fisheye_color"
ACTIONS = "ac_reason_embeddings_rectified_flow_2b_256_320"  # from weights that know none
KINDS = ("parameters", "gradients", "optimizer", "ema")


@functools.cache  # composing takes longer than all else here
def read(experiment: str, num_gpus: int, *overrides: str) -> Workload:
    return read_workload(compose(CONFIG, [f"experiment={experiment}", *overrides]), num_gpus)


@pytest.mark.parametrize(
    ("experiment", "world_size", "overrides"),
    [
        (AGIBOT.format("2b"), 8, ()),
        (AGIBOT.format("14b"), 32, ()),
        (AGIBOT.format("2b"), 8, ("model.config.train_architecture=lora", "model.config.lora_target_modules=q_proj")),
        ("predict2_video2world_lora_training_2b_cosmos_nemo_assets", 4, ("model.config.fsdp_shard_size=2",)),
        (ACTIONS, 8, ("model.config.train_architecture=lora",)),
        (AGIBOT.format("tiny"), 1, ()),
        (AGIBOT.format("tiny"), 2, ("optimizer=adamw", "~optimizer.adam_lr", "trainer.distributed_parallelism=ddp")),
        (AGIBOT.format("2b"), 8, ("optimizer=adamw", "model.config.pipe_config.ema.enabled=False")),
    ],
)
@pytest.mark.slow
def test_state_is_what_the_wrapped_model_and_its_optimizer_hold(
    experiment: str, world_size: int, overrides: tuple[str, ...]
) -> None:
    predicted = predict_memory(read(experiment, world_size, *overrides)).as_dict()
    measured = measured_rank_bytes(experiment, world_size, overrides)
    for kind in KINDS:
        assert predicted[kind] == pytest.approx(measured[kind], rel=0.001), kind


ALONE = ("model_parallel.context_parallel_size=1", "model.config.fsdp_shard_size=0")
LORA = ("model.config.train_architecture=lora", "model.config.pipe_config.net.sac_config.mode=block_wise")


@pytest.mark.parametrize(("overrides", "in_use", "seconds"), [((), 74.75e9, 3.14), (LORA, 23.42e9, 4.22)])
def test_measured_steps_of_one_h100(overrides: tuple[str, ...], in_use: float, seconds: float) -> None:
    """Bytes in use and time of whole training steps at 480p, as documentations/performance.md has them."""
    work = read(AGIBOT.format("2b") + "_480p_16fps", 1, *ALONE, *overrides)
    memory = predict_memory(work)
    assert memory.total - memory.overhead == pytest.approx(in_use, rel=0.01)
    assert predict_speed(work, GPUS["H100"]).seconds == pytest.approx(seconds, rel=0.02)


def test_the_larger_of_encoding_and_training_counts() -> None:
    work = replace(workload(mode="block_wise"), height=704, width=1280, pixel_frames=93, tokenizer="wan")
    heavy = predict_memory(replace(work, context_parallel=8, tokenizer_window=16))
    assert heavy.encoding > heavy.activations
    others = heavy.state - heavy.gradients + heavy.tokenizer + heavy.batch + heavy.overhead
    assert heavy.total == others + heavy.encoding
    twice = predict_memory(replace(work, context_parallel=8, tokenizer_window=16, grad_accum=2))
    assert twice.total - twice.overhead == heavy.total - heavy.overhead + heavy.gradients
    adapts = predict_memory(replace(work, context_parallel=8, tokenizer_window=16, tokenizer_adapts=True))
    assert adapts.encoding < heavy.encoding
    cached = predict_memory(replace(work, context_parallel=8, tokenizer="none"))
    assert cached.encoding == cached.tokenizer == 0


@pytest.mark.slow
def test_a_text_encoder_that_works_in_training_lies_whole_on_every_rank() -> None:
    on_the_way = read("predict2p5_video2world_training_2b_groot_gr1_480", 8)
    without = read("predict2p5_video2world_training_2b_groot_gr1_480", 8, "model.config.text.encoder=null")
    assert on_the_way.encodes_text and not without.encodes_text
    difference = predict_memory(on_the_way).total - predict_memory(without).total
    assert difference == pytest.approx(1.04 * 2 * 7_070_619_136, rel=1e-3)
    layer = 2 * (3584 * 3584 + 512 * 3584) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert 152064 * 3584 + 28 * layer + 3584 == 7_070_619_136
