# SPDX-License-Identifier: Apache-2.0
"""Post-training of Predict2 with actions: on Bridge, whose motion is computed from its poses, and on LIBERO.

A world model of one suite of LIBERO is conditioned on the commands of the controller. Another suite:
``dataloader_train=libero_object_train dataloader_val=libero_object_val`` (also goal, 10).
"""

from typing import Any

from cosmos_predict2.configs.base.post_training import group_choices, job, linear, model_config, trainer
from imaginaire.config import register_experiment

LIBERO_ITERATIONS = 20_000


def bridge() -> dict[str, Any]:
    """A run from the released action-conditioned weights, at a constant learning rate."""
    model, data = "predict2_v2w_2b_action_conditioned_fsdp", ("bridge_train", "bridge_val")
    return dict(
        defaults=group_choices(model, *data, scheduler="constant"),
        job=job("2b_action_conditioned"),
        model=model_config(ema=False),
        dataloader_train=dict(batch_size=2),
        optimizer=dict(lr=1e-4, weight_decay=0.1),
        trainer=trainer(400_000, hit_thres=5),
        checkpoint=dict(save_iter=500),
    )


def libero() -> dict[str, Any]:
    """The flat network from the weights of Bridge, which have seen robots and must learn these actions anew."""
    model, data = "predict2_v2w_2b_action_conditioned_fsdp", ("libero_spatial_train", "libero_spatial_val")
    return dict(
        defaults=group_choices(model, *data),
        job=job("2b_libero_action_conditioned"),
        model=model_config(ema=True),
        dataloader_train=dict(batch_size=8),
        optimizer=dict(lr=3.2e-4, weight_decay=0.1),
        scheduler=linear(1000, LIBERO_ITERATIONS, 1.0, 0.1),
        trainer=trainer(LIBERO_ITERATIONS, hit_thres=10),
        checkpoint=dict(save_iter=500),
    )


register_experiment("predict2_video2world_2b_action_conditioned_training", bridge)
register_experiment("predict2_video2world_2b_libero_action_conditioned", libero)
