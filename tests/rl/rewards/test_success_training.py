# SPDX-License-Identifier: Apache-2.0
import json
import math
import subprocess
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
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.imagined import labelled_recordings
from cosmos_predict2.rl.imagined.labelled_recordings import LabelledRecordings, parts_of
from cosmos_predict2.rl.rewards import success_training
from cosmos_predict2.rl.rewards.resnet import ResnetReward, SuccessClassifier, to_unit
from cosmos_predict2.rl.rewards.success_training import (
    OUTCOME,
    ROUND_TRIP,
    Ends,
    LabelledPictures,
    TrainingOptions,
    augmented,
    measure,
    measure_ends,
    middle_threshold,
    scale_to,
    train,
)
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.errors import DataError
from scripts import train_reward_model
from tests.programs import call, python

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
    [(scale, offset)] = scale_to(model, pictures)
    assert scale == pytest.approx(0.5, abs=0.05) and offset == pytest.approx(-1.0, abs=0.1)
    assert measure(model, pictures, 0.5).calibration_error < 0.03 < before


def test_the_threshold_is_the_middle_of_the_widest_range_that_is_precise_and_finds_enough() -> None:
    """Both edges by hand: below the range a failure too many is taken, above it a success too few."""
    level = torch.tensor([250, 240, 230, 220, 210, 210, 200, 190])
    success = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    model, pictures = Said(), said(success, level)
    probability = (4 * (level / 127.5 - 1)).double().sigmoid()

    def logit(value: float) -> float:
        return math.log(value / (1 - value))

    for precision, recall, low, high in [(0.9, 0.5, 3, 1), (0.9, 0.7, 3, 2), (0.6, 0.5, 6, 1), (0.75, 0.75, 4, 2)]:
        found = middle_threshold(model, [pictures], precision, recall)
        assert found.is_precise
        assert (found.low, found.high) == pytest.approx((float(probability[low]), float(probability[high])))
        assert logit(found.value) == pytest.approx((logit(found.low) + logit(found.high)) / 2)
        taken = probability >= found.value
        assert success[taken].double().mean() >= precision
        assert taken[success].double().mean() >= recall


def test_a_range_without_a_precise_threshold_is_that_of_the_best_ones() -> None:
    """Taking four pictures or six is best, 3/4 - 1/4 or 4/4 - 2/4; the range of the six is wider."""
    level = torch.tensor([250, 240, 230, 220, 210, 200, 180, 170])
    success = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    found = middle_threshold(Said(), [said(success, level)], 0.9, 0.5)
    probability = (4 * (level / 127.5 - 1)).double().sigmoid()
    assert not found.is_precise
    assert (found.low, found.high) == pytest.approx((float(probability[6]), float(probability[5])))


def test_a_threshold_finds_enough_in_imagined_pictures_as_well() -> None:
    """Taken together, 6 of 9 successes are above 200: none of the imagined ones need be found."""
    true = said(torch.arange(8) < 6, torch.tensor([250, 245, 240, 235, 230, 225, 20, 10]))
    imagined = said(torch.arange(8) < 3, torch.tensor([150, 140, 130, 60, 50, 40, 30, 20]))
    together = LabelledPictures.joined([true, imagined])
    pooled, each = (middle_threshold(Said(), kinds, 0.95, 0.6).value for kinds in ([together], [true, imagined]))
    assert measure(Said(), imagined, pooled).recall < 0.6 <= measure(Said(), imagined, each).recall
    assert measure(Said(), true, each).precision >= 0.9
    failures = said(torch.zeros(2, dtype=torch.bool), torch.tensor([255, 255]))  # nothing can be found of these
    assert middle_threshold(Said(), [true, imagined, failures], 0.95, 0.6).value == each


