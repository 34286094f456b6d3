# SPDX-License-Identifier: Apache-2.0
"""Measuring models with actions: the truth scores as such, a standstill as a standstill, and the page is whole.

The verdict: what ignores its actions is not called obedient; what could not be measured does not count.
"""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.metrics import controllability
from cosmos_predict2.evaluation.metrics.controllability import ActionGap, Distances
from cosmos_predict2.evaluation.metrics.inverse_dynamics import ActionAgreement
from cosmos_predict2.evaluation.reports.action_evaluation import (
    CODED,
    EXCHANGED,
    IMAGINED,
    Report,
    evaluate,
    seam_change,
    verdict,
    write_report,
)
from cosmos_predict2.evaluation.reports.toy_world import Futures, imagine_futures
from cosmos_predict2.pipelines import evaluation_data
from cosmos_predict2.pipelines.evaluation_data import (
    EvaluationClips,
    read_recordings,
    recordings_of_run,
    toy_recordings,
)
from cosmos_predict2.pipelines.recorded_run import apply_card
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.world_model.world_model import SamplingOptions, build_world_model
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError
from scripts import evaluate_world_model
from tests.programs import call

TOY = controller(4, scale=1.0)


@pytest.fixture(scope="module")
def recordings() -> EvaluationClips:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_data, "NUM_FOR_PROBE", 24)
        return toy_recordings("default", TOY, num=6, num_actions=24)


@pytest.fixture(scope="module")
def pipe() -> Any:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.action_transform = TOY.to_dict()
    return Video2WorldActionConditionedPipeline(build_world_model(config, dtype=torch.float32).load())


def knowing(pipe: Any, recordings: EvaluationClips, *, moves: bool) -> Any:
    """The pipeline, with imagination replaced: by the truth, or by a standstill."""
    known = {tuple(a[:12].flatten().tolist()): v for a, v in zip(recordings.action_B_L_D, recordings.video_B_C_F_H_W)}

    def rollout(first: Tensor, actions: Tensor, seeds: Any, *_: Any, **__: Any) -> Tensor:
        frames = 1 + actions.shape[1]
        if not moves:
            return first.expand(-1, -1, frames, -1, -1).clone()
        return torch.stack([known[tuple(a[:12].flatten().tolist())][:, :frames] for a in actions])

    made = SimpleNamespace(rollout=rollout, generate_actions=rollout)
    for name in ("config", "dit", "world", "device", "transform", "transformed"):
        setattr(made, name, getattr(pipe, name))
    return made


@pytest.fixture(scope="module")
def of_the_truth(pipe: Any, recordings: EvaluationClips) -> tuple[Report, Tensor, Any]:
    return evaluate(knowing(pipe, recordings, moves=True), recordings, num_steps=3)


def test_the_truth_is_near_itself_obedient_and_lasting(of_the_truth: tuple[Report, Tensor, Any]) -> None:
    report, _, tried = of_the_truth
    assert "the probe cannot read" not in report.as_text()
    assert min(report.likeness["SSIM"]["imagined"]) > 0.999 and len(report.likeness["SSIM"]["imagined"]) == 24
    assert report.by_chunk["sharpness"] == pytest.approx([1.0, 1.0])
    assert report.seams["imagined"] == report.seams["true"]
    reading = report.following
    assert reading["imagined"] == reading["true frames"] and reading["imagined"].r2 > 0.85
    assert reading["through the tokenizer"].r2_of_sums > 0.8
    assert reading["through the tokenizer"] != reading["true frames"], "the upper control is what a model can show"
    by_chunk = [report.by_chunk[f"actions read, {kind} (R2)"] for kind in ("imagined", "through the tokenizer")]
    assert [len(values) for values in by_chunk] == [2, 2] and min(by_chunk[0]) > 0.8
    assert report.distances is not None and report.distances.actions > 1 and report.distances.seeds == 0
    assert report.gap is not None and report.gap.mean == pytest.approx(1.0)  # of a network that has not learnt them
    assert len(tried.which) == 4 and tried.videos[0].shape[:2] == (3, 2)
    assert all(rows[0] == i and len(set(rows)) == 3 for i, rows in zip(tried.which, tried.borrowed))


