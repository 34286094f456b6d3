# SPDX-License-Identifier: Apache-2.0
"""Post-training of Video2World with the robot's actions: the same loss, for a network that is told what comes next.

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
from cosmos_predict2.checkpoints.card import ModelCard, card_in, read_card
from cosmos_predict2.checkpoints.card_checks import (
    CONFIG_KEY,
    OTHER_TRANSFORM,
    resume_differences,
    start_differences,
)
from cosmos_predict2.conditioner import ACTION_KEY, Condition
from cosmos_predict2.data.action_conditioned.items import TRANSFORM_KEY
from cosmos_predict2.data.latent_cache import LATENTS_KEY
from cosmos_predict2.data.sizes import pixel_frames
from cosmos_predict2.models.action_checks import (
    NO_IMAGES,
    ONE_RUN,
    action_size,
    chunk_problem,
    declared_transform,
    gives_images,
    known_transform,
    other_transform_problem,
    transform_problems,
    width_problem,
)
from cosmos_predict2.models.draws import Draws
from cosmos_predict2.models.flow_model import Predict2p5Video2WorldModel
from cosmos_predict2.models.video2world_model import DIT_PATH_KEY, Predict2Video2WorldModel
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire import distributed, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.data.stream import data_sets
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error, errors, warning

log = logging.getLogger(__name__)

FIRST, START_WEIGHTS = "the training data", "the file of the start weights"
LEAST, MOST = 0.05, 30.0  # of the largest action of a batch: 0.015 is ignored, released weights have grippers of 20


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
        self._compared: set[str] = set()  # transforms of samples that are the run's
        self._has_seen_size = False  # of the first actions
        self._has_agreed = False  # with the other processes
        self._has_loaded = False  # weights of a checkpoint, in place of those that the run started from

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield from super().check(arguments, context)
        config = arguments["config"]
        pipe = config["pipe_config"]
        if pipe["net"] is None:
            return
        transform = known_transform([*context.training.values(), *context.validation.values()], pipe)
        if context.start_path is not None:
            yield from cls._check_start(context.start_path, transform, config)
        if context.resume_path and not storage.is_remote(context.resume_path):
            name = "RUN" if context.config is None else context.config.job.name
            cure = f"Give the new run a folder of its own (job.name={name}_2, say)"
            for problem in resume_differences(read_card(context.resume_path), transform):
                yield error("dataloader_train", problem, cure)

    @classmethod
    def _check_config(cls, config: Any) -> Iterator[Finding]:
        yield from super()._check_config(config)
        pipe = config["pipe_config"]
        _, problems = action_size(pipe["net"], pipe["state_t"])
        yield from errors("model.config.pipe_config.net", problems)
        yield from errors("model.config.pipe_config.chunk_size", [chunk_problem(pipe)])
        if not problems and pipe.get(KEY) is not None:
            yield from errors(CONFIG_KEY, transform_problems(pipe))

    @classmethod
    def _check_data(
        cls, key: str, data: Mapping[str, Any], config: Any, training: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Finding]:
        """Also pictures, and actions of another size than the network's or with another transform than the config's or
        those of training."""
        yield from super()._check_data(key, data, config, training)
        if gives_images(data):
            yield error(key, NO_IMAGES)
        pipe, transform = config["pipe_config"], declared_transform(data)
        if (problem := width_problem(data, pipe, training)) is not None:
            yield error(key, problem)
        elif transform is not None and pipe.get(KEY) is not None and not [*transform_problems(pipe)]:
            own = ActionTransform.from_dict(pipe[KEY])
            if not transform.yields_to(own):
                yield error(key, f"its actions are {transform}, but {CONFIG_KEY} is {own}")
        yield from errors(key, [other_transform_problem(data, pipe, training)])

    @classmethod
    def _check_start(cls, load_path: str, transform: ActionTransform | None, config: Any) -> Iterator[Finding]:
        """Weights that training would start from, but that were trained with other actions: those of
        ``checkpoint.load_path`` go on with their own alone, others may learn them anew."""
        path = config["model_manager_config"]["dit_path"]
        if load_path:  # whose weights replace those of dit_path
            if not (storage.is_remote(load_path) or is_hub(load_path)):
                yield from errors("checkpoint.load_path", resume_differences(read_card(load_path), transform))
        elif not (card := read_card(path, fetch=False)).problem:  # else another check reports it
            for note in start_differences(card, config["pipe_config"]["net"], transform):
                yield warning(DIT_PATH_KEY, note)

    # --- one step

    def data_and_condition(
        self, batch: Mapping[str, Any], generators: Draws, *, is_fixed: bool = False
    ) -> tuple[Tensor, Condition]:
        if self.is_image_batch(batch):
            raise DataError(f"A batch has '{self.config.input_image_key}': {NO_IMAGES}.")
        batch = self.with_actions_of_clip(batch, generators)
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
        self._check_actions(batch)
        if have <= wanted or not (has_latents or self.pipe_config.resize_online):
            return batch  # what is wrong with its length, its pixels say
        self._require_cuttable(have, wanted, at_front=not has_latents)
        if has_latents:
            starts = [0] * len(video)
            cut = {LATENTS_KEY: video[:, :, : self.pipe_config.state_t]}
        else:
            starts = (generators.uniform(1, "crop")[:, 0] * (have - wanted + 1)).long().tolist()
            clips = [clip[:, start : start + wanted] for clip, start in zip(video, starts)]
            cut = {self.config.input_video_key: torch.stack(clips)}
        rows = [row[start : start + wanted - 1] for row, start in zip(action, starts)]
        return {**batch, **cut, ACTION_KEY: torch.stack(rows)}

    def _require_cuttable(self, have: int, wanted: int, *, at_front: bool) -> None:
        """Raise where frames are to be cut off that actions are relative to."""
        transform = self.action_transform
        if transform is None or transform.accumulate is None or not at_front:
            return
        raise DataError(
            f"The batch's clips have {have} frames, the model takes {wanted}, and the actions cannot be cut with them:"
            f" they are differences to a frame further back (accumulate {transform.accumulate}). Let the data give"
            f" clips of num_frames={wanted}."
        )

    def likely_causes(self, batch: Mapping[str, Any]) -> Iterator[str]:
        """Also actions that are far from the order of 1."""
        yield from super().likely_causes(batch)
        if (problem := self._far_from_one(batch[ACTION_KEY])) is not None:
            yield problem

    def _far_from_one(self, action_B_A_D: Tensor) -> str | None:
        """What is odd about the size of a batch's actions; zeros are hidden ones."""
        if self.action_transform is not None and self.action_transform.kind == "relative_pose":
            action_B_A_D = action_B_A_D[..., :-1]  # the gripper's state says nothing about how far poses are apart
        largest = float(action_B_A_D.abs().max())
        if LEAST <= largest <= MOST or largest == 0:
            return None
        return (
            f"the largest action of the batch is {largest:.3g} as {self.action_transform}, where a network expects the"
            f" order of 1: {'it hardly sees them' if largest < LEAST else 'they drown all else'}. Have the data the"
            " units that this transform was made for? dataloader_train.dataset.action_transform=statistics computes one"
            " from the data, for a run that starts from no weights with actions"
        )

    # --- the transform of the actions

    def card(self) -> ModelCard:
        return replace(super().card(), has_action_embedders=True, action_transform=self.action_transform)

    def load_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._compare_saved(state)
        return super().load_checkpoint_state(state)

    def account_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._compare_saved(state)
        return super().account_checkpoint_state(state)

    def on_load_path(self, path: str) -> None:
        """Take over the transform that stands beside the weights, or raise where the config has another."""
        super().on_load_path(path)
        if (saved := read_card(path).opened().action_transform) is not None:
            self._take_over(saved)

    def _compare_saved(self, state: Mapping[str, Tensor]) -> None:
        self._has_loaded = True
        if (saved := card_in(state).action_transform) is not None:
            self._take_over(saved)

    def _take_over(self, saved: ActionTransform) -> None:
        """The checkpoint's transform is the model's; raise where the config has another."""
        if self.action_transform is not None and self.action_transform != saved:
            raise CheckpointError(
                f"The checkpoint was trained with actions {saved}, but {self._says_transform} has"
                f" {self.action_transform}. {OTHER_TRANSFORM}"
            )
        self.action_transform, self._says_transform = saved, "the checkpoint"

    def on_data(self, *loaders: Any) -> None:
        """Have data sets give actions by the run's transform that were not told one.

        It is that of the config or the checkpoint, else the first that data were told, else that of the start weights
        where it is one of such actions, else the first that data propose.
        """
        data = [one for one in data_sets(*loaders) if isinstance(getattr(one, KEY, None), ActionTransform)]
        found = [one.action_transform for one in data]
        proposed = [one for one in found if one.proposed]
        if found and self.action_transform is None:
            self._decide(found)
        settled = {one: self._in_place_of(one, is_whole=one is found[0]) for one in dict.fromkeys(proposed)}
        for one in data:
            if one.action_transform.proposed:
                one.action_transform = settled[one.action_transform]
            elif self.action_transform is not None and one.action_transform != self.action_transform:
                raise self._other(one.action_transform, self.action_transform)

    def on_after_backward(self) -> None:
        """After the first batch the processes compare what they took over: each may have read another data set."""
        super().on_after_backward()
        if self._has_agreed or self.action_transform is None:
            return
        self._has_agreed = True
        first, *others = distributed.all_gather_object(attrs.evolve(self.action_transform, stats=None))
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
        if texts is None and self.action_transform is None:
            raise DataError(
                f"The batch does not say which transform its actions went through ('{TRANSFORM_KEY}'), and {CONFIG_KEY}"
                " is not set. Set it, {kind: controller, scale: [...]} for instance: inference needs it."
            )
        new = dict.fromkeys([texts] if isinstance(texts, str) else texts or ())
        for text in [text for text in new if text not in self._compared]:
            found = ActionTransform.from_json(text)
            own = self.action_transform or self._decide([found])
            if found != own:
                raise self._other(found, own)
            if not self._compared:
                self._compare_start(own)
            self._compared.add(text)
        if self.training and not self._has_seen_size:
            self._has_seen_size = True
            if (problem := self._far_from_one(batch[ACTION_KEY])) is not None:
                log.warning("%s.", problem)

    def _decide(self, found: Sequence[ActionTransform]) -> ActionTransform:
        """The run's transform, of those that its data have."""
        own, self._says_transform = next((one for one in found if not one.proposed), None), FIRST
        if own is None:
            start = self._start_card()
            if start.has_action_embedders and start.action_transform is not None:
                own = start.action_transform if start.action_transform.raw_form == found[0].raw_form else None
            self._says_transform = START_WEIGHTS if own else FIRST
        self.action_transform = attrs.evolve(own or found[0], proposed=False)
        log.info("actions: %s, as %s has them", self.action_transform, self._says_transform)
        return self.action_transform

    def _in_place_of(self, proposed: ActionTransform, *, is_whole: bool) -> ActionTransform:
        """The run's transform, for data that propose another; ``is_whole``: those of training, not a part beside."""
        own = self.action_transform
        assert own is not None
        if not proposed.yields_to(own):
            raise DataError(
                f"The data have actions {proposed}, but {self._says_transform} has {own}. {OTHER_TRANSFORM}"
            )
        columns = recorded_columns(proposed)
        if columns is not None and (problem := other_range(columns, own, is_whole=is_whole)) is not None:
            log.warning("actions: %s.", problem)
        if own != proposed:
            log.info("actions: %s, as %s has them, not %s, as data propose", own, self._says_transform, proposed)
        return attrs.evolve(own, proposed=True)  # another model may be trained on the same data set

    def _other(self, found: ActionTransform, own: ActionTransform) -> DataError:
        cure = ONE_RUN if self._says_transform == FIRST else OTHER_TRANSFORM
        return DataError(f"The data have actions {found}, but {self._says_transform} has {own}. {cure}")

    def _compare_start(self, transform: ActionTransform) -> None:
        if self._has_loaded:
            return
        for note in start_differences(self._start_card(), self.pipe_config.net, transform):
            if note not in self.reported:
                log.warning("%s", note)

    def _start_card(self) -> ModelCard:
        path = self.config.model_manager_config.dit_path
        return read_card(path).opened() if path else ModelCard()


class Predict2p5ActionConditionedModel(Predict2Video2WorldActionConditionedModel, Predict2p5Video2WorldModel):
    """The same with the loss of Predict2.5."""


def _arguments(net: ActionDiT) -> dict[str, Any]:
    """What `action_size` asks of a node, of a network that is built."""
    if isinstance(net, ChunkActionDiT):
        ratio = net.temporal_compression_ratio
        return dict(_target_=type(net), action_dim=net.action_dim, temporal_compression_ratio=ratio)
    return dict(_target_=type(net), action_dim=net.action_inputs)
