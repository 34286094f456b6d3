# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that code written for the published Predict2 imports, in the signatures that it calls.

`cosmos_predict2.renamed` has the names and the modules that they are imported from. What has another name here and the
same signature is there alone.
"""

import functools
import logging
import os
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_predict2 import released
from cosmos_predict2.conditioner import EMBEDDERS, Conditioner, ConditionerConfig, DropoutConfig
from cosmos_predict2.configs.base.config_video2world import choose_model
from cosmos_predict2.data.video import media
from cosmos_predict2.diffusion.rectified_flow import rectified_flow_scaling
from cosmos_predict2.pipelines.requests import check_request, generate_to_file
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline, check_input
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.world_model.options import SamplingOptions, Settings, VideoModel, VideoRequest
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import distributed, storage
from imaginaire.config import lazy_config
from imaginaire.config.registry import find_config_file
from imaginaire.errors import UserError

log = logging.getLogger("cosmos_predict2")

CosmosPredict2Text2ImageModelSize = Literal["0.6B", "2B", "14B"]
CosmosPredict2Video2WorldModelSize = Literal["2B", "14B"]
CosmosPredict2Video2WorldResolution = Literal["480", "720"]
CosmosPredict2Video2WorldFPS = Literal[10, 16]
CosmosPredict2Video2WorldAspectRatio = Literal["1:1", "4:3", "3:4", "16:9", "9:16"]
CosmosPredict2MultiviewModelSize = Literal["2B"]
CosmosPredict2MultiviewResolution = Literal["720"]
CosmosPredict2MultiviewFPS = Literal[10]
CosmosPredict2MultiviewViews = Literal[7]
CosmosPredict2MultiviewFrames = Literal[29]
CosmosPredict2ActionConditionedModelSize = Literal["2B"]
CosmosPredict2ActionConditionedResolution = Literal["720"]
CosmosPredict2ActionConditionedFPS = Literal[16]
CosmosPredict2Gr00tModelSize = Literal["14B"]


def get_cosmos_predict2_video2world_checkpoint(*, aspect_ratio: str = "16:9", **variant: Any) -> str:
    return released.get_cosmos_predict2_video2world_checkpoint(**variant)


def print_environment_info(args: Namespace) -> None:
    log.info("flags: %s; %s=%s", args, released.SETTINGS_VARIABLE, os.environ.get(released.SETTINGS_VARIABLE, ""))


# imaginaire.utils -----------------------------------------------------------------------------------------------------


def _at(level: int, has_traceback: bool = False) -> Callable[..., None]:
    def write(message: object, rank0_only: bool = True) -> None:
        if distributed.is_rank0() or not rank0_only:
            log.log(level, "%s", message, exc_info=has_traceback)

    return write


debug, info, success = _at(logging.DEBUG), _at(logging.INFO), _at(logging.INFO)
warning, error, critical = _at(logging.WARNING), _at(logging.ERROR), _at(logging.CRITICAL)
exception = _at(logging.ERROR, has_traceback=True)


def set_random_seed(seed: int, by_rank: bool = False) -> None:
    """Seed the global generators of Python, NumPy and torch; with ``by_rank`` each process otherwise."""
    seed += distributed.rank() if by_rank else 0
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def barrier() -> None:
    distributed.barrier("of code written for the published API")


def broadcast_object_list(values: list[Any], src: int = 0, **options: Any) -> None:
    if dist.is_initialized():
        dist.broadcast_object_list(values, src, **options)


def rank0_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on rank 0; None elsewhere."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if distributed.is_rank0() else None

    return run


def save_image_or_video(tensor: Tensor, save_path: str, fps: float = 24, **_: Any) -> None:
    """Write [(1,) 3, F, H, W], in [-1, 1] where a value is negative and else in [0, 1], as an mp4, or one frame as a
    picture."""
    video = tensor[0] if tensor.ndim == 5 else tensor
    if video.is_floating_point():
        video = to_uint8(video if float(video.min()) < 0 else 2 * video - 1)
    video = video.cpu()
    stem, ending = os.path.splitext(save_path)
    if video.shape[1] == 1:
        media.write_image(stem + (ending or ".jpg"), video[:, 0])
    else:
        media.write_video(stem + (ending or ".mp4"), video, fps)


def save_text_prompts(prompts: Mapping[str, Any], save_path: str) -> None:
    """Write sections, "[Negative Prompt]" of negative_prompt."""
    titles = {name: name.replace("_", " ").title() for name in prompts}
    storage.write_text(save_path, "".join(f"[{titles[name]}]\n{text}\n\n" for name, text in prompts.items() if text))


def get_config_module(config_file: str) -> str:
    """The name by which a file of configurations is imported; an error where there is none."""
    find_config_file(config_file)
    return config_file.removesuffix(".py").replace("/", ".")


class LazyConfig:
    load = staticmethod(lazy_config.load_yaml)
    save_yaml = staticmethod(lazy_config.save_yaml)


def init_weights_on_device(device: torch.device | str = "meta", **_: Any) -> AbstractContextManager[Any]:
    return torch.device(device)


# Parts of configurations ----------------------------------------------------------------------------------------------


class ConditioningStrategy(str, Enum):
    FRAME_REPLACE = "frame_replace"
    CHANNEL_CONCAT = "channel_concat"

    def __str__(self) -> str:
        return self.value


def embedder(dropout_rate: float = 0.0, **_: Any) -> DropoutConfig:
    """The share of samples that an input is withheld from; its names in a batch are fixed here."""
    return DropoutConfig(dropout_rate=dropout_rate or 0.0)


def conditioner(**embedders: DropoutConfig) -> Conditioner:
    """The conditioner of embedders by name; one that is not known here, such as the actions', withholds nothing."""
    known = {name.removesuffix("_"): value for name, value in embedders.items()}
    return Conditioner(ConditionerConfig(**{name: value for name, value in known.items() if name in EMBEDDERS}))


