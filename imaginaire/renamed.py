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
    """Make each old name of ``table`` importable.

    The finder comes first: below a package that moved, the usual one would load a second copy from the new folder.
    """
    RENAMED.update(table)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


add(
    {
        "imaginaire.absent_files": "imaginaire.storage.absent_files",
        "imaginaire.archives": "imaginaire.checkpoint.layout",
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
        "imaginaire.checkpoint_layout": "imaginaire.checkpoint.layout",
        "imaginaire.checkpointer": "imaginaire.checkpoint.checkpointer",
        "imaginaire.compose": "imaginaire.config.compose",
        "imaginaire.config_checks": "imaginaire.config.checks",
        "imaginaire.config_files": "imaginaire.config.files",
        "imaginaire.context_parallel": "imaginaire.distributed.context_parallel",
        "imaginaire.dcp": "imaginaire.checkpoint.dcp",
        "imaginaire.ema": "imaginaire.optim.ema",
        "imaginaire.foreign_loader": "imaginaire.data.foreign_loader",
        "imaginaire.hub": "imaginaire.storage.hub",
        "imaginaire.lazy_config": "imaginaire.config.lazy_config",
        "imaginaire.lazy_yaml": "imaginaire.config.lazy_yaml",
        "imaginaire.lint": "imaginaire.config.checks",
        "imaginaire.lora": "imaginaire.optim.lora",
        "imaginaire.memory": "imaginaire.training.memory",
        "imaginaire.meta_device": "imaginaire.distributed.meta_device",
        "imaginaire.model": "imaginaire.training.model",
        "imaginaire.muon": "imaginaire.optim.muon",
        "imaginaire.names": "imaginaire.config.names",
        "imaginaire.object_store": "imaginaire.storage.object_store",
        "imaginaire.optim_state": "imaginaire.optim.state",
        "imaginaire.overrides": "imaginaire.config.overrides",
        "imaginaire.parallel": "imaginaire.distributed.parallel",
        "imaginaire.places": "imaginaire.distributed.places",
        "imaginaire.plain_pickle": "imaginaire.checkpoint.plain_pickle",
        "imaginaire.preflight": "imaginaire.training.preflight",
        "imaginaire.provenance": "imaginaire.training.provenance",
        "imaginaire.registry": "imaginaire.config.registry",
        "imaginaire.resume": "imaginaire.checkpoint.layout",
        "imaginaire.run_folder": "imaginaire.training.run_folder",
        "imaginaire.safe_pickle": "imaginaire.checkpoint.plain_pickle",
        "imaginaire.schedules": "imaginaire.optim.schedules",
        "imaginaire.side_channel": "imaginaire.training.side_channel",
        "imaginaire.step_guard": "imaginaire.training.step_guard",
        "imaginaire.timers": "imaginaire.training.timers",
        "imaginaire.trainer": "imaginaire.training.trainer",
        "imaginaire.typed_nodes": "imaginaire.config.typed_nodes",
        "imaginaire.watchdog": "imaginaire.training.watchdog",
        "imaginaire.weight_files": "imaginaire.checkpoint.weight_files",
        "imaginaire.weights": "imaginaire.checkpoint.weights",
        "imaginaire.workers": "imaginaire.data.workers",
    }
)
