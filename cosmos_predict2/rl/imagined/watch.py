# SPDX-License-Identifier: Apache-2.0
"""A watch over a policy that learns in imagination: the gate's figures, measured again on its own episodes.

    trainer.callbacks.imagination_watch: L(ImaginationWatch)(data="my_data", split="split.json", limits=dict(
        approx_kl=Limit(most=0.02, why="...")))

After the first experience and at every validation the policy plays in imagination, from starts of the recordings that
calibrate:

    watch/noise_agreement   correlation inside a start of the values that two noises give to the same actions
    watch/obedience         how well its actions are read from its imagined pictures, of how well from true pictures
    watch/pictures_outside  the share of its ends that are unlike all recordings
    watch/noise_is_paid     the value of sampled actions less that of greedy ones
    watch/approx_kl         the distance of a step's policy to the one that played, as a mean since the last look

and the others of `check.policy_figures`. Where one leaves its range, the run goes back to the weights of its best look
before, else of its beginning, and ends: its newest checkpoint has them. It ends, too, where all that is played is
imagined to succeed, with the weights of then: nothing is left to learn (``ends_full=false`` learns on).
RUN/imagination_watch.json has all looks.
"""

import logging
import math
import os
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import apart
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import SUCCESS_COLUMN, make_split, read_split
from cosmos_predict2.data.video.clips import stretch
from cosmos_predict2.data.views import require_same, views_of
from cosmos_predict2.evaluation.metrics.agreement import Estimate, within_groups
from cosmos_predict2.rl.envs.first_frames import StartsDefaults
from cosmos_predict2.rl.envs.replays import with_actions_of
from cosmos_predict2.rl.episodes.episodes import LocalRollout
from cosmos_predict2.rl.episodes.imagination_gap import ImaginationAlarm
from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
from cosmos_predict2.rl.imagined import check
from cosmos_predict2.rl.imagined.verdict import MOST_IMAGINED
from cosmos_predict2.rl.interfaces import completed
from cosmos_predict2.rl.policies.network import gathered
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire import distributed, storage
from imaginaire.config.schema import Section
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger(__name__)

FILE = "imagination_watch.json"
STARTS, ATTEMPTS = 8, 4  # whose actions are imagined by two noises
LEARNT, HELD_OUT = 48, 32  # recordings, at most: to compare with, and to begin at
FULL = (
    "nothing is left to learn in this imagination, and who learns on unlearns what is true. So the run has ended at"
    " iteration {}, with its weights of now (trainer.callbacks.imagination_watch.ends_full=false learns on)."
)


@attrs.define(kw_only=True, slots=False)
class Limit(Section):
    """The range of a figure: bounds, and how far it may lie below or above its first value; None is without."""

    least: float | None = None
    most: float | None = None
    fall: float | None = None
    rise: float | None = None
    only_warns: bool = False
    why: str = ""

    def problem(self, name: str, value: float, first: float) -> str:
        """A sentence where a value is out of range, else nothing."""
        lows = [self.least, None if self.fall is None else first - self.fall]
        highs = [self.most, None if self.rise is None else first + self.rise]
        low = max((bound for bound in lows if bound is not None and not math.isnan(bound)), default=-math.inf)
        high = min((bound for bound in highs if bound is not None and not math.isnan(bound)), default=math.inf)
        if low <= value <= high:
            return ""
        bound = f"below {low:.3g}" if value < low else f"above {high:.3g}" if value > high else "no number"
        return f"{name} is {value:.3g}, {bound} (at first {first:.3g}): {self.why}."


