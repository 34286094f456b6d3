# SPDX-License-Identifier: Apache-2.0
"""The bytes of one rank at the real sizes, by their own wrappers and optimizer, against counts of parameters."""

import math

import pytest

from cosmos_predict2.checkpoints.download import dit_manifest
from imaginaire.checkpoint import weights
from tests.models.rank_bytes import measured_rank_bytes

EMA = "model.config.pipe_config.ema.enabled=True"


def number_of_weights(network: str) -> int:
    state = dit_manifest(network)
    return sum(math.prod(value.shape) for name, value in state.items() if not weights.is_extra(name))


@pytest.mark.parametrize(
    ("size", "shards", "world_size"),
    [pytest.param("2b", 8, 16, marks=pytest.mark.slow), pytest.param("14b", 32, 32, marks=pytest.mark.long)],
)
def test_a_rank_of_the_real_sizes_holds_its_part_of_everything(size: str, shards: int, world_size: int) -> None:
    overrides = (EMA, f"model.config.fsdp_shard_size={shards}")
    found = measured_rank_bytes(f"predict2_video2world_training_{size}_groot_gr1_480", world_size, overrides)
    numbers = number_of_weights(f"{size.upper()} Video2World") / shards
    assert found.pop("buffers") < 10_000
    # bfloat16 weights and gradients; a master and two moments in float32; an average in float32
    expected = {"parameters": 2, "gradients": 2, "optimizer": 12, "ema": 4}
    assert {kind: size / numbers for kind, size in found.items()} == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_with_adapters_only_they_have_gradients_and_moments() -> None:
    found = measured_rank_bytes("predict2_video2world_lora_training_2b_cosmos_nemo_assets", 8)
    base = number_of_weights("2B Video2World") / 8
    width, text = 2048, 1024
    of_a_block = 6 * 2 * width + 2 * (text + width) + 2 * 5 * width  # six square maps, two of the text, two of the MLP
    adapters = 28 * 16 * of_a_block / 8
    expected = {
        "parameters": 2 * base + 4 * adapters,
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
        "ema": 4 * (base + adapters),
    }
    assert {kind: found[kind] for kind in expected} == pytest.approx(expected, rel=2e-3)
