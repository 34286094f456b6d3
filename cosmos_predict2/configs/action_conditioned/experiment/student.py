# SPDX-License-Identifier: Apache-2.0
"""Students of the tiny models: one step in place of several, frames one by one, guidance in the weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import job, tiny_run
from cosmos_predict2.released import TINY_ACTION, TINY_VIDEO2WORLD
from cosmos_predict2.world_model.objectives import Student
from imaginaire.config import L, register_experiment

TEACHER = "${model.config.pipe_config.objective.teacher}"
ACTION, VIDEO = "predict2_video2world_tiny_action_conditioned_training", "predict2_video2world_training_tiny_base"
NOISE_ALONE = 1e6  # a noise level


@dataclass(frozen=True)
class StudentRun:
    """The settings in which one student differs from others; ``experiment`` trained its teacher."""

    experiment: str = ACTION
    teacher: str = TINY_ACTION
    teacher_steps: int = 2
    guidance: float = 0.0
    causal: bool = False  # takes longer to learn: frames do without the later ones
    iterations: int = 1000
    lr: float = 0.003
    adam_lr: float = 2e-4


RUNS = {
    "tiny_student": StudentRun(),
    "tiny_student_causal": StudentRun(causal=True, iterations=2000, lr=0.01, adam_lr=7e-4),
    "tiny_student_prompts": StudentRun(
        VIDEO, TINY_VIDEO2WORLD, teacher_steps=4, guidance=3.0, iterations=2000, lr=0.01, adam_lr=7e-4
    ),
}


def student(name: str, run: StudentRun) -> dict[str, Any]:
    """A run that begins at the weights of its teacher."""
    options = dict(teacher=run.teacher, teacher_steps=run.teacher_steps, guidance=run.guidance, causal=run.causal)
    numbers = tiny_run(run.iterations, batch_size=8, lr=run.lr, adam_lr=run.adam_lr)
    numbers["trainer"]["callbacks"]["draw_samples"].num_sampling_step = 1
    return dict(
        defaults=[f"/experiment/{run.experiment}", "_self_"],
        job=job(name),
        model=dict(
            config=dict(
                validation_sigmas=[NOISE_ALONE],  # as the step begins
                model_manager_config=dict(dit_path=TEACHER),
                pipe_config=dict(objective=L(Student)(**options), timestamps=dict(nfe=1)),
            )
        ),
        **numbers,
    )


for name, run in RUNS.items():
    register_experiment(name, partial(student, name, run))
