# SPDX-License-Identifier: Apache-2.0
"""Post-training on a folder of one's own clips, and its tiny twin on the toy world."""

from functools import partial

from cosmos_predict2.configs.base.post_training import a_thousand_steps, tiny_run, tiny_twin
from imaginaire.config import register_experiment

DATA = "video2world_data"
TINY = tiny_run(1500, lr=0.03, adam_lr=2e-3)

for size in ("2B", "14B"):
    register_experiment(f"predict2_video2world_training_{size.lower()}_{DATA}", partial(a_thousand_steps, size, DATA))
register_experiment(
    f"predict2_video2world_training_tiny_{DATA}",
    partial(tiny_twin, f"tiny_{DATA}", "toy_video2world_data", numbers=TINY),
)
