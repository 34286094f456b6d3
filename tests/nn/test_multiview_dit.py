# SPDX-License-Identifier: Apache-2.0
"""The multi-view network: each view has its text, its positions and its camera's numbers; released names and shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.released import NETWORKS
from imaginaire.checkpoint.weights import is_extra

SIZES = dict(model_channels=48, num_heads=2, adaln_lora_dim=8, crossattn_emb_channels=12)
LIMITS = dict(max_img_h=8, max_img_w=8, max_frames=8)
V2W = Path(__file__).parent.parent / "golden" / "video2world" / "manifest_v2w_2B.json"
V, T, H, W, S = 3, 4, 4, 6, 5


def make_net(view_ids: tuple[int, ...] = (4, 0, 1), num_blocks: int = 2, **options: Any) -> MultiViewDiT:
    torch.manual_seed(0)
    net = MultiViewDiT(view_ids=view_ids, num_blocks=num_blocks, **SIZES, **LIMITS, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def inputs(batch: int = 2, num_views: int = V) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(batch, 1, T, num_views * H, W)
    mask[:, :, :1] = 1
    return dict(
        x_B_C_T_H_W=torch.randn(batch, 16, T, num_views * H, W, generator=generator),
        timesteps_B_T=torch.rand(batch, 1, generator=generator),
        crossattn_emb_B_S_E=torch.randn(batch, num_views * S, 12, generator=generator),
        condition_mask_B_1_T_H_W=mask,
        fps_B=torch.full((batch,), 10.0),
    )


def by_view(x_B_C_T_H_W: Tensor) -> tuple[Tensor, ...]:
    return x_B_C_T_H_W.chunk(V, dim=3)


@torch.no_grad()
def test_a_text_of_a_view_reaches_that_view_alone() -> None:
    """In one block, whose self-attention comes before the text."""
    net, given = make_net(num_blocks=1), inputs()
    before = by_view(net(**given))
    changed = given["crossattn_emb_B_S_E"].clone()
    changed[:, S : 2 * S] += 1
    after = by_view(net(**given | {"crossattn_emb_B_S_E": changed}))
    assert [torch.allclose(a, b, atol=1e-6) for a, b in zip(before, after)] == [True, False, True]


@torch.no_grad()
def test_self_attention_is_of_all_views() -> None:
    net, given = make_net(), inputs()
    before = net(**given)
    changed = given["x_B_C_T_H_W"].clone()
    changed[:, :, :, :H] += 1
    moved = (net(**given | {"x_B_C_T_H_W": changed}) - before).abs()
    assert all(part.amax() > 1e-3 for part in by_view(moved))


@torch.no_grad()
def test_views_are_told_apart_by_their_camera_and_not_by_their_place() -> None:
    """Positions begin anew in each view: the views in another order are the same videos in that order."""
    given = inputs()
    made = by_view(make_net((4, 0, 1))(**given))
    order = [2, 0, 1]
    x = torch.cat([by_view(given["x_B_C_T_H_W"])[i] for i in order], dim=3)
    text = given["crossattn_emb_B_S_E"].unflatten(1, (V, S))[:, order].flatten(1, 2)
    other = make_net(tuple((4, 0, 1)[i] for i in order))
    found = by_view(other(**given | {"x_B_C_T_H_W": x, "crossattn_emb_B_S_E": text}))
    for place, i in enumerate(order):
        torch.testing.assert_close(found[place], made[i], rtol=1e-4, atol=1e-4)
    same = by_view(make_net((1, 0, 4))(**given))
    assert not torch.allclose(same[0], made[0], atol=1e-3)


@torch.no_grad()
def test_one_view_is_a_video2world_network_with_its_camera_as_channels() -> None:
    net, given = make_net((3,)), inputs(num_views=1)
    plain = Video2WorldDiT(
        in_channels=23, out_channels=16, num_blocks=2, rope_enable_fps_modulation=True, **SIZES, **LIMITS
    )
    own = {k: v for k, v in net.state_dict().items() if "pos_embedder" not in k and k != "view_embeddings.weight"}
    weight = own["x_embedder.proj.1.weight"].unflatten(1, (25, 4))  # latents, masks, camera -> latents, camera, masks
    order = [*range(16), *range(18, 25), 16, 17]
    own["x_embedder.proj.1.weight"] = weight[:, order].flatten(1)
    assert not plain.load_state_dict(own, strict=False).unexpected_keys
    camera = net.view_embeddings.weight[3][None, :, None, None, None].expand(2, -1, T, H, W)
    x = torch.cat([given["x_B_C_T_H_W"], camera], dim=1)
    torch.testing.assert_close(net(**given), plain(**given | {"x_B_C_T_H_W": x}), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prepared_values_and_times_of_each_frame_change_nothing() -> None:
    net, given = make_net(), inputs()
    whole = net(**given)
    prepared = net.prepare(given["crossattn_emb_B_S_E"], latent_shape=(T, V * H, W), fps_B=given["fps_B"])
    assert torch.equal(net(**given | {"crossattn_emb_B_S_E": None, "prepared": prepared}), whole)
    for rows in (T, V * T):
        times = given["timesteps_B_T"].expand(-1, rows)
        torch.testing.assert_close(net(**given | {"timesteps_B_T": times}), whole, rtol=1e-4, atol=1e-5)
    other = given["timesteps_B_T"].repeat(1, V * T)
    other[:, T : 2 * T] = 0.5
    assert not torch.allclose(net(**given | {"timesteps_B_T": other}), whole, atol=1e-4)


def test_the_frame_rate_counts_whatever_a_published_configuration_says() -> None:
    net, given = make_net(rope_enable_fps_modulation=False, state_t=8), inputs()
    with torch.no_grad():
        assert not torch.allclose(net(**given), net(**given | {"fps_B": torch.full((2,), 30.0)}), atol=1e-4)
        with pytest.raises(ValueError, match="frame rate"):
            net(**given | {"fps_B": None})


def test_names_and_shapes_are_those_of_the_released_network() -> None:
    """Those of the 2B Video2World network, which the reference lists, but for what the page on this one names."""
    listed = {name: shape for name, (shape, _) in json.loads(V2W.read_text())["v2w_2B"].items()}
    expected = {name: shape for name, shape in listed.items() if not is_extra(name)}
    positions = {name: shape for name, shape in listed.items() if "pos_embedder" in name}
    assert len(positions) == 3
    expected["x_embedder.proj.1.weight"] = [2048, 100]
    expected["view_embeddings.weight"] = [7, 7]
    options = {
        key.replace("pos_embedder.", f"pos_embedder_options.n_cameras_{n}."): shape
        for key, shape in positions.items()
        for n in range(1, 8)
    }
    with torch.device("meta"):
        net = MultiViewDiT(**NETWORKS["2B multiview"])
    found = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    assert {name: shape for name, shape in found.items() if not is_extra(name)} == expected
    assert {name: shape for name, shape in found.items() if "pos_embedder" in name} == options
    assert net.num_views == 7


def test_operations_count_the_text_of_each_view_once() -> None:
    net = make_net()
    plain = Video2WorldDiT(num_blocks=2, **SIZES, **LIMITS)
    ours, theirs = (forward_flops(one, (T, V * H, W), text_tokens=n) for one, n in ((net, V * S), (plain, S)))
    assert (ours.cross_attention, ours.self_attention) == (theirs.cross_attention, theirs.self_attention)


@pytest.mark.parametrize(
    ("options", "given", "named"),
    [
        (dict(view_ids=(0, 7)), {}, r"\[7\] are none of 0 ... 6"),
        (dict(concat_view_embedding=False), {}, "concat_view_embedding=True"),
        (dict(), {"x_B_C_T_H_W": torch.zeros(2, 16, T, 8, W)}, "8 high do not hold 3 views"),
        (dict(), {"crossattn_emb_B_S_E": torch.zeros(2, 7, 12)}, "7 tokens"),
        (dict(), {"timesteps_B_T": torch.zeros(2, 5)}, "timesteps have shape"),
    ],
)
def test_wrong_inputs_are_named(options: dict[str, Any], given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_net(**options)(**inputs() | given)
    with pytest.raises(ValueError, match="no causal form"):
        make_net().be_causal()
