# SPDX-License-Identifier: Apache-2.0
"""Seconds per iteration, from operations and the share of its peak that each GPU reached in published runs.

A forward pass is F operations, a backward pass twice that (less where the weights are frozen), and what the policy
computes anew comes on top. Encoding the clips, exchanges between ranks and the optimizer are within the share.
"""

from dataclasses import dataclass

import torch

from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.recompute import POLICIES
from imaginaire.errors import ConfigError, near


@dataclass(frozen=True)
class GPU:
    """Dense bfloat16 operations per second at its peak, and what PyTorch sees of its memory in GB of 2^30 bytes."""

    peak: float
    memory: float
    efficiency: float  # share of the peak in training, what is computed anew counted in


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

GPUS = {
    "A100": GPU(312e12, 79, _SHARES["A100"]),
    "A100-40": GPU(312e12, 39, _SHARES["A100"]),
    "H100": GPU(989e12, 79, _SHARES["H100-NVL"]),  # not published: as the NVL reached
    "H100-NVL": GPU(835e12, 93, _SHARES["H100-NVL"]),
    "H200": GPU(989e12, 140, _SHARES["H100-NVL"]),
    "B200": GPU(2250e12, 178, _SHARES["B200"]),
    "GB200": GPU(2250e12, 183, _SHARES["B200"]),
    "L40S": GPU(362e12, 44, _SHARES["A100"]),
}
SLOWER = {torch.float32: 15.0, torch.float64: 15.0}  # than half precision, about
LAUNCHES = 2e-3  # seconds a block at least, forward and backward: small networks wait for their kernels to start


@dataclass(frozen=True)
class Speed:
    """One iteration of all GPUs."""

    flops_per_gpu: float  # what each computes
    model_flops_per_gpu: float  # of these, what the model asks for: recomputation is not in it
    seconds: float
    utilisation: float  # model operations by the peak
    clips_per_hour: float


def find_gpu(name: str) -> GPU:
    """By name in any case, or an error that lists the known ones."""
    known = {known.lower(): gpu for known, gpu in GPUS.items()}
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in known:
        raise ConfigError(f"--gpu {name} is not known.{near(name, GPUS)}")
    return known[key]


def predict_speed(work: Workload, gpu: GPU) -> Speed:
    """How long an iteration takes."""
    forward = forward_flops(
        work.net,
        work.latent_shape,
        text_tokens=work.text_tokens,
        timestep_rows=work.latent_shape[0],
        batch_size=work.batch_size,
    )
    attention = forward.self_attention + forward.cross_attention
    maps = forward.linear + forward.other
    backward = 2 * attention + (2 if work.lora_rank is None else 1) * maps  # frozen weights take no gradient
    share = work.grad_accum / work.context_parallel
    asked = share * (forward.total + backward)
    done = asked + share * _recomputed(work)
    computing = done / (gpu.peak * gpu.efficiency) * SLOWER.get(work.precision, 1.0)
    seconds = max(computing, LAUNCHES * len(work.net.blocks) * work.grad_accum)
    return Speed(done, asked, seconds, asked / (seconds * gpu.peak), work.clips_per_step * 3600 / seconds)


def _recomputed(work: Workload) -> float:
    """Operations that the backward pass of a micro-batch does a second time, of all ranks of a clip."""
    policy = POLICIES[work.mode]
    if policy is None:
        return 0.0
    net, block = work.net, work.net.get_block(0)
    tokens, text = work.batch_size * work.tokens, work.batch_size * work.text_tokens
    frames = work.batch_size * work.latent_shape[0]
    total = 0.0
    for name, module in block.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in policy.linears:
            rows = text if name in ("cross_attn.k_proj", "cross_attn.v_proj") else tokens
            rows = frames if name.startswith("adaln_modulation") else rows
            total += 2 * rows * module.in_features * module.out_features
    keys = {"self_attn": work.tokens, "cross_attn": work.text_tokens}
    total += sum(4 * tokens * n * net.model_channels for name, n in keys.items() if name not in policy.attentions)
    return total * len(range(0, len(net.blocks), work.every_n_blocks))
