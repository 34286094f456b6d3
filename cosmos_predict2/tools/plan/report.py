# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: what is predicted, as a table for people and as plain values for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cosmos_predict2.tools.plan.advice import Forecast, faster_that_fits, more_gpus_that_fit, nearest_that_fits
from cosmos_predict2.tools.plan.memory import Memory, predict_memory
from cosmos_predict2.tools.plan.speed import GPU, Speed, predict_speed
from cosmos_predict2.tools.plan.workload import GB, Workload

_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state, with float32 masters",
    "ema": "averaged weights (EMA, float32)",
    "tokenizer": "tokenizer weights",
    "text_encoder": "text encoder's weights",
    "copies": "reference and sampling policy",
    "trajectories": "clips that wait for their update",
    "batch": "batch, latents and loss",
    "gathered": "gathered blocks, gradients in flight",
    "activations": "activations at their peak",
    "overhead": "CUDA, NCCL, fragmentation",
}
_OPTIONAL = ("text_encoder", "copies", "trajectories")
HONESTY = """\
An estimate. Parameters, gradients, optimizer and EMA are exact, activations right within about 10 %. Time follows from
operations and the share of its peak that each GPU reached in published runs: within 11 % of those, wider elsewhere."""
MARGIN = 0.07  # of a GPU's memory: the error of the estimate
CARDS = {12: "RTX-4070", 16: "RTX-4080", 24: "RTX-4090", 32: "RTX-5090", 48: "L40S", 80: "H100"}  # by GB on the label


@dataclass(frozen=True)
class Plan:
    work: Workload
    gpu_name: str
    limit: float  # bytes of a GPU
    memory: Memory
    speed: Speed
    nearest: Forecast | None  # on the same GPUs
    more_gpus: Forecast | None  # with the same training, where the nearest changes that
    faster: Forecast | None  # where it fits

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit


def make_plan(work: Workload, gpu_name: str, gpu: GPU, gpu_memory: float) -> Plan:
    """Memory, time and advice for a run on GPUs with that many GB."""
    limit, memory = gpu_memory * GB, predict_memory(work)
    fits, speed = memory.total <= limit, predict_speed(work, gpu)
    nearest = None if fits else nearest_that_fits(work, gpu, limit)
    changes_training = not fits and (nearest is None or bool(nearest.remark))
    more_gpus = more_gpus_that_fit(work, gpu, limit) if changes_training else None
    faster = faster_that_fits(work, gpu, (1 - MARGIN) * limit) if fits else None
    return Plan(work, gpu_name, limit, memory, speed, nearest, more_gpus, faster)


def as_text(plan: Plan) -> str:
    return "\n".join([*_head(plan), *_memory(plan), *_time(plan), "", HONESTY, *_advice(plan)])


