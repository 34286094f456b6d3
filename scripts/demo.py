# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a small world model learns the toy world, is interrupted, goes on, and imagines a clip it never saw.

Needs no download and no GPU. Everything is written below outputs/demo.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OUTPUT = Path("outputs/demo")
EXPERIMENT = "predict2_video2world_training_tiny_groot_gr1_480"
RUN = OUTPUT / "posttraining/video2world/tiny_groot_gr1_480"
CLIP = Path("assets/toy_world/clip.mp4")  # of an episode that training never draws
EXIT_INTERRUPTED = 75
INTERRUPT_AT = 150
TRAIN = ["-m", "scripts.train", "--", f"experiment={EXPERIMENT}"]


def main() -> int:
    argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__).parse_args()  # --help; no flags
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    say(f"1. Train a Video2World model of 1.3 M parameters, and interrupt it after iteration {INTERRUPT_AT} (SIGTERM).")
    process = start(TRAIN)
    while process.poll() is None and last_iteration() < INTERRUPT_AT:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if (code := process.wait()) != EXIT_INTERRUPTED:
        print(f"expected exit code {EXIT_INTERRUPTED} (interrupted, state saved), got {code}", file=sys.stderr)
        return 1
    stopped_at = latest_checkpoint()
    say(f"2. It saved {stopped_at} and left with exit code {code}. The same command goes on from there.")
    if (code := start(TRAIN).wait()) != 0:
        return code
    say("3. The loss of both parts is one curve.")
    losses = [(r["iteration"], r["train/loss"]) for r in records() if "train/loss" in r]
    print(text_curve(thinned(losses), int(stopped_at.removeprefix("iter_").removesuffix(".pt"))))

    say("4. Imagine what follows the first frame of a clip that it never saw.")
    prompt = Path("assets/toy_world/prompt.txt").read_text().strip()
    weights = RUN / "checkpoints/model" / latest_checkpoint()
    generate = ["examples/video2world.py", "--model_size", "tiny", "--dit_path", str(weights), "--load_ema"]
    generate += ["--prompt", prompt, "--input_path", "assets/toy_world/first_frame.png", "--compare_to", str(CLIP)]
    generate += ["--save_path", str(OUTPUT / "generated.mp4")]
    if (code := start(generate).wait()) != 0:
        return code
    generated, repeated = psnr_to_truth(OUTPUT / "generated.mp4")
    print(f"\nlike the truth: {generated:.1f} dB; repeating the first frame would be {repeated:.1f} dB")
    print(f"video:         {OUTPUT}/generated.mp4\ncontact sheet: {OUTPUT}/generated.png\nrun folder:    {RUN}")
    first, last = losses[0][1], losses[-1][1]
    print(f"loss {first:.2f} -> {last:.2f} ({first / last:.0f} times smaller)")
    return 0 if last < first / 3 and generated > repeated else 1


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def start(arguments: list[str]) -> "subprocess.Popen[bytes]":
    """The command, shown as a user would type it, with its results below OUTPUT.

    On one thread, unless asked otherwise: a second one makes this small model a third faster on an idle machine, and
    many times slower where another program needs the core.
    """
    settings = {"IMAGINAIRE_OUTPUT_ROOT": str(OUTPUT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    print(f"    {' '.join(f'{k}={v}' for k, v in settings.items())} python {shlex.join(arguments)}\n", flush=True)
    environment = {**os.environ, **settings, "WANDB_MODE": "disabled"}
    return subprocess.Popen([sys.executable, *arguments], env=environment)


def latest_checkpoint() -> str:
    return (RUN / "checkpoints/latest_checkpoint.txt").read_text().strip()


def records() -> list[dict[str, float]]:
    path = RUN / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_iteration() -> int:
    return max((int(r["iteration"]) for r in records()), default=0)


def thinned(losses: list[tuple[float, float]], rows: int = 25) -> list[tuple[float, float]]:
    """About so many of them, the last one included."""
    every = max(1, len(losses) // rows)
    return losses[(len(losses) - 1) % every :: every]


def text_curve(losses: list[tuple[float, float]], resumed_at: int, width: int = 60) -> str:
    """One line per iteration, its bar on a logarithmic scale."""
    lowest, highest = (f(loss for _, loss in losses) for f in (min, max))
    steps_per_e = (width - 1) / max(math.log(highest / lowest), 1e-9)
    rows = []
    marked = False
    for iteration, loss in losses:
        if iteration > resumed_at and not marked:
            rows.append(f"{'':>10} {'- - interrupted and resumed at ' + str(resumed_at) + ' ':-<{width}}")
            marked = True
        rows.append(f"{iteration:>10.0f} {'#' * (1 + round(steps_per_e * math.log(loss / lowest)))} {loss:.2f}")
    return "\n".join(rows)


def psnr_to_truth(path: Path) -> tuple[float, float]:
    """Of the generated video and of its first frame repeated, against the true clip, in dB."""
    from cosmos_predict2.data import media

    generated, _ = media.read_video(path)
    true, _ = media.read_video(CLIP)
    true = true[:, : generated.shape[1]]

    def psnr(video: "media.Tensor") -> float:
        error = (video.float() - true.float())[:, 1:].square().mean()
        return float(10 * (255**2 / error).log10())

    return psnr(generated), psnr(true[:, :1].expand_as(true))


if __name__ == "__main__":
    sys.exit(main())
