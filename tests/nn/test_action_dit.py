# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned networks: which frames an action reaches, how learning of it begins, and parts of a clip."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT
from tests.nn.networks import LATENT, inputs, outputs_of, small_net

FRAMES = LATENT[0]
RATIO, ACTIONS, SIZE = 4, 12, 3
FLAT: dict[str, Any] = dict(action_dim=SIZE, num_action_per_chunk=ACTIONS)
CHUNK: dict[str, Any] = dict(action_dim=SIZE, temporal_compression_ratio=RATIO)
KINDS: dict[str, tuple[type[ActionDiT], dict[str, Any]]] = {
    "flat": (FlatActionDiT, FLAT),
    "chunk": (ChunkActionDiT, CHUNK),
    "chunk, tokens": (ChunkActionDiT, {**CHUNK, "action_on_tokens": True, "hidden_dim_in_action_embedder": 10}),
    "chunk, sums": (ChunkActionDiT, {**CHUNK, "summed_action_dims": [0, 2], "summed_action_scale": 0.1}),
}


def action_net(kind: str, *, has_learnt: bool = True, **options: Any) -> DiT:
    """With ``has_learnt`` the last layers of the action MLPs are not zero any more."""
    cls, own = KINDS[kind]
    net = small_net(cls, **own, **options)
    if has_learnt:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name.startswith("action_embedder_") and ".fc2." in name:
                    parameter.normal_(std=0.3, generator=generator)
    return net


def given_actions(actions: Tensor | None = None, **changes: Any) -> dict[str, Any]:
    """Arguments of forward, with random actions unless they are given."""
    given = inputs(**changes)
    if actions is None:
        actions = torch.randn(len(given["x_B_C_T_H_W"]), ACTIONS, SIZE, generator=torch.Generator().manual_seed(3))
    return {**given, "action_B_A_D": actions.to(given["x_B_C_T_H_W"].dtype)}


def changed_frames(net: DiT, given: dict[str, Any], actions: Tensor) -> list[int]:
    """The latent frames whose result is another one with these actions."""
    with torch.no_grad():
        difference = net(**given) - net(**{**given, "action_B_A_D": actions})
    return [frame for frame in range(FRAMES) if bool((difference[:, :, frame] != 0).any())]


def without_blocks(net: DiT) -> DiT:
    net.blocks = nn.ModuleList()
    return net


# Whom an action reaches -----------------------------------------------------------------------------------------------


