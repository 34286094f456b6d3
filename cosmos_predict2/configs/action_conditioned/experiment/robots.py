# SPDX-License-Identifier: Apache-2.0
"""World models of public robot data sets in LeRobot form, and their tiny twins, which train on a CPU.

Columns, camera, gripper and idle frames are those of the robot (`cosmos_predict2.data.lerobot.robots`). Validation is
on the held-out part of the same data.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.action_conditioned.experiment.recordings import MOVES, SAME, VAL_EVERY
from cosmos_predict2.configs.action_conditioned.experiment.released import ActionRun, trained
from cosmos_predict2.configs.action_conditioned.experiment.toy import NET, tiny_model
from cosmos_predict2.configs.base.post_training import tiny_run
from cosmos_predict2.data.lerobot.robots import ROBOTS
from imaginaire.config import register_experiment

TINY_SIZES = {"droid": [48, 80], "agibot_world": [48, 64], "so100": [48, 64]}


def on_data(run: dict[str, Any], name: str, num_workers: int, **own: Any) -> dict[str, Any]:
    """The run with the data of a robot in both loaders."""
    train = dict(root=f"datasets/{name}", **own)
    val = {key: f"${{dataloader_train.dataset.{key}}}" for key in SAME} | dict(start_interval=VAL_EVERY)
    for loader, dataset in (("dataloader_train", train), ("dataloader_val", val)):
        run[loader] = dict(run.get(loader, {}), dataset=dataset, num_workers=num_workers)
    return run


def released(experiment: str, name: str) -> dict[str, Any]:
    """From the pre-trained model, by the numbers of the published runs on Bridge."""
    run = ActionRun((f"{name}_train", f"{name}_val"), action_dim=ROBOTS[name].action_dim)
    return on_data(trained(experiment, run), name, num_workers=4)


def tiny(name: str) -> dict[str, Any]:
    """The tiny model, with the tokenizer of the toy world."""
    net = dict(NET, action_dim=ROBOTS[name].action_dim, summed_action_dims=MOVES)
    run = on_data(tiny_run(1200, 8, lr=0.03, adam_lr=2e-3), name, num_workers=2, video_size=TINY_SIZES[name])
    return tiny_model(f"tiny_{name}_action_conditioned", f"{name}_train", f"{name}_val", run, net=net)


for robot in ROBOTS:
    large = f"predict2p5_video2world_2b_{robot}_action_conditioned"
    register_experiment(large, partial(released, large, robot))
    register_experiment(f"predict2_video2world_tiny_{robot}_action_conditioned", partial(tiny, robot))
