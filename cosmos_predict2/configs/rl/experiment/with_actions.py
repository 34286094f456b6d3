# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of models with actions.

FlowGRPO on the released model, by how well its clips show the actions of Bridge: the reward reads the motion from the
clip alone, by a regression that is fitted to recorded clips when the run starts.

The tiny model: the gripper where its actions lead it, without a true future. It starts from first frames and is given
actions of chance, as of a policy that explores; of those the base saw few. Rollouts go to a small noise level: there,
clips from different noise differ by 0.18 px of the gripper. At the level at which the base generates, 10, they differ
by 0.07 px, and nothing was learnt from that.
"""

from functools import partial
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from cosmos_predict2.configs.action_conditioned.experiment.toy import NET
from cosmos_predict2.configs.base.defaults.data import bridge
from cosmos_predict2.configs.base.post_training import group_choices, job, linear
from cosmos_predict2.configs.rl.experiment.toy_world import toy_run
from cosmos_predict2.rl.clips.quality_alarm import Measure, QualityAlarm
from cosmos_predict2.rl.config import RewardConfig
from cosmos_predict2.rl.rewards.action_following import ActionFollowing
from cosmos_predict2.rl.rewards.toy import CommandedPath, Permanence, Positions
from cosmos_predict2.rl.rewards.verifiable import Agreement, Smoothness
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


GROUPS, MEMBERS = 4, 8
PATH = dict(path=RewardConfig(make=L(CommandedPath)()))
MEASURES = dict(
    positions=Measure(make=L(Positions)(), tolerance=0.15), permanence=Measure(make=L(Permanence)(), tolerance=0.05)
)
LEVEL = 0.3
COMMON: dict[str, Any] = dict(rewards=PATH, transition="sde", noise_level=0.7, sample_steps=4, num_rollout=MEMBERS)
FLOW_GRPO: dict[str, Any] = dict(COMMON, objective="grpo", train_on=[0, 1, 2, 3], clip_ratio=1e-3)
NFT: dict[str, Any] = dict(COMMON, objective="nft", num_timesteps=2, nft_beta=0.1, use_same_forward_noise=True)


def tiny(name: str, rl: dict[str, Any]) -> dict[str, Any]:
    """The run of one objective, a rollout of four groups of eight clips."""
    run = toy_run(name, dict(rl, rollout_batch=GROUPS * MEMBERS), iterations=30, lr=1e-4)
    run["defaults"] = group_choices(
        "predict2_video2world_action_rl_tiny", "toy_action", "toy_action", optimizer="adamw", ema="power"
    )
    pipe_config = dict(net=NET, video_noise_factor=25.0, timestamps=dict(nfe=1, t_min=LEVEL))
    run["model"]["config"]["pipe_config"] = pipe_config
    run["dataloader_train"] = dict(batch_size=GROUPS, dataset=dict(mix="wander", num_episodes=512, least_travel=0.0))
    run["dataloader_val"]["dataset"] = dict(mix="wander")
    run["trainer"]["callbacks"] = dict(
        draw_samples=L(DrawSamples)(every_n=15, num_sampling_step=1, run_at_start=True),
        quality_alarm=L(QualityAlarm)(every_n=15, measures=MEASURES, num_sampling_step=1),
    )
    return run


for name, objective in (("tiny_flow_grpo_action_toy_world", FLOW_GRPO), ("tiny_nft_action_toy_world", NFT)):
    register_experiment(name, partial(tiny, name, objective))


def long_horizon(name: str, rl: dict[str, Any]) -> dict[str, Any]:
    """The same for chunks of episodes of 96 actions, half of which go on from what the model imagined.

    The branches of one history are compared with the true future of the chunk, for which they need not meet it.
    """
    rewards = dict(agreement=RewardConfig(make=L(Agreement)()), positions=RewardConfig(make=L(Positions)()))
    run = tiny(name, dict(rl, rewards=rewards))
    run["defaults"] = group_choices(
        "predict2_video2world_action_own_frames_rl_tiny",
        "toy_action_long",
        "toy_action_long",
        optimizer="adamw",
        ema="power",
    )
    run["model"]["config"]["own_frames"] = dict(share=0.5, minibatch=GROUPS)
    run["dataloader_train"] = dict(batch_size=GROUPS)
    run["dataloader_val"] = dict(batch_size=16)
    run["trainer"]["max_iter"] = run["scheduler"]["cycle_lengths"][0] = 35
    return run


for name, objective in (("tiny_flow_grpo_long_horizon", FLOW_GRPO), ("tiny_nft_long_horizon", NFT)):
    register_experiment(name, partial(long_horizon, name, objective))
