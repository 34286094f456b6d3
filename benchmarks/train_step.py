# SPDX-License-Identifier: Apache-2.0
"""One training step of a released size: seconds, share of the device's speed, peak memory, and what plan had predicted.

python -m benchmarks.train_step --model_size 2B --resolution 480 --random_weights [--steps 3] [--profile]
python -m benchmarks.train_step --model_size 2B --action --random_weights [--batch_sizes 16 32 64 128]
python -m benchmarks.train_step --model_size tiny [--action] [--overrides a.b=c ...]

The trainer itself runs the AgiBot experiment of that size on random clips, in one process, not sharded. When memory
runs out, it starts anew with stronger recomputation, then without the weight average, then with adapters only. With
``--action`` it is the action-conditioned model, 13 frames of 256 x 320, and the largest of the batch sizes that fits.
With ``--profile`` one step more shows the kernels that take the time. The ceiling is the fastest matrix product found
on this machine; model operations count three forward passes a step (two for adapters), and nothing that is computed a
second time.
"""

import argparse
import gc
import json
import re
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine
from benchmarks.dit import ceiling
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.world_model.assembly import network_of
from imaginaire.config.schema import Config
from imaginaire.errors import TrainingError, UserError
from imaginaire.training.callbacks import Callback

SIZES_IN_PIXELS = {"480": [432, 768], "720": [704, 1280]}
NET = "model.config.pipe_config.net"
FALLBACKS = [  # tried in this order when memory runs out, each on top of those before it
    ("as configured", []),
    ("recomputing whole blocks", [f"{NET}.sac_config.mode=block_wise"]),
    ("without the weight average", ["model.config.pipe_config.ema.enabled=False"]),
    ("adapters only", ["model.config.train_architecture=lora"]),
]
BATCH_SIZES = {"tiny": [4, 8], "2B": [16, 32, 64, 128]}  # of the action-conditioned model
KERNELS = {  # groups by parts of the names of kernels, on a CPU of operators; the first that matches counts
    "attention": r"flash|fmha|sdpa|attention|attn|softmax",
    "optimizer": r"multi_tensor_apply|adam|_foreach|fused_sgd",
    "convolution": r"conv|fprop|dgrad|wgrad|implicit",
    "matrix products": r"gemm|nvjet|cutlass|matmul|addmm|::b?mm|splitk",
    "copies": r"memcpy|memset|copy|::cat|CatArray|contiguous",
    "pointwise, norms": r"",
}
SHOWN = 10  # kernels by name


@dataclass(frozen=True)
class StepCosts:
    """A training step as it ran."""

    what: str
    seconds: float
    first_seconds: float
    tokens: int
    flops: float
    allocated: int  # bytes, the most at a time
    reserved: int
    loss: float
    kernels: dict[str, float]  # seconds of the profiled step, if there was one


class StepClock(Callback):
    """Times each step from the moment that its batch is there, and notes what a batch looks like. The step behind the
    first ``num_timed`` is profiled instead, where there is one."""

    profiled: ClassVar[dict[str, float]] = {}  # seconds of a step, by kernel

    seconds: ClassVar[list[float]] = []
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    losses: ClassVar[list[float]] = []

    def __init__(self, num_timed: int) -> None:
        super().__init__()
        self.num_timed = num_timed
        self.profiler: profile | None = None

    def on_training_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None:
        machine.wait()
        if len(self.seconds) == self.num_timed:
            is_gpu = torch.cuda.is_available()
            self.profiler = profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU])
            self.profiler.start()
        self.start = time.perf_counter()
        self.shapes.update({key: tuple(value.shape) for key, value in batch.items() if hasattr(value, "shape")})

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        self.losses.append(float(loss.detach()))  # waits for the device
        machine.wait()
        if self.profiler is None:
            self.seconds.append(time.perf_counter() - self.start)
            return
        self.profiler.stop()
        for event in self.profiler.key_averages():
            is_gpu = torch.cuda.is_available()  # there the host's launches and waits are no kernels
            if microseconds := event.self_device_time_total if is_gpu else event.self_cpu_time_total:
                self.profiled[event.key] = self.profiled.get(event.key, 0.0) + microseconds / 1e6
        self.profiler = None


