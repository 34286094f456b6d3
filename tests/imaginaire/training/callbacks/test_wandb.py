# SPDX-License-Identifier: Apache-2.0
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imaginaire.errors import ConfigError
from imaginaire.training.callbacks.trackers import Metrics
from imaginaire.training.callbacks.wandb_tracker import WandbTracker, asked_mode, chosen_mode
from tests.programs import python


def job(mode: str | None = None) -> Any:
    return SimpleNamespace(project="p", group="g", name="n", wandb_mode=mode)


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a key, and without a say in the environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_a_key_it_is_disabled_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    imported_before = "wandb" in sys.modules
    with caplog.at_level(logging.INFO):
        metrics = Metrics(str(tmp_path), job(), is_writer=True)
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
        Metrics(str(tmp_path), job("ofline"), is_writer=False)


class Broken:
    """Stands where W&B's run would be, on a day when its service is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: Any) -> None:
        self.calls += 1
        raise BrokenPipeError("the service is gone")


def test_a_failing_log_is_one_warning_and_the_end_of_it(caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandbTracker(job())
    tracker._run = broken = Broken()
    for i in range(3):
        tracker.log({"x": 1.0}, i)
    tracker.close()
    assert broken.calls == 1
    assert caplog.text.count("W&B log failed") == 1 and "the service is gone" in caplog.text


RUN = """
    import logging, sys
    from types import SimpleNamespace
    from imaginaire.callbacks import wandb_tracker
    from imaginaire.callbacks.trackers import Metrics
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    wandb_tracker.INIT_TIMEOUT_S = 3.0 if "short" in sys.argv else 30.0
    job = SimpleNamespace(project="p", group="g", name="n", wandb_mode=None)
    metrics = Metrics(sys.argv[1], job, is_writer=True, config={"seed": 1})
    for iteration, run_id in ((0, None), (2, "first")):
        if run_id:
            metrics = Metrics(sys.argv[1], job, is_writer=True)
            metrics.load_state_dict(state)
        metrics.open(iteration)
        for i in (1, 2):
            metrics.log({"train/loss": 0.5}, iteration + i)
            metrics.flush(iteration + i)
        state = metrics.state_dict()
        print("run", state["wandb_run_id"])
        metrics.close()
"""


def run_in_a_process(folder: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """stdout and stderr; a process because W&B starts a service that lives until its process ends."""
    done = subprocess.run(
        [python(), "-c", textwrap.dedent(RUN), str(folder), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_offline_writes_a_run_and_a_resume_continues_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    stdout, stderr = run_in_a_process(tmp_path, WANDB_MODE="offline")
    first, second = [line.split()[1] for line in stdout.splitlines() if line.startswith("run ")]
    assert first == second
    assert f"run {first} started" in stderr and f"run {first} continued" in stderr and "WARNING" not in stderr
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and all(first in file.name and file.stat().st_size > 0 for file in files)


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_costs_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    unreachable = dict(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    _, stderr = run_in_a_process(tmp_path, "short", **unreachable)
    assert stderr.count("WARNING W&B init failed") == 2  # one for each start
    assert stderr.count("INFO iter ") == 4
