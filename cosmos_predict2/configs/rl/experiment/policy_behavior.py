# SPDX-License-Identifier: Apache-2.0
"""PI0.5 learns by reinforcement in BEHAVIOR-1K: vla_{grpo,dapo}_pi05_b1k.

A rank has one scene, and plays the 16 episodes of its groups one after the other; `model.config.env.num_envs` is how
many are played together, as far as the GPU's memory goes.
"""

from typing import Any

from cosmos_predict2.configs.rl.experiment.policy_libero import learning, policies
from cosmos_predict2.rl.envs.simulators.behavior import ACTION_DIM, BehaviorEnv
from cosmos_predict2.rl.envs.simulators.behavior_tasks import NUM_TASKS, TRIALS
from imaginaire.config import L, register_experiment


def behavior(chunk: int) -> Any:
    return L(BehaviorEnv)(num_envs=1, chunk=chunk)


for kind in ("grpo", "dapo"):
    full_name = f"vla_{kind}_pi05_b1k"
    node, size, options = policies()["pi05"]
    node.action_env_dim = ACTION_DIM
    places = behavior(size), behavior(size)
    register_experiment(full_name, learning(full_name, node, *places, NUM_TASKS, TRIALS, kind == "dapo", options))
