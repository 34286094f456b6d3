# SPDX-License-Identifier: Apache-2.0
"""Post-training on GR00T-Dreams GR1 clips, and its tiny twin on the toy world."""

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

CONTEXT_PARALLEL = {"2B": 1, "14B": 4}
TINY = tiny_run(4000, lr=0.03, adam_lr=2e-3)


def groot(size: str) -> dict[str, Any]:
    """Clips of 480p for the model of 720p. The only family without an average of the weights."""
    return dict(
        defaults=group_choices(f"predict2_video2world_fsdp_{size.lower()}", "gr1", "mock"),
        job=job(f"{size.lower()}_groot_gr1_480"),
        model=model_config(ema=False),
        model_parallel=dict(context_parallel_size=CONTEXT_PARALLEL[size]),
        optimizer=dict(lr=2**-14.5, weight_decay=0.1),
        scheduler=linear(1000, 100_000, 0.2, 0.1),
        trainer=trainer(400_000, hit_thres=200),
        checkpoint=dict(save_iter=200),
    )


for size in CONTEXT_PARALLEL:
    register_experiment(f"predict2_video2world_training_{size.lower()}_groot_gr1_480", partial(groot, size))
register_experiment(
    "predict2_video2world_training_tiny_groot_gr1_480", partial(tiny_twin, "tiny_groot_gr1_480", "toy", numbers=TINY)
)
