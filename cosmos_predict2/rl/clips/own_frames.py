# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards over chunks: the clips of a group go on from one history that the model imagined.

Episodes are handed over chunk by chunk, as in supervised training on own frames (`models.own_frames`). Each chunk is an
experience: the members of a group are branches of one history, and a reward may compare them with the true future of
the chunk, which none of them needs to meet: the advantage asks which branch is nearer. Then one more chunk is imagined,
and its end is what the branches of the next chunk begin with.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import attrs
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.models.config import Passes
from cosmos_predict2.models.own_frames import KEY, OwnFrames, OwnFramesConfig, check, own_frames_of, passes_of
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.config import KEY as RL_KEY
from cosmos_predict2.rl.config import Predict2RLConfig, rl_of
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.random import Draws


@attrs.define(kw_only=True, slots=False)
class Predict2OwnFramesRLConfig(Predict2RLConfig):
    own_frames: OwnFramesConfig = attrs.field(factory=OwnFramesConfig)


class OwnFramesRLModel(FlowGRPOModel):
    """A `FlowGRPOModel` whose conditions are chunks of episodes. The loader's batch is the groups of an experience."""

    config_class = Predict2OwnFramesRLConfig
    config: Predict2OwnFramesRLConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own_frames = OwnFrames(self)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield from super().check(arguments, context)
        own = own_frames_of(arguments["config"])
        run = context.config
        size = None if run is None or run.dataloader_train is None else run.dataloader_train.get("batch_size")
        if isinstance(size, int) and size != own.minibatch:
            text = f"{own.minibatch}, but dataloader_train.batch_size={size} are the groups of an experience"
            yield error(f"{KEY}.minibatch", text, "Set both to the same")
        rl, number = rl_of(arguments["config"]), arguments["config"]["pipe_config"]["min_num_conditional_frames"]
        for name in ("min_num_conditional_frames", "max_num_conditional_frames"):
            if (found := getattr(rl, name)) != number:  # the others would be true frames, behind imagined ones
                text = f"{found}, but a history hands on {number} (pipe_config.min_num_conditional_frames)"
                yield error(f"{RL_KEY}.{name}", text, f"Set it to {number}")
        yield from check(arguments["config"], replace(context, config=None))

    @classmethod
    def passes(cls, config: Any, conditions: int) -> Passes:
        passes, history = super().passes(config, conditions), passes_of(own_frames_of(config)).rollout
        return replace(passes, rollout=passes.rollout + history * conditions / passes.clips)

    def train_batches(self, dataloader: Any) -> Iterator[Any]:
        return super().train_batches(self.own_frames.parts(dataloader))

    def at_boundary(self) -> bool:
        return super().at_boundary() and self.own_frames.left == 0

    def data_and_condition(
        self, batch: Mapping[str, Any], generators: Draws, *, is_fixed: bool = False
    ) -> tuple[Tensor, Condition]:
        x0, condition = super().data_and_condition(batch, generators, is_fixed=is_fixed)
        return self.own_frames.put(batch, x0, condition, generators, is_fixed=is_fixed)
