# SPDX-License-Identifier: Apache-2.0
"""Properties of the network: shapes, precision, gradients, what is computed once, and its errors."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from cosmos_predict2.nn.dit import Video2WorldDiT
from tests.nn.networks import LATENT, inputs, small_net

OPTIONS: dict[str, dict[str, Any]] = {
    "released": {},
    "frame rates": dict(rope_enable_fps_modulation=True),
    "no low rank": dict(use_adaln_lora=False),
    "learned positions": dict(extra_per_block_abs_pos_emb=True),
    "projection": dict(crossattn_emb_channels=12, crossattn_proj_in_channels=16),
    "no padding mask": dict(concat_padding_mask=False),
    "narrow MLP": dict(mlp_ratio=2.5),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prepared_equals_unprepared(options: dict[str, Any]) -> None:
    net, given = small_net(**options), inputs()
    expected = net(**given)
    assert expected.shape == given["x_B_C_T_H_W"].shape and expected.dtype == torch.float32
    prepared = net.prepare(given["crossattn_emb_B_S_E"], latent_shape=LATENT, fps_B=given["fps_B"])
    given.update(crossattn_emb_B_S_E=None, fps_B=None)
    assert_close(net(**given, prepared=prepared), expected, rtol=0, atol=0)


def test_one_time_for_all_frames_equals_that_time_for_each() -> None:
    net, given = small_net(), inputs()
    times = given["timesteps_B_T"][:, :1]
    expected = net(**{**given, "timesteps_B_T": times.expand(-1, LATENT[0])})
    for shape in (times, times[:, 0]):
        assert_close(net(**{**given, "timesteps_B_T": shape}), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float64_stays_float64_and_agrees_with_float32(options: dict[str, Any]) -> None:
    net = small_net(**options)
    low = net(**inputs())
    wide = net.double()
    seen = set()
    for module in wide.modules():
        module.register_forward_hook(lambda module, given, out: seen.add(out.dtype) if torch.is_tensor(out) else None)
    high = wide(**inputs(torch.float64))
    assert seen == {torch.float64} and high.dtype == torch.float64
    assert_close(low.double(), high, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradient_reaches_every_parameter(options: dict[str, Any]) -> None:
    net = small_net(**options)
    net(**inputs()).square().mean().backward()
    assert not [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]


def test_a_fresh_network_adds_nothing_to_its_residual() -> None:
    """Zero modulation: gates are zero where no low-rank tensor opens them, so the blocks hand on what they get."""
    net = small_net(random_everywhere=False, use_adaln_lora=False)
    outputs = []
    for module in (net.x_embedder, net.blocks[-1]):
        module.register_forward_hook(lambda module, given, out: outputs.append(out))
    net(**inputs())
    assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_an_image_is_a_video_of_one_frame_of_which_nothing_is_given() -> None:
    net, given = small_net(), inputs()
    given.update(x_B_C_T_H_W=given["x_B_C_T_H_W"][:, :, :1], timesteps_B_T=given["timesteps_B_T"][:, :1])
    mask = given.pop("condition_mask_B_1_T_H_W")[:, :, :1]
    image = net(**given, is_image=True)
    assert_close(image, net(**given, condition_mask_B_1_T_H_W=torch.zeros_like(mask)), rtol=0, atol=0)
    assert not torch.allclose(image, net(**given, condition_mask_B_1_T_H_W=torch.ones_like(mask)), atol=1e-3)


def test_the_padding_mask_is_read_at_the_nearest_pixel() -> None:
    net, given = small_net(), inputs()
    mask = given["padding_mask_B_1_H_W"]
    _, h, w = LATENT
    picked = mask[:, :, torch.arange(h) * mask.shape[2] // h][..., torch.arange(w) * mask.shape[3] // w]
    expected = net(**{**given, "padding_mask_B_1_H_W": picked})
    assert_close(net(**given), expected, rtol=0, atol=0)
    one = F.interpolate(mask[:1], size=(h, w))  # one mask for the batch, and none at all
    both = net(**{**given, "padding_mask_B_1_H_W": one.expand(2, -1, -1, -1)})
    assert_close(net(**{**given, "padding_mask_B_1_H_W": one}), both, rtol=0, atol=0)
    nowhere = net(**{**given, "padding_mask_B_1_H_W": torch.zeros_like(mask)})
    assert_close(net(**{**given, "padding_mask_B_1_H_W": None}), nowhere, rtol=0, atol=0)


# ---- precision of half-precision networks ----------------------------------------------------------------------------


def test_half_precision_is_near_float32() -> None:
    net, given = small_net(), inputs()
    expected = net(**given)
    out = net.to(torch.bfloat16)(**given)  # float32 inputs are cast
    assert out.dtype == torch.bfloat16
    assert float(((out.float() - expected).norm() / expected.norm()).detach()) < 3e-2


def test_times_are_rounded_only_in_module_precision() -> None:
    """0.9990 and 0.9995 are one number in bfloat16."""
    given = inputs(torch.bfloat16)
    for precision, is_same in (("module", True), ("float32", False)):
        net = small_net(timestep_precision=precision).to(torch.bfloat16)
        first, second = (net(**{**given, "timesteps_B_T": torch.full((2, 1), time)}) for time in (0.9990, 0.9995))
        assert torch.equal(first, second) == is_same


# ---- building --------------------------------------------------------------------------------------------------------


def test_a_network_on_the_meta_device_becomes_real() -> None:
    with torch.device("meta"):
        net = small_net(random_everywhere=False)
    assert all(p.is_meta for p in net.parameters())
    real = net.to_empty(device="cpu")
    for buffer in real.buffers():
        buffer.fill_(7)
    expected = small_net()
    real.load_state_dict(dict(expected.named_parameters()), strict=False)
    assert_close(real(**inputs()), expected(**inputs()), rtol=0, atol=0)  # no forward pass reads a buffer's value
    real.reset_buffers()
    assert {name: b.tolist() for name, b in real.named_buffers()} == {
        name: b.tolist() for name, b in expected.named_buffers()
    }


def test_fresh_weights_repeat_with_a_generator_and_have_the_stated_spread() -> None:
    net = small_net(model_channels=96, random_everywhere=False, extra_per_block_abs_pos_emb=True)
    net.init_weights(torch.Generator().manual_seed(3))
    again = copy.deepcopy(net)
    again.init_weights(torch.Generator().manual_seed(3))
    for (name, a), b in zip(net.state_dict().items(), again.state_dict().values()):
        if name not in dict(net.named_parameters()):
            continue
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert bool((a == 1).all())
        elif "adaln_modulation" in name and name.endswith(".2.weight"):
            assert not a.any(), name
        else:
            std = (96 if "extra_pos" in name else a.shape[1]) ** -0.5
            assert float(a.abs().max()) <= 3 * std, name
            assert abs(float(a.std()) / (0.9866 * std) - 1) < 0.1, name  # 0.9866: what cutting at 3 leaves


@pytest.mark.slow
def test_blocks_compile() -> None:
    net, given = small_net(), inputs()
    expected = net(**given)
    for block in net.blocks:
        block.compile(fullgraph=True, backend="eager")
    assert_close(net(**given), expected, rtol=1e-5, atol=1e-5)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pos_emb_cls="sincos"), "pos_emb_cls='sincos'"),
        (dict(num_heads=5), "model_channels=48"),
        (dict(num_heads=6), "heads 8 wide"),
        (dict(num_heads=0), "num_heads=0"),
        (dict(num_blocks=0), "num_blocks=0"),
        (dict(max_img_h=17), "max_img_h=17"),
        (dict(max_frames=7, patch_temporal=2), "max_frames=7"),
        (dict(mlp_ratio=0.0), "mlp_ratio=0.0"),
        (dict(rope_precision="half"), "rope_precision='half'"),
        (dict(timestep_precision="bfloat16"), "timestep_precision='bfloat16'"),
        (dict(atten_backend="flash4"), "'flash4'"),
    ],
)
def test_a_network_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_net(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x_B_C_T_H_W=torch.zeros(2, 17, 4, 6, 8)), "x has 17 channels, the network takes 16"),
        (dict(x_B_C_T_H_W=torch.zeros(2, 16, 4, 18, 8)), "max_img_h=16"),
        (dict(x_B_C_T_H_W=torch.zeros(2, 16, 4, 6, 18)), "max_img_w=16"),
        (dict(x_B_C_T_H_W=torch.zeros(2, 16, 9, 6, 8)), "max_frames=8"),
        (dict(x_B_C_T_H_W=torch.zeros(2, 16, 4, 5, 8)), "not a multiple of the patch"),
        (dict(timesteps_B_T=torch.zeros(2, 3)), r"timesteps have shape \(2, 3\), expected \(2,\) or"),
        (dict(timesteps_B_T=torch.zeros(1, 1)), "timesteps have shape"),
        (dict(crossattn_emb_B_S_E=torch.zeros(2, 5, 24)), "text is 24 wide, the network expects 16"),
        (dict(crossattn_emb_B_S_E=None), "crossattn_emb_B_S_E"),
        (dict(condition_mask_B_1_T_H_W=None), "condition_mask_B_1_T_H_W"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_net()(**inputs(**changes))


def test_frame_rates_must_be_there_and_agree_where_they_count() -> None:
    net = small_net(rope_enable_fps_modulation=True)
    with pytest.raises(ValueError, match="fps_B"):
        net(**inputs(fps_B=None))
    with pytest.raises(ValueError, match="different frame rates, from 10 to 12"):
        net(**inputs(fps_B=torch.tensor([10, 12])))
    assert isinstance(small_net()(**inputs(fps_B=None)), torch.Tensor)  # without modulation nobody asks


def test_a_network_without_texts_is_one_that_is_given_zeros() -> None:
    given = inputs()
    given["crossattn_emb_B_S_E"] = torch.zeros_like(given["crossattn_emb_B_S_E"])
    with_text, without = small_net(), small_net(reads_text=False)
    assert torch.equal(with_text(**given), without(**given))
    prepared = without.prepare(given["crossattn_emb_B_S_E"], latent_shape=LATENT)
    assert torch.equal(without(**given, prepared=prepared), without(**given))
    frozen = [name for name, parameter in without.named_parameters() if not parameter.requires_grad]
    assert frozen and all("cross_attn" in name for name in frozen)
    without(**given).square().mean().backward()
    assert all((parameter.grad is None) == ("cross_attn" in name) for name, parameter in without.named_parameters())
    with pytest.raises(ValueError, match="texts of zeros"):
        without.prepare(inputs()["crossattn_emb_B_S_E"], latent_shape=LATENT)
    with pytest.raises(ValueError, match="crossattn_proj_in_channels"):
        small_net(reads_text=False, crossattn_proj_in_channels=32)


@pytest.mark.parametrize("reads_text", [True, False])
def test_a_forward_pass_asks_for_no_number_of_its_inputs(reads_text: bool) -> None:
    """Else it would wait for a GPU at every step, and be torn apart where it is compiled or captured."""
    net = small_net(Video2WorldDiT, reads_text=reads_text).to("meta")
    given = {name: value.to("meta") for name, value in inputs().items()}
    given["condition_mask_B_1_T_H_W"] = torch.zeros(2, 1, *LATENT, device="meta")
    assert net(**given).shape == given["x_B_C_T_H_W"].shape
