# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes: activations beside what forward passes of small networks keep, weights, gradients, optimizer and
EMA against those of the wrapped model and its optimizer. Predicted times against published ones."""

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.flops import IMAGE_TOKENS, forward_flops
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.tools.plan.advice import (
    _OTHER_TRAINING,
    Change,
    _averages,
    _batches,
    _more_gpus,
    _nearest,
    _optimizer_state,
)
from cosmos_predict2.tools.plan.memory import activations, predict_memory
from cosmos_predict2.tools.plan.speed import GPUS, HOST_BYTES, PUBLISHED, find_gpu, predict_speed
from cosmos_predict2.tools.plan.workload import Workload, optimizer_of, read_workload
from cosmos_predict2.world_model.assembly import embedders
from cosmos_predict2.world_model.parallelize import POLICIES, apply_recompute
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError
from imaginaire.optim import lora
from imaginaire.optim.adamw import fused_adamw
from tests.kept_bytes import kept_bytes
from tests.models.rank_bytes import CONFIG, measured_rank_bytes

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


@pytest.fixture
def norms_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no kernel for half precision, and keep three more copies."""
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _NormOfGPUs.apply(x, weight))


AS_ON_GPUS = pytest.mark.usefixtures("norms_of_gpus")


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


def prepared(work: Workload) -> tuple[DiT, dict[str, Tensor]]:
    """The workload's network under its policy, and a batch of its size."""
    net = work.net
    net.to(work.precision)
    if work.lora_rank is not None:
        lora.inject(net, work.lora_rank, work.lora_rank, work.lora_targets)
        for adapter in lora.adapters(net).values():
            adapter.lora_A.float()
            adapter.lora_B.float()
    if work.trains_embedders:
        for _, parameter in embedders(net):
            parameter.requires_grad_(True)
    apply_recompute(net, work.mode, work.every_n_blocks)
    t, h, w = work.latent_shape
    b = work.batch_size
    given = dict(x_B_C_T_H_W=torch.randn(b, 16, t, h, w), condition_mask_B_1_T_H_W=torch.zeros(b, 1, t, h, w))
    given |= dict(timesteps_B_T=torch.rand(b, t), crossattn_emb_B_S_E=torch.randn(b, work.text_tokens, 32))
    if net.takes_actions:
        given["action_B_A_D"] = torch.randn(b, 4 * t - 4, 4)
    if isinstance(net, WanDiT):
        given = dict(x_B_C_T_H_W=torch.randn(b, net.in_channels, t, h, w), timesteps_B_T=torch.rand(b, t))
        given["crossattn_emb_B_S_E"] = torch.randn(b, work.text_tokens, net.text_channels)
        if net.image_channels:
            given["image_B_S_E"] = torch.randn(b, IMAGE_TOKENS, net.image_channels)
    return net, {name: tensor.to(work.precision) for name, tensor in given.items()}


SIZES = {
    "narrow": dict(),
    "wide, one clip": dict(net=dict(model_channels=192, num_heads=3), batch_size=1, height=64),
    "one frame in time, much text": dict(pixel_frames=1, text_tokens=100),
}
# What a block_wise run keeps of small networks is little beside texts, tables and the first block's frozen input.
TOLERANCE = {"block_wise": 0.08, "predict2_2b_720_aggressive_v2": 0.08}


def cases() -> Iterator[Any]:
    for mode, rank, dtype in itertools.product(POLICIES, (None, 4), (torch.float32, torch.bfloat16)):
        is_fast = (rank, dtype) == (None, torch.float32) or mode in ("none", "predict2_2b_720")
        case = dict(mode=mode, lora_rank=rank, precision=dtype)
        yield pytest.param(case, TOLERANCE.get(mode, 0.04), marks=[] if is_fast else [pytest.mark.long])
    for size, mode in itertools.product(SIZES.values(), ("none", "mm_only", "predict2_2b_720")):
        yield dict(mode=mode, **size), 0.04
    yield dict(mode="block_wise", every_n_blocks=2), 0.06
    yield dict(lora_rank=4, lora_targets=("q_proj",)), 0.06


@AS_ON_GPUS
@pytest.mark.parametrize(("changes", "tolerance"), [*cases()])
def test_what_is_kept_is_what_is_measured(changes: dict[str, Any], tolerance: float) -> None:
    work = workload(**changes)
    assert activations(work).kept == pytest.approx(measured(work), rel=tolerance)


