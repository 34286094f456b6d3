# SPDX-License-Identifier: Apache-2.0
"""A rollout leaves to train on what it did: its noise, its levels, its true clips; and what a loss adds up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.diffusion.rectified_flow import karras_sigmas
from cosmos_predict2.diffusion.transitions import Chain, ChurnChain, FlowChain
from cosmos_predict2.rl.clips.rollout import (
    ChainPath,
    RowDraws,
    joined,
    mapped,
    roll_out,
)
from cosmos_predict2.rl.config import RLConfig, passes_of
from cosmos_predict2.rl.learner import WeightCopy
from tests.rl.runs import LORA, NAME, RL, rl_options, run
from tests.training import run_dir

REFERENCE = [f"{RL}.kl_beta=0.1", "optimizer.lr=1e-2"]


@pytest.mark.slow
def test_the_reference_follows_after_so_many_iterations(tmp_path: Path) -> None:
    """It is where the weights were: the distance is 0 at first, grows, and is 0 again where it followed."""
    options = [*REFERENCE, *LORA, f"{RL}.update_ref_every_iter=2", "trainer.max_iter=4", "checkpoint.save_iter=4"]
    records = run(tmp_path, *rl_options("tiny_flow_grpo_toy_world", *options))
    assert [record["train/kl_loss"] > 0 for record in records] == [False, True, False, True]


STARTS: dict[str, tuple[list[str], list[list[str]]]] = {
    "file": (["ckpt_type=standard"], [[]]),
    "adapters": (["ckpt_type=standard", *LORA], [[]]),
    "shards": (["ckpt_type=dcp"], [[], ["checkpoint.load_training_state=true", "trainer.max_iter=2"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(s, marks=pytest.mark.long if s == "shards" else ()) for s in STARTS])
def test_the_reference_is_what_a_run_started_from(start: str, tmp_path: Path) -> None:
    """Weights of a run without one (supervised, say), in each layout: the distance of a first step is 0."""
    options, afterwards = STARTS[start]
    once = rl_options("tiny_flow_grpo_toy_world", *options, "trainer.max_iter=1", "checkpoint.save_iter=1")
    run(tmp_path / "first", *once, "optimizer.lr=1e-2")
    path = f"checkpoint.load_path={run_dir(tmp_path / 'first', NAME)}"
    for i, more in enumerate(afterwards):
        assert run(tmp_path / str(i), *once, *REFERENCE, path, *more)[0]["train/kl_loss"] == 0


KEPT: list[tuple[Chain, dict[str, Any], int]] = [
    (FlowChain(torch.linspace(0.9, 0.1, 11).tolist()), dict(transition="sde"), 9 + 8),
    (ChurnChain(karras_sigmas(10).tolist()), dict(transition="churn"), 9 + 8 + 7),
    (ChurnChain(karras_sigmas(10).tolist(), solver="1euler"), dict(transition="churn", solver_option="1euler"), 9 + 8),
]


@pytest.mark.parametrize(("chain", "options", "num"), KEPT)
def test_what_a_rollout_keeps_is_kept_once(chain: Chain, options: dict[str, Any], num: int) -> None:
    """A state that one step ends in and the next begins with, on the device and on the host; a plan knows how many."""
    rl = RLConfig(**options)
    path = ChainPath(chain, lambda x, level: 0.5 * x, lambda x: x)
    parts = [roll_out(path, torch.randn(1, 2), lambda k: torch.randn(1, 2), rl.train_on)[1] for _ in range(2)]
    kept = joined(parts)
    for found in (kept, mapped(kept, Tensor.clone)):
        tensors = [one for step in found.values() for one in vars(step).values() if isinstance(one, Tensor)]
        assert len({one.data_ptr() for one in tensors}) == num
        assert torch.equal(found[0].x_next_B_C_T_H_W, found[1].x_B_C_T_H_W) and len(tensors[0]) == 2
    assert passes_of(rl, 1, is_flow_model=False).kept_latents == num


def _normal(seed: int = 0, position: int = 3, member: int = 0, purpose: str = "start") -> Tensor:
    return RowDraws(seed, 0).normal((8,), torch.tensor([[position, member]]), purpose)


@pytest.mark.parametrize("change", [dict(seed=1), dict(position=4), dict(member=1), dict(purpose="step0")])
def test_noise_follows_from_seed_place_member_and_purpose(change: dict[str, Any]) -> None:
    assert torch.equal(_normal(), _normal())
    assert not torch.equal(_normal(), _normal(**change))


def test_a_copy_follows_by_its_decay_and_gives_the_own_weights_back() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    module.register_parameter("frozen", nn.Parameter(torch.zeros(1), requires_grad=False))
    copy = WeightCopy(module)
    assert set(copy.weights) == {"weight"}
    nn.init.ones_(module.weight)
    copy.follow(module, 0.75)
    with pytest.raises(RuntimeError), copy.scope(module):
        assert module.weight.item() == 0.25
        raise RuntimeError
    assert module.weight.item() == 1
