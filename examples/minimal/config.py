# SPDX-License-Identifier: Apache-2.0
"""A complete project of one's own: registers the experiment ``minimal``; the model and the data lie beside this file.

python -m scripts.train --config=examples/minimal/config.py -- experiment=minimal
"""

from typing import Any

from cosmos_predict2.configs.base.config import make_config as base_config
from examples.minimal.data import Waves
from examples.minimal.model import MinimalModel
from imaginaire.config import L, register_experiment
from imaginaire.data.stream import ResumableLoader


def make_config() -> Any:
    config = base_config()
    register_experiment(
        "minimal",
        dict(
            defaults=[
                {"override /optimizer": "fusedadamw"},
                {"override /scheduler": "lambdalinear"},
                {"override /ckpt_type": "standard"},
                "_self_",
            ],
            job=dict(project="examples", group="minimal", name="minimal"),
            model=L(MinimalModel)(),
            optimizer=dict(lr=3e-3, weight_decay=0.01),
            scheduler=dict(warm_up_steps=[20], cycle_lengths=[400], f_min=[0.05]),
            dataloader_train=L(ResumableLoader)(dataset=L(Waves)(), batch_size=16, num_workers=2),
            dataloader_val=L(ResumableLoader)(dataset=L(Waves)(num_waves=16, noise=0.0), batch_size=16),
            trainer=dict(max_iter=400, logging_iter=20, validation_iter=100, run_validation=True),
            checkpoint=dict(save_iter=100),
        ),
    )
    return config
