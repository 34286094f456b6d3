# SPDX-License-Identifier: Apache-2.0
"""The plan of policies that learn in a simulator or in a world model: sizes of published ones, their activations where
they are trained, memory of a GPU and of the host, and time.

Attention is written out, as the policies have it by default ("eager"), so that its scores are kept. Kept bytes are
compared with those of tiny policies, and with two runs on an H100: OpenVLA-OFT recomputed in bfloat16, 32 decisions at
a time, took 62.6 GB at most, 65.5 here; PI0.5's expert in float32, 128 decisions, 8.7 beside its weights, 9.1 here.

In a simulator each GPU plays so many episodes at once, a process for each, then trains the policy on their decisions;
or other GPUs play, each with the policy as it decides. An episode has its whole length here, so that those that begin
together end together. Simulators run on cores of the host.

In a world model a GPU has a share of the environments. It imagines their episodes with the policy at hand, then trains
the policy on their decisions. An epoch of the world model took 536.6 s on four A100 for 64 environments of 32 chunks at
22 passes each, which is the share of the peak that imagining is taken to reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cosmos_predict2.checkpoints.download import ACTIONS, NETWORKS
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.tokenizers.wan_vae import LIVE_FRAMES
from cosmos_predict2.tools.plan.memory import CONTEXT, FRAGMENTS, WAN_CHANNELS, WAN_PARAMETERS
from cosmos_predict2.tools.plan.speed import GPU, GPUS
from cosmos_predict2.tools.plan.workload import GB

PIXELS = 6 * 224 * 224  # of a picture, for two towers
BINS = 256  # of a number of an action


@dataclass(frozen=True)
class Transformer:
    """Sizes that say how much a block keeps for its backward pass."""

    blocks: int
    width: int
    mlp: int
    heads: int
    head_dim: int
    wide: int  # copies of the width that its norms keep in float32
    narrow: int  # in the precision: inputs and outputs of norms, branches before they are scaled
    gates: int  # copies of the MLP's width
    softmax_is_wide: bool = True  # kept in float32, and in the precision where that is another

    def kept(self, keys: int, bytes_each: int, *, has_keys: bool = True) -> int:
        """Bytes of a token in a block; ``has_keys`` unless its keys and values are counted elsewhere."""
        inner = (4 if has_keys else 2) * self.heads * self.head_dim
        scores = (4 + bytes_each * (bytes_each < 4)) if self.softmax_is_wide else bytes_each
        own = self.narrow * self.width + inner + self.gates * self.mlp
        return 4 * self.wide * self.width + bytes_each * own + scores * self.heads * keys


@dataclass(frozen=True)
class PolicySize:
    """A policy that sees pictures by towers and decides by a trunk, or by an expert that reads its keys and values."""

    parameters: int
    trained: int  # without adapters
    adapters: int  # of rank 32
    towers: tuple[Transformer, ...]
    beside: tuple[int, ...]  # tokens of each tower that are no patches
    trunk: Transformer
    words: int  # of a prompt, about
    answer: int  # tokens of the trunk after the prompt
    patches: int = 256  # of a picture
    pixels: int = PIXELS
    vocabulary: int = 0  # whose logits it computes at the places of actions
    bins: int = BINS
    expert: Transformer | None = None
    horizon: int = 0  # tokens of the expert
    expert_keys: int = 0  # width of its keys

    def seen(self, views: int) -> int:
        """Tokens of a decision that passes the trunk."""
        return views * self.patches + self.words + self.answer


_OPENVLA_TOWERS = (
    Transformer(23, 1024, 4096, 16, 64, wide=0, narrow=6, gates=2, softmax_is_wide=False),
    Transformer(26, 1152, 4304, 16, 72, wide=0, narrow=4, gates=2),
)
POLICIES = {
    "openvla_oft": PolicySize(
        parameters=7_541_237_184,
        trained=7_541_237_184,
        adapters=110_828_288,
        towers=_OPENVLA_TOWERS,
        beside=(5, 0),
        trunk=Transformer(32, 4096, 11008, 32, 128, wide=2, narrow=4, gates=4),
        words=36,
        answer=57,
        vocabulary=32_064,
    ),
    "openpi": PolicySize(  # its expert alone is trained
        parameters=3_350_000_000,
        trained=430_000_000,
        adapters=40_000_000,
        towers=(_OPENVLA_TOWERS[1],),
        beside=(0,),
        trunk=Transformer(18, 2048, 16384, 8, 256, wide=4, narrow=2, gates=4),
        words=20,
        answer=0,
        expert=Transformer(18, 1024, 4096, 8, 256, wide=4, narrow=4, gates=4),
        horizon=10,
        expert_keys=256,
    ),
}


@dataclass(frozen=True)
class ForwardBytes:
    """Bytes at the end of a forward pass, and what its passes need besides for a while."""

    before_trunk: int  # kept: of towers and projector
    trunk: int  # kept: of the trunk, or of the expert
    working: int

    def peak(self, gradients: int, *, accumulates: bool) -> int:
        """Beside all gradients. Where earlier micro-batches left none, they come while what the trunk kept goes."""
        kept = self.before_trunk + self.trunk
        left = kept if accumulates else max(kept - gradients, self.before_trunk)
        return left + self.working


def activations(size: PolicySize, rows: int, views: int, bytes_each: int, *, recomputes: bool) -> ForwardBytes:
    """Activations of a micro-batch of ``rows`` decisions that is trained on."""
    if size.expert is not None:
        return _of_expert(size, size.expert, rows, views, bytes_each, recomputes=recomputes)
    trunk, tokens, places = size.trunk, size.seen(views), size.answer - 1
    features = sum(tower.width for tower in size.towers)
    before = views * bytes_each * (size.pixels + size.patches * (9 * features + 2 * trunk.width))
    for tower, beside in zip(size.towers, size.beside, strict=True):
        seen = size.patches + beside
        of_block = bytes_each * tower.width if recomputes else tower.kept(seen, bytes_each)
        before += views * tower.blocks * seen * of_block
    of_block = trunk.kept(tokens, bytes_each)
    kept = trunk.blocks * tokens * (bytes_each * trunk.width if recomputes else of_block)
    kept += tokens * trunk.width * (4 + bytes_each) + bytes_each * tokens**2  # the last norm, and who sees whom
    kept += places * (bytes_each * (trunk.width + size.vocabulary) + 3 * 4 * size.bins)
    working = tokens * 3 * bytes_each * trunk.mlp + 2 * bytes_each * places * size.vocabulary  # gradients of the widest
    working += tokens * of_block if recomputes else 0
    return ForwardBytes(rows * before, rows * kept, rows * working)


def _of_expert(
    size: PolicySize, expert: Transformer, rows: int, views: int, bytes_each: int, *, recomputes: bool
) -> ForwardBytes:
    """Activations of an expert; the trunk before it passes without gradients, where its MLP is the widest."""
    seen, trunk = size.seen(views), size.trunk
    keys = seen + size.horizon
    of_keys = bytes_each * 2 * size.expert_keys
    of_norm = 16 * expert.width  # its scale, shift and gate, of the time
    of_block = size.horizon * expert.kept(keys, bytes_each, has_keys=False) + keys * of_keys + 2 * of_norm
    kept = expert.blocks * (size.horizon * bytes_each * expert.width + seen * of_keys if recomputes else of_block)
    kept += size.horizon * expert.width * (8 + bytes_each + 4 * (bytes_each < 4)) + of_norm  # the last norm
    kept += 5 * 4 * expert.width  # the time
    prefix = seen * (3 * bytes_each * (trunk.mlp + trunk.width) + trunk.blocks * of_keys)
    working = size.horizon * 3 * bytes_each * expert.mlp + (of_block if recomputes else 0)
    return ForwardBytes(0, rows * kept, rows * max(working, prefix - kept))


def decision_flops(size: PolicySize, views: int) -> int:
    """Operations of a forward pass of one decision."""
    return 2 * size.parameters * (size.seen(views) + size.horizon)


@dataclass(frozen=True)
class PolicyEstimate:
    """Bytes of a GPU by what they are for, and seconds of an iteration or an epoch by what takes them."""

    parts: dict[str, int]
    seconds: dict[str, float]
    host_gb: float = 0.0  # of all GPUs' simulators and pictures

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def hours(self) -> float:
        return sum(self.seconds.values()) / 3600

    def fits(self, memory: float) -> bool:
        return self.total <= memory * GB

    def values(self, memory: float, **time: Any) -> dict[str, Any]:
        return {"fits": self.fits(memory), "total": self.total, **self.parts, **time}

    def verdict(self, memory: float) -> str:
        return f"{self.total / GB:>6.1f} GB   {'fits' if self.fits(memory) else 'DOES NOT FIT'}"


Estimates = Mapping[str, PolicyEstimate]  # by form: how the policy is trained


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """The load of each GPU, wherever the policy plays."""

    policy: str
    gpus: int  # that train
    envs: int  # at once
    decisions: int  # of an episode
    updates: int
    recomputes: bool  # the policy's activations
    bytes_each: int  # of the policy's precision
    optimizer_bytes: int  # of a trained weight: moments, and a float32 master where there is one
    accumulates: bool  # gradients of several micro-batches

    def training(
        self, size: PolicySize, rows: int, views: int, shards: int, trained: int, added: int = 0
    ) -> tuple[int, int, int, int, int]:
        """Bytes of the weights with ``added`` ones, of their moments, of their gradients with those packed for
        averaging, at work while so many decisions are trained on, and of the whole policy where it is sharded."""
        each = self.bytes_each
        gradients, moments = each * trained // shards, self.optimizer_bytes * trained // shards
        in_flight = each * trained if self.gpus > 1 and shards == 1 else 0
        whole = each * size.parameters if shards > 1 else 0  # where it decides; where it learns, block after block
        found = activations(size, rows, views, each, recomputes=self.recomputes)
        working = found.peak(gradients, accumulates=self.accumulates) + 3 * whole // size.trunk.blocks
        return each * (size.parameters + added) // shards, moments, gradients + in_flight, working, whole


def _with_overhead(parts: dict[str, int]) -> dict[str, int]:
    return {**parts, "overhead": int(CONTEXT + FRAGMENTS * sum(parts.values()))}


# --- in a simulator

SIZES = {"openvla-oft": "openvla_oft", "openvla": "openvla_oft", "pi05": "openpi"}  # of `POLICIES`
VIEWS = {"libero": 2, "b1k": 3}  # of a robot, at most
PICTURE = 224 * 224 * 3
ANSWERS = {"openvla": 8}  # tokens of the trunk after the prompt, where the size has those of another variant
# Passes that decide, counted in whole ones: OpenVLA writes token after token, PI0.5 denoises.
PASSES = {"openvla-oft": 1.0, "openvla": 7.0, "pi05": 1.0}
# Of LIBERO, measured on one core with software rendering: steps a second, seconds of a reset, GB of the host.
STEPS_PER_S, RESET_S, HOST_GB = 10.0, 10.0, 2.2
SIMULATED = """
An estimate: memory within a fifth. A simulator's speed is LIBERO's on a core with software rendering; rendering
on a GPU is faster, and takes some memory of it."""
OF_BEHAVIOR = "BEHAVIOR-1K runs on the GPU: neither its memory there nor its speed has been measured here."


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(PolicyRun):
    """A policy, named as vla.vla_type, in a simulator."""

    simulator: str  # libero, b1k
    views: int  # pictures of a decision
    players: int  # GPUs that play; 0: those that train do
    shards: int
    episodes: int  # of an iteration
    max_steps: int
    chunk: int  # decisions that pass the policy together
    samples_again: bool  # dynamic sampling: further rollouts until enough groups teach something
    steps: int  # of the optimizer, of the whole run
    lora_rank: int = 0  # of adapters that are trained in place of the weights

    @property
    def size(self) -> PolicySize:
        found = POLICIES[SIZES[self.policy]]
        adapters = found.adapters * self.lora_rank // 32
        return replace(
            found,
            answer=ANSWERS.get(self.policy, found.answer),
            parameters=found.parameters + adapters,
            trained=adapters or found.trained,
        )

    @property
    def forms(self) -> dict[str, str]:
        """The ways to train it, of which the first two are alternatives, and to play."""
        sharded = {"sharded": "all weights, sharded over the GPUs"} if self.shards > 1 else {}
        playing = {"playing": "a GPU that plays alone"} if self.players else {}
        trained = f"adapters of rank {self.lora_rank}" if self.lora_rank else "all weights on each GPU"
        return {**sharded, "whole": trained, **playing}

    def fits(self, found: Estimates, memory: float) -> bool:
        needed = {*list(found)[:1], *(["playing"] if self.players else [])}
        return all(found[form].fits(memory) for form in needed)

    def estimate(self, gpu: GPU, form: str) -> PolicyEstimate:
        size = self.size
        host_gb = (self.players or self.gpus) * self.envs * HOST_GB
        if form == "playing":  # it is sent the weights as they decide
            return PolicyEstimate(_with_overhead({"policy": self.bytes_each * size.parameters}), {}, host_gb)
        shards = self.shards if form == "sharded" else 1
        weights, moments, gradients, training, whole = self.training(size, self.chunk, self.views, shards, size.trained)
        working = max(training, whole - gradients)
        # Pictures of a rollout are kept on the host. Dynamic sampling keeps a first rollout, as many groups of others,
        # and one that is being played or those that are chosen.
        copies = 3 if self.samples_again else 1
        host_gb += self.gpus * self.episodes * self.decisions * self.views * PICTURE * copies / 2**30
        parts = {"policy": weights + moments + gradients, "at work": working}
        return PolicyEstimate(_with_overhead(parts), self._seconds(gpu), host_gb)

    def _seconds(self, gpu: GPU) -> dict[str, float]:
        size, speed, players = self.size, gpu.peak * gpu.efficiency, self.players or self.gpus
        decisions = self.episodes * self.decisions
        waves = -(-self.episodes * self.gpus // (players * self.envs))  # how often a player's environments begin
        forward = decision_flops(size, self.views) / speed
        learnt = size.horizon or size.seen(self.views)  # tokens of what is trained
        backward = 2 * 2 * size.trained * learnt / speed * (1.5 if self.recomputes else 1)
        return {
            "simulating": waves * (RESET_S + self.max_steps / STEPS_PER_S),
            "deciding": decisions * self.gpus / players * forward * PASSES[self.policy],
            "training": decisions * (forward + self.updates * (forward + backward)),
        }

    def as_text(self, gpu_name: str, memory: float, found: Estimates) -> str:
        size, first = self.size, next(iter(found.values()))
        billions = f"{size.parameters / 1e9:.1f} billion parameters, {size.trained / 1e9:.1f} trained"
        apart = f" train and {self.players} others play" if self.players else ""
        lines = [
            f"{self.gpus} x {gpu_name}{apart}, {memory:g} GB each (1 GB = 2^30 bytes)",
            f"  policy        {self.policy}, {billions}",
            f"  an iteration  {self.gpus * self.episodes:,} episodes of {self.decisions} decisions, {self.envs} at once"
            f" on a GPU, {self.chunk} decisions in a micro-batch",
            f"  the host      {(self.players or self.gpus) * self.envs} simulators: as many cores,"
            f" {first.host_gb:,.0f} GB",
            "",
            "memory of a GPU",
        ]
        for form, one in found.items():
            lines.append(f"  {self.forms[form]:<40}{one.verdict(memory)}")
            lines += [f"    {name:<38}{value / GB:>6.1f} GB" for name, value in one.parts.items()]
        times = ", ".join(f"{name} {value:,.0f} s" for name, value in first.seconds.items())
        lines += ["", f"an iteration: {60 * first.hours:,.1f} minutes ({times})"]
        every = f"all {self.steps:,} of the recipe: {self.steps * first.hours:,.0f} h"
        lines.append(f"100 iterations: {100 * first.hours:,.0f} h; {every}")
        return "\n".join([*lines, SIMULATED, *([OF_BEHAVIOR] if self.simulator == "b1k" else [])])

    def as_values(self, gpu_name: str, memory: float, found: Estimates) -> dict[str, Any]:
        about = {"gpu": gpu_name, "gpus": self.gpus, "players": self.players, "policy": self.policy}
        return {**about, "forms": {form: one.values(memory, seconds=one.seconds) for form, one in found.items()}}


# --- in a world model

REWARD_PARAMETERS = 11_180_033  # of the published classifier, in float32
BLOCK_MAPS = 16  # of the width of the world model's network, alive while a block of it works
PUBLISHED_SECONDS, PUBLISHED_PASSES = 536.6, 16 * 32 * 22  # of a GPU, and how many of one environment it computed
VIEW = 1  # of a decision: a world model has a single camera
EPOCHS = 30  # after which published runs had gained most


@dataclass(frozen=True, kw_only=True)
class EmbodiedRun(PolicyRun):
    """A policy, named as in `POLICIES`, in a world model."""

    rollouts: int  # of so many environments, in an epoch
    batch_size: int  # environments imagined together
    evaluations: int  # of the network, for a chunk
    chunk_size: int
    image_size: tuple[int, int]
    micro_batch: int
    offload: bool

    @property
    def forms(self) -> dict[str, str]:
        """Ways in which the policy may be trained."""
        sharded = {"sharded": "all, sharded over the GPUs"} if self.gpus > 1 else {}
        return {**sharded, "whole": "all, on each GPU", "adapters": "adapters of rank 32"}

    def fits(self, found: Estimates, memory: float) -> bool:
        return any(one.fits(memory) for one in found.values())

    def estimate(self, gpu: GPU, form: str) -> PolicyEstimate:
        size, net = POLICIES[self.policy], self._network()
        latent = (1 + self.chunk_size // 4, self.image_size[0] // 8, self.image_size[1] // 8)
        tokens = latent[0] * latent[1] * latent[2] // 4
        added = size.adapters if form == "adapters" else 0
        shards, trained = self.gpus if form == "sharded" else 1, added or size.trained
        found = self.training(size, self.micro_batch, VIEW, shards, trained, added)
        weights, moments, gradients, training, whole = found
        world = 2 * sum(p.numel() for p in net.parameters()) + 2 * WAN_PARAMETERS + 4 * REWARD_PARAMETERS
        # The Wan tokenizer takes few frames at a time where memory is short.
        in_work, remembered = LIVE_FRAMES["decode"]
        decoding = int(2 * self.image_size[0] * self.image_size[1] * WAN_CHANNELS * (4 * in_work + remembered)) // 4
        imagining = self.batch_size * max(2 * BLOCK_MAPS * tokens * net.model_channels, decoding)
        phases = [
            (weights + whole + moments, world, imagining),
            (weights + moments + gradients, 0 if self.offload else world, training),
        ]
        names = ("policy", "world model, reward", "at work")
        parts = _with_overhead(dict(zip(names, max(phases, key=sum), strict=True)))
        return PolicyEstimate(parts, self._seconds(gpu, net, latent, trained))

    def _network(self) -> Any:
        """The published network of LIBERO-Spatial, without memory."""
        cls, actions = ACTIONS["2B Video2World"]
        settings: dict[str, Any] = {**NETWORKS["2B Predict2.5"], **actions, "num_action_per_chunk": self.chunk_size}
        with torch.device("meta"):
            return cls(**settings)

    def _seconds(self, gpu: GPU, net: Any, latent: tuple[int, int, int], trained: int) -> dict[str, float]:
        size = POLICIES[self.policy]
        one = forward_flops(net, latent, text_tokens=0, timestep_rows=latent[0]).total
        published = forward_flops(net, (4, 32, 40), text_tokens=512, timestep_rows=4).total
        share = published * PUBLISHED_PASSES / (PUBLISHED_SECONDS * GPUS["A100"].peak) / GPUS["A100"].efficiency
        speed = gpu.peak * gpu.efficiency
        chunks = self.rollouts * self.envs * self.decisions
        decide = decision_flops(size, VIEW)
        backward = (2 if trained == size.parameters else 1) + self.recomputes
        return {
            "imagining": chunks * (self.evaluations * one / share + decide) / speed,
            "training": self.updates * chunks * decide * (1 + backward) / speed,
        }

    def as_text(self, gpu_name: str, memory: float, found: Estimates) -> str:
        size, (first, largest) = POLICIES[self.policy], next(iter(found.items()))
        episodes = self.gpus * self.envs * self.rollouts
        lines = [
            f"{self.gpus} x {gpu_name}, {memory:g} GB each (1 GB = 2^30 bytes)",
            f"  policy      {self.policy}, {size.parameters / 1e9:.1f} billion parameters",
            f"  an epoch    {episodes:,} episodes of {self.decisions} decisions, {self.envs} at once on a GPU,"
            f" {self.evaluations} evaluations a chunk",
            f"  imagining   {'leaves the GPU for training' if self.offload else 'and training share the GPU'}",
            "",
            f"{'what is trained':<44}{'needs':>9}{'':16}an epoch{f'{EPOCHS} epochs':>14}",
        ]
        for form, one in found.items():
            hours = f"{one.hours:>5.1f} h{one.hours * EPOCHS:>12,.0f} h"
            lines.append(f"  {self.forms[form]:<42}{one.verdict(memory):<26}{hours}")
        lines += ["", f"memory of a GPU, {self.forms[first]}"]
        lines += [f"  {name:<24}{value / GB:>6.1f} GB" for name, value in largest.parts.items()]
        times = ", ".join(f"{name} {value / 3600:.2f} h" for name, value in largest.seconds.items())
        return "\n".join([*lines, f"an epoch: {times}", "", "An estimate: memory within a fifth, time within a half."])

    def as_values(self, gpu_name: str, memory: float, found: Estimates) -> dict[str, Any]:
        about = {"gpu": gpu_name, "gpus": self.gpus, "policy": self.policy}
        return {**about, "forms": {form: one.values(memory, hours_per_epoch=one.hours) for form, one in found.items()}}
