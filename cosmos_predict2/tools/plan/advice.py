# SPDX-License-Identifier: Apache-2.0
"""What to change so that a run fits, or goes faster where it fits: override lines, and what each would bring."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cosmos_predict2.tools.plan.memory import predict_memory
from cosmos_predict2.tools.plan.speed import GPU, predict_speed
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.recompute import KEY

MODES = (  # from what keeps most to what keeps least
    "none", "mm_only", "linear_selfattn", "predict2_2b_720", "predict2_14b_720_aggressive",
    "predict2_2b_720_aggressive", "block_wise",
)  # fmt: skip
WORTH_TELLING = 0.98  # of the seconds a clip


@dataclass(frozen=True)
class Change:
    """One thing to set, and how far it takes the run from what was asked for."""

    work: Workload
    overrides: tuple[str, ...]  # to paste; "--gpus N" is a flag of the plan
    distance: float
    remark: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a workload would be with some changes."""

    overrides: tuple[str, ...]
    bytes: int
    seconds: float
    clips_per_hour: float
    remark: str = ""


def single_changes(work: Workload) -> list[Change]:
    """Every change by itself that makes the run smaller."""
    return [c for kind in KINDS for c in kind(work) if c.overrides]


def nearest_that_fits(work: Workload, gpu: GPU, limit: float) -> Outcome | None:
    """The combination of changes that alters least and fits, then the fastest; None where nothing does."""
    combinations = sorted(_combinations(work), key=lambda change: change.distance)
    for _, alike in itertools.groupby(combinations, key=lambda change: change.distance):
        fitting = [change for change in alike if predict_memory(change.work).total <= limit]
        if fitting:
            return max((outcome_of(change, gpu) for change in fitting), key=lambda outcome: outcome.clips_per_hour)
    return None


def faster_that_fits(work: Workload, gpu: GPU, limit: float) -> Outcome | None:
    """The policy that computes less anew and still fits, where that is worth telling."""
    now = predict_speed(work, gpu).seconds
    fitting = [c for c in _policies(work, MODES) if c.overrides and predict_memory(c.work).total <= limit]
    outcomes = sorted((outcome_of(c, gpu) for c in fitting), key=lambda outcome: outcome.seconds)
    return outcomes[0] if outcomes and outcomes[0].seconds < WORTH_TELLING * now else None


def outcome_of(change: Change, gpu: GPU) -> Outcome:
    speed = predict_speed(change.work, gpu)
    total = predict_memory(change.work).total
    return Outcome(change.overrides, total, speed.seconds, speed.clips_per_hour, change.remark)


def _combinations(work: Workload) -> Iterator[Change]:
    """Every way to take one choice of each kind; each kind sees what the ones before it chose."""

    def extend(change: Change, kinds: Sequence[Kind]) -> Iterator[Change]:
        if not kinds:
            yield _merged(change)
            return
        for option in kinds[0](change.work):
            remark = "; ".join(filter(None, (change.remark, option.remark)))
            both = Change(option.work, change.overrides + option.overrides, change.distance + option.distance, remark)
            yield from extend(both, kinds[1:])

    yield from extend(Change(work, (), 0.0), KINDS)


def _merged(change: Change) -> Change:
    """With each key once: the last value counts."""
    by_key = {override.replace(" ", "=").partition("=")[0]: override for override in change.overrides}
    return replace(change, overrides=tuple(by_key.values()))


def _sharding(work: Workload) -> Iterator[Change]:
    yield Change(work, (), 0)
    if work.num_gpus > work.shard_size and work.optimizer != "muon":  # which needs whole matrices
        overrides = ("trainer.distributed_parallelism=fsdp", f"model.config.fsdp_shard_size={work.num_gpus}")
        yield Change(replace(work, shard_size=work.num_gpus), overrides, 1)


def _batches(work: Workload) -> Iterator[Change]:
    yield Change(work, (), 0)
    if work.batch_size > 1:
        steps = work.batch_size * work.grad_accum
        overrides = ("dataloader_train.batch_size=1", f"trainer.grad_accum_iter={steps}")
        yield Change(replace(work, batch_size=1, grad_accum=steps), overrides, 1)


def _stronger_policies(work: Workload) -> Iterator[Change]:
    now = MODES.index(work.mode) if work.mode in MODES else MODES.index("predict2_2b_720")
    yield from _policies(work, MODES[now + 1 :])


def _policies(work: Workload, modes: tuple[str, ...]) -> Iterator[Change]:
    yield Change(work, (), 0)
    for mode in modes:
        if mode != work.mode:
            overrides: tuple[str, ...] = (f"{KEY}.mode={mode}",)
            if work.every_n_blocks > 1:
                overrides = (*overrides, f"{KEY}.every_n_blocks=1")
            yield Change(replace(work, mode=mode, every_n_blocks=1), overrides, 1)


def _splits(work: Workload) -> Iterator[Change]:
    """Clips over more ranks, as far as heads, latent frames and ranks divide."""
    yield Change(work, (), 0)
    frames = work.latent_shape[0] // work.net.patch_temporal
    for size in range(2 * work.context_parallel, work.num_gpus + 1, work.context_parallel):
        if not any(number % size for number in (work.num_gpus, work.net.num_heads, frames)):
            accum = work.grad_accum * size // work.context_parallel  # as many clips a step as before
            overrides = (f"model_parallel.context_parallel_size={size}", f"trainer.grad_accum_iter={accum}")
            yield Change(replace(work, context_parallel=size, grad_accum=accum), overrides, 1.5)


def _averages(work: Workload) -> Iterator[Change]:
    yield Change(work, (), 0)
    if work.has_average:
        remark = "no averaged weights: samples and results are those of the trained ones"
        yield Change(replace(work, has_average=False), ("model.config.pipe_config.ema.enabled=False",), 10, remark)


def _adapters(work: Workload) -> Iterator[Change]:
    yield Change(work, (), 0)
    if work.lora_rank is None and work.lora_targets:
        remark = f"trains adapters of rank {work.adapter_rank} in place of all weights"
        yield Change(replace(work, lora_rank=work.adapter_rank), ("model.config.train_architecture=lora",), 30, remark)


def _more_gpus(work: Workload) -> Iterator[Change]:
    yield Change(work, (), 0)
    for factor in itertools.takewhile(lambda f: work.num_gpus * f <= 256, (2, 4, 8)):
        num_gpus = work.num_gpus * factor
        overrides: tuple[str, ...] = (f"--gpus {num_gpus}",)
        more = replace(work, num_gpus=num_gpus)
        if work.is_sharded and work.shard_size == work.num_gpus:
            more = replace(more, shard_size=num_gpus)
            overrides = (*overrides, f"model.config.fsdp_shard_size={num_gpus}")
        yield Change(more, overrides, 19 + factor)


Kind = Callable[[Workload], Iterator[Change]]
KINDS: tuple[Kind, ...] = (  # the number of GPUs first: others depend on it
    _more_gpus,
    _sharding,
    _batches,
    _stronger_policies,
    _splits,
    _averages,
    _adapters,
)
