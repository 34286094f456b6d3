# SPDX-License-Identifier: Apache-2.0
"""Cloning the best episode of each group, and its control, a random one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.episodes.config import VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.learner import Experience
from cosmos_predict2.rl.objectives import chosen
from imaginaire.config import L
from tests.rl.policies.seen import generators
from tests.rl.vla_runs import RL, batch, collected, model, run
from tests.training import difference, saved


def test_one_valid_episode_of_each_group_with_spread_is_chosen() -> None:
    rewards = torch.tensor([[0.1, 0.9, 0.9, 0.2], [0.5, 0.5, 0.5, 0.5], [0.3, 0.8, 0.1, 0.0]])
    valid = torch.ones_like(rewards, dtype=torch.bool)
    valid[2, 1] = False
    best = chosen("best", rewards, valid, generators(3))
    assert best.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    many = torch.stack([chosen("random", rewards, valid, generators(3, seed)) for seed in range(0, 1200, 3)])
    assert (many.sum(dim=2) == torch.tensor([1.0, 0.0, 1.0])).all(), "as many as of the best"
    shares = many.mean(dim=0)
    assert shares[2, 1] == 0 and (shares[0] - 0.25).abs().max() < 0.07
    assert (shares[2, [0, 2, 3]] - 1 / 3).abs().max() < 0.07


def gradient(one: VLAGRPOModel, loss: Tensor) -> Tensor:
    one.net.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in one.net.parameters() if weight.grad is not None])


def parts_of(one: VLAGRPOModel) -> tuple[Experience, list[Any]]:
    found = one.collect(batch())
    return found, list(one.minibatches(found, batch())[1])


def pi05(tmp_path: Path, **rl: Any) -> VLAGRPOModel:
    from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
    from cosmos_predict2.rl.policies.pi05.tiny import write_tiny

    write_tiny(tmp_path / "pi05", sentences=["push the puck into the ring"])
    return model(L(Pi05Policy)(path=str(tmp_path / "pi05"), noise_method="flow_sde"), **rl)


@pytest.mark.parametrize("kind", ["toy", "pi05"])
def test_the_best_of_a_group_is_cloned_by_the_loss_that_the_policy_is_cloned_with(kind: str, tmp_path: Path) -> None:
    one = pi05(tmp_path, objective="best_of_n") if kind == "pi05" else collected(objective="best_of_n")[0]
    found, (part,) = parts_of(one)
    returns = found.record.return_E.unflatten(0, (-1, 4))
    groups = found.teaches_G.nonzero().flatten()
    best = returns.argmax(dim=1)[groups]
    assert len(groups) and torch.equal(found.advantage_G_M.argmax(dim=1)[groups], best)
    one._draws = torch.Generator().manual_seed(7)
    learnt = gradient(one, one.training_step(part, 0)[1])
    record = dict(part.record)  # the decisions of the best, in the order of the minibatch
    name = "chains" if kind == "pi05" else "knots"
    rows = torch.cat([4 * groups + best, 4 * groups + best + 12])  # of two decisions each
    chosen_rows = found.record.record[name].flatten(0, 1)[rows]
    assert sorted(record[name].flatten(1).tolist()) == sorted(chosen_rows.flatten(1).tolist())
    if kind == "pi05":
        record["actions"] = record["chains"][:, -1]
    loss = one.net.cloning_loss(record, torch.Generator().manual_seed(7)) * len(rows) / 24
    torch.testing.assert_close(learnt, gradient(one, loss), rtol=1e-4, atol=1e-7)


def test_a_policy_becomes_likelier_to_do_what_was_best_and_the_run_resumes(tmp_path: Path) -> None:
    options = [f"{RL}.objective=best_of_n", f"{RL}.updates=1", f"{RL}.minibatches=1", f"{RL}.kl_beta=0.1"]
    records = run(tmp_path / "whole", *options, "trainer.max_iter=4")
    for last in (2, 4):
        run(tmp_path / "parts", *options, f"trainer.max_iter={last}")
    assert difference(saved(tmp_path / "whole", "vla"), saved(tmp_path / "parts", "vla")) is None
    assert records[-1]["train/advantage_max"] == 1 and records[-1]["train/advantage_min"] == 0


def test_a_step_towards_the_best_makes_it_likelier_and_the_others_not() -> None:
    one, _ = collected(objective="best_of_n")
    found, (part,) = parts_of(one)
    optimizer = torch.optim.SGD(one.net.parameters(), lr=0.05)
    gradient(one, one.training_step(part, 0)[1])
    optimizer.step()
    moved = one.net.log_prob(part.record).log_prob_B_K_N - part.old_log_prob_B_K_N
    assert moved.mean() > 0 and len(part.advantage_B) == 2 * found.teaches_G.sum(), "those of the best alone"


def test_a_part_without_a_chosen_decision_has_a_loss_of_0() -> None:
    one, _ = collected(objective="best_of_n", kl_beta=0.1)
    one.keep_reference()
    found = one.collect(batch())
    found.advantage_G_M = torch.zeros_like(found.advantage_G_M)
    (part,) = one.minibatches(found, batch())[1]
    assert not part.teaches and one.training_step(replace(part, share=1.0), 0)[1].item() == 0


def test_clips_have_no_episodes_to_choose_of() -> None:
    problems = dict(RLConfig(objective="best_of_n", rewards={"one": {"make": "x:y"}}).problems())
    assert "advantage.norm=sft" in problems["objective"]
    assert "clips no ratios" in dict(VLARLConfig(objective="random_of_n", dual_clip=3.0).problems())["dual_clip"]
