# SPDX-License-Identifier: Apache-2.0
"""Video2World of Predict2.5 by size: the numbers of the released models, and of the tiny one.

Beside Predict2 it is trained and sampled by flow times, reads Reason1 text through a projection, and may be given no
frame at all.
"""

from typing import Any

from cosmos_predict2.configs.base.config_video2world import TINY_NET, Size, find_size, pipeline_config
from cosmos_predict2.released import NETWORKS, get_cosmos_predict25_checkpoint, get_reason1_encoder_dir
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from imaginaire.config import L
from imaginaire.errors import ConfigError

FAMILY = "Predict2.5 Video2World"
RELEASES = ("pre-trained", "post-trained")
NUM_FRAMES = 77  # of a video that is made with the released weights, by default; they were trained with 93
# A narrow text behind a projection, as in the released networks.
TINY_TEXT = dict(crossattn_emb_channels=32, crossattn_proj_in_channels=64, use_wan_fp32_strategy=True)
# Where the toy world's dynamics show: times around t = 8 / 9, noise levels around 8.
TINY_SHIFT = 8.0
SIZES = {
    "2B": Size(NETWORKS["2B Predict2.5"], ("720", "480"), (16,), "16:9", "predict2_2b_720"),
    "14B": Size(NETWORKS["14B Predict2.5"], ("720", "480"), (16,), "16:9", "predict2_14b_720"),
    "tiny": Size({**TINY_NET, **TINY_TEXT}, ("48",), (10,), "1:1"),
}


def get_cosmos_predict2p5_video2world_pipeline(
    *, model_size: str = "2B", resolution: str = "", fps: int = 0
) -> Video2WorldPipelineConfig:
    """The pipeline's config, for clips of 93 frames; an empty resolution and a rate of 0 mean 720 and 16."""
    size = find_size(SIZES, FAMILY, model_size, resolution, fps)
    return pipeline_config(
        model_size,
        size,
        resolution,
        fps,
        text_encoder=predict2p5_text_encoder(model_size),
        min_num_conditional_frames=0,
        max_num_conditional_frames=2,
        flow=FlowConfig(shift=TINY_SHIFT) if model_size == "tiny" else FlowConfig(),
    )


def predict2p5_text_encoder(model_size: str) -> Any:
    """The lazy node of the encoder whose text a size reads."""
    if model_size == "tiny":
        return L(BytesEncoder)(num_tokens=64, width=64)
    return L(Reason1Encoder)(path=get_reason1_encoder_dir())


def get_predict2p5_dit_path(*, model_size: str = "2B", release: str = "post-trained") -> str:
    """The path of the released weights of a size: "pre-trained" to train on from, "post-trained" to make videos."""
    find_size(SIZES, FAMILY, model_size)
    if model_size == "tiny":
        raise ConfigError(
            "The tiny Predict2.5 model comes without weights. Train it: python -m scripts.train --"
            " experiment=predict2p5_video2world_training_tiny_groot_gr1_480, and give its run folder as --dit_path."
        )
    if release not in RELEASES:
        raise ConfigError(f"There are no '{release}' weights of Predict2.5. There are: {', '.join(RELEASES)}.")
    return get_cosmos_predict25_checkpoint(f"{model_size}/{release}")
