# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the tiny world model learns a task that it has never seen, by adapters (LoRA), and shows what changed.

Its training is interrupted on the way and goes on. Then an action-conditioned world model imagines three futures of one
picture, and a policy gets better by what it imagines. Last, a gate decides in which of two world models a policy may
learn. Needs no download and no GPU. Everything is written below outputs/demo; index.html shows it.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from cosmos_predict2.evaluation.reports.evaluation_page import Page, PageVideo
from cosmos_predict2.released import TINY_ACTION, TINY_POLICY
from imaginaire import command_line

OUTPUT = Path("outputs/demo")
# Pushes of the blue box, which the base has only seen stand still.
EXPERIMENT = "predict2_video2world_lora_training_tiny_cosmos_nemo_assets"
RUN = OUTPUT / "posttraining/video2world_lora/tiny_cosmos_nemo_assets"
EXIT_INTERRUPTED = 75
INTERRUPT_AT = 150
TRAIN = ["-m", "scripts.train", "--", f"experiment={EXPERIMENT}"]
ACTIONS = OUTPUT / "actions"
IMAGINE = ["-m", "scripts.evaluate_world_model", "--dit_path", os.path.relpath(TINY_ACTION), "--data", "toy"]
IMAGINE += ["--num_clips", "32", "--toy_episodes", "0", "--out", str(ACTIONS)]
# Without refining the world model: what a minute gives, and what exploitation does not yet take back.
POLICY_EXPERIMENT = "tiny_vla_grpo_world_model_frozen"
POLICY_RUN = OUTPUT / "posttraining/reinforcement_learning" / POLICY_EXPERIMENT
LEARN = ["-m", "scripts.train", "--", f"experiment={POLICY_EXPERIMENT}", "trainer.max_iter=320"]
LEARN += ["trainer.validation_iter=320", "checkpoint.save_iter=320", "model.config.compare=25"]
GATE = OUTPUT / "gate"
RECORDINGS, SPLIT, REWARD = (str(GATE / name) for name in ("recordings", "split.json", "reward"))
GOOD, BAD = "the world model that comes with the code", "one of 20 iterations"
WORLDS = {GOOD: os.path.relpath(TINY_ACTION), BAD: str(OUTPUT / "posttraining/video2world/short")}
RECORD = ["-m", "scripts.collect", "--suite", "toy", "--policy", os.path.relpath(TINY_POLICY)]
RECORD += ["--episodes", "120", "--batch_size", "60", "--out", RECORDINGS]
JUDGE = ["-m", "scripts.train_reward_model", "--data", RECORDINGS, "--split", SPLIT, "--world_model", WORLDS[GOOD]]
JUDGE += ["--steps", "400", "--precision", "0.8", "--out", REWARD]
SHORT = ["-m", "scripts.train", "--", "experiment=predict2_video2world_tiny_action_conditioned_training"]
SHORT += ["job.name=short", "trainer.max_iter=20", "trainer.run_validation=false", "checkpoint.save_iter=20"]
SHORT += ["dataloader_train.dataset.num_episodes=200"]
PREPARE = [RECORD, ["-m", "scripts.split_recordings", RECORDINGS, "--out", SPLIT], JUDGE, SHORT]
CARDS = {name: GATE / f"{i}.json" for i, name in enumerate(WORLDS)}
ASK = ["-m", "scripts.check_imagination", "--data", RECORDINGS, "--split", SPLIT, "--reward", REWARD]
ASK += ["--policy", os.path.relpath(TINY_POLICY), "--suite", "toy"]  # whose attempts are played truly
ASKED = {name: [*ASK, "--world_model", WORLDS[name], "--out", str(card)] for name, card in CARDS.items()}
BESIDE = [IMAGINE, LEARN, *PREPARE, *ASKED.values()]  # they need nothing of the first parts
EVALUATE = ["-m", "scripts.evaluate_world_model", "--experiment", EXPERIMENT, "--num_clips", "32"]
EVALUATE += ["--out", str(OUTPUT / "clips")]


parser = command_line.parser("scripts.demo", __doc__)


def run(args: argparse.Namespace) -> int:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    beside = Beside(BESIDE)
    try:
        return show(beside)
    finally:
        beside.end()


