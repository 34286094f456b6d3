# SPDX-License-Identifier: Apache-2.0
"""Groups on several ranks: who rolls out what, and that scores come back to the clips they are of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.scoring import Groups
from cosmos_predict2.rl.interfaces import Scores
from imaginaire import distributed
from imaginaire.distributed.parallel import ParallelDims, current_dims
from imaginaire.errors import DataError
from tests.multiprocess import run_distributed
from tests.rl.runs import CONFIG, rl_options, run
from tests.training import train


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scores_of_all_ranks_are_whole_groups_and_each_gets_its_own_back(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processes of which pairs are context-parallel, two conditions a batch; a score names its clip."""
    every = [Groups(4, ranks, ParallelDims(8, rank, 2)) for rank in range(8)]
    of_ranks = []
    for groups in every:
        condition = torch.arange(2)[:, None] + 2 * (groups.dims.dp_rank // ranks)
        value = 10.0 * condition + torch.tensor(groups.members)
        parts = {"part": -value, **({} if groups.dims.dp_rank else {"once": value})}
        of_ranks.append({"reward": Scores(value, value > 0, parts)})
    monkeypatch.setattr(distributed, "all_gather_object", lambda value: of_ranks)
    wanted = 10.0 * torch.arange(8 // ranks)[:, None] + torch.arange(4)
    for groups, scores in zip(every, of_ranks, strict=True):
        found = groups.gathered(scores)["reward"]
        assert torch.equal(found.value_B, wanted)
        assert torch.equal(found.is_valid_B, wanted > 0)
        assert set(found.parts) == {"part"} and torch.equal(found.parts["part"], -wanted)
        assert torch.equal(groups.own(wanted), scores["reward"].value_B)


def test_a_group_teaches_on_every_rank_that_shares_it() -> None:
    """So that all of them take the same groups of further batches in place of others."""
    whole = torch.tensor([[0.0, 0.0, 1.0, -1.0], [0.0] * 4])
    for rank in range(2):
        ours: Any = mock.Mock(groups=Groups(4, 2, ParallelDims(2, rank, 1)))
        ours.scoring.fetch.return_value, ours.scoring.advantages.return_value = {}, (whole, {})
        advantage, teaches, _ = FlowGRPOModel._score(ours, [])
        assert torch.equal(advantage, whole[:, 2 * rank : 2 * rank + 2]) and teaches.tolist() == [True, False]


def test_a_rollout_has_failed_where_one_of_its_rewards_gave_nothing() -> None:
    for valid, has_failed in ((torch.tensor([[True, False]]), False), (torch.zeros(1, 2, dtype=torch.bool), True)):
        good = Scores(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        scores = {"good": good, "ill": Scores(torch.ones(1, 2), valid)}
        ours: Any = mock.Mock(groups=Groups(2))
        ours.scoring.fetch.return_value, ours.scoring.advantages.return_value = scores, (torch.zeros(1, 2), {})
        FlowGRPOModel._score(ours, [])
        named = "score of ill" if has_failed else "score of good, ill"
        assert ours.count_failure.call_args.args == (has_failed, named)


def plain(dataset: Dataset[Any], batch_size: int, **_: Any) -> DataLoader[Any]:
    """Torch's own, with a sampler that deals samples out to the ranks."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, current_dims().dp_size, current_dims().dp_rank)
    return DataLoader(dataset, batch_size, sampler=sampler)


class Opaque:
    """Something of a user's that gives batches."""

    def __init__(self, dataset: Any, batch_size: int, **_: Any) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        dims, share = current_dims(), len(self.dataset) // current_dims().dp_size
        for first in range(dims.dp_rank * share, (dims.dp_rank + 1) * share, self.batch_size):
            yield default_collate([self.dataset[first + k] for k in range(self.batch_size)])


def _trained(root: str) -> dict[str, tuple[list[int], list[float]]]:
    """By the loader, the steps that are trained, and a number that tells the noise of their rollouts."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    step = FlowGRPOModel.training_step
    for loader in ("plain", "Opaque"):
        steps, noise = found[loader] = [], []

        def noted(self: Any, batch: Any, iteration: int, steps: Any = steps, noise: Any = noise) -> Any:
            steps.append(batch.kept.k)
            noise.append(float(batch.noise_B_C_T_H_W[0].sum()))
            return step(self, batch, iteration)

        with mock.patch.object(FlowGRPOModel, "training_step", noted):
            run(Path(root) / loader, *rl_options(), f"dataloader_train._target_={__name__}.{loader}")
    return found


@pytest.mark.slow
def test_loaders_that_are_not_ours_give_ranks_the_same_steps_and_noise_of_their_own(tmp_path: Path) -> None:
    first, other = run_distributed(_trained, 2, (str(tmp_path),))
    for loader, (steps, noise) in first.items():
        other_steps, other_noise = other[loader]
        assert steps == other_steps and len(steps) == 8  # two iterations, four micro-batches each
        assert len({*noise, *other_noise}) == 8  # two conditions of each iteration on each rank, each at two steps


def test_a_shorter_last_batch_is_refused(tmp_path: Path) -> None:
    """An update has as many micro-batches as the config has."""
    with pytest.raises(DataError, match="drop_last"):
        more = [f"dataloader_train._target_={__name__}.plain", "dataloader_train.dataset.num_episodes=3"]
        train(tmp_path, [*rl_options(), *more], config=CONFIG)
