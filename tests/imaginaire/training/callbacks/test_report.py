# SPDX-License-Identifier: Apache-2.0
import io
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from imaginaire import distributed
from imaginaire.training.callbacks.monitor import DeviceMonitor
from imaginaire.training.callbacks.report import HeartBeat, IterSpeed, LossLog, ProgressBar, RunningMean
from imaginaire.training.callbacks.train import GradClip
from tests.imaginaire.training.callbacks.fakes import ImageModel, Model, Trainer, lazy, make_config, stepped
from tests.multiprocess import run_distributed
from tests.training import records


def test_loss_log_averages_losses_and_scalar_outputs_over_micro_batches(tmp_path: Path) -> None:
    trainer = Trainer(make_config({"loss_log": lazy(LossLog)}, grad_accum_iter=2), tmp_path)
    trainer.start()
    trainer.step(1.0, 2.0, output={"edm_loss": torch.tensor(4.0), "latent": torch.ones(3), "name": "x"})
    trainer.step(3.0, 6.0, output={"edm_loss": 8.0, "loss": torch.tensor(99.0)})
    trainer.metrics.close()
    (record,) = records(tmp_path)
    assert record["iteration"] == 2
    assert record["train/loss"] == pytest.approx(3.0)
    assert record["train/edm_loss"] == pytest.approx(6.0)
    assert record["train/samples_seen"] == 12
    assert record["optim/lr_0"] == pytest.approx(0.1 / 2)  # the rate that step 2 ran with
    assert record["optim/weight_decay_0"] == 0.0
    assert not any("latent" in name or "name" in name for name in record)


def test_loss_log_counts_what_is_not_finite(tmp_path: Path) -> None:
    stepped(tmp_path, {"loss_log": lazy(LossLog)}, 1.0, math.nan, math.inf, math.nan)
    first, second = records(tmp_path)
    assert (first["train/loss"], first["train/non_finite_loss"]) == (1.0, 1)
    assert "train/loss" not in second and second["train/non_finite_loss"] == 2


def test_loss_log_with_a_multiplier_has_its_own_names(tmp_path: Path) -> None:
    callbacks = {"loss_log": lazy(LossLog), "slow": lazy(LossLog, logging_iter_multipler=2)}
    stepped(tmp_path, callbacks, 1.0, 2.0, 3.0, 4.0)
    first, second = records(tmp_path)
    assert first["train/loss"] == 1.5 and "train@2/loss" not in first
    assert second["train/loss"] == 3.5 and second["train@2/loss"] == 2.5


@pytest.mark.parametrize(("steps", "logged"), [(1, [1]), (3, [1, 3]), (9, [1, 9]), (10, [10]), (12, [10])])
def test_a_run_shorter_than_logging_iter_has_first_and_last_row(steps: int, logged: list[int], tmp_path: Path) -> None:
    callbacks = {"loss_log": lazy(LossLog), "slow": lazy(LossLog, logging_iter_multipler=2), "clip": lazy(GradClip)}
    stepped(tmp_path, callbacks, *range(1, steps + 1), logging_iter=10, max_iter=steps)
    rows = records(tmp_path)
    assert [row["iteration"] for row in rows] == logged
    assert all({"train/loss", "train/grad_norm", "optim/lr_0"} <= set(row) for row in rows)
    if logged[0] == 1:
        assert rows[0]["train/loss"] == 1.0 and "train@2/loss" not in rows[-1]
        assert rows[-1]["train/loss"] == pytest.approx((steps + min(2, steps)) / 2)  # of those since the first


class Player(Model):
    validation_metric, validation_note = "greedy_success", "unchecked"


def test_a_model_may_log_something_other_than_its_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(make_config({"loss_log": lazy(LossLog)}), tmp_path, Player())
    trainer.start()
    trainer.callbacks.on_validation_start(trainer.model, [], 0)
    output = {"greedy_success": torch.tensor(0.75)}
    trainer.callbacks.on_validation_step_end(trainer.model, {"x": torch.ones(4)}, output, torch.tensor(0.25), 0)
    with caplog.at_level(logging.INFO):
        trainer.callbacks.on_validation_end(trainer.model, 0)
    trainer.metrics.close()
    assert records(tmp_path) == [{"iteration": 0, "val/greedy_success": 0.75}]
    assert "iter 0 validation greedy success 0.75 (unchecked)" in caplog.text


