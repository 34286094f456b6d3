# SPDX-License-Identifier: Apache-2.0
"""Students: what they learn from a teacher, how they are sampled, and that a distillation resumes and is planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.released import TINY_ACTION, TINY_VIDEO2WORLD
from cosmos_predict2.tools.plan.advice import nearest_that_fits
from cosmos_predict2.tools.plan.speed import GPUS
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.world_model.config import FlowConfig, SolverConfig
from cosmos_predict2.world_model.objectives import Student
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import ConfigError, UserError
from imaginaire.training.preflight import check_launch
from scripts import distill
from tests.findings import checked_model
from tests.models.parts import awaken
from tests.models.test_action_model import action_batch, make_config, make_model
from tests.programs import call
from tests.training import assert_resumes, saved, train

CONFIG = "cosmos_predict2/configs/base/config.py"
SHORT = ["experiment=tiny_student", "job.project=tests", "job.group=engine", "job.name=student"]
SHORT += ["checkpoint.save_iter=1", "trainer.run_validation=False", "dataloader_train.batch_size=2"]
SHORT += ["dataloader_train.dataset.num_episodes=8", "trainer.callbacks.draw_samples=null"]
SHORT += ["model.config.pipe_config.objective.teacher_steps=1"]


def teachers_file(folder: Path) -> str:
    path = str(folder / "teacher.safetensors")
    save_file({f"net.{name}": value for name, value in make_model().net.state_dict().items()}, path)
    return path


def make_student(teacher: str, num_steps: int = 1, **objective: Any) -> Video2WorldModel:
    config = make_config(dit_path=teacher)
    config.pipe_config.objective = L(Student)(teacher=teacher, teacher_steps=3, **objective)
    config.pipe_config.timestamps = SolverConfig(nfe=num_steps)
    torch.manual_seed(0)
    return Video2WorldModel(config)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_student_learns_what_its_teacher_makes_of_the_same_noise(tmp_path: Path, num_steps: int) -> None:
    model, batch = make_student(teachers_file(tmp_path), num_steps), action_batch()
    output, loss = model.training_step(batch, 0)
    teacher = make_model().world
    generators = model._generators(batch, "train")
    x0, condition = model.data_and_condition(batch, generators)
    epsilon, sigma_B_1 = model.draw_noise(x0, False, generators)
    made = teacher.sample(condition, condition, epsilon, SamplingOptions(num_steps=3))
    assert torch.allclose(output["x0"], made, atol=1e-6) and not torch.allclose(made, x0, atol=1e-2)
    t_B_1 = sigma_B_1 / (1 + sigma_B_1)
    grid = torch.tensor([1, 15 / 16, 5 / 6, 5 / 8])[:num_steps]
    assert ((t_B_1 - grid).abs().min(dim=1).values < 1e-6).all()
    assert loss > 0 and output["velocity"].shape == made.shape


def test_a_teacher_is_guided_away_from_no_text(tmp_path: Path) -> None:
    teacher, batch = make_model(), action_batch()
    model = make_student(teachers_file(tmp_path), guidance=5.0)
    x0, condition = model.data_and_condition(batch, model._generators(batch, "train"))
    no_text = replace(condition, crossattn_emb_B_S_E=torch.zeros_like(condition.crossattn_emb_B_S_E))
    plain, guided = (
        teacher.world.sample(condition, no_text, x0, SamplingOptions(num_steps=3, guidance=guidance))
        for guidance in (0.0, 5.0)
    )
    torch.testing.assert_close(model.taught(x0, x0, condition), guided, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, guided, atol=1e-3)


def test_a_student_of_noise_levels_begins_as_its_teacher_at_every_level(tmp_path: Path) -> None:
    """The network sees the same times, also where the teacher's are scaled."""
    path, batch, estimates = teachers_file(tmp_path), action_batch(), []
    for objective in (None, L(Student)(teacher=path)):
        config = make_config(dit_path=path)
        config.pipe_config.rectified_flow_t_scaling_factor = 200.0
        config.pipe_config.objective, config.pipe_config.timestamps = objective, SolverConfig(nfe=1)
        model = Video2WorldModel(config)
        x0, condition = model.data_and_condition(batch, model._generators(batch, "train"))
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        output, _ = model.loss(x0, noise, torch.tensor([[0.4], [30.0]]), condition)
        estimates.append(output["x0_pred"])
    torch.testing.assert_close(*estimates, rtol=1e-4, atol=1e-4)


def test_one_step_is_the_estimate_from_noise_alone(tmp_path: Path) -> None:
    model = make_student(teachers_file(tmp_path))
    awaken(model.net, ".fc2.")
    batch = action_batch()
    generators = model._generators(batch, "train")
    x0, condition = model.data_and_condition(batch, generators)
    epsilon, sigma_B_1 = model.draw_noise(x0, False, generators)
    output, _ = model.loss(x0, epsilon, sigma_B_1, condition)
    sampled = model.world.sample(condition, condition, epsilon, SamplingOptions(num_steps=1))
    assert torch.allclose(sampled[:, :, 1:], output["x0_pred"][:, :, 1:], atol=1e-5)
    assert torch.equal(sampled[:, :, :1], x0[:, :, :1])