def test_a_standstill_is_the_first_frame_repeated_and_obeys_nothing(
    pipe: Any, recordings: EvaluationClips, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = replace(recordings, origins=tuple("aaabbb"))
    asked = mock.Mock(wraps=controllability.action_gap)
    monkeypatch.setattr(controllability, "action_gap", asked)
    report, _, tried = evaluate(knowing(pipe, recordings, moves=False), recordings, num_steps=3)
    assert asked.call_args.kwargs["origins"] == recordings.origins
    assert [rows[1] for rows in tried.borrowed] == [3, 4, 5, 0], "actions of another recording"
    for by_kind in report.likeness.values():
        assert by_kind["imagined"] == by_kind["first frame repeated"]
    assert report.likeness["PSNR (dB)"]["imagined"][-1] < 25
    assert report.following["imagined"].r2 < 0.1 and max(report.by_chunk["actions read, imagined (R2)"]) < 0.2
    assert report.distances is not None and report.distances.actions == 0
    text = report.as_text()
    assert text.startswith("ignores its actions: ")
    assert "R2 of the sums" in text and "gradient similarity" in text and "nan" not in text
    assert json.loads(json.dumps(report.as_dict()))["gap"]["mean"] == report.gap.mean  # type: ignore[union-attr]


def test_the_page_shows_what_was_measured_and_needs_no_network(
    of_the_truth: tuple[Report, Tensor, Any], recordings: EvaluationClips, tmp_path: Path
) -> None:
    report, imagined, tried = of_the_truth
    report = replace(report, cautions=("other units <y>",), weights="run <x>")
    futures = Futures(["a <b>"] * 3, imagined[:3], imagined[3:6])
    page = write_report(tmp_path / "out", report, recordings, imagined, tried, fps=10.0, futures=futures)
    text = page.read_text()
    files = re.findall(r'src="([^"]+)"', text)
    assert len(files) == len(set(files)) == 4 * 2 + 4 * 4 + 6
    assert all((page.parent / file).is_file() and "/" not in file for file in files)
    assert "http" not in text and "<x>" not in text and "a &lt;b&gt;" in text
    assert text.count("<polyline") == 6 and "nan" not in text
    figures = json.loads((page.parent / "figures.json").read_text())
    assert list(figures)[:3] == ["verdict", "cautions", "weights"] and figures["weights"] == "run <x>"
    assert f'{html.escape(report.verdict.sentence)}.</p>\n<p class="verdict">Caution: other units &lt;y&gt;</p>' in text
    assert "weights: run &lt;x&gt;" in text
    assert report.as_text().startswith(f"{report.verdict.sentence}\ncaution: other units <y>\n(6 clips of ")
    assert figures["likeness"]["SSIM"]["imagined"] == report.likeness["SSIM"]["imagined"]
    assert figures["futures"]["error"] == pytest.approx(futures.error())
    video, fps = media.read_video(page.parent / "futures.mp4")
    assert video.shape[1] == 25 and fps == 10.0
    assert (page.parent / "futures.png").is_file()


def test_a_seam_is_seen() -> None:
    frames = torch.arange(25.0)
    frames[13:] += 9  # between the chunks it jumps by ten
    video = frames.view(1, 1, 25, 1, 1).expand(1, 3, 25, 2, 2)
    assert seam_change(video, 12) == pytest.approx(10.0)
    assert seam_change(torch.arange(25.0).view(1, 1, 25, 1, 1), 12) == pytest.approx(1.0)


def test_futures_are_three_and_keep_away_from_the_walls(pipe: Any) -> None:
    asked: list[Any] = []

    def rollout(first: Tensor, actions: Tensor, seeds: Any, options: SamplingOptions) -> Tensor:
        asked.append((first, actions, seeds, options))
        return first.expand(-1, -1, 1 + actions.shape[1], -1, -1)

    told = SimpleNamespace(config=pipe.config, transform=TOY, transformed=pipe.transformed, rollout=rollout)
    futures: Futures = imagine_futures(told, num_steps=2)  # type: ignore[arg-type]
    ((first, actions, seeds, options),) = asked
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2]) and len(set(seeds)) == 1
    assert options == SamplingOptions(num_steps=2) and actions.shape == (3, 24, 4)
    assert futures.simulated.shape == futures.imagined.shape == (3, 3, 25, 48, 48)
    ends = futures.simulated[:, :, -1].float()
    assert min(float((ends[i] - ends[j]).square().mean().sqrt()) for i, j in ((0, 1), (0, 2), (1, 2))) > 10
    assert futures.apart() == 0 < futures.error()
    assert futures.sheet().shape[0] == futures.video().shape[0] == 3


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("toys", "there is no such folder"),
        ("toy:hart", "Did you mean hard"),
        ("assets", r"neither meta/info.json \(LeRobot\) nor"),
    ],
)
def test_data_that_cannot_be_measured_on_are_told(data: str, text: str) -> None:
    with pytest.raises((ConfigError, DataError), match=text):
        read_recordings(data, TOY, num=2, num_actions=12)


