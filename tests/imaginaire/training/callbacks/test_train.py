# SPDX-License-Identifier: Apache-2.0
import gc
import math
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from imaginaire.errors import ConfigError
from imaginaire.training.callbacks.train import GradClip, LowPrecision, ManualGarbageCollection
from tests.imaginaire.training.callbacks.fakes import ImageModel, Trainer, lazy, make_config
from tests.training import records

Pair = namedtuple("Pair", "left right")


def test_low_precision_casts_floats_at_any_depth(tmp_path: Path) -> None:
    trainer = Trainer(make_config({"low_prec": lazy(LowPrecision)}), tmp_path)
    trainer.model.precision = torch.bfloat16
    x = torch.ones(2)
    batch: dict[str, Any] = dict(x=x, n=torch.ones(2, dtype=torch.int64), text="a", l=[x, (x, 1)], p=Pair(x, x))
    for hook in (trainer.callbacks.on_training_step_start, trainer.callbacks.on_validation_step_start):
        copy = {**batch, "l": list(batch["l"])}
        hook(trainer.model, copy, 0)
        assert copy["x"].dtype == copy["l"][0].dtype == copy["l"][1][0].dtype == copy["p"].right.dtype == torch.bfloat16
        assert copy["n"].dtype == torch.int64 and copy["text"] == "a" and isinstance(copy["p"], Pair)
    with pytest.raises(ConfigError, match="must be a dict or a list, not a tuple"):
        trainer.callbacks.on_training_step_start(trainer.model, (x,), 0)
    trainer.model.precision = torch.float32
    trainer.callbacks.on_training_step_start(trainer.model, wide := {"x": x.double()}, 0)
    assert wide["x"].dtype == torch.float64, "nothing is cast"


def test_low_precision_refuses_another_update_iter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="update_iter=2, but only 1"):
        Trainer(make_config({"low_prec": lazy(LowPrecision, update_iter=2)}), tmp_path)


@pytest.fixture
def restored_gc() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()
    gc.freeze()  # else each later collection of this process looks through all that is imported


@pytest.mark.usefixtures("restored_gc")
def test_automatic_collection_stops_after_warm_up_and_returns_at_the_end(tmp_path: Path) -> None:
    trainer = Trainer(make_config({"gc": lazy(ManualGarbageCollection, every_n=2, warm_up=2)}), tmp_path)
    trainer.start()
    enabled = []
    for _ in range(5):
        trainer.step(1.0)
        enabled.append(gc.isenabled())
    assert enabled == [True, True, True, False, False]
    trainer.callbacks.on_train_end(trainer.model, 5)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def _clipped(folder: Path, sizes: list[float], scaler: Any = None, **options: Any) -> Trainer:
    """A trainer after steps whose gradients have these four values."""
    trainer = Trainer(make_config({"grad_clip": lazy(GradClip, clip_norm=0.5, **options)}), folder)
    trainer.start()
    for size in sizes:
        trainer.model.weight.grad = torch.full((1, 4), size)
        trainer.callbacks.on_before_optimizer_step(trainer.model, trainer.optimizer, None, scaler, trainer.iteration)
        trainer.iteration += 1
    trainer.metrics.close()
    return trainer


def test_grad_clip_clips_and_logs_the_mean_norm_before(tmp_path: Path) -> None:
    trainer = _clipped(tmp_path / "finite", [1.0, 3.0, 4.0, 6.0])
    assert trainer.model.weight.grad.norm() == pytest.approx(0.5, rel=1e-5)
    norms = {record["iteration"]: record["train/grad_norm"] for record in records(tmp_path / "finite")}
    assert norms == {2: pytest.approx(4.0), 4: pytest.approx(10.0)}  # (2 + 6) / 2, then (8 + 12) / 2
    trainer = _clipped(tmp_path / "nan", [1.0, math.nan])
    assert trainer.non_finite == ["grad_norm"]
    found = {"iteration": 2, "train/grad_norm": pytest.approx(2.0), "train/non_finite_grad_norm": 1}
    assert records(tmp_path / "nan") == [found]


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")])
def test_grad_clip_leaves_such_norms_to_others_when_told_so_or_under_a_scaler(scaler: Any, tmp_path: Path) -> None:
    assert _clipped(tmp_path, [math.inf], scaler, force_finite=scaler is not None).non_finite == []


def test_a_step_over_images_and_videos_counts_for_neither(tmp_path: Path) -> None:
    trainer = Trainer(make_config({"grad_clip": lazy(GradClip)}, grad_accum_iter=2), tmp_path, ImageModel())
    trainer.start()
    for kinds in (("image", "video"), ("video", "video")):
        for key in kinds:
            trainer.callbacks.on_training_step_start(trainer.model, {key: 0}, trainer.iteration)
        trainer.model.weight.grad = torch.full((1, 4), 1.0 if "image" in kinds else 2.0)
        trainer.callbacks.on_before_optimizer_step(trainer.model, trainer.optimizer, None, None, trainer.iteration)
        trainer.iteration += 1
    trainer.metrics.close()
    (record,) = records(tmp_path)
    assert "clip_grad_norm/image" not in record
    assert record["clip_grad_norm/video"] == pytest.approx(4.0)
    assert record["train/grad_norm"] == pytest.approx(3.0)
