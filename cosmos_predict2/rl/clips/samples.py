# SPDX-License-Identifier: Apache-2.0
"""The samples of a rollout of clips, the micro-batches that are made of them, and their order."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.rl.clips.groups import RowDraws
from cosmos_predict2.rl.clips.rollout import Kept
from imaginaire.errors import DataError


@dataclass(frozen=True)
class Forward:
    """A generated clip with fresh noise at one level, for forward-process objectives; and what was predicted there, of
    this rank's frames."""

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor
    t_B: Tensor
    v_old_B_C_T_H_W: Tensor | None = None  # by the sampling policy; None: the weights are still those
    v_reference_B_C_T_H_W: Tensor | None = None


@dataclass(frozen=True)
class Data:
    """The true clips, and the noise and level at which the data term judges them."""

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor
    sigma_B_1: Tensor
    condition: Condition


class Conditions:
    """The conditions of a batch, and the row of each sample's: a group's text is not copied for its members.

    No dataclass, so that `joined` and `mapped` leave it as it is.
    """

    def __init__(self, condition: Condition, unconditional: Condition | None, rows_B: Tensor) -> None:
        self.condition = condition
        self.unconditional = unconditional
        self.rows_B = rows_B

    def of(self, samples: slice) -> tuple[Condition, Condition | None]:
        """Those of some of the samples."""
        rows_B, other = self.rows_B[samples], self.unconditional
        return self.condition.rows(rows_B), None if other is None else other.rows(rows_B)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples at one trained step (`kept`) or level (`forward`)."""

    condition: Condition
    unconditional: Condition | None
    noise_B_C_T_H_W: Tensor  # the start of the rollout
    advantage_B: Tensor
    window: tuple[int, ...] | None
    kept: Kept | None = None
    forward: Forward | None = None
    data: Data | None = None
    is_before_update: bool = True  # no step was taken since the rollout, so that ratios are 1
    teaches: bool = True  # there is something to learn in its update, on any rank
    facts: dict[str, float] = field(default_factory=dict)  # of the whole rollout, to be logged


@dataclass
class Samples:
    """The samples of one rollout, rows in step: groups one after the other, the members of a group together."""

    conditions: Conditions
    noise: Tensor
    final: Tensor
    window: tuple[int, ...] | None
    levels: list[float]  # noise levels sigma of the steps
    kept: dict[int, Kept] = field(default_factory=dict)  # of ratio objectives, by step
    forwards: dict[int, Forward] = field(default_factory=dict)  # of forward-process objectives, by level

    def __len__(self) -> int:
        return len(self.noise)

    def rows(self, rows: Tensor) -> "Samples":
        """Some of the samples."""
        kept, of = mapped(self, lambda tensor: tensor[rows.to(tensor.device)]), self.conditions
        return dataclasses.replace(kept, conditions=Conditions(of.condition, of.unconditional, of.rows_B[rows]))

    def on_host(self) -> "Samples":
        """The same with what is kept of the trained steps or levels in the host's memory."""
        kept, forwards = mapped(self.kept, Tensor.cpu), mapped(self.forwards, Tensor.cpu)
        return dataclasses.replace(self, kept=kept, forwards=forwards)


@dataclass(frozen=True)
class Rollout:
    """The samples of a batch's conditions, with the true latents and conditions of the data term, a row for each
    condition."""

    samples: Samples
    true_latents: Tensor
    data_condition: Condition
    draws: RowDraws

    def rows(self, rows: Tensor) -> "Rollout":
        """Some of the samples, with the conditions of all."""
        return dataclasses.replace(self, samples=self.samples.rows(rows), draws=self.draws.of(rows))

    def with_others(self, others: Sequence["Rollout"]) -> "Rollout":
        """The samples of several rollouts at the same steps, one after the other."""
        parts = [self, *others]
        lengths = {part.data_condition.crossattn_emb_B_S_E.shape[1] for part in parts}
        if len(lengths) > 1:
            raise DataError(
                f"max_rollouts joins groups of several batches, but their texts have {sorted(lengths)} tokens: give all"
                " embeddings one length."
            )
        draws = self.draws.with_others([part.draws for part in others])
        conditions = [part.samples.conditions for part in parts]
        unconditional = [one.unconditional for one in conditions if one.unconditional is not None]
        samples = joined([part.samples for part in parts])
        samples.conditions = Conditions(
            reduce(Condition.stacked_with, [one.condition for one in conditions]),
            reduce(Condition.stacked_with, unconditional) if unconditional else None,
            draws.rows,
        )
        latents = torch.cat([part.true_latents for part in parts])
        return Rollout(samples, latents, reduce(Condition.stacked_with, [p.data_condition for p in parts]), draws)


Shuffle = Callable[[list[int], int], list[int]]


def joined(parts: Sequence[Any], done: dict[int, Tensor] | None = None) -> Any:
    """Dataclasses of tensors, one after the other along the batch; what is no tensor is taken from the first.

    A tensor that is in several places, as a state that one step ends in and the next begins with, stays one: ``done``
    has those of this call.
    """
    first, done = parts[0], {} if done is None else done
    if isinstance(first, Tensor):
        if id(first) not in done:
            done[id(first)] = torch.cat(list(parts))
        return done[id(first)]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in dataclasses.fields(first)]
        found = {name: joined([getattr(part, name) for part in parts], done) for name in names}
        return dataclasses.replace(first, **found)
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts], done) for key in first}
    return first


def mapped(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Tensor] | None = None) -> Any:
    """A tensor, or a mapping or dataclass with each of its tensors, after a change, made once where it is in several
    places; what else there is stays."""
    done = {} if done is None else done
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = change(value)
        return done[id(value)]
    if isinstance(value, dict):
        return {key: mapped(one, change, done) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: mapped(getattr(value, name), change, done) for name in names})
    return value


def rows_of(value: Any, rows: slice) -> Any:
    """The same for some rows of the batch."""
    return mapped(value, lambda tensor: tensor[rows])


def order(
    num_samples: int, minibatches: int, samples_at_once: int, steps: Sequence[int], updates: int, shuffled: Shuffle
) -> Iterator[tuple[int, list[tuple[slice, int]]]]:
    """(number, micro-batches) of each update: of every part of the samples all steps, and that as often as asked.

    ``shuffled(n, update)`` permutes the steps of a part; samples keep the batches in which they were rolled out, so
    that the network computes the very same numbers.
    """
    chunks = [slice(i, min(i + samples_at_once, num_samples)) for i in range(0, num_samples, samples_at_once)]
    size = len(chunks) // minibatches
    number = 0
    for _ in range(updates):
        for m in range(minibatches):
            part = chunks[m * size : (m + 1) * size]
            pairs = [(chunk, k) for k in shuffled(list(steps), number) for chunk in part]
            yield number, pairs
            number += 1
