# SPDX-License-Identifier: Apache-2.0
"""The run that made the tiny base: the puck pushed (mostly), carried and touched.

Longer than the twins' runs. The box is there at times but stays where it is, so that there is something to learn for
adapters that start from it.
"""

from functools import partial

from cosmos_predict2.configs.base.post_training import tiny_run, tiny_twin
from imaginaire.config import register_experiment

register_experiment(
    "predict2_video2world_training_tiny_base",
    partial(tiny_twin, "tiny_base", "toy_base", numbers=tiny_run(9000, lr=0.03, adam_lr=2e-3)),
)
