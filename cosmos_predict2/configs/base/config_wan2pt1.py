# SPDX-License-Identifier: Apache-2.0
"""Wan2.1, text to video ("t2v") and image to video ("i2v"): the numbers of the released models and of the tiny twin.

It is trained and sampled by flow times, which the network is given as timesteps 0 ... 1000; no frame is replaced.
"""

from typing import Any

from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.configs.base.sizes import TINY_SHIFT, Size
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import WAN_NETWORKS, checkpoint_dir
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.clip import ClipImageEncoder
from cosmos_predict2.text.t5 import UMT5Encoder
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import FlowConfig, SolverConfig, WanPipelineConfig
from imaginaire import storage
from imaginaire.config import L
from imaginaire.errors import ConfigError

LATENT_FRAMES, RATE = 21, 16  # 81 pixel frames
I2V_SHIFT = 3.0  # of the times of sampling at 480p; 5 for text to video and 720p
TINY_NET = dict(
    model_channels=128, num_blocks=4, num_heads=2, ffn_channels=512, crossattn_emb_channels=64, time_channels=64
)
NETS = {  # by (kind, size)
    ("t2v", "1.3B"): WAN_NETWORKS["1.3B Wan2.1 T2V"],
    ("t2v", "14B"): WAN_NETWORKS["14B Wan2.1 T2V"],
    ("i2v", "14B"): WAN_NETWORKS["14B Wan2.1 I2V"],
    ("t2v", "tiny"): TINY_NET,
    ("i2v", "tiny"): {**TINY_NET, "in_channels": 36},
}
SIZES = {
    kind: {
        size: Size(net, ("48",), (10,), "1:1") if size == "tiny" else Size(net, ("480", "720"), (RATE,), "16:9")
        for (of_kind, size), net in NETS.items()
        if of_kind == kind
    }
    for kind in ("t2v", "i2v")
}


def wan_folder(kind: str, size: str, resolution: str = "480") -> str:
    """The folder of a released model with all parts: in diffusers' layout, unless only Wan2.1's own is there."""
    name = f"Wan2.1-{kind.upper()}-{size}" + (f"-{resolution}P" if kind == "i2v" else "")
    own = storage.join(checkpoint_dir(), f"Wan-AI/{name}")
    return own if storage.is_folder(own) and not storage.is_folder(f"{own}-Diffusers") else f"{own}-Diffusers"


def get_wan2pt1_pipeline(*, kind: str = "t2v", model_size: str = "1.3B", resolution: str = "480") -> WanPipelineConfig:
    """The pipeline's config of a released model or of the tiny twin."""
    if (kind, model_size) not in NETS:
        known = ", ".join(" ".join(each) for each in NETS)
        raise ConfigError(f"There is no Wan2.1 model {kind} {model_size}. There are: {known}.")
    is_tiny, folder, net = model_size == "tiny", wan_folder(kind, model_size, resolution), NETS[kind, model_size]
    mode = "none" if is_tiny else "block_wise"
    vae, pictures = ("vae", "/image_encoder") if folder.endswith("-Diffusers") else ("Wan2.1_VAE.pth", "")
    shift = TINY_SHIFT if is_tiny else I2V_SHIFT if (kind, resolution) == ("i2v", "480") else 5.0
    return WanPipelineConfig(
        net=L(WanDiT)(**net, sac_config=dict(mode=mode, every_n_blocks=1)),
        tokenizer=L(TinyTokenizer)()
        if is_tiny
        else L(WanTokenizer)(vae_pth=f"{folder}/{vae}", temporal_window=16, tile_size="auto"),
        text_encoder=wan_text_encoder(kind, model_size, resolution),
        image_encoder=L(ClipImageEncoder)(path=f"{folder}{pictures}") if "image_channels" in net else None,
        conditioner=ConditionerConfig(text=DropoutConfig(dropout_rate=0.2 if is_tiny else 0.0)),
        min_num_conditional_frames=0,
        max_num_conditional_frames=0,
        state_t=4 if is_tiny else LATENT_FRAMES,
        resolution="48" if is_tiny else resolution,
        fps=10 if is_tiny else RATE,
        precision="float32" if is_tiny else "bfloat16",
        timestamps=SolverConfig(t_min=1.0) if is_tiny else SolverConfig(),
        flow=FlowConfig(shift=shift, timestep_scale=1.0, replace_given_frames=False),
    )


def wan_text_encoder(kind: str, size: str, resolution: str = "480") -> Any:
    """The lazy node of the encoder whose text a model reads."""
    if size == "tiny":
        return L(BytesEncoder)(num_tokens=64, width=64)
    return L(UMT5Encoder)(path=wan_folder(kind, size, resolution))