@AS_ON_GPUS
@pytest.mark.parametrize("mode", ["none", "mm_only", "block_wise"])
def test_embedders_of_actions_beside_adapters(mode: str) -> None:
    """Their gradient comes by the modulations, which keep what they scale."""
    work = workload(mode=mode, lora_rank=4, trains_embedders=True)
    sizes: dict[str, Any] = dict(
        model_channels=128, num_blocks=3, num_heads=2, adaln_lora_dim=16, crossattn_emb_channels=32
    )
    work = replace(work, net=ChunkActionDiT(action_dim=4, max_img_h=64, max_img_w=64, max_frames=64, **sizes))
    assert activations(work).kept == pytest.approx(measured(work), rel=TOLERANCE.get(mode, 0.04))


# Wan2.1 ---------------------------------------------------------------------------------------------------------------


def wan(**changes: Any) -> Workload:
    sizes = dict(model_channels=128, num_blocks=3, num_heads=2, ffn_channels=384, crossattn_emb_channels=48)
    picture = dict(in_channels=36, image_channels=24) if changes.pop("reads_picture", False) else {}
    targets = ("q", "k", "v", "o", "ffn.0", "ffn.2")
    return replace(workload(lora_targets=targets, **changes), net=WanDiT(time_channels=32, **sizes, **picture))


PICTURES = [  # with a picture, and precision
    (False, torch.float32),
    (True, torch.bfloat16),
    pytest.param(False, torch.bfloat16, marks=pytest.mark.long),
    pytest.param(True, torch.float32, marks=pytest.mark.long),
]


@AS_ON_GPUS
@pytest.mark.parametrize(("reads_picture", "precision"), PICTURES)
@pytest.mark.parametrize("mode", ["none", "mm_only", "block_wise"])
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_what_a_network_of_wan_keeps_is_what_is_measured(
    reads_picture: bool, mode: str, lora_rank: int | None, precision: torch.dtype
) -> None:
    work = wan(reads_picture=reads_picture, mode=mode, lora_rank=lora_rank, precision=precision)
    assert activations(work).kept == pytest.approx(measured(work), rel=0.05)


# Peaks, states and times ----


def test_peaks_are_above_what_is_kept() -> None:
    kinds = {mode: activations(workload(mode=mode)) for mode in POLICIES}
    assert kinds["none"].recomputed == 0 < kinds["predict2_2b_720"].recomputed < kinds["block_wise"].recomputed
    assert all(kind.peak > kind.kept for kind in kinds.values())
    assert kinds["block_wise"].peak < kinds["predict2_2b_720"].peak < kinds["none"].peak


@AS_ON_GPUS
@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("make", [partial(workload, net=dict(num_blocks=6)), partial(wan, reads_picture=True)])
def test_the_peak_of_a_step_is_what_is_measured(make: Callable[..., Workload], lora_rank: int | None) -> None:
    for mode in ("none", "block_wise", "mm_only", "predict2_2b_720", "predict2_2b_720_aggressive"):
        work = make(mode=mode, lora_rank=lora_rank, height=160, width=160, batch_size=4)
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


AGIBOT = "predict2_video2world_training_{}_agibot_head_center_fisheye_color"
ACTIONS = "ac_reason_embeddings_rectified_flow_2b_256_320"  # from weights that know none
EMA = "model.config.pipe_config.ema.enabled"
KINDS = ("parameters", "gradients", "optimizer", "ema")


@functools.cache  # composing takes longer than all else here
def read(experiment: str, num_gpus: int, *overrides: str) -> Workload:
    return read_workload(compose(CONFIG, [f"experiment={experiment}", *overrides]), num_gpus)


