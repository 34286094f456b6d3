# SPDX-License-Identifier: Apache-2.0
"""What a config file needs: the sections of a run, ``L(TheClass)(...)`` for what is built, ``register_experiment``."""

from typing import Any

from imaginaire.config.lazy_config import PLACEHOLDER, LazyCall, LazyDict, instantiate
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


def __getattr__(name: str) -> Any:
    """Hydra, in whose store they register, is imported with the first of these."""
    if name in ("register_experiment", "register_group"):
        from imaginaire.config import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "register_group",
]
