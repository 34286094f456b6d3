# SPDX-License-Identifier: Apache-2.0
"""Settings of the training of a world model: weights, adapters, noise, conditioning frames, loss, text, sharding.

The two classes differ in the noise that is drawn: noise levels for Predict2, flow times for Predict2.5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.world_model.config import PRECISIONS, Video2WorldPipelineConfig
from imaginaire.config.nodes import as_config, typed_class
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError
from imaginaire.optim import frozen
from imaginaire.random import Draws

LORA_TARGETS = "q_proj,k_proj,v_proj,output_proj,mlp.layer1,mlp.layer2"
# Noise levels of validation. Training draws levels around sqrt(state_t), 5 for the released models: these lie there and
# a factor of 10 around.
RELEASED_SIGMAS = (0.5, 1.0, 2.0, 4.0, 9.0, 19.0, 39.0, 80.0)
TINY_SIGMAS = (1.0, 1.9, 3.5, 6.5, 12.0, 23.0, 43.0, 80.0)  # the tiny model is trained near pure noise

# Of a sample's noise as sigma = t / (1 - t), which is infinite for noise alone: float32 knows no time between the two.
LATEST_TIME = 1 - 2.0**-24


def check_sigmas(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator: noise levels above 0, each once."""
    levels = list(value)
    if not all(isinstance(level, (int, float)) and 0 < level < float("inf") for level in levels):
        raise ConfigError(f"{attribute.name}={levels}, but noise levels are numbers above 0 (empty: as in training).")
    if len({f"{level:g}" for level in levels}) < len(levels):
        raise ConfigError(f"{attribute.name}={levels} has a level twice.")


@attrs.define(kw_only=True, slots=False)
class Predict2ModelManagerConfig(Section):
    """The weights that the run starts from. No path: random weights."""

    dit_path: str = ""
    text_encoder_path: str = ""  # training reads embeddings from its data


@attrs.define(kw_only=True, slots=False)
class Predict2Video2WorldModelConfig(Section):
    """Training of a world model; the noise is that of Predict2."""

    train_architecture: str = attrs.field(default="base", validator=one_of("base", "lora"))
    lora_rank: int = 16
    lora_alpha: float = attrs.field(default=16, validator=at_least(0))
    lora_target_modules: str = LORA_TARGETS
    init_lora_weights: bool = True
    frozen_weights: str = attrs.field(default="full", validator=one_of(*frozen.FORMS))  # of the layers with adapters
    swap_blocks: int = attrs.field(default=0, validator=at_least(0))  # of so many blocks, those lie on the host
    precision: str = attrs.field(default="bfloat16", validator=one_of(*PRECISIONS))
    input_video_key: str = "video"
    input_image_key: str = "images"
    loss_reduce: str = attrs.field(default="mean", validator=one_of("mean", "sum"))
    loss_scale: float = attrs.field(default=10.0, validator=above(0))
    adjust_video_noise: bool = True  # both here and in pipe_config, as in published configs: either may switch it off
    high_sigma_ratio: float = attrs.field(default=0.0, validator=at_least(0, at_most=1))  # share at sigmas above 200
    # Noise levels at which validation measures every sample; none: one a sample, drawn as in training.
    validation_sigmas: list[float] = attrs.field(factory=lambda: list(RELEASED_SIGMAS), validator=check_sigmas)
    fsdp_shard_size: int = attrs.field(default=0, validator=at_least(-1))
    torch_compile: bool = False  # each block by itself
    model_manager_config: Predict2ModelManagerConfig = attrs.field(factory=Predict2ModelManagerConfig)
    text: TrainingTextConfig = attrs.field(factory=TrainingTextConfig)
    pipe_config: Video2WorldPipelineConfig = attrs.field(factory=Video2WorldPipelineConfig)

    def __attrs_post_init__(self) -> None:
        if self.train_architecture != "lora":
            return
        if not self.lora_rank > 0 or not self.lora_alpha > 0 or not str(self.lora_target_modules).strip(", "):
            raise ConfigError(
                f"lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha} and lora_target_modules="
                f"{self.lora_target_modules!r}: rank and alpha must be above 0, and targets must be named."
            )

    @property
    def conditional_frames(self) -> dict[int, float]:
        """The share of the clips that each number of latent frames conditions."""
        low, high = self.pipe_config.min_num_conditional_frames, self.pipe_config.max_num_conditional_frames
        return dict.fromkeys(range(low, high + 1), 1.0)

    @property
    def fewest_conditional_frames(self) -> int:
        """The number at which models are compared."""
        return self.pipe_config.min_num_conditional_frames

    def draw_conditional_frames(self, draws: Draws) -> Tensor:
        """A number for each sample, [B]."""
        low, high = self.pipe_config.min_num_conditional_frames, self.pipe_config.max_num_conditional_frames
        return draws.integers(low, high + 1, "given_frames")

    def draw_sigma(self, uniform_B_3: Tensor, *, is_image: bool) -> Tensor:
        """Noise levels [B] from three uniform numbers for each sample."""
        factor, high_sigma_ratio = 1.0, 0.0
        if not is_image:
            high_sigma_ratio = self.high_sigma_ratio
            if self.adjust_video_noise and self.pipe_config.adjust_video_noise:
                factor = self.pipe_config.video_noise_factor or math.sqrt(self.pipe_config.state_t)
        return rectified_flow.draw_sigma(
            uniform_B_3[:, 0],
            factor=factor,
            high_sigma_ratio=high_sigma_ratio,
            pick_B=uniform_B_3[:, 1],
            high_B=uniform_B_3[:, 2],
        )


