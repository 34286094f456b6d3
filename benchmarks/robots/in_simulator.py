# SPDX-License-Identifier: Apache-2.0
"""The ceiling of learning in imagination: the same algorithm, settings and policy in the simulator itself.

    python -m scripts.train --import benchmarks.robots.in_simulator -- experiment=bench_reach_pi05 \\
        model.config.policy.path=runs/reach/posttraining/cloning/clone/policy
"""

from functools import partial
from typing import Any

from benchmarks.robots.worlds import SENTENCES, STEPS
from cosmos_predict2.configs.rl.experiment.policy_recordings import GROUPS, recordings
from cosmos_predict2.configs.rl.experiment.policy_toy_world import starts
from cosmos_predict2.rl.envs.simulators.gym import GymTask
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from imaginaire.config import L, register_experiment

WORKERS = 2


def experiment(name: str, robot: str, label: str) -> dict[str, Any]:
    run = recordings(name, label)
    config = run["model"].config
    task = L(GymTask)(
        env_id=f"benchmarks.robots.worlds:Bench/{robot}-v0",
        repeat=STEPS[robot],
        max_steps=24,
        image_size=64,
        sentence=SENTENCES[robot],
    )
    config.env = L(WorkerEnv)(make=task, num_envs=WORKERS, chunk=12, render="auto", _recursive_=False)
    config.card = config.rl.actions_alone = None
    run.update(dataloader_train=starts(100_000, GROUPS, shuffle=True), dataloader_val=starts(64, 64, shuffle=False))
    run["trainer"]["callbacks"]["imagination_watch"] = None
    return run


for robot in STEPS:
    for label in ("openvla_oft", "pi05"):
        name = f"bench_{robot}_{label}"
        register_experiment(name, partial(experiment, name, robot, label))
