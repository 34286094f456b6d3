# SPDX-License-Identifier: Apache-2.0
"""PI0.5 learns by reinforcement in BEHAVIOR-1K: vla_{grpo,dapo}_pi05_b1k.

A rank has one scene, and plays the 16 episodes of its groups one after the other; `model.config.env.num_envs` is how
many are played together, as far as the GPU's memory goes. Humans took about 13,000 steps of a task, and the challenge
gives twice as many; here an episode ends after `MAX_STEPS`, by which memory and micro-batches are sized. Longer ones
need max_steps of both environments, as many micro-batches more, and fewer episodes of an update.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.rl.experiment.policy_libero import learning, pi05
from imaginaire.config import L, register_experiment

MAX_STEPS = 2000  # enough for the shortest tasks


def behavior(chunk: int) -> Any:
    from cosmos_predict2.rl.envs.simulators.behavior import BehaviorEnv

    return L(BehaviorEnv)(num_envs=1, chunk=chunk, max_steps=MAX_STEPS)


def in_behavior(name: str, algorithm: str) -> dict[str, Any]:
    from cosmos_predict2.rl.envs.simulators.behavior import ACTION_DIM
    from cosmos_predict2.rl.envs.simulators.omnigibson import NUM_TASKS, TRIALS

    kind = pi05(num_numbers=ACTION_DIM)
    places = behavior(kind.chunk), behavior(kind.chunk)
    return learning(name, kind, *places, NUM_TASKS, TRIALS, MAX_STEPS, algorithm == "dapo")


EXPERIMENTS = {f"vla_{algorithm}_pi05_b1k": algorithm for algorithm in ("grpo", "dapo")}
for full_name, algorithm_name in EXPERIMENTS.items():
    register_experiment(full_name, partial(in_behavior, full_name, algorithm_name))
