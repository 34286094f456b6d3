# SPDX-License-Identifier: Apache-2.0
"""Options of reinforcement learning, ``model.config.rl``: what clips and episodes share, and those of clips.

Names are the published ones where there are some. Those of episodes are in `episodes.config`, those of advantages in
`advantages`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from cosmos_predict2.diffusion.transitions import KINDS
from cosmos_predict2.models.config import Passes, Predict2p5Video2WorldModelConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.rl.objectives import AdvantageConfig, objective_of
from imaginaire.config.nodes import fields_of, unknown
from imaginaire.config.schema import Section, above, at_least, is_text_to_come, one_of
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, error

KEY = "model.config.rl"
UNCLIPPED = ("dppo", "nft", "best_of_n", "random_of_n")  # objectives without a limit of ratios
ANY = -1  # in train_on: a step drawn for each rollout


def is_objective(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator: the name of an objective, or module:function."""
    if not is_text_to_come(value):
        objective_of(str(value))


@attrs.define(kw_only=True, slots=False)
class RewardConfig(Section):
    """One reward: what makes it, and how it counts. ``make`` is a lazy call of a reward's class, or module:function."""

    make: Any = None
    weight: float = 1.0
    deadline: float = attrs.field(default=300.0, validator=above(0))  # seconds for all scores of a rollout that is over


