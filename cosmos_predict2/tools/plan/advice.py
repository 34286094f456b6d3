# SPDX-License-Identifier: Apache-2.0
"""Changes that make a run fit, or faster if it fits: overrides, and the memory and time with each."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cosmos_predict2.tools.plan.memory import predict_memory
from cosmos_predict2.tools.plan.speed import GPU, predict_speed
from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.parallelize import RECOMPUTE_KEY

MODES = (  # from what keeps most to what keeps least
    "none", "mm_only", "linear_selfattn", "predict2_2b_720", "predict2_14b_720_aggressive",
    "predict2_2b_720_aggressive", "block_wise",
)  # fmt: skip
WORTH_CHANGING = 0.98  # of the seconds for each clip
SHORTER = (20, 16, 12, 8, 4)  # latent frames of a clip
_PARALLEL = "trainer.distributed_parallelism=fsdp"


@dataclass(frozen=True)
class Change:
    """One thing to set, and how far it takes the run from the given configuration."""

    work: Workload
    overrides: tuple[str, ...] = ()  # to paste; "--gpus N" is a flag of scripts.plan
    distance: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class Forecast:
    """The memory and the time of a workload with some changes."""

    overrides: tuple[str, ...]
    bytes: int
    seconds: float
    clips_per_hour: float
    hours: float | None  # for trainer.max_iter
    remark: str = ""
    host: int = 0  # bytes of state and weights there


Kind = Callable[[Workload], Iterator[Change]]  # every choice of one kind but to change nothing


def nearest_that_fits(work: Workload, gpu: GPU, limit: float) -> Forecast | None:
    """On the given GPUs, the combination of changes that alters least and fits, then the fastest; None if none fits."""
    return _nearest(_combinations(work, (*_SAME_TRAINING, *_OTHER_TRAINING)), gpu, limit)


def more_gpus_that_fit(work: Workload, gpu: GPU, limit: float) -> Forecast | None:
    """The combination that fits on more GPUs, with the same weights trained on the same clips."""
    found = [change for more in _more_gpus(work) for change in _combinations(more, _SAME_TRAINING)]
    return _nearest(found, gpu, limit)


def faster_that_fits(work: Workload, gpu: GPU, limit: float) -> Forecast | None:
    """The policy that recomputes less and still fits, where that is worth a change."""
    now = predict_speed(work, gpu).seconds
    fitting = [change for change in _policies(work, MODES) if predict_memory(change.work).total <= limit]
    outcomes = sorted((predict(change, gpu) for change in fitting), key=lambda outcome: outcome.seconds)
    return outcomes[0] if outcomes and outcomes[0].seconds < WORTH_CHANGING * now else None


def on_one_card(work: Workload, gpu: GPU, limit: float) -> tuple[Forecast, bool]:
    """The nearest that fits one card, and True; or the smallest, and False."""
    alone = replace(work, num_gpus=1, shard_size=1, context_parallel=1)
    overrides = (
        *(["model_parallel.context_parallel_size=1"] if work.context_parallel > 1 else []),
        *(["model.config.fsdp_shard_size=0"] if work.shard_size > 1 else []),
    )
    start = Change(alone, overrides)
    combinations = [*_combinations(start, (*_SAME_TRAINING, *_OTHER_TRAINING))]
    found = _nearest(combinations, gpu, limit)
    if found is not None:
        return found, True
    return predict(min(combinations, key=lambda change: predict_memory(change.work).total), gpu), False


def predict(change: Change, gpu: GPU) -> Forecast:
    speed, memory = predict_speed(change.work, gpu), predict_memory(change.work)
    figures = (speed.seconds, speed.clips_per_hour, speed.hours)
    return Forecast(change.overrides, memory.total, *figures, change.remark, memory.host)


def _nearest(combinations: Sequence[Change], gpu: GPU, limit: float) -> Forecast | None:
    ordered = sorted(combinations, key=lambda change: change.distance)
    for _, alike in itertools.groupby(ordered, key=lambda change: change.distance):
        fitting = [change for change in alike if predict_memory(change.work).total <= limit]
        if fitting:
            return max((predict(change, gpu) for change in fitting), key=lambda outcome: outcome.clips_per_hour)
    return None


def _combinations(start: Workload | Change, kinds: Sequence[Kind]) -> list[Change]:
    """Every way to take one choice of each kind; each kind begins with what those before it chose."""
    found = [start if isinstance(start, Change) else Change(start)]
    for kind in kinds:
        for change in tuple(found):
            for option in kind(change.work):
                by_key = {o.replace(" ", "=").partition("=")[0]: o for o in (*change.overrides, *option.overrides)}
                remark = "; ".join(filter(None, (change.remark, option.remark)))
                found.append(Change(option.work, tuple(by_key.values()), change.distance + option.distance, remark))
    return found


# --- kinds of changes


def _more_gpus(work: Workload) -> Iterator[Change]:
    for factor in itertools.takewhile(lambda factor: work.num_gpus * factor <= 256, (2, 4, 8)):
        num_gpus = work.num_gpus * factor
        overrides: tuple[str, ...] = (f"--gpus {num_gpus}",)
        more = replace(work, num_gpus=num_gpus)
        if work.is_sharded and work.shard_size == work.num_gpus:
            more = replace(more, shard_size=num_gpus)
            overrides = (*overrides, f"model.config.fsdp_shard_size={num_gpus}")
        yield Change(more, overrides, 19 + factor)


def _sharding(work: Workload) -> Iterator[Change]:
    if work.num_gpus > work.shard_size and work.optimizer != "muon":  # which needs whole matrices
        overrides = (_PARALLEL, f"model.config.fsdp_shard_size={work.num_gpus}")
        yield Change(replace(work, shard_size=work.num_gpus), overrides, 1)


def _batches(work: Workload) -> Iterator[Change]:
    if work.batch_size > 1:
        steps = work.batch_size * work.grad_accum
        key = "dataloader_train.batch_size"
        if work.passes is not None:
            key = work.passes.batch_key or "model.config.rl.rollout_batch"
        overrides = (f"{key}=1", f"trainer.grad_accum_iter={steps}")
        yield Change(replace(work, batch_size=1, grad_accum=steps), overrides, 1)


def _waiting_clips(work: Workload) -> Iterator[Change]:
    if work.passes is not None and work.passes.kept_latents:
        overrides = ("model.config.rl.offload_trajectories=true",)
        yield Change(replace(work, passes=replace(work.passes, kept_latents=0)), overrides, 0.5)


def _stronger_policies(work: Workload) -> Iterator[Change]:
    now = MODES.index(work.mode) if work.mode in MODES else MODES.index("predict2_2b_720")
    yield from _policies(work, MODES[now + 1 :])


def _policies(work: Workload, modes: Sequence[str]) -> Iterator[Change]:
    for mode in modes:
        if mode != work.mode:
            every = (f"{RECOMPUTE_KEY}.every_n_blocks=1",) if work.every_n_blocks > 1 else ()
            yield Change(replace(work, mode=mode, every_n_blocks=1), (f"{RECOMPUTE_KEY}.mode={mode}", *every), 1)


def _splits(work: Workload) -> Iterator[Change]:
    """Clips over more ranks, as far as heads, latent frames and ranks divide."""
    if work.passes is not None and work.passes.are_of_teacher:
        return  # a teacher makes whole clips
    frames = work.latent_shape[0] // work.net.patch_temporal
    for size in range(2 * work.context_parallel, work.num_gpus + 1, work.context_parallel):
        if not any(number % size for number in (work.num_gpus, work.net.num_heads, frames)):
            overrides: tuple[str, ...] = (f"model_parallel.context_parallel_size={size}",)
            accum = work.grad_accum  # of reinforcement learning it follows from the clips of a rank
            if work.passes is None:
                accum = accum * size // work.context_parallel  # as many clips in a step as before
                overrides = (*overrides, f"trainer.grad_accum_iter={accum}")
            yield Change(replace(work, context_parallel=size, grad_accum=accum), overrides, 1.5)


def _cached_latents(work: Workload) -> Iterator[Change]:
    # the cache holds neither actions nor the latents of a picture
    if work.tokenizer == "wan" and not work.net.takes_actions and not work.net.extra_channels:
        overrides = ("dataloader_train=latents", "dataloader_train.dataset.dataset_dir=DIR")
        yield Change(replace(work, tokenizer="none"), overrides, 4, "DIR has the clips and the output of cache_latents")


def _averages(work: Workload) -> Iterator[Change]:
    if work.has_average and not work.offloads_average and work.shard_size == 1:
        overrides = ("model.config.pipe_config.ema.offload=True",)
        yield Change(replace(work, offloads_average=True), overrides, 1)
    if work.has_average:
        remark = "no averaged weights: samples and results are those of the trained ones"
        yield Change(replace(work, has_average=False), ("model.config.pipe_config.ema.enabled=False",), 10, remark)


def _optimizer_state(work: Workload) -> Iterator[Change]:
    """State that is kept otherwise: on the host, then in fewer bytes. Of adapters there is little."""
    if work.lora_rank is not None or work.optimizer != "fusedadamw":
        return
    moments = () if work.moments == "int8" else ("optimizer.moments=int8",)
    host = () if work.offloads_optimizer or work.shard_size > 1 else ("optimizer.offload=True",)
    remark = "moments of 8 bits: losses as with float32 within 1 % or so"
    if host:
        yield Change(replace(work, offloads_optimizer=True), host, 2)
    if moments:
        yield Change(replace(work, moments="int8"), moments, 5, remark)
    if host and moments:
        yield Change(replace(work, moments="int8", offloads_optimizer=True), (*moments, *host), 6, remark)


def _frozen(work: Workload) -> Iterator[Change]:
    """Weights below adapters on the host, or in fewer bytes, where blocks recompute."""
    keeps = work.frozen_weights != "full" or work.swap_blocks
    if work.lora_rank is None or keeps or work.mode == "none" or work.every_n_blocks > 1 or work.shard_size > 1:
        return
    blocks = len(work.net.blocks)
    for form, count, distance in (("full", blocks // 2, 2), ("full", blocks, 3), ("fp8", 0, 4), ("nf4", 0, 6)):
        settings = {"frozen_weights": form if form != "full" else "", "swap_blocks": count}
        overrides = tuple(f"model.config.{key}={value}" for key, value in settings.items() if value)
        remark = "" if form == "full" else f"the base in {form}: its results change a little"
        yield Change(replace(work, frozen_weights=form, swap_blocks=count), overrides, distance, remark)


def _one_text(work: Workload) -> Iterator[Change]:
    if work.encodes_text:
        overrides = ("model.config.text.encoder=null", "model.config.text.constant_path=FILE")
        yield Change(replace(work, encodes_text=False), overrides, 15, "FILE, by encode_prompts, is the text of all")


def _adapters(work: Workload) -> Iterator[Change]:
    if work.lora_rank is None and work.lora_targets:
        remark = f"trains adapters of rank {work.adapter_rank} in place of all weights"
        yield Change(replace(work, lora_rank=work.adapter_rank), ("model.config.train_architecture=lora",), 30, remark)


def _shorter_clips(work: Workload) -> Iterator[Change]:
    now = work.latent_shape[0]
    for i, frames in enumerate(frames for frames in SHORTER if frames < now and not work.net.takes_actions):
        if not frames % work.context_parallel:
            shorter = replace(work, pixel_frames=4 * (frames - 1) + 1)
            overrides = (f"model.config.pipe_config.state_t={frames}",)
            yield Change(shorter, overrides, 40 + 5 * i, f"clips of {shorter.pixel_frames} frames")


_SPREADING: tuple[Kind, ...] = (_sharding, _batches, _waiting_clips)
_SAME_TRAINING = (*_SPREADING, _stronger_policies, _splits, _cached_latents, _averages)
_OTHER_TRAINING: tuple[Kind, ...] = (_one_text, _adapters, _optimizer_state, _frozen, _shorter_clips)
