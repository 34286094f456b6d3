# SPDX-License-Identifier: Apache-2.0
"""Seconds per iteration, from operations and the share of its peak that each GPU reached in published runs.

A forward pass is F operations, a backward pass twice that (less where the weights are frozen), and what the policy
computes anew comes on top. Encoding the clips, exchanges between ranks and the optimizer are within the share.
What lies on the host is copied: blocks beside the computation, to the card alone; state after it, there and back.
Reinforcement learning rolls out, asks a reference and trains several steps of a clip: passes of F, and of all three.
The time of rewards is not in it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cosmos_predict2.nn.flops import Letters, forward_flops
from cosmos_predict2.tools.plan.memory import OF_IMAGE, OF_TEXT, predict_memory, role
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.parallelize import POLICIES
from imaginaire.errors import ConfigError, near


@dataclass(frozen=True)
class GPU:
    peak: float  # dense bfloat16 operations per second, summed in float32
    memory: float  # in GB of 2^30 bytes, as PyTorch reports it
    efficiency: float  # share of the peak in training, with what is recomputed
    usual_count: int = 8  # in a run


# AgiBot post-training at 720p and 93 frames, one clip for two GPUs (2B on 8) and for eight (14B on 32), took
#     B200 6.05 and 6.27 s, H100 NVL 10.07 and 8.72 s, A100 22.5 and 22.14 s (published with the models).
# A GPU computes 2952 and 2946 TFLOP in a step of these, so that it reached the shares below on average.
PUBLISHED = {"B200": (6.05, 6.27), "H100-NVL": (10.07, 8.72), "A100": (22.5, 22.14)}
PUBLISHED_FLOPS = (2952e12, 2946e12)
_PEAKS = {"B200": 2250e12, "H100-NVL": 835e12, "A100": 312e12}
_SHARES = {
    name: sum(flops / (seconds * _PEAKS[name]) for flops, seconds in zip(PUBLISHED_FLOPS, times)) / 2
    for name, times in PUBLISHED.items()
}

MEASURED_H100 = 1031e12 / (3.14 * 989e12)  # 2B at 480p, 93 frames, one clip (documentations/performance.md)

GPUS = {
    "A100": GPU(312e12, 79, _SHARES["A100"]),
    "A100-40": GPU(312e12, 39, _SHARES["A100"]),
    "H100": GPU(989e12, 79, MEASURED_H100),
    "H100-NVL": GPU(835e12, 93, _SHARES["H100-NVL"]),
    "H200": GPU(989e12, 140, MEASURED_H100),
    "B200": GPU(2250e12, 178, _SHARES["B200"]),
    "GB200": GPU(2250e12, 183, _SHARES["B200"]),
}
# Not published: taken to reach the share of the A100. Peaks by NVIDIA's data sheets, without sparsity.
_CARDS = {
    "L40S": (362e12, 44.4), "L40": (181e12, 44.4), "A40": (150e12, 44.4), "L4": (121e12, 22.0), "A10": (125e12, 22.0),
    "A10G": (70e12, 22.0), "RTX-A4000": (77e12, 15.6), "RTX-A5000": (111e12, 23.6), "RTX-A6000": (155e12, 47.4),
    "RTX-6000-Ada": (364e12, 47.4), "RTX-PRO-6000": (503e12, 94.9), "RTX-3090": (71e12, 23.6),
    "RTX-4060-Ti-16": (44e12, 15.6), "RTX-4070": (58e12, 11.6),
    "RTX-4080": (98e12, 15.6), "RTX-4090": (165e12, 23.6), "RTX-5080": (113e12, 15.5),
    "RTX-5090": (210e12, 31.4),
}  # fmt: skip
for _name, (_peak, _memory) in _CARDS.items():
    GPUS[_name] = GPU(_peak, _memory, _SHARES["A100"], usual_count=1 if _name.startswith("RTX") else 8)
SLOWER = {torch.float32: 15.0, torch.float64: 15.0}  # than half precision, about
ADAPTERS = 1.15  # as long as their operations in half precision, for they compute in float32; measured there, too
HOST_BYTES = 20e9  # a second between the host's pinned memory and a card, each way: PCIe 4 with 16 lanes; not measured
LAUNCHES = 2e-3  # seconds a block at least, forward and backward: small networks wait for their kernels to start


@dataclass(frozen=True)
class Speed:
    """One iteration of all GPUs."""

    flops_per_gpu: float  # what each computes
    model_flops_per_gpu: float  # of these, what the model asks for: recomputation is not in it
    seconds: float
    utilisation: float  # model operations by the peak
    clips_per_hour: float
    hours: float | None  # for trainer.max_iter


def find_gpu(name: str) -> GPU:
    """The GPU of a name in any case, with or without "RTX", or an error that lists the known ones."""
    known = {known.lower(): gpu for known, gpu in GPUS.items()}
    key = name.lower().replace("_", "-").replace(" ", "-")
    for spelling in (key, f"rtx-{key}"):
        if spelling in known:
            return known[spelling]
    raise ConfigError(f"--gpu {name} is not known.{near(name, GPUS)}")


def predict_speed(work: Workload, gpu: GPU) -> Speed:
    """Time and operations of an iteration."""
    sizes: dict[str, Any] = dict(text_tokens=work.text_tokens, batch_size=work.batch_size)
    forward = forward_flops(work.net, work.latent_shape, timestep_rows=work.latent_shape[0], **sizes)
    attention = forward.self_attention + forward.cross_attention
    maps = forward.linear + forward.other
    backward = 2 * attention + (2 if work.lora_rank is None else 1) * maps  # frozen weights take no gradient
    share = work.grad_accum / work.context_parallel
    trained, others = 1.0, 0.0  # passes of a micro-batch with and without a gradient
    if work.passes is not None:
        trained = work.per_micro_batch(work.passes.with_gradient)
        others = work.per_micro_batch(work.passes.without_gradient)
    needed = share * (trained * (forward.total + backward) + others * forward.total)
    done = needed + share * trained * _recomputed(work)
    computing = done / (gpu.peak * gpu.efficiency) * SLOWER.get(work.precision, 1.0)
    if work.lora_rank is not None and work.precision.itemsize < 4:
        computing *= ADAPTERS
    seconds = max(computing, LAUNCHES * len(work.net.blocks) * work.grad_accum * (trained + others / 3))
    memory = predict_memory(work)  # copies of swapped blocks run beside the computation, those of state after it
    seconds = max(seconds, memory.moved_beside / HOST_BYTES) + memory.moved / HOST_BYTES
    hours = None if work.max_iter is None else work.max_iter * seconds / 3600
    return Speed(done, needed, seconds, needed / (seconds * gpu.peak), work.clips_per_step * 3600 / seconds, hours)


def _recomputed(work: Workload) -> float:
    """Operations that the backward pass of a micro-batch does a second time, of all ranks of a clip."""
    policy = POLICIES[work.mode]
    if policy is None:
        return 0.0
    net = work.net
    block: torch.nn.Module = net.get_block(0)
    tokens, text = work.batch_size * work.tokens, work.batch_size * work.text_tokens
    frames, pictures = work.batch_size * work.latent_shape[0], Letters(net).image_tokens
    of_context = dict.fromkeys(OF_TEXT, text) | dict.fromkeys(OF_IMAGE, work.batch_size * pictures)
    total = 0.0
    for name, module in block.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in policy.linears:
            rows = of_context.get(role(name), tokens)
            rows = frames if name.startswith("adaln_modulation") else rows
            total += 2 * rows * module.in_features * module.out_features
    keys = {"self_attn": work.tokens, "cross_attn": work.text_tokens + pictures}
    total += sum(4 * tokens * n * net.model_channels for name, n in keys.items() if name not in policy.attentions)
    return total * len(range(0, len(net.blocks), work.every_n_blocks))
