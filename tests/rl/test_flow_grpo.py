# SPDX-License-Identifier: Apache-2.0
"""Runs that learn from rewards: exact ratios, exact resumption, the same on any number of processes."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_predict2.released import tiny_video2world_path
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.rewards import verifiable
from imaginaire import distributed
from imaginaire.errors import ConfigError, TrainingError
from tests.multiprocess import run_distributed
from tests.rl.runs import CONFIG, NAME, RL, rl_options, run
from tests.training import difference, saved, states, steps, train

FLOW_GRPO, DDRL, NFT = "tiny_flow_grpo_toy_world", "tiny_ddrl_toy_world", "tiny_nft_toy_world"
LORA = ["model.config.train_architecture=lora", "model.config.lora_rank=4", "model.config.lora_alpha=4"]
TWICE = [f"{RL}.updates=2", f"{RL}.minibatches=2", "trainer.grad_accum_iter=2"]  # four updates of one experience
PREDICT2P5 = [
    "model=predict2p5_video2world_rl_tiny",
    "model.config.pipe_config.state_t=4",
    "model.config.precision=bfloat16",
    "optimizer=fusedadamw",
]
FLOAT16 = [  # the states of the tiny base are too large for it
    "model.config.precision=float16",
    "trainer.grad_scaler_args.enabled=true",
    "model.config.model_manager_config.dit_path=",
]
OFFLOAD = f"{RL}.offload_trajectories=true"

VARIANTS: dict[str, list[str]] = {
    "grpo": rl_options(),
    "twice": rl_options(FLOW_GRPO, *TWICE),
    "reference": rl_options(FLOW_GRPO, f"{RL}.kl_beta=0.1", f"{RL}.update_ref_every_iter=1", OFFLOAD),
    "dapo": rl_options(FLOW_GRPO, *TWICE, f"{RL}.clip_ratio_high=2e-3", f"{RL}.dual_clip=3", f"{RL}.max_rollouts=2"),
    "adapters": rl_options(FLOW_GRPO, *LORA, f"{RL}.kl_beta=0.1", f"{RL}.objective=dppo"),
    "ddrl": rl_options(DDRL, f"{RL}.use_rl_sigma_and_noise=false", f"{RL}.exp_reward=true"),
    "churn": rl_options(DDRL, f"{RL}.transition=churn", f"{RL}.ratio_normalisation=cosmos_rl"),
    "window": rl_options(FLOW_GRPO, f"{RL}.transition=cps", f"{RL}.noise_on_trained_steps_only=true"),
    "guided": rl_options(FLOW_GRPO, f"{RL}.guidance=1.5", f"{RL}.objective=guard", f"{RL}.transition=dance"),
    "nft": rl_options(NFT, f"{RL}.weight_copy_decay_type=1", f"{RL}.kl_beta=0.1", *LORA),
    "awm": rl_options(NFT, f"{RL}.objective=awm", *TWICE),
    "predict2p5": rl_options(FLOW_GRPO, *PREDICT2P5),
    "float16": rl_options(DDRL, *FLOAT16, f"{RL}.kl_beta=0.1"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "twice" else pytest.mark.long) for name in VARIANTS]
)
def test_every_variant_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    """With several updates of an experience, saves wait for its end and later updates move the ratio."""
    options, whole, parts = [*VARIANTS[name], "optimizer.lr=1e-3"], tmp_path / "whole", tmp_path / "parts"
    each = 4 if set(TWICE) <= set(options) else 2
    records = run(whole, *options, f"trainer.max_iter={2 * each}", f"checkpoint.save_iter={2 * each}")
    run(parts, *options, f"trainer.max_iter={each}", f"checkpoint.save_iter={each - 1}")
    models = parts / "tests/engine" / NAME / "checkpoints/model"
    wanted = [f"iter_{each:09d}.pt"] if each == 4 else ["iter_000000001.pt", "iter_000000002.pt"]
    assert sorted(path.name for path in models.iterdir()) == wanted
    assert run(parts, *options, f"trainer.max_iter={2 * each}", f"checkpoint.save_iter={2 * each}")
    assert difference(saved(whole, NAME), saved(parts, NAME)) is None
    assert records[0]["train/agreement_valid_rate"] == 1
    if "train/log_prob_ratio" in records[0]:
        assert (records[0]["train/log_prob_ratio"], records[0]["train/ratio_std"]) == (1.0, 0.0)
        assert each == 2 or records[each - 1]["train/ratio_std"] > 0


def test_states_that_float16_cannot_hold_end_the_run_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="bfloat16"):
        train(tmp_path, [*rl_options(), *FLOAT16[:2]], config=CONFIG)


def _spread(root: Path, ranks: dict[int, list[int]], *options: str) -> list[bool]:
    """For each iteration but the first: did it change the weights, where the groups of a rollout have spread on these
    ranks alone."""
    score, number = FlowGRPOModel._score, itertools.count()

    def patched(self: FlowGRPOModel, tickets: Any) -> Any:
        advantage, teaches, facts = score(self, tickets)
        advantage[:, ::2], advantage[:, 1::2] = 1.0, -1.0
        if distributed.rank() not in ranks.get(next(number), [0, 1]):
            advantage = torch.zeros_like(advantage)
        return advantage, teaches, facts

    with mock.patch.object(FlowGRPOModel, "_score", patched), states() as found:
        run(root, *options, "trainer.max_iter=3")
    return steps(found)


def test_an_update_without_spread_leaves_weights_and_moments(tmp_path: Path) -> None:
    assert _spread(tmp_path, {1: []}, *rl_options()) == [False, True]


@pytest.mark.parametrize(
    "option", ["objective=nft", "objective=awm", "kl_beta=0.1", "data_beta=0.1", "exp_reward=true"]
)
@pytest.mark.long
def test_what_learns_without_an_advantage_takes_its_step(option: str, tmp_path: Path) -> None:
    experiment = NFT if "objective" in option else FLOW_GRPO
    assert _spread(tmp_path, {1: []}, *rl_options(experiment, f"{RL}.{option}")) == [True, True]


@pytest.mark.slow
def test_all_ranks_take_a_step_where_one_has_spread_and_none_where_none_has(tmp_path: Path) -> None:
    args = (tmp_path, {1: [1], 2: []}, *rl_options(FLOW_GRPO, "dataloader_train.batch_size=2"))
    assert run_distributed(_spread, world_size=2, args=args, timeout=900) == [[True, False]] * 2


Trained = tuple[dict[str, Tensor], dict[str, Any]]


def _trained(root: str, layouts: dict[str, list[str]]) -> dict[str, Trained]:
    """Weights and the first record of a run of each layout."""
    found = {}
    for layout, options in layouts.items():
        records = run(Path(root) / layout, *options)
        found[layout] = (saved(Path(root) / layout, NAME)["model"], records[0])
    return found


LAYOUTS = {
    "whole groups": ["dataloader_train.batch_size=1", "model.config.fsdp_shard_size=2"],
    "shared groups": [f"{RL}.ranks_per_group=2"],
    "context parallel": ["model_parallel.context_parallel_size=2", f"{RL}.rollout_batch=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", pytest.param("nft", marks=pytest.mark.long)])
def test_one_process_and_all_layouts_of_two_agree(name: str, tmp_path: Path) -> None:
    """Two ranks have a group each and half of the weights, half of both groups each, or a part of each clip."""
    options = [item for item in VARIANTS[name] if item not in LORA]
    options += [f"{RL}.kl_beta=0.1", f"{RL}.advantage.norm=global", "trainer.grad_accum_iter=2"]
    alone, record = _trained(str(tmp_path), {"one": [*options, f"{RL}.rollout_batch=4"]})["one"]
    base = load_file(tiny_video2world_path())
    layouts = {layout: [*options, *more] for layout, more in LAYOUTS.items()}
    for layout, (weights, other) in run_distributed(_trained, 2, (str(tmp_path), layouts))[0].items():
        for key in ("train/reward_mean", "train/agreement", "train/positions", "train/advantage_abs"):
            assert other[key] == pytest.approx(record[key], rel=1e-4), (layout, key)
        assert _distance(alone, weights) < 0.02 * _distance(alone, base), layout


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Distance of the trained weights; Adam's first steps are as long where gradients are next to nothing."""
    keys = [key for key in a if key in b and a[key].is_floating_point() and key.startswith("net.")]
    assert keys
    return float(torch.stack([(a[key].double() - b[key].double()).square().sum() for key in keys]).sum().sqrt())


WRONG = {  # of options, of what fits the run, of a value, and a key that is none
    f"{RL}.transition=ode": "transition",
    f"{RL}.minibatches=3": "minibatches",
    f"{RL}.objective=ppo": "objective",
    f"{RL}.learning=1": "learning",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_does_not_fit_together_is_refused_by_its_key(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=WRONG[override]):
        train(tmp_path, rl_options(FLOW_GRPO, override), config=CONFIG)


def test_rewards_compare_with_the_part_of_the_clip_that_was_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips that are longer than the model's are cut once, for conditions and rewards alike."""
    found = []

    def score(self: Any, clips: Any, context: Any) -> Any:
        found.append((clips.video_B_C_F_H_W, context["true_video"]))
        return original(self, clips, context)

    original = verifiable.Agreement.__call__
    monkeypatch.setattr(verifiable.Agreement, "__call__", score)
    records = run(tmp_path, *rl_options(FLOW_GRPO, "trainer.max_iter=1", "model.config.pipe_config.state_t=3"))
    video, true = found[0]
    assert video.shape == true.shape
    assert (video[:, :, 0].float() - true[:, :, 0].float()).abs().mean() < 8  # the conditioning frame
    assert records[0]["train/agreement_valid_rate"] == 1