class ImaginationWatch(ImaginationAlarm):
    """Looks at the policy's own imagined episodes. ``data`` are the recordings (null where a run's world model records
    none, which is an error), ``split`` is their file; without one they are split by ``success_column`` as
    `scripts.split_recordings` would. ``ends_full``: the run ends where all that is played is imagined to succeed."""

    def __init__(
        self,
        limits: Any,
        data: str | None,
        split: str | None = None,
        success_column: str = SUCCESS_COLUMN,
        camera: str | None = None,
        on_alarm: Literal["warn", "stop", "best"] = "best",
        ends_full: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(on_alarm)
        self.ends_full = ends_full
        given = {name: one for name, one in dict(limits or {}).items() if one is not None}
        self.limits = {name: one if isinstance(one, Limit) else Limit(**one) for name, one in given.items()}
        self.data, self.split, self.success_column, self.camera = data, split, success_column, camera
        self.seed = seed
        self.looks: list[dict[str, float]] = []
        self._distances: list[float] = []  # approx_kl of each step since the last look

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        super().on_train_start(model, iteration)
        if not isinstance(model.env.imagination, Imagination):
            key = f"trainer.callbacks.{self.name}"
            raise ConfigError(
                f"{key} looks at episodes that are imagined here, not at model.config.env: set {key}=null."
            )
        try:
            if self.data is None:
                raise ConfigError("the world model's run records none.")
            source = with_actions_of(LeRobotSource.open(self.data), model.env.imagination)
            split = read_split(self.split) if self.split else make_split(self.data, success_column=self.success_column)
            split.require(source)
            require_same(model.env.views, views_of(self.camera), "the world model", "camera", "name its cameras.")
        except UserError as error:
            raise ConfigError(
                f"trainer.callbacks.{self.name} looks at recordings, data={self.data} and split={self.split}: {error}"
                f" Name others, or learn without a watch: trainer.callbacks.{self.name}=null."
            ) from error
        chunk = model.env.imagination.config.chunk_size
        size = completed(model.env.starts, StartsDefaults).size
        fit = None if size is None else partial(stretch, size=size)  # as the starts do it
        self._learnt, self._held_out = (
            check.read_episodes(source, self.camera, check.chosen(numbers, most, self.seed), split.outcomes, chunk, fit)
            for numbers, most in ((split.train, LEARNT), (split.calibrate, HELD_OUT))  # by "test" nothing is chosen
        )
        self._probe = check.action_probe(self._learnt, chunk)
        self._seen_true = check.actions_seen(self._probe, self._held_out.films, self._held_out.actions, chunk)

    def on_training_step_batch_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        if "approx_kl" in output:
            self._distances.append(float(output["approx_kl"]))

    def on_training_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        if not self.looks and model.at_boundary():
            self._look(model, iteration)

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        if not self.trainer.interrupted and iteration and (not self.looks or self.looks[-1]["iteration"] != iteration):
            self._look(model, iteration)

    def _look(self, model: Any, iteration: int) -> None:
        with apart(self.trainer, model), model.ema_scope(), gathered(model.net):
            mine = self._figures(model)
        model.env.offload()
        found = distributed.all_gather_object((mine, self._distances))  # ranks decide alike, from the same numbers
        distances = [one for _, of_rank in found for one in of_rank]
        figures = found[0][0]
        if distances:  # else no objective measured one
            figures["approx_kl"] = sum(distances) / len(distances)
        self._distances = []
        self.looks.append({"iteration": iteration, **figures})
        self.trainer.metrics.log({f"watch/{name}": value for name, value in figures.items()}, iteration)
        wrong = {
            name: text
            for name, limit in self.limits.items()
            if name in figures and (text := limit.problem(name, figures[name], self._first(name)))
        }
        if warned := [text for name, text in wrong.items() if self.limits[name].only_warns]:
            log.warning("iteration %d: %s", iteration, " ".join(warned))
        problem = " ".join(text for name, text in wrong.items() if not self.limits[name].only_warns)
        if problem:
            problem = f"The policy's own imagined episodes cannot be trusted at iteration {iteration}: {problem}"
        self.settle(model, problem, figures.get("greedy_value", -math.inf), iteration)
        imagined = figures.get("greedy_imagined_success", 0.0)
        if self.ends_full and not problem and imagined > MOST_IMAGINED:
            self.end(iteration, f"{imagined:.0%} of what is played is imagined to succeed: {FULL.format(iteration)}")
        if distributed.is_rank0():
            looks = {"looks": self.looks, "ended": self._ended}
            storage.write_json(os.path.join(self.trainer.run_dir, FILE), looks, indent=1)

    def _first(self, name: str) -> float:
        """The first value that could be measured: where nothing is paid yet, noises cannot agree about it."""
        return next((look[name] for look in self.looks if name in look), math.nan)

    def _figures(self, model: Any) -> dict[str, float]:
        policy, env = model.policy, model.env
        env.onload()
        parts = (policy, env.imagination, env.reward, self._held_out, self._learnt)
        found = {**check.policy_figures(*parts, self.seed), **self._of_own_episodes(*parts[:3])}
        values = {name: one.value if isinstance(one, Estimate) else float(one) for name, one in found.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _of_own_episodes(self, policy: Any, imagination: Any, reward: Any) -> dict[str, Any]:
        """Sampled episodes, and their actions imagined again by another noise."""
        env = check.imagined_env(imagination, reward, check.starts_of(self._held_out, self._learnt))
        env.keep_frames = True
        num = min(STARTS, len(self._held_out))
        starts = held_out_starts(num, 1, self.seed, draws=ATTEMPTS)
        played = LocalRollout(policy, env, keep_frames=True, keep_record=False).collect(starts)
        assert played.frames_E_F_H_W_C is not None and env.bounds is not None
        low, high = (torch.tensor(bound) for bound in env.bounds)
        length = int(env.metadata["max_steps"])
        actions = list(played.actions_M_E_A_D.transpose(0, 1).flatten(1, 2)[:, :length].clamp(low, high))
        films = list(played.frames_E_F_H_W_C[:, : length + 1])
        again, _ = check.imagined_ends(imagination, torch.stack([film[0] for film in films]), actions, self.seed + 1)
        tasks = [self._held_out.tasks[i] for i in starts.trial_ids]
        values = [played.return_E.double().numpy(), check.judge(reward, again, tasks)[0]]
        one, again_G_M = (value.reshape(num, -1) for value in values)
        found: dict[str, Any] = {"noise_agreement": within_groups(one, again_G_M)}
        seen = check.actions_seen(self._probe, films, actions, imagination.config.chunk_size) / self._seen_true
        first = self.looks[0].get("obedience", math.nan) if self.looks else seen
        if self._seen_true > check.READABLE and first > check.READABLE:  # else neither it nor a change means anything
            found["obedience"] = seen
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "looks": self.looks, "distances": self._distances}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.looks, self._distances = list(state.get("looks", [])), list(state.get("distances", []))