@attrs.define(kw_only=True, slots=False)
class LearnerConfig(Section):
    """Options that clips and episodes share: the objective and its limits, which groups teach, and how often."""

    objective: str = attrs.field(default="grpo", validator=is_objective)  # of OBJECTIVES, or module:function
    clip_ratio: float = attrs.field(default=1e-4, validator=above(0))  # of ratios downwards; of dppo a divergence
    clip_ratio_high: Any = attrs.field(default=None, validator=above(0))  # upwards; null: clip_ratio
    dual_clip: Any = attrs.field(default=None, validator=above(1))  # the loss is at most this times |A|; null: no limit
    kl_beta: float = attrs.field(default=0.0, validator=at_least(0))  # of the distance to the reference
    update_ref_every_iter: int = attrs.field(default=0, validator=at_least(0))  # 0: the reference stays
    max_rollouts: int = attrs.field(default=1, validator=at_least(1))  # of an update, until enough groups have spread
    lower_bound: Any = None  # groups whose mean reward lies outside the bounds teach nothing; null: no bound
    upper_bound: Any = None
    max_failed_rollouts: int = attrs.field(default=3, validator=at_least(1))  # in a row, without a valid sample
    updates: int = attrs.field(default=1, validator=at_least(1))  # passes over the samples of a rollout
    minibatches: int = attrs.field(default=1, validator=at_least(1))  # parts of the samples, each with steps of its own
    ratio_tolerance: float = attrs.field(default=1e-3, validator=above(0))  # of the ratio before the first update

    # forward-process objectives
    nft_beta: float = attrs.field(default=1.0, validator=above(0))
    num_timesteps: int = attrs.field(default=0, validator=at_least(0))  # noise levels of a clip or a decision; 0: all
    use_same_forward_noise: bool = False  # a group's clips, or decisions of the same number, share fresh noise
    weight_copy_decay_type: int = attrs.field(default=0, validator=at_least(0, at_most=2))

    @property
    def is_ratio(self) -> bool:
        return objective_of(self.objective).is_ratio

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, sentence) of everything that does not fit together."""
        low, high = self.lower_bound, self.upper_bound
        for name, bound in (("lower_bound", low), ("upper_bound", high)):
            if bound is not None and not (isinstance(bound, int | float) and math.isfinite(bound)):
                yield name, f"{bound!r}, but a group's mean reward is a number (null: no bound)"
                return
        if low is not None and high is not None and low > high:
            yield "lower_bound", f"{low} is above upper_bound={high}: no group would teach anything"
        if self.dual_clip is not None and self.objective in UNCLIPPED:
            yield "dual_clip", f"{self.dual_clip}, but {self.objective} clips no ratios: set it to null"
        if self.weight_copy_decay_type and self.is_ratio:
            yield "weight_copy_decay_type", f"it belongs to nft, not to {self.objective}"


@attrs.define(kw_only=True, slots=False)
class RLConfig(LearnerConfig):
    """Rollouts of clips, and what is trained of them."""

    ratio_normalisation: str = attrs.field(default="gaussian", validator=one_of("gaussian", "cosmos_rl"))
    data_beta: float = attrs.field(default=0.0, validator=at_least(0))
    use_rl_sigma_and_noise: bool = True  # the data term shares level and noise of the rollout; else draws its own
    data_on_first_only: bool = False  # at the first step that is trained of each clip
    exp_reward: bool = False
    loss_scale: float = attrs.field(default=1.0, validator=above(0))

    # rollouts
    transition: str = attrs.field(default="sde", validator=one_of(*KINDS))
    num_rollout: int = attrs.field(default=8, validator=at_least(1))  # of a group, which shares its conditions
    ranks_per_group: int = attrs.field(default=1, validator=at_least(1))  # data-parallel ranks that share a group
    sample_steps: int = attrs.field(default=10, validator=at_least(1))
    train_on: list[int] = attrs.field(factory=lambda: list(range(8)))  # indices of steps; -1: one drawn for a rollout
    noise_on_trained_steps_only: bool = False  # the other steps draw nothing
    noise_level: float = attrs.field(default=0.7, validator=above(0))
    s_churn: float = attrs.field(default=1.0, validator=at_least(0))
    s_noise: float = attrs.field(default=1.0, validator=above(0))
    s_t_min: float = attrs.field(default=0.0, converter=float)
    s_t_max: float = attrs.field(default=math.inf, converter=float)
    solver_option: str = attrs.field(default="2ab", validator=one_of("2ab", "1euler"))  # of churn
    guidance: float = 0.0
    # Members of a group start at the same noise; null: where the transition draws, which makes them differ later.
    use_same_seed: bool | None = None
    min_num_conditional_frames: int = attrs.field(default=1, validator=at_least(0))
    max_num_conditional_frames: int = attrs.field(default=1, validator=at_least(0))
    on_policy: bool = True  # roll out with the weights that are trained; else with the reference
    rollout_batch: int = attrs.field(default=8, validator=at_least(1))  # samples that pass the network together
    offload_trajectories: bool = False  # keep what is trained on in the host's memory

    advantage: AdvantageConfig = attrs.field(factory=AdvantageConfig)
    rewards: Any = attrs.field(factory=dict)  # name -> RewardConfig

    @property
    def teaches_without_advantage(self) -> bool:
        """Samples with an advantage of 0 may have a gradient, as of one's own objective."""
        is_by_advantage = self.objective in ("grpo", "guard", "dppo") and not self.exp_reward
        return not is_by_advantage or self.kl_beta > 0 or self.data_beta > 0

    @property
    def starts_alike(self) -> bool:
        """The members of a group start at the same noise."""
        return self.transition != "ode" if self.use_same_seed is None else self.use_same_seed

    @property
    def num_trained(self) -> int:
        """Micro-batches of steps or levels for each part of the samples."""
        return len(self.train_on) if self.is_ratio else self.num_timesteps or self.sample_steps

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if (high := self.clip_ratio_high) is not None and self.objective in UNCLIPPED:
            yield "clip_ratio_high", f"{high}, but {self.objective} clips no ratios: set it to null"
        if objective_of(self.objective).imitates:
            text = f"{self.objective} chooses an episode of a policy; of clips advantage.norm=sft teaches the best"
            yield "objective", f"{text} alone"
        if self.is_ratio:
            yield from self._ratio_problems()
        elif self.num_timesteps > self.sample_steps:
            yield "num_timesteps", f"{self.num_timesteps}, but the rollout has {self.sample_steps} levels"
        if self.transition == "ode" and self.starts_alike:
            yield "use_same_seed", "true, but ode draws nothing: all clips of a group would be the same"
        if not self.min_num_conditional_frames <= self.max_num_conditional_frames:
            yield "max_num_conditional_frames", "it is below min_num_conditional_frames"
        if self.num_rollout < 2:
            yield "num_rollout", "1: an advantage compares the samples of a group; it needs 2 at least"
        if self.num_rollout % self.ranks_per_group:
            text = f"{self.ranks_per_group} does not divide the num_rollout={self.num_rollout} clips of a group"
            yield "ranks_per_group", text
        if not self.rewards:
            yield "rewards", "there is none: name one, such as rewards={quality: {make: ...}}"
        if self.on_policy is False and not self.is_ratio:
            yield "on_policy", f"false, but {self.objective} compares with the weights that it samples by"

    def _ratio_problems(self) -> Iterator[tuple[str, str]]:
        if late := [k for k in self.train_on if not ANY <= k < self.sample_steps]:
            yield "train_on", f"{late} lie outside the {self.sample_steps} steps of sample_steps (-1: drawn)"
        named = [k for k in self.train_on if k != ANY]
        if len(set(named)) < len(named) or len(self.train_on) > self.sample_steps:
            yield "train_on", f"{self.train_on} names a step twice, or more steps than there are"
        if self.transition == "ode":
            text = f"ode draws nothing, so that its steps have no probability for {self.objective};"
            yield "transition", f"{text} use another transition, or objective=nft or awm"
        last = self.sample_steps - 1
        if self.transition in ("cps", "ddim", "churn") and last in self.train_on:
            yield "train_on", f"{last}: the last step of {self.transition} draws nothing"
        if self.objective == "guard" and self.transition not in ("sde", "dance"):
            text = f"{self.transition}, but guard weighs steps by the diffusion coefficient of sde or dance"
            yield "transition", text
        if self.objective in ("guard", "dppo") and self.ratio_normalisation != "gaussian":
            text = f"{self.ratio_normalisation}, but {self.objective} takes the ratio of densities: set it to gaussian"
            yield "ratio_normalisation", text
        if not self.train_on:
            yield "train_on", "it is empty"


