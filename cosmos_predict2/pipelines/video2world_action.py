# SPDX-License-Identifier: Apache-2.0
"""Video2World with the robot's actions: a picture and the actions from there on become the pictures that follow.

    pipe = Video2WorldActionConditionedPipeline.from_config(config, dit_path="...")
    video = pipe(first_frame, pipe.transformed(raw_actions)[:12].numpy(), seed=0)    # one sample, by the published call
    video = pipe.rollout(first_frames, actions, seeds=[0, 1])                        # batches, chunk by chunk

The frames are made by `world_model.imagination`.
"""

from collections.abc import Mapping
from typing import Any, cast

import attrs
import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.dit_loading import require_transform
from cosmos_predict2.guardrail.runner import GuardrailRunner
from cosmos_predict2.interfaces import PromptRefiner
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire.errors import ConfigError, DataError


class Video2WorldActionConditionedPipeline(Video2WorldPipeline):
    """Batches of first frames and actions become videos; the config names the transform of the actions."""

    config: Video2WorldActionPipelineConfig

    def __init__(
        self, world: WorldModel, guardrail: GuardrailRunner | None = None, refiner: PromptRefiner | None = None
    ) -> None:
        super().__init__(world, guardrail, refiner)
        self.imagination = imagination = Imagination(world)
        self.transformed, self.rollout = imagination.transformed, imagination.rollout
        self.generate_actions = imagination.generate_actions

    @classmethod
    def from_config(
        cls, config: Video2WorldPipelineConfig, dit_path: str = "", *arguments: Any, **options: Any
    ) -> "Video2WorldActionConditionedPipeline":
        """The pipeline, as for Video2World; the weights or the config must record the transform of actions."""
        if not isinstance(config, Video2WorldActionPipelineConfig):
            raise ConfigError("This pipeline is configured by a Video2WorldActionPipelineConfig, for its actions.")
        card = read_card(dit_path)
        transform = require_transform(card, config.transform, flag="config.action_transform")
        config = attrs.evolve(config, action_transform=transform.to_dict())
        pipe = super().from_config(config, dit_path, *arguments, **options)
        return cast("Video2WorldActionConditionedPipeline", pipe)

    @property
    def transform(self) -> ActionTransform:
        return self.imagination.transform

    def __call__(  # type: ignore[override]
        self,
        first_frame: ArrayLike,
        actions: ArrayLike,
        prompt: str = "",
        negative_prompt: str = "",
        num_conditional_frames: int = 1,
        guidance: float = 7.0,
        num_sampling_step: int = 35,
        seed: int = 0,
        solver_option: str | None = None,
        *,
        embeddings: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """[1, 3, 1 + A, H, W] in [-1, 1] of one sample, by the published call.

        ``first_frame`` is uint8 [H, W, 3], or [5, H, W, 3] with ``num_conditional_frames=5``; ``actions`` [A, d] are as
        `transformed` gives them. Without a prompt there is no text, unless ``embeddings`` has one of "". The solver is
        the model's own unless ``solver_option`` names another.
        """
        frames = torch.as_tensor(numpy.asarray(first_frame))
        frames_F_H_W_C = frames if frames.ndim == 4 else frames[None]
        if frames_F_H_W_C.shape[0::3] != (num_conditional_frames, 3) or frames.dtype != torch.uint8:
            raise DataError(
                f"first_frame is {list(frames.shape)} of {frames.dtype}; uint8 [H, W, 3] is expected, or of"
                f" num_conditional_frames={num_conditional_frames} all."
            )
        texts = [prompt] if prompt or "" in (embeddings or {}) else []
        texts += [negative_prompt] if negative_prompt else []
        if prompt:
            self.checked_prompt(prompt)
        encoded = iter(self.world.encode_text(texts, embeddings)[:, None] if texts else ())
        video = self.generate_actions(
            frames_F_H_W_C.permute(3, 0, 1, 2)[None],
            torch.as_tensor(numpy.asarray(actions))[None],
            [seed],
            SamplingOptions(guidance=guidance, num_steps=num_sampling_step, solver=solver_option),
            text_B_S_E=next(encoded) if len(texts) > bool(negative_prompt) else None,
            negative_text_B_S_E=next(encoded) if negative_prompt else None,
            as_float=True,
        )
        return self.checked_video(video)
