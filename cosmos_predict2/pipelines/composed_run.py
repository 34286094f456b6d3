# SPDX-License-Identifier: Apache-2.0
"""The whole configuration of a Video2World run, from the config.yaml that its weights lie below.

The file may come with weights from anywhere: before anything that it names is looked for, all names are held to be of
this code, or registered. A run of other code is composed from its experiment.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.checkpoints.card import ModelCard
from imaginaire.buildable import recorded
from imaginaire.config.compose import compose
from imaginaire.config.lazy_yaml import FOLDERS, MARKS
from imaginaire.config.names import locate, target_of
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

OURS = ("cosmos_predict2", "imaginaire")
HELD_OUT = ("val", "validation", "test")  # of a folder's splits, the first that is there
VIDEOS = "videos"  # of a folder of clips
PLACES = ("dataset_dir", "folder", "root", "video_path")  # arguments of data sets: where they lie


def is_video2world(card: ModelCard) -> bool:
    """Whether weights lie in the local folder of a Video2World run without actions."""
    has_folder = bool(card.run_folder) and "://" not in card.run_folder
    return has_folder and card.network_class is not None and not card.takes_actions


def composed_run(card: ModelCard, overrides: list[str]) -> Config:
    """The frozen configuration of the run that weights lie in, as its ``config.yaml`` has it, with overrides."""
    file, tree = f"{card.run_folder}/config.yaml", dict(card.run)
    if not tree:
        raise ConfigError(f"{file} cannot be read. Give --experiment NAME, the one that the run trained.")
    types = [section.get("type") for section in _sections(tree, "trainer", "checkpoint")]
    names = [*_names(tree), *(name for name in types if isinstance(name, str))]
    if other := tree.get(FOLDERS) or next((name for name in names if not _is_ours(name)), None):
        raise ConfigError(
            f"{file} names {other}, which is not of this code, nor registered, and is not imported. Give --import"
            " MODULE, where it is @buildable; or --experiment NAME, too, and --config FILE where the former is yours."
        )
    for section in _sections(tree, "model", "dataloader_train", "dataloader_val"):
        built = section.get("config"), section.get("dataset")  # by an evaluation
        if name := next((name for name in _names(built, ("_target_",)) if not _is_buildable(name)), None):
            raise ConfigError(f"{file} builds its model or data by {name}, which is none of the classes for that.")
    return compose(file, overrides)


def described_dataset(node: Mapping[str, Any]) -> str:
    """The class of a data set's node and the folder that it reads, where it reads one."""
    target = node["_target_"]
    name = target.rpartition(".")[2] if isinstance(target, str) else target.__name__
    place = next((str(node[key]) for key in PLACES if node.get(key)), "")
    return f"{name} ({place})" if place else str(name)


def dataset_node(config: Config, loader: str) -> Mapping[str, Any]:
    """The node of a loader's data set."""
    node: Mapping[str, Any] | None = (getattr(config, loader) or {}).get("dataset")
    if node is None:
        raise ConfigError(f"{loader} has no dataset to take clips from: give --data, or another entry ({loader}=toy).")
    return node


def held_out_node(config: Config, data: str) -> Mapping[str, Any]:
    """The node of the held-out clips: of dataloader_val, or of the folder ``data`` (of its splits, if any, the held-out
    one), read as the training clips are."""
    if not data:
        return dataset_node(config, "dataloader_val")
    training = dataset_node(config, "dataloader_train")
    if "dataset_dir" not in training:
        raise ConfigError(f"--data {data}: the training data are {described_dataset(training)}, no folder of clips.")
    if not Path(data).is_dir():
        raise ConfigError(f"--data {data}: no such folder of clips like {training['dataset_dir']}.")
    splits = [] if Path(data, VIDEOS).is_dir() else [name for name in HELD_OUT if Path(data, name, VIDEOS).is_dir()]
    return {**training, "dataset_dir": str(Path(data, *splits[:1]))}


def held_out_doubt(training: Mapping[str, Any], held_out: Mapping[str, Any]) -> str:
    """What makes figures on the held-out clips of a node doubtful; empty: nothing."""
    names = described_dataset(held_out), described_dataset(training)
    if target_of(held_out) is not target_of(training):
        return f"the clips are of {names[0]}, those of training of {names[1]}: give --data FOLDER with clips like these"
    folders = [node.get("dataset_dir") for node in (training, held_out)]
    if all(folders) and len({Path(str(folder)).resolve() for folder in folders}) == 1:
        return f"the clips are those of training ({folders[0]}), and say nothing of clips that the model never saw"
    return ""


def _sections(tree: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [section for name in names if isinstance(section := tree.get(name), dict)]


def _is_buildable(name: str) -> bool:
    """A function could do anything with its arguments; the classes of models and data sets only keep them."""
    return _is_registered(name) or (name.startswith("cosmos_predict2.") and isinstance(locate(name), type))


def _is_registered(name: str) -> bool:
    return any(isinstance(recorded(name, kind), type) for kind in ("part", "dataset", "callback"))


def _names(tree: Any, marks: Sequence[str] = ("_target_", *MARKS)) -> Iterator[str]:
    """Everything that a saved configuration names."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict):
        yield from (str(tree[mark]) for mark in marks if mark in tree)
        for value in tree.values():
            yield from _names(value, marks)


def _is_ours(name: str) -> bool:
    """Whether a name is of this code, and what is found there, too: a module's ``os`` is not. Of torch, classes are."""
    if name.startswith("torch."):
        found = locate(name)
        return isinstance(found, torch.dtype) or (isinstance(found, type) and found.__module__.startswith("torch"))
    if name.partition(".")[0] not in OURS:
        return _is_registered(name)
    return str(getattr(locate(name), "__module__", "")).partition(".")[0] in OURS
