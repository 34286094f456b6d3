# SPDX-License-Identifier: Apache-2.0
"""The robot's actions in training: the steps that an action-conditioned model adds to the others.

A batch has ``action`` [B, pixel frames - 1, d] beside its clips: row k leads from frame k to frame k + 1. Which
transform the actions went through comes with the data (``action_transform``), must be that of the config and of a
resumed checkpoint, and is saved in every checkpoint, since the weights are of use with no other. Data sets that only
propose one are given the run's before the first batch.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from cosmos_predict2.actions.statistics import other_range, recorded_columns
from cosmos_predict2.actions.transforms import UNKNOWN, ActionTransform
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.dit_loading import CONFIG_KEY, OTHER_TRANSFORM
from cosmos_predict2.checkpoints.dit_weights import RATIO
from cosmos_predict2.conditioner import ACTION_KEY, STATE_KEY, Condition
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY
from cosmos_predict2.data.dataset_latents import LATENTS_KEY
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire import distributed
from imaginaire.buildable import target_of
from imaginaire.data.stream import data_sets
from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

Losses = tuple[dict[str, Any], Tensor]

FIRST = "the training data"
LEAST, MOST = 0.05, 30.0  # of the largest action of a batch: 0.015 is ignored, released weights have grippers of 20
ONE_RUN = "All data of a run must have the same, for validation too (dataloader_train, dataloader_val)."
OTHER_DATA = (
    "give the data in the order, at the rate and in the units of those that the run began with (dataset.action_keys,"
    " state, stride, frame_rate, units), or begin a run of another name."
)
NO_IMAGES = (
    "they are pictures, which no action leads to: the embedders of actions would get no gradient, for which the"
    " processes of a run would wait. Leave them out (a loader of clips alone), or choose a model without actions"
)


def action_size(net: Mapping[str, Any], state_t: int) -> tuple[int | None, list[str]]:
    """The number of numbers in each action of a clip, for the network of a lazy node, and the faults of the node."""
    target, count = target_of(net, "model.config.pipe_config.net"), pixel_frames(state_t) - 1
    if not (isinstance(target, type) and issubclass(target, ActionDiT)):
        return None, [f"it is {getattr(target, '__name__', target)}, which takes no actions: choose one that does"]
    if not isinstance(dim := net.get("action_dim"), int):
        return None, [f"action_dim={dim}; it must be the number of numbers of an action"]
    if issubclass(target, ChunkActionDiT):
        ratio = net.get("temporal_compression_ratio", RATIO)
        wrong = f"temporal_compression_ratio={ratio}, but {RATIO} actions lead to each latent frame"
        return dim, [] if ratio == RATIO else [wrong]
    chunk = net.get("num_action_per_chunk")
    total = dim * (chunk or 1)
    if total % count or (chunk or count) not in (1, count):
        read = f"{chunk} actions of {dim} numbers" if chunk else f"{dim} numbers"
        return None, [
            f"it reads {read}, but a clip of {count + 1} frames (state_t={state_t}) has {count} actions: set"
            f" num_action_per_chunk={count}, with action_dim the numbers of one action"
        ]
    return total // count, []


@runtime_checkable
class TransformsActions(Protocol):
    """A data set whose actions go through a transform. Training replaces one that is only ``proposed``."""

    action_transform: Any  # ActionTransform; None: it has no actions


class NoActions:
    """Batches as they are; the methods are those that `Actions` has."""

    transform: ActionTransform | None = None

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise for a batch without actions that fit its clips, the network and the run."""

    def cut(self, batch: Mapping[str, Any], starts: Sequence[int], num_actions: int) -> Mapping[str, Any]:
        """The batch with the actions between the frames that are left of its clips."""
        return batch

    def take_over(self, card: ModelCard) -> None:
        """The transform of weights that are being loaded is the run's; an error where the config has another."""

    def with_state(self, losses: Losses, x0_B_C_T_H_W: Tensor, condition: Condition) -> Losses:
        """The parts of a loss and the loss, with those of the robot's state where the network predicts it."""
        return losses

    def on_data(self, *loaders: Any) -> None: ...

    def on_after_backward(self) -> None: ...


