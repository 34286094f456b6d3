# SPDX-License-Identifier: Apache-2.0
"""One rank asks for all."""

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.clips import scoring
from cosmos_predict2.rl.clips.scoring import OneRank
from cosmos_predict2.rl.interfaces import Clips, RewardDefaults, Scores, Ticket
from cosmos_predict2.rl.rewards.local import LocalReward
from imaginaire import distributed
from tests.multiprocess import run_distributed
from tests.programs import HANG_S
from tests.rl.rewards.doubles import clips_of, mean


class Failing(RewardDefaults):
    """Fails at once, or when the file of a request is there."""

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        return Ticket(request_id)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        while ticket.request_id != "quick" and not Path(ticket.request_id).exists():
            time.sleep(0.1)
        raise ArithmeticError("torn")


class Late(Failing):
    """Takes longer than the others' margin, and not as long as the deadline."""

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        time.sleep(1.5)
        return Scores(torch.tensor([2.5]), torch.tensor([True]))


def test_a_single_process_talks_itself() -> None:
    reward = OneRank(LocalReward(mean))
    scores = reward.fetch(reward.submit(clips_of("a", value=2.0), {}, "id"), 5)
    assert scores.value_B.tolist() == [2.0]


@pytest.mark.parametrize(("rank", "deadline"), [(2, 5.0), (2, -5.0), (3, -5.0)])
def test_a_group_talks_among_itself_and_waits_a_margin_longer_than_its_deadline(
    rank: int, deadline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has the ranks 2 and 3."""
    group, sent, waited, probed = object(), [], [], []

    def broadcast(tensor: torch.Tensor, source: int, *, group: Any = None, async_op: bool = False) -> Any:
        sent.append((source, group))
        if rank == 3:
            packed = torch.frombuffer(bytearray(PACKED), dtype=torch.uint8)
            tensor.copy_(packed if len(sent) == 2 else torch.tensor([len(packed)]))
        return SimpleNamespace(wait=lambda *limit: waited.append(limit))

    facts = dict(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank)
    ranks = dict(get_global_rank=lambda of, k: (2, 3)[k] if of is group else k, broadcast=broadcast)
    monkeypatch.setattr(scoring, "dist", SimpleNamespace(**facts, **ranks))
    reward = LocalReward(mean)
    reward.needs_pixels, reward.probe = True, lambda *_: probed.append(1)  # type: ignore[attr-defined]
    asks = OneRank(reward, group)  # type: ignore[arg-type]
    asks.probe(clips_of("a"), {}, 1.0)
    found = asks.fetch(asks.submit(clips_of("a", value=2.5), {}, "id"), deadline)
    assert found.value_B.tolist() == [2.5] and found.is_valid_B.tolist() == [True]
    assert found.parts["double"].tolist() == [5.0]
    assert sent == [(2, group)] * 2
    assert waited == [(timedelta(seconds=max(deadline, 0.0) + scoring.MARGIN_S),)] * 2
    assert asks.needs_pixels and len(probed) == (rank == 2)


PACKED = b'{"value": [2.5], "is_valid": [true], "parts": {"double": [5.0]}}'


def _ranks(folder: Path) -> None:
    asked = []

    def counted(clips: Clips, context: Mapping[str, Any]) -> Any:
        asked.append(1)
        return {"value": torch.tensor([1.5, float("nan")]), "part": torch.tensor([1.0, 2.0])}

    reward = OneRank(LocalReward(counted))
    scores = reward.fetch(reward.submit(clips_of("a", "b"), {}, "id"), HANG_S)
    assert len(asked) == (distributed.rank() == 0)
    assert scores.value_B.tolist() == [1.5, 0.0]
    assert scores.is_valid_B.tolist() == [True, False]
    assert scores.parts["part"].tolist() == [1.0, 2.0]

    failing = OneRank(Failing())
    with pytest.raises((ArithmeticError, RuntimeError), match="torn" if distributed.rank() == 0 else "rank 0 failed"):
        failing.fetch(Ticket("quick"), HANG_S)

    patient = OneRank(Late(), margin_s=0.5)
    assert patient.fetch(Ticket("late"), HANG_S).value_B.tolist() == [2.5]

    slow = folder / "the other has waited"
    if distributed.rank() == 0:
        with pytest.raises((ArithmeticError, RuntimeError)):
            failing.fetch(Ticket(str(slow)), 1)
    else:
        with pytest.raises(RuntimeError, match=r"in vain for the scores of request .*the other has waited"):
            OneRank(Failing(), margin_s=1.0).fetch(Ticket(str(slow)), 1)
        slow.touch()


@pytest.mark.slow
def test_one_rank_asks_and_the_others_wait_for_a_limited_time(tmp_path: Path) -> None:
    run_distributed(_ranks, world_size=2, args=(tmp_path,))
