# SPDX-License-Identifier: Apache-2.0
"""A small project to compose: classes (parts.py) and groups with experiments (config.py), in a store of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from imaginaire.config import lazy_config, registry
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import save_yaml

PARTS = """
import attrs
from typing import Any


class Net:
    def __init__(self, width: int = 8, depth: int = 2):
        self.width, self.depth = width, depth


@attrs.define(kw_only=True, slots=False)
class NetConfig:
    channels: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    name: str = "net"


@attrs.define(kw_only=True, slots=False)
class ModelConfig:
    rank: int = attrs.field(default=16)
    targets: str = "q,k"
    net: NetConfig = attrs.field(factory=NetConfig)
    part: Any = None
    extra: "NetConfig | None" = None

    def __attrs_post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be positive")


class Model:
    def __init__(self, config: Any):
        self.config = config


class OldModel:
    def __init__(self, width: int = 3, context_parallel_size: int = 1):
        self.width = width


class Loader:
    def __init__(self, dataset: Any = None, batch_size: int = 1, shuffle: bool = True):
        self.dataset, self.batch_size = dataset, batch_size


class Data:
    def __init__(self, root: str = "here", num_frames: int = 93):
        self.root, self.num_frames = root, num_frames


def optimizer(model, lr: float = 1e-4, betas=(0.9, 0.99), fused: "int | None" = None):
    return lr


class Derived(Net):
    def __init__(self, height: int = 1, **options):
        super().__init__(**options)
        self.height = height


def loose(model=None, **options):
    return options
"""

CONFIG = """
from typing import Any
import attrs
from hydra.core.config_store import ConfigStore
from imaginaire.compose import register_experiment
from imaginaire.config import Config, JobConfig, TrainerConfig
from imaginaire.lazy_config import PLACEHOLDER, LazyDict, LazyCall as L
from parts import Data, Derived, Loader, Model, ModelConfig, Net, OldModel, loose, optimizer


def make_config():
    cs = ConfigStore.instance()
    for name, frames in (("mock", 5), ("gr1", 93)):
        for group in ("dataloader_train", "dataloader_val"):
            loader = L(Loader)(dataset=L(Data)(root=name, num_frames=frames))
            cs.store(group=group, package=group, name=name, node=loader)
    cs.store(group="optimizer", package="optimizer", name="adamw", node=L(optimizer)(model=PLACEHOLDER))
    cs.store(group="optimizer", package="optimizer", name="loose", node=L(loose)(lr=1.0))
    cs.store(group="dataloader_train", package="dataloader_train", name="derived", node=L(Derived)())
    speed = L(Net)(width="${trainer.logging_iter}")
    cs.store(group="callbacks", package="trainer.callbacks", name="basic", node=dict(speed=speed))
    cs.store(group="callbacks", package="trainer.callbacks", name="long", node=dict(beat=L(Net)()))
    cs.store(group="model", package="_global_", name="small",
             node=dict(trainer=dict(distributed_parallelism="fsdp"),
                       model=L(Model)(config=ModelConfig(part=L(Net)()), _recursive_=False)))
    cs.store(group="model", package="_global_", name="nested", node=dict(defaults=["/optimizer/adamx", "_self_"]))
    register_experiment("base_exp", dict(
        defaults=[{"override /model": "small"}, {"override /data_val": "mock"},
                  {"override /dataloader_train": "gr1"}, "_self_"],
        job=dict(name="base_exp"), optimizer=dict(lr=0.5), dataloader_train=dict(batch_size=4)))
    register_experiment("child_exp", dict(
        defaults=["/experiment/base_exp", {"override /dataloader_train": None}, "_self_"],
        job=dict(name="child"), dataloader_train=L(Loader)(batch_size=7)))
    register_experiment("lazy_dict_exp", LazyDict(
        dict(defaults=["/experiment/child_exp", "_self_"], trainer=dict(type=Loader)), flags={"allow_objects": True}))
    register_experiment("inline_exp", dict(dataloader_train=L(Loader)(batch_size=9, dataset=L(Data)())))
    register_experiment("cleared_exp", dict(
        defaults=["/experiment/inline_exp", "/clear/dataloader_train", "_self_"], dataloader_train=L(Net)(depth=3)))
    register_experiment("chooses_cleared", dict(
        defaults=["/experiment/cleared_exp", {"override /dataloader_train": "gr1"}, "_self_"]))
    register_experiment("parent_wins", dict(
        defaults=["_self_", "/experiment/base_exp"], job=dict(name="lost", group="kept")))
    register_experiment("missing_exp", dict(
        model=L(Model)(config="???"), dataloader_train=L(Loader)(dataset=dict(root="???"))))
    register_experiment("old_exp", dict(model=L(OldModel)(context_parallel_size=2)))
    register_experiment("older_exp", dict(model=dict(L(Net)(), context_parallel_size=2)))
    register_experiment("wrong_key_exp", dict(trainer=dict(max_itr=3)))
    register_experiment("wrong_type_exp", dict(trainer=dict(max_iter="abc")))
    register_experiment("wrong_argument_exp", dict(optimizer=dict(lrr=3)))
    register_experiment("wrong_group_exp", dict(defaults=[{"override /optimzer": "adamw"}, "_self_"]))
    register_experiment("wrong_twice_exp", dict(defaults=[{"/optimizer": "adamw"}, "_self_"]))
    register_experiment("wrong_entry_exp", dict(defaults=[{"override /optimizer": "adam"}, "_self_"]))
    register_experiment("wrong_parent_exp", dict(defaults=["/experiment/base_ex", "_self_"]))
    register_experiment("no_effect_exp", dict(checkpoint=dict(jit=dict(enabled=True))))
    cs.store(group="experiment", name="no_package_exp", node=dict(trainer=dict(max_iter=3)))
    register_experiment("class_exp", dict(trainer=dict(type=Net), optimizer=dict(lr="${add:1,2}")))
    return Config(
        defaults=["_self_", {"dataloader_train": None}, {"dataloader_val": None},
                  {"optimizer": "adamw"}, {"model": None},
                  {"callbacks": ["basic"]}, {"net": None}, {"ema": None}, {"experiment": None}],
        job=JobConfig(project="p", group="g", name="n_${now:%Y-%m-%d}"),
        trainer=TrainerConfig(max_iter=400, logging_iter=10),
    )
"""


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds an empty store and leaves the modules of the process as they were."""
    state = ConfigStore.instance().repo
    ConfigStore.instance().repo = {k: v for k, v in state.items() if k in ("hydra", "_dummy_empty_config_.yaml")}
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "broken_modules", {})
    monkeypatch.setattr(lazy_config, "_import_folders", [])
    path, modules = list(sys.path), set(sys.modules)
    yield
    ConfigStore.instance().repo = state
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.py").write_text(CONFIG)
    return str(tmp_path / "config.py")


@pytest.fixture
def saved(config: str, tmp_path: Path) -> str:
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    save_yaml(compose(config, ["experiment=base_exp", "callbacks=[basic,long]"]), path)
    return str(path)
