# SPDX-License-Identifier: Apache-2.0
"""Students of the tiny action-conditioned world model: one step in place of several, and frames one by one.

python -m scripts.train -- experiment=tiny_student model.config.pipe_config.objective.teacher=RUN
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import job, tiny_run
from cosmos_predict2.released import tiny_action_path
from cosmos_predict2.world_model.objectives import Student
from imaginaire.config import L, register_experiment

TEACHER = "${model.config.pipe_config.objective.teacher}"


def student(name: str, *, causal: bool) -> dict[str, Any]:
    """A run that begins at the weights of its teacher, by default those that ship. ``causal``: its latent frames do
    without the later ones, which takes longer to learn."""
    objective = L(Student)(teacher=tiny_action_path(), teacher_steps=2, guidance=0.0, causal=causal)
    rates = dict(lr=0.01, adam_lr=7e-4) if causal else dict(lr=0.003, adam_lr=2e-4)
    numbers = tiny_run(2000 if causal else 1000, batch_size=8, **rates)
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


for name, causal in (("tiny_student", False), ("tiny_student_causal", True)):
    register_experiment(name, partial(student, name, causal=causal))