@pytest.mark.parametrize("form", ["bridge", "lerobot", "states"])
def test_a_folder_is_read_in_its_form_and_its_held_out_part(form: str, tmp_path: Path) -> None:
    write_folder(str(tmp_path / form), ToyFolder(episodes=6, frames=17, form=form, val_fraction=0.5))
    transform = relative_pose() if form == "bridge" else TOY
    found = read_recordings(str(tmp_path / form), transform, num=2, num_actions=12, size=(48, 48))
    assert found.video_B_C_F_H_W.shape == (2, 3, 13, 48, 48) and found.action_B_L_D.shape == (2, 12, transform.dim)
    assert found.action_B_L_D.std() > 0 and found.others is None and found.episodes is None
    with pytest.raises((ConfigError, DataError)):
        read_recordings(str(tmp_path / form), controller(5, scale=1.0), num=2, num_actions=12, size=(48, 48))


def test_a_folder_is_read_as_by_the_run_of_the_weights(tmp_path: Path) -> None:
    write_folder(str(tmp_path / "data"), ToyFolder(episodes=4, frames=26, form="bridge", val_fraction=0.5))
    for path in (tmp_path / "data/annotation/val").glob("*.json"):
        row = json.loads(path.read_text())
        row["poses"], row["grip"] = row.pop("state"), row.pop("continuous_gripper_state")
        path.write_text(json.dumps(row))
    target = "cosmos_predict2.data.action_conditioned.dataset_bridge.ActionConditionedDataset"
    own = {"_target_": target, "state_key": "poses", "gripper_key": "grip", "fps_downsample_ratio": 2, "mode": "val"}
    own |= {"val_annotation_path": "elsewhere", "video_path": "elsewhere", "action_scale": 3.0, "video_size": [64, 64]}
    wanted: dict[str, Any] = dict(num=2, num_actions=12, size=(48, 48))
    found = read_recordings(str(tmp_path / "data"), relative_pose(), trained=own, **wanted)
    assert found.video_B_C_F_H_W.shape == (2, 3, 13, 48, 48) and len(set(found.origins)) == 2
    own_scale = attrs.evolve(relative_pose(), scale=(64.0, 32.0, *[1.0] * 5))  # of the weights, by their statistics
    place = {"val_annotation_path": str(tmp_path / "data/annotation/val"), "video_path": str(tmp_path / "data")}
    of_run = {key: value for key, value in own.items() if key != "action_scale"} | place
    for given in (None, "statistics"):
        by_weights = recordings_of_run({**of_run, "action_transform": given}, own_scale, num=2, num_actions=12)
        factor = torch.tensor(own_scale.scale) / torch.tensor(relative_pose().scale)
        assert torch.allclose(by_weights.action_B_L_D, found.action_B_L_D * factor, atol=1e-5)
    every = {**own, "fps_downsample_ratio": 1}
    once = read_recordings(str(tmp_path / "data"), relative_pose(), trained=every, **wanted)
    assert torch.equal(found.video_B_C_F_H_W[0, :, :7], once.video_B_C_F_H_W[0, :, ::2])  # every second frame


