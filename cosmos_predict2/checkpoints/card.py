# SPDX-License-Identifier: Apache-2.0
"""Records of weights about themselves, read once into plain data.

    card = read_card("checkpoints/posttraining/.../iter_000001000.pt")
    card.action_transform, card.family, card.net, card.texts, card.state_t

The path is anything that holds weights: a .pt or safetensors file, a run's folder or an iteration of it, a DCP or
diffusers folder, adapters, a released file, a hub id. The record comes from the config.yaml and runs.jsonl of the run
that the weights lie in, and from the weights themselves, which count more. Nothing that it names is imported; classes
that may be built for it are registered as `buildable("part")`: networks, tokenizers and objectives.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.dit_weights import (
    ACTION_EMBEDDERS,
    Family,
    describe,
    inside_a_pipeline,
    network_of,
    open_weights,
    quiet,
)
from cosmos_predict2.data.dataset_latents import FOLDER, LatentDataset, read_record
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.data.views import named, views_of_data
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import PREDICT25
from cosmos_predict2.text.trained_text import KEY as TEXT_KEY
from cosmos_predict2.text.trained_text import TrainedText
from cosmos_predict2.tokenizers.sizes import VIDEO_SIZES, pixel_frames
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from imaginaire import foreign_json, storage
from imaginaire.buildable import buildable, recorded, shipped
from imaginaire.checkpoint.weight_files import below, is_hub, local_file, names_at, shape_of
from imaginaire.config.lazy_config import plain_data, to_data
from imaginaire.errors import CheckpointError, ConfigError, DataError, raised_as
from imaginaire.renamed import RENAMED

log = logging.getLogger(__name__)

# Keys in checkpoints (the bytes of JSON as uint8) and in the header of safetensors (JSON). The card is under the first.
# The other two are read from weights of networks with actions that older versions wrote.
KEY, TRANSFORM_KEY, PIPELINE_KEY = "model_card", "action_transform", "action_pipeline"
ALPHA_KEY = "lora_alpha"  # in an exported .pt: a number
# Of model.config.pipe_config, what gives the weights the meaning that they had in training.
PIPELINE = (
    "net", "tokenizer", "state_t", "fps", "resolution", "conditioning_strategy", "sigma_conditional", "sigma_data",
    "rectified_flow_t_scaling_factor", "timestamps", "flow", "objective", "conditioner", "precision",
    "text_encoder", "condition_locations",
)  # fmt: skip
OF_THE_MACHINE = ("atten_backend", "sac_config")  # of the network's arguments: another machine chooses anew
TOKENIZER, TEXT_ENCODER = "tokenizer", "text_encoder"  # parts of the pipeline, and their entries in the digests

# Published files that record no transform, by a part of their path.
_RELEASED: list[tuple[str, ActionTransform]] = [
    (r"Cosmos-Predict2-2B-Sample-Action-Conditioned(/|$)", relative_pose()),
    (re.escape(PREDICT25["2B/robot/action-cond"][1].rpartition("/")[2].partition("_")[0]), relative_pose()),
    (r"(^|/)libero-\w+-2b-\d+k\.pt$", controller()),
]


KNOWN = shipped("part", {})


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register(*classes: type) -> None:
    """Add networks, tokenizers and objectives that may be built for weights whose record names them."""
    for cls in classes:
        buildable("part")(cls)


register(DiT, Video2WorldDiT, FlatActionDiT, ChunkActionDiT, MultiViewDiT, WanDiT, TinyTokenizer, WanTokenizer)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The record of weights, of the run that they lie in or of their release; without one their names and shapes. Empty
    and None: not recorded."""

    path: str = ""  # of the weights, as it was given
    problem: str = ""  # why they cannot be opened
    run_folder: str = ""  # of the training run that they lie in
    run: Mapping[str, Any] = field(default_factory=dict)  # the config.yaml of that run
    starts: Mapping[str, Any] = field(default_factory=dict)  # what its starts recorded in runs.jsonl

    # as names and shapes show
    family: Family | None = None
    has_action_embedders: bool = False
    has_average: bool = False
    lora_rank: int | None = None

    # as recorded
    pipeline: Mapping[str, Any] = field(default_factory=dict)  # of model.config.pipe_config the keys PIPELINE
    action_transform: ActionTransform | None = None
    is_known_by_name: bool = False  # the transform is that of a published file, which does not record it
    texts: tuple[TrainedText, ...] = ()  # of the training data; prompts are encoded as the first
    constant_text: str = ""  # the file of the one embedding that every sample had
    video_size: tuple[int, int] | None = None  # (height, width) of the training clips, of each view
    views: tuple[str, ...] = ("",)  # of the training clips, from top to bottom (`data.views`)
    action_keys: tuple[str, ...] | None = None  # the columns that made an action, where they were named
    frame_rate: float | None = None  # of the training clips
    input_crop: str = ""  # how the training clips were brought to size
    min_conditioning_frames: int | None = None  # latent frames, in training, where not one of its clips had fewer
    max_conditioning_frames: int | None = None
    lora_alpha: float | None = None
    lora_targets: str = ""
    base: str = ""  # the weights that training started from
    digests: Mapping[str, str] = field(default_factory=dict)  # of the weights of the other parts, by their names

    def opened(self) -> "ModelCard":
        """This card; raises where the weights cannot be opened."""
        if self.problem:
            raise CheckpointError(self.problem)
        return self

    @property
    def source(self) -> str:
        """The run's folder, or else the weights: for messages."""
        return self.run_folder or self.path

    @property
    def net(self) -> Mapping[str, Any]:
        """Arguments of the network, its class as ``_target_``."""
        found: Mapping[str, Any] = self.pipeline.get("net") or {}
        return found

    @property
    def network_class(self) -> type | None:
        """The class of the network, where it is recorded and known here."""
        return known_class(self.net)

    @property
    def has_pipeline(self) -> bool:
        """True if the record suffices to build the pipeline."""
        is_whole = all(key in self.pipeline for key in ("net", "state_t", "fps", "resolution"))
        return is_whole and self.network_class is not None

    @property
    def takes_actions(self) -> bool:
        cls = self.network_class
        return self.has_action_embedders if cls is None else issubclass(cls, ActionDiT)

    @property
    def is_wan(self) -> bool:
        """True for a network of Wan2.1: as recorded, else by its names."""
        cls = self.network_class
        return issubclass(cls, WanDiT) if cls is not None else self.family is not None and self.family.is_wan

    @property
    def is_predict2p5(self) -> bool:
        """True if the network predicts the velocity of a flow: as recorded, else by its projection of the text."""
        if self.pipeline:
            return bool(self.pipeline.get("flow")) and not self.is_wan
        return self.family is not None and self.family.text_projection_from is not None

    @property
    def state_t(self) -> int:
        return int(self.pipeline["state_t"])

    @property
    def chunk_size(self) -> int:
        """Actions between the first and the last frame of a clip."""
        return pixel_frames(self.state_t) - 1

    @property
    def fps(self) -> float:
        """Frames per second of the training clips, or else those of the model's config."""
        return self.frame_rate or float(self.pipeline["fps"])

    @property
    def shape(self) -> tuple[str, str | None]:
        """(resolution, aspect ratio) of the training clips; where no name fits their size, the model's resolution."""
        for resolution, table in VIDEO_SIZES.items():
            for ratio, (width, height) in table.items():
                if self.video_size == (height, width):
                    return resolution, ratio
        return str(self.pipeline["resolution"]), None

    def model_size(self, sizes: Mapping[str, Any]) -> str | None:
        """The key of ``sizes`` whose network is as large; None for a network of another size."""
        numbers = ("model_channels", "num_blocks", "num_heads")
        return next(
            (n for n, size in sizes.items() if all(self.net.get(key) == size.net[key] for key in numbers)), None
        )

    @property
    def switches(self) -> dict[str, Any]:
        """Values of model.config that the run had when it wrote these weights; empty where they cannot be opened."""
        if self.problem:
            return {}
        found: dict[str, Any] = {"train_architecture": "base" if self.lora_rank is None else "lora"}
        if self.lora_rank is not None:
            found["lora_rank"] = self.lora_rank
            found |= {} if self.lora_alpha is None else {"lora_alpha": self.lora_alpha}
        return found | {"pipe_config.ema.enabled": self.has_average}

    def __str__(self) -> str:
        """Size, rate and length, where they are recorded; else the network that names and shapes show."""
        if not self.has_pipeline:
            return self.problem or f"{self.path}: {self.family or 'no network'}"
        size = f" ({self.video_size[1]}x{self.video_size[0]})" if self.video_size else ""
        crop = f", crop={self.input_crop}" if self.input_crop else ""
        crop += f", {named(self.views)}" if len(self.views) > 1 else ""
        return f"resolution {self.shape[0]}{size}, {self.fps:g} frames per second, {self.state_t} latent frames{crop}"


