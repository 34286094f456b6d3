# SPDX-License-Identifier: Apache-2.0
"""The harness of all benchmarks: the machine and its name, calls in turns, and runs of the programs."""

import argparse
import gc
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.nn.layers import processor_name
from imaginaire import command_line, distributed
from imaginaire.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "cosmos_predict2/configs/base/config.py"


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """The device of models here, and their precision on it."""
    device = distributed.device()
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def require_gpu(size: str) -> None:
    """Exit where a released size would run without a GPU."""
    if size != "tiny" and not torch.cuda.is_available():
        raise SystemExit(f"{size} takes hours without a GPU, and there is none: take the size tiny.")


def known_gpu(name: str) -> str | None:
    """The name that plan has for this GPU: "NVIDIA H100 NVL" is H100-NVL; None for one that it does not know."""
    from cosmos_predict2.tools.plan.speed import GPUS

    keys = sorted(GPUS, key=len, reverse=True)
    return next((key for key in keys if all(part in name for part in key.split("-"))), None)


def of_data_sheet(rate: float) -> str:
    """Operations per second as a share of what this GPU's data sheet has; "-" where there is none."""
    from cosmos_predict2.tools.plan.speed import GPUS

    gpu = known_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return f"{rate / GPUS[gpu].peak:.1%}" if gpu else "-"


def described(device: torch.device) -> str:
    """PyTorch's version with the GPU's name, or with the threads on this kind of processor."""
    is_gpu = device.type == "cuda"
    place = torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} threads, {processor_name()}"
    return f"torch {torch.__version__}, {place}"


def parser(description: str | None, *flags: str, **defaults: Any) -> command_line.Parser:
    """A parser with the named ones of the flags that benchmarks share; ``defaults`` are a benchmark's own."""
    made = command_line.Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared: dict[str, dict[str, Any]] = {
        "quick": dict(action="store_true", help="a small part of the work, for a look"),
        "threads": dict(type=int, help="threads of PyTorch; default: as many as it takes by itself"),
        "rounds": dict(type=int, help="timed rounds"),
        "experiment": dict(nargs="*"),
        "seeds": dict(nargs="*", type=int),
        "overrides": dict(nargs="*", help="after --: overrides of every run"),
        "output": dict(default="", help="folder of the runs; default: a temporary one"),
        "checkpoint": dict(nargs="*", default=[], help="measure these instead of training"),
    }
    for flag in flags:
        made.add_argument(flag if flag == "overrides" else f"--{flag}", **shared[flag])
    made.set_defaults(**defaults)
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with PyTorch's threads set as they ask, and a folder for the runs."""
    arguments = made.parse_args()
    if vars(arguments).get("threads"):
        torch.set_num_threads(arguments.threads)
    if vars(arguments).get("output") == "":
        arguments.output = tempfile.mkdtemp(prefix="benchmark_")
    return arguments


