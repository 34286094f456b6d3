# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.rewards import success_training
from cosmos_predict2.rl.rewards.resnet import ResnetReward, SuccessClassifier, to_unit
from cosmos_predict2.rl.rewards.success_training import (
    LabelledPictures,
    TrainingOptions,
    augmented,
    calibrated_threshold,
    measure,
    recorded_successes,
    reliability_svg,
    scale_to,
    train,
)
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.errors import DataError
from scripts import train_reward_model

NARROW = (8, 8, 8, 8, 8)


def squares(num: int, seed: int) -> LabelledPictures:
    """Pictures with a bright square that is red (success) or blue; purple is a near miss."""
    draws = numpy.random.default_rng(seed)
    pictures = draws.integers(0, 60, (num, 24, 24, 3)).astype(numpy.uint8)
    kind = draws.integers(0, 3, num)
    colours = numpy.array([(230, 30, 30), (30, 30, 230), (150, 30, 150)])
    for i in range(num):
        y, x = draws.integers(4, 14, 2)
        pictures[i, y : y + 7, x : x + 7] = colours[kind[i]]
    return LabelledPictures(torch.from_numpy(pictures), torch.from_numpy(kind == 0), torch.from_numpy(kind == 2))


@pytest.fixture(scope="module")
def trained() -> SuccessClassifier:
    torch.manual_seed(0)
    model = SuccessClassifier(NARROW)
    losses = train(model, squares(200, 0), TrainingOptions(steps=60, batch_size=32, lr=5e-3), seed=0)
    assert numpy.mean(losses[-5:]) < 0.5 * numpy.mean(losses[:5])
    return model


def test_a_classifier_learns_what_success_looks_like(trained: SuccessClassifier) -> None:
    quality = measure(trained, squares(200, 1), threshold=0.5)
    assert quality.precision > 0.9 and quality.recall > 0.9
    assert not trained.training


class Said(SuccessClassifier):
    """Says log-odds that stand in the first pixel, times the scale of its last layer."""

    def __init__(self) -> None:
        super().__init__((1, 1, 1, 1, 1))
        with torch.no_grad():
            self.net[7].weight.fill_(1.0)
            self.net[7].bias.zero_()

    def logits(self, images_B_C_H_W: Tensor) -> Tensor:
        said = 4 * images_B_C_H_W[:, :1, 0, 0]
        return said * self.net[7].weight + self.net[7].bias


def said(success: Tensor, level: Tensor) -> LabelledPictures:
    pictures = level.to(torch.uint8)[:, None, None, None].expand(-1, 1, 1, 3)
    return LabelledPictures(pictures, success, torch.zeros_like(success))


def test_probabilities_are_scaled_to_what_is_true() -> None:
    draws = torch.Generator().manual_seed(0)
    level = torch.randint(0, 256, (4000,), generator=draws)
    true = 0.5 * 4 * (level / 127.5 - 1) - 1.0  # half as sure, and rarer, than the model says
    success = torch.rand(4000, generator=draws) < true.sigmoid()
    model, pictures = Said(), said(success, level)
    before = measure(model, pictures, 0.5).calibration_error
    scale, offset = scale_to(model, pictures)
    assert scale == pytest.approx(0.5, abs=0.05) and offset == pytest.approx(-1.0, abs=0.1)
    assert measure(model, pictures, 0.5).calibration_error < 0.03 < before


def test_the_threshold_is_the_lowest_that_is_precise_enough() -> None:
    level = torch.tensor([250, 240, 230, 220, 210, 210, 200, 190])
    success = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    model, pictures = Said(), said(success, level)
    chosen = {p: calibrated_threshold(model, pictures, p) for p in (0.6, 0.75, 0.9)}
    taken = {p: sum(success_training.log_odds(model, pictures.pictures_N_H_W_C).double().sigmoid() >= t).item()
             for p, t in chosen.items() if t is not None}  # fmt: skip
    assert taken == {0.6: 6, 0.75: 4, 0.9: 3}  # the two of level 210 go together
    assert calibrated_threshold(model, said(~success, 255 - level), 0.99) is not None
    assert calibrated_threshold(model, said(torch.tensor([False, True]), torch.tensor([200, 200])), 0.9) is None


