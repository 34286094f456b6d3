# SPDX-License-Identifier: Apache-2.0
"""Training of an action world model goes on while its held-out figures improve, and reports what limits it.

Where neither losses nor decibels improve over ``patience`` validations the learning rate falls, by the last cycle of
the scheduler, and the run ends with it. At the end the curve of the loss predicts how much longer training would help;
RUN/stop_rule.json has all of it.
"""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch

from cosmos_predict2.callbacks.fixed_clips import FixedClip, apart, spread_clips, stacked, takes_actions
from cosmos_predict2.evaluation.metrics.controllability import PURE_NOISE, action_gap, velocity_errors
from cosmos_predict2.evaluation.metrics.video_quality import clip_psnr
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import distributed, storage
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.log import duration
from imaginaire.training.callbacks import Callback, SideChannel

log = logging.getLogger(__name__)

FILE = "stop_rule.json"
SIGMAS = (10.0, 40.0)  # where imagination evaluates the network, and near pure noise
POWERS = (0.5, 1.0, 2.0)  # of 1 / iteration, by which the loss may near its last value
LEAST_LOOKS = 4  # that a curve is fitted to
WORTH = 0.05  # share of the loss that twice the length must save, or the length does not limit
LONGEST = 8  # times the present length: a curve predicts nothing beyond
IGNORED = 1.05  # gap below which the actions are hardly used
OVERFITTED = 1.3  # held-out loss over that of clips trained on
NEAR_TOKENIZER = 1.5  # decibels between imagined pictures and those that only passed the tokenizer


@dataclass(frozen=True)
class Look:
    """Figures at one validation."""

    iteration: int
    loss: float
    loss_seen: float
    gap: float
    psnr: float
    psnr_tokenizer: float  # of the true pictures through the tokenizer
    is_falling: bool = False  # the learning rate falls, so that the loss does as never before


@dataclass(frozen=True)
class StopVerdict:
    """The limit of a world model, by the looks of its training."""

    limit: str  # "actions", "length", "recordings", "tokenizer", "network" or "unknown"
    text: str
    iterations: int | None = None  # of a run that would be long enough
    saved_by_twice: float = math.nan  # share of the loss that twice the length would save


