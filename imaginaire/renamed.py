# SPDX-License-Identifier: Apache-2.0
"""Modules that moved: their old names can still be imported, and named by the ``_target_`` of a saved configuration.

Each package lists its own: ``add({"package.old": "package.new"})``. The old name gives the very same module. ``KEYS``
are those of configurations, in full: overrides, experiments and saved configurations may have the old one.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED: dict[str, str] = {}
KEYS: dict[str, str] = {}


class _Renamed(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in RENAMED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(RENAMED[module.__name__])


def add(table: Mapping[str, str]) -> None:
    """Make each old name of ``table`` importable.

    The finder comes first: below a package that moved, the usual one would load a second copy from the new folder.
    """
    RENAMED.update(table)
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Renamed())


add(
    {
        "imaginaire.callbacks": "imaginaire.training.callbacks",
        "imaginaire.callbacks.base": "imaginaire.training.callbacks.base",
        "imaginaire.compose": "imaginaire.config.compose",
        "imaginaire.lazy_config": "imaginaire.config.lazy_config",
        "imaginaire.model": "imaginaire.training.model",
        "imaginaire.optim.ema": "imaginaire.training.model",  # what an example imported
        "imaginaire.trainer": "imaginaire.training.trainer",
    }
)
