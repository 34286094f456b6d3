# SPDX-License-Identifier: Apache-2.0
"""Post-training of Text2Image on pictures of Cosmos-NeMo-Assets, and its tiny twin on pictures of the toy world."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import (
    group_choices,
    job,
    linear,
    model_config,
    tiny_run,
    tiny_twin,
    trainer,
)
from imaginaire.config import register_experiment

GROUP, DATA = "text2image", "cosmos_nemo_assets"
SIZES = {  # lr, weight decay, height of the schedule
    "2B": (2**-15, 0.1, 0.17),
    "14B": (2**-14.5, 0.2, 0.4),
}


def pictures(size: str) -> dict[str, Any]:
    """A thousand steps on every 30th frame of the clips."""
    lr, weight_decay, f_max = SIZES[size]
    return dict(
        defaults=group_choices(f"predict2_text2image_fsdp_{size.lower()}", f"{DATA}_images", "mock_image"),
        job=job(f"{size.lower()}_{DATA}", GROUP),
        model=model_config(ema=True, prompt_refiner_config=dict(enabled=False)),
        optimizer=dict(lr=lr, weight_decay=weight_decay),
        scheduler=linear(0, 1000, f_max, 0.0),
        trainer=trainer(1000, hit_thres=10),
        checkpoint=dict(save_iter=500),
    )


for size in SIZES:
    register_experiment(f"predict2_text2image_training_{size.lower()}_{DATA}", partial(pictures, size))
register_experiment(
    f"predict2_text2image_training_tiny_{DATA}",
    partial(
        tiny_twin,
        f"tiny_{DATA}",
        "toy_nemo_images",
        numbers=tiny_run(1500, lr=0.03, adam_lr=2e-3),
        group=GROUP,
        model="text2image",
        pipe_config=dict(video_noise_factor=3.0),  # a picture alone shows its content at lower levels than a clip
    ),
)
