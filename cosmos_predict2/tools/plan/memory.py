# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one rank: what lies there all the time, and the larger of what encoding and training add to it.

Activations are formulas of sizes. With n tokens of width D, m tokens of text, F the width of the MLP and R frames with
a noise level of their own, a block whose weights are trained keeps without recomputation, in elements,

    21 n D + 2 n F + 3 m D + R (15 D + 3 rank)        and a few numbers per token that are float32 always.

A frozen map keeps no input, but an adapter on it keeps a float32 copy of that. Embedders of actions that are trained
beside adapters ask for the gradients of modulations, 6 n D a block. The counts are those of fused attention
and norms, as GPUs have them; what a compiler saves by fusing is not in them. Of Wan2.1, whose cross-attention is not
modulated, a block keeps 19 n D + 2 n F + 3 m D + 8 R D, and where it reads i tokens of a picture 2 n D + 3 i D more.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from cosmos_predict2.models.config import Passes
from cosmos_predict2.nn.flops import Letters
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.tokenizers.wan_vae import LIVE_FRAMES
from cosmos_predict2.tools.plan.workload import GB, Workload
from cosmos_predict2.world_model.assembly import embedders
from cosmos_predict2.world_model.parallelize import POLICIES
from imaginaire.optim import frozen, moments

CONTEXT = 1.2 * GB  # CUDA's context and libraries, one process a GPU; 0.8 on an H100
COMMUNICATOR = 0.3 * GB  # buffers of NCCL for each group of ranks
FRAGMENTS = 0.04  # of what is allocated: the allocator's gaps; 0.03 on an H100
WAN_PARAMETERS = 126_892_531
REASON1_PARAMETERS = 7_070_619_136  # of its language model without the head, which is in bfloat16
UMT5_PARAMETERS, CLIP_PARAMETERS = 5_680_910_336, 630_766_080  # of Wan2.1's encoders, in half precision
WAN_CHANNELS = 96  # of its widest maps, at full resolution
SMALLEST_WINDOW = 4  # which it takes by itself where memory is short
ADAPTER_BYTES = 4  # adapters, and what they keep, are float32
OPENING = {"full": 0, "fp8": 4, "nf4": 6}  # for each of the weights that are opened at a time
LOSS_COPIES = 10  # float32 tensors of the latents' shape: clean, noise, noisy, prediction, error and their gradients


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    parameters: int
    gradients: int
    optimizer: int  # moments and float32 masters
    ema: int
    gathered: int  # whole blocks while they are used, or gradients packed for averaging
    tokenizer: int  # its weights
    encoding: int  # peak while a batch becomes latents
    activations: int  # peak in the backward pass
    backward: int  # peak of activations and gradients: the ones go while the others come
    held: int  # gradients of earlier micro-batches, which lie there while the next clips are encoded
    batch: int  # pixels, text, latents and the parts of the loss
    overhead: int  # context, communicators, fragmentation
    text_encoder: int  # its weights, where it works in training
    copies: int  # of trained weights: the reference, the policy that samples
    trajectories: int  # clips that wait for their update, with their conditions
    host: int  # state and weights that lie on the host; not in the total
    moved: int  # of it, between the card and the host after each iteration, both ways
    moved_beside: int  # likewise, while a step is computed

    @property
    def state(self) -> int:
        """Memory that stays from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.ema

    @property
    def total(self) -> int:
        fixed = self.state - self.gradients + self.tokenizer + self.text_encoder + self.batch + self.overhead
        return fixed + self.copies + self.trajectories + self.working

    @property
    def working(self) -> int:
        """Memory that comes and goes within a step, at its peak."""
        return max(self.held + self.encoding, self.gathered + self.backward)

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


@dataclass(frozen=True)
class _Weight:
    """A parameter as a rank has it."""

    name: str
    numel: int  # of the rank's rows
    bytes_each: int
    is_trained: bool
    shape: tuple[int, ...]  # of all ranks' rows
    form: str = ""  # of imaginaire.optim.frozen: no parameter, and in no average
    is_swapped: bool = False

    @property
    def bytes(self) -> int:
        return frozen.kept_bytes(self.shape, self.form, self.bytes_each) if self.form else self.numel * self.bytes_each


@functools.cache  # the same combinations are tried for each size of card
def predict_memory(work: Workload) -> Memory:
    """The memory of rank 0, which has the longest parts."""
    # The same weights at every length of the clips, and however blocks recompute.
    sizes: dict[str, Any] = dict(batch_size=1, grad_accum=1, pixel_frames=1, mode="none", every_n_blocks=1)
    state = _state(replace(work, **sizes, tokenizer="none", has_average=False, encodes_text=False, passes=None))
    gradients, ema = state.gradients, state.average if work.has_average else 0
    gathered = state.opened + (gradients if work.num_gpus > 1 else 0)
    if work.shard_size > 1:  # the block at work and the one fetched ahead, and gradients of one and of one on its way
        block = sum(p.numel() for p in work.net.get_block(0).parameters()) * work.weight_dtype.itemsize
        gathered = 2 * block + (2 * block if work.lora_rank is None else 0)
    host = state.optimizer * work.offloads_optimizer + ema * work.offloads_average + state.swapped
    moved = 2 * state.optimizer * work.offloads_optimizer + ema // 2 * work.offloads_average  # weights in bfloat16
    acts, passes_of_step = activations(work), float(work.grad_accum)  # of clips that are trained on once
    if (of := work.passes) is not None:
        acts = replace(acts, kept=acts.kept * of.graphs)
        passes_of_step *= work.per_micro_batch(of.with_gradient + of.without_gradient / 2)
    held = gradients if work.grad_accum > 1 else 0
    backward = max(acts.peak + held, acts.peak - acts.kept + gradients)
    encoding = _encoding(work, work.tokenizer_window)
    if held + encoding > gathered + backward and work.tokenizer_adapts:
        encoding = min(encoding, max(gathered + backward - held, _encoding(work, SMALLEST_WINDOW)))
    parts = dict(
        parameters=state.parameters,
        gradients=gradients,
        optimizer=state.optimizer * (not work.offloads_optimizer),
        ema=ema * (not work.offloads_average),
        gathered=gathered,
        tokenizer=WAN_PARAMETERS * 2 if work.tokenizer == "wan" else 0,
        text_encoder=_encoders(work),
        encoding=encoding,
        activations=acts.peak,
        backward=backward,
        held=held,
        batch=_batch(work),
        copies=gradients * work.passes.weight_copies if work.passes is not None else 0,
        trajectories=_trajectories(work, work.passes) if work.passes is not None else 0,
        host=host,
        moved=moved,
        moved_beside=int(2 * passes_of_step * state.swapped),
    )
    allocated = Memory(**parts, overhead=0).total
    groups = (work.num_gpus > 1) + (work.context_parallel > 1) + (1 < work.shard_size < work.num_gpus) * 2
    overhead = CONTEXT + groups * COMMUNICATOR + FRAGMENTS * allocated
    return Memory(**parts, overhead=int(overhead))


def _encoders(work: Workload) -> int:
    """Bytes of the encoders of text and pictures that work in training."""
    if not isinstance(work.net, WanDiT):
        return 2 * REASON1_PARAMETERS * work.encodes_text
    return 2 * (UMT5_PARAMETERS * work.encodes_text + CLIP_PARAMETERS * (work.net.image_channels is not None))


@dataclass(frozen=True)
class _State:
    """Bytes of weights and of what is kept for them, wherever it lies."""

    parameters: int  # on the card
    gradients: int
    optimizer: int
    average: int
    swapped: int  # frozen weights on the host
    opened: int  # the block at work, opened, and the one fetched ahead


@functools.cache
def _state(work: Workload) -> _State:
    weights = [*_weights(work)]
    trained, kept = [w for w in weights if w.is_trained], [w for w in weights if w.form]
    opened = 0
    if kept:
        of_block = [w for w in kept if w.name.startswith(f"blocks.{min(work.swapped, default=0)}.")]
        opened = sum(w.numel * w.bytes_each for w in of_block) + sum(w.bytes for w in of_block if w.is_swapped)
        opened += OPENING[work.frozen_weights] * min(frozen.OPEN_NUMEL, max(w.numel for w in kept))
    return _State(
        parameters=sum(w.bytes for w in weights if not w.is_swapped),
        gradients=sum(w.numel * w.bytes_each for w in trained),
        optimizer=_optimizer_bytes(work, trained),
        average=sum(w.numel * max(4, w.bytes_each) for w in weights if not w.form),
        swapped=sum(w.bytes for w in kept if w.is_swapped),
        opened=opened,
    )


@functools.cache  # of a network, whose parameters are many
def _shapes(net: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in net.named_parameters()]


def _weights(work: Workload) -> Iterator[_Weight]:
    """Every parameter by what rank 0 has of it: rows are dealt out, and the first rank gets the odd ones."""
    size, rank = work.weight_dtype.itemsize, work.lora_rank
    in_full = {name for name, _ in embedders(work.net)} if work.trains_embedders else set()
    suffixes, swapped = tuple(f".{target}" for target in work.lora_targets), {f"{i}" for i in work.swapped}

    def weight(name: str, shape: tuple[int, ...], bytes_each: int, is_trained: bool) -> _Weight:
        rows = math.ceil(shape[0] / work.shard_size)
        return _Weight(name, rows * math.prod(shape[1:]), bytes_each, is_trained, shape)

    for name, shape in _shapes(work.net):
        module = name.removesuffix(".weight")
        found = weight(name, shape, size, rank is None or name in in_full)
        if rank is None or len(shape) != 2 or not f".{module}".endswith(suffixes):
            yield found
            continue
        is_swapped = name.startswith("blocks.") and name.split(".")[1] in swapped
        is_kept = work.frozen_weights != "full" or is_swapped
        yield replace(found, form=work.frozen_weights if is_kept else "", is_swapped=is_swapped)
        yield weight(f"{module}.lora_A", (rank, shape[1]), max(4, size), True)
        yield weight(f"{module}.lora_B", (shape[0], rank), max(4, size), True)


def _optimizer_bytes(work: Workload, trained: list[_Weight]) -> int:
    total = 0
    for weight in trained:
        each = weight.bytes_each if work.optimizer == "adamw" else max(4, weight.bytes_each)
        if work.optimizer == "fusedadamw":
            rows = weight.numel // math.prod(weight.shape[1:])
            total += moments.kept_bytes(weight.shape, work.moments, weight.bytes_each, rows)
        else:
            is_muon = work.optimizer == "muon" and len(weight.shape) == 2 and weight.name.startswith("blocks.")
            total += weight.numel * each * (1 if is_muon else 2)
        if work.has_master and weight.bytes_each < 4:
            total += weight.numel * 4
    return total


def _encoding(work: Workload, window: int) -> int:
    """Memory of the Wan tokenizer by the frames that it was measured to have alive; the pixels in [-1, 1] besides."""
    pixels = work.batch_size * work.height * work.width // work.net.num_views  # of one view after the other
    if work.tokenizer == "none":
        return 0
    scaled = pixels * 3 * work.pixel_frames * max(4, work.precision.itemsize) * 2  # float32, once more while scaled
    if work.tokenizer != "wan":
        return scaled
    in_work, remembered = LIVE_FRAMES["encode"]
    window = max(1, min(window, work.pixel_frames - 1))
    return scaled + int(pixels * 2 * (WAN_CHANNELS * (in_work * window + remembered) + 3 * work.pixel_frames))


def _trajectories(work: Workload, passes: Passes) -> int:
    """Memory of each clip: its start and end, the states of its trained steps, and its text."""
    latent = 4 * work.net.in_channels * math.prod(work.latent_shape)
    text = 4 * work.text_tokens * work.net.text_channels
    return passes.clips * (2 * latent + passes.kept_latents * latent // work.context_parallel + text)


def _batch(work: Workload) -> int:
    t, h, w = work.latent_shape
    pixels = work.batch_size * 3 * work.pixel_frames * work.height * work.width  # uint8
    text = 2 * work.batch_size * work.text_tokens * work.net.text_channels * 4
    latents = LOSS_COPIES * work.batch_size * work.net.in_channels * t * h * w * max(4, work.precision.itemsize)
    return pixels + text + latents


# --- activations


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank."""

    kept: int  # by all blocks and what is around them, when the backward pass begins
    recomputed: int  # what the block that is computed anew brings back besides
    transient: int  # gradients in flight while one block goes backward

    @property
    def peak(self) -> int:
        return self.kept + self.recomputed + self.transient


