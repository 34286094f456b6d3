# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs on: the device that the project chooses, its name, a clock that waits for it, and the record.

``recorded.json`` holds ratios against the peer, by benchmark, processor (or GPU) and threads: what the documentation
reports. `compare` prints what a run found beside them, so that a figure which holds on one processor only is noticed.
"""

import argparse
import datetime
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.nn.linear import processor_name
from imaginaire import distributed

RECORD = Path(__file__).with_name("recorded.json")
TOLERANCE = 0.15  # relative: what two runs on one machine may differ by


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Where models live here, and the precision that they have there."""
    device = distributed.device()
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def described(device: torch.device) -> str:
    """PyTorch's version with the GPU's name, or with the threads on this kind of processor."""
    is_gpu = device.type == "cuda"
    place = torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} threads, {processor_name()}"
    return f"torch {torch.__version__}, {place}"


def parser(description: str | None, *flags: str) -> argparse.ArgumentParser:
    """A parser with the named ones of the flags that benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared: dict[str, dict[str, Any]] = {
        "quick": dict(action="store_true", help="a small part of the work, for a look"),
        "threads": dict(type=int, help="threads of PyTorch; default: as many as it takes by itself"),
        "rounds": dict(type=int, help="timed rounds"),
        "record": dict(action="store_true", help=f"write the ratios to benchmarks/{RECORD.name}"),
    }
    for flag in flags:
        made.add_argument(f"--{flag}", **shared[flag])
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with PyTorch's threads set as they ask."""
    arguments = made.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def quiet_trainer() -> None:
    """The trainer from the checkout's folder, without a tracker and with errors alone in its log."""
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.setdefault("IMAGINAIRE_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    os.chdir(RECORD.parents[1])


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each call of all, in alternating order, so that what else the machine does meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-warm_up, rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            taken = seconds(runs[name])
            if i >= 0:
                found[name].append(taken)
    return found


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes, with what it starts on the device."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the device has done all that it was told."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()


def compare(benchmark: str, figures: Mapping[str, float], device: torch.device, *, record: bool = False) -> None:
    """Print the recorded ratios of this benchmark beside those just found, or record these."""
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    threads = torch.get_num_threads()
    entries = json.loads(RECORD.read_text()) if RECORD.exists() else []
    of_benchmark = [entry for entry in entries if entry["benchmark"] == benchmark]
    same = [entry for entry in of_benchmark if (entry["processor"], entry["threads"]) == (here, threads)]
    if record:
        known = same[0]["figures"] if same else {}
        entry = dict(benchmark=benchmark, processor=here, threads=threads, commit=_commit())
        rounded = {name: round(value, 3) for name, value in figures.items()}
        entry |= dict(date=datetime.date.today().isoformat(), figures={**known, **rounded})
        RECORD.write_text(json.dumps([e for e in entries if e not in same] + [entry], indent=1) + "\n")
        print(f"recorded for {here}, {threads} threads, in {RECORD}")
        return
    print("\n".join(_comparison(figures, same, of_benchmark, f"{here}, {threads} threads")))


def _comparison(
    figures: Mapping[str, float], same: list[dict[str, Any]], others: list[dict[str, Any]], here: str
) -> list[str]:
    if not same:
        known = ", ".join(sorted({f"{entry['processor']} ({entry['threads']} threads)" for entry in others}))
        return [f"No figures are recorded for {here}; recorded: {known or 'none'}."]
    lines = [f"against the figures recorded on this kind of processor ({same[0]['date']}, commit {same[0]['commit']}):"]
    for name, found in figures.items():
        recorded = same[0]["figures"].get(name)
        if recorded is None:
            lines.append(f"  {name}: {found:.2f}, not recorded")
        else:
            change = found / recorded - 1
            differs = "   DIFFERS: measure again on an idle machine" if abs(change) > TOLERANCE else ""
            lines.append(f"  {name}: {found:.2f}, recorded {recorded:.2f} ({change:+.0%}){differs}")
    return lines


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RECORD.parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