def test_flat_every_frame_sees_all_actions() -> None:
    net, given = action_net("flat"), given_actions()
    assert changed_frames(net, given, given["action_B_A_D"].flip(1)) == [0, 1, 2, 3]
    assert changed_frames(without_blocks(net), given, given["action_B_A_D"].flip(1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["chunk", "chunk, tokens"])
def test_chunk_each_frame_sees_the_actions_that_lead_to_it(kind: str) -> None:
    net, given = without_blocks(action_net(kind)), given_actions()
    for action in range(ACTIONS):
        actions = given["action_B_A_D"].clone()
        actions[:, action] += 1
        assert changed_frames(net, given, actions) == [1 + action // RATIO]


@pytest.mark.parametrize("kind", ["chunk", "chunk, tokens"])
def test_chunk_given_frames_see_no_actions(kind: str) -> None:
    net, given = without_blocks(action_net(kind)), given_actions()
    given["condition_mask_B_1_T_H_W"][:, :, :3] = 1
    assert changed_frames(net, given, given["action_B_A_D"] + 1) == [3]


def test_summed_numbers_of_an_action_reach_all_later_frames() -> None:
    net, given = without_blocks(action_net("chunk, sums")), given_actions()
    for dim, frames in ((0, [1, 2, 3]), (1, [1])):
        actions = given["action_B_A_D"].clone()
        actions[:, 0, dim] += 1
        assert changed_frames(net, given, actions) == frames
    summed = given["action_B_A_D"].clone()
    summed[..., [0, 2]] = summed[..., [0, 2]].cumsum(1) * 0.1
    plain = action_net("chunk")
    plain.load_state_dict(action_net("chunk, sums").state_dict())
    with torch.no_grad():
        assert torch.equal(action_net("chunk, sums")(**given), plain(**{**given, "action_B_A_D": summed}))


def test_a_picture_has_no_actions() -> None:
    for kind in KINDS:
        net, given = action_net(kind), inputs()
        image = {
            "x_B_C_T_H_W": given["x_B_C_T_H_W"][:, :, :1],
            "timesteps_B_T": given["timesteps_B_T"][:, :1],
            "crossattn_emb_B_S_E": given["crossattn_emb_B_S_E"],
            "is_image": True,
        }
        assert net(**image).shape == image["x_B_C_T_H_W"].shape
        with pytest.raises(ValueError, match="needs the actions between the frames"):
            net(**given)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("flat", (2, ACTIONS - 1, SIZE), "11 actions of 3 numbers, 33 in all, but the network reads 36"),
        ("chunk", (2, ACTIONS - 1, SIZE), "11 actions of 3 numbers, but 4 latent frames take 12 of 3"),
        ("chunk", (2, ACTIONS, SIZE + 1), "12 actions of 4 numbers, but 4 latent frames take 12 of 3"),
    ],
)
def test_actions_of_other_sizes_are_refused(kind: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action_net(kind)(**given_actions(torch.zeros(shape)))


def test_a_network_without_actions_refuses_them() -> None:
    with pytest.raises(ValueError, match="takes no actions"):
        small_net()(**given_actions())


# How learning begins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_begins_to_learn_actions_is_its_base(kind: str) -> None:
    base, net, given = small_net(), action_net(kind, has_learnt=False), given_actions()
    own = net.state_dict()
    assert net.load_state_dict(base.state_dict(), strict=False).unexpected_keys == []
    with torch.no_grad():
        assert torch.equal(net(**given), base(**inputs()))
    firsts = [name for name in own if name.startswith("action_embedder_") and ".fc1." in name]
    assert len(firsts) == (6 if "tokens" in kind else 4)
    bound = net.action_inputs**-0.5
    for name in firsts:  # uniform as torch's layers begin, which a learning rate is used to
        assert 0.5 * bound < float(own[name].abs().max()) <= bound and float(own[name].std()) > 0.4 * bound
    net(**given).square().sum().backward()
    learns = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert {name.replace("fc1", "fc2") for name in firsts} <= learns


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_begun(kind: str) -> None:
    net = action_net(kind, crossattn_proj_in_channels=24)
    with torch.no_grad():
        for tensor in [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]:
            tensor.fill_(float("nan"))
    net.init_weights(torch.Generator().manual_seed(0))
    assert [name for name, tensor in net.state_dict().items() if bool(tensor.isnan().any())] == []


# Parts of a clip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_clip_sees_its_actions(kind: str) -> None:
    net, given = without_blocks(action_net(kind)), given_actions()
    with torch.no_grad():
        whole = net(**given)
        parts = []
        for index in range(2):
            cut = slice(2 * index, 2 * index + 2)
            net.see_part(index, 2)
            part = {key: given[key][:, :, cut] for key in ("x_B_C_T_H_W", "condition_mask_B_1_T_H_W")}
            parts.append(net(**{**given, **part, "timesteps_B_T": given["timesteps_B_T"][:, cut]}))
    assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-5)  # fewer rows sum in another order


# What is applied from outside -----------------------------------------------------------------------------------------


def test_no_text_is_left_out_exactly() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        net, given = action_net("chunk").to(dtype), given_actions(dtype=dtype)
        given["crossattn_emb_B_S_E"] = torch.zeros_like(given["crossattn_emb_B_S_E"])
        with torch.no_grad():
            prepared = net.prepare(given["crossattn_emb_B_S_E"], latent_shape=LATENT, skip_no_text=True)
            assert set(prepared.cross) == {None}
            assert torch.equal(net(**given, prepared=prepared), net(**given))
            given["crossattn_emb_B_S_E"][0, 0, 0] = 1
            some = net.prepare(given["crossattn_emb_B_S_E"], latent_shape=LATENT, skip_no_text=True)
            assert None not in some.cross


# Precision ------------------------------------------------------------------------------------------------------------


def test_float32_networks_are_the_same_with_and_without() -> None:
    for dtype in (torch.float32, torch.float64):
        plain, wide = (action_net("chunk", use_wan_fp32_strategy=flag).to(dtype) for flag in (False, True))
        given = given_actions(dtype=dtype)
        with torch.no_grad():
            assert torch.equal(plain(**given), wide(**given))


def test_what_is_wide_and_what_is_not() -> None:
    net = action_net("chunk", use_wan_fp32_strategy=True).bfloat16()
    outputs = outputs_of(net)
    out = net(**given_actions(dtype=torch.bfloat16))
    found = {name: (one[0] if isinstance(one, tuple) else one).dtype for name, one in outputs.items()}
    wide = ("t_embedder", "t_embedding_norm", "final_layer", *(f"blocks.0.adaln_modulation_{x}" for x in ("mlp.2",)))
    assert {found[name] for name in wide} == {torch.float32}
    narrow = ("x_embedder", "action_embedder_B_D", "action_embedder_B_3D", "blocks.0", "blocks.0.mlp.layer1")
    assert {found[name] for name in narrow} == {torch.bfloat16}
    out.square().sum().backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.bfloat16}
