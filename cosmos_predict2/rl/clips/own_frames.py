# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards over chunks: the clips of a group go on from one history that the model imagined.

Episodes are handed over chunk by chunk, as in supervised training on own frames (`models.own_frames`). Each chunk is an
experience: the members of a group are branches of one history, and a reward may compare them with the true future of
the chunk, which none of them needs to meet: the advantage asks which branch is nearer. Then one more chunk is imagined,
and its end is what the branches of the next chunk begin with.
"""

from collections.abc import Iterator
from typing import Any

import attrs

from cosmos_predict2.models.own_frames import KEY, OwnFramesModel, Predict2OwnFramesConfig, own_frames_of
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.config import KEY as RL_KEY
from cosmos_predict2.rl.config import Predict2RLConfig, rl_of
from imaginaire.findings import CheckContext, Finding, error


@attrs.define(kw_only=True, slots=False)
class Predict2OwnFramesRLConfig(Predict2OwnFramesConfig, Predict2RLConfig):
    """Rewards, and the histories of training."""


class OwnFramesRLModel(OwnFramesModel, FlowGRPOModel):
    """A `FlowGRPOModel` whose conditions are chunks of episodes. The loader's batch is the groups of an experience."""

    config_class = Predict2OwnFramesRLConfig
    config: Predict2OwnFramesRLConfig

    @classmethod
    def check_batches(cls, config: Any, context: CheckContext) -> Iterator[Finding]:
        own, run = own_frames_of(config), context.config
        size = None if run is None or run.dataloader_train is None else run.dataloader_train.get("batch_size")
        if isinstance(size, int) and size != own.minibatch:
            text = f"{own.minibatch}, but dataloader_train.batch_size={size} are the groups of an experience"
            yield error(f"{KEY}.minibatch", text, "Set both to the same")
        rl, number = rl_of(config), config["pipe_config"]["min_num_conditional_frames"]
        for name in ("min_num_conditional_frames", "max_num_conditional_frames"):
            if (found := getattr(rl, name)) != number:  # the others would be true frames, behind imagined ones
                text = f"{found}, but a history hands on {number} (pipe_config.min_num_conditional_frames)"
                yield error(f"{RL_KEY}.{name}", text, f"Set it to {number}")
