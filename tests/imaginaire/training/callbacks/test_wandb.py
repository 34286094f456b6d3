# SPDX-License-Identifier: Apache-2.0
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import trackers
from imaginaire.training.callbacks.trackers import Metrics, WandbTracker, asked_mode, chosen_mode
from tests.imaginaire.training.callbacks.fakes import JOB


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a key, and without a say in the environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_a_key_it_is_disabled_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    imported_before = "wandb" in sys.modules
    with caplog.at_level(logging.INFO):
        metrics = Metrics(str(tmp_path), JOB, is_writer=True)
        metrics.open(0)
        metrics.log({"x": 1.0}, 1)
        metrics.close()
    said = [r for r in caplog.records if "W&B" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.INFO] and "no key found" in said[0].getMessage()
    assert ("wandb" in sys.modules) == imported_before
    assert metrics.state_dict()["wandb_run_id"] is None


def test_a_key_is_found_in_the_environment_or_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password none\n")
    assert chosen_mode(*asked_mode(None)) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert chosen_mode(*asked_mode(None)) == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "none")
    assert chosen_mode(*asked_mode(None)) == "online"


def test_the_environment_wins_over_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_mode(*asked_mode("offline")) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert chosen_mode(*asked_mode("offline")) == "disabled"


def test_an_unknown_mode_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job.wandb_mode=ofline is not a W&B mode. Did you mean offline"):
        Metrics(str(tmp_path), SimpleNamespace(wandb_mode="ofline"), is_writer=False)


class Broken:
    """Stands where W&B's run would be, on a day when its service is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: Any) -> None:
        self.calls += 1
        raise BrokenPipeError("the service is gone")


def test_a_finish_that_never_returns_does_not_hold_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.01)
    tracker, released = WandbTracker(JOB), threading.Event()
    tracker._run = SimpleNamespace(finish=released.wait)
    tracker.close()
    released.set()
    assert "W&B finish failed" in caplog.text and "no answer within 0.02 s" in caplog.text


def test_a_library_that_exits_the_program_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandbTracker(JOB)
    for limit_s in (None, 5.0):  # the caller's thread, and one of its own
        tracker._run = Broken()
        assert tracker._guarded("init", lambda: sys.exit("wandb: not logged in"), limit_s) is None
        assert tracker._run is None
    assert caplog.text.count("SystemExit: wandb: not logged in") == 2


def test_a_failing_log_is_one_warning_and_the_end_of_it(caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandbTracker(JOB)
    tracker._run = broken = Broken()
    for i in range(3):
        tracker.log({"x": 1.0}, i)
    tracker.close()
    assert broken.calls == 1
    assert caplog.text.count("W&B log failed") == 1 and "the service is gone" in caplog.text


def test_a_resume_continues_the_run_and_a_server_that_is_gone_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, ids = mock.MagicMock(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "none")
    metrics = Metrics(str(tmp_path), JOB, is_writer=True)
    for iteration in (0, 2):
        metrics.open(iteration)
        metrics.log({"train/loss": 0.5}, iteration + 1)
        state = metrics.state_dict()
        metrics.close()
        ids.append(fake.init.call_args.kwargs["id"])
        metrics = Metrics(str(tmp_path), JOB, is_writer=True)
        metrics.load_state_dict(state)
    assert ids[0] == ids[1] == state["wandb_run_id"]
    assert fake.init.return_value.log.call_args.args[0] == {"train/loss": 0.5, "iteration": 3}
    fake.init.side_effect = ConnectionError("nobody there")
    metrics.open(4)
    metrics.log({"train/loss": 0.5}, 5)
    metrics.close()
    assert caplog.text.count("W&B init failed") == 1 and "nobody there" in caplog.text
