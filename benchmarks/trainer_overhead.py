# SPDX-License-Identifier: Apache-2.0
"""The cost of the trainer over a bare PyTorch loop that does the same arithmetic, and the cost of saving.

python -m benchmarks.trainer_overhead [--quick]

Both loops take the same model, data stream, optimizer, clipping and weight average; blocks of bare and trainer steps
alternate in one process. Saving: steps of about 0.5 s, a 50 MB checkpoint before every other ten, against the rest.
"""

import statistics
import time
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks import machine
from examples.minimal.data import Waves
from examples.minimal.model import MinimalModel
from imaginaire import random
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import instantiate
from imaginaire.data.stream import DataStream, ResumableLoader
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.training.callbacks import Callback

CONFIG = "examples/minimal/config.py"
SETTINGS = ["experiment=minimal", "dataloader_train.num_workers=0", "trainer.run_validation=False"]


class StepEnds(Callback):
    """Notes when each step ends."""

    times: ClassVar[list[float]] = []

    def on_training_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


class HeavyModel(MinimalModel):
    """A fixed number of products a step, about ``step_s`` seconds, and ``ballast`` million saved float32 numbers."""

    products: ClassVar[int] = 0

    def __init__(self, step_s: float = 0.5, ballast: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.step_s = step_s
        self.net.register_buffer("ballast", torch.zeros(int(ballast * 1e6)))
        self._matrix = torch.randn(700, 700)

    def training_step(self, batch: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        for _ in range(self.products):
            self._matrix @ self._matrix
        return MinimalModel.training_step(self, batch, iteration)

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        if HeavyModel.products == 0:  # measured once, so that every block does the same work
            start = time.perf_counter()
            for _ in range(50):
                self._matrix @ self._matrix
            HeavyModel.products = int(50 * self.step_s / (time.perf_counter() - start))
        ballast = self.net.ballast
        super().on_train_start(memory_format)
        self.net.ballast = ballast


def bare_loop(steps: int) -> list[float]:
    """Seconds of each step of a plain loop."""
    config = compose(CONFIG, SETTINGS)
    random.seed_all(0, 0, "build")
    model = instantiate(config.model)
    model.on_train_start()
    model.parallelize(ParallelDims())
    optimizer, scheduler = model.init_optimizer_scheduler(config.optimizer, config.scheduler)
    stream = DataStream(ResumableLoader(Waves(), batch_size=16), 0, ParallelDims())
    times = []
    for iteration, batch in zip(range(steps), stream, strict=False):
        _, loss = model.training_step(batch, iteration)
        loss.backward()
        parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.on_before_zero_grad(optimizer, scheduler, iteration)
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)]


def trainer_loop(steps: int, *overrides: str) -> list[float]:
    """Seconds of each step of the trainer with its default callbacks."""
    StepEnds.times.clear()
    clock = f"+trainer.callbacks.clock={{_target_: {__name__}.StepEnds}}"
    machine.launch(CONFIG, [*SETTINGS, f"trainer.max_iter={steps}", clock, *overrides])
    return [b - a for a, b in pairwise(StepEnds.times)]


def overhead(steps: int, rounds: int) -> None:
    skip = steps // 5
    bare, trained = [], []
    for _ in range(rounds):
        # means: what happens every few steps (garbage collection, logging) counts
        bare.append(statistics.fmean(bare_loop(steps)[skip:]))
        trained.append(statistics.fmean(trainer_loop(steps, "checkpoint.save_iter=1000000")[skip:]))
    added = [t - b for t, b in zip(trained, bare, strict=True)]
    lowest, median, highest = (f(added) * 1e3 for f in (min, statistics.median, max))
    if not is_measured(median, lowest, highest):
        print(
            f"overhead        not measured here: blocks differ by more than it, {lowest:.3f} to {highest:.3f} ms/step"
        )
        return
    print(f"bare loop       {statistics.median(bare) * 1e3:7.3f} ms/step (median of {rounds} blocks of {steps} steps)")
    print(f"trainer         {statistics.median(trained) * 1e3:7.3f} ms/step, default callbacks")
    print(f"overhead        {median:7.3f} ms/step (blocks: {lowest:.3f} to {highest:.3f})")


def is_measured(figure: float, lowest: float, highest: float) -> bool:
    """True for a figure that is larger than the spread of its repeated measurements."""
    return highest - lowest < abs(figure)


def saving(pairs: int, step_s: float) -> float | None:
    """Print what saving costs; the time of ten steps that begin with a save over that of the ten after them, or None
    where other work of the machine hides it.

    Both halves of a pair come from one run, seconds apart: what else the machine does meets both.
    """
    heavy = [f"model._target_={__name__}.HeavyModel", f"+model.step_s={step_s}"]
    heavy += ["+model.ballast=6.0"]  # weights and average: 2 x 24 MB
    times = trainer_loop(20 * (pairs + 1), *heavy, "checkpoint.save_iter=20", "checkpoint.keep_last=2")[19:]
    if len(times) < 20 * pairs:
        print(f"saving          not measured here: the run ended after {len(times) + 20} of {20 * (pairs + 1)} steps")
        return None
    halves = [sum(times[first : first + 10]) for first in range(0, 20 * pairs, 10)]
    ratios = sorted(with_save / without for with_save, without in zip(halves[::2], halves[1::2], strict=True))
    median = statistics.median(ratios)
    low, high = ratios[pairs // 4] - 1, ratios[-1 - pairs // 4] - 1
    quarters = f"{low:+.1%} to {high:+.1%}"
    if not is_measured(median - 1, low, high):
        print(f"saving          not measured here: pairs of ten steps differ by more than it, {quarters}")
        return None
    print(f"saving          {median - 1:+.1%} with a save every 10 steps of {sum(halves) / len(halves) / 10:.2f} s")
    print(f"                (median of {pairs} pairs of ten steps; the middle half: {quarters})")
    return median


def main() -> None:
    parser = machine.parser(__doc__, "quick")
    arguments = parser.parse_args()
    quick = arguments.quick
    machine.quiet_trainer()
    print(machine.described(torch.device("cpu")))
    overhead(steps=100 if quick else 500, rounds=3 if quick else 5)
    saving(pairs=4 if quick else 24, step_s=0.1 if quick else 0.5)


if __name__ == "__main__":
    main()
