# SPDX-License-Identifier: Apache-2.0
"""An iteration of reinforcement learning: seconds of rollout, reward, gradient and update, and the share of the floor.

    python -m benchmarks.rl_step [--quick] [--threads 1]
    python -m benchmarks.rl_step --experiment tiny_nft_toy_world -- model.config.rl.num_timesteps=2
    python -m benchmarks.rl_step --released [--experiment NAME ...] [--architecture lora base] [--size tiny]

The trainer itself runs the experiment, first with its own rewards. Then clips are generated in four parts, and a scorer
elsewhere, which needs no time of this machine, takes as long for all clips as their rollout, or half as long: what it
does while further clips are made, is hidden. The floor is the time that the operations of all passes through the
network would take at the speed of the fastest matrix product found here. `--released` measures published recipes of
the 2B network in place of all this: `benchmarks.released_rl_step`.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import machine, released_rl_step
from benchmarks.dit import ceiling
from benchmarks.released_rl_step import CONFIG, QUIET, RL, ROWS, PhaseClock, passes_of
from cosmos_predict2.models.passes import Passes
from cosmos_predict2.rl.config import RLConfig, rl_of
from cosmos_predict2.rl.interfaces import Clips, Scores, Ticket
from cosmos_predict2.rl.rewards.verifiable import Random
from cosmos_predict2.tools.plan.speed import GPUS, predict_speed
from cosmos_predict2.tools.plan.workload import read_workload
from imaginaire.config.compose import compose
from imaginaire.config.schema import Config

PARTS = 4  # of the clips, in the comparison of scorers


class SlowScorer:
    """A reward that is scored one clip after the other by something that takes ``seconds`` for each of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._is_free_at = 0.0
        self._scores: dict[str, tuple[float, Scores]] = {}

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        size = len(clips.prompts)
        self._is_free_at = max(self._is_free_at, time.perf_counter()) + size * self.seconds
        scores = Scores(Random()(clips, context), torch.ones(size, dtype=torch.bool))
        self._scores[request_id] = (self._is_free_at, scores)
        return Ticket(request_id)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        is_there_at, scores = self._scores.pop(ticket.request_id)
        time.sleep(max(0.0, is_there_at - time.perf_counter()))
        return scores


@dataclass(frozen=True)
class IterationCosts:
    """Mean seconds of an iteration, by phase; and what it did."""

    seconds: dict[str, float]
    passes: Passes
    flops: float

    @property
    def clips(self) -> float:
        return self.passes.clips / self.passes.updates

    def of(self, row: str) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in ROWS[row])


def measure(overrides: list[str], experiences: int) -> IterationCosts:
    """Run so many experiences, after one that is not timed."""
    work = read_workload(compose(CONFIG, overrides), 1)
    passes = passes_of(work)
    PhaseClock.steps.clear()
    last = f"trainer.max_iter={(experiences + 1) * passes.updates}"
    machine.launch(CONFIG, [*overrides, last])
    timed = PhaseClock.steps[passes.updates :]
    names = {name for step in timed for name in step}
    seconds = {name: sum(step.get(name, 0.0) for step in timed) / len(timed) for name in names}
    return IterationCosts(seconds, passes, predict_speed(work, GPUS["H100"]).model_flops_per_gpu)


def options(experiment: str, overrides: list[str]) -> list[str]:
    """The experiment with nothing but its steps."""
    first = [f"experiment={experiment}", *QUIET]
    names = compose(CONFIG, first).trainer.callbacks
    extra = [f"trainer.callbacks.{name}=null" for name in names if name != "grad_clip"]
    clock = "+trainer.callbacks.phase_clock={_target_: benchmarks.released_rl_step.PhaseClock}"
    return [*first, *extra, clock, *overrides]


def with_scorer(config: Config, seconds: float) -> list[str]:
    """Overrides for one scorer elsewhere, and clips in parts."""
    rl: RLConfig = rl_of(config.model["config"])
    passes = passes_of(read_workload(config, 1))
    size = max(1, passes.clips // PARTS)
    steps = passes.clips // size // rl.minibatches * rl.num_trained
    others = [f"{RL}.rewards.{name}=null" for name in rl.rewards]
    scorer = f"{{make: {{_target_: benchmarks.rl_step.SlowScorer, seconds: {seconds}}}}}"
    parts = [f"{RL}.rollout_batch={size}", f"trainer.grad_accum_iter={steps}"]
    return [*others, f"+{RL}.rewards.elsewhere={scorer}", *parts]


def main() -> None:
    parser = machine.parser(__doc__, "quick", "threads", "experiment", "overrides")
    parser.add_argument("--released", action="store_true", help="published recipes of 2B, with random weights and data")
    parser.add_argument("--architecture", nargs="*", choices=("lora", "base"), help="of --released; default: both")
    parser.add_argument("--size", default="2B", choices=("2B", "tiny"), help="of --released; 2B needs a GPU")
    parser.add_argument("--steps", type=int, default=1, help="timed experiences of --released, after one that is not")
    arguments = machine.parse(parser)
    machine.quiet_trainer()
    if arguments.released:
        released_rl_step.run(arguments)
        return
    peak = ceiling()
    for experiment in arguments.experiment or ["tiny_flow_grpo_toy_world"]:
        run(experiment, arguments, peak, 2 if arguments.quick else 6)


def run(experiment: str, arguments: argparse.Namespace, peak: float, experiences: int) -> None:
    overrides = options(experiment, arguments.overrides)
    report(experiment, measure(overrides, experiences), peak)
    config = compose(CONFIG, overrides)
    free = measure([*overrides, *with_scorer(config, 0.0)], experiences)
    clips, rollout = free.passes.clips, free.of("rollout") * free.passes.updates
    print(f"a scorer elsewhere, clips in {PARTS} parts: {free.seconds['all']:.3f} s an iteration if it takes no time")
    for share in (0.5, 1.0):
        slow = measure([*overrides, *with_scorer(config, share * rollout / clips)], experiences)
        scoring, waited = share * rollout, slow.of("reward") * slow.passes.updates
        hidden = f"waits {waited:.3f} s: {1 - waited / scoring:.0%} are hidden"
        print(f"  {scoring:.3f} s for {clips} clips: {slow.seconds['all']:.3f} s an iteration, {hidden}")


def report(experiment: str, found: IterationCosts, peak: float) -> None:
    """Print the parts of an iteration's time."""
    whole = found.seconds["all"]
    rows = {row: found.of(row) for row in ROWS}
    rows["other"] = whole - sum(rows.values())
    print(f"{experiment}: {whole:.3f} s an iteration, {found.clips:g} clips")
    for row, seconds in rows.items():
        print(f"  {row:10s}{seconds:8.3f} s{seconds / whole:6.0%}")
    print(f"  {found.clips / whole:.1f} imagined videos/s in all, {found.clips / rows['rollout']:.1f} in the rollout")
    floor = found.flops / peak
    print(f"  floor {floor:.3f} s ({found.flops / 1e9:.1f} GFLOP of the network): {floor / whole:.0%} of the iteration")


if __name__ == "__main__":
    import importlib

    importlib.import_module("benchmarks.rl_step").main()  # the module that configurations name
