# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs on: the device that the project chooses, its name, a clock that waits for it, and the record.

``recorded.json`` holds ratios against the peer, by benchmark, processor (or GPU) and threads: what the documentation
reports. `compare` prints what a run found beside them, so that a figure which holds on one processor only is noticed.
"""

import argparse
import datetime
import json
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


def add_record_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help=f"write the ratios to benchmarks/{RECORD.name}")


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
        entry |= dict(date=datetime.date.today().isoformat(), figures={**known, **_rounded(figures)})
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


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RECORD.parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