def actions_of(model: Any) -> NoActions:
    """The `Actions` of a `Video2WorldModel`, or `NoActions`, by its network."""
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

    # --- a batch

    def check(self, batch: Mapping[str, Any]) -> None:
        if self.model.is_image_batch(batch):
            raise DataError(f"A batch has '{self.model.config.input_image_key}': {NO_IMAGES}.")
        action = batch.get(ACTION_KEY)
        if not isinstance(action, Tensor):
            raise DataError(
                f"The batch has no '{ACTION_KEY}'. It has: {', '.join(sorted(map(str, batch)))}. This model needs"
                " the robot's actions between the frames: [frames - 1, numbers] with every clip."
            )
        video: Tensor = batch.get(LATENTS_KEY, batch.get(self.model.config.input_video_key))
        have = pixel_frames(video.shape[2]) if LATENTS_KEY in batch else video.shape[2]
        if action.ndim != 3 or action.shape[:2] != (len(video), have - 1):
            raise DataError(
                f"The batch's clips have {have} frames, but its '{ACTION_KEY}' is {list(action.shape)}: [{len(video)},"
                f" {have - 1}, numbers] is one row from each frame to the next."
            )
        state_t = self.model.pipe_config.state_t
        size, problems = action_size(_as_node(self.model.net), state_t)
        if problems or action.shape[2] != size:
            raise DataError(
                f"The batch's actions have {action.shape[2]} numbers, but the network reads {size} in each of its"
                f" {pixel_frames(state_t) - 1} (model.config.pipe_config.net.action_dim)."
            )
        self._check_state(batch, have)
        self._check_transform(batch)
        if self.model.training and not self._has_seen_size:
            self._has_seen_size = True
            self._warn_far_from_one(batch[ACTION_KEY])

    def cut(self, batch: Mapping[str, Any], starts: Sequence[int], num_actions: int) -> Mapping[str, Any]:
        if any(starts) and self.transform is not None and self.transform.accumulate is not None:
            raise DataError(
                f"The batch's actions cannot be cut with its clips to {num_actions + 1} frames: they are differences to"
                f" a frame further back (accumulate {self.transform.accumulate}). Let the data give clips of"
                f" num_frames={num_actions + 1}."
            )
        cut = {ACTION_KEY: num_actions} | ({STATE_KEY: num_actions + 1} if STATE_KEY in batch else {})
        rows = {key: [row[k : k + size] for row, k in zip(batch[key], starts)] for key, size in cut.items()}
        return {**batch, **{key: torch.stack(parts) for key, parts in rows.items()}}

    def with_state(self, losses: Losses, x0_B_C_T_H_W: Tensor, condition: Condition) -> Losses:
        if (head := self.model.net.state_head) is None:
            return losses
        assert condition.state_B_F_S is not None and condition.action_B_A_D is not None  # see check
        state_B_F_S = condition.state_B_F_S.to(x0_B_C_T_H_W.device)
        found = head(x0_B_C_T_H_W, state_B_F_S[:, 0], condition.action_B_A_D.to(x0_B_C_T_H_W.device))
        error = head.error(found, state_B_F_S[:, 1:])
        (output, loss), squares = losses, (2 * error).square().mean()
        return {**output, "state_error": error.detach().mean()}, loss + squares

    def _check_state(self, batch: Mapping[str, Any], num_frames: int) -> None:
        if (head := self.model.net.state_head) is None:
            return
        state, size = batch.get(STATE_KEY), head.state_dim
        if not isinstance(state, Tensor) or state.shape[1:] != (num_frames, size):
            found = "no such entry" if not isinstance(state, Tensor) else f"{list(state.shape)}"
            raise DataError(
                f"The network predicts {size} numbers of the robot's state (net.state_range), for which a batch has"
                f" '{STATE_KEY}' [clips, {num_frames}, {size}], but this one has {found}. Let the data set read it"
                " (dataloader_train.dataset.state, and dataloader_val), or leave pipe_config.state empty."
            )

    def _warn_far_from_one(self, action_B_A_D: Tensor) -> None:
        """Zeros are hidden actions."""
        if self.transform is not None and self.transform.kind == "relative_pose":
            action_B_A_D = action_B_A_D[..., :-1]  # the gripper's state is no distance between poses
        largest = float(action_B_A_D.abs().max())
        if LEAST <= largest <= MOST or largest == 0:
            return
        log.warning(
            f"the largest action of the batch is {largest:.3g} as {self.transform}, where a network expects the"
            f" order of 1: {'it hardly sees them' if largest < LEAST else 'they drown all else'}. Have the data the"
            " units that this transform was made for? dataloader_train.dataset.action_transform=statistics computes one"
            " from the data, for a run that starts from no weights with actions."
        )

    # --- the transform of the actions

    def take_over(self, card: ModelCard) -> None:
        if (saved := card.action_transform) is None:
            return
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
        holders = [one for one in data_sets(*loaders) if isinstance(one, TransformsActions)]
        data = [one for one in holders if isinstance(one.action_transform, ActionTransform)]
        found: list[ActionTransform] = [one.action_transform for one in data]
        proposed = [one for one in found if one.proposed]
        if found and self.transform is None:
            self._decide(found)
        self._compare_contracts(found)
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
                f"One process reads actions {other}, the first one {first}. Give all processes the same data, or set"
                f" the transform in the config ({CONFIG_KEY})."
            )

    def _check_transform(self, batch: Mapping[str, Any]) -> None:
        """Take over the transform of a first batch whose data sets `on_data` did not find; raise where samples have
        another than the run."""
        texts = batch.get(TRANSFORM_KEY)
        if texts is None and self.transform is None:
            raise DataError(
                f"The batch does not say which transform its actions went through ('{TRANSFORM_KEY}'), and {CONFIG_KEY}"
                " is not set. Set it, {kind: controller, scale: [...]} for instance: inference needs it."
            )
        for text in dict.fromkeys([texts] if isinstance(texts, str) else texts or ()):
            if text not in self._compared:
                found = ActionTransform.from_json(text)
                own = self.transform or self._decide([found])
                if found != own:
                    raise self._other(found, own)
                self._compared.add(text)

    def _decide(self, found: Sequence[ActionTransform]) -> ActionTransform:
        """The run's transform, of those that its data have."""
        own, self._source = next((one for one in found if not one.proposed), None), FIRST
        path = self.model.config.model_manager_config.dit_path
        if own is None and path:
            start = read_card(path).opened().action_transform
            if start is not None and start.raw_form == found[0].raw_form:
                if problem := start.contract.problem(found[0].contract, path, "the data have"):
                    log.warning("actions: %s. What the weights know of each number is of its place in theirs.", problem)
                own, self._source = start.with_contract(found[0].contract), "the file of the start weights"
        self.transform = attrs.evolve(own or found[0], proposed=False)
        contract = self.transform.contract.to_dict()
        log.info("actions: %s, as %s has them; recorded: %s", self.transform, self._source, contract or "nothing")
        return self.transform

    def _compare_contracts(self, found: Sequence[ActionTransform]) -> None:
        """Raise where the first of the data have other actions or another state than the run; warn of others, which may
        be of another robot."""
        own = UNKNOWN if self.transform is None else self.transform.contract
        for one in found[:1]:
            own.require(one.contract, "The run", "the data have", OTHER_DATA)
        for one in found[1:]:
            if problem := own.problem(one.contract, "The run", "another of its data sets has"):
                log.warning("actions: %s. Are their numbers meant to be the same?", problem)

    def _in_place_of(self, proposed: ActionTransform, *, is_whole: bool) -> ActionTransform:
        """The run's transform, for data that propose another; ``is_whole``: those of training, not a part beside."""
        own = self.transform
        assert own is not None
        if not proposed.yields_to(own):
            raise self._other(proposed, own)
        columns = recorded_columns(proposed)
        if columns is not None and (problem := other_range(columns, own, is_whole=is_whole)) is not None:
            log.warning("actions: %s.", problem)
        if own != proposed:
            log.info("actions: %s, as %s has them, not %s, as data propose", own, self._source, proposed)
        return attrs.evolve(own, proposed=True)  # another model may be trained on the same data set

    def _other(self, found: ActionTransform, own: ActionTransform) -> DataError:
        cure = ONE_RUN if self._source == FIRST else OTHER_TRANSFORM
        return DataError(f"The data have actions {found}, but {self._source} has {own}. {cure}")


def _as_node(net: ActionDiT) -> dict[str, Any]:
    """The arguments of a built network that `action_size` reads, as its lazy node has them."""
    if isinstance(net, ChunkActionDiT):
        ratio = net.temporal_compression_ratio
        return dict(_target_=type(net), action_dim=net.action_dim, temporal_compression_ratio=ratio)
    return dict(_target_=type(net), action_dim=net.action_inputs)
