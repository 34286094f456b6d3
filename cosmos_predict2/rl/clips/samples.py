# SPDX-License-Identifier: Apache-2.0
"""The samples of a rollout of clips, their random numbers, the micro-batches that are made of them, and their order."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from imaginaire import distributed, random
from imaginaire.data.stream import POSITION_KEY
from imaginaire.distributed import places
from imaginaire.errors import DataError


@dataclass(frozen=True)
class Kept:
    """One step of a rollout, with all that training needs of it."""

    k: int
    x_B_C_T_H_W: Tensor
    x_next_B_C_T_H_W: Tensor
    mean_B_C_T_H_W: Tensor
    previous_x0_B_C_T_H_W: Tensor | None
    reference_mean_B_C_T_H_W: Tensor | None = None  # where it is to stay near


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


class RowDraws:
    """Draws of a rollout: each follows from the run's seed, the condition's place in the stream and the member."""

    def __init__(self, batch: Mapping[str, Any], seed: int, members: Sequence[int], first: int | None = None) -> None:
        """``members`` are those of each group that this rank rolls out; ``first`` is that of the rollout to which
        this one adds groups, else the first place of the first rank."""
        self.seed = seed
        self.positions: list[int] = batch[POSITION_KEY].tolist()
        if first is None:
            with places.at("agreeing on the draws of a rollout"):
                first = distributed.broadcast_object(self.positions[0])
        self.first = first
        size = len(batch["fps"])  # the condition and the member of each sample of this rank
        self.rows = torch.arange(size).repeat_interleave(len(members))
        self.members = torch.tensor(members).repeat(size)

    def of(self, samples: Tensor) -> "RowDraws":
        """Those of some of the samples."""
        found = copy.copy(self)
        found.rows, found.members = self.rows[samples], self.members[samples]
        return found

    def with_others(self, others: Sequence["RowDraws"]) -> "RowDraws":
        """Those of several batches, one after the other."""
        found, parts = copy.copy(self), [self, *others]
        found.positions = [position for part in parts for position in part.positions]
        starts = itertools.accumulate((len(part.positions) for part in parts), initial=0)
        found.rows = torch.cat([part.rows + start for part, start in zip(parts, starts)])
        found.members = torch.cat([part.members for part in parts])
        return found

    def _generators(self, rows: Tensor, members: Tensor, purpose: str) -> Iterator[torch.Generator]:
        for row, member in zip(rows.tolist(), members.tolist(), strict=True):
            yield random.generator(self.seed, self.positions[row], f"rl/{purpose}/{member}")

    def normal(self, shape: tuple[int, ...], rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in self._generators(rows, members, purpose)])

    def uniform(self, count: int, rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        drawn = [torch.rand(count, dtype=torch.float64, generator=g) for g in self._generators(rows, members, purpose)]
        return torch.stack(drawn)

    def permutation(self, count: int, purpose: str) -> list[int]:
        """The same for the batches of all ranks and for all rollouts of an experience: it follows from ``first``."""
        generator = random.generator(self.seed, self.first, f"rl/{purpose}")
        drawn: list[int] = torch.randperm(count, generator=generator).tolist()
        return drawn

    def shuffled(self, steps: list[int], update: int) -> list[int]:
        """The steps in the order of one update."""
        return [steps[i] for i in self.permutation(len(steps), f"order{update}")]


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
    chunks: Sequence[slice],
    minibatches: int,
    steps: Sequence[int],
    updates: int,
    shuffled: Callable[[list[int], int], list[int]],
) -> list[list[tuple[slice, int]]]:
    """The micro-batches of each update: of every part of the samples all steps, and that as often as asked.

    ``shuffled(steps, update)`` permutes the steps of a part; samples keep the ``chunks`` in which they were rolled out,
    so that the network computes the very same numbers.
    """
    size = len(chunks) // minibatches
    parts = [chunks[m * size : (m + 1) * size] for m in range(minibatches)] * updates
    return [[(chunk, k) for k in shuffled(list(steps), i) for chunk in part] for i, part in enumerate(parts)]
