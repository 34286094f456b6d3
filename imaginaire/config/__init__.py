# SPDX-License-Identifier: Apache-2.0
"""The imports of a config file: the sections of a run, ``L(TheClass)(...)`` for objects, ``register_experiment``."""

from typing import Any

from imaginaire import renamed
from imaginaire.config.lazy_config import PLACEHOLDER as PLACEHOLDER
from imaginaire.config.lazy_config import LazyCall as LazyCall
from imaginaire.config.lazy_config import LazyDict as LazyDict
from imaginaire.config.lazy_config import instantiate as instantiate
from imaginaire.config.schema import *  # noqa: F403  (all of it: published config files import the sections from here)

L = LazyCall


def __getattr__(name: str) -> Any:
    """Hydra, in whose store they register, is imported with the first of these."""
    if name in ("register_experiment", "register_group"):
        from imaginaire.config import registry

        return getattr(registry, name)
    return renamed.named(__name__, name)
