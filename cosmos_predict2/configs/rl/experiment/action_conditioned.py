# SPDX-License-Identifier: Apache-2.0
"""FlowGRPO on the released model with actions, by how well its clips show the actions of Bridge.

The reward reads the motion from the clip alone, by a regression that is fitted to recorded clips when the run starts.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.defaults.data import bridge
from cosmos_predict2.configs.base.post_training import group_choices, job, linear
from cosmos_predict2.rl.config import RewardConfig
from cosmos_predict2.rl.rewards.action_following import ActionFollowing
from cosmos_predict2.rl.rewards.verifiable import Smoothness
from imaginaire.config import L, register_experiment

SCHEDULE: dict[str, Any] = dict(sample_steps=10, train_on=list(range(8)), num_rollout=8, rollout_batch=1)


def bridge_run(size: str) -> dict[str, Any]:
    """A micro-batch is one trained step of one clip."""
    rewards = dict(
        following=RewardConfig(make=L(ActionFollowing)(data=bridge("train").dataset, num_clips=256)),
        smoothness=RewardConfig(make=L(Smoothness)(), weight=0.25),
    )
    model = f"predict2_video2world_action_rl_{size.lower()}"
    return dict(
        defaults=group_choices(model, "bridge_train", "bridge_val", ema="power"),
        job=job(f"{size.lower()}_action_flow_grpo", group="reinforcement_learning"),
        model=dict(config=dict(rl=dict(SCHEDULE, transition="churn", kl_beta=0.01, rewards=rewards))),
        optimizer=dict(lr=1e-5, weight_decay=1e-4),
        scheduler=linear(50, 10_000_000_000_000, 1.0, 1.0),
        trainer=dict(max_iter=2001, logging_iter=2, grad_accum_iter=len(SCHEDULE["train_on"]) * 8),
        checkpoint=dict(save_iter=32),
    )


register_experiment("predict2_2b_action_flow_grpo", partial(bridge_run, "2B"))