def test_a_robot_folder_is_read_as_by_the_run_of_the_weights(tmp_path: Path) -> None:
    write_folder(str(tmp_path / "data"), ToyFolder(episodes=4, frames=26, form="lerobot", val_fraction=0.5))
    target = "cosmos_predict2.data.action_conditioned.dataset_lerobot.LeRobotActionDataset"
    own = {"_target_": target, "root": "elsewhere", "stride": 2, "combine_actions": "sum", "data_split": "train"}
    wanted: dict[str, Any] = dict(num=2, num_actions=12, size=(48, 48))
    found = read_recordings(str(tmp_path / "data"), TOY, trained=own, **wanted)
    once = read_recordings(str(tmp_path / "data"), TOY, **wanted)
    steps = once.action_B_L_D[0].unflatten(0, (6, 2)).sum(dim=1)[:, :2]
    assert torch.allclose(found.action_B_L_D[0, :6, :2], steps, atol=1e-5)
    of_run = {"_target_": target, "root": str(tmp_path / "data"), "data_split": "val", "video_size": [48, 48]}
    by_weights = recordings_of_run(of_run, controller(4, scale=20.0), num=2, num_actions=12)
    whole = f"LeRobotActionDataset ({tmp_path / 'data'}), from 2 of 2 recordings held out of 4"
    assert by_weights.name == whole and set(by_weights.origins) == {"episode_000002", "episode_000003"}
    four, every = (recordings_of_run(of_run, TOY, num=num, num_actions=12) for num in (4, 99))
    assert torch.equal(four.video_B_C_F_H_W, every.video_B_C_F_H_W[[0, 13, 14, 27]]) and four.name == whole
    assert (len(every), every.num_apart, every.name) == (28, 4, f"{whole}; some clips overlap")
    assert torch.allclose(by_weights.action_B_L_D, 20 * once.action_B_L_D), "not by the data's own statistics"


def test_recordings_that_are_shorter_than_two_chunks_are_measured_over_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(str(tmp_path / "data"), ToyFolder(episodes=4, frames=17, form="lerobot", val_fraction=0.5))
    config = SimpleNamespace(transform=TOY, chunk_size=12, resolution="48")
    choice = SimpleNamespace(config=config, video_size=None, card=SimpleNamespace(run={}))
    words = ["--data", str(tmp_path / "data"), "--num_clips", "2", "--size", "48", "48"]
    found = evaluate_world_model._recordings(evaluate_world_model.parser.parse_args(words), choice)
    assert found.action_B_L_D.shape[1] == 12 and "One chunk is measured" in caplog.text
    asked = evaluate_world_model.parser.parse_args([*words, "--num_chunks", "2"])
    with pytest.raises(DataError, match="of at most 17 frames, but num_frames=25"):
        evaluate_world_model._recordings(asked, choice)


def test_weights_without_actions_are_told_before_their_actions_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({"x_embedder.proj.1.weight": torch.zeros(2, 2)}, weights)
    assert call(evaluate_world_model, "--dit_path", weights, "--data", "toy") == 2
    told = capsys.readouterr().err
    assert "is of a model without actions" in told and "--experiment" in told and "--action_transform" not in told


def test_clips_of_the_toy_world_are_held_out_and_those_of_the_probe_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_data, "NUM_FOR_PROBE", 2)
    found = toy_recordings("default", TOY, num=2, num_actions=12)
    held_out, learnt = (
        torch.from_numpy(make_episodes(2, first=SPLITS[part], ring_elsewhere=0.0).actions[:, :12]).float()
        for part in ("val", "train")
    )
    assert found.others is not None
    assert torch.equal(found.action_B_L_D, held_out) and torch.equal(found.others[1], learnt)


def test_no_recording_is_both_fitted_to_and_asked_about() -> None:
    video, action = torch.zeros(7, 3, 2, 4, 4, dtype=torch.uint8), torch.zeros(7, 1, 4)
    fitted, asked = EvaluationClips("x", video, action, origins=("a", "a", "b", "c", "c", "d", "b")).halves()
    assert (fitted, asked) == ([0, 1, 3, 4], [2, 5, 6])
    assert EvaluationClips("x", video, action).halves() == ([0, 2, 4, 6], [1, 3, 5])