@dataclass(frozen=True)
class RectifiedFlowScaling:
    """sigma -> c_skip, c_out, c_in, c_noise."""

    sigma_data: float = 1.0
    t_scaling_factor: float = 1.0
    loss_weight_uniform: bool = True

    def __call__(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scaling = rectified_flow_scaling(sigma, self.t_scaling_factor)
        return scaling.c_skip, scaling.c_out, scaling.c_in, scaling.c_noise


# Text encoders --------------------------------------------------------------------------------------------------------


@dataclass
class CosmosT5TextEncoderConfig:
    ckpt_path: str = ""  # empty: the released place
    num_tokens: int = 512
    embed_dim: int = 1024
    compute_online: bool = False


CosmosTextEncoderConfig = CosmosT5TextEncoderConfig


class CosmosT5TextEncoder:
    """T5's encoder by the published call, with a mask of the tokens on request."""

    def __init__(
        self,
        config: CosmosT5TextEncoderConfig | None = None,
        device: torch.device | str = "cuda",
        torch_dtype: torch.dtype | None = None,
        cache_dir: str = "",
    ) -> None:
        self.config = config or CosmosT5TextEncoderConfig()
        path = cache_dir or self.config.ckpt_path or released.get_t5_model_dir()
        self.encoder = T5Encoder(path, max_length=self.config.num_tokens, dtype=torch_dtype, device=device)

    def encode_prompts(
        self, prompts: str | Sequence[str], max_length: int | None = None, return_mask: bool = False
    ) -> Any:
        """Embeddings [B, max_length, width], zero behind the end of each text."""
        embeddings = self.encoder.encode(prompts)[:, : max_length or self.config.num_tokens]
        return (embeddings, embeddings.any(dim=-1)) if return_mask else embeddings

    def to(self, device: torch.device | str) -> "CosmosT5TextEncoder":
        self.encoder.to(device)
        return self


get_cosmos_text_encoder = CosmosT5TextEncoder


# examples.video2world -------------------------------------------------------------------------------------------------


def setup_pipeline(args: Namespace, text_encoder: Any = None) -> Video2WorldPipeline:
    """The pipeline of flags as the published program parses them; a ``text_encoder`` takes the place of its own."""
    given = {one.name: getattr(args, one.name) for one in fields(VideoModel) if hasattr(args, one.name)}
    if getattr(args, "gr00t_variant", "") and not given.get("dit_path"):
        path = released.get_cosmos_predict2_gr00t_checkpoint(gr00t_variant=args.gr00t_variant)
        given = {"model_size": "14B", "resolution": "480", **given, "dit_path": path}
    choice = choose_model(VideoModel(**given))
    choice.config.guardrail_config.enabled = not getattr(args, "disable_guardrail", False)
    choice.config.prompt_refiner_config.enabled &= not getattr(args, "disable_prompt_refiner", False)
    pipe = Video2WorldPipeline.from_config(
        choice.config,
        choice.dit_path,
        use_text_encoder=text_encoder is None,
        load_ema_to_reg=bool(getattr(args, "load_ema", False)),
        load_prompt_refiner=None,
    )
    if text_encoder is not None:
        pipe.world.text_encoder = text_encoder
    return pipe


def validate_input_file(input_path: str, num_conditional_frames: int) -> bool:
    """True for a file that gives so many frames; a warning says why another does not."""
    try:
        check_input(input_path, num_conditional_frames)
    except UserError as problem:
        log.warning("%s", problem)
        return False
    return True


def process_single_generation(
    pipe: Video2WorldPipeline,
    input_path: str,
    prompt: str,
    output_path: str,
    negative_prompt: str = "",
    aspect_ratio: str = "16:9",
    num_conditional_frames: int = 1,
    guidance: float = 7.0,
    seed: int = 0,
    benchmark: bool = False,
    use_cuda_graphs: bool = False,
    prompt_prefix: str = "",
) -> bool:
    """True where the video was made; a warning says why not."""
    request = VideoRequest(
        input_path, prompt_prefix + prompt, output_path, negative_prompt, num_conditional_frames, int(seed)
    )
    sampling = SamplingOptions(guidance=guidance, use_cuda_graphs=use_cuda_graphs)
    settings = Settings(aspect_ratio, pipe.config.fps, "as set up", sampling)
    try:
        check_request(request)
        generate_to_file(pipe, request, settings)
    except UserError as problem:
        log.warning("%s", problem)
        return False
    return True