def reward_configs(rl: RLConfig) -> dict[str, RewardConfig]:
    """The rewards by name, those that were switched off (null, or weight 0) left out."""
    found = {}
    for name, value in dict(rl.rewards or {}).items():
        if value is None:
            continue
        place, known = f"{KEY}.rewards.{name}", fields_of(RewardConfig)
        if not isinstance(value, RewardConfig):
            for key in set(value) - set(known):
                cure = f" Arguments of the reward are those of its make: {place}.make={{_target_: CLASS, ...}}."
                raise unknown(f"{place}.{key}", RewardConfig.__qualname__, known, cure)
        one = value if isinstance(value, RewardConfig) else RewardConfig(**dict(value))
        if one.make is None:
            raise ConfigError(f"{place}.make: null, but it must be a lazy call of a reward's class or module:function.")
        if one.weight:
            found[name] = one
    return found


def rl_of(config: Any) -> RLConfig:
    """The section of a model's config that may still be a mapping."""
    value = config.get("rl") if isinstance(config, Mapping) else config.rl
    return value if isinstance(value, RLConfig) else RLConfig(**dict(value or {}))


@attrs.define(kw_only=True, slots=False)
class Predict2RLConfig(Predict2Video2WorldModelConfig):
    rl: RLConfig = attrs.field(factory=RLConfig)


@attrs.define(kw_only=True, slots=False)
class Predict2p5RLConfig(Predict2p5Video2WorldModelConfig, Predict2RLConfig):
    """The same with the noise of Predict2.5."""


