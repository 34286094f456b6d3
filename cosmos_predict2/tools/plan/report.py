# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: what is predicted, as a table for people and as plain values for programs."""

from dataclasses import asdict, dataclass
from typing import Any

from cosmos_predict2.tools.plan.advice import (
    Change,
    Outcome,
    faster_that_fits,
    nearest_that_fits,
    outcome_of,
    single_changes,
)
from cosmos_predict2.tools.plan.memory import GB, Memory, predict_memory
from cosmos_predict2.tools.plan.speed import GPU, Speed, predict_speed
from cosmos_predict2.tools.plan.workload import Workload

_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state, with float32 masters",
    "ema": "averaged weights (EMA, float32)",
    "tokenizer": "tokenizer weights",
    "text_encoder": "text encoder's weights",
    "batch": "batch, latents and loss",
    "gathered": "gathered blocks, gradients in flight",
    "activations": "activations at their peak",
    "overhead": "CUDA, NCCL, fragmentation",
}
_WHERE_THERE_IS = ("text_encoder",)  # rows that are left out where they are zero
HONESTY = """\
An estimate. Parameters, gradients, optimizer and EMA are exact, activations right within about 10 %. Time follows from
operations and the share of its peak that each GPU reached in published runs: within 11 % of those, wider elsewhere."""


MARGIN = 0.07  # of a GPU's memory


@dataclass(frozen=True)
class Plan:
    work: Workload
    gpu_name: str
    limit: float  # bytes of a GPU
    memory: Memory
    speed: Speed
    singles: tuple[Outcome, ...]  # where it does not fit: each change by itself
    nearest: Outcome | None
    faster: Outcome | None  # where it fits

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit

    @property
    def is_close(self) -> bool:
        """Within what the estimate may be off."""
        return abs(self.memory.total / self.limit - 1) < MARGIN


def make_plan(work: Workload, gpu_name: str, gpu: GPU, gpu_memory: float) -> Plan:
    """What a run takes on GPUs with that many GB."""
    limit, memory = gpu_memory * GB, predict_memory(work)
    fits = memory.total <= limit
    return Plan(
        work=work,
        gpu_name=gpu_name,
        limit=limit,
        memory=memory,
        speed=predict_speed(work, gpu),
        singles=() if fits else tuple(outcome_of(change, gpu) for change in _smaller(work, memory)),
        nearest=None if fits else nearest_that_fits(work, gpu, limit),
        faster=faster_that_fits(work, gpu, (1 - MARGIN) * limit) if fits else None,
    )


def _smaller(work: Workload, memory: Memory) -> list[Change]:
    return [change for change in single_changes(work) if predict_memory(change.work).total < memory.total]


def as_text(plan: Plan) -> str:
    work, memory, speed = plan.work, plan.memory, plan.speed
    t, h, w = work.latent_shape
    trained = "all weights" if work.lora_rank is None else f"adapters of rank {work.lora_rank}"
    if work.lora_rank is not None and work.trains_embedders:
        trained += " and the embedders of actions"
    sharding = f"sharded over {work.shard_size}" if work.shard_size > 1 else "not sharded"
    lines = [
        f"{work.num_gpus} x {plan.gpu_name}, {plan.limit / GB:.0f} GB each (1 GB = 2^30 bytes)",
        f"  trains      {trained} in {str(work.precision).removeprefix('torch.')}, {sharding}, {work.optimizer}",
        f"  clips       {work.pixel_frames} frames of {work.width}x{work.height}: {work.tokens:,} tokens, latents"
        f" {t}x{h}x{w}",
        f"  a step      {_count(work.clips_per_step, 'clip')}: {work.batch_size} in a micro-batch,"
        f" {_count(work.grad_accum, 'micro-batch')}, each clip over {_count(work.context_parallel, 'GPU')}",
        f"  recomputes  {work.mode}" + (f" in every {work.every_n_blocks}. block" if work.every_n_blocks > 1 else ""),
        "",
        "memory of a GPU                            GB",
    ]
    digits = 2 if memory.total - memory.overhead > GB else 4
    rows = {name: text for name, text in _ROWS.items() if name not in _WHERE_THERE_IS or getattr(memory, name)}
    lines += [f"  {text:<38}{getattr(memory, name) / GB:8.{digits}f}" for name, text in rows.items()]
    if memory.encoding > memory.gathered + memory.activations:
        extra = memory.encoding - memory.gathered - memory.activations
        lines.append(f"  {'more than these while clips are encoded':<38}{extra / GB:8.2f}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    if plan.is_close:
        verdict = "fits barely, if the estimate holds," if plan.fits else "does not quite fit"
    lines += [
        f"  {'total':<38}{memory.total / GB:8.2f}   {verdict} in {plan.limit / GB:.0f}",
        "",
        f"time        {_seconds(speed.seconds)} an iteration, {speed.clips_per_hour:,.0f} clips an hour "
        f"({speed.utilisation:.0%} of the GPU's peak)",
        "",
        HONESTY,
    ]
    if plan.singles:
        lines += ["", "One change at a time:"] + [f"  {_outcome(o, plan)}" for o in plan.singles]
    if plan.nearest is not None:
        lines += ["", f"The nearest that fits ({_figures(plan.nearest)}):", *_pasted(plan.nearest)]
    elif not plan.fits:
        lines += ["", "No combination of these fits: take GPUs with more memory, a smaller model or resolution."]
    if plan.faster is not None:
        lines += ["", f"Faster, and fits ({_figures(plan.faster)}):", *_pasted(plan.faster)]
    return "\n".join(lines)


def as_values(plan: Plan) -> dict[str, Any]:
    """For JSON; bytes and seconds."""

    def outcome(found: Outcome | None) -> dict[str, Any] | None:
        return None if found is None else asdict(found)

    return {
        "fits": plan.fits,
        "gpu": plan.gpu_name,
        "gpus": plan.work.num_gpus,
        "gpu_memory_bytes": int(plan.limit),
        "tokens": plan.work.tokens,
        "clips_per_step": plan.work.clips_per_step,
        "memory_bytes": plan.memory.as_dict(),
        "seconds_per_iteration": plan.speed.seconds,
        "clips_per_hour": plan.speed.clips_per_hour,
        "flops_per_gpu": plan.speed.flops_per_gpu,
        "model_flops_utilisation": plan.speed.utilisation,
        "single_changes": [outcome(found) for found in plan.singles],
        "nearest_that_fits": outcome(plan.nearest),
        "faster_that_fits": outcome(plan.faster),
    }


def _outcome(found: Outcome, plan: Plan) -> str:
    mark = "fits" if found.bytes <= plan.limit else "    "
    text = f"{found.bytes / GB:7.1f} GB {mark} {_seconds(found.seconds):>8}   {' '.join(found.overrides)}"
    return text + (f"   ({found.remark})" if found.remark else "")


def _figures(found: Outcome) -> str:
    return f"{found.bytes / GB:.1f} GB, {_seconds(found.seconds)} an iteration, {found.clips_per_hour:,.0f} clips/h"


def _pasted(found: Outcome) -> list[str]:
    remark = [f"  # {found.remark}"] if found.remark else []
    gpus = [f"  # on {o.split()[1]} GPUs" for o in found.overrides if o.startswith("--gpus")]
    return [*remark, *gpus, *(f"  {override}" for override in found.overrides if not override.startswith("--gpus"))]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
