# SPDX-License-Identifier: Apache-2.0
"""An alarm for rewards that are hacked: measures that are never a reward, on held-out clips, from the same noise.

    trainer.callbacks.quality_alarm: L(QualityAlarm)(every_n=20, measures=dict(
        agreement=Measure(make=L(Agreement)(), tolerance=0.5)))

Each measure is a reward of clips, higher is better. The alarm goes off where one lies further below its best
than its tolerance, while the reward of training is above what it was at that best. The metrics get ``quality/NAME``,
``quality/alarm`` and ``quality/rolled_back_to``.
"""

import logging
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import FixedClip, GivesClips, apart, first_clips
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.local import scored_by
from cosmos_predict2.world_model.world_model import SamplingOptions, to_uint8
from imaginaire import distributed
from imaginaire.config.schema import Section, above
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks import EveryN

log = logging.getLogger(__name__)

CURE = (
    "Go on from a checkpoint of that iteration or before (checkpoint.load_path, another job.name), with a smaller"
    " optimizer.lr, a kl_beta, a data term (data_beta) or another reward."
)
ALARMS = ("warn", "stop", "rollback")
SMOOTHING = 0.7  # of the reward, which differs from batch to batch


@attrs.define(kw_only=True, slots=False)
class Measure(Section):
    """A reward of clips, and how far it may fall below its best."""

    make: Any = None
    tolerance: float = attrs.field(default=0.5, validator=above(0))


