# SPDX-License-Identifier: Apache-2.0
"""Post-training on the fisheye head camera of AgiBotWorld, and its tiny twin: one conditioning frame.

Each size has a base experiment, and four that take the released weights of another resolution or frame rate.
"""

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

DATA = "agibot_head_center_fisheye_color"
PREFIX = "predict2_video2world_training"
ONE_GIVEN_FRAME = dict(min_num_conditional_frames=1, max_num_conditional_frames=1)
TINY = tiny_run(1500, lr=0.03, adam_lr=2e-3)

SIZES: dict[str, dict[str, Any]] = {
    "2B": dict(
        # Positions of the 2B network are stretched less than in its release, at every resolution.
        net=dict(rope_h_extrapolation_ratio=2.0, rope_w_extrapolation_ratio=2.0, rope_t_extrapolation_ratio=1.0),
        context_parallel={"480": 1, "720": 2},
        weight_decay=0.1,
        scheduler=linear(2000, 400_000, 0.99, 0.0),
    ),
    "14B": dict(
        net={}, context_parallel={"480": 8, "720": 8}, weight_decay=0.2, scheduler=linear(2000, 50_000, 0.2, 0.0)
    ),
}


def agibot(size: str) -> dict[str, Any]:
    """The base experiment: 720p at 16 frames per second."""
    row = SIZES[size]
    no_refiner = dict(prompt_refiner_config=dict(enabled=False))
    return dict(
        defaults=group_choices(f"predict2_video2world_fsdp_{size.lower()}", DATA, DATA),
        job=job(f"{size.lower()}_{DATA}"),
        model=model_config(ema=True, net=row["net"], **ONE_GIVEN_FRAME, **no_refiner),
        model_parallel=dict(context_parallel_size=row["context_parallel"]["720"]),
        optimizer=dict(lr=2**-15.5, weight_decay=row["weight_decay"]),
        scheduler=row["scheduler"],
        trainer=trainer(100_000, hit_thres=10),
        checkpoint=dict(save_iter=500),
    )


def variant(size: str, resolution: str, fps: int) -> dict[str, Any]:
    """The base experiment from the weights of this resolution and rate, on clips of this resolution."""
    data = DATA if resolution == "720" else f"{DATA}_480"
    return dict(
        defaults=[
            f"/experiment/{PREFIX}_{size.lower()}_{DATA}",
            {"override /model": f"predict2_video2world_fsdp_{size.lower()}_{resolution}p_{fps}fps"},
            {"override /dataloader_train": data},
            {"override /dataloader_val": data},
            "_self_",
        ],
        job=job(f"{size.lower()}_{DATA}_{resolution}p_{fps}fps"),
        model_parallel=dict(context_parallel_size=SIZES[size]["context_parallel"][resolution]),
    )


for size in SIZES:
    register_experiment(f"{PREFIX}_{size.lower()}_{DATA}", partial(agibot, size))
    for resolution in ("480", "720"):
        for fps in (10, 16):
            name = f"{PREFIX}_{size.lower()}_{DATA}_{resolution}p_{fps}fps"
            register_experiment(name, partial(variant, size, resolution, fps))
register_experiment(
    f"{PREFIX}_tiny_{DATA}", partial(tiny_twin, f"tiny_{DATA}", "toy_agibot", numbers=TINY, pipe_config=ONE_GIVEN_FRAME)
)
