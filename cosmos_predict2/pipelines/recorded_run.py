# SPDX-License-Identifier: Apache-2.0
"""Records of the run that weights come from: their pipeline's configuration, the run's whole one, and its data.

    apply_card(read_card("checkpoints/posttraining/video2world/NAME/checkpoints/model/iter_000001000.pt"), config)
    config = composed_run(read_card("checkpoints/posttraining/video2world/NAME"), overrides=[])

A run's config.yaml may come with weights from anywhere: before anything that it names is looked for, all names are held
to be of this code, or registered. A run of other code is composed from its experiment.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from cosmos_predict2.checkpoints.card import OF_THE_MACHINE, TOKENIZER, ModelCard, known_class, read_card
from cosmos_predict2.checkpoints.dit_loading import FILES, OF_THIS_MACHINE, unregistered
from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.world_model.assembly import apply_text
from cosmos_predict2.world_model.config import (
    FlowConfig,
    SolverConfig,
    Video2WorldActionPipelineConfig,
    Video2WorldPipelineConfig,
)
from imaginaire import storage
from imaginaire.buildable import locate, recorded, signature, target_of
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import FOLDERS, MARKS, LazyCall
from imaginaire.config.schema import Config
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

OURS = ("cosmos_predict2", "imaginaire")

# What makes latents and noise levels mean what they meant in training.
_SAME = (
    "state_t",
    "fps",
    "conditioning_strategy",
    "sigma_conditional",
    "sigma_data",
    "rectified_flow_t_scaling_factor",
    "precision",
)

PLACES = ("dataset_dir", "folder", "root", "video_path")  # arguments of data sets: where they lie
VIDEOS = "videos"  # of a folder of clips
HELD_OUT = ("val", "validation", "test")  # of a folder's splits, the first that is there
# Arguments of a run's data that belong to its place, or that the weights record: other folders have their own.
OF_PLACE = {
    "root", "train_annotation_path", "val_annotation_path", "test_annotation_path", "video_path", "embedding_dir",
    "mode", "data_split", "split_file", "num_frames", "num_action_per_chunk", "load_t5_embeddings", "accumulate_action",
    "quaternion", "rot6d", "action_scale", "gripper_rescale_factor", "action_transform",
}  # fmt: skip


def read_and_warn(path: str) -> ModelCard:
    """The card of weights, with a warning where their network is of code that is not known here."""
    card = read_card(path)
    if problem := unregistered(card):
        log.warning("%s Nothing of the record is used", problem)
    return card


def apply_card(card: ModelCard, config: Video2WorldPipelineConfig, *, tokenizer_path: str = "") -> None:
    """Give the config the parts of the weights, with their arguments and files: network, tokenizer, objective, text;
    also length and rate, noise levels, and actions. ``tokenizer_path`` is where the tokenizer's file lies now."""
    takes_actions = isinstance(config, Video2WorldActionPipelineConfig)
    if card.takes_actions != takes_actions:
        program, which = ("video2world_action", "with") if card.takes_actions else ("video2world", "without")
        raise CheckpointError(f"{card.source} trained a network {which} actions: use examples/{program}.py for it.")
    machine = {key: config.net[key] for key in OF_THE_MACHINE if key in config.net}
    config.net = LazyCall(card.network_class)(**_arguments(card, "net"), **machine)
    for key in _SAME:
        if key in card.pipeline:
            setattr(config, key, card.pipeline[key])
    config.min_num_conditional_frames = card.min_conditioning_frames or config.min_num_conditional_frames
    config.timestamps = SolverConfig(**_known(SolverConfig, card.pipeline.get("timestamps")))
    flow = card.pipeline.get("flow")
    config.flow = FlowConfig(**_known(FlowConfig, flow)) if flow else None
    for part in (TOKENIZER, "objective"):
        if problem := unregistered(card, part):
            raise CheckpointError(problem)
    if cls := known_class(card.pipeline.get(TOKENIZER) or {}):
        own = config.tokenizer if target_of(config.tokenizer) is cls else {}
        config.tokenizer = LazyCall(cls)(**_tokenizer_arguments(card, own, is_moved=bool(tokenizer_path)))
    if tokenizer_path:
        place_tokenizer(config, tokenizer_path)
    cls = known_class(card.pipeline.get("objective") or {})
    config.objective = LazyCall(cls)(**_arguments(card, "objective")) if cls else None
    if isinstance(config, Video2WorldActionPipelineConfig):
        if card.action_transform is not None and not card.is_known_by_name:
            config.action_transform = card.action_transform.to_dict()
        config.chunk_size = card.chunk_size
    else:  # with actions, clips have a label in place of their rate
        config.fps = card.fps
        config.input_crop = card.input_crop or config.input_crop
    rates = _known(ConditionerConfig, card.pipeline.get("conditioner"))
    config.conditioner = ConditionerConfig(**{key: DropoutConfig(**value) for key, value in rates.items()})
    if config.text_encoder is not None and "width" in config.text_encoder:
        config.text_encoder.width = config.net.get("crossattn_proj_in_channels") or config.net.crossattn_emb_channels
    if card.texts:
        apply_text(card, config)


