# SPDX-License-Identifier: Apache-2.0
"""Side channels that fail in every way: one warning each, and training goes on as if they had not."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imaginaire.distributed import places
from imaginaire.training.callbacks import Callback, SideChannel
from imaginaire.training.callbacks.trackers import Metrics
from tests.training import difference, saved, train

QUICK = ["dataloader_train.num_workers=0", "trainer.run_validation=False", "trainer.callbacks.heart_beat.every_n=1"]
QUICK += ["trainer.callbacks.heart_beat.update_interval_in_minute=0", "callbacks=[basic,long]"]
SABOTAGE = "+trainer.callbacks.sabotage={_target_: tests.imaginaire.training.callbacks.test_side_channel.Sabotage}"


class Sabotage(Callback):
    """Spoils the side channels after the second step."""

    def on_training_step_end(self, *args: Any, iteration: int = 0, **kwargs: Any) -> None:
        folder = Path(self.trainer.run_dir)
        if self.trainer.iteration != 2:
            return
        for name in ("metrics.jsonl", "stdout.log"):
            (folder / name).unlink()
            (folder / name).symlink_to("/dev/full")
        (folder / "heart_beat.json").unlink()
        (folder / "heart_beat.json").mkdir()
        for handler in logging.getLogger().handlers:  # an open file would go on into the file that was removed
            if isinstance(handler, logging.FileHandler):
                handler.stream.close()
                handler.stream = None  # type: ignore[assignment]

        class FullBoard:
            def __getattr__(self, name: str) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.trainer.metrics._board.close()
        self.trainer.metrics._board = FullBoard()


def test_a_full_disk_costs_a_warning_for_each_channel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert train(tmp_path / "whole", QUICK) == 0
    caplog.clear()
    assert train(tmp_path / "full", [*QUICK, SABOTAGE]) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in said if text.startswith("metrics.jsonl failed") and "No space left" in text]
    for name in ("metrics.jsonl failed", "TensorBoard failed", "heart beat failed", "stdout.log; training goes"):
        assert len([text for text in said if name in text]) == 1, said
    assert "metrics.jsonl: 5 records were not written" in said
    states = [saved(tmp_path / name) for name in ("full", "whole")]
    for state in states:
        state["trainer"].pop("callbacks")
        state["trainer"].pop("metrics")
    assert difference(*states) is None


def test_a_mistake_of_the_training_is_not_swallowed(tmp_path: Path) -> None:
    metrics = Metrics(str(tmp_path), SimpleNamespace(wandb_mode="disabled"), is_writer=True)
    metrics.open(0)
    metrics.log({"x": torch.zeros(2)}, 1)  # no scalar: as an error of the device would show when it is read
    with pytest.raises(ValueError, match="one element"):
        metrics.flush(1)


def _raise() -> int:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("work", "in_step", "said", "outcome"),
    [
        (lambda: 7, True, ["", ""], 7),
        (lambda: 7, False, ["", "OSError: theirs"], None),
        (_raise, False, ["KeyError: mine", ""], None),
        (_raise, True, ["KeyError: mine", "KeyError: theirs"], None),
        (_raise, True, ["KeyError: mine", ""], KeyError),  # the other may still wait in the network
        (_raise, True, None, KeyError),
        (lambda: 7, True, None, RuntimeError),
    ],
)
def test_ranks_agree_on_what_failed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    work: Callable[[], int],
    in_step: bool,
    said: list[str] | None,
    outcome: Any,
) -> None:
    monkeypatch.setattr(places, "exchange", lambda *arguments: said)
    channel = SideChannel("samples")
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            channel.together("at iteration 1", work, in_step=in_step)
        return
    for _ in range(2):
        assert channel.together("at iteration 1", work, in_step=in_step) == outcome
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (outcome is None)


def test_a_lost_rank_is_no_failure_of_a_channel() -> None:
    def lose() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        SideChannel("samples").together("at iteration 1", lose, in_step=False)
