# SPDX-License-Identifier: Apache-2.0
"""Modules that moved: their old names can still be imported, and named by the ``_target_`` of a saved configuration.

Each package lists its own: ``add({"package.old": "package.new"})``. The old name gives the very same module.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED: dict[str, str] = {}


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(RENAMED[module.__name__])


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Loader()) if name in RENAMED else None


def add(table: Mapping[str, str]) -> None:
    """Make each old name of ``table`` importable; a module that exists under an old name comes first."""
    RENAMED.update(table)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


add(
    {
        "imaginaire.callbacks": "imaginaire.training.callbacks",
        "imaginaire.callbacks.base": "imaginaire.training.callbacks.base",
        "imaginaire.callbacks.first_range": "imaginaire.training.callbacks.self_checks",
        "imaginaire.callbacks.monitor": "imaginaire.training.callbacks.monitor",
        "imaginaire.callbacks.profile": "imaginaire.training.callbacks.profile",
        "imaginaire.callbacks.report": "imaginaire.training.callbacks.report",
        "imaginaire.callbacks.running_mean": "imaginaire.training.callbacks.running_mean",
        "imaginaire.callbacks.self_checks": "imaginaire.training.callbacks.self_checks",
        "imaginaire.callbacks.trackers": "imaginaire.training.callbacks.trackers",
        "imaginaire.callbacks.train": "imaginaire.training.callbacks.train",
        "imaginaire.callbacks.wandb_tracker": "imaginaire.training.callbacks.wandb_tracker",
        "imaginaire.checkpointer": "imaginaire.checkpoint.checkpointer",
        "imaginaire.compose": "imaginaire.config.compose",
        "imaginaire.context_parallel": "imaginaire.distributed.context_parallel",
        "imaginaire.ema": "imaginaire.optim.ema",
        "imaginaire.foreign_loader": "imaginaire.data.foreign_loader",
        "imaginaire.lazy_config": "imaginaire.config.lazy_config",
        "imaginaire.lazy_yaml": "imaginaire.config.lazy_yaml",
        "imaginaire.lora": "imaginaire.optim.lora",
        "imaginaire.model": "imaginaire.training.model",
        "imaginaire.muon": "imaginaire.optim.muon",
        "imaginaire.names": "imaginaire.config.names",
        "imaginaire.parallel": "imaginaire.distributed.parallel",
        "imaginaire.registry": "imaginaire.config.registry",
        "imaginaire.safe_pickle": "imaginaire.checkpoint.torch_files",
        "imaginaire.schedules": "imaginaire.optim.schedules",
        "imaginaire.trainer": "imaginaire.training.trainer",
        "imaginaire.weights": "imaginaire.checkpoint.weights",
        "imaginaire.weight_files": "imaginaire.checkpoint.weight_files",
        "imaginaire.plain_pickle": "imaginaire.checkpoint.plain_pickle",
        "imaginaire.dcp": "imaginaire.checkpoint.dcp",
        "imaginaire.hub": "imaginaire.storage.hub",
        "imaginaire.workers": "imaginaire.data.workers",
        "imaginaire.typed_nodes": "imaginaire.config.typed_nodes",
        "imaginaire.config_files": "imaginaire.config.files",
        "imaginaire.run_folder": "imaginaire.training.run_folder",
        "imaginaire.preflight": "imaginaire.training.preflight",
    }
)