def _arguments(card: ModelCard, part: str) -> dict[str, Any]:
    """The arguments of a recorded node; one that would be built too is an error."""
    arguments = {key: value for key, value in card.pipeline[part].items() if not key.startswith("_")}
    for name, value in arguments.items():
        if "_target_" in str(value):
            file = f"{card.run_folder}/config.yaml" if card.run_folder else card.path
            raise CheckpointError(f"{file}: pipe_config.{part}.{name} names something to build, {value}.")
    return arguments


def place_tokenizer(config: Any, path: str) -> None:
    """Make the tokenizer of a pipeline's config read this file."""
    key = next((key for key in FILES if key in signature(target_of(config.tokenizer))), None)
    if key is None:
        name = getattr(target_of(config.tokenizer), "__name__", "the tokenizer")
        raise ConfigError(f"--tokenizer_path {path}: {name} takes no file ({' or '.join(FILES)}). Leave it out.")
    config.tokenizer[key] = path


def _tokenizer_arguments(card: ModelCard, own: Mapping[str, Any], *, is_moved: bool) -> dict[str, Any]:
    """The recorded arguments, with those of the machine as this program's config has them, and its file where it lies
    now unless ``is_moved`` to where the caller knows."""
    arguments = {key: value for key, value in _arguments(card, TOKENIZER).items() if key != "device"}
    arguments |= {key: own[key] for key in OF_THIS_MACHINE[TOKENIZER] if key in own}
    for key in FILES:
        if (file := str(arguments.get(key) or "")) and not is_moved:
            arguments[key] = _place_of_file(card, file, str(own.get(key) or ""))
    return arguments


def _place_of_file(card: ModelCard, file: str, own: str) -> str:
    """The place of a recorded file on this machine.

    It is looked for as recorded, then from the folders above the run's (it was recorded relative to one of them), then
    beside the weights. A released file that is in none of these places is where this program's config has it.
    """
    if storage.is_remote(file) or is_hub(file) or storage.exists(file):
        return file
    above = [] if os.path.isabs(file) else list(Path(card.run_folder or card.path).absolute().parents)
    beside = [Path(folder) for folder in (card.run_folder, os.path.dirname(card.path)) if folder]
    places = [*(folder / file for folder in above), *(folder / Path(file).name for folder in beside)]
    if Path(own).parts[-3:] == Path(file).parts[-3:]:
        return next((str(place) for place in places if place.exists()), own)
    if (found := next((str(place) for place in places if place.exists()), None)) is None:
        raise CheckpointError(
            f"{card.source} was trained with the tokenizer of {file}, which is not there. Give the file with"
            " --tokenizer_path FILE."
        )
    log.info("tokenizer: %s, recorded as %s", found, file)
    return found


def _known(cls: type, values: Mapping[str, Any] | None) -> dict[str, Any]:
    names = {field.name for field in attrs.fields(cls)}
    return {key: value for key, value in (values or {}).items() if key in names}


# The whole configuration ---------------------------------------------------------------------------------------------


def is_video2world(card: ModelCard) -> bool:
    """True for weights in the local folder of a Video2World run without actions."""
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
        for name in _names(built, ("_target_",)):
            # a function could do anything with its arguments; the classes of models and data sets only keep them
            is_class = name.startswith("cosmos_predict2.") and isinstance(locate(name), type)
            if not is_class and not _is_registered(name):
                raise ConfigError(f"{file} builds its model or data by {name}, which is none of the classes for that.")
    return compose(file, overrides)


def _sections(tree: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [section for name in names if isinstance(section := tree.get(name), dict)]


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
    """True for a name of this code whose object is of this code, too: a module's ``os`` is not. Of torch, classes and
    precisions pass; of other code, what is registered."""
    if name.startswith("torch."):
        found = locate(name)
        return isinstance(found, torch.dtype) or (isinstance(found, type) and found.__module__.startswith("torch"))
    if name.partition(".")[0] not in OURS:
        return _is_registered(name)
    return str(getattr(locate(name), "__module__", "")).partition(".")[0] in OURS


# Its data -------------------------------------------------------------------------------------------------------------


def own_arguments(cls: type, trained: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which a run reads data of this class, overridden by ``given``; the latter alone where the
    run's data are of another class."""
    if trained.get("_target_") != f"{cls.__module__}.{cls.__name__}":
        return dict(given)
    defaults = {name: parameter.default for name, parameter in signature(cls).items()}
    own = {key: value for key, value in trained.items() if not key.startswith("_") and key not in OF_PLACE}
    differing = [f"{key}={own[key]}" for key in sorted(own) if key not in given and own[key] != defaults.get(key)]
    if differing:
        log.info("data: read as by the run of the weights: %s", ", ".join(differing))
    return {**own, **given}


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
    """A reason to doubt figures on the held-out clips of a node; empty where there is none."""
    names = described_dataset(held_out), described_dataset(training)
    if target_of(held_out) is not target_of(training):
        return f"the clips are of {names[0]}, those of training of {names[1]}: give --data FOLDER with clips like these"
    folders = [node.get("dataset_dir") for node in (training, held_out)]
    if all(folders) and len({Path(str(folder)).resolve() for folder in folders}) == 1:
        return f"the clips are those of training ({folders[0]}), and say nothing of clips that the model never saw"
    return ""