@pytest.mark.parametrize(
    ("experiment", "world_size", "overrides"),
    [
        (AGIBOT.format("2b"), 8, ()),
        pytest.param(AGIBOT.format("14b"), 32, (), marks=pytest.mark.long),
        (
            "predict2_video2world_lora_training_2b_cosmos_nemo_assets",
            4,
            ("model.config.fsdp_shard_size=2", "model.config.lora_target_modules=q_proj"),
        ),
        (ACTIONS, 8, ("model.config.train_architecture=lora",)),
        ("wan2pt1_i2v_14b_lora_training", 8, ()),
        (AGIBOT.format("tiny"), 1, ()),
        (AGIBOT.format("tiny"), 2, ("optimizer=adamw", "~optimizer.adam_lr", "trainer.distributed_parallelism=ddp")),
        pytest.param(AGIBOT.format("2b"), 8, ("optimizer=adamw", f"{EMA}=False"), marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_state_is_what_the_wrapped_model_and_its_optimizer_hold(
    experiment: str, world_size: int, overrides: tuple[str, ...]
) -> None:
    predicted = predict_memory(read(experiment, world_size, *overrides)).as_dict()
    measured = measured_rank_bytes(experiment, world_size, overrides)
    for kind in KINDS:
        assert predicted[kind] == pytest.approx(measured[kind], rel=0.001), kind


ALONE = ("model_parallel.context_parallel_size=1", "model.config.fsdp_shard_size=0")
LORA = ("model.config.train_architecture=lora", "model.config.pipe_config.net.sac_config.mode=block_wise")


@pytest.mark.parametrize(("overrides", "in_use", "seconds"), [((), 74.75e9, 3.14), (LORA, 23.42e9, 4.22)])
def test_measured_steps_of_one_h100(overrides: tuple[str, ...], in_use: float, seconds: float) -> None:
    """Bytes in use and time of whole training steps at 480p, as documentations/performance.md has them."""
    work = read(AGIBOT.format("2b") + "_480p_16fps", 1, *ALONE, *overrides)
    memory = predict_memory(work)
    assert memory.total - memory.overhead == pytest.approx(in_use, rel=0.01)
    assert predict_speed(work, GPUS["H100"]).seconds == pytest.approx(seconds, rel=0.02)


def test_the_larger_of_encoding_and_training_counts() -> None:
    work = replace(workload(mode="block_wise"), height=704, width=1280, pixel_frames=93, tokenizer="wan")
    heavy = predict_memory(replace(work, context_parallel=8, tokenizer_window=16))
    assert heavy.encoding > heavy.activations
    others = heavy.state - heavy.gradients + heavy.tokenizer + heavy.batch + heavy.overhead
    assert heavy.total == others + heavy.encoding
    twice = predict_memory(replace(work, context_parallel=8, tokenizer_window=16, grad_accum=2))
    assert twice.total - twice.overhead == heavy.total - heavy.overhead + heavy.gradients
    adapts = predict_memory(replace(work, context_parallel=8, tokenizer_window=16, tokenizer_adapts=True))
    assert adapts.encoding < heavy.encoding
    cached = predict_memory(replace(work, context_parallel=8, tokenizer="none"))
    assert cached.encoding == cached.tokenizer == 0
    added = predict_memory(replace(work, context_parallel=8, tokenizer="none", grad_accum=2))
    assert added.working == added.activations + added.gradients > cached.working, "of earlier micro-batches"
    views = workload(tokenizer="wan")
    views.net.num_views = 2
    assert 2 * predict_memory(views).encoding == predict_memory(workload(tokenizer="wan")).encoding


def test_blocks_are_gathered_twice_and_their_gradients_too_where_they_have_some() -> None:
    work = workload(num_gpus=2, shard_size=2)
    block = 4 * sum(p.numel() for p in work.net.get_block(0).parameters())
    assert predict_memory(work).gathered == 4 * block
    assert predict_memory(replace(work, lora_rank=4)).gathered == 2 * block
    masters = [predict_memory(replace(work, optimizer="fusedadamw", has_master=has)).optimizer for has in (True, False)]
    assert masters[0] == masters[1], "weights in float32 are their own masters"


@pytest.mark.slow
def test_a_text_encoder_that_works_in_training_lies_whole_on_every_rank() -> None:
    on_the_way = read("predict2p5_video2world_training_2b_groot_gr1_480", 8)
    without = read("predict2p5_video2world_training_2b_groot_gr1_480", 8, "model.config.text.encoder=null")
    assert on_the_way.encodes_text and not without.encodes_text
    difference = predict_memory(on_the_way).total - predict_memory(without).total
    assert difference == pytest.approx(1.04 * 2 * 7_070_619_136, rel=1e-3)
    layer = 2 * (3584 * 3584 + 512 * 3584) + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    assert 152064 * 3584 + 28 * layer + 3584 == 7_070_619_136


def test_published_times_come_out() -> None:
    for i, (size, num_gpus) in enumerate((("2b", 8), ("14b", 32))):
        work = read(AGIBOT.format(size), num_gpus)
        for name, seconds in PUBLISHED.items():
            assert predict_speed(work, GPUS[name]).seconds == pytest.approx(seconds[i], rel=0.11), (size, name)


def test_recomputing_everything_costs_a_forward_pass_of_the_blocks() -> None:
    none, block_wise = (predict_speed(workload(mode=mode), GPUS["H100"]) for mode in ("none", "block_wise"))
    work = workload()
    sizes = dict(text_tokens=work.text_tokens, timestep_rows=work.latent_shape[0], batch_size=work.batch_size)
    forward = forward_flops(work.net, work.latent_shape, **sizes).total
    assert none.flops_per_gpu == none.model_flops_per_gpu == block_wise.model_flops_per_gpu == 3 * forward
    assert block_wise.flops_per_gpu == pytest.approx(4 * forward, rel=0.03)  # less the ends of the network
    third = predict_speed(workload(mode="block_wise", every_n_blocks=3), GPUS["H100"]).flops_per_gpu
    assert 3 * (third - none.flops_per_gpu) == pytest.approx(block_wise.flops_per_gpu - none.flops_per_gpu)
    alike = [Change(workload(mode=mode), (mode,)) for mode in ("block_wise", "none")]
    found = _nearest(alike, replace(GPUS["H100"], peak=1e9), 1e12)
    assert found is not None and found.overrides == ("none",), "of those that change as little the fastest"


def test_what_lies_on_the_host_is_copied_after_a_step_or_beside_it() -> None:
    gpu, work = replace(GPUS["H100"], peak=1e30), workload(optimizer="fusedadamw", net=dict(model_channels=512))
    away = replace(work, offloads_optimizer=True, grad_accum=2)
    here, there = predict_memory(work), predict_memory(away)
    assert (there.optimizer, there.host, there.moved) == (0, here.optimizer, 2 * here.optimizer)
    waits = [predict_speed(replace(one, grad_accum=2), gpu).seconds for one in (work, away)]
    assert waits[1] - waits[0] == pytest.approx(there.moved / HOST_BYTES)
    lora = replace(work, lora_rank=4, mode="block_wise")
    swapped = replace(lora, swap_blocks=3)
    memory, wait = predict_memory(swapped), predict_speed(swapped, gpu).seconds
    assert memory.host > memory.gathered > 0 and memory.moved_beside == 2 * memory.host
    assert wait == max(predict_speed(lora, gpu).seconds, memory.moved_beside / HOST_BYTES)
    sharded = [replace(one, num_gpus=2, shard_size=2, has_average=True) for one in (work, lora)]
    found = " ".join(str(c.overrides) for one in sharded for kind in _OTHER_TRAINING + (_averages,) for c in kind(one))
    assert "ema.enabled" in found and not any(word in found for word in ("offload", "swap_blocks", "frozen_weights"))
    assert not [*_optimizer_state(lora)], "adapters have little state"


def test_modes_cost_as_much_as_they_forget() -> None:
    order = ("none", "mm_only", "linear_selfattn", "predict2_2b_720", "predict2_2b_720_aggressive", "block_wise")
    flops = [predict_speed(workload(mode=mode), GPUS["H100"]).flops_per_gpu for mode in order]
    assert flops == sorted(flops) and flops[0] == flops[1] < flops[2]


def test_splitting_clips_and_adding_micro_batches() -> None:
    work = read(AGIBOT.format("2b"), 8)
    alone = predict_speed(replace(work, context_parallel=1), GPUS["H100"])
    split = predict_speed(work, GPUS["H100"])
    twice = predict_speed(replace(work, grad_accum=2), GPUS["H100"])
    assert split.seconds == pytest.approx(alone.seconds / 2)
    assert twice.seconds == pytest.approx(2 * split.seconds)
    assert split.clips_per_hour == pytest.approx(alone.clips_per_hour) == pytest.approx(twice.clips_per_hour)


def test_changes_keep_the_clips_of_a_step_and_the_sharding_over_all_gpus() -> None:
    (single,) = _batches(workload(batch_size=4, grad_accum=3))
    assert (single.work.batch_size, single.work.grad_accum) == (1, 12)
    assert "trainer.grad_accum_iter=12" in single.overrides
    for more in _more_gpus(workload(num_gpus=2, shard_size=2)):
        assert more.work.shard_size == more.work.num_gpus > 2
        assert f"model.config.fsdp_shard_size={more.work.num_gpus}" in more.overrides
    over_all = ("model.config.fsdp_shard_size=-1", "trainer.distributed_parallelism=fsdp")
    assert read(AGIBOT.format("tiny"), 4, *over_all).shard_size == 4
    views = read("predict2_multiview_training_tiny_waymo5views", 1)
    assert views.text_tokens == views.net.num_views * 64 == 128, "a text for each"
    node = {"_target_": fused_adamw}
    assert optimizer_of(node) == ("fusedadamw", True)


def test_gpus_are_found_in_any_spelling() -> None:
    assert find_gpu("h100_nvl") is GPUS["H100-NVL"] and find_gpu("a6000") is GPUS["RTX-A6000"]
    with pytest.raises(ConfigError, match="--gpu H10"):
        find_gpu("H10")
