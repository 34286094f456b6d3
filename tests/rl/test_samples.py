# SPDX-License-Identifier: Apache-2.0
"""Samples of clips keep what is theirs: when groups are chosen and joined, in micro-batches, for the data term; and
scores of groups that several ranks share come back to the clips they are of."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.rollout import Forward, KeptStep, MicroBatch, Rollout, RowDraws, Samples
from cosmos_predict2.rl.clips.scoring import Groups
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.interfaces import Scores
from cosmos_predict2.rl.learner import Experience
from imaginaire import distributed
from imaginaire.distributed.parallel import ParallelDims, current_dims
from imaginaire.errors import DataError
from tests.multiprocess import run_distributed
from tests.rl.runs import CONFIG, rl_options, run
from tests.training import train

LEVELS = [4.0, 2.0, 1.0]


def video(numbers: Tensor) -> Tensor:
    return numbers.float()[:, None, None, None, None].expand(-1, 1, 2, 1, 1).clone()


def number(tensor: Tensor) -> float:
    """The value of one clip, whose numbers are all the same."""
    assert tensor.min() == tensor.max()
    return float(tensor.flatten()[0])


def rollout(first: int, size: int = 3, num_tokens: int = 1) -> Rollout:
    """Two members of each of some conditions."""
    numbers = torch.arange(first, first + size).float()
    text = numbers[:, None, None].expand(-1, num_tokens, 1).clone()
    condition = Condition(text, fps_B=numbers, gt_frames_B_C_T_H_W=video(numbers))
    places = torch.cartesian_prod(100 + numbers.long(), torch.arange(2))
    clips = 10.0 * (places[:, 0] - 100) + places[:, 1]
    parts = [video(clips + 0.1 * i) for i in range(5)]
    conditions = (condition, replace(condition, crossattn_emb_B_S_E=-text))
    kept = {k: KeptStep(k, parts[k], parts[k + 1], parts[k], parts[k], parts[k]) for k in (0, 2)}
    forwards = {1: Forward(parts[0], parts[1], clips, parts[2], parts[3])}
    samples = Samples(torch.arange(2 * size) // 2, places, parts[4], parts[0], None, LEVELS, kept, forwards)
    return Rollout(samples, conditions, video(numbers), condition, RowDraws(0, 0))


def groups(found: Rollout, *numbers: int) -> Rollout:
    """Some of its groups, of two members each."""
    return found.rows((2 * torch.tensor(numbers)[:, None] + torch.arange(2)).flatten())


def clips_of(found: Rollout) -> list[float]:
    """The numbers of its clips; raises where anything of a clip is of another."""
    clips, samples = [], found.samples
    for i in range(len(samples)):
        one, row = slice(i, i + 1), samples.rows_B[i : i + 1]
        clip = round(number(samples.final[one]))
        condition, unconditional = found.conditions_of(one)
        assert unconditional is not None and condition.gt_frames_B_C_T_H_W is not None
        of_condition = [condition.crossattn_emb_B_S_E, -unconditional.crossattn_emb_B_S_E]
        of_condition += [condition.gt_frames_B_C_T_H_W, found.true_latents[row]]
        of_condition += [found.data_condition.rows(row).crossattn_emb_B_S_E]
        assert [number(each) for each in of_condition] == [clip // 10] * 5
        assert samples.places_B_2[i].tolist() == [100 + clip // 10, clip % 10]
        tensors = [samples.noise, *vars(samples.forwards[1]).values()]
        tensors += [value for each in samples.kept.values() for value in vars(each).values()]
        assert {int(number(each[one]) + 0.01) for each in tensors if isinstance(each, Tensor)} == {clip}
        clips.append(clip)
    return clips


def test_groups_that_are_chosen_and_joined_keep_what_is_theirs() -> None:
    first, second, third = rollout(0), rollout(3), rollout(6, 2)
    assert clips_of(first) == [0, 1, 10, 11, 20, 21]
    chosen = groups(first, 0, 2)
    assert clips_of(chosen) == [0, 1, 20, 21]
    joined = chosen.with_others([groups(second, 1), third])
    assert clips_of(joined) == [0, 1, 20, 21, 40, 41, 60, 61, 70, 71]
    assert clips_of(groups(joined, 3, 1, 2)) == [60, 61, 20, 21, 40, 41]
    plain = replace(first, conditions=(first.data_condition, None))
    assert groups(plain, 1).with_others([plain]).conditions_of(slice(0, 2))[1] is None
    with pytest.raises(DataError, match=r"\[1, 2\] tokens"):
        first.with_others([rollout(3, num_tokens=2)])


def parts_of(found: Rollout, **options: Any) -> list[MicroBatch]:
    """The micro-batches of an experience in which an advantage is its clip's number."""
    rl = RLConfig(rollout_batch=2, train_on=[0, 2], **options)
    config = SimpleNamespace(draw_sigma=lambda uniform, is_image: uniform.sum(dim=1).double())
    ours: Any = SimpleNamespace(rl=rl, config=config)
    ours._data, ours._chunks = partial(FlowGRPOModel._data, ours), partial(FlowGRPOModel._chunks, ours)
    clips = torch.tensor([number(one) for one in found.samples.final]).unflatten(0, (-1, 2))
    count, parts = FlowGRPOModel.minibatches(ours, Experience(found, clips, clips.any(dim=1), {"reward": 1.0}), {})
    whole = list(parts)
    assert len(whole) == count
    return whole


