# SPDX-License-Identifier: Apache-2.0
"""Starts of parameters."""

import pytest
import torch
from torch import nn

from cosmos_predict2.nn.layers import CUT, Start, starts
from tests.nn.networks import small_net


def test_normals_are_cut_at_three_deviations_and_keep_their_shape() -> None:
    drawn = Start(std=0.5).draw_(torch.empty(400_000), torch.Generator().manual_seed(0)) / 0.5
    expected = nn.init.trunc_normal_(torch.empty(400_000), a=-CUT, b=CUT, generator=torch.Generator().manual_seed(1))
    assert float(drawn.abs().max()) <= CUT * 1.000001
    for level in (-2.9, -2, -1, 0, 0.5, 1, 2, 2.9):
        assert abs(float((drawn < level).float().mean() - (expected < level).float().mean())) < 0.004, level


def test_every_parameter_has_a_start_and_a_foreign_one_is_an_error() -> None:
    net = small_net(extra_per_block_abs_pos_emb=True, use_adaln_lora=False)
    found = starts(net)
    assert found.keys() == dict(net.named_parameters()).keys()
    assert found["t_embedder.1.linear_1.bias"] == Start()
    assert found["blocks.0.adaln_modulation_mlp.1.weight"] == Start()  # its last matrix where it has only one
    assert found["blocks.0.cross_attn.q_norm.weight"] == Start(1.0)
    net.names = nn.Embedding(3, 4)
    with pytest.raises(ValueError, match=r"names\.weight.*method starts\(\)"):
        starts(net)
    net.names.starts = lambda: {"weight": Start(0.5)}  # type: ignore[assignment]
    assert starts(net)["names.weight"] == Start(0.5)