def show(beside: "Beside") -> int:
    """All parts after each other; the exit code. A second core runs what the first parts do not need."""
    say(
        "1. The tiny Video2World model that comes with the code has seen a red puck pushed, never the blue box. Train"
        f" adapters\n    on pushes of the box, and interrupt that after iteration {INTERRUPT_AT} (SIGTERM)."
    )
    process = start(TRAIN)
    while process.poll() is None and max([0, *records("iteration")]) < INTERRUPT_AT:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if (code := process.wait()) != EXIT_INTERRUPTED:
        sys.exit(f"expected exit code {EXIT_INTERRUPTED} (interrupted, state saved), got {code}")
    stopped_at = (RUN / "checkpoints/latest_checkpoint.txt").read_text().strip()
    say(f"2. It saved {stopped_at} and left with exit code {code}. The same command goes on from there.")
    finish(TRAIN)

    say("3. Clips that neither has seen: what follows the first frame, before and after, beside the truth.")
    figures_path, video = OUTPUT / "figures.json", OUTPUT / "truth_before_after.mp4"
    finish([*EVALUATE, "--dit_path", str(RUN), "--load_ema", "--json", str(figures_path), "--save_path", str(video)])
    figures = json.loads(figures_path.read_text())
    print(f"\nvideo:         {video}\ncontact sheet: {video.with_suffix('.png')}\nrun folder:    {RUN}")
    before, after = (sum(figures[name]) / len(figures[name]) for name in ("before", "after"))
    learned = (
        f"Loss on held-out clips {before:.2f} -> {after:.2f}; generated frames, where something moves:"
        f" {figures['psnr_before']:.1f} -> {figures['psnr']:.1f} dB."
    )
    if figures["ratio"] >= 0.7 or figures["psnr"] <= figures["psnr_before"]:
        sys.exit(f"the adapters have not learned the task: {learned}")

    say(
        "4. Another tiny model that comes with the code is conditioned on a robot's actions. What it imagines of\n"
        "    clips that it never saw, and of one picture under three sequences of actions, beside the simulator."
    )
    beside.follow(IMAGINE)
    actions = json.loads((ACTIONS / "figures.json").read_text())
    apart, error = actions["futures"]["apart"], actions["futures"]["error"]
    futures = (
        f"Three sequences of actions from one picture: the futures are {apart:.0f} from each other and"
        f" {error:.0f} from the simulator's (root mean square of 255)."
    )
    print(f"\nthree futures: {ACTIONS / 'futures.mp4'}\nas a picture:  {ACTIONS / 'futures.png'}\n{futures}")
    if apart <= 1.2 * error or actions["verdict"]["word"] != "follows":
        return 1

    say(
        "5. A policy was cloned from 20 demonstrations. It decides, the same world model imagines what follows, and\n"
        "    whatever brings the puck nearer to the ring becomes more likely. Success is measured in the simulator."
    )
    beside.follow(LEARN)
    first, *_, last = records("val/greedy_success", POLICY_RUN)
    success = f"Success in the simulator, of 800 held-out starts: {first:.0%} -> {last:.0%}"
    print(f"\n{success}. Videos: {POLICY_RUN / 'samples'}")
    if last <= first:
        return 1
    say(
        "6. Is what a world model imagines to be trusted? Held-out recordings are imagined, and what a reward says of"
        " them\n    is compared with what truly happened: by the model that comes with the code, and by one of 20"
        " iterations."
    )
    for words in (*PREPARE, *ASKED.values()):
        beside.follow(words)
    verdicts = {name: str(json.loads(card.read_text())["verdict"]) for name, card in CARDS.items()}
    if verdicts[GOOD] == "no" or verdicts[BAD] != "no":
        sys.exit(f"the gate is wrong: {verdicts}")
    page = write_page(figures, actions, stopped_at, verdicts, dict(learned=learned, futures=futures, success=success))
    print(f"\n{learned}\nOpen {page}: all of it on one page.")
    return 0


