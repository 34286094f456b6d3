# SPDX-License-Identifier: Apache-2.0
"""What a config file needs: the sections of a run, ``L(TheClass)(...)`` for what is built, ``register_experiment``."""

from imaginaire.config.lazy_config import PLACEHOLDER, LazyCall, LazyDict, instantiate
from imaginaire.config.registry import register_experiment
from imaginaire.config.schema import (
    NEVER,
    CheckpointConfig,
    Config,
    CuDNNConfig,
    DDPConfig,
    EMAConfig,
    JITConfig,
    JobConfig,
    ModelParallelConfig,
    NVTXConfig,
    ObjectStoreConfig,
    PowerEMAConfig,
    Profiling,
    Section,
    StragglerDetectionConfig,
    TrainerConfig,
    make_freezable,
)

L = LazyCall

__all__ = [
    "NEVER",
    "PLACEHOLDER",
    "CheckpointConfig",
    "Config",
    "CuDNNConfig",
    "DDPConfig",
    "EMAConfig",
    "JITConfig",
    "JobConfig",
    "L",
    "LazyCall",
    "LazyDict",
    "ModelParallelConfig",
    "NVTXConfig",
    "ObjectStoreConfig",
    "PowerEMAConfig",
    "Profiling",
    "Section",
    "StragglerDetectionConfig",
    "TrainerConfig",
    "instantiate",
    "make_freezable",
    "register_experiment",
]