def test_quality_counts_what_is_judged() -> None:
    level, success = torch.tensor([255, 255, 0, 0]), torch.tensor([True, False, True, False])
    found = measure(Said(), said(success, level), 0.5)
    assert (found.precision, found.recall, found.accuracy, found.base_rate) == (0.5, 0.5, 0.5, 0.5)
    assert [(one.count, one.rate) for one in found.bins] == [(2, 0.5), (2, 0.5)]
    assert math.isnan(measure(Said(), said(success, torch.zeros(4)), 0.5).precision)
    root = ElementTree.fromstring(reliability_svg({"simulator": found, "imagined": found}))
    assert len(root.findall("{*}circle")) == 4


def test_a_quality_is_of_all_pictures_each_in_its_bin() -> None:
    level = torch.tensor([255, 255, 255, 250, 0, 0, 100])
    success = torch.tensor([True, True, False, True, False, True, False])
    model = Said()
    model.net[7].weight.data.fill_(100.0)  # so sure that a probability is 1
    probability = success_training.log_odds(model, said(success, level).pictures_N_H_W_C).double().sigmoid()
    found = measure(model, said(success, level), 1.0)
    assert (found.precision, found.recall, found.accuracy) == (0.75, 0.75, 5 / 7)
    facts = [(one.low, one.high, one.count, one.rate) for one in found.bins]
    assert facts == [(0.0, 0.1, 3, 1 / 3), (0.9, 1.0, 4, 0.75)]
    assert [one.probability for one in found.bins] == pytest.approx([0.0, float(probability[:4].mean())])
    assert found.calibration_error == pytest.approx((3 * (1 / 3) + 4 * 0.25) / 7, abs=1e-6)


def test_a_threshold_is_that_of_more_than_a_few_lucky_pictures() -> None:
    level = torch.cat([torch.full((2,), 250), torch.full((1,), 240), torch.full((197,), 100)])
    success = torch.ones(200, dtype=torch.bool)
    success[2] = success[50:] = False  # the first two are right, of 49
    assert calibrated_threshold(Said(), said(success, level), 0.9) is not None
    success = torch.cat([success, torch.ones(151, dtype=torch.bool)])  # of 200: at least 4
    assert calibrated_threshold(Said(), said(success, torch.cat([level, torch.full((151,), 90)])), 0.99) is None


def test_scaled_log_odds_are_in_the_last_layer_and_stay_moderate_where_kinds_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(success_training, "_AT_ONCE", 4)
    level = torch.tensor([250, 240, 230, 20, 10, 5])
    model, pictures = Said(), said(level > 100, level)
    model.net[7].bias.data.fill_(0.5)
    before = success_training.log_odds(model, pictures.pictures_N_H_W_C)
    torch.testing.assert_close(before, 4 * (level / 127.5 - 1) + 0.5)
    scale, offset = scale_to(model, pictures)
    torch.testing.assert_close(success_training.log_odds(model, pictures.pictures_N_H_W_C), scale * before + offset)
    assert 2 < scale < 3


BATCHES = [  # pictures of success, near misses and others, shares of the first two; how many of each are in 10
    ((9, 9, 9), (0.5, 0.3), (5, 3, 2)),
    ((9, 0, 9), (0.5, 0.3), (5, 0, 5)),
    ((9, 9, 0), (0.5, 0.3), (5, 5, 0)),
    ((9, 9, 9), (0.01, 0.3), (1, 3, 6)),
]


@pytest.mark.parametrize(("there", "shares", "wanted"), BATCHES)
def test_a_batch_has_its_share_of_each_kind(there: Any, shares: Any, wanted: Any) -> None:
    kind = torch.repeat_interleave(torch.arange(3), torch.tensor(there))
    pictures = LabelledPictures(torch.zeros(len(kind), 1, 1, 3), kind == 0, kind <= 1)  # what shows success is no miss
    options = TrainingOptions(batch_size=10, positives=shares[0], near_misses=shares[1])
    found = {int(kind[rows[0]]): (rows, count) for rows, count in success_training._batch_of(pictures, options)}
    assert tuple(found[k][1] if k in found else 0 for k in range(3)) == wanted
    for k, (rows, _) in found.items():
        assert rows.tolist() == (kind == k).nonzero().flatten().tolist()


