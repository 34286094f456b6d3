# SPDX-License-Identifier: Apache-2.0
"""A resumed run equals an uninterrupted one, bit for bit, and each saved item is needed for that."""

import copy
import logging
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from examples.minimal.data import Waves
from imaginaire import distributed
from imaginaire.distributed.places import StopRequests
from imaginaire.errors import CheckpointError, DataError, TrainingError
from imaginaire.training.callbacks import Callback
from tests.multiprocess import run_distributed
from tests.project import config as project
from tests.training import Edit, difference, losses, run_dir, saved, train

slow = pytest.mark.slow

STOP_AT = 5  # in the middle of a logging window and of an epoch


def compare(whole: Path, resumed: Path) -> str | None:
    """The first difference between two finished runs: every saved item, and every logged loss."""
    trees = difference(saved(whole), saved(resumed))
    if trees is not None:
        return trees
    of_both = [loss for loss in losses(resumed) if loss[0] != STOP_AT]  # a run that ends there validates there
    return None if losses(whole) == of_both else f"losses {losses(whole)} and {losses(resumed)}"


def run_whole(root: Path, overrides: list[str]) -> None:
    assert train(root, overrides) == 0


def run_in_two(root: Path, overrides: list[str], edit: Edit | None = None) -> None:
    run_whole(root, [*overrides, f"trainer.max_iter={STOP_AT}"])
    assert train(root, overrides, edit) == 0


@slow
@pytest.mark.parametrize(("ckpt_type", "num_workers"), [("standard", 2), ("dcp", 0)])
def test_one_process(tmp_path: Path, ckpt_type: str, num_workers: int) -> None:
    options = [f"ckpt_type={ckpt_type}", f"dataloader_train.num_workers={num_workers}"]
    run_whole(tmp_path / "whole", options)
    run_in_two(tmp_path / "parts", options)
    assert compare(tmp_path / "whole", tmp_path / "parts") is None
    assert len(losses(tmp_path / "whole")) == 5 + 4, "training losses every 2, validation at 0, 4, 8 and 11"
    assert [iteration for iteration, _ in losses(tmp_path / "parts")].count(STOP_AT) == 1, "its end is validated"


SHORT = ["dataloader_train.num_workers=0", "trainer.run_validation=False", "trainer.max_iter=8"]
FSDP = ["trainer.distributed_parallelism=fsdp", "model.fsdp_shard_size=2", *SHORT]
LAYOUTS = {
    "replicate": ["dataloader_train.num_workers=0"],
    "fsdp": FSDP,
    "fsdp_dcp": [*FSDP, "ckpt_type=dcp"],
    "async_dcp": ["ckpt_type=dcp", "checkpoint.dcp_async_mode_enabled=True", *SHORT],
}


def _two_ranks(root: Path, layouts: list[str]) -> None:
    for layout in layouts:
        run_whole(root / layout / "whole", LAYOUTS[layout])
        run_in_two(root / layout / "parts", LAYOUTS[layout])
    if "async_dcp" in layouts:
        run_in_two(root / "wrong_rng", LAYOUTS["async_dcp"], _other_rng_on_rank_1)


def _other_rng_on_rank_1(kind: str, tree: Any) -> Any:
    if kind == "trainer":
        tree = copy.copy(tree)
        tree["rng"] = [tree["rng"][0], tree["rng"][0]]
    return tree


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(["replicate", "fsdp"], marks=slow), pytest.param(["fsdp_dcp", "async_dcp"], marks=pytest.mark.long)],
)
def test_two_processes(tmp_path: Path, layouts: list[str]) -> None:
    run_distributed(_two_ranks, 2, args=(tmp_path, layouts))
    for layout in layouts:
        assert compare(tmp_path / layout / "whole", tmp_path / layout / "parts") is None, layout
    if "async_dcp" in layouts:
        different = compare(tmp_path / "async_dcp" / "whole", tmp_path / "wrong_rng")
        assert different is not None, "rank 1's generators are not needed"


