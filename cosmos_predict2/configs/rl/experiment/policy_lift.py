# SPDX-License-Identifier: Apache-2.0
"""Tiny policies in real physics: robosuite's Lift, paid for how near the hand comes to the cube.

    train_policy --policy openvla_oft --action_dim 7 --knots 12 --out checkpoints/policies/tiny_openvla_oft_7

makes a policy to begin with, a clone of the toy world's expert. Four groups of 8 episodes of 48 actions, in four
workers.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.rl.experiment.policy_toy_world import learning, seeing_policy, starts
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from imaginaire.config import L, register_experiment

GROUPS, MEMBERS, MINIBATCHES = 4, 8, 2
WORKERS, EPISODE, CHUNK = 4, 48, 12


def experiment(name: str, label: str) -> dict[str, Any]:
    from cosmos_predict2.rl.envs.simulators.lift import LiftTask

    task = L(LiftTask)(image_size=64, max_steps=EPISODE)
    env = L(WorkerEnv)(make=task, num_envs=WORKERS, chunk=CHUNK, render="auto", _recursive_=False)
    policy = seeing_policy(label, f"checkpoints/policies/tiny_{label}_7")
    rl = VLARLConfig(group_size=MEMBERS, minibatches=MINIBATCHES)
    data = starts(100_000, GROUPS, shuffle=True), starts(8, 8, shuffle=False)
    numbers = dict(length=40 * MINIBATCHES, every=10 * MINIBATCHES, log=MINIBATCHES)
    return learning(name, VLAGRPOConfig(policy=policy, env=env, rl=rl), *data, **numbers)


for label in ("openvla_oft", "pi05"):
    full_name = f"tiny_vla_grpo_{label}_lift"
    register_experiment(full_name, partial(experiment, full_name, label))
