# SPDX-License-Identifier: Apache-2.0
"""Multi-view models: the released one of seven cameras around a car, and the tiny one of two around the toy world.

All lengths are those of each view: 29 frames at 10 per second, 8 latent frames.
"""

from dataclasses import replace

import attrs

from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.configs.base.config_video2world import (
    MULTIVIEW,
    TINY_NET,
    Choice,
    choose_of_kind,
    find_size,
    get_cosmos_predict2_video2world_pipeline,
)
from cosmos_predict2.configs.base.sizes import Size
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.released import NETWORKS, TINY_MULTIVIEW, get_cosmos_predict2_multiview_checkpoint
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
    return TINY_MULTIVIEW if model_size == "tiny" else get_cosmos_predict2_multiview_checkpoint()


def choose_multiview(flags: VideoModel, n_views: int | None) -> Choice:
    """The pipeline's config and weights, as `choose_model` chooses those of Video2World; without a number of views that
    of the run, or of published inference: 1."""
    if flags.model_size == "tiny" and not (flags.dit_path or flags.random_weights):
        flags = replace(flags, dit_path=TINY_MULTIVIEW)  # whose card has the numbers of its run
    getters = get_cosmos_predict2_multiview_pipeline, get_multiview_dit_path
    choice = choose_of_kind(flags, MULTIVIEW, MULTIVIEW_SIZES, *getters)
    config, is_of_run = choice.config, choice.run is not None
    known = list(config.net.view_ids)
    n_views = n_views or (len(known) if is_of_run else 1)
    if n_views > len(known) or (is_of_run and n_views < len(known)):
        raise ConfigError(f"--n_views {n_views}, but this model has {len(known)} views.")
    config.net.view_ids = known[:n_views]
    if is_of_run or config.condition_fps is None:
        config.condition_fps = config.fps  # --fps is the rate of the mp4
    config.fps = flags.fps or config.fps
    return choice
