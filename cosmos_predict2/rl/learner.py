# SPDX-License-Identifier: Apache-2.0
"""The loop of reinforcement learning, once for world models and for policies: collect, compare, minibatches, loss.

Experience is of one of two kinds. **Clips** (`FlowGRPOModel`): a world model samples them, a denoise step is a
decision, and rewards score the clip. **Episodes** (`VLAGRPOModel`): a policy decides in an environment, whose return is
the reward. Each kind defines `collect`, `minibatches` and `part_loss`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.rl.config import LearnerConfig
from cosmos_predict2.rl.objectives import old_policy_decay
from imaginaire import distributed
from imaginaire.distributed.parallel import reshard, to_local
from imaginaire.errors import TrainingError
from imaginaire.training.model import ImaginaireModel

Facts = dict[str, float]  # of a rollout, to be logged


@dataclass
class Experience:
    """The groups of a rollout with their advantages.

    ``record`` has the samples, those of a group one after the other, and gives ``rows(numbers)``, some of them, and
    ``with_others(records)``, those of several rollouts. ``teaches_G``: any sample of the group has an advantage, of
    those that other ranks roll out too.
    """

    record: Any
    advantage_G_M: Tensor
    teaches_G: Tensor
    facts: Facts
    num_rollouts: int = 1

    def groups(self, numbers: Tensor) -> "Experience":
        """Some of the groups."""
        size = self.advantage_G_M.shape[1]
        rows = (numbers[:, None] * size + torch.arange(size)).flatten()
        return Experience(self.record.rows(rows), self.advantage_G_M[numbers], self.teaches_G[numbers], self.facts)

    @property
    def group_facts(self) -> Facts:
        """Numbers to log of dynamic sampling and advantages."""
        return {
            "groups_with_spread": float(self.teaches_G.float().mean()),
            "rollouts": float(self.num_rollouts),
            "advantage_max": float(self.advantage_G_M.max()),
            "advantage_min": float(self.advantage_G_M.min()),
        }


# --- records: dataclasses and dictionaries of tensors, a row for each sample


def joined(parts: Sequence[Any]) -> Any:
    """Records, one after the other along the batch; what is no tensor is taken from the first."""
    return _changed(parts, torch.cat, {})


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A record with each of its tensors after a change; what else there is stays."""
    return _changed([value], lambda tensors: change(tensors[0]), {})


