# SPDX-License-Identifier: Apache-2.0
"""Settings of the parts of a world model: network, tokenizer, text, conditioning, noise and sampling."""

from typing import Any

import attrs
import torch

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.conditioner import ConditionerConfig
from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.diffusion.rectified_flow import FLOW_SCHEDULES, NUM_TIMESTEPS, FlowSchedule, flow_sigmas
from cosmos_predict2.guardrail.runner import GuardrailConfig, PromptRefinerConfig
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.tokenizers.sizes import pixel_frames
from imaginaire.buildable import target_of
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError, raised_as

CONDITION_LOCATIONS = ("first_random_n", "ref_cam", "any_cam", "no_cam")
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@attrs.define(kw_only=True, slots=False)
class EMAConfig(Section):
    """The power-function average of the weights, kept in training."""

    enabled: bool = False
    rate: float = attrs.field(default=0.1, validator=at_least(1e-6, at_most=0.3))
    iteration_shift: int = attrs.field(default=0, validator=at_least(0))
    offload: bool = False  # keep it on the host, which computes it


@attrs.define(kw_only=True, slots=False)
class SolverConfig(Section):
    """Noise levels of sampling: from t_max down to t_min, evenly spaced in their 1/order-th powers."""

    nfe: int = attrs.field(default=35, validator=at_least(1))
    t_min: float = attrs.field(default=0.002, validator=above(0))
    t_max: float = attrs.field(default=80.0, validator=above(0))
    order: float = attrs.field(default=7.0, validator=above(0))

    def __attrs_post_init__(self) -> None:
        levels = (self.t_min, self.t_max)
        if all(isinstance(level, int | float) for level in levels) and self.t_min >= self.t_max:
            raise ConfigError(f"t_min={self.t_min}, but it must be below t_max={self.t_max}.")


@attrs.define(kw_only=True, slots=False)
class FlowConfig(Section):
    """The times and timesteps of a Predict2.5 network, in training and in sampling."""

    # Of the sampling times: above 1 there are more near pure noise, 1 leaves them as they are.
    shift: float = attrs.field(default=5.0, validator=above(0))
    # From timesteps, 0 to 1000, to what the network embeds.
    timestep_scale: float = attrs.field(default=0.001, validator=above(0))
    conditional_frame_timestep: float = -1.0  # 0.1: next to no noise; below 0: that of the other frames
    schedule: str = attrs.field(default="shift", validator=one_of(*FLOW_SCHEDULES))
    replace_given_frames: bool = True  # by their true velocity, in training too

    def __attrs_post_init__(self) -> None:
        if isinstance(self.conditional_frame_timestep, (int, float)) and self.conditional_frame_timestep >= 1000:
            raise ConfigError(
                f"conditional_frame_timestep={self.conditional_frame_timestep}, but timesteps are below 1000."
            )

    @property
    def sigma_conditional(self) -> float | None:
        """The noise level that conditioning frames have of their own, if they have one."""
        if self.conditional_frame_timestep < 0:
            return None
        t = self.conditional_frame_timestep / NUM_TIMESTEPS
        return t / (1 - t)

    @property
    def t_scaling_factor(self) -> float:
        """The factor from flow times to the numbers that the network embeds."""
        return NUM_TIMESTEPS * self.timestep_scale

    def levels(self, num_steps: int) -> FlowSchedule:
        """The times of sampling; "karras" has one evaluation more than ``num_steps``."""
        return flow_sigmas(num_steps, self.schedule, shift=self.shift)


