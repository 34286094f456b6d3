# SPDX-License-Identifier: Apache-2.0
"""A reward of which one rank asks, on behalf of ranks that hold the same clips."""

import json
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, Reward, Scores, Ticket
from imaginaire.distributed import places

log = logging.getLogger(__name__)

MARGIN_S = 30.0  # that the others wait longer than the first rank may take


class OneRank:
    """`Reward` for a group of ranks (default: all) with the same clips: its first rank talks, the others wait.

    They wait at a named place and for a limited time; the group must be able to send CPU tensors.
    """

    def __init__(self, reward: Reward, group: dist.ProcessGroup | None = None, margin_s: float = MARGIN_S) -> None:
        self.reward = reward
        self.group = group
        self.margin_s = margin_s
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
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
        if not self._talks:
            data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self._broadcast(data, place, limit_s)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: Tensor, place: str, limit_s: float) -> None:
        try:
            work = dist.broadcast(tensor, self._first, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} waited in vain for the {place} (limit: {limit_s:g} s): {error}"
            ) from error
