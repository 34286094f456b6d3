# SPDX-License-Identifier: Apache-2.0
"""The robot's actions in training: what an action-conditioned model does with a batch besides the others.

A batch has ``action`` [B, pixel frames - 1, d] beside its clips: row k leads from frame k to frame k + 1. A clip that
is longer than the model's is cut with its actions. Which transform the actions went through comes with the data
(``action_transform``), must be that of the config and of a resumed checkpoint, and is saved in every checkpoint, since
the weights are of use with no other. Data sets that only propose one are given the run's before the first batch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.actions.statistics import other_range, recorded_columns
from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.card import TRANSFORM_KEY as KEY
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.card_checks import CONFIG_KEY, OTHER_TRANSFORM, start_differences
from cosmos_predict2.conditioner import ACTION_KEY
from cosmos_predict2.data.action_conditioned.items import TRANSFORM_KEY
from cosmos_predict2.data.latent_cache import LATENTS_KEY
from cosmos_predict2.data.sizes import pixel_frames
from cosmos_predict2.models.action_checks import (
    NO_IMAGES,
    ONE_RUN,
    action_size,
)
from cosmos_predict2.models.draws import Draws
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire import distributed
from imaginaire.data.stream import data_sets
from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

FIRST, START_WEIGHTS = "the training data", "the file of the start weights"
LEAST, MOST = 0.05, 30.0  # of the largest action of a batch: 0.015 is ignored, released weights have grippers of 20


class NoActions:
    """Batches as they are; the methods are those that `Actions` has."""

    def of_clip(self, batch: Mapping[str, Any], generators: Draws) -> Mapping[str, Any]:
        """The batch with clips of the model's length, and what lies between their frames."""
        return batch

    def added_to(self, card: ModelCard) -> ModelCard:
        """The card of the weights, with what they record about actions."""
        return card

    def on_load(self, card: ModelCard) -> None:
        """Called with the card of a checkpoint whose weights are being loaded."""

    def on_load_path(self, path: str) -> None: ...

    def on_data(self, *loaders: Any) -> None: ...

    def on_after_backward(self) -> None: ...

    def likely_causes(self, batch: Mapping[str, Any]) -> Iterator[str]:
        return iter(())


def actions_of(model: Any) -> NoActions:
    """What a `Video2WorldModel` does with actions, by its network."""
    if model.net.takes_actions:
        return Actions(model)
    if isinstance(model.pipe_config, Video2WorldActionPipelineConfig):
        name = type(model.net).__name__
        raise ConfigError(
            f"model.config.pipe_config.net is a {name}, which takes no actions. Choose one that does:"
            " model=predict2_v2w_2b_action_conditioned_fsdp, or predict2_v2w_2b_action_chunk_conditioned_fsdp; for"
            " Predict2.5 the same with predict2p5."
        )
    return NoActions()