class StopRule(Callback):
    """Ends training where ``patience`` validations brought the loss down by less than ``least`` (a share of it) and
    the decibels up by less than ``least_psnr``."""

    def __init__(
        self, num_clips: int = 32, patience: int = 3, least: float = 0.01, least_psnr: float = 0.05, first: int = 200
    ) -> None:
        if num_clips < 2 or patience < 1 or not 0 <= least < 1 or least_psnr < 0 or first < 0:
            raise ConfigError(
                f"stop_rule: num_clips={num_clips} must be 2 at least, patience={patience} 1 at least, least={least}"
                f" from 0 to below 1, least_psnr={least_psnr} and first={first} 0 at least."
            )
        self.num_clips, self.patience, self.least, self.least_psnr = num_clips, patience, least, least_psnr
        self.first = first
        self.looks: list[Look] = []
        self._end: int | None = None  # the iteration with which the run ends early
        self._clips: dict[str, list[FixedClip]] = {}
        self._channel = SideChannel("stop_rule")
        self._began: tuple[float, int] = (0.0, 0)

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if not self.config.trainer.run_validation:
            raise ConfigError(
                f"trainer.callbacks.{self.name} looks at held-out clips at every validation, but"
                f" trainer.run_validation=false. Set it, or trainer.callbacks.{self.name}=null."
            )
        self._began = (time.monotonic(), iteration)

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        if self.trainer.interrupted or not takes_actions(model) or iteration == 0:
            return
        with apart(self.trainer, model), model.ema_scope():
            in_step = parallel.is_in_step(model, self.trainer.dims)
            figures = self._channel.together(f"at {iteration}", lambda: self._measure(model), in_step=in_step)
        figures = distributed.broadcast_object(figures)  # rank 0 has the pictures
        if figures is None:
            return
        scheduler = self.trainer.scheduler  # its last cycle is where the rate falls
        is_falling = self._end is not None or scheduler.last_cycle_begins < scheduler.last_epoch
        look = Look(iteration, **figures, is_falling=is_falling)
        self.looks.append(look)
        values = {name: value for name, value in figures.items() if name != "psnr_tokenizer"}
        self.trainer.metrics.log({f"val/stop_{name}": value for name, value in values.items()}, iteration)
        if self._end is None and not look.is_falling and iteration >= self.first and not self._improves():
            left = self.trainer.scheduler.begin_last_cycle()
            self._end = iteration + max(1, left)
            self.trainer.last_iteration = min(self.trainer.last_iteration, self._end)
            log.info(
                "held-out figures have not improved for %d validations (loss %.4g, %.2f dB): the learning rate falls"
                " from here, and the run ends at iteration %d",
                *(self.patience, look.loss, look.psnr, self._end),
            )

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        if self.trainer.interrupted or not self.looks:
            return
        seconds, began = self._began
        per_step = (time.monotonic() - seconds) / max(1, iteration - began) if iteration > began else 0.0
        verdict = judged(self.looks, iteration, per_step, has_ended=self._end is not None)
        log.info("%s", verdict.text)
        if distributed.is_rank0():
            content = {**asdict(verdict), "iteration": iteration, "looks": [asdict(look) for look in self.looks]}
            storage.write_json(os.path.join(self.trainer.run_dir, FILE), content)

    def state_dict(self) -> dict[str, Any]:
        return {"looks": [asdict(look) for look in self.looks], "end": self._end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looks = [Look(**look) for look in state.get("looks", [])]
        self._end = state.get("end")
        if self._end is not None:
            self.trainer.last_iteration = min(self.trainer.last_iteration, self._end)

    def _improves(self) -> bool:
        steady = [look for look in self.looks if not look.is_falling]  # a run may go on after its rate has fallen
        before, recent = steady[: -self.patience], steady[-self.patience :]
        if not before:
            return True
        loss, psnr = min(look.loss for look in before), max(look.psnr for look in before)
        is_lower = min(look.loss for look in recent) < loss * (1 - self.least)
        return is_lower or max(look.psnr for look in recent) > psnr + self.least_psnr

    def _measure(self, model: Any) -> dict[str, float] | None:
        """The figures; pictures only on rank 0, which has the true ones."""
        for name, loader in (("val", self.trainer.dataloader_val), ("train", self.trainer.stream.loader)):
            if name not in self._clips:
                self._clips[name] = spread_clips(loader, model, self.num_clips)
        held, world, nan = self._clips["val"], model.world, math.nan
        if len(held) < 2:
            return None
        x0, epsilon, condition = stacked(held, self.trainer.device)
        gap = action_gap(world, x0, epsilon, condition, SIGMAS, origins=[clip.origin for clip in held])
        if gap is None:  # all actions are the same
            return None
        seen = stacked(self._clips["train"], self.trainer.device)
        of_seen = [float(velocity_errors(world, *seen[:2], sigma, seen[2]).double().mean()) for sigma in SIGMAS]
        found = {"loss": _geometric_mean(gap.true), "loss_seen": _geometric_mean(of_seen), "gap": gap.mean}
        imagined = world.predict_clean(x0, epsilon, x0.new_full((len(x0), 1), PURE_NOISE), condition)
        decoded = [to_uint8(world.decode(latent)).cpu() for latent in (imagined, x0)]
        videos = [clip.video_1_C_F_H_W for clip in held if clip.video_1_C_F_H_W is not None]
        if len(videos) < len(held):
            return {**found, "psnr": nan, "psnr_tokenizer": nan}
        true = torch.cat(videos)[:, :, 1:]
        imagined_psnr, coded_psnr = (float(clip_psnr(video[:, :, 1:], true).mean()) for video in decoded)
        return {**found, "psnr": imagined_psnr, "psnr_tokenizer": coded_psnr}


def judged(
    looks: Sequence[Look], iteration: int, seconds_per_step: float = 0.0, *, has_ended: bool = False
) -> StopVerdict:
    """The verdict of a run's looks; its curve is that at the full learning rate. ``has_ended``: by the rule, so that
    its length is no limit."""
    last = looks[-1]
    steady = [look for look in looks if not look.is_falling and math.isfinite(look.loss)]
    wanted, saved = _length([look.iteration for look in steady], [look.loss for look in steady], iteration)
    wanted = None if has_ended else wanted
    about = (
        f"world model after {iteration} iterations, on held-out recordings: loss {last.loss:.3g}, actions of other"
        f" clips make it {last.gap:.2f} times as large, imagined pictures {last.psnr:.1f} dB (the tokenizer alone"
        f" {last.psnr_tokenizer:.1f})"
    )
    ratio = last.loss / last.loss_seen
    if last.gap < IGNORED:
        limit, text = "actions", "It hardly follows its actions: check that actions and pictures belong together"
        text += " (check_dataset)"
    elif wanted is not None:
        more = duration(seconds_per_step * (wanted - iteration)) if seconds_per_step else "unknown"
        limit, text = (
            "length",
            f"The run was too short for its data: twice as long would lower the loss by about {saved:.0%}.",
        )
        text += f" Go on to about {wanted} iterations, {more} more at this pace: trainer.max_iter={wanted}"
    elif math.isnan(saved) and not has_ended:
        limit = "unknown"
        text = f"Whether it was long enough takes {LEAST_LOOKS} validations at the full rate: trainer.validation_iter"
    elif ratio > OVERFITTED:
        limit = "recordings"
        text = f"The recordings limit it: the loss is {ratio:.2f} times that of clips trained on. Record more episodes"
    elif last.psnr_tokenizer - last.psnr < NEAR_TOKENIZER:
        limit = "tokenizer"
        text = "The tokenizer limits it: take larger pictures, or fit it longer (fit_tiny_tokenizer --steps)"
    else:
        limit, text = "network", "Neither length, recordings nor tokenizer limit it: a larger network would"
    return StopVerdict(limit, f"{about}. {text}.", wanted, saved)


def _length(iterations: Sequence[int], losses: Sequence[float], present: int) -> tuple[int | None, float]:
    """The length from which on twice as long saves less than WORTH of the loss, None where the present one is long
    enough or the curve too short; and the share that twice the present length saves.

    The curve is a + b / iteration^c.
    """
    if len(losses) < LEAST_LOOKS:
        return None, math.nan
    n, loss = numpy.asarray(iterations, float), numpy.asarray(losses, float)
    fits = []
    for power in POWERS:
        terms = numpy.stack([numpy.ones_like(n), n**-power], axis=1) / loss[:, None]  # so that errors are shares
        (floor, excess), *_ = numpy.linalg.lstsq(terms, numpy.ones_like(n), rcond=None)
        if floor < 0:  # it falls like a power: to nothing, as far as one can see
            floor, excess = 0.0, (terms[:, 1].sum() / numpy.square(terms[:, 1]).sum())
        fits.append((float(numpy.square(terms @ [floor, excess] - 1).sum()), floor, excess, power))
    _, floor, excess, power = min(fits)

    def curve(length: float) -> float:
        return float(max(floor + excess * length**-power, 1e-12))

    def saved(length: float) -> float:
        return 1 - curve(2 * length) / curve(length)

    lengths = present * 2 ** numpy.arange(0, math.log2(LONGEST) + 0.25, 0.25)
    enough = next((length for length in lengths if saved(length) <= WORTH), lengths[-1])
    wanted = round(float(enough) / 100) * 100
    return (wanted if wanted > present and saved(present) > WORTH else None), saved(present)


def _geometric_mean(values: Sequence[float]) -> float:
    """The mean in which each noise level counts alike."""
    return math.exp(sum(math.log(max(value, 1e-12)) for value in values) / len(values))