def check_probabilities(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator: a share for each number of conditioning frames."""
    if value is None:
        return
    try:
        shares = given_shares(value)
    except (AttributeError, TypeError, ValueError):
        shares = {}
    is_valid = all(number >= 0 and 0 <= share < float("inf") for number, share in shares.items())
    if not (is_valid and sum(shares.values()) > 0):
        raise ConfigError(
            f"{attribute.name}={value}, but it gives numbers of latent frames, from 0, their shares, which are"
            " not negative: {0: 0.5, 1: 0.25, 2: 0.25}, or null for pipe_config.min_ and max_num_conditional_frames."
        )


def given_shares(value: Mapping[Any, Any]) -> dict[int, float]:
    """The share of each number of conditioning frames, by number."""
    return {int(number): float(share) for number, share in sorted(value.items())}


@attrs.define(kw_only=True, slots=False)
class Predict2p5Video2WorldModelConfig(Predict2Video2WorldModelConfig):
    """``high_sigma_ratio`` is the share of videos that train at timesteps from 980 to 1000."""

    loss_scale: float = attrs.field(default=1.0, validator=above(0))
    train_time_distribution: str = attrs.field(default="logitnormal", validator=one_of(*rectified_flow.DISTRIBUTIONS))
    train_time_shift: float = attrs.field(default=5.0, validator=above(0))
    train_time_table: bool = False  # times from a table of 1000, as in the first version of the family
    # How often so many latent frames condition a clip; null: evenly from the pipeline's smallest to its largest number.
    conditional_frames_probs: Any = attrs.field(
        factory=lambda: {0: 0.5, 1: 0.25, 2: 0.25}, validator=check_probabilities
    )

    @property
    def conditional_frames(self) -> dict[int, float]:
        shares = given_shares(self.conditional_frames_probs or {})
        return {number: share for number, share in shares.items() if share > 0} or super().conditional_frames

    @property
    def fewest_conditional_frames(self) -> int:
        """One, if it is ever drawn: from text alone nothing follows that a true clip could be compared with."""
        return min((number for number in self.conditional_frames if number > 0), default=0)

    def draw_conditional_frames(self, draws: Draws) -> Tensor:
        shares = given_shares(self.conditional_frames_probs or {})
        if not shares:
            return super().draw_conditional_frames(draws)
        numbers = torch.tensor(list(shares))
        limits = torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0)
        drawn_B = draws.uniform(1, "given_frames")[:, 0] * limits[-1]
        return numbers[torch.searchsorted(limits, drawn_B, right=True).clamp(max=len(numbers) - 1)]

    def draw_sigma(self, uniform_B_3: Tensor, *, is_image: bool) -> Tensor:
        """Noise levels t / (1 - t) [B] of times drawn near 1/2 and shifted towards noise."""
        timesteps_B = rectified_flow.draw_timesteps(
            uniform_B_3[:, 0],
            distribution=self.train_time_distribution,
            shift=self.train_time_shift,
            from_table=self.train_time_table,
            high_noise_ratio=0.0 if is_image else self.high_sigma_ratio,
            pick_B=uniform_B_3[:, 1],
            high_B=uniform_B_3[:, 2],
        )
        t_B = (timesteps_B.double() / rectified_flow.NUM_TIMESTEPS).clamp(max=LATEST_TIME)
        return rectified_flow.noise_level(t_B)


def model_config(
    config: Any, cls: type[Predict2Video2WorldModelConfig] = Predict2Video2WorldModelConfig
) -> Predict2Video2WorldModelConfig:
    """The object of a ``model.config``; a plain mapping is of ``cls``, or where this is Predict2's and ``pipe_config``
    has a flow, of Predict2.5."""
    is_flow = isinstance(config, Mapping) and (config.get("pipe_config") or {}).get("flow") is not None
    is_plain = isinstance(config, Mapping) and typed_class(config) is None
    if is_flow and is_plain and cls is Predict2Video2WorldModelConfig:
        cls = Predict2p5Video2WorldModelConfig
    made: Predict2Video2WorldModelConfig = as_config(cls, config, "model.config")
    return made


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of one clip through the network in an experience: what a rank makes of one batch, and trains on."""

    rollout: float  # on the mean
    old: int = 0  # of the policy that sampled, where that is another than the one trained
    reference: int = 0
    policy: int = 1  # with a gradient
    data: int = 0  # likewise
    graphs: int = 1  # passes whose activations a clip of a micro-batch keeps at a time
    clips: int  # of a rank
    clips_at_once: int  # in a micro-batch
    updates: int = 1  # optimizer steps
    weight_copies: int = 0  # of the trained weights
    kept_latents: int = 0  # that each clip keeps on the device until it is trained on, of this rank's frames
    are_of_teacher: bool = False  # the clips of the data's batches, whose latents another network makes
    batch_key: str | None = None  # where all this is of one micro-batch, the setting of its clips

    @property
    def without_gradient(self) -> float:
        return self.rollout + self.old + self.reference

    @property
    def with_gradient(self) -> int:
        return self.policy + self.data