def write_page(figures: Any, actions: Any, stopped_at: str, verdicts: Any, said: Mapping[str, str]) -> Path:
    """outputs/demo/index.html: a sentence for each claim, with the curve or the videos that show it."""
    page = Page("What the demo has shown", ["no GPU, no download: all of this was made here"], video_width=640)
    page.heading("A new task in one or two minutes")
    page.verdict(f"Adapters on the tiny model: it {figures['verdict']}.")
    page.clips([PageVideo("truth; before; after", "truth_before_after.mp4")])
    page.note(f"Held-out clips of a box pushed, which the base has never seen. {said['learned']}")
    page.link("its evaluation, with all figures and videos", "clips/index.html")
    page.heading("Interrupted and resumed")
    losses = records("train/loss")
    every = max(1, len(losses) // 25)
    shown = losses[(len(losses) - 1) % every :: every]  # the last one is among them
    page.curves({"training loss": {"loss": shown}}, f"{len(shown)} of {len(losses)} log lines")
    page.note(f"One curve: the run was stopped after {stopped_at} was saved, and the same command went on from there.")
    page.heading("Another model imagines what a robot's actions do")
    page.verdict(f"It {actions['verdict']['sentence']}.")
    page.clips([PageVideo("above the simulator's futures, below the imagined ones", "actions/futures.mp4")])
    page.note(said["futures"])
    page.link("its evaluation, with all figures and videos", "actions/index.html")
    page.heading("A policy learns in what that model imagines")
    page.verdict(said["success"])
    before, after = (
        str(video.relative_to(OUTPUT)) for video in sorted((POLICY_RUN / "samples").glob("*_episodes.mp4"))
    )
    page.clips([PageVideo("before: as it imagines, and as it truly goes", before), PageVideo("after", after)])
    page.note("Its greedy actions, and the same ones in the simulator. No action was executed while it learnt.")
    page.heading("A gate says in which imagination a policy may learn")
    page.verdict("; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()) + ".")
    for card in CARDS.values():
        page.findings(json.loads(card.read_text())["reasons"])
    return page.write(OUTPUT)


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def settings() -> dict[str, str]:
    """Results go below OUTPUT, and a command runs on one thread, unless asked otherwise: a second one makes this small
    model a third faster on an idle machine, and many times slower where another program needs the core."""
    return {"IMAGINAIRE_OUTPUT_ROOT": str(OUTPUT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def command(arguments: list[str]) -> str:
    """The command as a user would type it."""
    return f"{' '.join(f'{k}={v}' for k, v in settings().items())} python {shlex.join(arguments)}"


def start(arguments: list[str], log: IO[bytes] | None = None) -> "subprocess.Popen[bytes]":
    """The command, shown as it starts; what it prints goes into a log where there is one."""
    if log is None:
        print(f"    {command(arguments)}\n", flush=True)
    environment = {**os.environ, **settings(), "WANDB_MODE": "disabled"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)


def finish(arguments: list[str]) -> None:
    """Run a command to its end; one that fails ends the demo with its exit code."""
    if (code := start(arguments).wait()) != 0:
        sys.exit(code)


class Beside:
    """Commands that a second core runs after each other, each into a log of its own."""

    def __init__(self, commands: list[list[str]]) -> None:
        self.commands = commands
        self._process: subprocess.Popen[bytes] | None = None
        self._pool = ThreadPoolExecutor(1)
        for i in range(len(commands)):
            self._log(i).touch()
        self._codes = [self._pool.submit(self._run, i) for i in range(len(commands))]

    def _run(self, i: int) -> int:
        with self._log(i).open("wb") as log:
            self._process = start(self.commands[i], log)
            return self._process.wait()

    def _log(self, i: int) -> Path:
        return OUTPUT / f"beside_{i}.log"

    def follow(self, words: list[str]) -> None:
        """Show a command and what it prints until it ends; one that fails ends the demo with its exit code."""
        i = self.commands.index(words)
        print(f"    {command(words)}\n\n    It runs beside the first parts; its log is {self._log(i)}:\n", flush=True)
        has_ended = False
        with self._log(i).open(errors="replace") as log:
            while not has_ended:
                has_ended = self._codes[i].done()
                print(log.read(), end="", flush=True)
                time.sleep(0.2)
        if (code := self._codes[i].result()) != 0 and not (code == 1 and words in ASKED.values()):  # 1: the gate's no
            sys.exit(code)

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while self._process is not None and self._process.poll() is None:
            self._process.terminate()
            time.sleep(0.2)


def records(key: str, run: Path = RUN) -> list[float]:
    """The values of a metric of a run, so far."""
    path = run / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # half a line, of a record that is being written or never was
            found.append(json.loads(line))
    return [record[key] for record in found if key in record]


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