def activations(work: Workload) -> Activations:
    """Activations of a micro-batch under the workload's policy."""
    sizes = _Sizes(work)
    whole = sum(sizes.linears(role(name), adapted) for name, adapted in _linears(work).items())
    is_trained = work.lora_rank is None
    modulates = is_trained or work.trains_embedders
    whole += sizes.around_linears(is_trained, modulates)
    policy = POLICIES[work.mode]
    blocks = len(work.net.blocks)
    n_d = sizes.tokens * sizes.width * sizes.element
    # The MLP's, as measured on CPUs: of its hidden layer while one of its inputs is freed already, and of the residual.
    in_flight = sizes.element if is_trained else 1.5 * max(ADAPTER_BYTES, sizes.element)
    transient = int((sizes.tokens * sizes.hidden + 2 * sizes.tokens * sizes.width) * in_flight)
    ends = sizes.ends(is_trained)
    if policy is None:
        # The final layer keeps its norm and its map's input; a frozen one does not, nor the first block its own.
        own = 2 * n_d if is_trained else n_d * (work.trains_embedders - 1)
        if sizes.is_wan:  # its final layer is float32
            wide = sizes.statistics(sizes.width)
            own = 3 * wide - n_d if is_trained else wide - 2 * n_d
        return Activations(blocks * whole + ends + own, 0, transient)
    light = n_d + sum(sizes.output(name) for name in policy.linears if not sizes.is_wan)  # it has others
    attentions = len(policy.attentions) + ("cross_attn" in policy.attentions and sizes.image > 0)
    light += attentions * (n_d + sizes.statistics(sizes.heads))
    recomputing = len(range(0, blocks, work.every_n_blocks))
    kept = recomputing * light + (blocks - recomputing) * whole + ends
    return Activations(kept, max(0, whole - light), transient)


