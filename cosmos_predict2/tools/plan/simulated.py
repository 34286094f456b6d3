# SPDX-License-Identifier: Apache-2.0
"""The plan of a policy that learns in a simulator: memory of a GPU and of the host, and seconds of an iteration.

Each GPU plays so many episodes at once, a process for each, then trains the policy on their decisions; or other GPUs
play, each with the policy as it decides. An episode has its whole length here, so that those that begin together end
together. Simulators run on cores of the host. Sizes of policies are published ones.
"""

from dataclasses import dataclass, replace
from typing import Any

from cosmos_predict2.tools.plan.memory import CONTEXT, FRAGMENTS
from cosmos_predict2.tools.plan.policies import POLICIES, PolicySize, activations, decision_flops
from cosmos_predict2.tools.plan.speed import GB, GPU

SIZES = {"openvla-oft": "openvla_oft", "openvla": "openvla_oft", "pi05": "openpi"}  # of `POLICIES`
VIEWS = {"libero": 2, "b1k": 3}  # of a robot, at most
PICTURE = 224 * 224 * 3
ANSWERS = {"openvla": 8}  # tokens of the trunk after the prompt, where the size has those of another variant
# Passes that decide, counted in whole ones: OpenVLA writes token after token, PI0.5 denoises.
PASSES = {"openvla-oft": 1.0, "openvla": 7.0, "pi05": 1.0}
# Of LIBERO, measured on one core with software rendering: steps a second, seconds of a reset, GB of the host.
STEPS_PER_S, RESET_S, HOST_GB = 10.0, 10.0, 2.2
FORMS = {
    "sharded": "all weights, sharded over the GPUs",
    "whole": "all weights on each GPU",
    "playing": "a GPU that plays alone",
}
HONESTY = (
    "An estimate: memory within a fifth. A simulator's speed is LIBERO's on a core with software rendering; rendering"
    "\non a GPU is faster, and takes some memory of it."
)
OF_BEHAVIOR = "BEHAVIOR-1K runs on the GPU: neither its memory there nor its speed has been measured here."


