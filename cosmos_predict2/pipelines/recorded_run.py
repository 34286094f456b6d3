# SPDX-License-Identifier: Apache-2.0
"""A pipeline like the one that a run trained: what its config.yaml says of network, size, length and rate.

run = recorded_run("checkpoints/posttraining/video2world/NAME/checkpoints/model/iter_000001000.pt")
config = get_cosmos_predict2_video2world_pipeline(model_size=run.model_size(SIZES))
run.apply_to(config)

The file may come with weights from anywhere: nothing that it names is imported, and only classes known here are built.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.checkpoints.runs import RATE_KEY, recorded_fact, run_folder, run_tree
from cosmos_predict2.checkpoints.written_pipeline import OF_THE_MACHINE, video_sizes, written_pipeline
from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.data.dataset_latents import LatentDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.latent_cache import FOLDER, read_record
from cosmos_predict2.data.sizes import VIDEO_SIZES, pixel_frames
from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.text.trained_text import TrainedText, follow_text, trained_text
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import SolverConfig, Video2WorldActionPipelineConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.flow import FlowConfig
from imaginaire.config import lazy_config
from imaginaire.errors import CheckpointError, DataError

log = logging.getLogger(__name__)


def _by_name(*classes: type) -> dict[str, type]:
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


WITH_ACTIONS = _by_name(FlatActionDiT, ChunkActionDiT)
NETWORKS = _by_name(Video2WorldDiT) | WITH_ACTIONS
TOKENIZERS = _by_name(TinyTokenizer, WanTokenizer)
_CLIPS, _LATENTS = _by_name(Dataset), _by_name(LatentDataset)

# What makes latents and noise levels mean what they meant in training.
_SAME = (
    "state_t",
    "fps",
    "conditioning_strategy",
    "sigma_conditional",
    "sigma_data",
    "rectified_flow_t_scaling_factor",
)


@dataclass(frozen=True)
class RecordedRun:
    """A Video2World run as its config.yaml has it."""

    folder: str  # or the file of weights, where that says it itself
    pipe: Mapping[str, Any]  # model.config.pipe_config
    dit_path: str  # where the run started from; empty: from random weights
    video_size: tuple[int, int] | None  # (height, width) of its clips, where the data say so
    is_file: bool = False
    most_given: int | None = None  # latent frames that were given in training at most, where that is known
    text: TrainedText | None = None  # where it recorded that
    frame_rate: float | None = None  # likewise
    crop: str | None = None  # how its clips were brought to size, where that is known

    @property
    def net(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.pipe["net"]
        return found

    @property
    def takes_actions(self) -> bool:
        return self.net["_target_"] in WITH_ACTIONS

    @property
    def state_t(self) -> int:
        return int(self.pipe["state_t"])

    @property
    def fps(self) -> float:
        """Frames per second of its clips; where it did not record them, what its model's config says."""
        return self.frame_rate or float(self.pipe["fps"])

    @property
    def shape(self) -> tuple[str, str | None]:
        """(resolution, aspect ratio) of its clips; where the data do not say, the resolution of its model."""
        for resolution, table in VIDEO_SIZES.items():
            for ratio, (width, height) in table.items():
                if self.video_size == (height, width):
                    return resolution, ratio
        return str(self.pipe["resolution"]), None

    @property
    def says(self) -> str:
        """Where its numbers are written, for messages."""
        return self.folder if self.is_file else f"{self.folder}/config.yaml"

    def __str__(self) -> str:
        resolution, _ = self.shape
        size = f" ({self.video_size[1]}x{self.video_size[0]})" if self.video_size else ""
        crop = f", crop={self.crop}" if self.crop else ""
        return f"resolution {resolution}{size}, {self.fps:g} frames per second, {self.state_t} latent frames{crop}"

    def model_size(self, sizes: Mapping[str, Any]) -> str | None:
        """The key of ``sizes`` whose network is as large; None for a network of another size."""
        return next((name for name, size in sizes.items() if self._is_as_large(size.net)), None)

    def _is_as_large(self, net: Mapping[str, Any]) -> bool:
        return all(self.net.get(name) == net[name] for name in ("model_channels", "num_blocks", "num_heads"))

    def apply_to(self, config: Video2WorldPipelineConfig) -> None:
        """Give the config the run's network, its text, its length and rate, its noise levels, and its actions."""
        self._require_actions(isinstance(config, Video2WorldActionPipelineConfig))
        _refuse_nodes(self.net, f"{self.says}: model.config.pipe_config.net")
        known = {key: value for key, value in self.net.items() if not key.startswith("_")}
        known |= {key: config.net[key] for key in OF_THE_MACHINE if key in config.net}
        config.net = lazy_config.LazyCall(NETWORKS[self.net["_target_"]])(**known)
        for key in _SAME:
            if key in self.pipe:
                setattr(config, key, self.pipe[key])
        if not self.takes_actions:  # whose clips have a label in place of their rate
            config.fps = self.fps
            config.input_crop = self.crop or self.pipe.get("input_crop") or config.input_crop
        config.timestamps = SolverConfig(**_known(SolverConfig, self.pipe.get("timestamps")))
        flow = self.pipe.get("flow")
        config.flow = FlowConfig(**_known(FlowConfig, flow)) if flow else None
        if isinstance(config, Video2WorldActionPipelineConfig):
            config.action_transform = self.pipe.get("action_transform") or config.action_transform
            config.chunk_size = pixel_frames(self.state_t) - 1
        rates = _known(ConditionerConfig, self.pipe.get("conditioner"))
        config.conditioner = ConditionerConfig(**{key: DropoutConfig(**value) for key, value in rates.items()})
        tokenizer = dict(self.pipe.get("tokenizer") or {})
        name = tokenizer.pop("_target_", None)
        if name is not None and name != _name_of(config.tokenizer):
            at = f"{self.says}: model.config.pipe_config.tokenizer"
            if name not in TOKENIZERS:
                raise CheckpointError(f"{at} is {name}, which is not built here: only {', '.join(TOKENIZERS)}.")
            _refuse_nodes(tokenizer, at)
            config.tokenizer = lazy_config.LazyCall(TOKENIZERS[name])(**tokenizer)
        if config.text_encoder is not None and "width" in config.text_encoder:
            config.text_encoder.width = known.get("crossattn_proj_in_channels") or known["crossattn_emb_channels"]
        if self.text is not None:
            follow_text(config, self.text, self.folder)

    def _require_actions(self, are_taken: bool) -> None:
        """Raise where this is the run of a network with actions and none are taken, or the other way round."""
        if self.takes_actions != are_taken:
            program, which = ("video2world_action", "with") if self.takes_actions else ("video2world", "without")
            raise CheckpointError(f"{self.folder} trained a network {which} actions: use examples/{program}.py for it.")


