# SPDX-License-Identifier: Apache-2.0
"""A trainer small enough to read: it owns what callbacks ask of one, and calls the hooks of a step in their order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from imaginaire.config import lazy_config
from imaginaire.config.schema import Config, Profiling
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.training.callbacks import CallbackGroup
from imaginaire.training.callbacks.trackers import Metrics
from imaginaire.training.model import ImaginaireModel
from imaginaire.training.step import Timers

JOB: Any = SimpleNamespace(project="p", group="g", name="n", wandb_mode=None)


class Model(nn.Linear, ImaginaireModel):
    def __init__(self) -> None:
        super().__init__(4, 1)


class ImageModel(Model):
    batch_kinds = ("image", "video")

    def batch_kind(self, batch: Any) -> str:
        return "image" if "image" in batch else "video"


def make_config(callbacks: dict[str, Any] | None = None, **trainer: Any) -> Any:
    """A config with only what callbacks read; unlike the real one it may be changed."""
    profiling = Profiling(with_stack=False, with_modules=False)
    fields = dict(
        callbacks=callbacks, logging_iter=2, grad_accum_iter=1, max_iter=100, max_val_iter=None, run_validation=False
    )
    return SimpleNamespace(trainer=SimpleNamespace(**{**fields, "profiling": profiling, **trainer}), job=JOB)


class Trainer:
    """`step` runs one optimizer step of ``grad_accum_iter`` micro-batches through all the hooks."""

    def __init__(self, config: Any | Config, run_dir: Path | str, model: Any = None, is_writer: bool = True) -> None:
        self.config = config
        self.run_dir = str(run_dir)
        self.model = model if model is not None else Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.device, self.dims = torch.device("cpu"), ParallelDims()
        self.timers = Timers(self.device)
        self.watchdog = SimpleNamespace(beat=lambda text, long=False: None)
        self.dataloader_val: Any = None
        self.samples_seen = 0
        self.iteration = 0
        self.interrupted = False
        self.non_finite: list[str] = []
        self.guard = SimpleNamespace(report=lambda what, value: self.non_finite.append(what))
        self.metrics = Metrics(self.run_dir, config.job, is_writer=is_writer)
        self.callbacks = CallbackGroup(config, self)

    def start(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.metrics.open(iteration)
        self.callbacks.on_train_start(self.model, iteration)

    def step(self, *losses: float, batch: Any = None, output: dict[str, Any] | None = None) -> None:
        cb, i = self.callbacks, self.iteration
        batch = {"x": torch.ones(3, 4)} if batch is None else batch
        for micro, value in enumerate(losses):
            with self.timers("data"):
                pass
            cb.on_training_step_start(self.model, batch, i)
            cb.on_training_step_batch_start(self.model, batch, i)
            with self.timers("forward"):
                loss = value + (self.model.weight - self.model.weight.detach()).sum()  # exactly the value
            loss.backward()
            if micro == len(losses) - 1:
                cb.on_before_optimizer_step(self.model, self.optimizer, self.scheduler, None, i)
                self.optimizer.step()
                self.scheduler.step()
                cb.on_before_zero_grad(self.model, self.optimizer, self.scheduler, i)
                self.optimizer.zero_grad()
            self.samples_seen += 3
            cb.on_training_step_batch_end(self.model, batch, output or {}, loss.detach(), i)
        self.iteration += 1
        cb.on_training_step_end(self.model, batch, output or {}, loss.detach(), self.iteration)
        self.metrics.flush(self.iteration)


def stepped(
    folder: Path, callbacks: dict[str, Any] | None, *losses: float, model: Any = None, **fields: Any
) -> Trainer:
    """A trainer that has made a step of each loss and written its records."""
    trainer = Trainer(make_config(callbacks, **fields), folder)
    trainer.start()
    for loss in losses:
        trainer.step(loss)
    trainer.metrics.close()
    return trainer


def lazy(target: Any, **arguments: Any) -> Any:
    return lazy_config.LazyCall(target)(**arguments)