def experiment(arguments: argparse.Namespace) -> list[str]:
    """The experiment with what one process needs in place of many; plan is asked about the same."""
    parallel = ["model_parallel.context_parallel_size=1", "model.config.fsdp_shard_size=0"]
    if arguments.action:
        name = f"predict2_video2world_{arguments.model_size.lower()}_action_conditioned_training"
        clips = ["dataloader_train=mock_action", "dataloader_val=mock_action"]
        if arguments.model_size == "tiny":
            own = dict(video_size="[48,48]", num_tokens=64, width=64, action_shape="[12,4]")
            clips += [f"dataloader_train.dataset.{option}={value}" for option, value in own.items()]
            clips.append(f"{NET}.reads_text=True")  # as the released one, and as the random clips have it
        return [f"experiment={name}", *clips, *parallel, *arguments.overrides]
    name = f"predict2_video2world_training_{arguments.model_size.lower()}_agibot_head_center_fisheye_color"
    if arguments.model_size != "tiny":
        name += f"_{arguments.resolution}p_{arguments.fps}fps"
    return [f"experiment={name}", *parallel, *arguments.overrides]


def settings(arguments: argparse.Namespace) -> list[str]:
    """Overrides that replace files: random clips and, with ``--random_weights``, random weights."""
    timed = arguments.steps + 1
    found = [f"trainer.max_iter={timed + arguments.profile}", "trainer.run_validation=False", "ckpt_type=dummy"]
    found += [
        "trainer.callbacks.progress_bar=null",
        f"+trainer.callbacks.clock={{_target_: {__name__}.StepClock, num_timed: {timed}}}",
    ]
    if arguments.random_weights or arguments.model_size == "tiny":
        found.append("model.config.model_manager_config.dit_path=''")
    if arguments.model_size == "tiny":
        return found
    if not arguments.action:
        size = SIZES_IN_PIXELS[arguments.resolution]
        found += ["dataloader_train=mock_video", f"dataloader_train.dataset.video_size={size}"]
    if arguments.random_weights:
        tokenizer = "model.config.pipe_config.tokenizer"
        found += [f"{tokenizer}.vae_pth=''", f"{tokenizer}.allow_random=True"]
    return found


def measure(what: str, overrides: list[str]) -> StepCosts:
    """Run the trainer; raises TrainingError when memory runs out."""
    StepClock.seconds.clear()
    StepClock.losses.clear()
    StepClock.profiled.clear()
    machine.forget_peak_memory()
    config = machine.launch(machine.CONFIG, overrides)
    first, *steps = StepClock.seconds
    tokens, flops = work(config, StepClock.shapes)
    allocated, reserved = machine.peak_memory()
    known = (tokens, flops, allocated, reserved, StepClock.losses[-1], dict(StepClock.profiled))
    return StepCosts(what, statistics.median(steps), first, *known)


