# SPDX-License-Identifier: Apache-2.0
"""The plan of a policy that learns in a world model: memory of a GPU, and hours of an epoch.

A GPU has a share of the environments. It imagines their episodes with the policy at hand, then trains the policy on
their decisions. The sizes of policies are published ones; an H100 took 62.6 GB for
the published OpenVLA-OFT in one process. An epoch of the world model took 536.6 s on four A100 for 64
environments of 32 chunks at 22 passes each, which is the share of the peak that imagining is taken to reach.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cosmos_predict2.checkpoints.download import ACTIONS, NETWORKS
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.tokenizers.wan_vae import LIVE_FRAMES
from cosmos_predict2.tools.plan.memory import CONTEXT, FRAGMENTS, WAN_CHANNELS, WAN_PARAMETERS
from cosmos_predict2.tools.plan.policies import POLICIES, PolicySize, activations, decision_flops
from cosmos_predict2.tools.plan.speed import GB, GPU, GPUS

REWARD_PARAMETERS = 11_180_033  # of the published classifier, in float32
BLOCK_MAPS = 16  # of the width of the world model's network, alive while a block of it works
PUBLISHED_SECONDS, PUBLISHED_PASSES = 536.6, 16 * 32 * 22  # of a GPU, and how many of one environment it computed


@dataclass(frozen=True)
class EmbodiedRun:
    """What a configuration asks of each GPU."""

    policy: str
    gpus: int
    envs: int  # at once
    rollouts: int  # of so many environments, in an epoch
    decisions: int  # of an episode
    batch_size: int  # environments imagined together
    evaluations: int  # of the network, for a chunk
    chunk_size: int
    image_size: tuple[int, int]
    micro_batch: int
    updates: int
    offload: bool
    recomputes: bool  # the policy's activations
    bytes_each: int  # of the policy's precision
    optimizer_bytes: int  # of a trained weight: moments, and a float32 master where there is one
    accumulates: bool  # gradients of several micro-batches


# How the policy is trained: name -> what it says
FORMS = {
    "sharded": "all, sharded over the GPUs",
    "whole": "all, on each GPU",
    "adapters": "adapters of rank 32",
}
VIEWS = 1  # of a decision: a world model has a single camera
UPDATES = 30  # after which published runs had gained most
HONESTY = "An estimate: memory within a fifth, time within a half."


@dataclass(frozen=True)
class Estimate:
    """Bytes of a GPU by what they are for, and seconds of an epoch."""

    parts: dict[str, int]
    imagining_s: float
    training_s: float

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def hours(self) -> float:
        return (self.imagining_s + self.training_s) / 3600


def world_model_network(chunk_size: int) -> Any:
    """The published network of LIBERO-Spatial, without memory."""
    cls, actions = ACTIONS["2B Video2World"]
    settings: dict[str, Any] = {**NETWORKS["2B Predict2.5"], **actions, "num_action_per_chunk": chunk_size}
    with torch.device("meta"):
        return cls(**settings)


def estimate(run: EmbodiedRun, gpu: GPU, form: str) -> Estimate:
    size, net = POLICIES[run.policy], world_model_network(run.chunk_size)
    latent = (1 + run.chunk_size // 4, run.image_size[0] // 8, run.image_size[1] // 8)
    tokens = latent[0] * latent[1] * latent[2] // 4
    shards, each = run.gpus if form == "sharded" else 1, run.bytes_each
    trained = size.adapters if form == "adapters" else size.trained
    weights = each * (size.parameters + (trained if form == "adapters" else 0)) // shards
    gradients, moments = each * trained // shards, run.optimizer_bytes * trained // shards
    in_flight = each * trained if run.gpus > 1 and shards == 1 else 0
    whole = each * size.parameters if shards > 1 else 0  # where it decides; where it learns, a block after the other
    world = 2 * sum(p.numel() for p in net.parameters()) + 2 * WAN_PARAMETERS + 4 * REWARD_PARAMETERS
    imagining = 2 * BLOCK_MAPS * run.batch_size * tokens * net.model_channels
    imagining = max(imagining, run.batch_size * _decoding(run))
    found = activations(size, run.micro_batch, VIEWS, each, recomputes=run.recomputes)
    training = found.peak(gradients, accumulates=run.accumulates) + 3 * whole // size.trunk.blocks
    phases = [
        (weights + whole + moments, world, imagining),
        (weights + moments + gradients + in_flight, 0 if run.offload else world, training),
    ]
    largest = max(phases, key=sum)
    parts = dict(zip(("policy", "world model, reward", "at work"), largest, strict=True))
    parts["overhead"] = int(CONTEXT + FRAGMENTS * sum(largest))
    return Estimate(parts, *_seconds(run, gpu, net, latent, size, trained))


def _decoding(run: EmbodiedRun) -> int:
    """Of the Wan tokenizer, for one environment; it takes few frames at a time where memory is short."""
    in_work, remembered = LIVE_FRAMES["decode"]
    return int(2 * run.image_size[0] * run.image_size[1] * WAN_CHANNELS * (4 * in_work + remembered)) // 4


def _seconds(
    run: EmbodiedRun, gpu: GPU, net: Any, latent: tuple[int, int, int], size: PolicySize, trained: int
) -> tuple[float, float]:
    one = forward_flops(net, latent, text_tokens=0, timestep_rows=latent[0]).total
    published = forward_flops(net, (4, 32, 40), text_tokens=512, timestep_rows=4).total
    share = published * PUBLISHED_PASSES / (PUBLISHED_SECONDS * GPUS["A100"].peak) / GPUS["A100"].efficiency
    speed = gpu.peak * gpu.efficiency
    chunks = run.rollouts * run.envs * run.decisions
    decide = decision_flops(size, VIEWS)
    imagining = chunks * (run.evaluations * one / share + decide) / speed
    backward = (2 if trained == size.parameters else 1) + run.recomputes
    return imagining, run.updates * chunks * decide * (1 + backward) / speed


def as_text(run: EmbodiedRun, gpu_name: str, memory: float, found: dict[str, Estimate]) -> str:
    size, (first, largest) = POLICIES[run.policy], next(iter(found.items()))
    episodes = run.gpus * run.envs * run.rollouts
    lines = [
        f"{run.gpus} x {gpu_name}, {memory:g} GB each (1 GB = 2^30 bytes)",
        f"  policy      {run.policy}, {size.parameters / 1e9:.1f} billion parameters",
        f"  an epoch    {episodes:,} episodes of {run.decisions} decisions, {run.envs} at once on a GPU,"
        f" {run.evaluations} evaluations a chunk",
        f"  imagining   {'leaves the GPU for training' if run.offload else 'and training share the GPU'}",
        "",
        f"{'what is trained':<44}{'needs':>9}{'':16}an epoch{f'{UPDATES} epochs':>14}",
    ]
    for form, one in found.items():
        verdict = "fits" if one.total <= memory * GB else "DOES NOT FIT"
        hours = f"{one.hours:>5.1f} h{one.hours * UPDATES:>12,.0f} h"
        lines.append(f"  {FORMS[form]:<42}{one.total / GB:>6.1f} GB   {verdict:<14}{hours}")
    lines += ["", f"memory of a GPU, {FORMS[first]}"]
    lines += [f"  {name:<24}{value / GB:>6.1f} GB" for name, value in largest.parts.items()]
    imagining, training = largest.imagining_s / 3600, largest.training_s / 3600
    return "\n".join([*lines, f"an epoch: imagining {imagining:.2f} h, training {training:.2f} h", "", HONESTY])


def as_values(run: EmbodiedRun, gpu_name: str, memory: float, found: dict[str, Estimate]) -> dict[str, Any]:
    forms = {
        form: {"fits": one.total <= memory * GB, "total": one.total, **one.parts, "hours_per_epoch": one.hours}
        for form, one in found.items()
    }
    return {"gpu": gpu_name, "gpus": run.gpus, "policy": run.policy, "forms": forms}
