# SPDX-License-Identifier: Apache-2.0
"""Counts of parameters and operations of the published networks, which are built without memory."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.flops import IMAGE_TOKENS, forward_flops
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import NETWORKS
from tests.nn.networks import LATENT, inputs, small_net

PUBLISHED = [  # size, latents (T, H, W), TFLOP of a forward pass: all, self-attention, linear maps of tokens
    ("2B", (24, 88, 160), 1924.92, 1637.03, 277.80),
    ("2B", (16, 88, 160), 919.54, 727.57, 185.20),
    ("2B", (24, 54, 96), 327.99, 221.91, 102.28),
    ("2B", (16, 54, 96), 169.39, 98.63, 68.19),
    ("14B", (24, 88, 160), 7526.61, 5261.87, 2232.31),
    ("14B", (16, 88, 160), 3848.56, 2338.61, 1488.21),
    ("14B", (24, 54, 96), 1547.39, 713.29, 821.90),
    ("14B", (16, 54, 96), 873.21, 317.02, 547.93),
]


@cache
def published(name: str) -> DiT:
    with torch.device("meta"):
        return (Video2WorldDiT if "Video2World" in name else DiT)(**NETWORKS[name])


@pytest.mark.parametrize(("size", "latent_shape", "total", "self_attention", "linear"), PUBLISHED)
def test_operations_of_published_networks(
    size: str, latent_shape: tuple[int, int, int], total: float, self_attention: float, linear: float
) -> None:
    flops = forward_flops(
        published(f"{size} Video2World"), latent_shape, text_tokens=512, timestep_rows=latent_shape[0]
    )
    found = (flops.total, flops.self_attention, flops.linear)
    assert [round(x / 1e12, 2) for x in found] == [total, self_attention, linear]


@pytest.mark.parametrize(
    "options", [{}, dict(use_adaln_lora=False), dict(crossattn_emb_channels=12, crossattn_proj_in_channels=16)]
)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_formula_counts_what_pytorch_counts(options: dict[str, Any], is_prepared: bool) -> None:
    net, given = small_net(atten_backend="math", **options), inputs()
    prepared = net.prepare(given["crossattn_emb_B_S_E"], latent_shape=LATENT) if is_prepared else None
    with FlopCounterMode(display=False) as counter:
        net(**given, prepared=prepared)
    flops = forward_flops(net, LATENT, text_tokens=5, timestep_rows=LATENT[0], batch_size=2, is_prepared=is_prepared)
    assert flops.total == counter.get_total_flops()


ACTIONS: list[tuple[type[ActionDiT], dict[str, Any]]] = [
    (FlatActionDiT, dict(action_dim=3, num_action_per_chunk=12)),
    (FlatActionDiT, dict(action_dim=36, crossattn_proj_in_channels=24)),
    (ChunkActionDiT, dict(action_dim=3)),
    (ChunkActionDiT, dict(action_dim=3, action_on_tokens=True, hidden_dim_in_action_embedder=10, reads_text=False)),
]


@pytest.mark.parametrize(("cls", "options"), ACTIONS)
@pytest.mark.parametrize("timestep_rows", [1, LATENT[0]])
def test_the_formulas_count_what_reads_actions(
    cls: type[ActionDiT], options: dict[str, Any], timestep_rows: int
) -> None:
    net = small_net(cls, atten_backend="math", **options)
    given, text = inputs(), torch.zeros(2, 5, net.text_channels)
    given |= {"timesteps_B_T": given["timesteps_B_T"][:, :timestep_rows], "crossattn_emb_B_S_E": text}
    with FlopCounterMode(display=False) as counter:
        net(**given, action_B_A_D=torch.ones(2, 12, 3))
    flops = forward_flops(net, LATENT, text_tokens=5, timestep_rows=timestep_rows, batch_size=2)
    assert flops.total == counter.get_total_flops()


@pytest.mark.parametrize("options", [{}, dict(in_channels=36, image_channels=12)])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_formula_counts_wan(options: dict[str, Any], is_prepared: bool) -> None:
    sizes = dict(
        model_channels=32, num_blocks=2, num_heads=2, ffn_channels=48, crossattn_emb_channels=8, time_channels=16
    )
    net = WanDiT(atten_backend="math", **sizes, **options)
    picture = {"image_B_S_E": torch.zeros(2, IMAGE_TOKENS, 12)} if options else {}
    text = torch.zeros(2, 5, 8)
    prepared = net.prepare(text, latent_shape=LATENT, **picture) if is_prepared else None
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, net.in_channels, *LATENT), torch.zeros(2, 1), text, prepared=prepared, **picture)
    flops = forward_flops(net, LATENT, text_tokens=5, batch_size=2, is_prepared=is_prepared)
    assert flops.total == counter.get_total_flops()
