# SPDX-License-Identifier: Apache-2.0
"""Experiments of published policies in simulators: they fit GPUs, and each name means what it says."""

import math
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.configs.rl.experiment import policy_simulators
from imaginaire.config import registry
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import instantiate, to_yaml

SUITES = policy_simulators.NUM_TASKS
NAMES = [f"vla_{a}_{p}_{s}" for a in ("grpo", "dapo") for p in policy_simulators.POLICIES for s in SUITES]
NAMES += [f"vla_{algorithm}_pi05_b1k" for algorithm in ("grpo", "dapo")]


CONFIG = "cosmos_predict2/configs/base/config.py"


def test_there_are_all_policies_methods_algorithms_and_suites() -> None:
    assert len(NAMES) == 2 * 5 * 6 + 2
    assert set(NAMES) == set(policy_simulators.EXPERIMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_so_many_decisions_pass_the_policy_together_as_fit(name: str) -> None:
    node: Any = registry.node_of("experiment", name)
    model, trainer = node["model"].config, node["trainer"]
    limit = policy_simulators.BEHAVIOR_STEPS if name.endswith("b1k") else policy_simulators.MAX_STEPS
    env = model.env if name.endswith("b1k") else model.env.make
    assert env.max_steps == limit  # which episodes cannot exceed
    decisions = node["dataloader_train"].batch_size * model.rl.group_size * math.ceil(limit / model.env.chunk)
    assert trainer["grad_accum_iter"] == model.rl.micro_batches
    assert decisions / model.rl.micro_batches <= 16
    is_whole = "openvla" in name
    assert (model.fsdp_shard_size, model.recompute) == ((-1, True) if is_whole else (0, False))
    assert trainer["distributed_parallelism"] == ("fsdp" if is_whole else "ddp")
    assert model.rl.max_rollouts == (8 if "_dapo_" in name else 1)
    if "pi05" in name:
        method = next((each for each in ("flow_cps", "flow_noise") if each in name), "flow_sde")
        assert model.policy.noise_method == method and model.rl.dual_clip == 3.0


@pytest.mark.parametrize("name", ["vla_grpo_recordings_conv", "vla_grpo_recordings", "vla_grpo_suite_pi05"])
def test_the_first_steps_of_a_clone_are_small(name: str) -> None:
    """Adam's first step moves each weight by the whole rate, which took a clone out of what can be trusted."""
    schedule = instantiate(compose(CONFIG, [f"experiment={name}", "ckpt_type=dummy"]).scheduler)
    assert [schedule(n) for n in (0, 5, 10, 79)] == pytest.approx([0.1, 0.55, 1, 1])
    whole = instantiate(compose(CONFIG, [f"experiment={name}", "ckpt_type=dummy", "scheduler=constant"]).scheduler)
    assert whole(0) == 1, "keys of the one that rises are not left over"


def test_a_refined_policy_is_watched_by_the_recordings_of_its_world_models_run(tmp_path: Path) -> None:
    data = dict(root="datasets/dot", split_file="dot/split.json", camera="front", video_size=[64, 96])
    (tmp_path / "config.yaml").write_text(to_yaml({"dataloader_train": {"dataset": data}}))
    (tmp_path / "checkpoints").mkdir()
    run = f"model.config.world_model.dit_path={tmp_path}"
    config = compose(CONFIG, ["experiment=vla_grpo_recordings_refined", run, "ckpt_type=dummy"])
    watch = config.trainer.callbacks.imagination_watch
    assert (watch.data, watch.split, watch.camera) == ("datasets/dot", "dot/split.json", "front")
    assert list(config.model.config.env.starts["size"]) == [64, 96]
