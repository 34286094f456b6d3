# SPDX-License-Identifier: Apache-2.0
"""Post-training of Video2World with the robot's actions: the same loss, for a network that is told what comes next.

A batch has ``action`` [B, pixel frames - 1, d] beside its clips: row k leads from frame k to frame k + 1. A clip that
is longer than the model's is cut with its actions. Which transform the actions went through comes with the data
(``action_transform``), must be that of the config and of a resumed checkpoint, and is saved in every checkpoint, since
the weights are of use with no other.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import yaml
from torch import Tensor

from cosmos_predict2.checkpoints import written_pipeline
from cosmos_predict2.checkpoints.action_transforms import (
    CONFIG_KEY,
    KEY,
    recorded_transform,
    tensor_transform,
    transform_tensor,
)
from cosmos_predict2.checkpoints.families import ACTION_EMBEDDERS
from cosmos_predict2.checkpoints.presence import holds
from cosmos_predict2.conditioner import ACTION_KEY, Condition
from cosmos_predict2.data.action_conditioned.actions import ActionTransform
from cosmos_predict2.data.action_conditioned.items import TRANSFORM_KEY
from cosmos_predict2.data.latent_cache import LATENTS_KEY
from cosmos_predict2.data.sizes import pixel_frames
from cosmos_predict2.models.draws import Draws
from cosmos_predict2.models.flow_model import Predict2p5Video2WorldModel
from cosmos_predict2.models.video2world_model import Predict2Video2WorldModel
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionPipelineConfig
from imaginaire import weights
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.lazy_config import to_yaml
from imaginaire.names import locate

log = logging.getLogger(__name__)

RATIO = 4  # pixel frames, and so actions, that make a latent frame


class Predict2Video2WorldActionConditionedModel(Predict2Video2WorldModel):
    """As its base, for networks with actions."""

    net: ActionDiT  # type: ignore[assignment]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not self.net.takes_actions:
            name = type(self.net).__name__
            raise ConfigError(
                f"model.config.pipe_config.net is a {name}, which takes no actions. Choose one that does:"
                " model=predict2_v2w_2b_action_conditioned_fsdp, or predict2_v2w_2b_action_chunk_conditioned_fsdp; for"
                " Predict2.5 the same with predict2p5."
            )
        pipe = self.pipe_config
        self.action_transform = pipe.transform if isinstance(pipe, Video2WorldActionPipelineConfig) else None
        self._says_transform = CONFIG_KEY
        facts = written_pipeline.pipeline_facts(yaml.safe_load(to_yaml(pipe)))
        self._pipeline_facts = written_pipeline.facts_tensor(facts)
        self._known_texts: set[str] = set()
        self._train_new_embedders()

    @classmethod
    def preflight(cls, config: Any) -> Iterator[str]:
        yield from super().preflight(config)
        pipe = config["pipe_config"]
        if pipe["net"] is None:
            return
        _, problems = action_size(pipe["net"], pipe["state_t"])
        yield from problems
        if not problems and pipe.get(KEY) is not None:
            yield from _transform_problems(pipe)

    @classmethod
    def preflight_data(cls, data: Mapping[str, Any], config: Any) -> Iterator[str]:
        """Also actions of another size than the network's, or under another transform than the config's."""
        yield from super().preflight_data(data, config)
        pipe = config["pipe_config"]
        transform = declared_transform(data)
        if pipe["net"] is None or transform is None:
            return
        size, _ = action_size(pipe["net"], pipe["state_t"])
        if size is not None and size != transform.dim:
            yield (
                f"its actions have {transform.dim} numbers, but the network reads {size}: set"
                f" model.config.pipe_config.net.action_dim, or choose other data"
            )
        elif pipe.get(KEY) is not None and not [*_transform_problems(pipe)]:
            own = ActionTransform.from_dict(pipe[KEY])
            if own != transform:
                yield f"its actions are {transform}, but {CONFIG_KEY} says {own}"

    # --- one step

    def data_and_condition(
        self, batch: Mapping[str, Any], generators: Draws, *, is_fixed: bool = False
    ) -> tuple[Tensor, Condition]:
        if not self.is_image_batch(batch):
            whole, batch = batch, self.with_actions_of_clip(batch, generators)
            self._check_transform(batch)
            self._require_uncut(whole, batch)
        return super().data_and_condition(batch, generators, is_fixed=is_fixed)

    @torch.no_grad()
    def clean_clips(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor, Condition]:
        return super().clean_clips(self.with_actions_of_clip(batch, self._generators(batch, "validation")))

    def with_actions_of_clip(self, batch: Mapping[str, Any], generators: Draws) -> Mapping[str, Any]:
        """The batch with clips of the model's length and the actions between their frames."""
        action = batch.get(ACTION_KEY)
        if not isinstance(action, Tensor):
            raise DataError(
                f"The batch has no '{ACTION_KEY}'. It has: {', '.join(sorted(map(str, batch)))}. This model is told"
                " what the robot does between the frames: [frames - 1, numbers] with every clip."
            )
        has_latents = LATENTS_KEY in batch
        video: Tensor = batch[LATENTS_KEY if has_latents else self.config.input_video_key]
        have = pixel_frames(video.shape[2]) if has_latents else video.shape[2]
        wanted = pixel_frames(self.pipe_config.state_t)
        if action.ndim != 3 or action.shape[:2] != (len(video), have - 1):
            raise DataError(
                f"The batch's clips have {have} frames, but its '{ACTION_KEY}' is {list(action.shape)}: [{len(video)},"
                f" {have - 1}, numbers] is one row from each frame to the next."
            )
        size, problems = action_size(_arguments(self.net), self.pipe_config.state_t)
        if problems or action.shape[2] != size:
            raise DataError(
                f"The batch's actions have {action.shape[2]} numbers, but the network reads {size} in each of its"
                f" {wanted - 1} (model.config.pipe_config.net.action_dim)."
            )
        if have <= wanted or not (has_latents or self.pipe_config.resize_online):
            return batch  # what is wrong with its length, its pixels say
        if has_latents:
            starts = [0] * len(video)
            cut = {LATENTS_KEY: video[:, :, : self.pipe_config.state_t]}
        else:
            starts = (generators.uniform(1, "crop")[:, 0] * (have - wanted + 1)).long().tolist()
            clips = [clip[:, start : start + wanted] for clip, start in zip(video, starts)]
            cut = {self.config.input_video_key: torch.stack(clips)}
        rows = [row[start : start + wanted - 1] for row, start in zip(action, starts)]
        return {**batch, **cut, ACTION_KEY: torch.stack(rows)}

    def _require_uncut(self, whole: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        """Raise where clips were cut whose actions are relative to a frame that may have been cut off."""
        transform, key = self.action_transform, self.config.input_video_key
        if transform is None or transform.accumulate is None or whole.get(key) is batch.get(key):
            return
        have, wanted = whole[key].shape[2], batch[key].shape[2]
        raise DataError(
            f"The batch's clips have {have} frames, the model takes {wanted}, and the actions cannot be cut with them:"
            f" they are differences to a frame further back (accumulate {transform.accumulate}). Let the data give"
            f" clips of num_frames={wanted}."
        )

    # --- the transform of the actions

    def checkpoint_state(self) -> dict[str, Tensor]:
        state = super().checkpoint_state()
        state = {**state, written_pipeline.KEY: self._pipeline_facts}
        return state if self.action_transform is None else {**state, KEY: transform_tensor(self.action_transform)}

    def load_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._compare_saved(state)
        return weights.load_into(super().checkpoint_state(), _without_transform(state))

    def account_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._compare_saved(state)
        return weights.account(super().checkpoint_state(), _without_transform(state))

    def _compare_saved(self, state: Mapping[str, Tensor]) -> None:
        """Take over the checkpoint's transform, or raise where the config has another."""
        if KEY not in state:
            return
        saved = tensor_transform(state[KEY])
        if self.action_transform is not None and self.action_transform != saved:
            raise CheckpointError(
                f"The checkpoint was trained with actions {saved}, but {self._says_transform} has"
                f" {self.action_transform}. {_CURE}"
            )
        self.action_transform, self._says_transform = saved, "the checkpoint"

    def _check_transform(self, batch: Mapping[str, Any]) -> None:
        """Take over the data's transform, or raise where the config, the checkpoint or other samples have another."""
        texts = batch.get(TRANSFORM_KEY)
        if texts is None and self.action_transform is None:
            raise DataError(
                f"The batch does not say which transform its actions went through ('{TRANSFORM_KEY}'), and {CONFIG_KEY}"
                " is not set. Set it, {kind: controller, scale: [...]} for instance: inference needs it."
            )
        for text in {texts} if isinstance(texts, str) else set(texts or ()):
            if text in self._known_texts:
                continue
            found = ActionTransform.from_json(text)
            if self.action_transform is None:
                self.action_transform, self._says_transform = found, "the first batch"
                log.info("actions: %s, as the data say", found)
            elif found != self.action_transform:
                raise DataError(
                    f"The data have actions {found}, but {self._says_transform} has {self.action_transform}. {_CURE}"
                )
            if not self._known_texts:
                self._compare_start(found)
            self._known_texts.add(text)

    def _compare_start(self, transform: ActionTransform) -> None:
        path = self.config.model_manager_config.dit_path
        if path and holds(path, ACTION_EMBEDDERS):
            for difference in written_pipeline.untold_differences(path, self.pipe_config.net):
                log.warning("the start weights were trained by a network with %s (pipe_config.net)", difference)
        if path and holds(path, ACTION_EMBEDDERS) and (start := recorded_transform(path)) not in (None, transform):
            log.warning(
                "the start weights were trained with actions %s, the data have %s: what the weights know of actions"
                " must be learnt anew",
                start,
                transform,
            )

    def _train_new_embedders(self) -> None:
        """Beside adapters, embedders of actions that begin anew are trained in full: they start at nothing."""
        path = self.config.model_manager_config.dit_path
        if self.config.train_architecture != "lora" or (path and holds(path, ACTION_EMBEDDERS)):
            return
        new = [p for name, p in self.net.named_parameters() if name.startswith(ACTION_EMBEDDERS.rstrip("*"))]
        for parameter in new:
            parameter.requires_grad_(True)
        numbers = sum(parameter.numel() for parameter in new)
        log.info("lora: the action embedders begin anew; their %s parameters are trained in full", f"{numbers:,}")


class Predict2p5ActionConditionedModel(Predict2Video2WorldActionConditionedModel, Predict2p5Video2WorldModel):
    """The same with the loss of Predict2.5."""


_CURE = (
    "Weights fit one transform only. Give the data the same (action_transform, or action_scale of the Bridge layout),"
    " or start a new run (job.name) from the weights alone, by model.config.model_manager_config.dit_path."
)


def action_size(net: Mapping[str, Any], state_t: int) -> tuple[int | None, list[str]]:
    """How many numbers each action of a clip has for the network of a lazy node, and what is wrong with the node."""
    target = net.get("_target_")
    target = locate(target, "model.config.pipe_config.net._target_") if isinstance(target, str) else target
    count = pixel_frames(state_t) - 1
    where = "model.config.pipe_config.net"
    if not (isinstance(target, type) and issubclass(target, ActionDiT)):
        return None, [f"{where} is {getattr(target, '__name__', target)}, which takes no actions: choose one that does"]
    if not isinstance(dim := net.get("action_dim"), int):
        return None, [f"{where}.action_dim={dim}; how many numbers an action has must be said"]
    if issubclass(target, ChunkActionDiT):
        ratio = net.get("temporal_compression_ratio", RATIO)
        if ratio != RATIO:
            return dim, [f"{where}.temporal_compression_ratio={ratio}, but {RATIO} actions lead to each latent frame"]
        return dim, []
    chunk = net.get("num_action_per_chunk")
    total = dim * (chunk or 1)
    if total % count or (chunk or count) not in (1, count):
        read = f"{chunk} actions of {dim} numbers" if chunk else f"{dim} numbers"
        return None, [
            f"{where} reads {read}, but a clip of {count + 1} frames (state_t={state_t}) has {count} actions: set"
            f" num_action_per_chunk={count}, with action_dim the numbers of one action"
        ]
    return total // count, []


def declared_transform(data: Mapping[str, Any]) -> ActionTransform | None:
    """The transform that a data set with these arguments will have, where its class can tell before it is built."""
    target = data.get("_target_")
    target = locate(target, "_target_") if isinstance(target, str) else target
    declared = getattr(target, "declared_transform", None)
    if not callable(declared):
        return None
    try:
        found: ActionTransform | None = declared(**{key: value for key, value in data.items() if key != "_target_"})
    except (ConfigError, DataError):
        return None  # its own preflight says it
    return found


def _transform_problems(pipe: Mapping[str, Any]) -> Iterator[str]:
    try:
        transform = ActionTransform.from_dict(pipe[KEY])
    except (ConfigError, TypeError, ValueError) as error:
        yield f"{CONFIG_KEY}: {str(error).rstrip('.')}"
        return
    size, _ = action_size(pipe["net"], pipe["state_t"])
    if size is not None and size != transform.dim:
        yield f"{CONFIG_KEY} is of {transform.dim} numbers, but the network reads {size} (net.action_dim)"


def _arguments(net: ActionDiT) -> dict[str, Any]:
    """What `action_size` asks of a node, of a network that is built."""
    if isinstance(net, ChunkActionDiT):
        ratio = net.temporal_compression_ratio
        return dict(_target_=type(net), action_dim=net.action_dim, temporal_compression_ratio=ratio)
    return dict(_target_=type(net), action_dim=net.action_inputs)


def _without_transform(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return weights.renamed(state, lambda name: None if name in (KEY, written_pipeline.KEY) else name)
