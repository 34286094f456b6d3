# SPDX-License-Identifier: Apache-2.0
"""The stop rule: an end where held-out figures stand still, a resumed run that ends alike, and what limits a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.callbacks.stop_rule import FILE, Look, StopRule, judged
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.split import make_split, write_split
from cosmos_predict2.tokenizers.tiny import SHIPPED
from cosmos_predict2.world_model.config import EMAConfig
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.distributed.parallel import ParallelDims
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.models.test_action_model import make_model
from tests.training import difference, train

BASE = "cosmos_predict2/configs/base/config.py"
FIGURES = dict(loss_seen=1.0, gap=2.0, psnr=20.0, psnr_tokenizer=30.0)


def _looks(losses: Sequence[float], **figures: float) -> list[Look]:
    """One every hundred iterations, and a last one at the falling rate."""
    found = [Look(100 * (i + 1), **{**FIGURES, "loss": loss, **figures}) for i, loss in enumerate(losses)]
    return [*found, Look(100 * len(found) + 100, **{**FIGURES, "loss": losses[-1], **figures}, is_falling=True)]


STEEP = [1 + 1000 / (100 * i) for i in range(1, 10)]
FLAT = [1.0 + 0.001 * (-1) ** i for i in range(9)]


def test_a_curve_that_falls_says_how_much_longer() -> None:
    verdict = judged(_looks(STEEP), 1000, seconds_per_step=0.5)
    assert verdict.limit == "length" and verdict.iterations is not None
    # 1 + 1000 / n: twice as long saves 5 % where 500 / n = .05 (1 + 1000 / n), so at 9000; 8 times is the longest.
    assert verdict.iterations == 8000 and verdict.saved_by_twice == pytest.approx(0.25, abs=0.01)
    assert "trainer.max_iter=8000" in verdict.text and "58 min" in verdict.text
    assert judged(_looks(STEEP), 1000, has_ended=True).limit == "recordings"  # its loss does not fall any more
    nearer = judged(_looks([1 + 250 / (100 * i) for i in range(1, 10)]), 1000)
    assert nearer.iterations is not None and 2200 <= nearer.iterations <= 2500  # 250 / n falls four times as early


@pytest.mark.parametrize(
    ("losses", "figures", "limit"),
    [
        (FLAT, {}, "network"),
        (FLAT, dict(loss_seen=0.6), "recordings"),
        (FLAT, dict(psnr=29.0), "tokenizer"),
        (STEEP, dict(gap=1.0), "actions"),
        (STEEP[:3], {}, "unknown"),  # too few looks for a curve
    ],
)
def test_the_figure_that_limits_is_named(losses: list[float], figures: dict[str, float], limit: str) -> None:
    assert judged(_looks(losses, **figures), 1000).limit == limit


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 episodes of a square that moves as it is told, half of which succeed."""
    folder = tmp_path_factory.mktemp("recordings")
    draws = numpy.random.default_rng(0)
    writer = Writer(folder / "data", fps=5, robot="square")
    for episode in range(24):
        actions = draws.uniform(-1, 1, (17, 2)).astype(numpy.float32)
        places = 16 + numpy.clip(actions.cumsum(axis=0), -10, 10).astype(int)
        video = torch.zeros(3, 17, 32, 32, dtype=torch.uint8)
        for k, (y, x) in enumerate(places):
            video[:, k, y - 3 : y + 3, x - 3 : x + 3] = 255
        success = numpy.full((17, 1), float(episode % 2), numpy.float32)
        columns = {"action": actions, "next.success": success}
        writer.add(Recording(columns, {"observation.images.top": video}, "go"))
    writer.finish()
    write_split(folder / "split.json", make_split(folder / "data"))
    return folder


def _options(recordings: Path, name: str, *options: str) -> list[str]:
    data = "dataloader_train.dataset"
    return [
        "experiment=world_model_recordings",
        f"job.name={name}",
        f"{data}.root={recordings / 'data'}",
        f"{data}.split_file={recordings / 'split.json'}",
        f"model.config.pipe_config.tokenizer.weights={SHIPPED}",
        "model.config.pipe_config.net.num_blocks=1",
        "dataloader_train.num_workers=0",
        "dataloader_val.num_workers=0",
        "dataloader_train.batch_size=2",
        "trainer.callbacks.draw_samples=null",
        "trainer.callbacks.action_following=null",
        "trainer.validation_iter=2",
        "checkpoint.save_iter=2",
        "scheduler.cycle_lengths=[12,4]",
        "trainer.callbacks.stop_rule.num_clips=4",
        "trainer.callbacks.stop_rule.first=4",
        *options,
    ]


@pytest.mark.long
def test_a_run_that_stands_still_ends_with_its_falling_rate_and_so_does_a_resumed_one(
    recordings: Path, tmp_path: Path
) -> None:
    rule = "trainer.callbacks.stop_rule"
    still = [f"{rule}.patience=1", f"{rule}.least=0.9", f"{rule}.least_psnr=100"]  # nothing improves so much
    runs = {"whole": [16], "resumed": [6, 16]}
    trees = {}
    for name, ends in runs.items():
        for end in ends:
            assert train(tmp_path, _options(recordings, name, *still, f"trainer.max_iter={end}"), config=BASE) == 0
        run = tmp_path / "posttraining/video2world" / name
        found = checkpoint_layout.read_pointer(str(run / "checkpoints"))
        assert found is not None
        trees[name] = {kind: found.read(kind) for kind in ("model", "optim", "scheduler")}
        content = json.loads((run / FILE).read_text())
        # It stands still at 4, and the last cycle has 4 steps.
        assert [(look["iteration"], look["is_falling"]) for look in content["looks"]] == [
            (2, False), (4, False), (6, True), (8, True)
        ]  # fmt: skip
        trees[name]["looks"] = content["looks"]
    assert difference(trees["whole"], trees["resumed"]) is None


@pytest.mark.slow
def test_a_run_that_improves_goes_on(recordings: Path, tmp_path: Path) -> None:
    assert train(tmp_path, _options(recordings, "goes_on", "trainer.max_iter=6"), config=BASE) == 0
    looks = json.loads((tmp_path / "posttraining/video2world/goes_on" / FILE).read_text())["looks"]
    assert [look["iteration"] for look in looks] == [2, 4, 6] and not any(look["is_falling"] for look in looks)
    assert looks[-1]["loss"] < looks[0]["loss"]


def test_what_is_looked_at_is_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(ema=EMAConfig(enabled=True))
    model.parallelize(ParallelDims())
    assert model.ema is not None
    for shadow in model.ema.shadows.values():
        shadow.mul_(0.9)
    seen: dict[str, Tensor] = {}

    def measure(self: StopRule, model: Any) -> None:
        seen.update({name: value.clone() for name, value in model.net.named_parameters()})

    monkeypatch.setattr(StopRule, "_measure", measure)
    trainer = Trainer(make_config({"stop_rule": lazy(StopRule)}, run_validation=True), tmp_path, model)
    trainer.start()
    trainer.callbacks.on_validation_end(model, 5)
    assert seen.keys() == model.ema.shadows.keys()
    assert all(torch.equal(value, model.ema.shadows[name]) for name, value in seen.items())
