# SPDX-License-Identifier: Apache-2.0
"""Post-training on few clips: a folder of one's own, the four of Cosmos-NeMo-Assets, adapters on these, and pictures of
them; their tiny twins on the toy world, and the longer run that made the tiny base.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import (
    group_choices,
    job,
    linear,
    lora,
    model_config,
    tiny_run,
    tiny_twin,
    trainer,
)
from cosmos_predict2.released import TINY_VIDEO2WORLD
from imaginaire.config import register_experiment

NEMO, OWN = "cosmos_nemo_assets", "video2world_data"
SIZES = {  # by size: samples split over this many GPUs, weight decay, height of the schedule
    "2B": dict(context_parallel=2, weight_decay=0.1, f_max=0.6),
    "14B": dict(context_parallel=8, weight_decay=0.2, f_max=0.25),
}


def a_thousand_steps(size: str, data: str) -> dict[str, Any]:
    """A short run on few clips: no warm-up, down to zero over its 1000 iterations."""
    row = SIZES[size]
    return dict(
        defaults=group_choices(f"predict2_video2world_fsdp_{size.lower()}", data, "mock"),
        job=job(f"{size.lower()}_{data}"),
        model=model_config(ema=True, prompt_refiner_config=dict(enabled=False)),
        model_parallel=dict(context_parallel_size=row["context_parallel"]),
        optimizer=dict(lr=2**-14.5, weight_decay=row["weight_decay"]),
        scheduler=linear(0, 1000, row["f_max"], 0.0),
        trainer=trainer(1000, hit_thres=10),
        checkpoint=dict(save_iter=500),
    )


LORA_GROUP = "video2world_lora"
RANKS = {"2B": 16, "14B": 32}  # alpha is the same


def adapters(size: str) -> dict[str, Any]:
    """The run of cosmos_nemo_assets with adapters, saved more often."""
    name = f"predict2_video2world_training_{size.lower()}_{NEMO}"
    return dict(
        defaults=[f"/experiment/{name}", "_self_"],
        job=dict(group=LORA_GROUP),
        model=dict(config=lora(RANKS[size])),
        checkpoint=dict(save_iter=200),
    )


PICTURES = {"2B": (2**-15, 0.1, 0.17), "14B": (2**-14.5, 0.2, 0.4)}  # lr, weight decay, height of the schedule


def pictures(size: str) -> dict[str, Any]:
    """The run of cosmos_nemo_assets with Text2Image, on every 30th frame; pictures are not split over GPUs."""
    lr, weight_decay, f_max = PICTURES[size]
    return a_thousand_steps(size, NEMO) | dict(
        defaults=group_choices(f"predict2_text2image_fsdp_{size.lower()}", f"{NEMO}_images", "mock_image"),
        job=job(f"{size.lower()}_{NEMO}", "text2image"),
        model_parallel=dict(context_parallel_size=1),
        optimizer=dict(lr=lr, weight_decay=weight_decay),
        scheduler=linear(0, 1000, f_max, 0.0),
    )


for size in SIZES:
    register_experiment(f"predict2_text2image_training_{size.lower()}_{NEMO}", partial(pictures, size))
    for data in (NEMO, OWN):
        name = f"predict2_video2world_training_{size.lower()}_{data}"
        register_experiment(name, partial(a_thousand_steps, size, data))
    register_experiment(f"predict2_video2world_lora_training_{size.lower()}_{NEMO}", partial(adapters, size))

# The box of the tiny base is there at times but stays where it is, so that adapters have something to learn.
for name, data, iterations in (
    (NEMO, "toy_nemo", 750),
    (OWN, "toy_video2world_data", 1500),
    ("base", "toy_base", 9000),
):
    twin = partial(tiny_twin, f"tiny_{name}", data, numbers=tiny_run(iterations, lr=0.03, adam_lr=2e-3))
    register_experiment(f"predict2_video2world_training_tiny_{name}", twin)
register_experiment(
    f"predict2_video2world_lora_training_tiny_{NEMO}",
    partial(
        tiny_twin,
        f"tiny_{NEMO}",
        "toy_nemo_lora",
        group=LORA_GROUP,
        numbers=tiny_run(1000, lr=0.02),
        model_manager_config=dict(dit_path=TINY_VIDEO2WORLD),
        **lora(16),
    ),
)
register_experiment(
    f"predict2_text2image_training_tiny_{NEMO}",
    partial(
        tiny_twin,
        f"tiny_{NEMO}",
        "toy_nemo_images",
        numbers=tiny_run(1500, lr=0.03, adam_lr=2e-3),
        group="text2image",
        model="text2image",
        pipe_config=dict(video_noise_factor=3.0),  # a picture alone shows its content at lower levels than a clip
    ),
)
