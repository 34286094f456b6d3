# SPDX-License-Identifier: Apache-2.0
"""Training of a world model with actions on its own frames: after a history that it imagined, the true future.

A batch of the loader has episodes of several chunks, which are trained on one after the other, some episodes at a time.
A ``share`` of them goes on from what the model imagines: when a chunk was trained on, the model imagines it, and the
next chunk begins with that end in place of the true frames. No gradient goes through it, so that memory is that of one
chunk, and a chunk of history is imagined once, however long the history is:

    true frame -> chunk 1, trained on and imagined -> its end -> chunk 2, with the true future as target, ... -> the end

The true future does not follow from a frame that differs from the true one, and a model that regresses to it learns
blur. What keeps the history near the truth therefore has a setting: a small share, how few chunks (``most_chunks``),
the clips that are ``nearest``, and ``level``. Where that is set, a chunk of history is not imagined from noise alone,
but is what the model makes of the true chunk with so much noise: its own faults at nearly true places. At 0 it is the
true chunk as the tokenizer gives it back. ``noise`` disturbs the conditioning frames of all clips.

A student (`teacher`) learns what its teacher makes of the same imagined frame, in place of the true future. That does
follow from it, so that nothing is averaged: all episodes may have histories of any length.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.conditioner import ACTION_KEY, TEXT_KEY, Condition
from cosmos_predict2.models.config import Passes, Predict2Video2WorldModelConfig, model_config
from cosmos_predict2.models.teacher import student_node
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.objectives import is_student
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire.config.nodes import as_config
from imaginaire.config.schema import Section, above, at_least
from imaginaire.data.stream import POSITION_KEY, move_to
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.random import Draws

KEY = "model.config.own_frames"
NUMBER_KEY = "model.config.pipe_config.max_num_conditional_frames"
FRAMES_KEY = "imagined_frames"  # of a batch: conditioning frames in place of the clips' first ones


@attrs.define(kw_only=True, slots=False)
class OwnFramesConfig(Section):
    """The histories of training."""

    chunks: int = attrs.field(default=7, validator=at_least(1))  # of an episode, from one of its first frames on
    minibatch: int = attrs.field(default=8, validator=at_least(1))  # episodes that are trained on together
    share: float = attrs.field(default=0.25, validator=at_least(0, at_most=1))  # of the episodes
    share_at_start: float = attrs.field(default=0.0, validator=at_least(0, at_most=1))
    ramp: int = attrs.field(default=0, validator=at_least(0))  # episodes from the one share to the other
    most_chunks: int = attrs.field(default=100, validator=at_least(1))  # of a history, which then begins anew
    num_steps: int = attrs.field(default=1, validator=at_least(1))  # sampling steps of an imagined chunk
    # Noise level of the true chunk from which one of history is made, in one pass; null: from noise alone.
    level: float | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(0)))
    # Share of the imagined ends that are handed on: those nearest to the truth; the other clips go on from the truth.
    nearest: float = attrs.field(default=1.0, validator=[above(0), attrs.validators.le(1.0)])
    noise: float = attrs.field(default=0.0, validator=at_least(0))  # its deviation is so much times a normal number

    def share_at(self, episode: int) -> float:
        """The share at an episode of the stream: a straight line from ``share_at_start`` to ``share``."""
        done = min(1.0, episode / self.ramp) if self.ramp else 1.0
        return self.share_at_start + (self.share - self.share_at_start) * done


@attrs.define(kw_only=True, slots=False)
class Predict2OwnFramesConfig(Predict2Video2WorldModelConfig):
    own_frames: OwnFramesConfig = attrs.field(factory=OwnFramesConfig)


class OwnFrames:
    """Episodes of a loader as batches of one chunk for a `Video2WorldModel`, some with histories of its own."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, own_frames_of(model.config)
        for key, problem in problems(model.config):
            raise ConfigError(f"{key}: {problem}.")
        self.imagination = Imagination(model.world)
        self.num_given = model.pipe_config.min_num_conditional_frames  # latent frames
        self.length, self.step = sizes(model.pipe_config)
        self.left = 0  # chunks of the present batch of episodes that are still to come

    def parts(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The chunks of all episodes, some at a time. Ends are imagined when all have been trained on a chunk."""
        for batch in loader:
            episodes, frames = self._drawn(batch), None
            rows = torch.arange(len(episodes["owns"])).split(self.config.minibatch)
            self.left = len(rows) * self.config.chunks
            for k in range(self.config.chunks):
                whole = self._chunk(episodes, k, frames)
                for some in rows:
                    self.left -= 1
                    yield _rows(whole, some)
                if k + 1 < self.config.chunks:
                    frames = self._handed_on(episodes, k, whole)

    def put(
        self, batch: Mapping[str, Any], x0_B_C_T_H_W: Tensor, condition: Condition, draws: Draws, *, is_fixed: bool
    ) -> tuple[Tensor, Condition]:
        """Latents and condition with the batch's own conditioning frames, and with noise unless ``is_fixed``."""
        given, rest = x0_B_C_T_H_W[:, :, : self.num_given], x0_B_C_T_H_W[:, :, self.num_given :]
        if FRAMES_KEY in batch:
            given = self.model.world.encode(batch[FRAMES_KEY]).to(given)
        if self.config.noise and not is_fixed:
            size_B = draws.normal((len(given), 1), "history_noise_size")[:, 0] * self.config.noise
            size_B = size_B.to(given, non_blocking=True).view(-1, 1, 1, 1, 1)
            epsilon = draws.normal(given.shape, "history_noise").to(given, non_blocking=True)
            given = (given + size_B * epsilon) / (1 + size_B.square()).sqrt()
        x0 = torch.cat([given, rest], dim=2)
        return x0, replace(condition, gt_frames_B_C_T_H_W=x0)

    def _drawn(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The episodes with ``starts``, the first frame of each, and ``owns``, which go on from what is imagined."""
        self._check(batch)
        spare = batch[self.model.config.input_video_key].shape[2] - self.length - (self.config.chunks - 1) * self.step
        draws = self.model._generators(batch, "own_frames")
        start_B = (draws.uniform(1, "start")[:, 0] * (spare + 1)).long()
        share = self.config.share_at(int(batch[POSITION_KEY][0]) if POSITION_KEY in batch else self.config.ramp)
        return {**batch, "starts": start_B, "owns": draws.uniform(1, "share")[:, 0] < share}

    def _chunk(self, episodes: Mapping[str, Any], k: int, frames: Tensor | None) -> dict[str, Any]:
        """Chunk ``k`` of the episodes, with conditioning frames of its own if they are given."""
        key, starts = self.model.config.input_video_key, (episodes["starts"] + k * self.step).tolist()
        clips = [clip[:, i : i + self.length] for clip, i in zip(episodes[key], starts, strict=True)]
        part = {name: value for name, value in episodes.items() if name not in ("starts", "owns")}
        part = dict(self.model.actions.cut({**part, key: torch.stack(clips)}, starts, self.length - 1))
        if POSITION_KEY in part:  # each chunk has draws of its own
            part[POSITION_KEY] = part[POSITION_KEY] * self.config.chunks + k
        return part if frames is None else {**part, FRAMES_KEY: frames}

    @torch.no_grad()
    def _handed_on(self, episodes: Mapping[str, Any], k: int, part: Mapping[str, Any]) -> Tensor | None:
        """The conditioning frames of the next chunk, uint8; None where all are the true ones."""
        config, model = self.config, self.model
        if not max(config.share, config.share_at_start) or (k + 1) % (config.most_chunks + 1) == 0:
            return None
        true = self._chunk(episodes, k + 1, None)[model.config.input_video_key][:, :, : pixel_frames(self.num_given)]
        rows = episodes["owns"].nonzero()[:, 0]
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.long)  # all ranks make as many passes
        with model.phase("rollout"), model.autocast(model.world.device):
            ends = self._imagined(move_to(_rows(part, rows), model.world.device)).to(true.device)
        if true.is_floating_point():
            ends = ends.to(true) / 127.5 - 1
        away = (ends.float() - true[rows].float()).flatten(1).square().mean(dim=1)
        near = away.argsort()[: max(1, round(config.nearest * len(rows)))]
        near = near[episodes["owns"][rows[near]]]  # the one that stood in for none is not handed on
        return true.index_copy(0, rows[near], ends[near])

    def _imagined(self, part: Mapping[str, Any]) -> Tensor:
        """The last frames of some chunks, as the model imagines them: uint8."""
        model, config, given = self.model, self.config, pixel_frames(self.num_given)
        draws, wanted = model._generators(part, "history"), range(self.length - given, self.length)
        if config.level is None:
            size, text = len(part[ACTION_KEY]), None
            if model.net.reads_text:  # as in training, where the run's own text replaces that of the data
                text = model.text.added_to(part, size, model.world.device)[TEXT_KEY]
            return self.imagination.generate_actions(
                part.get(FRAMES_KEY, part[model.config.input_video_key][:, :, :given]),
                part[ACTION_KEY],
                draws.integers(0, 2**31, "seed").tolist(),
                SamplingOptions(num_steps=config.num_steps),
                text_B_S_E=text,
                batch_size=size,
                frames=wanted,
            )
        x0, condition = model.data_and_condition(part, draws, is_fixed=True)
        if config.level:
            epsilon = draws.normal(x0.shape, "noise").to(x0, non_blocking=True)
            x0 = model.world.predict_clean(x0, epsilon, x0.new_full((len(x0), 1), config.level), condition)
        return to_uint8(model.world.decode(x0, wanted))

    def _check(self, batch: Mapping[str, Any]) -> None:
        config, key = self.config, self.model.config.input_video_key
        if key not in batch:
            raise DataError(
                f"The batch has no '{key}': {KEY} cuts clips at any frame, which cached latents do not have. Take a"
                " data set of videos."
            )
        self.model.actions.check(batch)
        size, have = len(batch[key]), batch[key].shape[2]
        if have < (least := self.length + (config.chunks - 1) * self.step):
            raise DataError(
                f"The clips of this batch have {have} frames, but {KEY}.chunks={config.chunks} need {least}. Set the"
                f" data set's num_frames={least}, or fewer chunks."
            )
        if size % config.minibatch:
            raise DataError(
                f"The batch has {size} episodes, of which {KEY}.minibatch={config.minibatch} are trained on together:"
                " set dataloader_train.batch_size to a multiple of it."
            )


class OwnFramesModel(Video2WorldModel):
    """A `Video2WorldModel` with actions that learns after histories of its own; its validation is the usual one.

    Saves and stops wait for the last chunk of a batch of episodes.
    """

    config_class: type[Predict2Video2WorldModelConfig] = Predict2OwnFramesConfig
    config: Predict2OwnFramesConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own_frames = OwnFrames(self)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield from super().check(arguments, context)
        yield from check(arguments["config"], context)
        yield from cls.check_batches(arguments["config"], context)

    @classmethod
    def check_batches(cls, config: Any, context: CheckContext) -> Iterator[Finding]:
        """Findings on batches of episodes that are trained on some at a time, and on the length of the run."""
        own, run = own_frames_of(config), context.config
        if run is None or not isinstance(run.dataloader_train, Mapping):
            return
        size = run.dataloader_train.get("batch_size")
        if not isinstance(size, int):
            return
        if size % own.minibatch:
            text = f"{size}, of which {KEY}.minibatch={own.minibatch} are trained on together"
            yield error("dataloader_train.batch_size", text, "Set a multiple of it")
            return
        parts, end = size // own.minibatch * own.chunks, run.trainer.max_iter
        if end * run.trainer.grad_accum_iter % parts:
            text = f"{end}, but a batch of episodes has {parts} chunks, and a run ends with a whole one"
            yield error("trainer.max_iter", text, f"Set a multiple of {parts}")

    @classmethod
    def passes(cls, config: Any, conditions: int) -> Passes:
        own = own_frames_of(config)
        passes = super().passes(config, own.minibatch)  # of rewards it is the batch
        history = passes_of(own, student_node(config) is not None)
        if passes is None:
            return history
        rollout = passes.rollout + history.rollout * own.minibatch / passes.clips
        return replace(passes, rollout=rollout, batch_key=passes.batch_key and history.batch_key)

    def train_batches(self, dataloader: Any) -> Iterator[Any]:
        return super().train_batches(self.own_frames.parts(dataloader))

    def at_boundary(self) -> bool:
        return super().at_boundary() and self.own_frames.left == 0

    def data_and_condition(
        self, batch: Mapping[str, Any], generators: Draws, *, is_fixed: bool = False
    ) -> tuple[Tensor, Condition]:
        x0, condition = super().data_and_condition(batch, generators, is_fixed=is_fixed)
        return self.own_frames.put(batch, x0, condition, generators, is_fixed=is_fixed)


def _rows(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some samples of a batch."""

    def chosen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows.to(value.device)]
        return [value[i] for i in rows.tolist()] if isinstance(value, list) else value

    return {name: chosen(value) for name, value in batch.items()}


def own_frames_of(config: Any) -> OwnFramesConfig:
    """The section of a model's config that may still be a mapping."""
    value = config.get("own_frames") if isinstance(config, Mapping) else config.own_frames
    made: OwnFramesConfig = as_config(OwnFramesConfig, value, KEY)
    return made


def sizes(pipe_config: Any) -> tuple[int, int]:
    """The frames of a chunk's clip, and how many frames each further chunk adds."""
    length = pixel_frames(pipe_config.state_t)
    return length, length - pixel_frames(pipe_config.min_num_conditional_frames)


def problems(config: Predict2Video2WorldModelConfig) -> Iterator[tuple[str, str]]:
    """Settings by key with which no history can be imagined or handed on."""
    pipe, own = config.pipe_config, own_frames_of(config)
    if {*config.conditional_frames} != {number := pipe.min_num_conditional_frames} or not 0 < number < pipe.state_t:
        yield (
            NUMBER_KEY,
            f"from {number} to {pipe.max_num_conditional_frames} conditioning latent frames, but a history is handed on"
            f" as one number of them, from 1 to {pipe.state_t - 1}: set min_num_conditional_frames to the same",
        )
    if is_student(pipe) and own.level:
        yield f"{KEY}.level", f"{own.level}, but a student knows the noise of its own steps alone: set it to null"
    if is_student(pipe) and own.num_steps > (most := int(pipe.timestamps.nfe)):
        yield f"{KEY}.num_steps", f"{own.num_steps}, but the student has {most}: set it to {most}"


def check(config: Any, context: CheckContext) -> Iterator[Finding]:
    """Findings on the histories, and on the data that they are of."""
    own, typed = own_frames_of(config), model_config(config)
    if found := [error(key, problem) for key, problem in problems(typed)]:
        yield from found
        return
    length, step = sizes(typed.pipe_config)
    for key, data in context.training.items():
        have, least = data.get("num_frames"), length + (own.chunks - 1) * step
        if isinstance(have, int) and have < least:
            yield error(key, f"num_frames={have}, but {KEY}.chunks={own.chunks} need {least}", f"Set it to {least}")


def passes_of(own: OwnFramesConfig, is_student: bool = False) -> Passes:
    """The passes of a micro-batch, with its part of the imagining; a student's last step ends in clean latents."""
    each = 0 if own.level == 0 else 1 if own.level else own.num_steps + (not is_student)
    imagined = max(own.share, own.share_at_start) * each * (own.chunks - 1) / own.chunks
    size = own.minibatch
    return Passes(rollout=round(imagined, 2), clips=size, clips_at_once=size, batch_key=f"{KEY}.minibatch")