_WEIGHTS = [torch.tensor(counted) for counted in ([1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0])]


@pytest.mark.parametrize(
    "passes",  # batches with their losses
    [
        [({"meta": ["a"], "x": torch.ones(size, 2)}, loss) for size, loss in ((3, 1.0), (1, 5.0))],
        [({"x": torch.ones(3, 2), "sample_weight": w}, loss) for w, loss in zip(_WEIGHTS, (1.0, 4.0, 99.0))],
    ],
)
def test_validation_loss_is_weighted_by_the_samples_that_count(passes: list[Any], tmp_path: Path) -> None:
    trainer = Trainer(make_config({"loss_log": lazy(LossLog)}), tmp_path)
    trainer.start()
    cb, model = trainer.callbacks, trainer.model
    cb.on_validation_start(model, [], 0)
    for batch, loss in passes:
        cb.on_validation_step_end(model, batch, {"accuracy": loss / 10}, torch.tensor(loss), 0)
    cb.on_validation_end(model, 0)
    trainer.metrics.close()
    assert records(tmp_path) == [{"iteration": 0, "val/loss": 2.0, "val/accuracy": pytest.approx(0.2)}]


def test_images_and_videos_have_losses_of_their_own(tmp_path: Path) -> None:
    trainer = Trainer(make_config({"loss_log": lazy(LossLog)}, logging_iter=3), tmp_path, ImageModel())
    trainer.start()
    for key, loss in (("image", 1.0), ("video", 2.0), ("video", 4.0)):
        trainer.step(loss, batch={key: torch.ones(1)}, output={"edm_loss": loss / 10})
    trainer.metrics.close()
    (record,) = records(tmp_path)
    assert (record["train/image_loss"], record["train/video_loss"]) == (1.0, 3.0)
    assert record["train/image_edm_loss"] == pytest.approx(0.1)
    assert record["train/video_edm_loss"] == pytest.approx(0.3)
    assert record["train/loss"] == pytest.approx(7 / 3)


def test_a_record_logged_before_the_checkpoint_but_not_yet_written_is_written_on_resume(tmp_path: Path) -> None:
    config = make_config({"loss_log": lazy(LossLog)})
    trainer = Trainer(config, tmp_path)
    trainer.start()
    trainer.metrics.flush = lambda iteration: None  # type: ignore[method-assign]  # killed before it
    trainer.step(1.0), trainer.step(3.0)
    state = trainer.metrics.state_dict()
    assert records(tmp_path) == []
    for _ in range(2):  # a second resume from the same checkpoint does not repeat it
        resumed = Trainer(config, tmp_path)
        resumed.metrics.load_state_dict(state)
        resumed.start(2)
        resumed.metrics.close()
        (record,) = records(tmp_path)
        assert (record["iteration"], record["train/loss"]) == (2, 2.0)


@pytest.mark.filterwarnings("error")
def test_running_mean_takes_a_loss_with_its_graph() -> None:
    mean = RunningMean()
    mean.add(torch.tensor(2.0, requires_grad=True) * 3)
    assert mean.mean() == 6.0 and RunningMean().mean() is None
    mean.add(math.nan)
    assert RunningMean.of_state(mean.state_dict()).totals() == mean.totals() and mean.totals()[2] == 1


def test_iter_speed_counts_the_first_hits_then_logs_speed_and_its_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        stepped(tmp_path, {"iter_speed": lazy(IterSpeed, hit_thres=3)}, *[0.5] * 6)
    hits = [r for r in caplog.records if "Hit counter" in r.getMessage()]
    said = [h.getMessage().split(" | Time")[0] for h in hits]
    assert said == [f"Iteration {i}: Hit counter: {i}/3 | Loss: 0.5000" for i in (1, 2, 3)]
    assert [h.levelname for h in hits] == ["INFO", "DEBUG", "INFO"]
    first, second = records(tmp_path)
    assert (first["iteration"], second["iteration"]) == (4, 6)
    assert {"timer/data", "timer/forward", "train/s_per_iter", "train/data_percent"} <= set(second)
    assert 0 < second["timer/forward"] < second["train/s_per_iter"] < 1
    assert second["train/samples_per_s"] == pytest.approx(3 / second["train/s_per_iter"])