@attrs.define(kw_only=True, slots=False)
class Video2WorldPipelineConfig(Section):
    net: Any = None  # lazy node of the network
    tokenizer: Any = None  # lazy node of a VideoTokenizer
    text_encoder: Any = None  # lazy node of a TextEncoder, used at inference only
    # What the weights were trained with, as their run recorded it; empty and null: unknown.
    text_encoder_name: str = ""
    num_text_tokens: int | None = None  # that the network reads of a text: longer ones are cut, shorter ones padded
    conditioner: ConditionerConfig = attrs.field(factory=ConditionerConfig)
    conditioning_strategy: str = attrs.field(
        default="frame_replace", validator=one_of("frame_replace", "channel_concat")
    )
    min_num_conditional_frames: int = attrs.field(default=1, validator=at_least(0))  # latent frames, in training
    max_num_conditional_frames: int = attrs.field(default=2, validator=at_least(0))
    # The noise level of conditioning frames, as the network sees it.
    sigma_conditional: float = attrs.field(default=1e-4, validator=at_least(0))
    sigma_data: float = attrs.field(default=1.0, validator=above(0))
    state_ch: int = attrs.field(default=16, validator=at_least(1))
    state_t: int = attrs.field(default=24, validator=at_least(1))  # latent frames
    resolution: str = "720"
    # How an input of another shape is brought to size; of a run's weights, as its clips were.
    input_crop: str = attrs.field(default="center", validator=one_of(*CROPS))
    fps: float = attrs.field(default=16, validator=above(0))
    precision: str = attrs.field(default="bfloat16", validator=one_of(*PRECISIONS))
    adjust_video_noise: bool = True  # training noise of videos times sqrt(state_t)
    # Given: this factor in place of sqrt(state_t).
    video_noise_factor: float | None = attrs.field(default=None, validator=above(0))
    resize_online: bool = True  # cut a longer training clip to the frames of state_t
    rectified_flow_t_scaling_factor: float = attrs.field(default=1.0, validator=above(0))
    rectified_flow_loss_weight_uniform: bool = True
    timestamps: SolverConfig = attrs.field(factory=SolverConfig)
    flow: FlowConfig | None = None  # of a Predict2.5 network; None: the network takes noise levels
    objective: Any = None  # lazy node of an Objective, called with this config; None: EDM, or Flow where flow is set
    ema: EMAConfig = attrs.field(factory=EMAConfig)
    guardrail_config: GuardrailConfig = attrs.field(factory=GuardrailConfig)
    prompt_refiner_config: PromptRefinerConfig = attrs.field(factory=PromptRefinerConfig)
    input_video_key: str = "video"
    input_image_key: str = "images"

    @property
    def shows_first_frames(self) -> bool:
        """True where the network sees the first frames as channels beside the noisy latents: Wan2.1, image to video."""
        target = None if self.net is None else target_of(self.net)
        is_wan = isinstance(target, type) and issubclass(target, WanDiT)
        return is_wan and self.net.get("in_channels", self.state_ch) > self.state_ch

    @property
    def rate_of_positions(self) -> float:
        """Frames per second that the network is given, whose positions in time may depend on it."""
        return self.fps

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def require_conditioning(self, num_frames: int) -> None:
        """Raise for fewer conditioning frames, in pixels, than every clip had in training."""
        fewest = self.min_num_conditional_frames
        if num_frames < (least := pixel_frames(fewest) if fewest else 0):
            raise ConfigError(
                f"{num_frames} conditioning frames, but this network was trained with {least} at least"
                f" (min_num_conditional_frames={fewest} latent frames): give as many (--num_conditional_frames, or"
                " starts.history of an environment), or take weights that were trained with"
                " fewer (--model 2B/post-trained: with the prompt alone)."
            )


@attrs.define(kw_only=True, slots=False)
class WanPipelineConfig(Video2WorldPipelineConfig):
    """A pipeline of Wan2.1."""

    image_encoder: Any = None  # lazy node of what gives features of the first picture, where the network reads them

    def require_conditioning(self, num_frames: int) -> None:
        """Raise for frames that text to video cannot be given, and for none where image to video needs them."""
        if self.shows_first_frames and not num_frames:
            raise ConfigError(
                "Image to video begins with a picture: give one (--input_path, --num_conditional_frames 1)."
            )
        if num_frames and not self.shows_first_frames:
            raise ConfigError(
                f"{num_frames} conditioning frames, but this network makes videos of text alone: use"
                " --num_conditional_frames 0, or weights of image to video."
            )


@attrs.define(kw_only=True, slots=False)
class MultiviewPipelineConfig(Video2WorldPipelineConfig):
    """A pipeline of several cameras of one scene; lengths and conditioning frames are those of each view."""

    condition_fps: float | None = None  # given to the network in place of fps
    # Conditioning frames of training: the first ones of every view; all of the front view, whose camera is 0 (ref_cam),
    # or of one that is drawn (any_cam); no_cam adds nothing.
    condition_locations: list[str] = attrs.field(
        factory=lambda: ["first_random_n"], validator=attrs.validators.deep_iterable(one_of(*CONDITION_LOCATIONS))
    )

    def __attrs_post_init__(self) -> None:
        found = set(self.condition_locations)
        if not found or found >= {"ref_cam", "any_cam"} or (len(found) > 1 and "no_cam" in found):
            raise ConfigError(
                f"condition_locations={list(self.condition_locations)}: expected no_cam, or first_random_n and one of"
                " ref_cam and any_cam, or one of these."
            )

    @property
    def rate_of_positions(self) -> float:
        return self.condition_fps or self.fps


@attrs.define(kw_only=True, slots=False)
class Video2WorldActionPipelineConfig(Video2WorldPipelineConfig):
    """A pipeline with actions. Weights fit one transform of raw actions, which is kept with them."""

    action_transform: Any = None  # as ActionTransform.to_dict gives it; None: that of the data or of the weights
    chunk_size: int = attrs.field(default=12, validator=at_least(1))  # actions between the first frame and the last
    state: str = ""  # columns of the robot's state, with + between them, that the network predicts (net.state_range)

    @property
    def transform(self) -> ActionTransform | None:
        """The transform that is set, as an object."""
        if self.action_transform is None:
            return None
        with raised_as(ConfigError, "pipe_config.action_transform", TypeError, ValueError):
            return ActionTransform.from_dict(self.action_transform)

    def require_transform(self) -> ActionTransform:
        if (transform := self.transform) is None:
            raise ConfigError("pipe_config.action_transform is not set: how raw actions become those of the network.")
        return transform
