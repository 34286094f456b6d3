# SPDX-License-Identifier: Apache-2.0
"""Sizes of a training run on each rank, read off its configuration: the numbers that all predictions start from."""

import inspect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.data.dataset_latents import FOLDER, read_record
from cosmos_predict2.data.views import views_of_data
from cosmos_predict2.models.config import Passes, Predict2Video2WorldModelConfig, model_config
from cosmos_predict2.models.model_checks import check_degrees
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.tokenizers.sizes import pixel_frames, size_of
from cosmos_predict2.world_model.assembly import embedders_begin_anew, network_of
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.parallelize import checked_policy
from imaginaire.buildable import signature, target_of
from imaginaire.config import nodes as config_nodes
from imaginaire.config.schema import NEVER, Config
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext

GB = 2**30  # as nvidia-smi and PyTorch count
T5_TOKENS = 512
LARGE_ENCODERS = "Reason1Encoder", "UMT5Encoder"  # of text, where they work in training
OPTIMIZERS = {"fused_adamw": "fusedadamw", "adamw": "adamw", "muon": "muon"}  # functions of imaginaire, by kind


@dataclass(frozen=True)
class Workload:
    """One run on a number of GPUs. Sizes are of one clip; ``batch_size`` counts the clips of a data-parallel rank."""

    net: DiT  # on the meta device, without adapters
    num_gpus: int
    shard_size: int  # ranks that share one copy of the weights; 1: each has its own
    context_parallel: int
    batch_size: int
    grad_accum: int
    pixel_frames: int
    height: int  # in pixels
    width: int
    text_tokens: int
    precision: torch.dtype  # of the computation
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    optimizer: str  # of OPTIMIZERS
    has_master: bool
    has_average: bool
    mode: str  # of cosmos_predict2.world_model.parallelize
    every_n_blocks: int
    tokenizer: str  # "wan", "tiny", or "none" where latents were cached
    max_iter: int | None = None  # None: without end
    tokenizer_window: int = 4
    adapter_rank: int = 16  # of adapters, should it train some
    tokenizer_adapts: bool = False  # takes fewer frames at a time where memory is short
    encodes_text: bool = False  # by Reason1 or UMT5, in training; each rank has all of it
    trains_embedders: bool = False  # of actions, in full beside adapters, where they begin anew
    passes: Passes | None = None  # of reinforcement learning, whose micro-batches are of clips that it generates
    moments: str = "float32"  # of the optimizer, as imaginaire.optim.moments
    offloads_optimizer: bool = False  # to the host
    offloads_average: bool = False
    frozen_weights: str = "full"  # below adapters, as imaginaire.optim.frozen
    swap_blocks: int = 0
    is_sharded: bool = True  # asks for copies over several ranks, though there may be but one

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(T, H, W) of a whole clip."""
        return (self.pixel_frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        """Tokens of a whole clip."""
        t, h, w = self.latent_shape
        return t // self.net.patch_temporal * (h // self.net.patch_spatial) * (w // self.net.patch_spatial)

    @property
    def clips_per_step(self) -> float:
        """Clips of all ranks for each optimizer step."""
        ranks = self.num_gpus // self.context_parallel
        if self.passes is not None:
            return ranks * self.passes.clips / self.passes.updates
        return ranks * self.batch_size * self.grad_accum

    def per_micro_batch(self, passes: float) -> float:
        """Passes of the clips of a micro-batch, of so many passes of each clip of an experience."""
        assert self.passes is not None
        micro_batches = self.grad_accum * self.passes.updates
        return passes * self.passes.clips / (micro_batches * self.batch_size)

    @property
    def swapped(self) -> frozenset[int]:
        """The blocks whose frozen weights lie on the host."""
        count = len(self.net.blocks)
        return frozenset(i * count // self.swap_blocks for i in range(self.swap_blocks))

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == torch.float16 else self.precision


def read_workload(config: Config, num_gpus: int) -> Workload:
    """The workload of a composed configuration; degrees that cannot work are the errors that training gives."""
    model = _model_config(config)
    if num_gpus < 1:
        raise ConfigError(f"--gpus {num_gpus}: at least one is needed.")
    if wrong := [*check_degrees(config.model.config, CheckContext(config=config, world_size=num_gpus))]:
        raise ConfigError(" ".join(map(str, wrong)))
    pipe = model.pipe_config
    net = network_of(pipe.net)
    sac = {"mode": "none", "every_n_blocks": 1, **net.sac_config}
    checked_policy(**sac)
    optimizer, has_master = optimizer_of(config.optimizer)
    shards = model.fsdp_shard_size if config.trainer.distributed_parallelism != "ddp" else 0  # -1: over all GPUs
    text_encoder = model.text.encoder
    batch_size = _batch_size(config.dataloader_train)
    passes = target_of(config.model, "model").passes(config.model.config, batch_size)
    if passes is not None and passes.batch_key is not None:
        passes = replace(passes, clips=passes.clips * config.trainer.grad_accum_iter)
    height, width = _clip_size(config, pipe.resolution)
    return Workload(
        net=net,
        num_gpus=num_gpus,
        shard_size=num_gpus if shards == -1 else max(1, min(shards, num_gpus)),
        context_parallel=config.model_parallel.context_parallel_size,
        batch_size=batch_size if passes is None else passes.clips_at_once,
        grad_accum=config.trainer.grad_accum_iter,
        pixel_frames=pixel_frames(pipe.state_t),
        height=height,
        width=width,
        text_tokens=net.num_views * max((int(n) for n in _of_data(config, "num_tokens")), default=T5_TOKENS),
        precision=PRECISIONS[model.precision],
        lora_rank=model.lora_rank if model.train_architecture == "lora" else None,
        lora_targets=tuple(name.strip() for name in str(model.lora_target_modules).split(",") if name.strip()),
        optimizer=optimizer,
        has_master=has_master,
        has_average=bool(pipe.ema.enabled),
        mode=sac["mode"],
        every_n_blocks=sac["every_n_blocks"],
        tokenizer=_tokenizer(config, pipe.tokenizer),
        max_iter=config.trainer.max_iter if config.trainer.max_iter < NEVER else None,
        tokenizer_window=int((pipe.tokenizer or {}).get("temporal_window", 4)),
        adapter_rank=model.lora_rank,
        tokenizer_adapts=(pipe.tokenizer or {}).get("tile_size") == "auto",
        encodes_text=text_encoder is not None and any(name in str(text_encoder["_target_"]) for name in LARGE_ENCODERS),
        trains_embedders=net.takes_actions
        and embedders_begin_anew(model.model_manager_config.dit_path, may_fetch=False),
        is_sharded=shards not in (0, 1),
        passes=passes,
        moments=str(config.optimizer.get("moments", "float32")),
        offloads_optimizer=bool(config.optimizer.get("offload", False)),
        offloads_average=bool(pipe.ema.offload),
        frozen_weights=model.frozen_weights,
        swap_blocks=model.swap_blocks,
    )


def _model_config(config: Config) -> Predict2Video2WorldModelConfig:
    if config.model is None:
        raise ConfigError("model is not set: choose an experiment (experiment=NAME) or a model (model=NAME).")
    target = target_of(config.model, "model")
    if not (isinstance(target, type) and issubclass(target, Video2WorldModel)):
        raise ConfigError(f"model is a {getattr(target, '__name__', target)}; only Video2World models are planned.")
    model = model_config(config.model.config)
    if model.pipe_config.net is None:
        raise ConfigError("model.config.pipe_config.net is not set: choose a model (model=NAME).")
    return model


def optimizer_of(node: Any) -> tuple[str, bool]:
    """Kind of the optimizer, and whether it keeps float32 masters of weights in half precision."""
    if node is None:
        raise ConfigError("optimizer is not set: choose one (optimizer=fusedadamw).")
    name = str(getattr(node["_target_"], "__name__", node["_target_"])).rpartition(".")[2]
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {name}; what it keeps is known of {', '.join(OPTIMIZERS)} only.")
    kind = "adamw" if node.get("optim_type") == "adamw" else OPTIMIZERS[name]
    return kind, kind != "adamw" and bool(node.get("master_weights", True))


def _of_data(config: Config, name: str) -> list[Any]:
    """Values of this argument in the classes that the training data name, for those that take it."""
    found = []
    for key, node in config_nodes.nodes(config.dataloader_train, "dataloader_train"):
        if (target := target_of(node, key)) is None:
            continue
        parameter = signature(target).get(name)
        value = node.get(name, parameter.default if parameter is not None else None)
        if value not in (None, inspect.Parameter.empty):
            found.append(value)
    return found


def _clip_size(config: Config, resolution: str) -> tuple[int, int]:
    """(height, width) of the largest clips of the data, or of cached latents by their record, else the resolution's."""
    nodes = [node for _, node in config_nodes.nodes(config.dataloader_train, "dataloader_train")]
    num_views = max((len(views_of_data(node)) for node in nodes), default=1)
    sizes = [(num_views * int(size[0]), int(size[1])) for size in _of_data(config, "video_size")]
    sizes += [(int(size), int(size)) for size in _of_data(config, "size")]
    folders = [Path(str(path)) / FOLDER for path in _of_data(config, "dataset_dir")]
    sizes = sizes or [record.size for folder in folders if (record := read_record(folder)) is not None]
    return max(sizes, key=math.prod) if sizes else size_of(str(resolution), "1:1" if resolution == "48" else "16:9")


def _batch_size(loader: Any) -> int:
    size = loader.get("batch_size", 1) if loader is not None else 1
    if isinstance(size, int):
        return size
    videos = [n for name, n in size.items() if "image" not in str(name)]  # images come in batches of their own
    return int(max(videos or size.values()))


def _tokenizer(config: Config, node: Any) -> str:
    data = config_nodes.nodes(config.dataloader_train, "dataloader_train")
    if node is None or any("LatentDataset" in str(child.get("_target_")) for _, child in data):
        return "none"
    return "wan" if "WanTokenizer" in str(node["_target_"]) else "tiny"