def test_training_follows_its_seed_and_its_rate_falls_to_0_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    mirrored: list[bool] = []

    class Recorded(torch.optim.AdamW):
        def step(self, *given: Any) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(*given)

    def seen(*given: Any, mirror: bool) -> Tensor:
        mirrored.append(mirror)
        return augmented(*given, mirror=mirror)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    monkeypatch.setattr(success_training, "augmented", seen)
    losses = []
    for seed, mirror in ((0, True), (0, True), (1, False)):
        torch.manual_seed(0)
        options = TrainingOptions(steps=4, batch_size=8, lr=0.1, mirror=mirror)
        losses.append(train(SuccessClassifier(NARROW), squares(30, 0), options, seed))
    assert losses[0] == losses[1] != losses[2]
    assert rates[:4] == pytest.approx([0.1, 0.075, 0.05, 0.025], rel=4e-3)
    assert mirrored == [True] * 8 + [False] * 4


def test_augmented_pictures_are_mirrored_both_ways_and_shifted_by_up_to_two_pixels() -> None:
    images = torch.full((20, 1, 16, 16), -1.0)
    images[..., 5, 6] = 1.0
    places = set()
    for seed in range(200):
        seen = augmented(images, torch.Generator().manual_seed(seed))
        places |= {divmod(place, 16) for place in seen.flatten(1).argmax(1).tolist()}
    shifts = range(-2, 3)
    assert places == {(row + i, column + j) for row in (5, 10) for column in (6, 9) for i in shifts for j in shifts}


def test_augmented_pictures_show_the_same_in_another_place() -> None:
    images = to_unit(squares(6, 3).pictures_N_H_W_C)
    seen = augmented(images, torch.Generator().manual_seed(1))
    assert seen.shape == images.shape and not torch.allclose(seen, images, atol=0.1)
    assert (seen.flatten(2).amax(2) - images.flatten(2).amax(2)).abs().max() < 0.6
    halves = torch.zeros(8, 3, 16, 16)
    halves[..., :8] = 1
    seen = augmented(halves, torch.Generator().manual_seed(1), mirror=False)  # of tasks with a left and a right
    assert (seen[..., :5].mean(dim=(1, 2, 3)) > seen[..., 11:].mean(dim=(1, 2, 3)) + 0.5).all()


def test_pictures_of_one_kind_teach_nothing() -> None:
    pictures = squares(6, 0)
    nothing = LabelledPictures(pictures.pictures_N_H_W_C, torch.zeros(6, dtype=torch.bool), pictures.near_N)
    with pytest.raises(DataError, match="Of 6 pictures to learn from 0 show success"):
        train(SuccessClassifier(NARROW), nothing, TrainingOptions(steps=1), 0)
    everything = replace(nothing, success_N=~nothing.success_N)
    with pytest.raises(DataError, match="Of 6 pictures to learn from 6 show success"):
        train(SuccessClassifier(NARROW), everything, TrainingOptions(steps=1), 0)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "toy"
    write_folder(str(folder), ToyFolder(episodes=6, frames=13, val_fraction=0.0, form="lerobot"))
    return folder


def test_recordings_have_their_successes_and_what_came_just_before(recordings: Path) -> None:
    learnt, held_out = recorded_successes(recordings, "next.done", None, near=3, val_fraction=0.34)
    assert (len(learnt), len(held_out)) == (4, 2)
    for part in (*learnt, *held_out):
        assert part.pictures_N_H_W_C.shape == (13, 48, 48, 3) and part.pictures_N_H_W_C.dtype == torch.uint8
        assert part.success_N.nonzero().flatten().tolist() == [12]
        assert part.near_N.nonzero().flatten().tolist() == [9, 10, 11]
    with pytest.raises(DataError, match=r"no column 'next\.success'"):
        recorded_successes(recordings, "next.success", None, near=3, val_fraction=0.34)
    with pytest.raises(DataError, match="1 of 6 episodes are held out, but 2"):
        recorded_successes(recordings, "next.done", None, near=3, val_fraction=0.1)


def test_success_is_more_than_half_and_pictures_are_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.arange(3 * 4 * 5 * 6).reshape(3, 4, 5, 6).to(torch.uint8)  # channels, frames, height, width

    class Source(list):
        info = SimpleNamespace(features={"done": {}})
        camera = staticmethod(lambda name: name)
        columns = staticmethod(lambda i, names: {"done": numpy.array([[0.0], [0.4], [0.5], [0.6]])})
        frames = staticmethod(lambda i, place, rows: frames[:, list(rows)])

    monkeypatch.setattr(LeRobotSource, "open", lambda folder: Source(range(4)))
    learnt, held_out = recorded_successes(Path("x"), "done", None, near=2, val_fraction=0.5)
    for part in (*learnt, *held_out):
        assert torch.equal(part.pictures_N_H_W_C, frames.permute(1, 2, 3, 0))
        assert part.success_N.tolist() == [False, False, False, True]
        assert part.near_N.tolist() == [False, True, True, False]