def _linears(work: Workload) -> dict[str, bool]:
    """The linear maps of a block, and whether each has an adapter."""
    block: torch.nn.Module = work.net.get_block(0)
    names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
    if work.lora_rank is None:
        return dict.fromkeys(names, False)
    return {n: any(n == t or f"blocks.0.{n}".endswith(f".{t}") for t in work.lora_targets) for n in names}


_ROLES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj", "ffn.0": "mlp.layer1", "ffn.2": "mlp.layer2"}
OF_TEXT, OF_IMAGE = ("cross_attn.k_proj", "cross_attn.v_proj"), ("cross_attn.k_img", "cross_attn.v_img")


def role(name: str) -> str:
    """The name that a linear map of a block has in Cosmos-Predict2, where Wan2.1's has another."""
    attention, _, last = name.rpartition(".")
    return _ROLES.get(name) or (f"{attention}.{_ROLES[last]}" if last in _ROLES else name)


class _Sizes(Letters):
    """The letters of the formulas, and the bytes that follow from them."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work.net)
        net = work.net
        self.is_wan = isinstance(net, WanDiT)
        self.image, self.image_width, self.widened = work.batch_size * self.image_tokens, 0, 0
        if isinstance(net, WanDiT):
            self.image_width = net.image_channels or 0
            self.widened = 4 * self.time_embedding  # copies in float32 of what computes so
        self.element = work.precision.itemsize
        self.statistic = max(4, self.element)
        self.tokens = work.batch_size * work.tokens // work.context_parallel  # that one rank works on
        self.text = work.batch_size * work.text_tokens
        self.frames = work.batch_size * work.latent_shape[0] // work.context_parallel
        self.width = net.model_channels
        self.heads = net.num_heads
        self.head_dim = net.head_dim
        self.is_spread, self.work = work.context_parallel > 1, work

    def statistics(self, per_token: int) -> int:
        return self.tokens * per_token * self.statistic

    def output(self, name: str) -> int:
        """Bytes of the result of a block's linear map."""
        if name.startswith("adaln_modulation"):
            is_first_of_two = self.rank and name.endswith(".1")
            return self.frames * (self.rank if is_first_of_two else 3 * self.width) * self.element
        rows = self.text if name in OF_TEXT else self.tokens
        return rows * (self.hidden if name == "mlp.layer1" else self.width) * self.element

    def linears(self, name: str, has_adapter: bool) -> int:
        """Bytes that a linear map keeps of its input, where no other one keeps the same."""
        rows, columns = self.tokens, self.width
        if name in OF_TEXT:
            rows, columns = self.text, self.e
        elif name in OF_IMAGE:
            rows = self.image
        elif name == "mlp.layer2":
            columns = self.hidden
        elif name.startswith("adaln_modulation"):
            rows, columns = self.frames, self.rank if self.rank and name.endswith(".2") else self.width
        is_shared = name in ("self_attn.k_proj", "self_attn.v_proj", *OF_TEXT, *OF_IMAGE)
        if self.work.lora_rank is None:
            return 0 if is_shared else rows * columns * self.element
        if not has_adapter:
            return 0
        inner = rows * self.work.lora_rank * max(ADAPTER_BYTES, self.element)
        if self.element >= ADAPTER_BYTES:  # no copy
            return inner + (0 if is_shared or name.endswith("output_proj") else rows * columns * self.element)
        return inner + rows * columns * ADAPTER_BYTES

    def around_linears(self, is_trained: bool, modulates: bool) -> int:
        """Bytes that a block's norms, modulations, attentions and activations keep; ``modulates`` where modulations
        have a gradient."""
        n_d, n_f = self.tokens * self.width, self.tokens * self.hidden
        norms = 3 * n_d + (3 * n_d if modulates else 0)  # inputs; results, for the gradient of their scales
        gates = (3 * n_d if modulates else 0) + self.frames * self.width * 3 * (3 + 1)
        self_attn = 2 * n_d + 3 * n_d + n_d * (1 + self.is_spread)  # before the norms; q, k, v; the result
        cross = n_d + n_d + n_d + 3 * self.text * self.width
        if is_trained:  # the results are the inputs of the output projections, which count them
            self_attn -= n_d
            cross -= n_d
        per_token = 3 * 2 + 3 * self.heads + 2 * self.heads  # means and deviations; norms of q and k; log-sums
        norms_of_text = self.heads
        if self.is_wan:
            norms -= n_d if modulates else 0
            gates = (2 * n_d if modulates else 0) + self.frames * self.width * 8
            per_token, norms_of_text = 3 * 2 + 3 + 2 * self.heads, 1
        if self.image:  # its attention's result; the sum of both is the input of the output projection
            cross += n_d + 3 * self.image * self.width + (n_d if is_trained else 0)
            per_token += self.heads
        elements = norms + gates + self_attn + cross + n_f
        context = (self.text + self.image) * norms_of_text * self.statistic
        return elements * self.element + self.statistics(per_token) + context

    def ends(self, is_trained: bool) -> int:
        """Bytes outside of the blocks: patches, positions, the final layer's input, the result."""
        result = self.tokens * self.features_out * self.element
        positions = self.tokens // self.work.batch_size * self.head_dim * self.statistic  # of all clips alike
        patches = self.tokens * self.features_in * self.element if is_trained else 0
        embedded = 0
        if self.is_wan:  # what all blocks read of text and picture, and what led to it
            embedded = (self.text + self.image) * self.width * self.element
            if is_trained:
                before = 2 * self.text * self.width + self.image * (self.width + 3 * self.image_width)
                embedded += before * self.element + (self.widened if self.element < 4 else 0)
            result = self.statistics(self.features_out)
        return result + positions + patches + embedded + self.tokens * self.width * self.element