def test_iter_speed_leaves_out_validation_saving_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))
    trainer = Trainer(make_config({"iter_speed": lazy(IterSpeed, hit_thres=0)}), tmp_path)
    trainer.start()
    trainer.step(0.5), trainer.step(0.5)  # starts the clock
    monkeypatch.setattr("imaginaire.training.callbacks.report.time.perf_counter", lambda: float(next(clock)))
    speed = trainer.callbacks["iter_speed"]
    assert isinstance(speed, IterSpeed)
    speed._restart(2)  # reads 0
    trainer.callbacks.on_validation_start(trainer.model, [], 2)  # 10
    trainer.callbacks.on_validation_end(trainer.model, 2)  # 20
    trainer.callbacks.on_save_checkpoint_start(trainer.model, 3)  # 30
    trainer.callbacks.on_save_checkpoint_end(trainer.model, 3)  # 40
    with trainer.timers("apart"):  # 50, 60
        pass
    speed.every_n_impl(trainer, trainer.model, {}, {}, torch.tensor(0.0), 4)  # 70
    trainer.metrics.close()
    record = records(tmp_path)[-1]
    assert record["train/s_per_iter"] == pytest.approx((70 - 20 - 10) / 2)
    assert "timer/apart" not in record


def test_heart_beat_writes_at_the_start_then_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    heart_beat = lazy(HeartBeat, every_n=1, update_interval_in_minute=1000)
    trainer = Trainer(make_config({"heart_beat": heart_beat}), tmp_path)

    def beat() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "heart_beat.json").read_text()))

    trainer.start()
    trainer.step(1.0)
    assert (beat()["state"], beat()["iteration"]) == ("training", 0)
    callback = trainer.callbacks["heart_beat"]
    assert isinstance(callback, HeartBeat)
    callback.interval_s = 0.0
    trainer.step(1.0)
    assert beat()["iteration"] == 2 and beat()["samples_seen"] == 6
    trainer.callbacks.on_train_end(trainer.model, 2)
    assert beat()["state"] == "finished"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    trainer = stepped(tmp_path, {"bar": lazy(ProgressBar)}, 1.0, 1.0, 1.0, max_iter=3)
    cb, model = trainer.callbacks, trainer.model
    cb.on_validation_start(model, [1, 2], 3)
    cb.on_validation_step_end(model, {}, {}, torch.tensor(0.0), 3)
    cb.on_validation_end(model, 3)
    cb.on_train_end(model, 3)
    shown = stderr.getvalue()
    assert ("training: 100%" in shown and "3/3" in shown and "validation:" in shown) if is_terminal else shown == ""


def _two_ranks(folder: Path) -> None:
    rank = distributed.rank()
    callbacks = {"loss_log": lazy(LossLog), "device_monitor": lazy(DeviceMonitor, every_n=2)}
    trainer = Trainer(make_config(callbacks), folder, is_writer=rank == 0)
    trainer.start()
    for loss in ((1.0, 3.0), (5.0, math.nan))[rank]:
        trainer.step(loss, output={"image_loss" if rank == 0 else "video_loss": loss + 1})
    trainer.metrics.close()


@pytest.mark.slow
def test_two_ranks_share_one_record(tmp_path: Path) -> None:
    run_distributed(_two_ranks, world_size=2, args=(tmp_path,))
    (record,) = records(tmp_path)
    assert record["train/loss"] == 3.0  # of 1, 3, 5
    assert (record["train/image_loss"], record["train/video_loss"]) == (3.0, 6.0)
    assert record["train/non_finite_loss"] == 1
    assert record["device/cpu_mem_gb_min"] <= record["device/cpu_mem_gb"] <= record["device/cpu_mem_gb_max"]
