# SPDX-License-Identifier: Apache-2.0
"""Callbacks that act on training: batch precision, garbage collection, gradient clipping."""

import gc
import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks.base import Callback, EveryN
from imaginaire.training.callbacks.report import RunningMean, is_logged


class LowPrecision(Callback):
    """Casts every floating tensor of a batch to ``model.precision``, in place, at any depth; idle for float32 models.

    The optimizer writes rounded master weights into the model by itself, so ``update_iter`` can only be 1.
    """

    def __init__(self, config: Any = None, trainer: Any = None, update_iter: int = 1) -> None:
        if update_iter != 1:
            raise ConfigError(
                f"trainer.callbacks.low_prec.update_iter={update_iter}, but only 1 works here: "
                "the optimizer writes its master weights into the model at every step. Remove the key."
            )

    def on_training_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None:
        precision: torch.dtype = self.trainer.model.precision
        if precision == torch.float32:
            return
        if cast(batch, precision) is not batch:
            raise ConfigError(
                f"trainer.callbacks.low_prec casts batches in place: a batch must be a dict or a list, "
                f"not a {type(batch).__name__}. Return one from the data set, or set trainer.callbacks.low_prec=null."
            )

    on_validation_step_start = on_training_step_start


def cast(value: Any, precision: torch.dtype) -> Any:
    """``value`` with its floating tensors cast: dicts and lists are changed in place, tuples rebuilt if need be."""
    if isinstance(value, Tensor):
        return value.to(precision) if value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [cast(item, precision) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, MutableMapping | list):
        for key in list(value) if isinstance(value, MutableMapping) else range(len(value)):
            value[key] = cast(value[key], precision)
    return value


class ManualGarbageCollection(EveryN):
    """Collects young garbage at fixed steps instead of whenever one rank happens to, which would stall all the others.

    After ``warm_up`` hits automatic collection goes off and everything alive is frozen. From then on every hit collects
    the young generations, and every checkpoint the old one. Automatic collection returns when training ends.
    """

    def __init__(self, every_n: int = 5, warm_up: int = 5, step_size: int = 1) -> None:
        super().__init__(every_n=every_n, step_size=step_size)
        self.warm_up = warm_up
        self._hits = 0
        self._is_active = False

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
        self._hits += 1
        if self._is_active:
            gc.collect(1)
        elif self._hits >= self.warm_up:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_active = True

    def on_save_checkpoint_start(self, model: Any, iteration: int = 0) -> None:
        if self._is_active:
            gc.collect()

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        if self._is_active:
            self._is_active = False
            gc.unfreeze()
            gc.enable()


class GradClip(Callback):
    """Clips the global gradient norm to ``clip_norm`` and logs the mean norm before clipping.

    With ``force_finite`` a NaN or infinite norm is reported to the trainer, which then does not apply the step
    (``trainer.non_finite`` decides what follows). With a gradient scaler such a norm is ordinary: it skips the step.
    """

    def __init__(self, clip_norm: float = 1.0, force_finite: bool = True) -> None:
        if not clip_norm > 0:
            raise ConfigError(f"trainer.callbacks.grad_clip.clip_norm must be above 0, found {clip_norm}.")
        self.clip_norm = clip_norm
        self.force_finite = force_finite
        self._means = {"train/grad_norm": RunningMean()}
        self._kinds: set[str] = set()  # of the step's micro-batches

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        for kind in self.trainer.model.batch_kinds:
            self._means.setdefault(f"clip_grad_norm/{kind}", RunningMean())

    def on_training_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None:
        if self.trainer.model.batch_kinds:
            self._kinds.add(f"clip_grad_norm/{self.trainer.model.batch_kind(batch)}")

    def on_before_optimizer_step(
        self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int = 0
    ) -> None:
        norm: Tensor | float = parallel.full_tensor(self.trainer.model.clip_grad_norm_(self.clip_norm))
        is_scaled = grad_scaler is not None and grad_scaler.is_enabled()
        if self.force_finite and not is_scaled:
            norm = float(norm)  # waits for the backward pass: the step may not be applied before this is known
            if not math.isfinite(norm):
                self.trainer.guard.report("grad_norm", norm)
        self._means["train/grad_norm"].add(norm)
        if len(self._kinds) == 1:  # the gradient of a step over both is neither's
            self._means[next(iter(self._kinds))].add(norm)
        self._kinds.clear()
        # Logged here and not at the end of the step, so that a checkpoint of this step holds the sums of after the log.
        if is_logged(self.config.trainer, iteration + 1):
            values = {name: value for name, mean in self._means.items() if (value := mean.mean()) is not None}
            if non_finite := self._means["train/grad_norm"].totals()[2]:
                values["train/non_finite_grad_norm"] = non_finite
            self.trainer.metrics.log(values, iteration + 1)
            for mean in self._means.values():
                mean.reset()

    def state_dict(self) -> dict[str, Any]:
        return {name: mean.state_dict() for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means |= {name: RunningMean.of_state(saved) for name, saved in state.items()}
