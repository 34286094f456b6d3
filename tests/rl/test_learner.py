# SPDX-License-Identifier: Apache-2.0
"""The loop of reinforcement learning: what it asks for, what all ranks agree on, its reference and checks; and which
members its parts may lack."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.interfaces import EnvDefaults, FrameRewardDefaults, PolicyDefaults, RewardDefaults, completed
from cosmos_predict2.rl.learner import Experience, require_ratio_one
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire import distributed
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, TrainingError
from tests.rl.vla_runs import batch, collected, experience, model


def rollouts(one: Any, *taught: list[int]) -> tuple[list[Any], Any]:
    """Calls of `collect`, which gives three groups each time, of which these teach something; and its replacement."""
    calls: list[Any] = []
    played = one.source.collect(one.starts(batch()))

    def collect(given: Any, first: Any = None) -> Experience:
        calls.append((given, first))
        advantage = torch.zeros(3, 4)
        advantage[taught[len(calls) - 1]] = len(calls)
        return Experience(replace(played), advantage, advantage.any(dim=1), {"number": float(len(calls))})

    return calls, mock.patch.object(one, "collect", collect)


def test_further_rollouts_are_of_further_batches_and_join_the_first() -> None:
    one = model(max_rollouts=3)
    calls, patched = rollouts(one, [1], [], [0, 2])
    batches = [batch(first) for first in (0, 10, 20, 30)]
    left = iter(batches[1:])
    with patched:
        found = one.experience(batches[0], left)
    assert [given for given, _ in calls] == batches[:3] and next(left) is batches[3]
    assert [first for _, first in calls] == [None, calls[1][1], calls[1][1]] and calls[1][1] is not None
    assert found.num_rollouts == 3 and found.advantage_G_M.tolist() == [[1.0] * 4, [3.0] * 4, [3.0] * 4]


@pytest.mark.parametrize("others_have_enough", [True, False])
def test_a_rank_with_enough_groups_rolls_out_as_long_as_others_need_some(others_have_enough: bool) -> None:
    one = model(max_rollouts=4)
    calls, patched = rollouts(one, [0, 1, 2], *[[]] * 3)

    def of_ranks(value: Tensor, how: str) -> Tensor:
        return (torch.minimum if how == "min" else torch.maximum)(value, torch.tensor(float(others_have_enough)))

    with patched, mock.patch.object(distributed, "all_reduce_", of_ranks):
        found = one.experience(batch(), iter([batch()] * 3))
    assert len(calls) == (1 if others_have_enough else 4)
    assert found.advantage_G_M.tolist() == [[1.0] * 4] * 3


def test_figures_of_groups_are_of_those_that_are_learnt_from() -> None:
    advantage = torch.tensor([[0.5, -2.0], [0.0, 0.0]])
    facts = Experience(None, advantage, advantage.any(dim=1), {}, num_rollouts=2).group_facts
    assert facts == {"groups_with_spread": 0.5, "rollouts": 2.0, "advantage_max": 0.5, "advantage_min": -2.0}


def test_whether_an_update_has_a_gradient_is_that_of_its_last_micro_batch() -> None:
    one, played = collected()
    (part,) = experience(one, played)
    found = []
    for teaches in (True, False, True):
        one.training_step(replace(part, teaches=teaches), 0)
        found.append(one.has_gradient())
    assert found == [True, False, True]


def test_the_reference_follows_whole_and_is_what_a_checkpoint_was_loaded_into() -> None:
    one = model(update_ref_every_iter=2, kl_beta=0.1)
    one.parallelize(ParallelDims())
    weight = next(one.net.parameters())
    begun = weight.detach().clone()

    def reference() -> Tensor:
        with one.reference():
            return weight.detach().clone()

    for iteration in range(4):
        with torch.no_grad():
            weight += 1.0
        one.on_before_zero_grad(None, None, iteration)
        torch.testing.assert_close(reference(), begun + 2 * ((iteration + 1) // 2))
    name = next(name for name, _ in one.net.named_parameters())
    one.checkpoint_state()[f"net_ref.{name}"].fill_(5.0)  # as a checkpoint is read
    assert (reference() == 5.0).all()
    torch.testing.assert_close(weight.detach(), begun + 4.0)


@pytest.mark.parametrize("shift", [-0.01, 0.01, torch.nan])
def test_ratios_before_the_first_update_that_are_not_one_are_refused(shift: float) -> None:
    one, played = collected()
    (part,) = experience(one, played)
    one.part_loss(part)
    other = replace(part, old_log_prob_B_K_N=part.old_log_prob_B_K_N + shift)
    with pytest.raises(TrainingError, match="ratio_tolerance"):
        one.part_loss(other)
    one.part_loss(replace(other, is_before_update=False))
    with pytest.raises(TrainingError):
        require_ratio_one(float("nan"), 1e-3, "")


class Bare:
    __slots__ = ("inner", "offload_policy")

    def __init__(self) -> None:
        self.inner, self.offload_policy = ToyEnv(4), "mine"


class Wraps:
    """An environment with the required members alone."""

    def __init__(self) -> None:
        self.inner = ToyEnv(4)
        self.num_envs, self.metadata = self.inner.num_envs, self.inner.metadata

    def reset(self, **numbers: Any) -> Any:
        return self.inner.reset(**numbers)

    def chunk_step(self, *arguments: Any) -> Any:
        return self.inner.chunk_step(*arguments)


class Decides(torch.nn.Module):
    """A policy with the required members alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ToyPolicy(width=8)

    def act(self, *arguments: Any, **named: Any) -> Any:
        return self.inner.act(*arguments, **named)

    def log_prob(self, record: Any) -> Any:
        return self.inner.log_prob(record)


def test_objects_get_the_optional_members_that_they_lack_and_keep_their_own() -> None:
    one: Any = completed(Bare(), EnvDefaults)
    assert (one.keep_frames, one.offload_policy, one.imagination, one.release) == (None, "mine", None, None)
    one.offload()
    assert completed(None, EnvDefaults) is None
    assert not hasattr(object, "offload")
    with pytest.raises(ConfigError, match=r"A SimpleNamespace has no .* use a class"):
        completed(SimpleNamespace(), EnvDefaults)


@pytest.mark.parametrize("defaults", [EnvDefaults, PolicyDefaults, RewardDefaults, FrameRewardDefaults])
def test_classes_of_defaults_complete_an_empty_class(defaults: type) -> None:
    found = completed(type("Empty", (), {})(), defaults)
    assert all(hasattr(found, name) for name in vars(defaults) if not name.startswith("_"))


def test_a_run_takes_a_policy_and_an_environment_with_the_required_members_alone() -> None:
    rl = VLARLConfig(group_size=2)
    one = VLAGRPOModel(VLAGRPOConfig(policy=L(Decides)(), env=L(Wraps)(), rl=rl))
    batch = {"task_id": torch.zeros(2, dtype=torch.long), "trial_id": torch.arange(2)}
    assert next(one.train_batches([batch])).facts["valid_rate"] == 1
    one.on_before_zero_grad(None, None, 0)
    assert "greedy_success" in one.validation_step(batch, 0)[0]