def quiet_trainer() -> None:
    """The trainer from the checkout's folder, without a tracker and with errors alone in its log."""
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.setdefault("IMAGINAIRE_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    os.chdir(ROOT)


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of several calls in each round, by name: on the clock, and of processor time, which others on the
    machine disturb less."""

    wall: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    core: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float:
        return statistics.median(self.wall[name])

    def ratio(self, name: str, base: str, *, of_core: bool = False) -> float:
        """The seconds of one over those of another in the same round, the median of all rounds."""
        seconds = self.core if of_core else self.wall
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> RoundTimes:
    """Call all in each round, in alternating order, so that what else the machine does meets all of them."""
    found = RoundTimes()
    for i in range(-warm_up, rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            core, wall = time.process_time(), seconds(runs[name])
            if i >= 0:
                found.wall[name].append(wall)
                found.core[name].append(time.process_time() - core)
    return found


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of a call, with all that it starts on the device, and what it gives."""
    wait()
    start = time.perf_counter()
    found = run()
    wait()
    return time.perf_counter() - start, found


def seconds(run: Callable[[], Any]) -> float:
    return timed(run)[0]


class Phases:
    """Seconds and peak memory by phase; what lies inside another phase counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.memory: dict[str, tuple[int, int]] = {}  # as of `peak_memory`
        self._names: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        self._mark()
        self._names.append(name)

    def leave(self) -> None:
        self._mark()
        self._names.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.enter(name)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return call

    def watch(self, name: str, holder: Any, method: str) -> None:
        """Time a method of an object from now on."""
        object.__setattr__(holder, method, self.timed(name, getattr(holder, method)))

    def peak(self) -> tuple[int, int]:
        """The most of all phases."""
        used, taken = (max(bytes_each) for bytes_each in zip(*self.memory.values(), strict=True))
        return used, taken

    def _mark(self) -> None:
        wait()
        now, name = time.perf_counter(), self._names[-1] if self._names else None
        if name is not None:
            self.seconds[name] += now - self._since
            used, taken = (max(pair) for pair in zip(self.memory.get(name, (0, 0)), peak_memory(), strict=True))
            self.memory[name] = used, taken
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()


class Attempts:
    """Makes calls; one that fails is printed and does not stop those after it."""

    num_failed = 0
    error = ""  # of the last call

    def __call__(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the call; None where it fails."""
        self.error = ""
        try:
            return run(*arguments)
        except Exception as error:  # whatever it is, the others are measured
            self.error = str(error) or "no message"
            lines = [line for line in self.error.splitlines() if line.strip()][:6]
            print(f"  {name} FAILED: {type(error).__name__}: " + "\n    ".join(lines), flush=True)
            if not isinstance(error, UserError):
                print("    " + "    ".join(traceback.format_tb(error.__traceback__)[-3:]), flush=True)
            self.num_failed += 1
            return None
        finally:
            gc.collect()  # what an exception and callbacks held

    def end(self) -> None:
        """Exit with 1 where a call failed."""
        if self.num_failed:
            raise SystemExit(1)


def wait() -> None:
    """Wait until the device has finished all that it was given."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()


def peak_memory() -> tuple[int, int]:
    """Bytes in use on the device at most, and taken from it; on a CPU those of the process."""
    if distributed.device().type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident, resident


def forget_peak_memory() -> None:
    """Begin the next peak with what lies in memory now."""
    if distributed.device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def program(root: str | Path, *words: str) -> float:
    """Run a program of this repository with its results below a folder; its core-seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = dict(IMAGINAIRE_OUTPUT_ROOT=str(root), WANDB_MODE="disabled")
    own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    subprocess.run([sys.executable, "-m", *words], check=True, env={**os.environ, **own})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def planned(*words: str) -> dict[str, Any]:
    """The estimate of scripts.plan for one process on this device; ``error`` where it makes none."""
    command = [sys.executable, "-m", "scripts.plan", "--gpus", "1", "--json", "-"]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        command += ["--gpu_memory", f"{properties.total_memory / 2**30:.0f}"]
        name = known_gpu(properties.name)
        command += ["--gpu", name] if name else []
    run = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    try:
        found: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        lines = (run.stderr or run.stdout).strip().splitlines()
        return {"error": lines[-1] if lines else "no output"}
    return found


def train(root: str | Path, name: str, experiment: str, *overrides: str) -> tuple[Path, float]:
    """The folder of a run of this name, and the core-seconds that it took."""
    seconds = program(root, "scripts.train", "--", f"experiment={experiment}", f"job.name={name}", *overrides)
    (folder,) = Path(root).glob(f"*/*/{name}")
    return folder, seconds


def metrics(folder: Path, key: str) -> list[dict[str, Any]]:
    """The records of a run that have this metric."""
    return [row for line in (folder / "metrics.jsonl").read_text().splitlines() if key in (row := json.loads(line))]


def draw(path: str, x: str, panes: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> None:
    """A picture of curves: for each label of a pane its lines, by name, as (x, y) pairs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panes), figsize=(1 + 5 * len(panes), 4), sharex=True, squeeze=False)
    for pane, (label, lines) in zip(axes[0], panes.items(), strict=True):
        for name, points in lines.items():
            pane.plot(*zip(*points, strict=True), label=name)
        pane.set(xlabel=x, ylabel=label)
        pane.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def launch(path: str, overrides: Sequence[str]) -> Any:
    """Run the trainer in this process below a temporary folder; the configuration that it ran."""
    from imaginaire.config.compose import compose
    from imaginaire.training import trainer

    with tempfile.TemporaryDirectory() as root:
        os.environ["IMAGINAIRE_OUTPUT_ROOT"] = root
        config = compose(path, overrides)
        trainer.launch(config)
    return config
