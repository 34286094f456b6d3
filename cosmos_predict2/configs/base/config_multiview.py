# SPDX-License-Identifier: Apache-2.0
"""Multi-view models: the released one of seven cameras around a car, and the tiny one of two around the toy world.

All lengths are those of each view: 29 frames at 10 per second, 8 latent frames.
"""

from typing import Any

import attrs

from cosmos_predict2.checkpoints import checkpoint_dir
from cosmos_predict2.checkpoints.card import ModelCard
from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.configs.base.config_video2world import (
    MULTIVIEW,
    TINY_NET,
    Choice,
    agreed_size,
    find_size,
    get_cosmos_predict2_video2world_pipeline,
    use_checkpoint_dir,
)
from cosmos_predict2.configs.base.sizes import Size
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.pipelines.recorded_run import apply_card, place_tokenizer, read_and_warn
from cosmos_predict2.released import NETWORKS, get_cosmos_predict2_multiview_checkpoint, tiny_multiview_path
from cosmos_predict2.world_model.config import MultiviewPipelineConfig, SolverConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.options import VideoModel
from imaginaire.config import L
from imaginaire.errors import ConfigError

VIEWS, TINY_VIEWS, FRAMES, LATENT_FRAMES, RATE = 7, 2, 29, 8, 10
CONDITION_FPS = 30.0  # that published inference gives the network, whatever the clip's rate
MULTIVIEW_SIZES = {
    "2B": Size(NETWORKS["2B multiview"], ("720", "480"), (RATE,), "16:9", "predict2_2b_720"),
    "tiny": Size(TINY_NET, ("48",), (RATE,), "1:1"),
}


def get_cosmos_predict2_multiview_pipeline(
    *, model_size: str = "2B", views: int = 0, frames: int = FRAMES, resolution: str = "", fps: int = RATE
) -> MultiviewPipelineConfig:
    """The pipeline's config, for the first ``views`` cameras; 0: all of the size's."""
    size, is_tiny = find_size(MULTIVIEW_SIZES, "multi-view", model_size, resolution, fps), model_size == "tiny"
    views = views or (TINY_VIEWS if is_tiny else VIEWS)
    if frames != FRAMES or not 1 <= views <= VIEWS:
        raise ConfigError(f"views={views}, frames={frames}: 1 to {VIEWS} views of {FRAMES} frames each.")
    of_video = get_cosmos_predict2_video2world_pipeline(model_size=model_size, resolution=size.resolutions[0])
    shared = {field.name: getattr(of_video, field.name) for field in attrs.fields(Video2WorldPipelineConfig)}
    own = dict(
        net=L(MultiViewDiT)(
            **{"atten_backend": of_video.net.atten_backend, **size.net},
            view_ids=list(range(views)),
            sac_config=of_video.net.sac_config,
        ),
        state_t=of_video.state_t if is_tiny else LATENT_FRAMES,
        resolution=resolution or size.resolutions[0],
        fps=fps,
        condition_fps=None if is_tiny else CONDITION_FPS,
        conditioner=ConditionerConfig(text=DropoutConfig(dropout_rate=0.2 if is_tiny else 0.0)),
        min_num_conditional_frames=0,
        max_num_conditional_frames=1,
        timestamps=of_video.timestamps if is_tiny else SolverConfig(t_min=0.01, t_max=200.0),
    )
    return MultiviewPipelineConfig(**{**shared, **own})


def get_multiview_dit_path(*, model_size: str = "2B") -> str:
    """The path of a size's weights: the released ones, or those of the tiny model, which come with the code."""
    return tiny_multiview_path() if model_size == "tiny" else get_cosmos_predict2_multiview_checkpoint()


def choose_multiview(flags: VideoModel, n_views: int | None) -> Choice:
    """The pipeline's config and weights, as `choose_model` chooses those of Video2World; without a number of views that
    of the run, or of published inference: 1."""
    use_checkpoint_dir(flags)
    card: Any = read_and_warn(flags.dit_path) if flags.dit_path else ModelCard()
    if card.family is not None and card.family.kind != MULTIVIEW:
        raise ConfigError(
            f"--dit_path {flags.dit_path} is of a {card.family.kind} network: use examples/video2world.py."
        )
    size = agreed_size(flags, card.model_size(MULTIVIEW_SIZES) if card.has_pipeline else None)
    config = get_cosmos_predict2_multiview_pipeline(model_size=size)
    dit_path = flags.dit_path or ("" if flags.random_weights else get_multiview_dit_path(model_size=size))
    if not flags.dit_path and dit_path and size == "tiny":
        card = read_and_warn(dit_path)
    if card.has_pipeline:
        apply_card(card, config, tokenizer_path=flags.tokenizer_path)
        config.condition_fps = None
    elif flags.tokenizer_path:
        place_tokenizer(config, flags.tokenizer_path)
    known = list(config.net.view_ids)
    n_views = n_views or (len(known) if card.has_pipeline else 1)
    if n_views > len(known) or (card.has_pipeline and n_views < len(known)):
        raise ConfigError(f"--n_views {n_views}, but this model has {len(known)} views.")
    config.net.view_ids = known[:n_views]
    trained = card.shape[0] if card.has_pipeline else MULTIVIEW_SIZES[size].resolutions[0]
    config.resolution = flags.resolution or trained
    config.condition_fps = config.condition_fps or config.fps  # --fps is the rate of the mp4
    config.fps = flags.fps or config.fps
    config.guardrail_config.checkpoint_dir = checkpoint_dir()
    return Choice(config, dit_path, size, card, flags.aspect_ratio or MULTIVIEW_SIZES[size].aspect_ratio)
