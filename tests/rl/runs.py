# SPDX-License-Identifier: Apache-2.0
"""Short runs of reinforcement learning on the tiny model."""

from pathlib import Path
from typing import Any

from tests.training import records, run_dir, train

CONFIG = "cosmos_predict2/configs/base/config.py"
NAME = "rl"
RL = "model.config.rl"
SHORT = [
    *("job.project=tests", "job.group=engine", f"job.name={NAME}"),
    *("trainer.run_validation=false", "trainer.logging_iter=1", "trainer.max_iter=2", "checkpoint.save_iter=2"),
    *("trainer.callbacks.draw_samples=null", "trainer.callbacks.quality_alarm=null"),
    *("scheduler.warm_up_steps=[0]", "scheduler.cycle_lengths=[8]"),
    *("dataloader_train.batch_size=2", "dataloader_train.dataset.num_episodes=8"),
    *(f"{RL}.num_rollout=2", f"{RL}.rollout_batch=2", f"{RL}.sample_steps=3"),
]
STEPS = [f"{RL}.train_on=[0,-1]", "trainer.grad_accum_iter=4"]  # two batches of two samples, two steps
LORA = ["model.config.train_architecture=lora", "model.config.lora_rank=4", "model.config.lora_alpha=4"]
LEVELS = [f"{RL}.num_timesteps=2", "trainer.grad_accum_iter=4"]


def rl_options(experiment: str = "tiny_flow_grpo_toy_world", *more: str) -> list[str]:
    trained = LEVELS if "nft" in experiment or any("objective=awm" in item for item in more) else STEPS
    return [f"experiment={experiment}", *SHORT, *trained, *more]


def run(root: Path, *options: str) -> list[dict[str, Any]]:
    """Train; the records of its metrics."""
    assert train(root, options, config=CONFIG) == 0
    return records(run_dir(root, NAME))