def work(config: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[int, float]:
    """Tokens of a step and its operations, two per multiply-add."""
    model: Any = config.model["config"]
    net = network_of(model["pipe_config"]["net"])
    batch_size, _, _, height, width = shapes["video"]
    latent_shape = t, h, w = (model["pipe_config"]["state_t"], height // 8, width // 8)
    text_tokens = shapes["t5_text_embeddings"][1]
    forward = forward_flops(net, latent_shape, text_tokens=text_tokens, timestep_rows=t, batch_size=batch_size).total
    tokens = batch_size * t * h * w // (net.patch_temporal * net.patch_spatial**2)
    # adapters: the gradients of the weights are not computed
    return tokens, forward * (2.0 if model["train_architecture"] == "lora" else 3.0)


def measured(what: str, arguments: argparse.Namespace, added: list[str]) -> StepCosts | None:
    """The step of the experiment with these overrides; None where memory runs out, which is printed."""
    try:
        return measure(what, [*experiment(arguments), *settings(arguments), *added])
    except TrainingError as error:
        if not str(error).startswith("Out of memory"):
            raise
        print(f"  {what}: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        gc.collect()  # what the exception held is free now


def first_that_fits(arguments: argparse.Namespace) -> tuple[StepCosts, list[str]]:
    """The first attempt that memory allows, and its overrides on top of the experiment."""
    added: list[str] = []
    for what, overrides in FALLBACKS:
        added += overrides
        if (found := measured(what, arguments, added)) is not None:
            return found, added
    raise SystemExit("Even adapters alone do not fit into this device.")


def largest_batch(arguments: argparse.Namespace) -> tuple[StepCosts, list[str]]:
    """The step with the largest of the batch sizes that memory allows, and its override."""
    best: tuple[StepCosts, list[str]] | None = None
    for size in arguments.batch_sizes or BATCH_SIZES[arguments.model_size]:
        added = [f"dataloader_train.batch_size={size}"]
        if (found := measured(f"batch {size}", arguments, added)) is None:
            break
        best = found, added
        rate = f"{size / found.seconds:.2f} clips/s, {found.flops / found.seconds / 1e12:.4g} TFLOP/s"
        print(f"  batch {size}: {found.seconds:.3f} s, {rate}, {found.reserved / 1e9:.1f} GB taken", flush=True)
    if best is None:
        raise SystemExit("The smallest batch does not fit into this device.")
    return best


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model_size", default="2B", choices=("tiny", "2B", "14B"))
    parser.add_argument("--resolution", default="480", choices=tuple(SIZES_IN_PIXELS))
    parser.add_argument("--fps", type=int, default=16, choices=(10, 16), help="16: 93 frames, 10: 61")
    parser.add_argument("--action", action="store_true", help="the action-conditioned model, in the largest batch")
    parser.add_argument("--batch_sizes", nargs="*", type=int, help="with --action: which are tried, growing")
    parser.add_argument("--profile", action="store_true", help="the kernels of one step more")
    parser.add_argument("--random_weights", action="store_true", help="network and tokenizer without files")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    arguments = parser.parse_args()
    machine.quiet_trainer()
    peak = ceiling()
    try:
        found, added = largest_batch(arguments) if arguments.action else first_that_fits(arguments)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    plan = machine.planned("--", *experiment(arguments), *added)
    report(arguments, found, plan, peak)
    if arguments.profile:
        report_kernels(found.kernels)
    if arguments.json:
        record = {"measured": asdict(found), "plan": plan, "ceiling": peak, "overrides": added}
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n")


def report(arguments: argparse.Namespace, found: StepCosts, plan: dict[str, Any], peak: float) -> None:
    """The table: measured beside predicted."""
    rate = found.flops / found.seconds
    size = "" if arguments.model_size == "tiny" else f" {arguments.resolution}p {arguments.fps} fps"
    size = " with actions" if arguments.action else size
    print(f"{arguments.model_size}{size}, {found.what}: loss {found.loss:.3f}, first step {found.first_seconds:.1f} s")
    memory, mfu = plan.get("memory_bytes", {}), plan.get("model_flops_utilisation")
    total, overhead = memory.get("total"), memory.get("overhead")
    planned_use = None if total is None or overhead is None else (total - overhead) / 1e9
    planned_tokens = plan["tokens"] * plan["clips_per_step"] if "tokens" in plan else None
    rows = [
        ("tokens a step", f"{found.tokens:,}", predicted(planned_tokens, "{:,}")),
        ("model TFLOP a step", f"{found.flops / 1e12:.4g}", ""),
        ("seconds a step", f"{found.seconds:.3f}", predicted(plan.get("seconds_per_iteration"), "{:.3f}")),
        ("TFLOP/s", f"{rate / 1e12:.4g}", ""),
        ("share of the ceiling", f"{rate / peak:.1%}", ""),
        ("share of the data sheet (MFU)", machine.of_data_sheet(rate), predicted(mfu, "{:.1%}")),
        ("peak GB in use", f"{found.allocated / 1e9:.2f}", predicted(planned_use, "{:.2f}")),
        ("peak GB taken", f"{found.reserved / 1e9:.2f}", predicted(total and total / 1e9, "{:.2f}")),
    ]
    print(f"  {'':32s}{'measured':>12s}{'plan':>12s}")
    for name, measured, planned in rows:
        print(f"  {name:32s}{measured:>12s}{planned:>12s}")
    if "error" in plan:
        print(f"  plan: {plan['error']}")


def report_kernels(seconds: dict[str, float]) -> None:
    """The profiled step by groups of kernels, and those that take most by name."""
    total, groups = sum(seconds.values()), dict.fromkeys(KERNELS, 0.0)
    for name, spent in seconds.items():
        groups[next(group for group, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE))] += spent
    print(f"  one step of {total:.3f} s in kernels")
    for kind, limit in ((groups, len(groups)), (seconds, SHOWN)):
        for name, spent in sorted(kind.items(), key=lambda item: -item[1])[:limit]:
            print(f"  {spent:>10.4f} s {spent / total:>7.1%}  {name[:90]}")


def predicted(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"


if __name__ == "__main__":
    main()