def test_a_quality_is_of_all_pictures_each_in_its_bin() -> None:
    level = torch.tensor([255, 255, 255, 250, 0, 0, 100])
    success = torch.tensor([True, True, False, True, False, True, False])
    model = Said()
    model.net[7].weight.data.fill_(100.0)  # so sure that a probability is 1
    probability = success_training.log_odds(model, said(success, level).pictures_N_H_W_C)[:, 0].double().sigmoid()
    found = measure(model, said(success, level), 1.0)
    assert (found.precision, found.recall, found.accuracy) == (0.75, 0.75, 5 / 7)
    facts = [(one.low, one.high, one.count, one.rate) for one in found.bins]
    assert facts == [(0.0, 0.1, 3, 1 / 3), (0.9, 1.0, 4, 0.75)]
    assert [one.probability for one in found.bins] == pytest.approx([0.0, float(probability[:4].mean())])
    assert found.calibration_error == pytest.approx((3 * (1 / 3) + 4 * 0.25) / 7, abs=1e-6)
    assert found.base_rate == 4 / 7 and math.isnan(measure(model, said(success, torch.zeros(7)), 0.5).precision)


def test_a_threshold_is_that_of_more_than_a_few_lucky_pictures() -> None:
    level = torch.cat([torch.full((2,), 250), torch.full((1,), 240), torch.full((197,), 100)])
    success = torch.ones(200, dtype=torch.bool)
    success[2] = success[50:] = False  # the first two are right, of 49
    assert middle_threshold(Said(), [said(success, level)], 0.9, 0.0).is_precise
    success = torch.cat([success, torch.ones(151, dtype=torch.bool)])  # of 200: at least 4
    pictures = said(success, torch.cat([level, torch.full((151,), 90)]))
    assert not middle_threshold(Said(), [pictures], 0.99, 0.0).is_precise


def test_ends_are_compared_by_what_is_paid_and_with_what_chance_gives() -> None:
    level, success = torch.tensor([250, 200, 60, 20, 10]), torch.tensor([True, False, True, False, False])
    found = measure_ends(Said(), said(success, level), 0.5)
    assert (found.episodes, found.successes, found.area_under_curve) == (5, 2, 5 / 6)
    assert (found.true_positive_rate, found.false_positive_rate) == (0.5, 1 / 3)
    unseen = measure_ends(Said(), said(success, level), 0.5, num_setting=2)  # the area is of no threshold
    assert (unseen.rated, unseen.true_positive_rate, unseen.false_positive_rate) == (3, 0.0, 0.0)
    assert unseen.area_under_curve == found.area_under_curve
    assert measure_ends(Said(), said(success, level), 0.5, num_setting=3) == found, "the others all fail"
    draws = torch.Generator().manual_seed(0)
    success = torch.arange(60) < 20
    values = torch.rand(1000, 60, generator=draws)
    by_chance = (values[:, :20, None] > values[:, None, 20:]).double().mean(dim=(1, 2)).numpy()
    chance = measure_ends(Said(), said(success, torch.arange(60)), 0.5).chance
    assert numpy.mean(by_chance > chance) == pytest.approx(0.05, abs=0.015)


def test_scaled_log_odds_are_in_the_last_layer_and_stay_moderate_where_kinds_are_apart() -> None:
    level = torch.tensor([250, 240, 230, 20, 10, 5])
    model, pictures = Said(), said(level > 100, level)
    model.net[7].bias.data.fill_(0.5)
    before = success_training.log_odds(model, pictures.pictures_N_H_W_C)
    torch.testing.assert_close(before[:, 0], 4 * (level / 127.5 - 1) + 0.5)
    [(scale, offset)] = scale_to(model, pictures)
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

    class Recorded(torch.optim.AdamW):
        def step(self, *given: Any) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(*given)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        options = TrainingOptions(steps=4, batch_size=8, lr=0.1)
        losses.append(train(SuccessClassifier(NARROW), squares(30, 0), options, seed))
    assert losses[0] == losses[1] != losses[2]
    assert rates[:4] == pytest.approx([0.1, 0.075, 0.05, 0.025], rel=4e-3)