class QualityAlarm(EveryN):
    """Measures the first ``num_clips`` validation clips, generated deterministically and with averaged weights.

    ``on_alarm="stop"`` ends the run with an error that names the last good iteration. ``"rollback"`` saves a checkpoint
    whenever a measure is at its best, and goes back to that one: with its weights and averages, an optimizer without
    moments, half the learning rate, and the data where they are.
    """

    def __init__(
        self,
        measures: Any,
        every_n: int = 20,
        num_clips: int = 16,
        num_sampling_step: int = 8,
        on_alarm: Literal["warn", "stop", "rollback"] = "warn",
        seed: int = 0,
    ) -> None:
        super().__init__(every_n=every_n, run_at_start=True)
        if not measures or on_alarm not in ALARMS or min(num_clips, num_sampling_step) < 1:
            raise ConfigError(
                f"quality_alarm: it needs measures, on_alarm={', '.join(ALARMS[:-1])} or {ALARMS[-1]} (found"
                f" {on_alarm!r}), and at least 1 clip and 1 step (found {num_clips} and {num_sampling_step})."
            )
        self.measures = {name: one if isinstance(one, Measure) else Measure(**one) for name, one in measures.items()}
        self.rewards = {name: scored_by(one.make, f"measures.{name}.make") for name, one in self.measures.items()}
        self.num_clips, self.num_steps, self.on_alarm, self.seed = num_clips, num_sampling_step, on_alarm, seed
        self._clips: list[FixedClip] | None = None
        self._reward: float | None = None  # smoothed
        self._best: dict[str, list[float]] = {}  # name -> [value, iteration, reward]
        self._values: dict[str, float] = {}  # as last measured
        self._measured_at = 0
        self._saved: list[dict[str, Any]] = []  # the checkpoints of bests: iteration, measured, values, reward
        self._fallen: str | None = None  # the measure for which the run goes back, once an experience is at its end
        self._num_back = 0  # how often it has gone back

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if not isinstance(model, GivesClips) or self.trainer.dataloader_val is None:
            raise ConfigError(
                f"trainer.callbacks.{self.name} measures held-out clips: it needs trainer.run_validation=True, a"
                f" dataloader_val and a model that generates clips. Switch it off: trainer.callbacks.{self.name}=null."
            )
        if self.on_alarm == "rollback":
            if self.config.checkpoint.keep_last is not None:
                raise ConfigError(
                    f"trainer.callbacks.{self.name}.on_alarm=rollback goes back to a checkpoint that"
                    f" checkpoint.keep_last={self.config.checkpoint.keep_last} may remove: set it to null."
                )
            self._base_rates = list(self.trainer.scheduler.base_lrs)
            self._slow_down()

    def on_save_checkpoint_start(self, model: Any, iteration: int = 0) -> None:
        if self.trainer.save_wanted:
            found = dict(measured=self._measured_at, values=self._values, reward=self._reward)
            self._saved.append(dict(iteration=iteration, **found))

    def on_training_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        super().on_training_step_end(model, batch, output, loss, iteration)
        if self._fallen is not None and model.at_boundary():
            self._go_back(model, self._fallen, iteration)
            self._fallen = None

    def on_training_step_batch_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        if "reward_mean" in output:
            new = float(output["reward_mean"])
            self._reward = new if self._reward is None else SMOOTHING * self._reward + (1 - SMOOTHING) * new

    def every_n_impl(
        self, trainer: Any, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int
    ) -> None:
        with apart(trainer, model), model.ema_scope():
            mine = self._measured(model)
        found = distributed.all_gather_object((mine, self._reward))  # ranks decide alike, from the same numbers
        values = self._values = found[0][0]
        self._measured_at = iteration
        if self._reward is not None:
            self._reward = sum(reward for _, reward in found) / len(found)
        raised = {name: text for name, value in values.items() if (text := self._judge(name, value, iteration))}
        figures = {f"quality/{name}": value for name, value in values.items()}
        trainer.metrics.log({**figures, "quality/alarm": float(bool(raised))}, iteration)
        for text in raised.values():
            log.warning("%s%s", text, "" if self.on_alarm == "rollback" else f" {CURE}")
        if raised and self.on_alarm == "stop":
            raise TrainingError(" ".join([*raised.values(), CURE]))
        if self.on_alarm == "rollback":
            self._fallen = min(raised, key=lambda name: self._best[name][1], default=None)
            is_best = any(best[1] == iteration for best in self._best.values())
            trainer.save_wanted = trainer.save_wanted or (is_best and not raised)

    def _go_back(self, model: Any, name: str, iteration: int) -> None:
        """Weights and averages of the measure's best; the average reward of then, and a slower optimizer."""
        best = self._best[name][1]
        kept = [one for one in self._saved if one["measured"] <= best]
        if not kept:
            raise TrainingError(f"No checkpoint of iteration {best:.0f} or before was kept to go back to. {CURE}")
        good = kept[-1]
        target = good["iteration"]
        self.trainer.checkpointer.restore_weights(model, target)
        self.trainer.optimizer.state.clear()
        self._reward = good["reward"]
        for other, value in good["values"].items():  # a best since then is of weights that are gone
            if self._best[other][1] > good["measured"]:
                self._best[other] = [value, float(good["measured"]), good["reward"]]
        self._num_back += 1
        self._slow_down()
        self.trainer.metrics.log({"quality/rolled_back_to": float(target)}, iteration)
        text = "back to the weights of iteration %d, at 1/%d of the configured learning rate. If it happens again: %s"
        log.warning(text, target, 2**self._num_back, CURE)

    def _slow_down(self) -> None:
        """The configured learning rates, halved as often as the run has gone back."""
        scheduler = self.trainer.scheduler
        scheduler.base_lrs = [rate / 2**self._num_back for rate in self._base_rates]
        scheduler.load_state_dict(scheduler.state_dict())  # the rates of the next step follow

    def _judge(self, name: str, value: float, iteration: int) -> str | None:
        """The reason of an alarm for a measure; None, and its best is kept, where there is none."""
        reward = self._reward if self._reward is not None else float("-inf")
        best = self._best.get(name)
        if best is None or value > best[0]:
            self._best[name] = [value, float(iteration), reward]
            return None
        if best[0] - value <= self.measures[name].tolerance or reward <= best[2]:
            return None
        return (
            f"The reward rose from {best[2]:.4g} to {reward:.4g} since iteration {best[1]:.0f}, but on held-out clips"
            f" {name} fell from {best[0]:.4g} to {value:.4g}: the model learns to please the reward."
        )

    def _measured(self, model: Any) -> dict[str, float]:
        if self._clips is None:
            self._clips = first_clips(self.trainer.dataloader_val, model, self.num_clips)
        world, device = model.world, model.world.device
        values: dict[str, list[Tensor]] = {name: [] for name in self.rewards}
        options = SamplingOptions(num_steps=self.num_steps)
        for i, clip in enumerate(self._clips):
            conditions = {key: value.to(device) for key, value in clip.conditions().items()}
            given = clip.condition_on(device).gt_frames_B_C_T_H_W
            assert given is not None
            latents = world.generate_latents(conditions, given, clip.num_given, seed=[self.seed + i], options=options)
            video, true = (to_uint8(world.decode(x)).cpu() for x in (latents, clip.x0_1_C_T_H_W.to(device)))
            made = Clips(latents.cpu(), video, [""], clip.fps)
            numbers = torch.tensor([clip.num_given])
            context = {"true_latents": clip.x0_1_C_T_H_W, "true_video": true, "num_conditional_frames": numbers}
            for name, reward in self.rewards.items():
                scores = reward.fetch(reward.submit(made, context, name), 0.0)
                values[name].append(scores.value_B[scores.is_valid_B])
        valid = {name: torch.cat(found) for name, found in values.items()}
        return {name: float(found.mean()) for name, found in valid.items() if len(found)}

    def state_dict(self) -> dict[str, Any]:
        return {"reward": self._reward, "best": self._best, "saved": self._saved, "num_back": self._num_back}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reward, self._best = state.get("reward"), dict(state.get("best", {}))
        self._saved, self._num_back = list(state.get("saved", [])), state.get("num_back", 0)
