# SPDX-License-Identifier: Apache-2.0
"""Clips to advantages: rewards are asked while further clips are made, fetched at the end, and compared in groups.

A group has the same conditions. It is rolled out by ``ranks`` neighbouring data-parallel ranks, which read the same
samples, each some of its members; with 1, every rank has whole groups of its own.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_predict2.rl.config import KEY, RewardConfig, RLConfig, reward_configs
from cosmos_predict2.rl.interfaces import Clips, Compares, Reward, Scores, Ticket
from cosmos_predict2.rl.objectives import groups_within, has_spread
from cosmos_predict2.rl.rewards.local import scored_by
from cosmos_predict2.rl.rewards.remote import LAST_LOOK_S
from imaginaire import distributed
from imaginaire.buildable import resolve, target_of
from imaginaire.data.facts import facts_of
from imaginaire.distributed import places
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.findings import CheckContext, Finding, error

PERCENTILES = (10, 90)  # of each reward, to be logged
MARGIN_S = 30.0  # that ranks which do not ask wait longer than the one that asks may take


class ClipRewards:
    """The rewards of a run."""

    def __init__(self, rl: RLConfig) -> None:
        self.options: dict[str, RewardConfig] = reward_configs(rl)
        self.rewards: dict[str, Reward] = {
            name: scored_by(one.make, f"{KEY}.rewards.{name}.make") for name, one in self.options.items()
        }
        self.rl, self.advantage = rl, rl.advantage
        self.needs_pixels = any(reward.needs_pixels for reward in self.rewards.values())
        self._is_probed = False

    def shared_by(self, group: dist.ProcessGroup | None) -> None:
        """Let the first rank of a group that holds the same clips ask for all of it."""
        if group is not None:
            self.rewards = {name: OneRank(reward, group) for name, reward in self.rewards.items()}

    @property
    def needs_probe(self) -> bool:
        """True where a reward asks elsewhere and has not been asked for a first score yet."""
        return not self._is_probed and any(one.probe is not None for one in self.rewards.values())

    def probe(self, clips: Clips, context: Mapping[str, Any]) -> None:
        """Raise where a reward that asks elsewhere could not score these clips."""
        for name, reward in self.rewards.items():
            if reward.probe is not None:
                reward.probe(clips, context, self.options[name].deadline)
        self._is_probed = True

    def submit(self, clips: Clips, context: Mapping[str, Any]) -> dict[str, Ticket]:
        """Ask every reward. The number of a request follows from the clips: what is asked again is scored once."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (clips.latents_B_C_T_H_W, clips.video_B_C_F_H_W):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update("\n".join(clips.prompts).encode())
        number = digest.hexdigest()
        return {name: reward.submit(clips, context, number) for name, reward in self.rewards.items()}

    def fetch(self, tickets: list[dict[str, Ticket]], members: int) -> dict[str, Scores]:
        """The scores of all parts [N, members], a group in each row; a reward's deadline is one for all of them."""
        found, began = {}, time.monotonic()
        for name, reward in self.rewards.items():
            ends = began + self.options[name].deadline
            scores = [reward.fetch(part[name], ends - time.monotonic()) for part in tickets]
            whole = _joined(scores, lambda parts: torch.cat(parts).reshape(-1, members))
            value = whole.value_B.float()
            is_valid = whole.is_valid_B & value.isfinite()
            found[name] = Scores(torch.where(is_valid, value, 0.0), is_valid, whole.parts)
        return found

    def advantages(self, scores: Mapping[str, Scores]) -> tuple[Tensor, dict[str, float]]:
        """Advantages [N, G] within the limits, and what to log of rewards and advantages."""
        facts: dict[str, float] = {}
        valid = torch.stack([one.is_valid_B for one in scores.values()]).all(dim=0)
        total = torch.zeros(valid.shape)
        for name, one in scores.items():
            value = self.advantage.of(one.value_B, valid) if self.advantage.each_reward else one.value_B
            total += self.options[name].weight * value
            facts |= _facts(name, one.value_B, one.is_valid_B)
            if one.is_valid_B.any():
                facts |= {f"{name}_{p}": float(part[one.is_valid_B].float().mean()) for p, part in one.parts.items()}
        if not self.advantage.each_reward:
            total = self.advantage.of(total, valid)
        advantage = self.advantage.limited(torch.where(valid, total, 0.0))
        reward = sum((self.options[name].weight * one.value_B for name, one in scores.items()), torch.zeros(()))
        is_kept_N = groups_within(reward, valid, lower=self.rl.lower_bound, upper=self.rl.upper_bound)
        advantage = torch.where(is_kept_N[:, None], advantage, 0.0)
        spread = torch.stack([has_spread(one.value_B, valid, self.advantage.min_std) for one in scores.values()])
        facts["groups_without_spread"] = float((~spread.any(dim=0)).float().mean())
        facts["advantage_abs"] = float(advantage.abs().mean())
        if all(name in facts for name in scores):
            facts["reward_mean"] = sum(self.options[name].weight * facts[name] for name in scores)
        return advantage, facts


