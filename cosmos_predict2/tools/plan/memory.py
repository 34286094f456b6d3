# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one rank: what lies there all the time, and the larger of what encoding and training add to it."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from cosmos_predict2.models.passes import Passes
from cosmos_predict2.tokenizers.wan_vae import LIVE_FRAMES
from cosmos_predict2.tools.plan.activations import activations
from cosmos_predict2.tools.plan.speed import GB
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.network import embedders

CONTEXT = 1.2 * GB  # CUDA's context and libraries, one process a GPU; 0.8 on an H100
COMMUNICATOR = 0.3 * GB  # buffers of NCCL for each group of ranks
FRAGMENTS = 0.04  # of what is allocated: the allocator's gaps; 0.03 on an H100
WAN_PARAMETERS = 126_892_531
REASON1_PARAMETERS = 7_070_619_136  # of its language model without the head, which is in bfloat16
WAN_CHANNELS = 96  # of its widest maps, at full resolution
SMALLEST_WINDOW = 4  # which it takes by itself where memory is short
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
    is_matrix: bool


@functools.cache  # the same combinations are tried for each size of card
def predict_memory(work: Workload) -> Memory:
    """The memory of rank 0, which has the longest parts."""
    weights = [*_weights(work)]
    trained = [w for w in weights if w.is_trained]
    gradients = sum(w.numel * w.bytes_each for w in trained)
    gathered = _gathered(work)
    if work.shard_size == 1 and work.num_gpus > 1:
        gathered += gradients
    acts = activations(work)
    if work.passes is not None:
        acts = replace(acts, kept=acts.kept * work.passes.graphs)
    held = gradients if work.grad_accum > 1 else 0
    backward = max(acts.peak + held, acts.peak - acts.kept + gradients)
    encoding = _encoding(work, work.tokenizer_window)
    if held + encoding > gathered + backward and work.tokenizer_adapts:
        encoding = min(encoding, max(gathered + backward - held, _encoding(work, SMALLEST_WINDOW)))
    parts = dict(
        parameters=sum(w.numel * w.bytes_each for w in weights),
        gradients=gradients,
        optimizer=_optimizer_bytes(work, trained),
        ema=sum(w.numel * max(4, w.bytes_each) for w in weights) if work.has_average else 0,
        gathered=gathered,
        tokenizer=WAN_PARAMETERS * 2 if work.tokenizer == "wan" else 0,
        text_encoder=REASON1_PARAMETERS * 2 if work.encodes_text else 0,
        encoding=encoding,
        activations=acts.peak,
        backward=backward,
        held=held,
        batch=_batch(work),
        copies=gradients * work.passes.weight_copies if work.passes is not None else 0,
        trajectories=_trajectories(work, work.passes) if work.passes is not None else 0,
    )
    allocated = Memory(**parts, overhead=0).total
    groups = (work.num_gpus > 1) + (work.context_parallel > 1) + (1 < work.shard_size < work.num_gpus) * 2
    overhead = CONTEXT + groups * COMMUNICATOR + FRAGMENTS * allocated
    return Memory(**parts, overhead=int(overhead))


def _weights(work: Workload) -> Iterator[_Weight]:
    """Every parameter by what rank 0 has of it: rows are dealt out, and the first rank gets the odd ones."""
    size, rank = work.weight_dtype.itemsize, work.lora_rank
    in_full = {name for name, _ in embedders(work.net)} if work.trains_embedders else set()

    def weight(name: str, shape: Sequence[int], bytes_each: int, is_trained: bool) -> _Weight:
        rows = math.ceil(shape[0] / work.shard_size)
        return _Weight(name, rows * math.prod(shape[1:]), bytes_each, is_trained, len(shape) == 2)

    for name, parameter in work.net.named_parameters():
        shape, module = parameter.shape, name.removesuffix(".weight")
        yield weight(name, shape, size, rank is None or name in in_full)
        if rank is not None and len(shape) == 2 and f".{module}".endswith(tuple(f".{t}" for t in work.lora_targets)):
            yield weight(f"{module}.lora_A", (rank, shape[1]), max(4, size), True)
            yield weight(f"{module}.lora_B", (shape[0], rank), max(4, size), True)


def _optimizer_bytes(work: Workload, trained: list[_Weight]) -> int:
    total = 0
    for weight in trained:
        each = weight.bytes_each if work.optimizer == "adamw" else max(4, weight.bytes_each)
        is_muon = work.optimizer == "muon" and weight.is_matrix and weight.name.startswith("blocks.")
        total += weight.numel * each * (1 if is_muon else 2)
        if work.has_master and weight.bytes_each < 4:
            total += weight.numel * 4
    return total


def _gathered(work: Workload) -> int:
    """Under sharding: the block at work and the one fetched ahead, and the gradients of one and of one on its way."""
    if work.shard_size == 1:
        return 0
    block = sum(p.numel() for p in work.net.get_block(0).parameters()) * work.weight_dtype.itemsize
    return 2 * block + (2 * block if work.lora_rank is None else 0)


def _encoding(work: Workload, window: int) -> int:
    """Memory of the Wan tokenizer by the frames that it was measured to have alive; the pixels in [-1, 1] besides."""
    pixels = work.batch_size * work.height * work.width
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
