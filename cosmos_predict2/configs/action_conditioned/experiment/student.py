# SPDX-License-Identifier: Apache-2.0
"""Students of the tiny action-conditioned world model: one step in place of several.

python -m scripts.train -- experiment=tiny_student model.config.pipe_config.objective.teacher=RUN
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import job, tiny_run
from cosmos_predict2.released import tiny_action_path
from cosmos_predict2.world_model.objectives import Student
from imaginaire.config import L, register_experiment

TEACHER = "${model.config.pipe_config.objective.teacher}"


def student(name: str) -> dict[str, Any]:
    """A run that begins at the weights of its teacher, by default those that ship."""
    objective = L(Student)(teacher=tiny_action_path(), teacher_steps=2, guidance=0.0)
    numbers = tiny_run(1000, batch_size=8, lr=0.003, adam_lr=2e-4)
    numbers["trainer"]["callbacks"]["draw_samples"].num_sampling_step = 1
    return dict(
        defaults=["/experiment/predict2_video2world_tiny_action_conditioned_training", "_self_"],
        job=job(name),
        model=dict(
            config=dict(
                validation_sigmas=[],  # as in training, at the times of its steps
                model_manager_config=dict(dit_path=TEACHER),
                pipe_config=dict(objective=objective, timestamps=dict(nfe=1)),
            )
        ),
        **numbers,
    )


register_experiment("tiny_student", partial(student, "tiny_student"))