def check_steps(rl: RLConfig, context: CheckContext) -> Iterator[Finding]:
    """Errors where updates, saves or the end of the run do not fall on whole experiences."""
    run = context.config
    if run is None:
        return
    if context.world_size is not None:
        ranks = context.world_size // run.model_parallel.context_parallel_size
        if ranks % rl.ranks_per_group:
            text = f"{rl.ranks_per_group} does not divide the {ranks} data-parallel ranks of this run"
            yield error(f"{KEY}.ranks_per_group", text)
    batch_size = run.dataloader_train.get("batch_size") if isinstance(run.dataloader_train, Mapping) else None
    if not isinstance(batch_size, int):
        return
    members = rl.num_rollout // rl.ranks_per_group
    samples = batch_size * members
    if samples % rl.rollout_batch:
        text = f"{rl.rollout_batch} does not divide the {samples} samples of a rollout: {batch_size} conditions with"
        yield error(f"{KEY}.rollout_batch", f"{text} {members} each on this rank")
        return
    chunks = samples // rl.rollout_batch
    if chunks % rl.minibatches:
        text = f"{rl.minibatches} does not divide the {chunks} batches of rollout_batch={rl.rollout_batch} samples"
        yield error(f"{KEY}.minibatches", text)
        return
    batches, found = chunks // rl.minibatches, run.trainer.grad_accum_iter
    if found != (wanted := batches * rl.num_trained):
        text = f"{found}, but an update has {wanted} micro-batches: {rl.num_trained} trained steps of {batches} batches"
        yield error("trainer.grad_accum_iter", text, f"Set trainer.grad_accum_iter={wanted}")
    updates = rl.updates * rl.minibatches
    if run.trainer.max_iter % updates:
        text = f"{run.trainer.max_iter}, but an experience has {updates} updates, and a run ends with a whole one"
        yield error("trainer.max_iter", text, f"Set a multiple of {updates}")


def passes_of(rl: RLConfig, conditions: int, *, is_flow_model: bool) -> Passes:
    """The passes through the network, and the latents that wait, of a rank whose batch has so many conditions."""
    clips = conditions * rl.num_rollout // rl.ranks_per_group
    steps, guided = rl.num_trained, 2 if rl.guidance else 1
    has_last = rl.transition == "churn" or not is_flow_model  # from the smallest noise level to clean latents
    has_old = not rl.is_ratio and (rl.updates * rl.minibatches > 1 or rl.weight_copy_decay_type > 0)
    per_step = guided if rl.is_ratio else 1
    has_reference, has_data = rl.kl_beta > 0, rl.data_beta > 0
    return Passes(
        rollout=guided * (rl.sample_steps + has_last),
        old=steps * has_old,
        reference=steps * per_step * has_reference,
        policy=rl.updates * steps * per_step,
        data=has_data * (1 if rl.data_on_first_only else rl.updates * steps),
        graphs=per_step + has_data,
        clips=clips,
        clips_at_once=rl.rollout_batch,
        updates=rl.updates * rl.minibatches,
        weight_copies=(has_reference or not rl.on_policy) + (rl.weight_copy_decay_type > 0),
        kept_latents=0 if rl.offload_trajectories else _kept_latents(rl, has_old),
    )


def _kept_latents(rl: RLConfig, has_old: bool) -> int:
    """Latents that a clip's rollout keeps: of each trained step its mean, of churn also the estimate before, and the
    states between which it leads; of each level fresh noise; what other weights predict. Drawn steps may lie apart."""
    steps = rl.num_trained
    of_others = steps * (has_old + (rl.kl_beta > 0))
    if not rl.is_ratio:
        return steps + of_others
    named = [k for k in rl.train_on if k != ANY]
    states = len({*named, *(k + 1 for k in named)}) + 2 * (steps - len(named))
    before = steps - (0 in named) if rl.transition == "churn" and rl.solver_option == "2ab" else 0
    return states + steps + before + of_others
