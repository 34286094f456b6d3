# SPDX-License-Identifier: Apache-2.0
"""Post-training on Bridge: conditioned on the robot's motion, which is computed from its poses."""

from typing import Any

from cosmos_predict2.configs.base.post_training import group_choices, job, model_config, trainer
from imaginaire.config import register_experiment


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


register_experiment("predict2_video2world_2b_action_conditioned_training", bridge)
