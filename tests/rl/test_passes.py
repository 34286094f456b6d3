# SPDX-License-Identifier: Apache-2.0
"""The cost of an iteration of reinforcement learning by a plan, against a real one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.interfaces import Scores
from cosmos_predict2.rl.rewards.local import LocalReward
from cosmos_predict2.tools.plan.workload import read_workload
from imaginaire.config.compose import compose
from tests.rl.runs import CONFIG, RL, rl_options, run

CASES = {
    "churn, reference, data, guidance": (
        "tiny_ddrl_toy_world",
        [f"{RL}.transition=churn", f"{RL}.kl_beta=0.1", f"{RL}.guidance=1.5"],
    ),
    "nft": ("tiny_nft_toy_world", [f"{RL}.weight_copy_decay_type=1", f"{RL}.kl_beta=0.1"]),
    "flow model, twice, data once": (
        "tiny_ddrl_toy_world",
        [
            "model=predict2p5_video2world_rl_tiny",
            "model.config.pipe_config.state_t=4",
            f"{RL}.updates=2",
            f"{RL}.minibatches=2",
            "trainer.grad_accum_iter=2",
            "trainer.max_iter=4",
            f"{RL}.data_on_first_only=true",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_counts_the_passes_of_a_real_iteration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that all passes without a gradient come before rewards are fetched."""
    clips = {False: 0, True: 0}  # by whether there is a gradient
    at_fetch: list[dict[bool, int]] = []
    parallelize, fetch = FlowGRPOModel.parallelize, LocalReward.fetch

    def count(net: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = arguments[0] if arguments else keywords["x_B_C_T_H_W"]
        clips[torch.is_grad_enabled()] += len(x)

    def counted(self: FlowGRPOModel, dims: Any) -> None:
        parallelize(self, dims)
        self.net.register_forward_pre_hook(count, with_kwargs=True)

    def fetched(self: LocalReward, *arguments: Any) -> Scores:
        at_fetch.append(dict(clips))
        return fetch(self, *arguments)

    monkeypatch.setattr(FlowGRPOModel, "parallelize", counted)
    monkeypatch.setattr(LocalReward, "fetch", fetched)
    experiment, more = CASES[name]
    options = rl_options(experiment, *more)
    config = compose(CONFIG, options)
    passes = read_workload(config, 1).passes
    assert passes is not None
    options = [*options, f"trainer.max_iter={passes.updates}", f"checkpoint.save_iter={passes.updates}"]
    run(tmp_path, *options)
    assert clips[False] == passes.without_gradient * passes.clips == at_fetch[0][False]
    assert clips[True] == passes.with_gradient * passes.clips
    assert at_fetch[0][True] == 0
