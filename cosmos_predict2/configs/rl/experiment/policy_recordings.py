# SPDX-License-Identifier: Apache-2.0
"""A policy learns by GRPO in what a world model of recordings imagines: nothing of it is known but the recordings.

Every part is a path, of the programs that make it: documentations/your_policy.md shows the whole way. There is no
simulator, so validation is imagined, too, on starts that training never has.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import job
from cosmos_predict2.configs.rl.experiment.policy_toy_world import seeing_policy, starts
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.config import GroupAdvantageConfig
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.rewards.resnet import ResnetReward
from imaginaire.config import L, register_experiment

NAME = "vla_grpo_recordings"
GROUPS, MEMBERS = 8, 8
TRAIN, HELD_OUT = 80, 20  # starts, by number, which go on from the first where there are fewer
MINIBATCHES = 4


def recordings(name: str, label: str) -> dict[str, Any]:
    env = L(WorldModelEnv)(
        imagination=L(imagination_of)(dit_path="outputs/my_world_model"),
        starts=L(RecordedStarts)(path="outputs/my_starts", by_task=False),  # of all tasks
        reward=L(ResnetReward)(path="outputs/my_reward/reward_model.safetensors"),
        num_envs=GROUPS * MEMBERS,
        max_steps=24,
        scoring=Scoring(judge="last", reward_on="last"),
        clip_actions=False,  # they have the units of the recordings
    )
    run: dict[str, Any] = dict(
        defaults=[{"override /optimizer": "adamw"}, {"override /scheduler": "constant"}, "_self_"],
        job=job(name, group="reinforcement_learning"),
        model=L(VLAGRPOModel)(
            config=VLAGRPOConfig(
                policy=seeing_policy(label, "outputs/my_policy"),
                env=env,
                card="outputs/my_card.json",
                rl=VLARLConfig(
                    group_size=MEMBERS,
                    minibatches=MINIBATCHES,
                    advantage=GroupAdvantageConfig(epsilon=0.05, correction=1),
                    loss=PolicyLossConfig(ratio_level="chunk"),
                ),
            ),
            _recursive_=False,
        ),
        dataloader_train=starts(TRAIN, GROUPS, shuffle=True),
        dataloader_val=starts(HELD_OUT, HELD_OUT, shuffle=False),
        optimizer=dict(lr=3e-4, weight_decay=0.0, betas=[0.9, 0.999]),
        trainer=dict(
            max_iter=20 * MINIBATCHES,
            logging_iter=MINIBATCHES,
            validation_iter=5 * MINIBATCHES,
            run_validation=True,
            distributed_parallelism="ddp",
        ),
        checkpoint=dict(save_iter=5 * MINIBATCHES),
    )
    run["dataloader_val"].dataset.first = TRAIN
    return run


for name, label in ((NAME, "openvla_oft"), (f"{NAME}_pi05", "pi05")):
    register_experiment(name, partial(recordings, name, label))
