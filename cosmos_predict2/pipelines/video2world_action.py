# SPDX-License-Identifier: Apache-2.0
"""Video2World with the robot's actions: a picture and the actions from there on become the pictures that follow."""

from typing import Any

import attrs

from cosmos_predict2.data.action_conditioned.actions import ActionTransform
from cosmos_predict2.pipelines.video2world import Video2WorldPipelineConfig
from imaginaire.config import at_least
from imaginaire.errors import ConfigError


@attrs.define(kw_only=True, slots=False)
class Video2WorldActionPipelineConfig(Video2WorldPipelineConfig):
    """As of a network that is told actions. Weights fit one transform of raw actions, which is kept with them."""

    action_transform: Any = None  # as ActionTransform.to_dict gives it; None: that of the data or of the weights
    chunk_size: int = attrs.field(default=12, validator=at_least(1))  # actions between the first frame and the last

    @property
    def transform(self) -> ActionTransform | None:
        """The transform that is set, as an object."""
        if self.action_transform is None:
            return None
        try:
            return ActionTransform.from_dict(self.action_transform)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"pipe_config.action_transform: {error}") from error
