# SPDX-License-Identifier: Apache-2.0
"""Options of policies that learn from rewards, ``model.config``."""

import math
from collections.abc import Iterator
from typing import Any

import attrs

from cosmos_predict2.rl.config import LearnerConfig
from cosmos_predict2.rl.objectives import AGGREGATIONS, KL_KINDS, RATIO_LEVELS, GroupAdvantageConfig, level_of
from cosmos_predict2.world_model.config import PRECISIONS
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError


@attrs.define(kw_only=True, slots=False)
class PolicyLossConfig(Section):
    """Levels and means of a policy's loss. ``aggregation`` is what `objectives.aggregate` describes."""

    ratio_level: str = attrs.field(default="chunk", validator=one_of(*RATIO_LEVELS, *RATIO_LEVELS.values()))
    aggregation: str = attrs.field(default="element-mean", validator=one_of(*AGGREGATIONS))
    slice_decisions: int = attrs.field(default=16, validator=at_least(1))  # of "slice-mean", one after the other
    max_episode_steps: int | None = attrs.field(default=None, validator=at_least(1))  # of "token-mean-of-steps"
    entropy_bonus: float = attrs.field(default=0.0, validator=at_least(0))
    kl_kind: str = attrs.field(default="k3", validator=one_of(*KL_KINDS))
    sums_unexecuted: bool = False  # a chunk's ratio also counts actions that were never executed, as published
    largest_log_ratio: float = attrs.field(default=20.0, validator=above(0))  # beyond it the exponential is useless

    def __attrs_post_init__(self) -> None:
        if self.aggregation == "token-mean-of-steps" and self.max_episode_steps is None:
            raise ConfigError("max_episode_steps=null, but aggregation=token-mean-of-steps divides by it: set it.")


@attrs.define(kw_only=True, slots=False)
class VLARLConfig(LearnerConfig):
    """Groups of episodes, and what is learnt of them."""

    clip_ratio: float = attrs.field(default=0.2, validator=above(0))  # of ratios downwards; of dppo a divergence
    clip_ratio_high: Any = attrs.field(default=0.28, validator=above(0))  # upwards; null: clip_ratio
    # dataloader_train.batch_size is the number of groups of a rank
    group_size: int = attrs.field(default=8, validator=at_least(2))  # episodes with one start
    execute: Any = attrs.field(default=None, validator=at_least(1))  # actions of a decision; null: all are executed
    shared_noise: bool = True  # episodes of a group share what the environment draws; else each has its own
    advantage: GroupAdvantageConfig = attrs.field(factory=lambda: GroupAdvantageConfig(epsilon=1e-6, correction=1))
    micro_batches: int = attrs.field(default=1, validator=at_least(1))  # of a minibatch; trainer.grad_accum_iter
    loss: PolicyLossConfig = attrs.field(factory=PolicyLossConfig)
    mask_unreliable: bool = False  # decisions on which env.num_noises=2 disagree count in no return and no advantage
    # of what was drawn with and log_prob, in nats an element; null: by the precision
    draw_tolerance: Any = attrs.field(default=None, validator=above(0))

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.is_ratio:
            return
        if level_of(self.loss.ratio_level) != "chunk":
            text = f"{self.loss.ratio_level}, but {self.objective} is of whole decisions: set it to chunk"
            yield "loss.ratio_level", text
        if self.loss.entropy_bonus:
            text = f"{self.loss.entropy_bonus}, but {self.objective} computes no entropy: set it to 0"
            yield "loss.entropy_bonus", text
        if self.loss.sums_unexecuted:
            yield "loss.sums_unexecuted", f"true, but {self.objective} counts executed actions alone"


@attrs.define(kw_only=True, slots=False)
class RefinementConfig(Section):
    """Phases in which the world model is trained on what the policy really does; its rewards are not used there."""

    every: int = attrs.field(default=6, validator=at_least(1))  # experiences of the policy between two refinements
    recordings: Any = None  # in place of the true environment: a folder with phase_001 and so on, which a robot plays
    success_column: str = "next.success"  # of these recordings
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
            found = f"model.config.refinement.temperatures={list(self.temperatures)}"
            raise ConfigError(f"{found}: one number at least, none below 0 (0 is greedy).")
        if self.keep < (of_phase := self.episodes * self.windows):
            raise ConfigError(
                f"model.config.refinement.keep={self.keep}, but a phase has up to episodes={self.episodes} times"
                f" windows={self.windows} windows: set keep={of_phase} or more, or fewer episodes."
            )


@attrs.define(kw_only=True, slots=False)
class VLAGRPOConfig(Section):
    """A policy, where it learns, and where it is judged."""

    policy: Any = None  # a lazy call of a module that is a `Policy`
    env: Any = None  # of the `VecEnv` to learn in, or a suite by its name (gym:ID, wfm://HOST:8100 ...)
    true_env: Any = None  # of the one that counts, with the same starts: what a world model is refined by
    eval_env: Any = None  # of the one of validation; null: ``true_env``, or ``env``
    world_model: Any = None  # of a `Video2WorldModel`: ``env`` is given its `Imagination` as ``imagination``
    # of scripts.check_imagination, on these very inputs, or a server's, by its address; null: none is asked for
    card: Any = None
    allow_unchecked: bool = False  # to learn without a card that fits; each line of success is marked so
    rollout: Any = None  # of a `RolloutSource`, given policy, env and execute; null: in this process
    compare: int = attrs.field(default=200, validator=at_least(0))  # validation starts imagined beside true ones
    # episodes of each start of validation; null: 1, or 4 of a policy whose greedy decisions begin with noise
    validation_draws: Any = attrs.field(default=None, validator=at_least(1))
    precision: str = attrs.field(default="float32", validator=one_of(*PRECISIONS))  # of the policy's weights
    fsdp_shard_size: int = 0  # processes that the policy is sharded over; -1: all, 0: each has it whole
    recompute: bool = False  # the policy's blocks are computed anew in backward, which saves memory
    rl: VLARLConfig = attrs.field(factory=VLARLConfig)
    refinement: Any = None  # RefinementConfig, or null: the world model stays as it is