def _head(plan: Plan) -> list[str]:
    work = plan.work
    trained = "all weights" if work.lora_rank is None else f"adapters of rank {work.lora_rank}"
    if work.lora_rank is not None and work.trains_embedders:
        trained += " and the embedders of actions"
    rollouts = []
    if (of := work.passes) is not None:
        passes = f"{of.rollout:g} passes to generate, {of.old + of.reference} of other weights"
        clips, steps = _count(of.clips, "clip"), _count(of.updates, "step")
        rollouts.append(f"  rollouts    {clips} of a GPU for {steps}, each with {passes}")
        rollouts.append(f"              and {of.with_gradient:g} forward and backward")
    sharding = f"sharded over {work.shard_size}" if work.shard_size > 1 else "not sharded"
    return [
        f"{work.num_gpus} x {plan.gpu_name}, {plan.limit / GB:.0f} GB each (1 GB = 2^30 bytes)",
        f"  trains      {trained} in {str(work.precision).removeprefix('torch.')}, {sharding}, {work.optimizer}",
        f"  clips       {work.pixel_frames} frames of {work.width}x{work.height}: {work.tokens:,} tokens, latents"
        f" {'x'.join(map(str, work.latent_shape))}",
        f"  a step      {work.clips_per_step:g} clips: {work.batch_size} in a micro-batch,"
        f" {_count(work.grad_accum, 'micro-batch')}, each clip over {_count(work.context_parallel, 'GPU')}",
        *rollouts,
        f"  recomputes  {work.mode}" + (f" in every {work.every_n_blocks}. block" if work.every_n_blocks > 1 else ""),
    ]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    digits = 2 if memory.total - memory.overhead > GB else 4
    rows = {name: text for name, text in _ROWS.items() if name not in _OPTIONAL or getattr(memory, name)}
    lines = [f"  {text:<38}{getattr(memory, name) / GB:8.{digits}f}" for name, text in rows.items()]
    difference = memory.working - memory.gathered - memory.activations - memory.gradients
    if difference > 0:
        lines.append(f"  {'more than these while clips are encoded':<38}{difference / GB:8.2f}")
    elif difference < 0:
        lines.append(f"  {'gradients come as activations go':<38}{difference / GB:8.{digits}f}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    total = f"  {'total':<38}{memory.total / GB:8.2f}   {verdict} in {plan.limit / GB:.0f}"
    if memory.host:
        total += f"\n  {'on the host, of state and weights':<38}{memory.host / GB:8.2f}"
    return ["", "memory of a GPU                            GB", *lines, total]


def _time(plan: Plan) -> list[str]:
    speed = plan.speed
    rate = f"{speed.clips_per_hour:,.0f} clips an hour ({speed.utilisation:.0%} of the GPU's peak)"
    lines = ["", f"time        {_seconds(speed.seconds)} an iteration, {rate}"]
    if speed.hours is not None:
        lines.append(f"            {_hours(speed.hours)} for trainer.max_iter={plan.work.max_iter}")
    return lines


def _advice(plan: Plan) -> Iterator[str]:
    proposals = {"The nearest that fits": plan.nearest, "Faster, and fits": plan.faster}
    if plan.more_gpus is not None:
        proposals["With more GPUs"] = plan.more_gpus
    for title, found in proposals.items():
        if found is not None:
            figures = f"{found.bytes / GB:.1f} GB, {_seconds(found.seconds)} an iteration"
            hours = "" if found.hours is None else f", {_hours(found.hours)} in all"
            yield from ("", f"{title} ({figures}, {found.clips_per_hour:,.0f} clips/h{hours}):", *_pasted(found))
    if not plan.fits and plan.nearest is None and plan.more_gpus is None:
        yield "\nNo combination of these fits: take GPUs with more memory, a smaller model or resolution."


def cards_text(found: Mapping[int, tuple[Forecast, bool]]) -> str:
    """The configuration that fits one card of each size, with room for the error of the estimate, and its overrides."""
    lines = ["One card: the nearest to this configuration that fits", ""]
    lines += [f"{'card':<16}{'needs':>8}{'iteration':>12}{'clips/h':>10}{'host':>10}  {'max_iter':<9}"]
    for size, (outcome, fits) in found.items():
        figures = f"{outcome.bytes / GB:5.1f} GB{_seconds(outcome.seconds):>12}{outcome.clips_per_hour:>10,.0f}"
        hours = "" if outcome.hours is None else _hours(outcome.hours)
        host = f"{outcome.host / GB:>7.1f} GB"
        lines.append(f"{size:>2} GB {CARDS[size]:<10}{figures}{host}  {hours:<9}" + ("" if fits else "  DOES NOT FIT"))
    for size, (outcome, fits) in found.items():
        if fits:
            lines += ["", f"{size} GB:", *(_pasted(outcome) or ["  as it is"])]
    return "\n".join([*lines, "", HONESTY])


def as_values(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, in bytes and seconds."""

    def values(found: Any) -> dict[str, Any] | None:
        return None if found is None else asdict(found)

    return {
        "fits": plan.fits,
        "gpu": plan.gpu_name,
        "gpus": plan.work.num_gpus,
        "gpu_memory_bytes": int(plan.limit),
        "tokens": plan.work.tokens,
        "clips_per_step": plan.work.clips_per_step,
        "passes": values(plan.work.passes),
        "memory_bytes": plan.memory.as_dict(),
        "seconds_per_iteration": plan.speed.seconds,
        "hours": plan.speed.hours,
        "clips_per_hour": plan.speed.clips_per_hour,
        "flops_per_gpu": plan.speed.flops_per_gpu,
        "model_flops_utilisation": plan.speed.utilisation,
        "nearest_that_fits": values(plan.nearest),
        "more_gpus_that_fit": values(plan.more_gpus),
        "faster_that_fits": values(plan.faster),
    }


def cards_values(found: Mapping[int, tuple[Forecast, bool]]) -> dict[str, Any]:
    return {str(size): dict(card=CARDS[size], fits=fits, **asdict(outcome)) for size, (outcome, fits) in found.items()}


def _pasted(found: Forecast) -> list[str]:
    remarks = [f"  # {remark}" for remark in found.remark.split("; ") if remark]
    gpus = [f"  # on {o.split()[1]} GPUs" for o in found.overrides if o.startswith("--gpus")]
    return [*remarks, *gpus, *(f"  {override}" for override in found.overrides if not override.startswith("--gpus"))]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _hours(hours: float) -> str:
    return f"{hours:.2g} h" if hours < 10 else f"{hours:,.0f} h"
