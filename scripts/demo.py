# SPDX-License-Identifier: Apache-2.0
"""`make demo`: train a small model, interrupt it, resume it, and show the loss curve. Needs no download and no GPU."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OUTPUT = Path("outputs/demo")
RUN = OUTPUT / "examples/minimal/minimal"
COMMAND = [sys.executable, "-m", "scripts.train", "--config=examples/minimal/config.py", "--", "experiment=minimal"]
EXIT_INTERRUPTED = 75
INTERRUPT_AT = 150


def main() -> int:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    environment = {**os.environ, "IMAGINAIRE_OUTPUT_ROOT": str(OUTPUT), "WANDB_MODE": "disabled"}
    say(f"1. Train the example project and interrupt it after iteration {INTERRUPT_AT}, as a cluster would (SIGTERM).")
    print(f"   IMAGINAIRE_OUTPUT_ROOT={OUTPUT} {' '.join(['python', *COMMAND[1:]])}\n", flush=True)
    process = subprocess.Popen(COMMAND, env=environment)
    while process.poll() is None and last_iteration() < INTERRUPT_AT:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if (code := process.wait()) != EXIT_INTERRUPTED:
        print(f"expected exit code {EXIT_INTERRUPTED} (interrupted, state saved), got {code}", file=sys.stderr)
        return 1
    stopped_at = (RUN / "checkpoints/latest_checkpoint.txt").read_text().strip()
    say(f"2. It saved {stopped_at} and left with exit code {code}. The same command goes on from there.")
    subprocess.run(COMMAND, env=environment, check=True)
    losses = [(r["iteration"], r["train/loss"]) for r in records() if "train/loss" in r]
    resumed_at = int(stopped_at.removeprefix("iter_").removesuffix(".pt"))
    say("3. The loss of both parts is one curve.")
    print(text_curve(losses, resumed_at))
    picture = draw(losses, [(r["iteration"], r["val/loss"]) for r in records() if "val/loss" in r], resumed_at)
    print(f"\nrun folder: {RUN}\npicture:    {picture}")
    first, last = losses[0][1], losses[-1][1]
    print(f"loss {first:.4f} -> {last:.4f} ({first / last:.0f} times smaller)")
    return 0 if last < first / 3 else 1


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def records() -> list[dict[str, float]]:
    path = RUN / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_iteration() -> int:
    return max((int(r["iteration"]) for r in records()), default=0)


def text_curve(losses: list[tuple[float, float]], resumed_at: int, width: int = 60) -> str:
    """One line per logged iteration, its bar on a logarithmic scale."""
    lowest, highest = (f(loss for _, loss in losses) for f in (min, max))
    steps_per_e = (width - 1) / max(math.log(highest / lowest), 1e-9)
    rows = []
    marked = False
    for iteration, loss in losses:
        if iteration > resumed_at and not marked:
            rows.append(f"{'':>10} {'- - interrupted and resumed at ' + str(resumed_at) + ' ':-<{width}}")
            marked = True
        rows.append(f"{iteration:>10.0f} {'#' * (1 + round(steps_per_e * math.log(loss / lowest)))} {loss:.4f}")
    return "\n".join(rows)


def draw(losses: list[tuple[float, float]], validation: list[tuple[float, float]], resumed_at: int) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), dpi=120)
    axes.semilogy(*zip(*losses, strict=True), color="#3060a0", label="training loss")
    if validation:
        axes.semilogy(*zip(*validation, strict=True), "o", color="#d06020", label="validation loss, averaged weights")
    axes.axvline(resumed_at, color="gray", linestyle="--", linewidth=1)
    axes.text(resumed_at, axes.get_ylim()[1], " interrupted, resumed", va="top", fontsize=8, color="gray")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.tight_layout()
    path = OUTPUT / "loss.png"
    figure.savefig(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
