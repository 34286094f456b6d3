# SPDX-License-Identifier: Apache-2.0
"""Measures of how well an action-conditioned model follows its actions while it trains: the loss with other clips'
actions over that with the true ones (``gap``); how far other actions move a prediction beside other noise.

``val/...`` are of a few validation clips with averaged weights, of as many recordings as can be: the same clips,
partners and noise every time and in every layout of processes. A partner is of another recording where there is one.
``train/...`` are of the clips of a step, for runs without validation.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import FixedClip, apart, clips_of_step, spread_clips, stacked, takes_actions
from cosmos_predict2.evaluation.metrics.controllability import (
    SIGMAS,
    ActionGap,
    Distances,
    action_gap,
    prediction_distance,
)
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import Callback, SideChannel

log = logging.getLogger(__name__)


class ActionFollowing(Callback):
    """Looks at ``num_clips`` clips at every validation, after iteration ``first``, and every ``every_n`` iterations.

    A gap below ``least`` in ``patience`` looks one after another is a warning. Networks that take no actions are left
    alone.
    """

    resumed = ("num_ignored",)

    def __init__(
        self,
        num_clips: int = 8,
        first: int = 100,
        every_n: int = 1000,
        sigmas: Sequence[float] = SIGMAS,
        least: float = 1.02,
        patience: int = 3,
    ) -> None:
        if num_clips < 2 or patience < 1 or every_n < 0 or not sigmas or min(sigmas) <= 0:
            raise ConfigError(
                f"action_following: num_clips={num_clips} must be 2 at least (one clip's actions are given to another),"
                f" patience={patience} 1 at least, every_n={every_n} 0 at least (0: never), and sigmas={list(sigmas)}"
                " levels above 0."
            )
        self.num_clips = num_clips
        self.first = first
        self.every_n = every_n
        self.sigmas = [float(sigma) for sigma in sigmas]
        self.least = least
        self.patience = patience
        self._clips: list[FixedClip] | None = None
        self._channel = SideChannel("action_following")
        self.num_ignored = 0  # looks in a row
        self._explained: set[str] = set()

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        is_due = iteration == self.first or (self.every_n > 0 and iteration % self.every_n == 0)
        if is_due and takes_actions(model):
            self._look(model, lambda: clips_of_step(batch, model, self.num_clips), nullcontext, "train", iteration)

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        if takes_actions(model):
            self._look(model, lambda: self._validation_clips(model), model.ema_scope, "val", iteration)

    def _validation_clips(self, model: Any) -> list[FixedClip]:
        if self._clips is None:
            self._clips = spread_clips(self.trainer.dataloader_val, model, self.num_clips)
        return self._clips

    # --- one look, by all ranks alike

    def _look(
        self,
        model: Any,
        find: Callable[[], list[FixedClip]],
        scope: Callable[[], AbstractContextManager[None]],
        prefix: str,
        iteration: int,
    ) -> None:
        def measure() -> tuple[Tensor, ActionGap | None, Distances | None] | None:
            if not (clips := find()):
                return None
            with scope():
                x0, epsilon, condition = stacked(clips, self.trainer.device)
                origins = [clip.origin for clip in clips]
                gap = action_gap(model.world, x0, epsilon, condition, self.sigmas, origins=origins)
                distance = prediction_distance(model.world, x0, epsilon, condition, origins)
                return cast(Tensor, condition.action_B_A_D), gap, distance

        if self.trainer.interrupted:
            return
        with apart(self.trainer, model):
            in_step = parallel.is_in_step(model, self.trainer.dims)
            found = self._channel.together(f"{prefix} at iteration {iteration}", measure, in_step=in_step)
        if found is not None:
            action_B_A_D, gap, distance = found
            if gap is None or distance is None:
                self._explain(action_B_A_D, prefix, iteration)
            else:
                self._report(gap, distance, prefix, iteration)

    def _report(self, gap: ActionGap, distance: Distances, prefix: str, iteration: int) -> None:
        values = {f"{prefix}/action_gap": gap.mean, f"{prefix}/action_distance": distance.ratio}
        values |= {f"{prefix}/action_gap_sigma_{sigma:g}": ratio for sigma, ratio in zip(gap.sigmas, gap.ratios)}
        self.trainer.metrics.log(values, iteration)
        log.info(
            "actions at iteration %d: those of other clips make the loss %.3f times as large, and move a prediction"
            " %.3f times as far as other noise (%d %s clips)",
            iteration,
            gap.mean,
            distance.ratio,
            gap.num_samples,
            "training" if prefix == "train" else "validation",
        )
        # Before the first step a network that begins to learn its actions has no use for them.
        self.num_ignored = self.num_ignored + 1 if gap.mean < self.least and iteration > 0 else 0
        if self.num_ignored == self.patience:
            log.warning(
                "the model ignores its actions so far: in %d looks, the last at iteration %d, the loss with the actions"
                " of other clips is %.3f times that with the true ones. If it stays so, see whether the clips show"
                " the commanded motion (python -m scripts.check_dataset), whether their numbers are of the order of 1"
                " (action_transform), and whether batch size and learning rate are large enough.",
                self.patience,
                iteration,
                gap.mean,
            )

    def _explain(self, action_B_A_D: Tensor, prefix: str, iteration: int) -> None:
        """Report why these clips cannot show whether actions are obeyed: a warning once, of a run that validates for
        its validation alone."""
        if len(action_B_A_D) == 1:
            why = f"there is one clip alone: take dataloader_{prefix}.batch_size=2 or more"
        else:
            why = f"all {len(action_B_A_D)} clips have the same actions (zeros, by dataset.hide_actions?)"
        is_warning = prefix not in self._explained and (prefix == "val" or not self.config.trainer.run_validation)
        self._explained.add(prefix)
        level = logging.WARNING if is_warning else logging.INFO
        log.log(level, "actions at iteration %d: whether the model obeys them cannot be seen: %s", iteration, why)
