# SPDX-License-Identifier: Apache-2.0
"""Distillation: a student learns, on the data's conditions, the latents that its teacher makes of the same noise.

The pair of noise and latents takes the place of noise and data in the loss of a flow (`Student`), at the times at which
the student is sampled. The teacher makes one result of a noise, so that there is nothing to average over. In several
steps the student sees its estimate mixed with the same noise again, as in training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.card import known_class, read_card
from cosmos_predict2.checkpoints.dit_weights import problem_with
from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import noise_level
from cosmos_predict2.models.config import LATEST_TIME, Passes, model_config
from cosmos_predict2.world_model.assembly import other_parts
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import OBJECTIVE_KEY, Student, objective_of
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel, build_world_model
from imaginaire.buildable import target_of
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, error, errors

NO_TEACHER = "not set: give the run of the model that is distilled"


class Teacher:
    """The frozen teacher of a student's objective, in no checkpoint; built where and when it is first needed."""

    def __init__(self, student: Student, dtype: torch.dtype) -> None:
        self.student, self.dtype = student, dtype
        steps, guidance = student.teacher_steps, student.guidance
        self.options = SamplingOptions(num_steps=steps, guidance=guidance, is_repeatable=True)
        self._world: WorldModel | None = None

    def world(self, device: torch.device) -> WorldModel:
        if self._world is None or self._world.device != device:
            config = of_teacher(self.student.config)
            built = build_world_model(config, dtype=self.dtype, device=device, with_tokenizer=False)
            self._world = built.load(self.student.teacher)
        return self._world

    @torch.no_grad()
    def latents(self, epsilon_B_C_T_H_W: Tensor, condition: Condition) -> Tensor:
        """The latents of this noise."""
        world = self.world(epsilon_B_C_T_H_W.device)
        if not world.net.reads_text:  # the student, which reads none either, has looked at it
            condition = replace(condition, is_without_text=True)
        unconditional = replace(condition, crossattn_emb_B_S_E=torch.zeros_like(condition.crossattn_emb_B_S_E))
        return world.sample(condition, unconditional, epsilon_B_C_T_H_W, self.options).to(epsilon_B_C_T_H_W)

    def draw_sigma(self, uniform_B_3: Tensor) -> Tensor:
        """The noise level [B] of one of the student's steps for each sample, all equally often."""
        times = self.student.times[:-1].clamp(max=LATEST_TIME)
        return noise_level(times)[(uniform_B_3[:, 0] * len(times)).long()]


def teacher_of(world: WorldModel, dtype: torch.dtype) -> Teacher | None:
    """The teacher that a world model's objective names; None of one that learns from data."""
    objective = world.objective
    if not isinstance(objective, Student):
        return None
    if not objective.teacher:
        raise ConfigError(f"{OBJECTIVE_KEY}.teacher: {NO_TEACHER}.")
    return Teacher(objective, dtype)


def of_teacher(config: Video2WorldPipelineConfig) -> Video2WorldPipelineConfig:
    """The pipeline of a student's teacher: the same without its objective."""
    return attrs.evolve(config, objective=None)


def student_node(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The node of a student's objective in a ``model.config``; None of others."""
    node: Mapping[str, Any] | None = config["pipe_config"].get("objective")
    return node if node is not None and target_of(node, OBJECTIVE_KEY) is Student else None


def check_teacher(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Settings of a ``model.config`` that a distillation cannot have."""
    if (node := student_node(config)) is None:
        return
    teacher = node.get("teacher") or ""
    yield from errors(f"{OBJECTIVE_KEY}.teacher", [problem_of_teacher(teacher, config) if teacher else NO_TEACHER])
    run = context.config
    if run is not None and (size := run.model_parallel.context_parallel_size) > 1:
        yield error("model_parallel.context_parallel_size", f"{size}, but a teacher makes whole clips", "Set it to 1")
    most = int(config["pipe_config"]["timestamps"]["nfe"])
    for name, callback in (run.trainer.callbacks if run is not None else {}).items():
        if isinstance(callback, Mapping) and (steps := callback.get("num_sampling_step") or 0) > most:
            key = f"trainer.callbacks.{name}.num_sampling_step"
            yield error(key, f"{steps}, but the student has {most}", f"Set it to {most}")


def problem_of_teacher(path: str, config: Mapping[str, Any]) -> str | None:
    """The reason why weights are no teacher of a ``model.config``; None where they are."""
    if problem := problem_with(path):
        return problem
    card = read_card(path)
    if known_class(node := card.pipeline.get("objective") or {}) is Student:
        own = node.get("teacher") or "the run that it was distilled from"
        return f"{path} is a student itself, of few steps: give the model that was distilled, {own}"
    return next(other_parts(card, of_teacher(model_config(config).pipe_config), None), None)


def passes_of_teacher(config: Mapping[str, Any], clips: int) -> Passes | None:
    """The passes of a batch of clips where a teacher makes their latents."""
    if student_node(config) is None:
        return None
    pipe = model_config(config).pipe_config
    student = objective_of(pipe)
    assert isinstance(student, Student)
    evaluations = student.teacher_steps + (pipe.flow is None)  # from the smallest noise level to clean latents
    return Passes(
        rollout=evaluations * (2 if student.guidance else 1),
        clips=clips,
        clips_at_once=clips,
        weight_copies=1,
        are_of_teacher=True,
        batch_key="dataloader_train.batch_size",
    )