def _changed(parts: Sequence[Any], change: Callable[[list[Tensor]], Tensor], done: dict[int, Tensor]) -> Any:
    """A tensor that is in several places, as a state that one step ends in and the next begins with, stays one:
    ``done`` has those of this call."""
    first = parts[0]
    if isinstance(first, Tensor):
        if id(first) not in done:
            done[id(first)] = change(list(parts))
        return done[id(first)]
    if isinstance(first, dict):
        return {key: _changed([part[key] for part in parts], change, done) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        own = {name: _changed([getattr(part, name) for part in parts], change, done) for name in names}
        return replace(first, **own)
    return first


def rows_of(value: Any, rows: slice | Tensor) -> Any:
    """Some rows of a record."""
    return mapped(value, lambda tensor: tensor[rows])


class WeightCopy:
    """The trained parameters of a module by name, sharded as they are.

    The copy stays, or follows: the reference of a KL term, the sampling policy of NFT.
    """

    def __init__(self, module: nn.Module) -> None:
        with torch.no_grad():
            self.weights = {name: weight.detach().clone() for name, weight in _trained(module).items()}

    @torch.no_grad()
    def follow(self, module: nn.Module, decay: float = 0.0) -> None:
        """copy = decay copy + (1 - decay) weights."""
        for name, weight in _trained(module).items():
            copy = to_local(self.weights[name])
            copy.lerp_(to_local(weight).to(copy.dtype), 1.0 - decay)

    @contextmanager
    def scope(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module computes with the copy; afterwards with its own weights again, also after an exception."""
        with torch.no_grad():
            own = {name: to_local(weight).clone() for name, weight in _trained(module).items()}
            self._put(module, {name: to_local(weight) for name, weight in self.weights.items()})
        try:
            yield
        finally:
            self._put(module, own)

    @torch.no_grad()
    def _put(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        for name, weight in _trained(module).items():
            to_local(weight).copy_(weights[name])


def _trained(module: nn.Module) -> dict[str, Tensor]:
    reshard(module)
    return {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}


class RLModel(ImaginaireModel, ABC):
    """A model that turns batches into scored experience, and learns from it.

    ``rl`` has the settings. Saves and stops wait for the last update of an experience.
    """

    rl: LearnerConfig
    rl_key = ""  # of ``rl`` in the configuration

    _reference: WeightCopy | None = None
    _old: WeightCopy | None = None  # the sampling policy of nft, where it follows slowly
    _old_decay_type = 0
    _left = 0  # micro-batches of the present experience that are still to come
    _is_open = False  # from the beginning of an experience to its last update
    _has_gradient = False  # of the present update
    _failed_rollouts = 0  # in a row

    # --- of each kind

    @abstractmethod
    def collect(self, batch: Mapping[str, Any], first: Any = None) -> Experience:
        """A rollout from a batch of the loader, compared; ``first`` is the record of the first one that it adds to."""

    @abstractmethod
    def minibatches(self, experience: Experience, batch: Mapping[str, Any]) -> tuple[int, Iterator[Any]]:
        """The micro-batches of all updates in order, and how many they are. Each has ``teaches`` and ``facts``."""

    @abstractmethod
    def part_loss(self, part: Any) -> tuple[dict[str, Any], Tensor]:
        """Numbers to log, and the loss of a micro-batch."""

    def between_experiences(self) -> Iterator[Any]:
        """Batches of something else that is trained in turn."""
        yield from ()

    def at_end_of_experience(self) -> None:
        """Called before the last micro-batch is handed over: its update is the last of the experience."""

    # --- the loop

    def train_batches(self, dataloader: Any) -> Iterator[Any]:
        batches = iter(dataloader)
        while True:
            yield from self.between_experiences()
            if (batch := next(batches, None)) is None:
                return
            self._is_open = True
            experience = self.experience(batch, batches)
            self._left, parts = self.minibatches(experience, batch)
            for part in parts:
                self._left -= 1
                if self._left == 0:
                    self.at_end_of_experience()
                yield part

    def experience(self, batch: Mapping[str, Any], batches: Iterator[Mapping[str, Any]]) -> Experience:
        """The groups of a batch. With ``max_rollouts`` above 1, dynamic sampling (DAPO): groups of further batches take
        the places of those of which nothing is learnt, until there are enough on every rank."""
        found, num = self.collect(batch), 1
        parts, wanted = [found], len(found.advantage_G_M)
        while num < self.rl.max_rollouts:
            if self.on_all_ranks(sum(int(part.teaches_G.sum()) for part in parts) >= wanted):
                break
            more = self.collect(next(batches), parts[0].record)
            num += 1
            if (chosen := more.teaches_G.nonzero().flatten()).numel():  # the first rollout has enough of the others
                parts.append(more.groups(chosen))
        if len(parts) > 1:  # first those that teach something; every rank has equally many
            is_idle = torch.cat([~part.teaches_G for part in parts])
            order, kept = torch.argsort(is_idle.long(), stable=True)[:wanted].sort().values, []
            for part in parts:  # one after the other: pictures are large
                count = len(part.advantage_G_M)
                kept.append(part.groups(order[(order >= 0) & (order < count)]))
                order = order - count
            found.record = kept[0].record.with_others([part.record for part in kept[1:]])
            found.advantage_G_M = torch.cat([part.advantage_G_M for part in kept])
            found.teaches_G = torch.cat([part.teaches_G for part in kept])
        found.num_rollouts = num
        return found

    def training_step(self, batch: Any, iteration: int) -> tuple[dict[str, Any], Tensor]:
        self._has_gradient = batch.teaches
        output, loss = self.part_loss(batch)
        return output | batch.facts, loss

    def on_before_zero_grad(self, optimizer: Any, scheduler: Any, iteration: int) -> None:
        super().on_before_zero_grad(optimizer, scheduler, iteration)
        self._is_open = self._left > 0
        every = self.rl.update_ref_every_iter
        if self._reference is not None and every and (iteration + 1) % every == 0:
            self._reference.follow(self.net)
        if self._old is not None:
            self._old.follow(self.net, old_policy_decay(self._old_decay_type, iteration + 1))

    def at_boundary(self) -> bool:
        return not self._is_open

    def has_gradient(self) -> bool:
        return self._has_gradient

    # --- weights beside the trained ones

    def keep_reference(self) -> None:
        """The present weights are the reference; of adapters, where they alone are trained."""
        self._reference = WeightCopy(self.net)

    def reference(self) -> AbstractContextManager[Any]:
        """Inside, the network is the reference: it has the weights that were kept."""
        assert self._reference is not None
        return self._reference.scope(self.net)

    def keep_old(self, decay_type: int) -> None:
        """Keep the present weights to roll out with, which follow those that are trained; 0: those that are trained."""
        self._old_decay_type = decay_type
        if decay_type:
            self._old = WeightCopy(self.net)

    def sampling_policy(self) -> AbstractContextManager[Any]:
        """Inside, the network is what rolls out."""
        return nullcontext() if self._old is None else self._old.scope(self.net)

    def copied_weights(self) -> dict[str, Tensor]:
        """The weights of the copies, by their names in checkpoints."""
        copies = {"net_ref": self._reference, "net_old": self._old}
        return {f"{key}.{n}": w for key, copy in copies.items() if copy is not None for n, w in copy.weights.items()}

    # --- checks

    def on_all_ranks(self, value: bool) -> bool:
        return bool(distributed.all_reduce_(torch.tensor(float(value)), "min"))

    def count_failure(self, is_failed: bool, what: str) -> None:
        """Raise on all ranks where nothing of this was valid on one of them, several times in a row."""
        self._failed_rollouts = self._failed_rollouts + 1 if is_failed else 0
        most = self.rl.max_failed_rollouts
        if not self.on_all_ranks(self._failed_rollouts < most):
            where = " on a rank" if distributed.world_size() > 1 else ""
            cure = f"The log has the errors. Mend them, or raise {self.rl_key}.max_failed_rollouts={most}."
            raise TrainingError(f"No {what} was valid in {most} rollouts in a row{where}. {cure}")


def require_ratio_one(away: float, tolerance: float, why: str) -> None:
    """Raise where ratios before the first update, which are 1 by definition, are this far from it."""
    if not away <= tolerance:
        found = f"it differs by {away:.3g} (model.config.rl.ratio_tolerance={tolerance})"
        raise TrainingError(f"Before the first update new and old probability have a ratio of 1, but {found}: {why}")