def known_class(node: Mapping[str, Any]) -> type | None:
    """The class of a recorded node, if it is registered; also by the name that it had in older versions."""
    return recorded(_renamed(str(node.get("_target_"))), "part")


# Reading --------------------------------------------------------------------------------------------------------------


def read_card(path: str, *, fetch: bool = True) -> ModelCard:
    """The card of the weights at a path; raises for a record in them that cannot be read.

    Weights that cannot be opened give a card with a ``problem``, as do those of another machine without ``fetch``.
    """
    if not path:
        return ModelCard(problem="There are no weights.")
    found: dict[str, Any] = {"path": path}
    if not fetch and (storage.is_remote(path) or is_hub(path)):
        found["problem"] = f"{path} is not on this machine."
    else:
        if folder := run_folder(path):
            found |= dict(run_folder=folder, run=run_tree(folder), starts=start_facts(folder))
            found |= _typed(_of_run(found["run"], found["starts"]), folder, is_strict=False)
        found |= _of_weights(path)
        if held := section_of(found.get("run"), "model", "config", "world_model"):  # of a policy's run
            base = read_card(str(found.get("base") or held.get("dit_path") or ""), fetch=fetch)
            inherited = ("action_transform", "digests", "views", "video_size", "action_keys", "frame_rate")
            found = {name: getattr(base, name) for name in inherited} | found
    # A text whose encoder was not built yet when the run recorded it gets the encoder's whole name.
    encoder = found.get("digests", {}).get(TEXT_ENCODER, "")
    kind = encoder.partition("-")[0]
    texts = found.get("texts", ())
    found["texts"] = tuple(replace(text, encoder=encoder) if text.encoder == kind else text for text in texts)
    if found.get("action_transform") is None:
        of_release = next((transform for pattern, transform in _RELEASED if re.search(pattern, path)), None)
        found |= dict(action_transform=of_release, is_known_by_name=of_release is not None)
    return ModelCard(**found)


