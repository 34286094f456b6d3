# SPDX-License-Identifier: Apache-2.0
"""The base configuration: what a run has before an experiment is chosen, and every group that one can choose from."""

import functools
import os

from cosmos_predict2.configs.action_conditioned.defaults import data as action_data
from cosmos_predict2.configs.action_conditioned.defaults import model as action_model
from cosmos_predict2.configs.base.defaults import data, model, training, wan2pt1
from cosmos_predict2.configs.rl.defaults import model as rl_model
from cosmos_predict2.released import SETTINGS_VARIABLE, not_yet_here
from imaginaire.config import Config, JobConfig, TrainerConfig
from imaginaire.config.compose import import_all_modules_from_package
from imaginaire.config.registry import register_absent

# Groups after _self_ win over the values below; the experiment is last and wins over the groups.
DEFAULTS = [
    "_self_",
    {"dataloader_train": None},
    {"dataloader_val": None},
    {"optimizer": "fusedadamw"},
    {"scheduler": "constant"},
    {"model": None},
    {"callbacks": ["basic"]},
    {"net": None},
    {"ema": None},
    {"checkpoint": None},
    {"ckpt_type": "standard"},
    {"experiment": None},
]


@functools.lru_cache(maxsize=1)
def register_groups(settings: str) -> None:
    """Once in a process that composes often, and again where the settings change, which name folders of weights."""
    for group in (training, data, action_data, model, wan2pt1, action_model, rl_model):
        group.register()


def make_config() -> Config:
    register_groups(os.environ.get(SETTINGS_VARIABLE, ""))
    register_absent(not_yet_here)
    for package in ("base", "action_conditioned", "rl"):
        import_all_modules_from_package(f"cosmos_predict2.configs.{package}.experiment")
    return Config(
        defaults=list(DEFAULTS),
        job=JobConfig(project="cosmos_predict2", group="debug", name="delete_${now:%Y-%m-%d}_${now:%H-%M-%S}"),
        trainer=TrainerConfig(max_iter=400_000, logging_iter=10, validation_iter=100, run_validation=False),
    )