@pytest.mark.parametrize("is_same", [True, False])
def test_micro_batches_have_the_parts_of_their_own_clips(is_same: bool) -> None:
    """In 3 updates of 3 minibatches, each of which has 4 clips at 2 steps once, in batches of two and in any order."""
    found = groups(rollout(0), 2, 0).with_others([rollout(3), rollout(6, 1)])
    options = dict(data_beta=1.0, use_rl_sigma_and_noise=is_same)
    parts, drawn = parts_of(found, updates=3, minibatches=3, **options), []
    assert [part.is_before_update for part in parts] == [True] * 4 + [False] * 32
    assert [bool(part.facts) for part in parts] == [True] + [False] * 35
    orders = set()
    for update in range(9):
        own = parts[4 * update : 4 * update + 4]
        clips = clips_of(found)[update % 3 * 4 :][:4]
        pairs = Counter((clip, part.kept.k) for part in own for clip in part.advantage_B.tolist() if part.kept)
        assert pairs == Counter((clip, k) for clip in clips for k in (0, 2))
        orders.add(tuple(part.kept.k for part in own if part.kept))
    assert len(orders) > 1
    for part in parts:
        assert part.kept is not None and part.data is not None and part.unconditional is not None
        for i, clip in enumerate(part.advantage_B.tolist()):
            of_condition = [part.condition.crossattn_emb_B_S_E, -part.unconditional.crossattn_emb_B_S_E]
            of_condition += [part.data.x0_B_C_T_H_W, part.data.condition.crossattn_emb_B_S_E]
            assert [number(each[i]) for each in of_condition] == [clip // 10] * 4
            assert number(part.noise_B_C_T_H_W[i]) == pytest.approx(clip + 0.4)
            assert number(part.kept.x_B_C_T_H_W[i]) == pytest.approx(clip + 0.1 * part.kept.k)
            if is_same:
                assert torch.equal(part.data.epsilon_B_C_T_H_W, part.noise_B_C_T_H_W)
                assert part.data.sigma_B_1.flatten().tolist() == [LEVELS[part.kept.k]] * 2
            drawn.append((part.data.epsilon_B_C_T_H_W[i].sum().item(), part.data.sigma_B_1[i].item()))
    if not is_same:  # for each clip at each step, the same in all updates
        assert [len({one[i] for one in drawn}) for i in range(2)] == [12 * 2] * 2


def test_the_order_of_steps_is_that_of_the_update_and_of_the_experience() -> None:
    def order(seed: int, first: int, update: int) -> list[int]:
        return RowDraws(seed, first).permutation(20, f"order{update}")

    orders = [order(seed, position, update) for seed in (0, 1) for position in (3, 9) for update in (0, 1)]
    assert all(sorted(one) == list(range(20)) for one in orders) and order(0, 3, 1) == orders[1]
    assert len({tuple(one) for one in orders}) == 8


def test_the_data_term_is_with_each_step_or_with_the_first_of_each_clip() -> None:
    for options, expected in ((dict(), 8), (dict(data_on_first_only=True), 4)):
        parts = parts_of(rollout(0, 4), data_beta=1.0, **options)
        having = [part for part in parts if part.data is not None]
        assert len(having) == expected and len({float(part.advantage_B[0]) for part in having}) == 4
        assert all(part.data is not None for part in parts[:4])  # four batches of clips at the first of two steps
    assert all(part.data is None for part in parts_of(rollout(0, 4)))


@pytest.mark.parametrize(("options", "teaches"), [(dict(), [False, True]), (dict(kl_beta=1.0), [True, True])])
def test_minibatches_without_an_advantage_teach_where_something_else_does(
    options: dict[str, float], teaches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rollout(0, 2)
    found = replace(found, samples=replace(found.samples, final=video(torch.tensor([0, 0, 0, 5]))))
    parts = parts_of(found, minibatches=2, **options)
    assert [part.teaches for part in parts] == [value for value in teaches for _ in range(2)]
    of_ranks = lambda value, how: (torch.maximum if how == "max" else torch.minimum)(value, torch.tensor([1.0, 0.0]))  # noqa: E731
    monkeypatch.setattr(distributed, "all_reduce_", of_ranks)  # another rank has something to learn in the first
    assert all(part.teaches for part in parts_of(found, minibatches=2, **options))


def test_figures_of_groups_are_those_of_dynamic_sampling() -> None:
    assert parts_of(rollout(0))[0].facts == {"reward": 1.0}
    assert {"reward", "rollouts", "groups_with_spread"} < set(parts_of(rollout(0), max_rollouts=2)[0].facts)


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
