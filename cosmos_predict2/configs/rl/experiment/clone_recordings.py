# SPDX-License-Identifier: Apache-2.0
"""A policy is cloned from the recordings that succeed: the start of reinforcement learning.

The policy of the lowest held-out loss is in the run's folder ``policy``, with its figures in clone.json.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import job, linear
from cosmos_predict2.rl.policies.cloning_model import CloningConfig, CloningModel, KeepBestPolicy
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from imaginaire.config import L, register_experiment
from imaginaire.data.stream import ResumableLoader

NAME = "clone_recordings"
STEPS = 2000
LEARNING_RATE = 1.5e-3
SHIFT = 0.06  # without it a clone of 100 episodes begins to know them by heart after 400 iterations
SEED: Any = "${trainer.seed}"
KNOTS: Any = "${dataloader_train.dataset.chunk}"  # motions held for several actions cannot follow most recordings
SHARED = ("path", "split_file", "chunk", "starts", "num", "camera", "action_keys", "held_out_share", "state")


def clone(name: str, policy: str) -> dict[str, Any]:
    data = L(RecordedWindows)(
        path="", split_file="outputs/my_split.json", part="train", chunk=12, starts=None, num=None, camera=None,
        action_keys=None, cache_mib=1024, state=False,
    )  # fmt: skip
    of_training = {key: f"${{dataloader_train.dataset.{key}}}" for key in SHARED}
    held_out = L(RecordedWindows)(**of_training, part="calibrate", most=512, cache_mib=1024)
    return dict(
        defaults=[{"override /optimizer": "adamw"}, {"override /scheduler": "lambdalinear"}, "_self_"],
        job=job(name, group="cloning"),
        model=L(CloningModel)(
            config=CloningConfig(
                policy=policy,
                data="${dataloader_train.dataset}",
                num_knots=KNOTS,
                seed=SEED,
                shift=SHIFT,
            ),
            _recursive_=False,
        ),
        dataloader_train=L(ResumableLoader)(dataset=data, batch_size=32, shuffle=True),
        dataloader_val=L(ResumableLoader)(dataset=held_out, batch_size=64, shuffle=False),
        optimizer=dict(lr=LEARNING_RATE, weight_decay=0.0, betas=[0.9, 0.999]),
        scheduler=dict(linear(0, STEPS, 1.0, 0.0), f_start=[1.0], cycle_lengths=["${trainer.max_iter}"]),
        trainer=dict(
            max_iter=STEPS,
            logging_iter=50,
            validation_iter=STEPS // 10,
            run_validation=True,
            distributed_parallelism="ddp",
            ddp=dict(find_unused_parameters=True),  # nothing is read off the last layer of PI0.5's language model
            callbacks=dict(keep_best=L(KeepBestPolicy)()),
        ),
        checkpoint=dict(save_iter=STEPS // 5),
    )


for name, policy in ((NAME, "pi05"), (f"{NAME}_openvla_oft", "openvla_oft"), (f"{NAME}_conv", "conv")):
    register_experiment(name, partial(clone, name, policy))