def test_the_model_that_comes_with_the_code_obeys(recordings: EvaluationClips) -> None:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny")
    apply_card(read_card(TINY_ACTION), config)
    config.guardrail_config.enabled = False
    tiny = Video2WorldActionConditionedPipeline.from_config(config, TINY_ACTION, device="cpu")
    assert tiny.transform == TOY and tiny.config.timestamps.nfe == 1
    report, _, _ = evaluate(tiny, recordings, num_steps=1)
    assert report.gap is not None and report.gap.mean > 5 and report.gap.share == 1
    assert report.following["imagined, other clips' actions"].r2_of_sums < 0.1
    assert report.as_text().startswith("follows its actions: with the actions of another clip its loss is")
    futures = imagine_futures(tiny, num_steps=1)
    assert futures.apart() > 1.5 * futures.error()


@pytest.mark.parametrize(
    "words",
    [
        "--device tpu",
        "--batch_size 0",
        "--num_steps 0",
        "--guidance nan",
        "--toy_episodes -1",
        "--json no/such/x.json",
        "--out Makefile",
        "--size 50 --data toy",
        "--size 48 48 --data toy",
        "--size 50 50 --data assets",
        "--seed -1",
    ],
)
def test_wrong_flags_are_exit_2_and_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(evaluate_world_model, "--dit_path", "none", *words.split()) == 2
    assert words.split(maxsplit=1)[0] in capsys.readouterr().err


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    storage.write_json(tmp_path / "x.json", {"rate": float("nan"), "psnr": [1.0, float("inf")], "of": (1, {"a": "b"})})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"rate": None, "psnr": [1.0, None], "of": [1, {"a": "b"}]}


@pytest.mark.slow
def test_the_command_measures_weights_of_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_data, "NUM_FOR_PROBE", 8)
    weights = tmp_path / "weights.safetensors"
    state = {f"net_ema.{name}": value for name, value in pipe.dit.state_dict().items()}
    state |= {name.replace("_ema", ""): value * torch.nan for name, value in state.items()}
    save_file(state, weights, metadata={"action_transform": TOY.to_json()})
    words = ["--dit_path", str(weights), "--model_size", "tiny", "--num_clips", "3", "--num_steps", "1"]
    words += ["--toy_episodes", "2", "--data", "toy", "--out", str(tmp_path / "out"), "--num_chunks", "1"]
    words.append("--load_ema")
    assert call(evaluate_world_model, *words) == 0
    assert "whole episodes" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/figures.json").read_text())["gap"]["mean"] > 0, "of the averaged weights"
    assert {"index.html", "figures.json", "futures.mp4"} <= {path.name for path in (tmp_path / "out").iterdir()}


# --- the verdict


def a_gap(ratio: float, share: float = 1.0) -> ActionGap:
    return ActionGap([5.0], [1.0], [ratio], 8, share)


def read(imagined: float, coded: float = 0.9) -> dict[str, ActionAgreement]:
    of = {CODED: coded, IMAGINED: imagined, EXCHANGED: -0.1}
    return {kind: ActionAgreement(r2, r2, {}, [], 0.0) for kind, r2 in of.items()}


FAR, NEAR = Distances(10.0, 1.0), Distances(0.1, 1.0)


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        ((a_gap(3.0), FAR, read(0.8)), "follows"),
        ((a_gap(1.0, 0.5), NEAR, read(0.0)), "ignores"),
        ((a_gap(1.2, 0.6), NEAR, read(0.4)), "ignores"),  # a larger loss on some clips alone, and a poor reading
        ((a_gap(1.001, 1.0), Distances(0.0, 0.0), read(-1.0)), "ignores"),
        ((a_gap(3.0), NEAR, read(0.8)), "in part"),
        ((a_gap(1.0, 0.5), FAR, read(0.0)), "in part"),  # it moves with actions, but not as they command
        ((a_gap(3.0), FAR, {}), "follows"),
        ((a_gap(3.0), FAR, read(0.0, coded=0.1)), "follows"),  # the probe reads nothing of true frames
        ((None, None, {}), "unknown"),
    ],
)
def test_the_word_follows_from_all_signs_that_were_measured(signs: tuple, word: str) -> None:
    found = verdict(*signs, reason="there is one clip")
    assert found.word == word
    assert ("there is one clip" in found.sentence) == (word == "unknown")


def test_the_controls_are_named_beside_the_figures() -> None:
    sentence = verdict(a_gap(3.0), FAR, read(0.8)).sentence
    for words in ("3.00 times as large", "50%", "another seed by 1.00", "R2 0.80", "with 0.90", "actions with -0.10"):
        assert words in sentence