def _joined(scores: Sequence[Scores], join: Callable[[list[Tensor]], Tensor]) -> Scores:
    """The scores of several requests or ranks, with the parts that all have."""
    names = set.intersection(*(set(one.parts) for one in scores))
    parts = {name: join([one.parts[name] for one in scores]) for name in sorted(names)}
    return Scores(join([one.value_B for one in scores]), join([one.is_valid_B for one in scores]), parts)


def _facts(name: str, value: Tensor, is_valid: Tensor) -> dict[str, float]:
    """Figures of the valid scores [N, G]; where there is none, they have no mean."""
    facts = {f"{name}_valid_rate": float(is_valid.float().mean())}
    if is_valid.any():
        of_valid = value[is_valid]
        facts[name] = float(of_valid.mean())
        facts |= {f"{name}_p{percent}": float(of_valid.quantile(percent / 100)) for percent in PERCENTILES}
    if compared := [row[valid] for row, valid in zip(value, is_valid, strict=True) if valid.sum() > 1]:
        facts[f"{name}_std"] = float(torch.stack([row.std(correction=0) for row in compared]).mean())
    return facts


@dataclass(frozen=True)
class Groups:
    """The groups of a batch on the ranks of a run. Scores and advantages are [N, members], a group in each row."""

    num_rollout: int
    ranks: int = 1
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def members(self) -> range:
        """Those of each group that this rank rolls out."""
        share = self.num_rollout // self.ranks
        first = self.dims.dp_rank % self.ranks * share
        return range(first, first + share)

    def gathered(self, scores: Mapping[str, Scores]) -> dict[str, Scores]:
        """The scores of all groups of all ranks, from those of each rank's members; the same on every rank."""
        with places.at("gathering the scores of all ranks"):
            of_ranks = distributed.all_gather_object(dict(scores))
        of_ranks = of_ranks[self.dims.cp_rank :: self.dims.context_parallel_size]

        def rows(parts: list[Tensor]) -> Tensor:
            batches = [parts[i : i + self.ranks] for i in range(0, len(parts), self.ranks)]
            return torch.cat([torch.cat(batch, dim=1) for batch in batches])

        return {name: _joined([each[name] for each in of_ranks], rows) for name in scores}

    def own(self, value_N_G: Tensor) -> Tensor:
        """This rank's part of a number for each sample of all groups."""
        rows = value_N_G.chunk(self.dims.dp_size // self.ranks)[self.dims.dp_rank // self.ranks]
        return rows[:, self.members.start : self.members.stop]


# --- one rank asks for all that hold the same clips


class OneRank:
    """`Reward` for a group of ranks (default: all) with the same clips: its first rank talks, the others wait.

    They wait at a named place and for a limited time; the group must be able to send CPU tensors.
    """

    def __init__(self, reward: Reward, group: dist.ProcessGroup | None = None, margin_s: float = MARGIN_S) -> None:
        self.reward, self.group, self.margin_s = reward, group, margin_s
        self.needs_pixels = reward.needs_pixels
        self._is_on = dist.is_available() and dist.is_initialized()
        self._first = dist.get_global_rank(group, 0) if self._is_on and group is not None else 0
        self._talks = not self._is_on or dist.get_rank() == self._first

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        return self.reward.submit(clips, context, request_id) if self._talks else Ticket(request_id)

    def probe(self, clips: Clips, context: Mapping[str, Any], deadline: float) -> None:
        if self._talks and self.reward.probe is not None:
            self.reward.probe(clips, context, deadline)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        packed, failure = b"", None
        if self._talks:
            try:
                found = self.reward.fetch(ticket, deadline)
                lists = {name: part.float().tolist() for name, part in found.parts.items()}
                whole = dict(value=found.value_B.tolist(), is_valid=found.is_valid_B.tolist(), parts=lists)
                packed = json.dumps(whole).encode()
            except Exception as error:  # the others must not wait in vain for what went wrong here
                failure = error
        if self._is_on:
            place = f"scores of request {ticket.request_id}"
            with places.at(place):
                packed = self._sent(packed, place, max(deadline, 0.0) + self.margin_s)
        if failure is not None:
            raise failure
        if not packed:
            raise RuntimeError(f"rank {self._first} failed to fetch the scores of {ticket.request_id}; see its log")
        content = json.loads(packed)
        parts = {name: torch.tensor(part) for name, part in content["parts"].items()}
        return Scores(torch.tensor(content["value"]), torch.tensor(content["is_valid"]), parts)

    def _sent(self, packed: bytes, place: str, limit_s: float) -> bytes:
        """The bytes of the rank that talks, on every rank."""
        size = torch.tensor([len(packed)])
        self._broadcast(size, place, limit_s)
        data = torch.tensor(list(packed) if self._talks else [0] * int(size), dtype=torch.uint8)
        if len(data):
            self._broadcast(data, place, limit_s)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: Tensor, place: str, limit_s: float) -> None:
        try:
            work = dist.broadcast(tensor, self._first, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            found = f"rank {dist.get_rank()} waited in vain for the {place} (limit: {limit_s:g} s)"
            raise RuntimeError(f"{found}: {error}") from error


# --- before anything is built


def check_data(rl: RLConfig, context: CheckContext) -> Iterator[Finding]:
    """Errors of rewards that require what a data set does not have (``requires`` of their classes) or that are waited
    for too long, and of conditioning frames that data without true clips do not have."""
    limit = distributed.timeout_s()
    if context.config is not None:
        limit = min(limit, context.config.trainer.timeout_period)
    for name, reward in reward_configs(rl).items():
        if reward.deadline + LAST_LOOK_S >= limit:
            text = f"{reward.deadline:g} s, but ranks that wait, and the watchdog, give up after {limit:g} s"
            yield error(f"{KEY}.rewards.{name}.deadline", text, "Lower it, or raise trainer.timeout_period")
        made = resolve(reward.make, "reward")
        required = made.requires if isinstance(made, Compares) else ()
        for key, data in context.training.items():
            for missing in (one for one in required if lacks(data, one)):
                text = f"it compares with '{missing}', which {target_of(data).__name__} ({key}) does not have"
                yield error(f"{KEY}.rewards.{name}", text, "Choose a reward of the clip alone, or data with it")
    for key, data in context.training.items():
        true_frames = facts_of(data).num_true_frames
        if true_frames is not None and rl.max_num_conditional_frames > true_frames:
            text = f"{rl.max_num_conditional_frames}, but samples of {key} have {true_frames} true frames"
            yield error(f"{KEY}.max_num_conditional_frames", text, f"Set it to {true_frames}, and the smallest too")


def lacks(data: Mapping[str, Any], name: str) -> bool:
    """True where a data set is known to have no such thing in its samples."""
    facts = facts_of(data)
    if name in ("true_video", "true_latents"):
        return facts.num_true_frames is not None
    return name == "actions" and facts.has_actions is False
