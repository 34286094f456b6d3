# SPDX-License-Identifier: Apache-2.0
"""The formulas of activations against what forward passes of small networks really keep."""

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.tools.plan.memory import activations
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.network import embedders
from cosmos_predict2.world_model.recompute import POLICIES, apply_recompute
from imaginaire.optim import lora
from tests.kept_bytes import kept_bytes

TARGETS = ("q_proj", "k_proj", "v_proj", "output_proj", "mlp.layer1", "mlp.layer2")


class _NormOfGPUs(torch.autograd.Function):
    """RMS norm of half precision as CUDA's kernel does it: it keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def norms_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no kernel for half precision, and keep three more copies."""
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _NormOfGPUs.apply(x, weight))


def workload(**changes: Any) -> Workload:
    net = Video2WorldDiT(
        **{**dict(model_channels=128, num_blocks=3, num_heads=2, adaln_lora_dim=16), **changes.pop("net", {})},
        crossattn_emb_channels=32, max_img_h=64, max_img_w=64, max_frames=64,
    )  # fmt: skip
    numbers: dict[str, Any] = dict(
        net=net, num_gpus=1, shard_size=1, context_parallel=1, batch_size=2, grad_accum=1, pixel_frames=13, height=96,
        width=128, text_tokens=24, precision=torch.float32, lora_rank=None, lora_targets=TARGETS, optimizer="adamw",
        has_master=False, has_average=False, mode="none", every_n_blocks=1, tokenizer="none",
    )  # fmt: skip
    return Workload(**{**numbers, **changes})


def measured(work: Workload) -> int:
    net, given = prepared(work)
    return kept_bytes(lambda: net(**given), [*given.values(), *net.parameters(), *net.buffers()])


def prepared(work: Workload) -> tuple[Video2WorldDiT, dict[str, Tensor]]:
    """The workload's network under its policy, and a batch of its size."""
    net = work.net
    assert isinstance(net, Video2WorldDiT)
    net.to(work.precision)
    if work.lora_rank is not None:
        lora.inject(net, work.lora_rank, work.lora_rank, work.lora_targets)
        for adapter in lora.adapters(net).values():
            adapter.lora_A.float()
            adapter.lora_B.float()
    apply_recompute(net, work.mode, work.every_n_blocks)
    t, h, w = work.latent_shape
    b = work.batch_size
    given = dict(x_B_C_T_H_W=torch.randn(b, 16, t, h, w), condition_mask_B_1_T_H_W=torch.zeros(b, 1, t, h, w))
    given |= dict(timesteps_B_T=torch.rand(b, t), crossattn_emb_B_S_E=torch.randn(b, work.text_tokens, 32))
    return net, {name: tensor.to(work.precision) for name, tensor in given.items()}


SIZES = {
    "narrow": dict(),
    "wide, one clip": dict(net=dict(model_channels=192, num_heads=3), batch_size=1, height=64),
    "one frame in time, much text": dict(pixel_frames=1, text_tokens=100),
}
# What a block_wise run keeps of small networks is little beside texts, tables and the first block's frozen input.
TOLERANCE = {"block_wise": 0.08, "predict2_2b_720_aggressive_v2": 0.08}


CASES = [(mode, rank, dtype) for mode in POLICIES for rank in (None, 4) for dtype in (torch.float32, torch.bfloat16)]
FAST = [case for case in CASES if case[1:] == (None, torch.float32) or case[0] in ("none", "predict2_2b_720")]


@pytest.mark.parametrize(
    ("mode", "lora_rank", "dtype"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.long]) for case in CASES],
)
def test_what_is_kept_is_what_is_measured(mode: str, lora_rank: int | None, dtype: torch.dtype) -> None:
    work = workload(mode=mode, lora_rank=lora_rank, precision=dtype)
    assert activations(work).kept == pytest.approx(measured(work), rel=TOLERANCE.get(mode, 0.04))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["none", "mm_only", "predict2_2b_720"])
def test_other_sizes_too(mode: str, size: str) -> None:
    work = workload(mode=mode, **SIZES[size])
    assert activations(work).kept == pytest.approx(measured(work), rel=0.04)


def test_every_second_block_and_some_adapters() -> None:
    for changes in (dict(mode="block_wise", every_n_blocks=2), dict(lora_rank=4, lora_targets=("q_proj",))):
        work = workload(**changes)
        assert activations(work).kept == pytest.approx(measured(work), rel=0.06)


@pytest.mark.parametrize("mode", ["none", "mm_only", "block_wise"])
def test_embedders_of_actions_beside_adapters(mode: str) -> None:
    """Their gradient comes by the modulations, which keep what they scale."""
    work = workload(mode=mode, lora_rank=4, trains_embedders=True)
    sizes: dict[str, Any] = dict(
        model_channels=128, num_blocks=3, num_heads=2, adaln_lora_dim=16, crossattn_emb_channels=32
    )
    work = replace(work, net=ChunkActionDiT(action_dim=4, max_img_h=64, max_img_w=64, max_frames=64, **sizes))
    predicted = activations(work).kept
    net, given = prepared(work)
    for _, parameter in embedders(net):
        parameter.requires_grad_(True)
    given["action_B_A_D"] = torch.randn(work.batch_size, 12, 4)
    found = kept_bytes(lambda: net(**given), [*given.values(), *net.parameters(), *net.buffers()])
    assert predicted == pytest.approx(found, rel=TOLERANCE.get(mode, 0.04))


def test_peaks_are_above_what_is_kept() -> None:
    kinds = {mode: activations(workload(mode=mode)) for mode in POLICIES}
    assert kinds["none"].recomputed == 0 < kinds["predict2_2b_720"].recomputed < kinds["block_wise"].recomputed
    assert all(kind.peak > kind.kept for kind in kinds.values())
    assert kinds["block_wise"].peak < kinds["predict2_2b_720"].peak < kinds["none"].peak


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_the_peak_of_a_step_is_what_is_measured(lora_rank: int | None) -> None:
    for mode in ("none", "block_wise", "mm_only", "predict2_2b_720", "predict2_2b_720_aggressive"):
        work = workload(mode=mode, lora_rank=lora_rank, height=160, width=160, batch_size=4, net=dict(num_blocks=6))
        assert activations(work).peak == pytest.approx(measured_peak(work), rel=0.06), mode


def measured_peak(work: Workload) -> int:
    """The most bytes that forward and backward hold at a time, besides the gradients of the weights."""
    net, given = prepared(work)
    net(**given).square().mean().backward()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        net(**given).square().mean().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes))