def test_a_student_is_not_sampled_with_other_steps_or_guided_again(tmp_path: Path) -> None:
    world = make_student(teachers_file(tmp_path), 2).world
    batch = action_batch()
    condition = world.conditioner.condition(batch, is_image=False)
    given = torch.randn(2, 16, 3, 4, 4)
    condition = condition.with_conditioning_frames(given, torch.ones(2))
    other = world.conditioner.condition(
        {**batch, "t5_text_embeddings": batch["t5_text_embeddings"] + 1}, is_image=False
    )
    other = other.with_conditioning_frames(given, torch.ones(2))
    plain, guided = (
        world.sample(condition, other, given, SamplingOptions(num_steps=2, guidance=guidance)) for guidance in (0, 7)
    )
    assert torch.equal(plain, guided)
    with pytest.raises(ConfigError, match=r"35 sampling steps, .* student of 1 to 2 steps .* give --num_steps 2"):
        world.sample(condition, other, given, SamplingOptions())
    with pytest.raises(ConfigError, match="--solver 2ab"):
        world.sample(condition, other, given, SamplingOptions(num_steps=1, solver="2ab"))


def test_a_flows_student_keeps_its_times() -> None:
    config = make_config().pipe_config
    config.flow, config.timestamps = FlowConfig(shift=3.0), SolverConfig(nfe=1)
    assert Student(config).flow is config.flow
    config.timestamps = SolverConfig()
    with pytest.raises(ConfigError, match=r"timestamps.nfe=35, but a student has 1 to 4 steps"):
        Student(config)


def test_a_student_without_a_teacher_is_found_before_the_start(tmp_path: Path) -> None:
    config = make_config()
    config.pipe_config.objective, config.pipe_config.timestamps = L(Student)(), SolverConfig(nfe=1)
    with pytest.raises(ConfigError, match=r"objective.teacher: not set"):
        Video2WorldModel(config)
    found = checked_model(Video2WorldModel, config)
    assert "objective.teacher" in str(found)


def test_a_teacher_of_few_steps_or_of_another_network_is_found_before_the_start(tmp_path: Path) -> None:
    options = [*SHORT, "trainer.max_iter=1", f"model.config.model_manager_config.dit_path={TINY_ACTION}"]
    teacher = "model.config.pipe_config.objective.teacher"
    with pytest.raises(UserError, match=rf"The run cannot start:\s.*{teacher}: .* was trained with pipe_config.net"):
        train(tmp_path, [*options, f"{teacher}={TINY_VIDEO2WORLD}"], config=CONFIG)
    assert train(tmp_path, [*SHORT, "trainer.max_iter=1"], config=CONFIG) == 0
    with pytest.raises(UserError, match=rf"The run cannot start:\s.*{teacher}: .* is a student itself, .*tiny_action"):
        train(tmp_path, [*options, "job.name=next", f"{teacher}={tmp_path}/tests/engine/student"], config=CONFIG)


def test_a_callback_that_samples_in_more_steps_is_found_before_the_start() -> None:
    config = compose(CONFIG, ["experiment=tiny_student", "trainer.callbacks.draw_samples.num_sampling_step=20"])
    with pytest.raises(ConfigError, match=r"draw_samples\.num_sampling_step.*20, but the student has 1"):
        check_launch(config)


@pytest.mark.slow
def test_a_distillation_resumes_bit_for_bit_and_its_run_knows_its_steps(tmp_path: Path) -> None:
    assert_resumes(tmp_path, SHORT, 1, 2, name="student", config=CONFIG)
    assert not any("teacher" in name for name in saved(tmp_path / "whole", "student")["model"])
    world = imagination_of(str(tmp_path / "whole/tests/engine/student")).world
    assert isinstance(world.objective, Student) and world.config.timestamps.nfe == 1


def test_the_teacher_is_planned() -> None:
    work = read_workload(compose(CONFIG, ["experiment=tiny_student", "trainer.grad_accum_iter=2"]), 2)
    assert work.passes is not None and (work.passes.rollout, work.passes.clips) == (3, 16)
    assert work.clips_per_step == 32 and work.per_micro_batch(work.passes.rollout) == 3
    small = nearest_that_fits(work, GPUS["H100"], 1.4e9)
    assert small is None or not any("rl." in key or "context" in key for key in small.overrides)


def test_a_run_is_distilled_with_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Up to its start: the run itself is that of the experiment."""
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    teacher = "experiment=predict2_video2world_tiny_action_conditioned_training"
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(compose(CONFIG, [teacher, *SHORT[1:4]])))
    words = [
        "--world_model",
        str(folder),
        "--steps",
        "2",
        "--guidance",
        "3",
        "--causal",
        "--iterations",
        "7",
        "--dryrun",
    ]

    assert call(distill, *words, "--", "optimizer.lr=0.5") == 0
    made = compose(str(tmp_path / "tests/engine/teacher_student/config.yaml"), [])
    pipe = made.model.config.pipe_config
    assert {name: pipe.objective[name] for name in ("teacher", "teacher_steps", "guidance", "causal")} == dict(
        teacher=str(folder), teacher_steps=8, guidance=3, causal=True
    )
    assert pipe.timestamps.nfe == 2 and made.model.config.model_manager_config.dit_path == str(folder)
    assert made.trainer.max_iter == 7 and made.optimizer.lr == 0.5
    assert made.trainer.callbacks.draw_samples.num_sampling_step == 2
    assert capfd.readouterr().out.startswith("python -m scripts.train --dryrun --config ")
    assert call(distill, *words, "--name", "short", "--", "trainer.max_itr=1") == 2
    words[1] = str(tmp_path)
    assert call(distill, *words) == 2 and "lies in no run's folder" in capfd.readouterr().err