def test_augmented_pictures_are_shifted_by_up_to_two_pixels_and_not_mirrored() -> None:
    images = torch.full((20, 1, 16, 16), -1.0)
    images[..., 5, 6] = 1.0
    places = set()
    for seed in range(200):
        seen = augmented(images, torch.Generator().manual_seed(seed))
        found = seen.flatten(1).argmax(1).tolist()
        places |= {divmod(place, 16) for place in found}
        draws = torch.Generator().manual_seed(seed)  # the shift follows two numbers for each picture, as ever
        _, (top, left) = torch.rand(2, 20, generator=draws), torch.randint(0, 5, (2,), generator=draws).tolist()
        assert found == [16 * (7 - top) + 8 - left] * 20
    assert places == {(5 + i, 6 + j) for i in range(-2, 3) for j in range(-2, 3)}


def test_augmented_pictures_show_the_same_in_another_light() -> None:
    images = to_unit(squares(6, 3).pictures_N_H_W_C)
    seen = augmented(images, torch.Generator().manual_seed(1))
    assert seen.shape == images.shape and not torch.allclose(seen, images, atol=0.1)
    assert (seen.flatten(2).amax(2) - images.flatten(2).amax(2)).abs().max() < 0.6


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


def recorded(folder: Path, column: str, **options: Any) -> tuple[LabelledRecordings, Any]:
    source = LeRobotSource.open(folder)
    parts = parts_of(source, "", options.pop("val_fraction", 0.34))
    return LabelledRecordings(source, column, None, parts[0], near_misses=options.pop("near", 3), **options), parts


def test_recordings_have_their_successes_what_came_just_before_and_how_far_it_was(recordings: Path) -> None:
    found, parts = recorded(recordings, "next.done")
    assert [len(part) for part in parts] == [4, 1, 1]
    assert found.discount == pytest.approx(0.1 ** (1 / 12))  # the usual recording begins at 0.1
    for part in found.labelled([*parts[0], *parts[2]])["held out"]:
        assert part.pictures_N_H_W_C.shape == (13, 48, 48, 3) and part.pictures_N_H_W_C.dtype == torch.uint8
        assert part.success_N.nonzero().flatten().tolist() == [12]
        assert part.near_N.nonzero().flatten().tolist() == [9, 10, 11]
        torch.testing.assert_close(part.progress_N, found.discount ** torch.arange(12.0, -1, -1))
    with pytest.raises(DataError, match=r"no column 'next\.win'"):
        recorded(recordings, "next.win")
    with pytest.raises(DataError, match="1 of 6 episodes are held out, but 2"):
        recorded(recordings, "next.done", val_fraction=0.1)


