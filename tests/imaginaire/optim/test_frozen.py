# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in fewer bytes or on the host: what is kept, gradients, state dicts, blocks that are swapped."""

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.parallelize import apply_recompute
from imaginaire.errors import ConfigError
from imaginaire.optim import frozen, lora
from tests.far_device import FarDevice, device, register
from tests.multiprocess import run_distributed

TARGETS = "q_proj,k_proj,v_proj,output_proj,mlp.layer1,mlp.layer2"
SIZES: dict[str, Any] = dict(model_channels=32, num_blocks=4, num_heads=2, adaln_lora_dim=8, crossattn_emb_channels=8)


def _net(mode: str = "block_wise", dtype: torch.dtype = torch.float32, **kept: Any) -> Video2WorldDiT:
    torch.manual_seed(0)
    net = Video2WorldDiT(**SIZES, max_img_h=8, max_img_w=8, max_frames=4)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    net.to(dtype)
    lora.inject(net, 4, 4, TARGETS)
    lora.init_adapters(net, 0, init=False)
    if kept:
        frozen.freeze(net, list(net.blocks), **kept)
    apply_recompute(net, mode)
    return net


def _batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 2, 8, 8, generator=drawn)
    text = torch.randn(2, 5, 8, generator=drawn)
    given = dict(x_B_C_T_H_W=x, condition_mask_B_1_T_H_W=torch.zeros(2, 1, 2, 8, 8), crossattn_emb_B_S_E=text)
    return {name: tensor.to(dtype) for name, tensor in (given | dict(timesteps_B_T=torch.full((2, 2), 0.3))).items()}


def _loss_and_gradients(net: Video2WorldDiT, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    loss = net(**_batch(dtype)).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", ["block_wise", "predict2_2b_720", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_blocks_change_no_number(mode: str, dtype: torch.dtype) -> None:
    wanted = _loss_and_gradients(_net(mode, dtype), dtype)
    for swapped, places in ((1, "0"), (2, "02"), (4, "0123")):
        net = _net(mode, dtype, swap_blocks=swapped)
        found, weights = _loss_and_gradients(net, dtype), frozen.frozen_layers(net)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        assert {name.split(".")[1] for name in weights} == {*places}
        assert not any(weight.fetched for weight in weights.values())  # nothing stays on the device


@pytest.mark.parametrize(("form", "largest"), [("fp8", 1 / 16), ("nf4", 0.16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 128), (7, 33)])
def test_forms_have_small_errors_and_keep_what_they_opened(
    form: str, largest: float, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "OPEN_NUMEL", 150)  # some rows at a time
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[2] = weight[3] = 0
    if form == "fp8":  # a largest number that is 448 times a power of two, and one of the smallest beside it
        weight[3, :2] = torch.tensor([448.0, 3 / 512])
    kept = frozen.FrozenWeight(weight, form, None)
    opened = kept.opened()
    scale = weight.abs() if form == "fp8" else weight.abs().max()
    assert opened.dtype == dtype and opened.shape == weight.shape
    assert bool(((opened - weight).abs() <= largest * scale + 1e-5).all())  # below 2^-6 of the scale, steps are even
    kept.write(opened)
    assert torch.equal(kept.opened(), opened)
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in kept.kept)
    assert bytes_ == frozen.kept_bytes(shape, form, dtype.itemsize)


def test_the_error_of_nf4_is_that_of_the_form() -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    error = (frozen.FrozenWeight(weight, "nf4", None).opened() - weight).abs().mean()
    assert float(error) == pytest.approx(0.0728, rel=0.01)


@pytest.mark.parametrize("kept", [dict(form="nf4"), dict(form="fp8"), dict(swap_blocks=2)], ids=str)
def test_names_and_dtypes_of_a_state_dict_stay(kept: dict[str, Any]) -> None:
    plain, net = _net(dtype=torch.bfloat16), _net(dtype=torch.bfloat16, **kept)
    state = net.state_dict()
    shown = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    assert shown == {name: (value.shape, value.dtype) for name, value in state.items()}
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in net.named_parameters() if p.requires_grad}
    again = _net(dtype=torch.bfloat16, **kept)
    for other in frozen.frozen_layers(again).values():
        other.write(torch.zeros(other.shape))  # of another dtype
        assert (opened := other.opened()).dtype == torch.bfloat16 and not opened.any()
    loaded = {f"net.{name}": value.clone() for name, value in state.items()}
    again.load_state_dict({name.removeprefix("net."): value for name, value in loaded.items()})
    torch._foreach_zero_([*loaded.values()])
    frozen.take(again, {name: value[None] for name, value in loaded.items()}, "net.")  # those of another shape are left
    wanted = _loss_and_gradients(net, torch.bfloat16)
    assert all(map(torch.equal, _loss_and_gradients(again, torch.bfloat16), wanted))
    frozen.take(again, loaded, "net.")
    assert not any(bool(layer.opened().any()) for layer in frozen.frozen_layers(again).values())
    plain.load_state_dict(state)
    assert_close(_loss_and_gradients(plain, torch.bfloat16)[0], wanted[0])


def test_impossible_uses_are_named() -> None:
    net = Video2WorldDiT(**SIZES, max_img_h=8, max_img_w=8, max_frames=4)
    with pytest.raises(ConfigError, match="adapters"):
        frozen.freeze(net, list(net.blocks), "nf4")
    with pytest.raises(ConfigError, match=r"swap_blocks is 5, but the network has 4"):
        _net(swap_blocks=5)
    with pytest.raises(ConfigError, match="merged"):
        lora.merge(_net(form="nf4"))


@pytest.mark.slow
def test_weights_on_the_host_of_another_device() -> None:
    run_distributed(_on_a_far_device, world_size=1)


def _on_a_far_device() -> None:
    register()
    for swapped, form in itertools.product((0, 3), ("full", "nf4")):
        torch.manual_seed(0)
        blocks = [lora.inject(nn.ModuleDict({"q": nn.Linear(24, 24)}), 4, 4, "q") for _ in range(4)]
        net, x = nn.ModuleList(blocks), torch.randn(3, 24)
        frozen.freeze(net, blocks, form, swapped)
        with torch.no_grad():
            wanted = _chain(net, x)
        # The device is a mode itself.
        with FarDevice(), mock.patch.object(frozen, "_disable_current_modes", contextlib.nullcontext):
            net.to(device())
            found = _chain(net, x.to(device())).cpu()
            places = [weight.kept[0].device.type for weight in frozen.frozen_layers(net).values()]
        assert sorted(places) == ["cpu"] * swapped + ["far"] * (len(places) - swapped)
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_a_host_that_runs_ahead_holds_two_swapped_blocks() -> None:
    width, count = 4096, 16  # a product takes milliseconds: all blocks are launched before the first is computed
    net = nn.ModuleList(lora.inject(nn.ModuleDict({"q": nn.Linear(width, width)}), 4, 4, "q") for _ in range(count))
    frozen.freeze(net, list(net), "full", count)
    net.to("cuda")
    x = torch.randn(width, width, device="cuda")
    with torch.no_grad():
        for _ in range(2):  # the first time has the memory of the kernels besides
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["active_bytes.all.current"]
            _chain(net, x)
    torch.cuda.synchronize()
    matrix = 4 * width * width  # of a weight, and of what a layer gives: at most four of these at a time
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= (2 + 6) * matrix


def _chain(net: nn.ModuleList, x: Tensor) -> Tensor:
    for block in net:
        x = block["q"](x)  # type: ignore[index]
    return x