@dataclass(frozen=True)
class SimulatedRun:
    """What a recipe asks of each GPU."""

    policy: str  # vla.vla_type
    simulator: str  # libero, b1k
    views: int  # pictures of a decision
    gpus: int  # that train
    players: int  # others that play; 0: the same play
    shards: int
    envs: int  # at once
    episodes: int  # of an iteration
    decisions: int  # of an episode
    max_steps: int
    chunk: int  # decisions that pass the policy together
    updates: int
    recomputes: bool
    samples_again: bool  # dynamic sampling: further rollouts until enough groups teach something
    steps: int  # of the optimizer, of the whole run
    bytes_each: int  # of the policy's precision
    optimizer_bytes: int  # of a trained weight: moments, and a float32 master where there is one
    accumulates: bool  # gradients of several micro-batches

    @property
    def size(self) -> PolicySize:
        found = POLICIES[SIZES[self.policy]]
        return replace(found, answer=ANSWERS.get(self.policy, found.answer))

    @property
    def waves(self) -> int:
        """How often each player's environments begin."""
        return -(-self.episodes * self.gpus // ((self.players or self.gpus) * self.envs))

    @property
    def forms(self) -> list[str]:
        """What is planned; the first two are alternatives."""
        return [*(["sharded"] if self.shards > 1 else []), "whole", *(["playing"] if self.players else [])]


@dataclass(frozen=True)
class Estimate:
    """Bytes of a GPU by what they are for, and seconds of an iteration by what takes them."""

    parts: dict[str, int]
    seconds: dict[str, float]
    host_gb: float  # of all GPUs' simulators and pictures

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def estimate(run: SimulatedRun, gpu: GPU, form: str) -> Estimate:
    size, shards, each = run.size, run.shards if form == "sharded" else 1, run.bytes_each
    picture = run.decisions * run.views * PICTURE
    host_gb = (run.players or run.gpus) * run.envs * HOST_GB
    if form == "playing":  # it is sent the weights as they decide
        parts = {"policy": each * size.parameters}
        return Estimate({**parts, "overhead": int(CONTEXT + FRAGMENTS * sum(parts.values()))}, {}, host_gb)
    in_flight = each * size.trained if run.gpus > 1 and shards == 1 else 0  # packed for averaging
    whole = each * size.parameters if shards > 1 else 0  # where it decides; where it learns, a block after the other
    gradients, moments = each * size.trained // shards, run.optimizer_bytes * size.trained // shards
    found = activations(size, run.chunk, run.views, each, recomputes=run.recomputes)
    policy = each * size.parameters // shards + moments + gradients + in_flight
    training = found.peak(gradients, accumulates=run.accumulates) + 3 * whole // size.trunk.blocks
    working = max(training, whole - gradients)
    # Pictures of a rollout are kept on the host. Dynamic sampling keeps a first rollout, as many groups of others, and
    # one that is being played or those that are chosen.
    copies = 3 if run.samples_again else 1
    host_gb += run.gpus * run.episodes * picture * copies / 2**30
    overhead = int(CONTEXT + FRAGMENTS * (policy + working))
    parts = {"policy": policy, "at work": working, "overhead": overhead}
    return Estimate(parts, _seconds(run, gpu), host_gb)


def _seconds(run: SimulatedRun, gpu: GPU) -> dict[str, float]:
    size, speed = run.size, gpu.peak * gpu.efficiency
    decisions = run.episodes * run.decisions
    forward = decision_flops(size, run.views) / speed
    learnt = size.horizon or size.seen(run.views)  # tokens of what is trained
    backward = 2 * 2 * size.trained * learnt / speed * (1.5 if run.recomputes else 1)
    return {
        "simulating": run.waves * (RESET_S + run.max_steps / STEPS_PER_S),
        "deciding": decisions * run.gpus / (run.players or run.gpus) * forward * PASSES[run.policy],
        "training": decisions * (forward + run.updates * (forward + backward)),
    }


def as_text(run: SimulatedRun, gpu_name: str, memory: float, found: dict[str, Estimate]) -> str:
    size, first = run.size, next(iter(found.values()))
    billions = f"{size.parameters / 1e9:.1f} billion parameters, {size.trained / 1e9:.1f} trained"
    apart = f" train and {run.players} others play" if run.players else ""
    lines = [
        f"{run.gpus} x {gpu_name}{apart}, {memory:g} GB each (1 GB = 2^30 bytes)",
        f"  policy        {run.policy}, {billions}",
        f"  an iteration  {run.gpus * run.episodes:,} episodes of {run.decisions} decisions, {run.envs} at once on a"
        f" GPU, {run.chunk} decisions in a micro-batch",
        f"  the host      {(run.players or run.gpus) * run.envs} simulators: as many cores, {first.host_gb:,.0f} GB",
        "",
        "memory of a GPU",
    ]
    for form, one in found.items():
        verdict = "fits" if one.total <= memory * GB else "DOES NOT FIT"
        lines.append(f"  {FORMS[form]:<40}{one.total / GB:>6.1f} GB   {verdict}")
        lines += [f"    {name:<38}{value / GB:>6.1f} GB" for name, value in one.parts.items()]
    times = ", ".join(f"{name} {value:,.0f} s" for name, value in first.seconds.items())
    hours = first.total_s / 3600
    lines += ["", f"an iteration: {first.total_s / 60:,.1f} minutes ({times})"]
    lines.append(f"100 iterations: {100 * hours:,.0f} h; all {run.steps:,} of the recipe: {run.steps * hours:,.0f} h")
    return "\n".join([*lines, "", HONESTY, *([OF_BEHAVIOR] if run.simulator == "b1k" else [])])


def as_values(run: SimulatedRun, gpu_name: str, memory: float, found: dict[str, Estimate]) -> dict[str, Any]:
    forms = {
        form: {"fits": one.total <= memory * GB, "total": one.total, **one.parts, "seconds": one.seconds}
        for form, one in found.items()
    }
    return {"gpu": gpu_name, "gpus": run.gpus, "players": run.players, "policy": run.policy, "forms": forms}