def test_large_recordings_are_thinned_from_their_ends(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, parts = recorded(recordings, "next.done")
    whole = found.labelled(parts[0])["held out"]
    monkeypatch.setattr(labelled_recordings, "MEMORY", 4 * 5 * 48 * 48 * 3)  # of 13 pictures of each every third
    for one, other in zip(whole, found.labelled(parts[0])["held out"], strict=True):
        assert torch.equal(other.pictures_N_H_W_C, one.pictures_N_H_W_C[[0, 3, 6, 9, 12]])
        assert other.success_N.tolist() == [False] * 4 + [True]


def test_success_is_more_than_half_and_pictures_are_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.arange(3 * 7 * 5 * 6).reshape(3, 7, 5, 6).to(torch.uint8)  # channels, frames, height, width
    done = numpy.array([[0.0], [0.4], [0.5], [0.6], [0.9], [0.0], [0.0]])

    class Source(list):
        info = SimpleNamespace(features={"done": {}}, root="x")
        episodes = SimpleNamespace(lengths=numpy.array([7] * 4))
        camera = staticmethod(lambda name: name)
        columns = staticmethod(lambda i, names, gaps: {"done": done * (i < 3)})
        frames = staticmethod(lambda i, place, rows, fit: frames[:, list(rows)])

    found = LabelledRecordings(Source(range(4)), "done", None, [0, 3], near_misses=2)  # type: ignore[arg-type]
    part, failure = found.labelled([0, 3])["held out"]
    assert torch.equal(part.pictures_N_H_W_C, frames.permute(1, 2, 3, 0))
    assert part.success_N.tolist() == [False, False, False, True, True, False, False]
    assert part.near_N.tolist() == [False, True, True, False, False, False, False]
    d = 0.1 ** (1 / 3)
    assert part.progress_N.tolist() == pytest.approx([d**3, d**2, d, 1, 1, 0, 0])  # it went away, and did not return
    assert not failure.success_N.any() and not failure.progress_N.any()


def test_recordings_are_held_out_with_success(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = LeRobotSource.columns
    failures = lambda *given, **how: {name: value * 0 for name, value in columns(*given, **how).items()}  # noqa: E731
    monkeypatch.setattr(LeRobotSource, "columns", failures)
    words = ("--data", str(recordings), "--success_column", "next.done", "--val_fraction", "0.34")
    assert call(train_reward_model, *words, "--out", str(tmp_path / "other")) == 2
    assert "calibrated, 0 show success" in capsys.readouterr().err


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("cosmos_predict2.toy_world"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from scripts import train_reward_model

sys.exit(train_reward_model.command_line.main(train_reward_model.parser, train_reward_model.run, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_reward_of_recordings_learns_what_a_world_model_imagines_of_them_without_the_toy_world(
    recordings: Path, tmp_path: Path
) -> None:
    words = ["--data", str(recordings), "--success_column", "next.done", "--val_fraction", "0.67", "--steps", "2"]
    words += ["--world_model", TINY_ACTION, *ANY, "--out", str(tmp_path)]
    subprocess.run([python(), "-c", BLOCKED, *words], check=True, cwd=Path(__file__).parents[3])
    found = json.loads((tmp_path / "quality.json").read_text())
    assert {kind: one["count"] for kind, one in found["quality"].items()} == {
        "held out": 26,
        "tokenizer round trip": 24,
        "imagined, by the outcome": 24,
    }
    assert {kind: one["episodes"] for kind, one in found["ends"].items()} == {
        "held out": 4,
        "imagined, by the outcome": 4,
    }
    assert found["outputs"] == ["success", "progress"]
    assert ResnetReward(str(tmp_path / "reward_model.safetensors"), device="cpu").threshold == found["threshold"]


def test_a_world_model_of_another_robot_or_rate_is_refused_before_anything_is_trained(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data", str(recordings), "--success_column", "next.done", "--val_fraction", "0.34", "--out")
    words = (*words, str(tmp_path / "rm"), "--world_model", TINY_ACTION)
    rate = LeRobotSource.open(recordings).info.fps / 2
    config = SimpleNamespace(require_transform=lambda: SimpleNamespace(dim=7))
    for found, named in [
        (dict(imagination=SimpleNamespace(config=config, action_keys=None)), "4 numbers, but those of the world"),
        (dict(card=SimpleNamespace(frame_rate=rate)), f"was trained on {rate:g} (a stride)"),
    ]:
        with monkeypatch.context() as patch:
            for place, name in (
                ("imagination", "cosmos_predict2.configs.rl.imagination.imagination_of"),
                ("card", "cosmos_predict2.checkpoints.card.read_card"),
            ):
                if place in found:
                    patch.setattr(name, lambda *_, one=found[place], **__: one)
            assert call(train_reward_model, *words) == 2
        assert named in capsys.readouterr().err


ANY = ("--least_precision", "0", "--least_recall", "0", "--least_area", "0")


def test_the_command_calibrates_and_measures(recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, find = list[LabelledPictures](), middle_threshold
    monkeypatch.setattr(success_training, "middle_threshold", lambda *of: seen.extend(of[1]) or find(*of))
    words = ("--data", str(recordings), "--success_column", "next.done", "--val_fraction", "0.5", "--batch_size", "8")
    assert call(train_reward_model, *words, *ANY, "--steps", "3", "--out", str(tmp_path / "rm")) == 0
    text = (tmp_path / "rm" / "quality.json").read_text()
    found = json.loads(text)
    assert "NaN" not in text
    assert {kind: quality["count"] for kind, quality in found["quality"].items()} == {"held out": 13}, "of one in three"
    assert [len(one) for one in seen] == [26], "the other two choose the threshold"
    assert [(one["episodes"], one["successes"]) for one in found["ends"].values()] == [(3, 3)]
    reward = ResnetReward(str(tmp_path / "rm" / "reward_model.safetensors"), device="cpu")
    assert reward.threshold == found["threshold"] and len(reward.model.heads) == len(found["outputs"]) == 2
    assert reward.views == ("",)
    assert reward.judge(torch.zeros(1, 2, 48, 48, 3, dtype=torch.uint8), {}).value_E_F.shape == (1, 2)
    root = ElementTree.fromstring((tmp_path / "rm" / "reliability.svg").read_text())
    assert len(root.findall("{*}polyline")) == 2, "a line for each kind of pictures, and one for what is right"


@pytest.mark.parametrize(
    ("kind", "precision", "recall", "named"),
    [
        ("held out", 0.98, 0.014, "recall 0.014"),
        ("held out", 0.4, 0.9, "precision 0.400"),
        ("held out", math.nan, 0.0, "precision nan"),
        ("held out", 0.9, 0.6, ""),
        (ROUND_TRIP, 0.9, 0.45, ""),
        (OUTCOME, 0.9, 0.45, ""),  # its value is paid, which the area of ends judges
    ],
)
def test_a_reward_model_that_finds_few_successes_is_not_written(
    kind: str,
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
    parts = [replace(part, progress_N=part.success_N.float()) for part in (squares(12, seed) for seed in range(3))]
    made = lambda args, device: train_reward_model._Shown(parts[:1], {kind: parts[1]}, {kind: parts[2]})  # noqa: E731
    monkeypatch.setattr(train_reward_model, "_pictures", made)
    asked, find = [], middle_threshold
    monkeypatch.setattr(success_training, "middle_threshold", lambda *of: asked.append(of[-1]) or find(*of))
    words = ("--data", "x", "--steps", "1", "--batch_size", "8", "--out", str(tmp_path))
    assert call(train_reward_model, *words) == (2 if named else 0)
    assert asked == [pytest.approx(0.6)], "more than the 0.5 that the other half of the pictures has to reach"
    assert (tmp_path / "reward_model.safetensors").exists() == (not named) and (tmp_path / "quality.json").exists()
    assert not named or (named in (err := capsys.readouterr().err) and "--least_recall 0" in err)


@pytest.mark.parametrize(
    ("successes", "named"),
    [(9, " Only 9 of these ends succeed: where more do,"), (81, " Only 9 of these ends fail"), (40, "")],
)
def test_few_ends_of_an_outcome_are_named_where_a_reward_is_no_better_than_chance(successes: int, named: str) -> None:
    args = train_reward_model.parser.parse_args(["--data", "x", "--out", "new"])
    found = train_reward_model._problem(args, {}, {OUTCOME: Ends(90, successes, 0.6, 0.668, 44, 1.0, 0.5, 0.5, 0.4)})
    assert "0.600, but chance alone gives up to 0.668. True pictures are judged well" in found
    assert named in found and (" Only " in found) == bool(named)


def test_wrong_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "reward_model.safetensors").write_bytes(b"")
    out = ("--out", str(tmp_path / "new"), "--data", str(tmp_path))
    for words, named in [
        (("--data", "x", "--out", str(tmp_path / "full")), "holds a reward model"),
        (("--data", "x", "--out", "x"), "--out x is the folder of the recordings"),
        ((*out, "--precision", "1.5"), "--precision 1.5"),
        ((*out, "--least_recall", "1"), "--least_recall 1"),
        ((*out, "--data", str(tmp_path / "nowhere")), "nowhere"),
        ((*out, "--val_fraction", "0"), "--val_fraction 0"),
    ]:
        assert call(train_reward_model, *words) == 2
        assert named in capsys.readouterr().err
