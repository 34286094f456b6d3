# SPDX-License-Identifier: Apache-2.0
"""However a run ends, what it trained is saved, and the same command goes on from there."""

import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.minimal.data import Waves
from imaginaire.distributed.places import StopRequests
from imaginaire.errors import DataError, TrainingError
from imaginaire.training.callbacks import Callback
from tests.project import config as project
from tests.training import difference, run_dir, saved, train

HERE = "tests.imaginaire.training.test_ends"
QUICK = ["dataloader_train.num_workers=0", "trainer.max_iter=10"]
NODE = "+trainer.callbacks.trips={_target_: " + HERE + ".Trips, hook: "


class Trips(Callback):
    """Raises once, at the fifth call of a hook."""

    has_tripped = False

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._trip)
        self._calls = 0

    def _trip(self, *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls == 5 and not Trips.has_tripped:
            Trips.has_tripped = True
            raise KeyError("a bug beside the training")

    def on_training_step_end(self, *args: Any, **kwargs: Any) -> None: ...
    def on_validation_step_end(self, *args: Any, **kwargs: Any) -> None: ...
    def on_after_dataloading(self, *args: Any, **kwargs: Any) -> None: ...
    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("hook", "iteration"), [("on_training_step_end", 5), ("on_validation_step_end", 8), ("on_after_dataloading", 2)]
)
def test_an_error_beside_the_training_costs_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, iteration: int
) -> None:
    monkeypatch.setattr(Trips, "has_tripped", False)
    overrides = [*QUICK, NODE + hook + "}"]
    with pytest.raises(KeyError, match="a bug beside the training"):
        train(tmp_path / "parts", overrides)
    assert saved(tmp_path / "parts")["trainer"]["iteration"] == iteration
    assert train(tmp_path / "parts", overrides) == 0
    assert train(tmp_path / "whole", overrides) == 0
    assert difference(saved(tmp_path / "parts"), saved(tmp_path / "whole")) is None


class Spoilt(Waves):
    """Has one sample that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise DataError("sample 13 is damaged")
        return super().__getitem__(index)


def test_a_bad_sample_costs_no_progress_and_is_met_again(tmp_path: Path) -> None:
    bad = [*QUICK, f"dataloader_train.dataset._target_={HERE}.Spoilt"]
    for _ in range(2):
        with pytest.raises(DataError, match="sample 13 is damaged"):
            train(tmp_path, bad)
    left = saved(tmp_path)["trainer"]
    assert 0 < left["iteration"] < 10 and left["samples_seen"] == 4 * left["iteration"]


@pytest.mark.parametrize("how", ["half a step", "a loss that is not finite", "no step yet"])
def test_weights_that_nobody_wants_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(Trips, "has_tripped", False)
    monkeypatch.setattr(project.Explosive, "bad", (3,))
    choice = {
        "half a step": [NODE + "on_before_zero_grad}"],
        "a loss that is not finite": ["model._target_=tests.project.config.Explosive"],
        "no step yet": [f"dataloader_train.dataset._target_={HERE}.Spoilt", "dataloader_train.batch_size=20"],
    }
    with pytest.raises((KeyError, TrainingError, DataError)):
        train(tmp_path, [*QUICK, *choice[how]])
    assert not (run_dir(tmp_path) / "checkpoints" / "latest_checkpoint.txt").exists()


def test_a_terminal_that_is_closed_asks_to_stop_unless_nohup_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves
    try:
        with StopRequests() as stop, caplog.at_level(logging.WARNING):
            signal.raise_signal(signal.SIGHUP)
            assert stop.wanted and "SIGHUP: saving after this step" in caplog.text
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequests() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.wanted
    finally:
        signal.signal(signal.SIGHUP, before)
