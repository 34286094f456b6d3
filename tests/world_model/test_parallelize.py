# SPDX-License-Identifier: Apache-2.0
"""Degrees of parallelism that are refused, before anything is built."""

from typing import Any

import pytest
import torch

from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.parallelize import CONTEXT_KEY, degree_problems
from imaginaire import distributed
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError
from imaginaire.training import preflight

CONFIG = "cosmos_predict2/configs/base/config.py"
GOOD = dict(world_size=8, context_parallel_size=2, num_heads=16, state_t=24, fsdp_shard_size=8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        (dict(fsdp_shard_size=32), []),
        (dict(fsdp_shard_size=-1), []),
        (dict(world_size=None, fsdp_shard_size=3), []),
        (dict(context_parallel_size=4, num_heads=6), [CONTEXT_KEY]),
        (dict(context_parallel_size=8, state_t=20), [CONTEXT_KEY]),
        (dict(world_size=9, fsdp_shard_size=0), [CONTEXT_KEY]),
        (dict(context_parallel_size=3), [CONTEXT_KEY, CONTEXT_KEY]),
        (dict(fsdp_shard_size=3), ["model.config.fsdp_shard_size"]),
    ],
)
def test_degrees_that_do_not_divide_are_named(change: dict[str, Any], named: list[str]) -> None:
    assert [key for key, _ in degree_problems(**{**GOOD, **change})] == named


EXPERIMENT = "experiment=predict2_video2world_training_tiny_groot_gr1_480"


def test_a_launch_with_wrong_degrees_stops_before_anything_is_built(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.setattr(distributed, "world_size", lambda: 6)
    wrong = ["model_parallel.context_parallel_size=3", "model.config.fsdp_shard_size=4"]
    config = compose(CONFIG, [EXPERIMENT, "trainer.distributed_parallelism=fsdp", *wrong])
    with pytest.raises(ConfigError) as caught:
        preflight.check_launch(config)
    assert "model_parallel.context_parallel_size: 3 does not divide" in str(caught.value)
    assert "model.config.fsdp_shard_size: 4 does not divide the 6 processes" in str(caught.value)
    notes = "\n".join(preflight.notes(config))
    assert "model_parallel.context_parallel_size: 3 does not divide" in notes
    assert "fsdp_shard_size" not in notes  # of how many processes is not known in a dry run


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.config.pipe_config.net=null", r"pipe_config\.net: not set.*model=NAME"),
        ("model.config.pipe_config.net.sac_config.mode=blockwise", r"sac_config\.mode is 'blockwise'.*block_wise"),
        ("+model.config.pipe_config.net.sac_config.every=2", r"sac_config\.every is no key of it.*every_n_blocks"),
        ("model.config.pipe_config.net.sac_config.every_n_blocks=0", r"every_n_blocks is 0"),
        ("model.config.pipe_config.net.num_heads=0", r"start:\n  - model\.config\.pipe_config\.net\.num_heads: 0"),
        ("checkpoint.type=torch.nn.Linear", r"checkpoint\.type is torch.*Linear, no class of checkpointers"),
    ],
)
def test_a_network_that_cannot_be_made_is_told_before_anything_is_built(
    override: str, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=text):
        preflight.check_launch(compose(CONFIG, [EXPERIMENT, override]))


def _net(**options: Any) -> Video2WorldDiT:
    sizes = dict(max_img_h=8, max_img_w=8, max_frames=4, model_channels=24, num_blocks=1, num_heads=2)
    return Video2WorldDiT(**{**sizes, "adaln_lora_dim": 4, "crossattn_emb_channels": 8, **options})


def test_a_part_has_the_positions_and_limits_of_the_whole_clip() -> None:
    net = _net(extra_per_block_abs_pos_emb=True)
    text, fps = torch.randn(1, 3, 8), torch.tensor([10.0])
    whole = net.prepare(text, latent_shape=(4, 4, 4), fps_B=fps)
    net.see_part(1, 2)
    part = net.prepare(text, latent_shape=(2, 4, 4), fps_B=fps)
    tokens = part.rope[0].shape[0]
    assert all(torch.equal(a, b[tokens:]) for a, b in zip(part.rope, whole.rope, strict=True))
    assert part.extra_1_T_H_W_D is not None and whole.extra_1_T_H_W_D is not None
    assert torch.equal(part.extra_1_T_H_W_D, whole.extra_1_T_H_W_D[:, 2:])
    with pytest.raises(ValueError, match=r"\(6, 4, 4\).*beyond max_frames=4"):
        net.prepare(text, latent_shape=(3, 4, 4), fps_B=fps)
    with pytest.raises(ValueError, match="no part 2 of 2"):
        net.see_part(2, 2)
