# SPDX-License-Identifier: Apache-2.0
"""An alarm for rewards that are hacked: measures that are never a reward, on held-out clips, from the same noise.

    trainer.callbacks.quality_alarm: L(QualityAlarm)(every_n=20, measures=dict(
        agreement=Measure(make=L(Agreement)(), tolerance=0.5)))

Each measure is a function as rewards are, higher is better. The alarm goes off where one lies further below its best
than its tolerance, while the reward of training is above what it was at that best. The metrics get ``quality/NAME``
and ``quality/alarm``.
"""

import logging
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import FixedClip, GivesClips, apart, first_clips
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.local import LocalReward
from cosmos_predict2.world_model.sampling import SamplingOptions, to_uint8
from imaginaire.config import lazy_config
from imaginaire.config.schema import Section, above
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks import EveryN

log = logging.getLogger(__name__)

SMOOTHING = 0.7  # of the reward, which differs from batch to batch


@attrs.define(kw_only=True, slots=False)
class Measure(Section):
    """A function of (clips, context), and how far it may fall below its best."""

    make: Any = None
    tolerance: float = attrs.field(default=0.5, validator=above(0))


class QualityAlarm(EveryN):
    """Measures the first ``num_clips`` validation clips, generated deterministically and with averaged weights.

    ``on_alarm="stop"`` ends the run with an error that names the last good iteration.
    """

    def __init__(
        self,
        measures: Any,
        every_n: int = 20,
        num_clips: int = 16,
        num_sampling_step: int = 8,
        on_alarm: Literal["warn", "stop"] = "warn",
        seed: int = 0,
    ) -> None:
        super().__init__(every_n=every_n, run_at_start=True)
        if not measures or on_alarm not in ("warn", "stop") or min(num_clips, num_sampling_step) < 1:
            raise ConfigError(
                f"quality_alarm: it needs measures, on_alarm=warn or stop (found {on_alarm!r}), and at least 1 clip and"
                f" 1 step (found {num_clips} and {num_sampling_step})."
            )
        self.measures = {name: one if isinstance(one, Measure) else Measure(**one) for name, one in measures.items()}
        self.rewards = {name: LocalReward(lazy_config.instantiate(one.make)) for name, one in self.measures.items()}
        self.num_clips, self.num_steps, self.on_alarm, self.seed = num_clips, num_sampling_step, on_alarm, seed
        self._clips: list[FixedClip] | None = None
        self._reward: float | None = None  # smoothed
        self._best: dict[str, list[float]] = {}  # name -> [value, iteration, reward]

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if not isinstance(model, GivesClips) or self.trainer.dataloader_val is None:
            raise ConfigError(
                f"trainer.callbacks.{self.name} measures held-out clips: it needs trainer.run_validation=True, a"
                f" dataloader_val and a model that generates clips. Switch it off: trainer.callbacks.{self.name}=null."
            )

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
            values = self._measured(model)
        raised = [text for name, value in values.items() if (text := self._judge(name, value, iteration))]
        figures = {f"quality/{name}": value for name, value in values.items()}
        trainer.metrics.log({**figures, "quality/alarm": float(bool(raised))}, iteration)
        for text in raised:
            log.warning("%s", text)
        if raised and self.on_alarm == "stop":
            raise TrainingError(" ".join(raised))

    def _judge(self, name: str, value: float, iteration: int) -> str | None:
        """Why the alarm goes off for a measure; else its best is kept."""
        reward = self._reward if self._reward is not None else float("-inf")
        best = self._best.get(name)
        if best is None or value > best[0]:
            self._best[name] = [value, float(iteration), reward]
            return None
        if best[0] - value <= self.measures[name].tolerance or reward <= best[2]:
            return None
        return (
            f"The reward rose from {best[2]:.4g} to {reward:.4g} since iteration {best[1]:.0f}, but on held-out clips"
            f" {name} fell from {best[0]:.4g} to {value:.4g}: the model learns to please the reward. Go on from a"
            f" checkpoint of iteration {best[1]:.0f} or before, with a smaller optimizer.lr, kl_beta, a data term"
            " (data_beta), or another reward."
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
        return {name: float(torch.cat(found).mean()) for name, found in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"reward": self._reward, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reward, self._best = state.get("reward"), dict(state.get("best", {}))