def card_in(state: Mapping[str, Tensor]) -> ModelCard:
    """The card that is written in the state of a checkpoint."""
    return ModelCard(**_typed(_written("the checkpoint", state, {}), "the checkpoint"))


def card_of_config(config: Any) -> ModelCard:
    """The card of weights that are trained by a ``model.config``."""
    return ModelCard(**_typed(_of_config(to_data(config)), "model.config"))


def _of_weights(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    header: dict[str, str] = {}
    source: Mapping[str, Tensor] = {}
    try:
        with quiet():
            source = open_weights(path)
            header = safetensors_header(inside_a_pipeline(path))
            net = network_of(source, path)
        found = dict(
            family=describe(net),
            has_action_embedders=any(name.startswith(ACTION_EMBEDDERS.rstrip("*")) for name in net),
            has_average=any(name.startswith("net_ema.") for name in source),
            lora_rank=next((shape_of(net, n)[0] for n in net if n.endswith(".lora_A.default.weight")), None),
        )
    except (CheckpointError, OSError) as error:
        found = {"problem": str(error)}
    return found | _typed(_written(path, source, header), path)


def _written(path: str, source: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, Any]:
    """The record in the weights, as plain data by the fields of a card."""
    card, pipeline, transform = (_json_of(key, path, source, header) for key in (KEY, PIPELINE_KEY, TRANSFORM_KEY))
    alpha = header.get("alpha", source.get(ALPHA_KEY))
    found: dict[str, Any] = {} if alpha is None else {"lora_alpha": alpha}
    found |= {"base": header["base"]} if header.get("base") else {}
    found |= {"video_size": pipeline.pop("video_size", None), "pipeline": pipeline} if pipeline else {}
    return found | ({TRANSFORM_KEY: transform} if transform else {}) | card


def _json_of(key: str, path: str, source: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, Any]:
    """The object that is written under a key in the header or, as bytes, in the tensors; empty where there is none."""
    if key in header:
        text = header[key]
    elif key in source:
        text = bytes(source[key].detach().cpu().to(torch.uint8).tolist()).decode(errors="replace")
    else:
        return {}
    with raised_as(CheckpointError, f"{path}: its '{key}' cannot be read", ValueError):
        tree = foreign_json.loads(text)
        foreign_json.refuse_interpolations(tree, key)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: its '{key}' cannot be read: an object was expected.")
    return tree


def safetensors_header(path: str) -> dict[str, str]:
    """The metadata of a safetensors file, or of the first in a folder; empty for any other."""
    import safetensors

    if not path.endswith(".safetensors"):
        files = sorted(name for name in names_at(path) if name.endswith(".safetensors"))
        if not files:
            return {}
        path = below(path, files[0])
    try:
        with safetensors.safe_open(local_file(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return {}  # reading its tensors raises the error


def _of_run(tree: Mapping[str, Any], starts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a card by a run's config.yaml and its starts, those of its data sets too."""
    config = section_of(tree, "model", "config", "world_model", "config") or section_of(tree, "model", "config")
    pipe = section_of(config, "pipe_config")
    of_pipeline = None if TRANSFORM_KEY in pipe else pipe.get("input_crop")  # data sets with actions have none
    nodes = [*mappings(tree.get("dataloader_train"))]
    return _of_config(config) | {
        "texts": starts.get(TEXT_KEY),
        "frame_rate": starts.get(RATE_KEY),
        "video_size": next((node["video_size"] for node in nodes if _is_size(node.get("video_size"))), None),
        "input_crop": next((crop for node in nodes if (crop := _crop_of(node))), of_pipeline),
        "views": next((list(views) for node in nodes if len(views := views_of_data(node)) > 1), None),
        "action_keys": next((keys for node in nodes if (keys := node.get("action_keys"))), None),
    }


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a card by a ``model.config`` as plain data."""
    pipe, is_whole = section_of(config, "pipe_config"), config.get("train_architecture") == "base"
    fewest, most = pipe.get("min_num_conditional_frames"), pipe.get("max_num_conditional_frames")
    shares = (config.get("conditional_frames_probs") or {}) if pipe.get("flow") else {}
    if numbers := [int(number) for number, share in shares.items() if share]:
        fewest, most = min(numbers), max(numbers)
    text = section_of(config, "text")
    return {
        "pipeline": _pipeline_facts(pipe, text.get("encoder")) if isinstance(pipe.get("net"), dict) else None,
        "action_transform": pipe.get(TRANSFORM_KEY),
        "constant_text": text.get("constant_path"),
        "min_conditioning_frames": fewest if (fewest or 0) > 1 else None,
        "max_conditioning_frames": most,
        "lora_alpha": None if is_whole else config.get("lora_alpha"),
        "lora_targets": None if is_whole else config.get("lora_target_modules"),
        "base": section_of(config, "model_manager_config").get("dit_path"),
    }


def _pipeline_facts(pipe: Mapping[str, Any], encoder: Any) -> dict[str, Any]:
    """``encoder`` is that of the captions in training, where it encodes them."""
    pipe = {**pipe, TEXT_ENCODER: encoder or pipe.get(TEXT_ENCODER)}
    found = {key: pipe[key] for key in PIPELINE if pipe.get(key) is not None}
    return found | {"net": {key: value for key, value in pipe["net"].items() if key not in OF_THE_MACHINE}}


def _crop_of(node: Mapping[str, Any]) -> str | None:
    """The crop of a data set's clips: its argument, its class's default, or the record of cached latents."""
    crop, name = node.get("crop"), _renamed(str(node.get("_target_")))
    if name == name_of(Dataset):
        crop = crop or "stretch"
    elif name == name_of(LatentDataset):
        with suppress(DataError):
            record = read_record(Path(str(node.get("dataset_dir"))) / FOLDER)
            crop = record and record.crop
    return crop if crop in CROPS else None


def mappings(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a section, the outer ones first."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from mappings(value)


def section_of(tree: Any, *keys: str) -> dict[str, Any]:
    """A section of a run's configuration; empty where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _renamed(name: str) -> str:
    module, _, last = name.rpartition(".")
    return f"{RENAMED.get(module, module)}.{last}"


# Fields ---------------------------------------------------------------------------------------------------------------


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(side, int) for side in value)


def _pipeline(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("net"), dict):
        raise TypeError("an object with 'net' is expected")
    return value


def _size(value: Any) -> tuple[int, int]:
    if not _is_size(value):
        raise TypeError(f"{value!r}, [height, width] is expected")
    return value[0], value[1]


# Every recorded field, from plain data; what cannot be read is a TypeError or ValueError.
_FIELDS: dict[str, Any] = {
    "pipeline": _pipeline,
    "action_transform": ActionTransform.from_dict,
    "texts": lambda value: tuple(TrainedText(**text) for text in value),
    "constant_text": str,
    "video_size": _size,
    "frame_rate": float,
    "input_crop": str,
    "views": lambda value: tuple(map(str, value)),
    "action_keys": lambda value: (value,) if isinstance(value, str) else tuple(map(str, value)),
    "min_conditioning_frames": int,
    "max_conditioning_frames": int,
    "lora_alpha": float,
    "lora_targets": str,
    "base": str,
    "digests": lambda value: {str(part): str(digest) for part, digest in value.items()},
}


def _typed(record: Mapping[str, Any], where: str, *, is_strict: bool = True) -> dict[str, Any]:
    """The fields of a card from plain data. What cannot be read is an error, or if not ``is_strict`` a warning."""
    found = {}
    for name, convert in _FIELDS.items():
        if record.get(name) is None:
            continue
        try:
            found[name] = convert(record[name])
        except (TypeError, ValueError, AttributeError) as error:
            if is_strict or name == TRANSFORM_KEY:  # actions in another form would be silent nonsense
                raise CheckpointError(f"{where}: its '{name}' cannot be read: {error}") from error
            log.warning("%s: its '%s' cannot be read: %s", where, name, error)
    return found


# Writing --------------------------------------------------------------------------------------------------------------


def card_texts(card: ModelCard) -> dict[str, str]:
    """The record of a card as JSON, by the keys that the header of a safetensors file has it under."""
    record = {name: getattr(card, name) for name in _FIELDS if getattr(card, name) not in (None, "", (), ("",), {})}
    record |= {"texts": [asdict(text) for text in card.texts]} if card.texts else {}
    record |= {TRANSFORM_KEY: card.action_transform.to_dict()} if card.action_transform is not None else {}
    older: dict[str, Any] = {}
    if card.takes_actions:
        if pipeline := record.pop("pipeline", None):
            size = record.pop("video_size", None)
            older[PIPELINE_KEY] = {**pipeline, **({"video_size": list(size)} if size else {})}
        if transform := record.pop(TRANSFORM_KEY, None):
            older[TRANSFORM_KEY] = transform
    return {key: json.dumps(tree, separators=(",", ":")) for key, tree in {**older, KEY: record}.items() if tree}


def card_tensors(card: ModelCard) -> dict[str, Tensor]:
    """The record of a card as a checkpoint holds it: `card_texts` as tensors of bytes."""
    return {key: text_tensor(text) for key, text in card_texts(card).items()}


def text_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


# The run that weights lie in ------------------------------------------------------------------------------------------


STARTS = "runs.jsonl"
RATE_KEY = "frame_rate"  # in runs.jsonl: frames per second of the clips


def run_folder(path: str) -> str:
    """The folder of the run that weights lie in, itself or up to three above; empty where none has a config.yaml."""
    folder = path.rstrip("/")
    for _ in range(4):
        if not folder or folder.endswith(":/"):
            return ""
        is_place = not folder.startswith("hf://") and storage.is_folder(folder)
        if is_place and storage.exists(storage.join(folder, "config.yaml")):
            return folder
        folder = folder.rpartition("/")[0]
    return ""


def run_tree(folder: str) -> dict[str, Any]:
    """The config.yaml of a run as plain data; empty, with a warning, where it cannot be read."""
    file = storage.join(folder, "config.yaml")
    try:
        tree: Any = plain_data(storage.read_text(file), file)
        foreign_json.refuse_interpolations(tree, file)
    except (ConfigError, CheckpointError) as error:
        log.warning("the run's configuration is not read: %s", error)
        return {}
    return tree if isinstance(tree, dict) else {}


def start_facts(folder: str) -> dict[str, Any]:
    """Facts that the starts of a run recorded in runs.jsonl, each key's newest; empty if unreadable, with a warning."""
    file = storage.join(folder, STARTS)
    if not storage.exists(file):
        return {}
    facts: dict[str, Any] = {}
    try:
        for line in storage.read_text(file).splitlines():
            if line.strip():
                facts.update(foreign_json.loads(line))
        facts.pop("command", None)  # as it was typed, with ${...} of its overrides
        foreign_json.refuse_interpolations(facts, file)
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be read: %s", file, error)
        return {}
    return facts