def recorded_run(path: str) -> RecordedRun | None:
    """The Video2World run whose folder a checkpoint lies in, or as far as a file of weights with actions says it; None
    where no config.yaml of one lies above it, or that of other code."""
    tree = run_tree(path) if path else None
    config = _below(tree, "model", "config")
    pipe = _below(config, "pipe_config")
    if is_file := run_folder(path) is None:
        config, pipe = {}, written_pipeline(path)
    if config is None or pipe is None or any(key not in pipe for key in ("net", "state_t", "fps", "resolution")):
        return None
    name = (_below(pipe, "net") or {}).get("_target_")
    if name not in NETWORKS:
        says = path if is_file else f"{run_folder(path)}/config.yaml"
        log.warning("%s is not read: its network is %s, and only %s is known here", says, name, ", ".join(NETWORKS))
        return None
    start = _below(config, "model_manager_config") or {}
    size = next(video_sizes(pipe if is_file else _below(tree, "dataloader_train")), None)
    rate = None if is_file else recorded_fact(path, RATE_KEY)
    return RecordedRun(
        path if is_file else str(run_folder(path)),
        pipe,
        str(start.get("dit_path") or ""),
        size,
        is_file,
        _most_given(config, pipe),
        None if is_file else trained_text(path),
        rate if isinstance(rate, int | float) and 0 < rate < math.inf else None,
        None if is_file else next(_crops(_below(tree, "dataloader_train")), None),
    )


def _crops(tree: Any) -> Iterator[str]:
    """How each data set of clips in a loader's section brings them to size: its argument, or the default of its class;
    of cached latents as their record says, where it is here."""
    if not isinstance(tree, dict):
        return
    crop = tree.get("crop")
    if tree.get("_target_") in _CLIPS:
        crop = crop or "stretch"
    elif tree.get("_target_") in _LATENTS:
        with contextlib.suppress(DataError):
            record = read_record(Path(str(tree.get("dataset_dir"))) / FOLDER)
            crop = record and record.crop
    if crop in CROPS:
        yield crop
    for value in tree.values():
        yield from _crops(value)


def _most_given(config: Mapping[str, Any], pipe: Mapping[str, Any]) -> int | None:
    shares = config.get("conditional_frames_probs") if pipe.get("flow") else None
    found = max((int(number) for number, share in shares.items() if share), default=None) if shares else None
    return pipe.get("max_num_conditional_frames") if found is None else found


def _below(tree: Any, *keys: str) -> dict[str, Any] | None:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _known(cls: type, values: Mapping[str, Any] | None) -> dict[str, Any]:
    names = {field.name for field in attrs.fields(cls)}
    return {key: value for key, value in (values or {}).items() if key in names}


def _name_of(node: Any) -> str:
    target = node["_target_"]
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"


def _refuse_nodes(arguments: Mapping[str, Any], at: str) -> None:
    """Raise for an argument that would be built, too: none of these classes has one."""
    for name, value in arguments.items():
        if not name.startswith("_") and "_target_" in str(value):
            raise CheckpointError(f"{at}.{name} names something to build, {value}; a number or a word is expected.")
