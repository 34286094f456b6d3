# SPDX-License-Identifier: Apache-2.0
"""Training on own frames: which frames a chunk begins with, that runs resume bit by bit, and checks of settings."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import driving
from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.evaluation.metrics.imagined_chunks import by_chunk, things_by_chunk
from cosmos_predict2.models.own_frames import FRAMES_KEY, OwnFramesConfig, OwnFramesModel
from cosmos_predict2.pipelines.evaluation_data import toy_recordings
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire.config import lazy_config
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError, DataError
from imaginaire.training.preflight import check_launch
from tests.training import assert_resumes, run_dir, train

CONFIG = "cosmos_predict2/configs/base/config.py"
NAME = "own"
OWN = "model.config.own_frames"
SHORTER = "dataloader_train.dataset.num_frames=30"
SHORT = ["experiment=tiny_long_horizon", "dataloader_train.batch_size=4", f"{OWN}.minibatch=2", f"{OWN}.chunks=3"]
SHORT += [f"{OWN}.most_chunks=100", "dataloader_train.dataset.num_episodes=4", "dataloader_train.dataset.num_frames=40"]
RUN = ["job.project=tests", "job.group=engine", f"job.name={NAME}", "trainer.logging_iter=1", "checkpoint.save_iter=4"]
RUN += ["trainer.run_validation=false", "trainer.callbacks.draw_samples=null", "dataloader_val.dataset.num_episodes=4"]


def student(is_causal: bool, teacher: str = "") -> list[str]:
    """The overrides that distil a run, by default the model that ships."""
    options = f"teacher: {teacher or TINY_ACTION}, teacher_steps: 1, causal: {str(is_causal).lower()}"
    objective = f"{{_target_: cosmos_predict2.world_model.objectives.Student, {options}}}"
    pipe = "model.config.pipe_config"
    return [f"{pipe}.objective={objective}", f"{pipe}.timestamps.nfe=1"]


def made(
    num_given: int = 1, options: Sequence[str] = (), **own: Any
) -> tuple[OwnFramesModel, dict[str, Any], list[dict[str, Any]]]:
    """A model with these settings, a batch of its loader, and the parts of that batch."""
    given = [f"model.config.pipe_config.{end}_num_conditional_frames={num_given}" for end in ("min", "max")]
    config = compose(CONFIG, [*SHORT, *given, *options, *(f"{OWN}.{name}={value}" for name, value in own.items())])
    model = lazy_config.instantiate(config.model)
    loader = lazy_config.instantiate(config.dataloader_train)
    model.on_data(loader)
    model.on_train_start()
    batch = next(iter(loader))
    return model, batch, list(model.train_batches([batch]))


def starts_of(batch: dict[str, Any], parts: list[dict[str, Any]]) -> Tensor:
    """The frame of its episode at which each chunk begins, by its actions: [chunks, episodes]."""
    windows_B_N_A_D = batch["action"].unfold(1, 12, 1).transpose(2, 3)
    action_K_B_A_D = torch.stack([torch.cat([part["action"] for part in parts[i : i + 2]]) for i in (0, 2, 4)])
    same_K_B_N = (windows_B_N_A_D[None] == action_K_B_A_D[:, :, None]).flatten(3).all(dim=3)
    assert (same_K_B_N.sum(dim=2) == 1).all()
    return same_K_B_N.int().argmax(dim=2)


def test_true_histories_cut_episodes_into_chunks_that_follow_each_other() -> None:
    _, batch, parts = made(share=0.0)
    assert len(parts) == 6 and not any(FRAMES_KEY in part for part in parts)
    starts = starts_of(batch, parts)
    assert (starts.diff(dim=0) == 12).all() and (starts[0] <= 3).all()
    for i, part in enumerate(parts):
        for row, clip in zip(range(i % 2 * 2, i % 2 * 2 + 2), part["video"], strict=True):
            first = int(starts[i // 2, row])
            assert torch.equal(clip, batch["video"][row, :, first : first + 13])
    assert len({position for part in parts for position in part["sample_position"].tolist()}) == 12


def test_two_conditioning_latent_frames_are_the_last_five_of_the_chunk_before() -> None:
    model, batch, parts = made(num_given=2, share=1.0)
    assert (starts_of(batch, parts).diff(dim=0) == 8).all()
    frames = torch.cat([part[FRAMES_KEY] for part in parts[2:4]])
    assert frames.shape[2] == 5
    x0, condition = model.data_and_condition(parts[2], model._generators(parts[2], "train"))
    assert torch.equal(x0[:, :, :2], model.world.encode(parts[2][FRAMES_KEY]).to(x0))
    assert condition.condition_mask_B_1_T_H_W[:, 0, :, 0, 0].tolist() == [[1, 1, 0, 0]] * 2


def test_an_own_history_is_the_rollout_that_the_model_makes() -> None:
    model, _, parts = made(share=1.0)
    first, second, third = (torch.cat([part["video"] for part in parts[i : i + 2]]) for i in (0, 2, 4))
    frames = first[:, :, :1]
    for i, clips in ((0, second), (2, third)):
        both = {key: torch.cat([part[key] for part in parts[i : i + 2]]) for key in ("action", "sample_position")}
        seeds = model._generators({**both, "video": clips}, "history").integers(0, 2**31, "seed").tolist()
        video = model.own_frames.imagination.generate_actions(
            frames, both["action"], seeds, SamplingOptions(num_steps=1)
        )
        frames = torch.cat([part[FRAMES_KEY] for part in parts[i + 2 : i + 4]])
        assert torch.equal(frames, video[:, :, -1:])
        assert not torch.equal(frames, clips[:, :, :1])


def test_the_loss_sees_own_frames_and_keeps_the_true_future() -> None:
    model, _, parts = made(share=1.0)
    x0, condition = model.data_and_condition(parts[-1], model._generators(parts[-1], "train"))
    own = model.world.encode(parts[-1][FRAMES_KEY]).to(x0)
    true = model.world.encode(parts[-1]["video"]).to(x0)
    assert torch.equal(x0[:, :, :1], own) and torch.allclose(x0[:, :, 1:], true[:, :, 1:])
    assert torch.equal(condition.gt_frames_B_C_T_H_W, x0)
    _, loss = model.training_step(parts[-1], 0)
    loss.backward()  # no graph of the history is left to go through
    assert all(parameter.grad is not None for parameter in model.net.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_student_learns_what_its_teacher_makes_of_an_imagined_frame(is_causal: bool) -> None:
    model, _, parts = made(share=1.0, options=student(is_causal))
    own, (output, _) = parts[-1], model.training_step(parts[-1], 0)
    assert model.teacher is not None
    teacher = model.teacher.world(model.world.device)
    for part in (own, {name: value for name, value in own.items() if name != FRAMES_KEY}):
        draws = model._generators(part, "train")
        x0, condition = model.data_and_condition(part, draws)
        epsilon, _ = model.draw_noise(x0, False, draws)
        target = teacher.sample(condition, condition, epsilon, SamplingOptions(num_steps=1))
        assert torch.allclose(output["x0"], target, atol=1e-5) == (part is own)
    assert torch.equal(output["x0"][:, :, :1], model.world.encode(own[FRAMES_KEY]).to(output["x0"]))


def test_a_student_has_no_histories_from_other_noise_or_in_more_steps_than_its_own() -> None:
    both = [f"{OWN}.level=2", f"{OWN}.num_steps=2"]
    with pytest.raises(ConfigError, match=r"2\.0, but a student knows.*\n.*the student has 1"):
        check_launch(compose(CONFIG, [*SHORT, *RUN, *student(False), "trainer.max_iter=12", *both]))


def test_the_passes_of_a_student_are_those_of_the_chunks_that_are_trained_on_together() -> None:
    work = read_workload(compose(CONFIG, [*SHORT, *student(False), f"{OWN}.share=1"]), 1)
    assert work.passes is not None
    assert (work.passes.rollout, work.passes.clips, work.batch_size) == (2.67, 2, 2), "two of three chunks are imagined"
    assert work.passes.batch_key == f"{OWN}.minibatch"


def test_histories_are_imagined_with_the_text_that_the_run_is_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = "{_target_: cosmos_predict2.text.bytes_encoder.BytesEncoder, num_tokens: 8, width: 64}"
    text = ["model.config.pipe_config.net.reads_text=true", f"model.config.text.encoder={encoder}"]
    config = compose(CONFIG, [*SHORT, f"{OWN}.share=1.0", *text])
    model, seen = lazy_config.instantiate(config.model), []
    imagine = model.own_frames.imagination.generate_actions

    def watched(*arguments: Any, **options: Any) -> Tensor:
        seen.append(options["text_B_S_E"])
        made: Tensor = imagine(*arguments, **options)
        return made

    monkeypatch.setattr(model.own_frames.imagination, "generate_actions", watched)
    loader = lazy_config.instantiate(config.dataloader_train)
    model.on_data(loader)
    model.on_train_start()
    batch = {**next(iter(loader)), "ai_caption": ["push the red puck"] * 4}
    batch.pop("t5_text_embeddings", None)
    first = next(iter(model.train_batches([batch])))
    _, condition = model.data_and_condition(first, model._generators(first, "train"), is_fixed=True)
    list(model.train_batches([batch]))
    assert condition.crossattn_emb_B_S_E.any()
    assert all(torch.equal(text[:2], condition.crossattn_emb_B_S_E) for text in seen) and seen


def test_level_0_hands_on_what_the_tokenizer_gives_back() -> None:
    model, _, parts = made(share=1.0, level=0.0)
    before = torch.cat([part["video"] for part in parts[:2]])
    coded = to_uint8(model.world.decode(model.world.encode(before)))[:, :, -1:]
    assert torch.equal(torch.cat([part[FRAMES_KEY] for part in parts[2:4]]), coded)


def test_a_small_level_stays_nearer_to_the_truth_than_noise_alone() -> None:
    away = []
    for level in (0.0, 2.0, None):
        _, _, parts = made(share=1.0, **({} if level is None else {"level": level}))
        frames, true = (
            torch.cat(rows).float() for rows in zip(*((p[FRAMES_KEY], p["video"][:, :, :1]) for p in parts[4:]))
        )
        away.append(float((frames - true).square().mean()))
    assert away[0] < away[1] < away[2]


@pytest.mark.parametrize(
    ("own", "num_true"),
    [(dict(nearest=0.5), 2), (dict(most_chunks=1), 4), (dict(share=0.0), 4), (dict(share=1e-9), 4)],
)
def test_some_histories_are_the_true_ones(own: dict[str, Any], num_true: int) -> None:
    _, _, parts = made(**{"share": 1.0, **own})
    frames = [part.get(FRAMES_KEY, part["video"][:, :, :1]) for part in parts[4:]]
    true = [part["video"][:, :, :1] for part in parts[4:]]
    assert int((torch.cat(frames) == torch.cat(true)).flatten(1).all(dim=1).sum()) == num_true


def test_noise_disturbs_the_conditioning_frames_of_training_alone() -> None:
    model, _, parts = made(share=0.0, noise=0.5)
    draws = [model._generators(parts[0], "train") for _ in range(3)]
    noisy, again = (model.data_and_condition(parts[0], one)[0] for one in draws[:2])
    clean, _ = model.data_and_condition(parts[0], draws[2], is_fixed=True)
    assert torch.equal(noisy, again) and torch.equal(noisy[:, :, 1:], clean[:, :, 1:])
    assert 0.01 < float((noisy - clean)[:, :, :1].square().mean()) < 1.5


def test_the_share_follows_its_line() -> None:
    own = OwnFramesConfig(share=0.5, share_at_start=0.1, ramp=100)
    assert [own.share_at(i) for i in (0, 50, 100, 1000)] == pytest.approx([0.1, 0.3, 0.5, 0.5])


def test_saves_wait_for_the_last_chunk() -> None:
    model, batch, _ = made(share=0.0)
    ends: Iterator[bool] = (model.at_boundary() for _ in model.train_batches([batch, batch]))
    assert list(ends) == [*[False] * 5, True] * 2


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param([], id="supervised", marks=pytest.mark.long),
        pytest.param(student(True), id="student", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_bit_by_bit(tmp_path: Path, objective: list[str]) -> None:
    options = [*SHORT, *RUN, *objective, f"{OWN}.share=0.5", f"{OWN}.ramp=2", f"{OWN}.noise=0.1"]
    options.append("dataloader_train.batch_size=2")  # three chunks, each a minibatch
    assert_resumes(tmp_path, options, 3, 6, name=NAME, config=CONFIG)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        (SHORTER, "num_frames=30, but model.config.own_frames.chunks=3 need 37. Set it"),
        ("trainer.max_iter=20", "trainer.max_iter: 20, but a batch of episodes has 6 chunks"),
        (  # without a number of frames there is no chunk to measure clips by; batches are checked all the same
            f"model.config.pipe_config.max_num_conditional_frames=2 {SHORTER} {OWN}.minibatch=8",
            f"min_num_conditional_frames to the same\n  - dataloader_train.batch_size: 4, of which {OWN}.minibatch=8",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(override: str, found: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, ValueError), match=found.replace(".", r"\.")):
        train(tmp_path, [*SHORT, *RUN, "trainer.max_iter=12", *override.split()], config=CONFIG)


def test_latents_short_clips_and_parts_of_a_minibatch_are_refused_with_the_cure() -> None:
    model, batch, _ = made(share=0.0)
    with pytest.raises(DataError, match="Take a data set of videos"):
        next(iter(model.train_batches([{key: value for key, value in batch.items() if key != "video"}])))
    with pytest.raises(DataError, match="num_frames=37, or fewer chunks"):
        short = {**batch, "video": batch["video"][:, :, :25], "action": batch["action"][:, :24]}
        next(iter(model.train_batches([short])))
    with pytest.raises(DataError, match="multiple of it"):
        next(iter(model.train_batches([{**batch, "video": batch["video"][:3], "action": batch["action"][:3]}])))


LONG = ["experiment=tiny_long_horizon", "trainer.max_iter=252", "scheduler.cycle_lengths=[252]"]


@pytest.mark.long
def test_long_episodes_are_imagined_better_than_by_the_weights_that_ship(tmp_path: Path) -> None:
    assert train(tmp_path, [*LONG, *RUN, "checkpoint.save_iter=252"], config=CONFIG) == 0
    recordings = toy_recordings("default", controller(4, scale=1.0), num=96, num_actions=96, mix="mixed")
    truth, episodes = recordings.video_B_C_F_H_W, recordings.episodes
    assert episodes is not None
    found = []
    for path in (TINY_ACTION, str(run_dir(tmp_path, NAME))):
        config = lazy_config.instantiate(compose(CONFIG, LONG).model["config"]).pipe_config
        pipe = Video2WorldActionConditionedPipeline.from_config(
            config, path, use_text_encoder=False, device="cpu", load_ema_to_reg=path != TINY_ACTION
        )
        first, actions, seeds = truth[:, :, :1], recordings.action_B_L_D, range(len(truth))
        video = pipe.imagination.rollout(first, actions, seeds, SamplingOptions(num_steps=1), batch_size=32)
        found.append(by_chunk(video, truth, 12) | things_by_chunk(episodes, video, 12))
        print(found[-1])
    (old, new), late = found, slice(4, 8)
    moves = "PSNR where something moves"
    gains = [mine - before for mine, before in zip(new[moves], old[moves], strict=True)]
    assert sum(gains[late]) / 4 > 0.5 and gains[0] > -1.3
    assert max(new["unseen, gripper"]) < 0.25 < max(old["unseen, gripper"])
    assert max(new["unseen, objects"]) < max(old["unseen, objects"])
    assert min(new["fine detail"]) > 0.5


@pytest.mark.long
def test_a_causal_student_keeps_things_seen_by_its_own_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the last quarter of 480 pictures; the twin learns from true frames of the same episodes, as many updates."""
    assert train(tmp_path, [*LONG, *RUN, "checkpoint.save_iter=252"], config=CONFIG) == 0
    teacher, seen = str(run_dir(tmp_path, NAME)), dict[str, float]()
    for name, share in (("causal", 1), ("twin", 0)):
        run = [*LONG, *student(True, teacher), f"{OWN}.share={share}", f"{OWN}.most_chunks=100", "optimizer.lr=0.01"]
        run += ["trainer.max_iter=336", "scheduler.cycle_lengths=[336]", "model.config.validation_sigmas=[1e6]"]
        run += [f"model.config.model_manager_config.dit_path={teacher}"]
        named = [*RUN, f"job.name={name}", "checkpoint.save_iter=336"]
        assert train(tmp_path, [*run, *named], config=CONFIG) == 0
        ways: dict[str, Any] = dict(teacher=teacher, load_ema=True, teacher_steps=1, student="")
        ways["causal"] = str(run_dir(tmp_path, name))
        capsys.readouterr()
        driving.minute(Namespace(**ways, minute=480, actions=12, tables=16))
        rows = [row.split() for row in capsys.readouterr().out.splitlines()]
        for way, key in (("teacher,", "teacher"), ("causal,", name)):
            seen[key] = next(float(row[-5]) for row in rows if row[:1] == [way])
    print(seen)
    assert seen["causal"] > seen["teacher"] - 0.12 and seen["causal"] > seen["twin"] + 0.1