class Actions(NoActions):
    """Cuts actions with their clips, and keeps data, config, start weights and checkpoints to one transform."""

    def __init__(self, model: Any) -> None:
        self.model = model  # the Video2WorldModel that holds this
        pipe = model.pipe_config
        self.transform = pipe.transform if isinstance(pipe, Video2WorldActionPipelineConfig) else None
        self._source = CONFIG_KEY
        self._compared: set[str] = set()  # transforms of samples that are the run's
        self._has_seen_size = False  # of the first actions
        self._has_agreed = False  # with the other processes
        self._has_loaded = False  # weights of a checkpoint, in place of those that the run started from

    def of_clip(self, batch: Mapping[str, Any], generators: Draws) -> Mapping[str, Any]:
        """The batch with clips of the model's length and the actions between their frames."""
        if self.model.is_image_batch(batch):
            raise DataError(f"A batch has '{self.model.config.input_image_key}': {NO_IMAGES}.")
        action = batch.get(ACTION_KEY)
        if not isinstance(action, Tensor):
            raise DataError(
                f"The batch has no '{ACTION_KEY}'. It has: {', '.join(sorted(map(str, batch)))}. This model needs"
                " the robot's actions between the frames: [frames - 1, numbers] with every clip."
            )
        has_latents = LATENTS_KEY in batch
        video: Tensor = batch[LATENTS_KEY if has_latents else self.model.config.input_video_key]
        have = pixel_frames(video.shape[2]) if has_latents else video.shape[2]
        wanted = pixel_frames(self.model.pipe_config.state_t)
        if action.ndim != 3 or action.shape[:2] != (len(video), have - 1):
            raise DataError(
                f"The batch's clips have {have} frames, but its '{ACTION_KEY}' is {list(action.shape)}: [{len(video)},"
                f" {have - 1}, numbers] is one row from each frame to the next."
            )
        size, problems = action_size(_arguments(self.model.net), self.model.pipe_config.state_t)
        if problems or action.shape[2] != size:
            raise DataError(
                f"The batch's actions have {action.shape[2]} numbers, but the network reads {size} in each of its"
                f" {wanted - 1} (model.config.pipe_config.net.action_dim)."
            )
        self._check_actions(batch)
        if have <= wanted or not (has_latents or self.model.pipe_config.resize_online):
            return batch  # what is wrong with its length, its pixels say
        self._require_cuttable(have, wanted, at_front=not has_latents)
        if has_latents:
            starts = [0] * len(video)
            cut = {LATENTS_KEY: video[:, :, : self.model.pipe_config.state_t]}
        else:
            starts = (generators.uniform(1, "crop")[:, 0] * (have - wanted + 1)).long().tolist()
            clips = [clip[:, start : start + wanted] for clip, start in zip(video, starts)]
            cut = {self.model.config.input_video_key: torch.stack(clips)}
        rows = [row[start : start + wanted - 1] for row, start in zip(action, starts)]
        return {**batch, **cut, ACTION_KEY: torch.stack(rows)}

    def _require_cuttable(self, have: int, wanted: int, *, at_front: bool) -> None:
        """Raise where frames are to be cut off that actions are relative to."""
        transform = self.transform
        if transform is None or transform.accumulate is None or not at_front:
            return
        raise DataError(
            f"The batch's clips have {have} frames, the model takes {wanted}, and the actions cannot be cut with them:"
            f" they are differences to a frame further back (accumulate {transform.accumulate}). Let the data give"
            f" clips of num_frames={wanted}."
        )

    def likely_causes(self, batch: Mapping[str, Any]) -> Iterator[str]:
        """Actions that are far from the order of 1."""
        if (problem := self._far_from_one(batch[ACTION_KEY])) is not None:
            yield problem

    def _far_from_one(self, action_B_A_D: Tensor) -> str | None:
        """What is odd about the size of a batch's actions; zeros are hidden ones."""
        if self.transform is not None and self.transform.kind == "relative_pose":
            action_B_A_D = action_B_A_D[..., :-1]  # the gripper's state says nothing about how far poses are apart
        largest = float(action_B_A_D.abs().max())
        if LEAST <= largest <= MOST or largest == 0:
            return None
        return (
            f"the largest action of the batch is {largest:.3g} as {self.transform}, where a network expects the"
            f" order of 1: {'it hardly sees them' if largest < LEAST else 'they drown all else'}. Have the data the"
            " units that this transform was made for? dataloader_train.dataset.action_transform=statistics computes one"
            " from the data, for a run that starts from no weights with actions"
        )

    # --- the transform of the actions

    def added_to(self, card: ModelCard) -> ModelCard:
        return replace(card, has_action_embedders=True, action_transform=self.transform)

    def on_load(self, card: ModelCard) -> None:
        self._has_loaded = True
        if card.action_transform is not None:
            self._take_over(card.action_transform)

    def on_load_path(self, path: str) -> None:
        """Take over the transform that stands beside the weights, or raise where the config has another."""
        if (saved := read_card(path).opened().action_transform) is not None:
            self._take_over(saved)

    def _take_over(self, saved: ActionTransform) -> None:
        """The checkpoint's transform is the model's; raise where the config has another."""
        if self.transform is not None and self.transform != saved:
            raise CheckpointError(
                f"The checkpoint was trained with actions {saved}, but {self._source} has"
                f" {self.transform}. {OTHER_TRANSFORM}"
            )
        self.transform, self._source = saved, "the checkpoint"

    def on_data(self, *loaders: Any) -> None:
        """Give the run's transform to data sets whose configuration sets none.

        It is that of the config or the checkpoint, else the first that is set for a data set, else that of the start
        weights where it is one of such actions, else the first that data propose.
        """
        data = [one for one in data_sets(*loaders) if isinstance(getattr(one, KEY, None), ActionTransform)]
        found = [one.action_transform for one in data]
        proposed = [one for one in found if one.proposed]
        if found and self.transform is None:
            self._decide(found)
        settled = {one: self._in_place_of(one, is_whole=one is found[0]) for one in dict.fromkeys(proposed)}
        for one in data:
            if one.action_transform.proposed:
                one.action_transform = settled[one.action_transform]
            elif self.transform is not None and one.action_transform != self.transform:
                raise self._other(one.action_transform, self.transform)

    def on_after_backward(self) -> None:
        """After the first batch the processes compare what they took over: each may have read another data set."""
        if self._has_agreed or self.transform is None:
            return
        self._has_agreed = True
        first, *others = distributed.all_gather_object(attrs.evolve(self.transform, stats=None))
        if (other := next((one for one in others if one != first), None)) is not None:
            raise DataError(
                f"One process reads actions {other}, the first one {first}: their data sets differ, or were not found"
                f" in the loader. Say the transform in the config ({CONFIG_KEY}), or keep the data sets as attributes"
                " of what wraps them."
            )

    def _check_actions(self, batch: Mapping[str, Any]) -> None:
        """Take over the transform of a first batch whose data sets `on_data` did not find; raise where samples have
        another than the run."""
        texts = batch.get(TRANSFORM_KEY)
        if texts is None and self.transform is None:
            raise DataError(
                f"The batch does not say which transform its actions went through ('{TRANSFORM_KEY}'), and {CONFIG_KEY}"
                " is not set. Set it, {kind: controller, scale: [...]} for instance: inference needs it."
            )
        new = dict.fromkeys([texts] if isinstance(texts, str) else texts or ())
        for text in [text for text in new if text not in self._compared]:
            found = ActionTransform.from_json(text)
            own = self.transform or self._decide([found])
            if found != own:
                raise self._other(found, own)
            if not self._compared:
                self._compare_start(own)
            self._compared.add(text)
        if self.model.training and not self._has_seen_size:
            self._has_seen_size = True
            if (problem := self._far_from_one(batch[ACTION_KEY])) is not None:
                log.warning("%s.", problem)

    def _decide(self, found: Sequence[ActionTransform]) -> ActionTransform:
        """The run's transform, of those that its data have."""
        own, self._source = next((one for one in found if not one.proposed), None), FIRST
        if own is None:
            start = self._start_card()
            if start.has_action_embedders and start.action_transform is not None:
                own = start.action_transform if start.action_transform.raw_form == found[0].raw_form else None
            self._source = START_WEIGHTS if own else FIRST
        self.transform = attrs.evolve(own or found[0], proposed=False)
        log.info("actions: %s, as %s has them", self.transform, self._source)
        return self.transform

    def _in_place_of(self, proposed: ActionTransform, *, is_whole: bool) -> ActionTransform:
        """The run's transform, for data that propose another; ``is_whole``: those of training, not a part beside."""
        own = self.transform
        assert own is not None
        if not proposed.yields_to(own):
            raise DataError(f"The data have actions {proposed}, but {self._source} has {own}. {OTHER_TRANSFORM}")
        columns = recorded_columns(proposed)
        if columns is not None and (problem := other_range(columns, own, is_whole=is_whole)) is not None:
            log.warning("actions: %s.", problem)
        if own != proposed:
            log.info("actions: %s, as %s has them, not %s, as data propose", own, self._source, proposed)
        return attrs.evolve(own, proposed=True)  # another model may be trained on the same data set

    def _other(self, found: ActionTransform, own: ActionTransform) -> DataError:
        cure = ONE_RUN if self._source == FIRST else OTHER_TRANSFORM
        return DataError(f"The data have actions {found}, but {self._source} has {own}. {cure}")

    def _compare_start(self, transform: ActionTransform) -> None:
        if self._has_loaded:
            return
        for note in start_differences(self._start_card(), self.model.pipe_config.net, transform):
            if note not in self.model.reported:
                log.warning("%s", note)

    def _start_card(self) -> ModelCard:
        path = self.model.config.model_manager_config.dit_path
        return read_card(path).opened() if path else ModelCard()


def _arguments(net: ActionDiT) -> dict[str, Any]:
    """What `action_size` asks of a node, of a network that is built."""
    if isinstance(net, ChunkActionDiT):
        ratio = net.temporal_compression_ratio
        return dict(_target_=type(net), action_dim=net.action_dim, temporal_compression_ratio=ratio)
    return dict(_target_=type(net), action_dim=net.action_inputs)
