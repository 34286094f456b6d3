# SPDX-License-Identifier: Apache-2.0
"""Rewards and ends of imagined chunks, from judgements of their pictures.

The guards against success that is only imagined are here: confirmation over several pictures, and agreement of several
noises, of which the worst one counts.
"""

from dataclasses import dataclass
from typing import Any

import attrs
import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.interfaces import Judgement
from imaginaire.config.schema import Section, at_least, one_of
from imaginaire.errors import ConfigError, DataError


@attrs.define(kw_only=True, slots=False)
class Scoring(Section):
    """How judgements become rewards."""

    # Pictures that are judged: after each executed action, or after the last one of a chunk alone.
    judge: str = attrs.field(default="all", validator=one_of("all", "last"))
    # Paid: the value of each judged picture, or that of an episode's last one alone.
    reward_on: str = attrs.field(default="each", validator=one_of("each", "last"))
    reward_coef: float = 1.0
    sparse: bool = False  # pay 1 for a picture that shows success and 0 for any other, in place of its value
    use_rel_reward: bool = False  # pay differences between successive judged pictures, the first one's to 0
    success_threshold: float | None = None  # of the value; null: the reward's
    # A picture's value is the mean of so many judged ones of its chunk, itself the last: one alone is noisy.
    mean_of: int = attrs.field(default=1, validator=at_least(1))
    confirm: int = attrs.field(default=1, validator=at_least(1))  # successive judged pictures that must show success
    terminate_on_success: bool = False  # at the end of the chunk

    def __attrs_post_init__(self) -> None:
        if self.use_rel_reward and self.reward_on == "last":
            raise ConfigError("scoring.use_rel_reward=true pays for changes: it needs scoring.reward_on=each.")
        if self.mean_of > 1 and self.judge == "last":
            raise ConfigError(f"scoring.mean_of={self.mean_of} pictures of a chunk: it needs scoring.judge=all.")


@dataclass(frozen=True)
class Scored:
    """One row for each of E environments, a column for each of A actions."""

    reward_E_A: NDArray[numpy.float32]  # with reward_on "last" as if each episode ended here
    is_success_E: NDArray[numpy.bool_]  # at the last executed action; of one that ends on success, at any
    value_E: NDArray[numpy.float32]  # of the last judged picture
    value_E_A: NDArray[numpy.float32]  # of the judged pictures, 0 elsewhere
    disagrees_E: NDArray[numpy.bool_]  # one noise shows success there and another does not
    previous_E: NDArray[numpy.float32]  # for the next chunk
    streak_E: NDArray[numpy.int64]


def merged(judgement: Judgement, num_noises: int) -> tuple[Any, Any, Any]:
    """Value [E, F] and success [E, F] of judgements of noise after noise, the worst of them; and who disagrees."""
    value, success = (tensor.detach().cpu() for tensor in (judgement.value_E_F, judgement.success_E_F))
    if value.shape != success.shape or value.ndim != 2 or value.shape[0] % num_noises:
        raise DataError(
            f"A reward judged pictures by value {list(value.shape)} and success {list(success.shape)}: [E, F] each."
        )
    value_N_E_F = value.float().numpy().reshape(num_noises, -1, value.shape[1])
    success_N_E_F = success.bool().numpy().reshape(value_N_E_F.shape)
    if not numpy.isfinite(value_N_E_F).all():
        raise DataError("A reward judged pictures by a value that is not finite.")
    everywhere, anywhere = success_N_E_F.all(0), success_N_E_F.any(0)
    return value_N_E_F.min(0), everywhere, everywhere != anywhere


def score(
    scoring: Scoring,
    judged: tuple[Any, Any, Any],
    counts_E: NDArray[numpy.int64],
    num_actions: int,
    previous_E: NDArray[numpy.float32],
    streak_E: NDArray[numpy.int64],
) -> Scored:
    """The worth of a chunk of which ``counts_E`` actions were executed; ``judged`` as `merged` gives it."""
    value_E_F, success_E_F, differs_E_F = judged
    if scoring.mean_of > 1:
        ends = range(1, 1 + value_E_F.shape[1])
        value_E_F = numpy.stack([value_E_F[:, max(0, k - scoring.mean_of) : k].mean(1) for k in ends], axis=1)
    if scoring.success_threshold is not None:
        success_E_F = value_E_F >= scoring.success_threshold
    size = len(counts_E)
    reward = numpy.zeros((size, num_actions), dtype=numpy.float32)
    previous, streak = previous_E.copy(), streak_E.copy()
    is_success, ever = numpy.zeros(size, dtype=bool), numpy.zeros(size, dtype=bool)
    values = numpy.zeros_like(reward)
    value, differs = numpy.zeros(size, dtype=numpy.float32), numpy.zeros(size, dtype=bool)
    for k in range(value_E_F.shape[1]):
        column = counts_E - 1 if scoring.judge == "last" else numpy.full(size, k)
        seen = column < counts_E
        is_last = seen & (column == counts_E - 1)
        paid = scoring.reward_coef * (success_E_F[:, k].astype(value_E_F.dtype) if scoring.sparse else value_E_F[:, k])
        earned = paid - previous if scoring.use_rel_reward else paid
        pays = is_last if scoring.reward_on == "last" else seen
        reward[pays, column[pays]] = earned[pays]
        values[seen, column[seen]] = value_E_F[seen, k]
        previous = numpy.where(seen, paid, previous)
        streak = numpy.where(seen, numpy.where(success_E_F[:, k], streak + 1, 0), streak)
        is_success = numpy.where(seen, streak >= scoring.confirm, is_success)
        ever |= is_success
        value = numpy.where(seen, value_E_F[:, k], value)
        differs = numpy.where(seen, differs_E_F[:, k], differs)
    return Scored(
        reward,
        ever if scoring.terminate_on_success else is_success,
        value.astype(numpy.float32),
        values,
        differs,
        previous.astype(numpy.float32),
        streak,
    )
