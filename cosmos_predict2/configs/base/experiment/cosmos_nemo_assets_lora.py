# SPDX-License-Identifier: Apache-2.0
"""Adapters instead of a new model, on the four clips of Cosmos-NeMo-Assets; the tiny twin adapts the tiny base."""

from functools import partial
from typing import Any

from cosmos_predict2.checkpoints.tiny_base import tiny_video2world_path
from cosmos_predict2.configs.base.post_training import lora, tiny_run, tiny_twin
from imaginaire.config import register_experiment

DATA = "cosmos_nemo_assets"
GROUP = "video2world_lora"
RANKS = {"2B": 16, "14B": 32}  # alpha is the same
TINY = tiny_run(1000, lr=0.02)
TINY_RANK = 16


def adapters(size: str) -> dict[str, Any]:
    """The run of cosmos_nemo_assets with adapters, saved more often."""
    name = f"predict2_video2world_training_{size.lower()}_{DATA}"
    return dict(
        defaults=[f"/experiment/{name}", "_self_"],
        job=dict(group=GROUP),
        model=dict(config=lora(RANKS[size])),
        checkpoint=dict(save_iter=200),
    )


for size in RANKS:
    register_experiment(f"predict2_video2world_lora_training_{size.lower()}_{DATA}", partial(adapters, size))
register_experiment(
    f"predict2_video2world_lora_training_tiny_{DATA}",
    partial(
        tiny_twin,
        f"tiny_{DATA}",
        "toy_nemo_lora",
        group=GROUP,
        numbers=TINY,
        model_manager_config=dict(dit_path=tiny_video2world_path()),
        **lora(TINY_RANK),
    ),
)
