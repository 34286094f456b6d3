# SPDX-License-Identifier: Apache-2.0
"""Text2Image models: the released ones and the tiny one. A picture is a video of one frame, from the prompt alone."""

import attrs

from cosmos_predict2.configs.base.config_video2world import (
    IMAGE,
    TINY_NET,
    Choice,
    Size,
    choose_of_kind,
    find_size,
    get_cosmos_predict2_video2world_pipeline,
)
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.released import NETWORKS, SIZES, TINY_TEXT2IMAGE, get_cosmos_predict2_text2image_checkpoint
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.options import VideoModel
from imaginaire.config import L
from imaginaire.errors import ConfigError

IMAGE_SIZES = {size: Size(NETWORKS[f"{size} Text2Image"], ("1024",), (16,), "16:9") for size in SIZES}
IMAGE_SIZES["tiny"] = Size(TINY_NET, ("48",), (10,), "1:1")


def get_cosmos_predict2_text2image_pipeline(
    *, model_size: str = "2B", fast_tokenizer: bool = False
) -> Video2WorldPipelineConfig:
    """The pipeline's config; all but the network, its size and its length is that of Video2World."""
    size = find_size(IMAGE_SIZES, "Text2Image", model_size)
    if fast_tokenizer:
        raise ConfigError("The fast tokenizer of the 0.6B model is not here; its weights model.pt take the usual one.")
    of_video = get_cosmos_predict2_video2world_pipeline(model_size="2B" if model_size == "0.6B" else model_size)
    backend = of_video.net.atten_backend
    return attrs.evolve(
        of_video,
        net=L(DiT)(**{"atten_backend": backend, **size.net}),
        state_t=1,
        resolution=size.resolutions[0],
        min_num_conditional_frames=0,
        max_num_conditional_frames=0,
    )


def get_text2image_dit_path(*, model_size: str = "2B") -> str:
    """The path of a size's weights: the released ones, or those of the tiny model, which come with the code."""
    if model_size == "tiny":
        return TINY_TEXT2IMAGE
    return get_cosmos_predict2_text2image_checkpoint(model_size=model_size)


def choose_text2image(flags: VideoModel) -> Choice:
    """The pipeline's config and weights, as `choose_model` chooses those of Video2World."""
    getters = get_cosmos_predict2_text2image_pipeline, get_text2image_dit_path
    choice = choose_of_kind(flags, IMAGE, IMAGE_SIZES, *getters)
    choice.config.prompt_refiner_config.enabled = False  # there is no picture to read
    return choice