def test_recordings_are_held_out_with_success_and_are_not_mirrored(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[TrainingOptions] = []
    monkeypatch.setattr(success_training, "train", lambda *given: options.append(given[2]) or [1.0])
    words = ("--data", str(recordings), "--success_column", "next.done", "--val_fraction", "0.34")
    assert _command(*words, *ANY, "--out", str(tmp_path / "rm")) == 0 and not options[0].mirror
    assert "NaN" not in (tmp_path / "rm" / "quality.json").read_text()
    columns = LeRobotSource.columns
    failures = lambda *given: {name: value * 0 for name, value in columns(*given).items()}  # noqa: E731
    monkeypatch.setattr(LeRobotSource, "columns", failures)
    assert _command(*words, "--out", str(tmp_path / "other")) == 2
    assert "calibrated, 0 show success" in capsys.readouterr().err


ANY = ("--least_precision", "0", "--least_recall", "0")


def _command(*words: str) -> int:
    return train_reward_model.command_line.main(train_reward_model.parser, train_reward_model.run, words)


def test_the_command_trains_calibrates_and_measures_a_reward_model(tmp_path: Path) -> None:
    words = ("--data", "toy", "--episodes", "4", "--steps", "3", "--batch_size", "8", "--out", str(tmp_path / "rm"))
    assert _command(*words, *ANY) == 0
    found = json.loads((tmp_path / "rm" / "quality.json").read_text())
    assert set(found["quality"]) == {"simulator", "tokenizer round trip", "imagined", "imagined, by the outcome"}
    assert all(quality["count"] == 24 for quality in found["quality"].values())
    reward = ResnetReward(str(tmp_path / "rm" / "reward_model.safetensors"), device="cpu")
    assert reward.threshold == found["threshold"]
    assert reward.judge(torch.zeros(1, 2, 48, 48, 3, dtype=torch.uint8), {}).value_E_F.shape == (1, 2)
    assert "<svg" in (tmp_path / "rm" / "reliability.svg").read_text()


@pytest.mark.parametrize(
    ("precision", "recall", "named"),
    [(0.98, 0.014, "recall 0.014"), (0.4, 0.9, "precision 0.400"), (math.nan, 0.0, "precision nan"), (0.9, 0.6, "")],
)
def test_a_reward_model_that_finds_few_successes_is_not_written(
    precision: float,
    recall: float,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(*given: Any) -> Any:
        return replace(measure(*given), precision=precision, recall=recall)

    monkeypatch.setattr(success_training, "measure", measured)
    parts = [squares(12, seed) for seed in range(3)]
    made = lambda args, device: (parts[:1], parts[1], {"simulator": parts[2]})  # noqa: E731
    monkeypatch.setattr(train_reward_model, "_toy_pictures", made)
    words = ("--data", "toy", "--steps", "1", "--batch_size", "8", "--out", str(tmp_path))
    assert _command(*words) == (2 if named else 0)
    assert (tmp_path / "reward_model.safetensors").exists() == (not named) and (tmp_path / "quality.json").exists()
    assert not named or (named in (err := capsys.readouterr().err) and "--least_recall 0" in err)


def test_wrong_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "reward_model.safetensors").write_bytes(b"")
    out = ("--out", str(tmp_path / "new"))
    for words, named in [
        (("--out", str(tmp_path / "full")), "holds a reward model"),
        ((*out, "--precision", "1.5"), "--precision 1.5"),
        ((*out, "--least_recall", "1"), "--least_recall 1"),
        ((*out, "--setting", "hart"), "--setting hart"),
        ((*out, "--policy", str(tmp_path / "nowhere"), "--no_imagined"), "nowhere"),
        ((*out, "--data", str(tmp_path / "nowhere")), "nowhere"),
        ((*out, "--data", str(tmp_path), "--val_fraction", "0"), "--val_fraction 0"),
    ]:
        assert _command(*words) == 2
        assert named in capsys.readouterr().err
