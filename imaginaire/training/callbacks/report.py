# SPDX-License-Identifier: Apache-2.0
"""Callbacks that report how a run is doing: losses, speed, a sign of life, a progress bar."""

import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imaginaire import distributed, storage
from imaginaire.config.schema import NEVER
from imaginaire.data.stream import WEIGHT_KEY, length
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.log import Progress
from imaginaire.training.callbacks.base import Callback, EveryN, SideChannel

log = logging.getLogger(__name__)

_MAX_PENDING = 1024


class RunningMean:
    """Weighted mean of the finite values added, and the number of the others. Sums are floats, in order of arrival.

    It never waits for the device until it is asked for.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._non_finite = 0
        self._pending: list[tuple[Tensor, float]] = []

    def add(self, value: Tensor | float, weight: float = 1.0) -> None:
        if isinstance(value, Tensor):
            value = value.detach()
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._pending.append((value.reshape(()).clone(), weight))  # a copy: the model may reuse its tensor
            if len(self._pending) >= _MAX_PENDING:
                self._fold()
        else:
            self._add(float(value), weight)

    def totals(self) -> tuple[float, float, int]:
        """(weighted sum, weight, number of non-finite values): what ranks add up."""
        self._fold()
        return self._sum, self._weight, self._non_finite

    def mean(self) -> float | None:
        """None when nothing finite was added."""
        total, weight, _ = self.totals()
        return total / weight if weight else None

    def state_dict(self) -> dict[str, Any]:
        total, weight, non_finite = self.totals()
        return {"sum": total, "weight": weight, "non_finite": non_finite}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "RunningMean":
        mean = cls()
        mean._sum, mean._weight, mean._non_finite = state["sum"], state["weight"], state["non_finite"]
        return mean

    def _add(self, value: float, weight: float) -> None:
        if math.isfinite(value):
            self._sum += value * weight
            self._weight += weight
        else:
            self._non_finite += 1

    def _fold(self) -> None:
        if not self._pending:
            return
        values = torch.stack([value.double() for value, _ in self._pending]).tolist()
        for value, (_, weight) in zip(values, self._pending, strict=True):
            self._add(value, weight)
        self._pending = []


def is_logged(trainer: Any, iteration: int) -> bool:
    """True every ``logging_iter`` steps; of a run that has fewer, at the first and the last."""
    if trainer.max_iter < trainer.logging_iter:
        return iteration in (1, trainer.max_iter)
    return bool(iteration % trainer.logging_iter == 0)


class LossLog(Callback):
    """Logs the loss, every scalar of the model's output, learning rates and samples seen, as means since the last log.

    Means run over all micro-batches and ranks, every ``logging_iter * logging_iter_multipler`` steps (of a run with
    fewer than ``logging_iter``: at the first and the last); with a multiplier the names begin with ``train@10/``. NaN
    and infinite values are counted, not averaged. Validation gives ``val/...``, weighted by the samples that count
    (``sample_weight``). A model with ``batch_kinds`` has its losses by kind as well: ``train/image_loss``, ...
    """

    def __init__(self, logging_iter_multipler: int = 1) -> None:  # the spelling that configs in the wild use
        if logging_iter_multipler < 1:
            raise ConfigError(f"loss_log.logging_iter_multipler must be at least 1, found {logging_iter_multipler}.")
        self.multiplier = logging_iter_multipler
        self._train: dict[str, RunningMean] = {}
        self._validation: dict[str, RunningMean] = {}
        self._micro = 0
        self._rates: dict[str, float] = {}

    def on_before_optimizer_step(
        self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int = 0
    ) -> None:
        if self.multiplier == 1 and self._is_due(iteration + 1) and distributed.is_rank0():
            self._rates = {}  # those of this step: the schedule moves on before the step ends
            for index, group in enumerate(optimizer.param_groups):
                self._rates[f"optim/lr_{index}"] = float(group["lr"])
                self._rates[f"optim/weight_decay_{index}"] = float(group.get("weight_decay", 0.0))

    def on_training_step_batch_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        _add_all(self._train, self._with_kind(batch, output, loss), loss)
        self._micro += 1
        if self._micro < self.config.trainer.grad_accum_iter:
            return
        self._micro = 0
        # Here and not at the end of the step: a checkpoint of this step then holds the sums of after the log.
        if self._is_due(iteration + 1):
            suffix = "" if self.multiplier == 1 else f"@{self.multiplier}"
            means = _gathered(self._train)
            values = {f"train{suffix}/{name}": value for name, value in means.items()}
            self._also_call("train", means, suffix)
            if self.multiplier == 1:
                values |= self._rates
                values["train/samples_seen"] = self.trainer.samples_seen
            self.trainer.metrics.log(values, iteration + 1)

    def on_validation_start(self, model: Any, dataloader: Any, iteration: int = 0) -> None:
        self._validation = {}

    def on_validation_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        weight = batch.get(WEIGHT_KEY) if isinstance(batch, Mapping) else None
        size = next((int(tensor.shape[0]) for _, tensor in named_tensors(batch) if tensor.ndim), 1)
        num_counted = size if weight is None else float(weight.sum())
        _add_all(self._validation, self._with_kind(batch, output, loss), loss, weight=num_counted)

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        if self.multiplier == 1:
            means = _gathered(self._validation)
            shown = self.trainer.model.validation_metric
            if shown != "loss":  # which is then made of it
                means.pop("loss", None)
            self._also_call("val", means)
            self.trainer.metrics.log({f"val/{name}": value for name, value in means.items()}, iteration)
            if (value := means.get(shown)) is not None:
                note = f" ({note})" if (note := self.trainer.model.validation_note.format(**means)) else ""
                log.info("iter %d validation %s %.6g%s", iteration, shown.replace("_", " "), value, note)

    def _also_call(self, section: str, means: Mapping[str, Any], suffix: str = "") -> None:
        """Have trackers show metrics under their published names, too."""
        names = {name: shown for name in means if (shown := self.trainer.model.published_name(name))}
        self.trainer.metrics.also_call(
            {f"{section}{suffix}/{name}": f"{suffix}/".join(shown.split("/", 1)) for name, shown in names.items()}
        )

    def _with_kind(self, batch: Any, output: Any, loss: Tensor) -> Any:
        """The output with the losses of this kind of batch under names of their own."""
        model = self.trainer.model
        if not model.batch_kinds or not isinstance(output, Mapping):
            return output
        kind = model.batch_kind(batch)
        of_kind = {f"{kind}_edm_loss": output["edm_loss"]} if "edm_loss" in output else {}
        return {**output, **of_kind, f"{kind}_loss": loss}

    def _is_due(self, iteration: int) -> bool:
        trainer = self.config.trainer
        if self.multiplier == 1:
            return is_logged(trainer, iteration)
        return bool(iteration % (trainer.logging_iter * self.multiplier) == 0)

    def state_dict(self) -> dict[str, Any]:
        return {name: mean.state_dict() for name, mean in self._train.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._train = {name: RunningMean.of_state(saved) for name, saved in state.items()}


def _add_all(means: dict[str, RunningMean], output: Any, loss: Tensor, weight: float = 1.0) -> None:
    means.setdefault("loss", RunningMean()).add(loss, weight)
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        is_scalar = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
        if is_scalar and name != "loss":
            means.setdefault(str(name), RunningMean()).add(value, weight)


def _gathered(means: dict[str, RunningMean]) -> dict[str, float]:
    """Means over all ranks, and empties them. Ranks may have seen different names (image and video batches)."""
    totals: dict[str, tuple[float, float, int]] = {}
    for of_rank in distributed.all_gather_object({name: mean.totals() for name, mean in means.items()}):
        for name, (total, weight, non_finite) in of_rank.items():
            before = totals.get(name, (0.0, 0.0, 0))
            totals[name] = (before[0] + total, before[1] + weight, before[2] + non_finite)
    for mean in means.values():
        mean.reset()
    values = {name: total / weight for name, (total, weight, _) in totals.items() if weight}
    values |= {f"non_finite_{name}": count for name, (_, _, count) in totals.items() if count}
    return values


def named_tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a batch, at any depth, each with its place: ``batch.meta.0.start``."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{i}")


def _loss_of_whole_clips(loss: Tensor) -> float:
    """The loss; of ranks that share clips the mean, since each has that of its own frames."""
    dims = parallel.current_dims()
    if dims.context_parallel_size == 1:
        return float(loss.detach())
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=dims.cp_group)
    return float(mean) / dims.context_parallel_size


class IterSpeed(EveryN):
    """Reports the first ``hit_thres`` steps singly, then every ``every_n`` steps the seconds per step and their split.

    ``train/s_per_iter`` leaves out validation, saving and what callbacks do apart from the steps (under
    ``trainer.timers("apart")``). ``timer/data``, ``timer/forward``, ... are seconds per step
    by the trainer's timers, and ``train/data_percent`` is the share spent waiting for data. All are those of rank 0.
    """

    def __init__(self, every_n: int | None = None, hit_thres: int = 5, step_size: int = 1) -> None:
        super().__init__(every_n=every_n, step_size=step_size)
        self.hit_thres = hit_thres
        self._hits = 0
        self._mark: float | None = None  # when the measured interval began
        self._mark_iteration = 0
        self._mark_samples = 0
        self._paused = 0.0
        self._pause_start: float | None = None
        self._last_step: float | None = None

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._last_step = time.perf_counter()

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if self._hits < self.hit_thres:
            self._hits += 1
            if loss.is_cuda:
                torch.cuda.synchronize(loss.device)
            now = time.perf_counter()
            seconds = now - (self._last_step if self._last_step is not None else now)
            log.log(
                logging.INFO if self._hits in (1, self.hit_thres) else logging.DEBUG,
                f"Iteration {iteration}: Hit counter: {self._hits}/{self.hit_thres} |"
                f" Loss: {_loss_of_whole_clips(loss):.4f} | Time: {seconds:.2f}s",
            )
            self._last_step = now
            if self._hits == self.hit_thres:
                self._restart(iteration)
        else:
            super().on_training_step_end(model, batch, output, loss, iteration)

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
        steps = iteration - self._mark_iteration
        if self._mark is None or steps <= 0:
            self._restart(iteration)
            return
        phases = trainer.timers.read_and_reset()
        elapsed = max(time.perf_counter() - self._mark - self._paused - phases.pop("apart", 0.0), 1e-9)
        values = {f"timer/{name}": seconds / steps for name, seconds in phases.items()}
        values["train/s_per_iter"] = elapsed / steps
        values["train/data_percent"] = 100 * phases.get("data", 0.0) / elapsed
        values["train/samples_per_s"] = (trainer.samples_seen - self._mark_samples) / elapsed
        trainer.metrics.log(values, iteration)
        self._restart(iteration, read_timers=False)

    def _restart(self, iteration: int, read_timers: bool = True) -> None:
        if read_timers:
            self.trainer.timers.read_and_reset()
        self._mark, self._mark_iteration, self._paused = time.perf_counter(), iteration, 0.0
        self._mark_samples = self.trainer.samples_seen

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        self._pause_start = time.perf_counter()

    def _resume(self, *args: Any, **kwargs: Any) -> None:
        if self._pause_start is not None:
            paused = time.perf_counter() - self._pause_start
            self._paused += paused
            self._last_step = None if self._last_step is None else self._last_step + paused
            self._pause_start = None

    on_validation_start = on_save_checkpoint_start = _pause
    on_validation_end = on_save_checkpoint_end = _resume


class HeartBeat(EveryN):
    """Rewrites ``heart_beat.json`` in the run folder, at most every ``update_interval_in_minute``: a sign of life.

    A supervisor compares ``unix_time`` with its own clock, and reads ``state`` (training, finished) and ``iteration``.
    """

    def __init__(self, every_n: int = 10, update_interval_in_minute: float = 20, step_size: int = 1) -> None:
        super().__init__(every_n=every_n, step_size=step_size)
        self.interval_s = 60 * update_interval_in_minute
        self._last = float("-inf")
        self._channel = SideChannel("heart beat")

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._beat("training", iteration)

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
        if time.monotonic() - self._last >= self.interval_s:
            self._beat("training", iteration)

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        self._beat("finished", iteration)

    def _beat(self, state: str, iteration: int) -> None:
        if not distributed.is_rank0():
            return
        self._last = time.monotonic()
        now = time.time()
        beat = {
            "state": state,
            "iteration": iteration,
            "samples_seen": self.trainer.samples_seen,
            "unix_time": now,
            "time": datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="seconds"),
            "update_interval_s": self.interval_s,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        path = storage.join(self.trainer.run_dir, "heart_beat.json")
        with self._channel.attempt():  # a missed beat must not stop what it watches
            storage.write_json(path, beat, indent=1)


class ProgressBar(Callback):
    """A bar for training and one for each validation, on rank 0's terminal.

    Elsewhere the metrics report the progress of training, and lines of its own that of a long validation.
    """

    def __init__(self) -> None:
        self._shown: dict[str, Progress] = {}

    def _open(self, name: str, total: int | None, done: int = 0) -> None:
        if distributed.is_rank0():
            is_training = name == "training"
            self._shown[name] = Progress(name, total, done=done, leave=is_training, lines=not is_training)

    def _close(self, name: str) -> None:
        if name in self._shown:
            self._shown.pop(name).close()

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        max_iter = self.config.trainer.max_iter
        self._open("training", max_iter if max_iter < NEVER else None, iteration)

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if (training := self._shown.get("training")) is not None:
            training.set(iteration)

    def on_validation_start(self, model: Any, dataloader: Any, iteration: int = 0) -> None:
        limit = self.config.trainer.max_val_iter
        known = [n for n in (limit, length(dataloader)) if n is not None]
        self._open("validation", min(known) if known else None)

    def on_validation_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if (validation := self._shown.get("validation")) is not None:
            validation.update()

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        self._close("validation")

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        self._close("training")