def _without(item: str) -> Edit:
    def edit(kind: str, tree: Any) -> Any:
        tree = copy.copy(tree)
        if kind == "trainer" and item == "rng":
            torch.manual_seed(0)
            tree["rng"] = [{**tree["rng"][0], "torch": torch.get_rng_state()}]
        elif kind == "trainer" and item in ("rng/python", "rng/numpy"):
            which = item.split("/")[1]
            other = {"python": (3, (1, *tree["rng"][0]["python"][1][1:]), None)}
            name, keys, _, has_gauss, cached = tree["rng"][0]["numpy"]
            other["numpy"] = [name, keys.flip(0), 0, has_gauss, cached]  # type: ignore[assignment]
            tree["rng"] = [{**tree["rng"][0], which: other[which]}]
        elif kind == "trainer" and item == "position":
            tree["data"] = {**tree["data"], "samples_seen": 0}
        elif kind == "trainer" and item == "iteration":
            tree["iteration"] -= 1
        elif kind == "trainer" and item == "callback":
            states = tree["callbacks"][0]
            tree["callbacks"] = [{**states, "sway": {"calls": 0}}]
        elif kind == "trainer" and item == "loss window":
            tree["callbacks"] = [{n: s for n, s in tree["callbacks"][0].items() if n != "loss_log"}]
        elif kind == "scheduler" and item == "scheduler":
            tree["last_epoch"] = 0
        elif kind == "optim" and item in ("master", "exp_avg", "exp_avg_sq", "step"):
            state = {}
            for name, values in tree["state"].items():
                values = dict(values)
                if item == "master":
                    del values["master"]
                else:
                    values[item] = torch.zeros_like(values[item])
                state[name] = values
            tree["state"] = state
        elif kind == "model" and item == "ema":
            tree = {n: (tree[f"net.{n[8:]}"].float() if n.startswith("net_ema.") else v) for n, v in tree.items()}
        return tree

    return edit


@pytest.mark.long
def test_nothing_that_is_saved_can_be_left_out(tmp_path: Path) -> None:
    run_whole(tmp_path / "whole", [])
    items = ["rng", "rng/python", "rng/numpy", "position", "iteration", "callback", "loss window", "scheduler"]
    items += ["master", "exp_avg", "exp_avg_sq", "step", "ema"]
    not_noticed = []
    for item in items:
        root = tmp_path / item.replace("/", "_")
        try:
            run_in_two(root, [], _without(item))
        except CheckpointError:
            continue  # refused: noticed even earlier
        if compare(tmp_path / "whole", root) is None:
            not_noticed.append(item)
    assert not_noticed == []


def _resize(root: Path, stop_at: int | None) -> list[int]:
    """Train, and tell which samples this rank read, by their positions."""
    positions: list[int] = []
    original = project.RestlessModel.training_step

    def noting(self: Any, batch: Any, iteration: int) -> Any:
        if self.training:
            positions.extend(batch["sample_position"].tolist())
        return original(self, batch, iteration)

    end = [] if stop_at is None else [f"trainer.max_iter={stop_at}"]
    with mock.patch.object(project.RestlessModel, "training_step", noting):
        train(root, ["dataloader_train.num_workers=0", *end])
    return positions


@slow
def test_another_number_of_processes_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    worlds = [1, 2, 1]
    stops = [3, 6, None]
    seen: list[int] = []
    for world, stop_at in zip(worlds, stops, strict=True):
        parts = run_distributed(_resize, world, args=(tmp_path, stop_at)) if world > 1 else [_resize(tmp_path, stop_at)]
        seen += [position for part in parts for position in part]
    assert sorted(seen) == list(range(len(seen))), "a sample was lost or repeated"
    assert len(seen) == 4 * (3 + 2 * 3 + 5) == saved(tmp_path)["trainer"]["samples_seen"]
    log = (tmp_path / "tests/engine/restless/stdout.log").read_text()
    for before, after in pairwise(worlds):
        assert f"written by {before} processes, this run has {after}" in log
    assert distributed.world_size() == 1


HERE = "tests.imaginaire.training.test_resume"
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
