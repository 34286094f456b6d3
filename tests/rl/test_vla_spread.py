# SPDX-License-Identifier: Apache-2.0
"""Experience that does not teach: it is not computed, it counts in the divisor as published, and an update of which
nothing is learnt leaves the policy as it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.episodes import decisions
from cosmos_predict2.rl.episodes.config import PolicyLossConfig
from cosmos_predict2.rl.episodes.episodes import Starts, Trajectories
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.objectives import AGGREGATIONS
from imaginaire import distributed
from tests.multiprocess import run_distributed
from tests.rl.vla_runs import RL, collected, experience, model, run
from tests.training import difference, saved, states, steps

ADVANTAGE = torch.tensor([[0.0] * 4, [1.5, -0.5, 0.0, -1.0], [0.0] * 4])


def gradient(one: VLAGRPOModel, parts: list[Any]) -> Tensor:
    one.net.zero_grad()
    for part in parts:
        (one.training_step(part, 0)[1] / one.rl.micro_batches).backward()
    return torch.cat([weight.grad.flatten() for weight in one.net.parameters() if weight.grad is not None])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["element", "chunk"])
def test_decisions_without_an_advantage_are_not_computed_and_stay_in_the_divisor(aggregation: str, level: str) -> None:
    loss = PolicyLossConfig(aggregation=aggregation, ratio_level=level, max_episode_steps=24)
    one, played = collected(micro_batches=2, loss=loss)
    played.executed_M_E_A[1, ::3] = False  # episodes of one decision among others of two
    with mock.patch.object(one.net, "log_prob", wraps=one.net.log_prob) as computed:
        found = gradient(one, experience(one, played, ADVANTAGE))
    count = int(played.executed_M_E_A.any(dim=2)[:, [4, 5, 7]].sum())
    of_calls = [len(call.args[0]["knots"]) for call in computed.call_args_list]
    assert sum(of_calls) == 2 * count  # before, and with gradients
    with mock.patch.object(decisions, "taught", lambda whole, rl: whole.mask_B_A.any(dim=1)):
        whole = gradient(one, experience(one, played, ADVANTAGE))
    assert whole.abs().max() > 0
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [dict(loss=PolicyLossConfig(entropy_bonus=0.1)), dict(kl_beta=0.1)])
def test_terms_that_need_no_advantage_are_of_all_decisions(options: dict[str, Any]) -> None:
    one, played = collected(**options)
    (part,) = experience(one, played, torch.zeros(3, 4))
    assert len(part.advantage_B) == 24 and part.mask_B_A.all()
    assert part.teaches is ("loss" in options), "the distance alone takes no step"
    (part,) = experience(one, played, ADVANTAGE)
    assert len(part.advantage_B) == 24 and part.teaches


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_groups_out_of_bounds_leave_the_divisor_and_groups_that_end_alike_stay(aggregation: str) -> None:
    """As the published mask has it, whose golden `policy_losses` reproduces."""
    loss = PolicyLossConfig(aggregation=aggregation, max_episode_steps=24, entropy_bonus=0.1)
    one, played = collected(loss=loss, lower_bound=0.1, upper_bound=0.9)
    rewards = torch.zeros_like(played.reward_M_E_A)
    rewards[-1, :, -1] = torch.tensor([1.0] * 4 + [0.0, 1.0, 0.0, 0.0] + [0.5] * 4)  # above, within, within and alike
    played = replace(played, reward_M_E_A=rewards)
    (found,) = experience(one, played)
    assert found.mask_B_A.any(dim=1).sum() == 16
    inner = played.rows(torch.arange(4, 12))
    (expected,) = experience(one, inner)
    if aggregation != "token-mean-of-steps":  # whose divisor is the size of the whole rollout, as published
        torch.testing.assert_close(gradient(one, [found]), gradient(one, [expected]), rtol=1e-4, atol=1e-7)
    plain = model(lower_bound=0.1, upper_bound=0.9)
    (teaching,) = experience(plain, played)
    assert len(teaching.advantage_B) == 8 and teaching.share == pytest.approx(0.5)


def test_a_minibatch_of_which_nothing_is_learnt_has_no_gradient() -> None:
    one, played = collected(minibatches=3)
    advantage = torch.zeros(3, 4)
    for parts, expected in (
        (experience(one, played, advantage), []),
        (experience(one, played, advantage + 1), [0, 1, 2]),
    ):
        assert [i for i, part in enumerate(parts) if part.teaches] == expected
        for part in parts:
            assert gradient(one, [part]).any() == one.has_gradient() == part.teaches


# --- runs

RUN = [
    *(f"{RL}.kl_beta=0", f"{RL}.updates=1", f"{RL}.minibatches=1"),
    *("scheduler=lambdalinear", "scheduler.cycle_lengths=[8]", "scheduler.warm_up_steps=[1]", "scheduler.f_min=[0.1]"),
]


def advantages(spread: dict[int, list[int]]) -> Any:
    """Patched: the groups of an experience have spread on these ranks alone."""
    advantages = VLAGRPOModel._advantages

    def patched(self: VLAGRPOModel, played: Trajectories, starts: Starts) -> Tensor:
        found = advantages(self, played, starts)
        ranks = spread.get(int(self.progress_counts[0]), [0, 1])
        found[:, ::2], found[:, 1::2] = 1.0, -1.0
        return found if distributed.rank() in ranks else torch.zeros_like(found)

    return mock.patch.object(VLAGRPOModel, "_advantages", patched)


def test_an_update_without_spread_leaves_policy_and_moments_and_the_run_resumes(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with advantages({1: [], 3: []}):
        with states() as found:
            records = run(whole, *RUN, "trainer.max_iter=5")
        for last in (2, 4, 5):  # it stops after each update that is left out
            run(parts, *RUN, f"trainer.max_iter={last}")
    assert steps(found) == [False, True, False, True]
    assert len({state["rate"] for state in found}) == 5  # the schedule goes on
    assert difference(saved(whole, "vla"), saved(parts, "vla")) is None
    assert int(saved(whole, "vla")["model"]["progress_counts"][0]) == 5
    assert [record["train/groups_with_spread"] > 0 for record in records[:5]] == [True, False, True, False, True]


def _spread(root: Path) -> list[bool]:
    with advantages({1: [1], 2: []}), states() as found:
        run(root, *RUN, "trainer.max_iter=4")
    return steps(found)


@pytest.mark.slow
def test_all_ranks_take_a_step_where_one_has_spread_and_none_where_none_has(tmp_path: Path) -> None:
    assert run_distributed(_spread, world_size=2, args=(tmp_path,), timeout=900) == [[True, False, True]] * 2
