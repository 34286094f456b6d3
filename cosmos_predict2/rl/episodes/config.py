# SPDX-License-Identifier: Apache-2.0
"""Options of policies that learn from rewards, ``model.config``."""

import math
from collections.abc import Iterator
from typing import Any

import attrs

from cosmos_predict2.rl.config import bound_problems, is_objective
from cosmos_predict2.rl.episodes.policy_losses import PolicyLossConfig
from cosmos_predict2.rl.objectives import objective_of
from cosmos_predict2.world_model.config import PRECISIONS
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError


@attrs.define(kw_only=True, slots=False)
class VLARLConfig(Section):
    """Groups of episodes, and what is learnt of them."""

    # rollouts; dataloader_train.batch_size is the number of groups of a rank
    group_size: int = attrs.field(default=8, validator=at_least(2))  # episodes with one start
    execute: Any = attrs.field(default=None, validator=at_least(1))  # actions of a decision; null: all are executed
    shared_noise: bool = True  # episodes of a group share what the environment draws; else each has its own
    max_rollouts: int = attrs.field(default=1, validator=at_least(1))  # of an update, until enough groups have spread
    max_failed_rollouts: int = attrs.field(default=3, validator=at_least(1))  # in a row, without a valid episode

    # advantages
    advantage_epsilon: float = attrs.field(default=1e-6, validator=above(0))  # (R - mean) / (std + epsilon)
    advantage_correction: int = attrs.field(
        default=1, validator=at_least(0, at_most=1)
    )  # the deviation divides by n less this
    lower_bound: Any = None  # groups whose mean return lies outside the bounds teach nothing; null: no bound
    upper_bound: Any = None

    # updates
    updates: int = attrs.field(default=1, validator=at_least(1))  # passes over the episodes of a rollout
    minibatches: int = attrs.field(default=1, validator=at_least(1))  # optimizer steps of a pass
    micro_batches: int = attrs.field(default=1, validator=at_least(1))  # of a minibatch; trainer.grad_accum_iter
    loss: PolicyLossConfig = attrs.field(factory=PolicyLossConfig)
    # of what was drawn with and log_prob, in nats an element; null: by the precision
    draw_tolerance: Any = attrs.field(default=None, validator=above(0))
    ratio_tolerance: float = attrs.field(default=1e-3, validator=above(0))  # of the ratio before the first update
    update_ref_every_iter: int = attrs.field(default=0, validator=at_least(0))  # 0: the reference stays
    objective: str = attrs.field(default="grpo", validator=is_objective)  # "dppo", or a ratio objective of your own

    @property
    def teaches_without_advantage(self) -> bool:
        """Decisions with an advantage of 0 may have a gradient; one's own objective may have any."""
        return bool(self.loss.kl_beta or self.loss.entropy_bonus) or self.objective not in ("grpo", "dppo")

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, sentence) of everything that does not fit together."""
        yield from bound_problems(self.lower_bound, self.upper_bound)
        if objective_of(self.objective).is_of_clips:
            why = (
                "it weighs the steps of a sampler by their noise and length, and a decision has one probability"
                if objective_of(self.objective).is_ratio
                else "it learns at generated clips with fresh noise, and a policy gives probabilities of its decisions"
            )
            yield "objective", f"{self.objective} is of clips alone: {why}. Take grpo, dppo, or a ratio objective"
        if self.objective == "dppo" and self.loss.dual_clip is not None:
            yield "loss.dual_clip", f"{self.loss.dual_clip}, but dppo clips no ratios: set it to null"


@attrs.define(kw_only=True, slots=False)
class RefinementConfig(Section):
    """Phases in which the world model is trained on what the policy really does; its rewards are not used there."""

    every: int = attrs.field(default=6, validator=at_least(1))  # experiences of the policy between two refinements
    episodes: int = attrs.field(default=600, validator=at_least(1))  # in the true environment, of all ranks
    temperatures: list[float] = attrs.field(factory=lambda: [1.0])  # of the policy, in equal shares of the episodes
    steps: int = attrs.field(default=150, validator=at_least(1))  # of the optimizer
    optimizer: Any = None
    scheduler: Any = None  # of the steps of one refinement
    data: Any = None  # a data set that it was trained on, so that it does not forget
    newest: int = attrs.field(default=3, validator=at_least(1))  # windows of a batch: of this phase
    earlier: int = attrs.field(default=2, validator=at_least(0))  # of earlier phases
    old: int = attrs.field(default=3, validator=at_least(0))  # of ``data``
    keep: int = attrs.field(default=4800, validator=at_least(1))  # windows of earlier phases, at least one phase's
    window_stride: int = attrs.field(default=4, validator=at_least(1))  # actions between the starts of windows
    windows: int = attrs.field(default=2, validator=at_least(1))  # of an episode

    def __attrs_post_init__(self) -> None:
        if not self.temperatures or not all(0 <= value < math.inf for value in self.temperatures):
            raise ConfigError(
                f"model.config.refinement.temperatures={list(self.temperatures)}: one number at least, none below 0"
                " (0 is greedy)."
            )
        if self.keep < (of_phase := self.episodes * self.windows):
            raise ConfigError(
                f"model.config.refinement.keep={self.keep}, but a phase has up to episodes={self.episodes} times"
                f" windows={self.windows} windows: set keep={of_phase} or more, or fewer episodes."
            )


@attrs.define(kw_only=True, slots=False)
class VLAGRPOConfig(Section):
    """A policy, where it learns, and where it is judged."""

    policy: Any = None  # a lazy call of a module that is a `Policy`
    env: Any = None  # of the `VecEnv` to learn in
    true_env: Any = None  # of the one that counts, with the same starts: what a world model is refined by
    eval_env: Any = None  # of the one of validation; null: ``true_env``, or ``env``
    world_model: Any = None  # of a `Video2WorldModel`: ``env`` is given its `Imagination` as ``imagination``
    rollout: Any = None  # of a `RolloutSource`, given policy, env and execute; null: in this process
    compare: int = attrs.field(default=200, validator=at_least(0))  # validation starts imagined beside true ones
    # episodes of each start of validation; null: 1, or 4 of a policy whose greedy decisions begin with noise
    validation_draws: Any = attrs.field(default=None, validator=at_least(1))
    precision: str = attrs.field(default="float32", validator=one_of(*PRECISIONS))  # of the policy's weights
    fsdp_shard_size: int = 0  # processes that the policy is sharded over; -1: all, 0: each has it whole
    recompute: bool = False  # the policy's blocks are computed anew in backward, which saves memory
    rl: VLARLConfig = attrs.field(factory=VLARLConfig)
    refinement: Any = None  # RefinementConfig, or null: the world model stays as it is
