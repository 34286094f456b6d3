# SPDX-License-Identifier: Apache-2.0
"""The map of names to diffusers' transformer and back, and its configuration."""

from typing import Any

import pytest
import torch
from torch import nn

from cosmos_predict2.checkpoints import from_diffusers_name, to_diffusers_name
from cosmos_predict2.checkpoints.diffusers_names import diffusers_config, net_kwargs
from cosmos_predict2.checkpoints.dit_weights import is_diffusers
from cosmos_predict2.checkpoints.download import dit_manifest
from cosmos_predict2.released import NETWORKS
from imaginaire.checkpoint.weights import is_extra
from imaginaire.errors import CheckpointError
from tests.checkpoints.nets import SMALL, random_net

CASES: list[dict[str, Any]] = [
    {},
    dict(is_image=True),
    dict(crossattn_proj_in_channels=24),
    dict(extra_per_block_abs_pos_emb=True),
    dict(patch_temporal=2, concat_padding_mask=False, mlp_ratio=2.0),
    dict(rope_enable_fps_modulation=True),
]


def _diffusers_net(config: dict[str, Any]) -> nn.Module:
    from diffusers import CosmosTransformer3DModel

    with torch.device("meta"):
        return CosmosTransformer3DModel(**{key: value for key, value in config.items() if not key.startswith("_")})


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_names_and_shapes_are_those_of_diffusers_network(changes: dict[str, Any]) -> None:
    net = random_net(**changes)
    arguments = {**SMALL, **{key: value for key, value in changes.items() if key != "is_image"}}
    theirs = _diffusers_net(diffusers_config(arguments, has_condition_mask="is_image" not in changes))
    renamed = {to_diffusers_name(name): tuple(tensor.shape) for name, tensor in net.named_parameters()}
    assert renamed == {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_map_is_a_bijection_on_the_parameters(network: str) -> None:
    manifest = dit_manifest(network)
    there = {name: to_diffusers_name(name) for name in manifest}
    assert {name for name, mapped in there.items() if mapped is None} == {n for n in manifest if is_extra(n)}
    mapped = [name for name in there.values() if name is not None]
    assert len(set(mapped)) == len(mapped)
    assert all(from_diffusers_name(mapped) == name for name, mapped in there.items() if mapped is not None)
    assert is_diffusers(mapped) and not is_diffusers(manifest)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("action_embedder_B_D.fc1.weight", "action-conditioned"),
        ("view_embeddings.weight", "multiview"),
        ("blocks.0.self_attn.q_proj.lora_A.default.weight", "merge"),
        ("t_embedder.1.linear_1.bias", "AdaLN-LoRA"),
        ("blocks.0.self_attn.x_embedder.proj.1.weight", "not a name"),
        ("my_blocks.0.self_attn.q_proj.weight", "not a name"),
    ],
)
def test_names_without_a_place_there_are_refused(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_diffusers_name(name)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_configuration_comes_back_as_it_went(changes: dict[str, Any]) -> None:
    arguments = {**SMALL, **{key: value for key, value in changes.items() if key != "is_image"}}
    back = net_kwargs(diffusers_config(arguments, has_condition_mask="is_image" not in changes))
    assert {key: back[key] for key in arguments} == arguments


def test_the_published_configurations_are_these() -> None:
    config = diffusers_config(NETWORKS["14B Video2World"])
    expected = dict(in_channels=17, num_attention_heads=40, attention_head_dim=128, num_layers=36)
    expected |= dict(max_size=[128, 240, 240], patch_size=[1, 2, 2], text_embed_dim=1024, adaln_lora_dim=256)
    expected |= dict(out_channels=16, mlp_ratio=4.0, concat_padding_mask=True, extra_pos_embed_type=None)
    assert {key: config[key] for key in expected} == expected
    assert config["rope_scale"] == pytest.approx([20 / 24, 2.0, 2.0])
    newer = diffusers_config(NETWORKS["2B Predict2.5"])
    assert newer["use_crossattn_projection"] and newer["crossattn_proj_in_channels"] == 100352
