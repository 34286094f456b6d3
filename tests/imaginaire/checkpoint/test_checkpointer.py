# SPDX-License-Identifier: Apache-2.0
"""Loading by the rules, damage that is named, retention, and saves that fail."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import tests.project.config as project
from imaginaire import storage
from imaginaire.checkpoint import checkpointer
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS, CheckpointSet, own_set
from imaginaire.errors import CheckpointError, ConfigError, TrainingError
from imaginaire.training.callbacks import Callback
from scripts.convert import convert
from tests.training import difference, run_dir, saved, train

pytestmark = pytest.mark.slow

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "trainer.max_iter=6"]
QUICK += ["checkpoint.save_iter=2", "checkpoint.keep_last=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations with complete sets at 2, 4 and 6."""
    root = tmp_path_factory.mktemp("finished")
    assert train(root, QUICK) == 0
    return root


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def checkpoints(root: Path) -> Path:
    return run_dir(root) / "checkpoints"


def pointed(root: Path) -> str:
    return (checkpoints(root) / "latest_checkpoint.txt").read_text().strip()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def mix(path: Path) -> None:
    shutil.copy(path.with_name("iter_000000004.pt"), path)


@pytest.mark.parametrize("dcp", [False, True])
def test_damage_of_each_file_is_named_with_the_newest_complete_set(copy: Path, tmp_path: Path, dcp: bool) -> None:
    folder, names = checkpoints(copy), [f"iter_{i:09d}" + ("" if dcp else ".pt") for i in (6, 4)]
    files = [folder / kind / names[0] for kind in KINDS]
    damages: list[Callable[[Path], Any]] = [truncate, Path.unlink]
    if dcp:
        folder = tmp_path / "dcp/checkpoints"
        for iteration in (4, 6):
            convert(str(checkpoints(copy) / f"model/iter_{iteration:09d}.pt"), str(folder.parent), "dcp")
        files = [folder / names[0] / kind / name for kind in KINDS for name in ("__0_0.distcp", ".metadata")]
    else:
        damages.append(mix)
    for path in files:
        intact = path.read_bytes()
        for damage in damages:
            damage(path)
            with pytest.raises(CheckpointError) as caught:
                own_set(str(folder), KINDS, fallback=False)
            message = str(caught.value)
            assert str(path.parent if dcp else path) in message, message
            assert names[1] in message and "checkpoint.fallback=True" in message
            path.write_bytes(intact)
    assert own_set(str(folder), KINDS, fallback=False) == CheckpointSet(str(folder), names[0])


def test_fallback_goes_on_from_the_set_before_and_ends_equal(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(checkpoints(copy) / "optim" / "iter_000000006.pt")
    write, named = checkpoint_layout.write_standard, []

    def noted(saved: CheckpointSet, trees: Any) -> None:
        named.append((saved.name, pointed(copy)))
        write(saved, trees)

    monkeypatch.setattr(checkpoint_layout, "write_standard", noted)
    assert train(copy, [*QUICK, "trainer.max_iter=8", "checkpoint.fallback=True"]) == 0
    names = [f"iter_{i:09d}.pt" for i in (4, 6, 8)]
    assert named == [(names[1], names[0]), (names[2], names[1])]  # never the set that is being written
    assert train(tmp_path / "whole", [*QUICK, "trainer.max_iter=8"]) == 0
    assert difference(saved(copy), saved(tmp_path / "whole")) is None


def test_a_pointer_that_names_no_set_is_named(copy: Path) -> None:
    pointer, choose = checkpoints(copy) / "latest_checkpoint.txt", partial(own_set, str(checkpoints(copy)), KINDS)
    texts = {"": "holds ''", "iter_000000009.pt\n": "iter_000000009.pt is missing", "garbage": "holds 'garbage'"}
    for text, expected in texts.items():
        pointer.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{expected}.*iter_000000006\.pt"):
            choose(fallback=False)
    pointer.unlink()
    assert train(copy, [*QUICK, "trainer.max_iter=8"]) == 0
    assert "resumed from iter 6" in (run_dir(copy) / "stdout.log").read_text()
    for iteration in (4, 6, 8):
        truncate(checkpoints(copy) / "model" / f"iter_{iteration:09d}.pt")
    with pytest.raises(CheckpointError, match="holds no other complete set"):
        train(copy, [*QUICK, "trainer.max_iter=9"])


def test_files_open_with_weights_only_and_have_the_documented_names(finished: Path) -> None:
    folder = checkpoints(finished)
    assert (folder / "latest_checkpoint.txt").read_text() == "iter_000000006.pt\n"
    for kind in KINDS:
        assert sorted(path.name for path in (folder / kind).iterdir()) == [f"iter_{i:09d}.pt" for i in (2, 4, 6)]
        torch.load(folder / kind / "iter_000000006.pt", weights_only=True)
    weights = torch.load(folder / "model/iter_000000006.pt", weights_only=True)
    assert weights["net.head.weight"].dtype == torch.bfloat16
    assert weights["net_ema.head.weight"].dtype == torch.float32
    optimizer = torch.load(folder / "optim/iter_000000006.pt", weights_only=True)
    assert optimizer["state"]["net.head.weight"]["master"].dtype == torch.float32


# --- where a run starts


def test_load_path_takes_weights_alone_and_the_run_itself_comes_first(finished: Path, tmp_path: Path) -> None:
    path = checkpoints(finished) / "model/iter_000000006.pt"
    source = [*QUICK, f"checkpoint.load_path={path}"]
    assert train(tmp_path, [*source, "trainer.max_iter=2", "optimizer.lr=1e-12"]) == 0
    start, now = torch.load(path), saved(tmp_path)["model"]
    assert difference(start["net.head.weight"], now["net.head.weight"]) is None
    assert now["net_ema.head.weight"].equal(start["net.head.weight"].float()), "a new average begins as the weights"
    assert saved(tmp_path)["trainer"]["iteration"] == 2
    assert train(tmp_path, [*source, "trainer.max_iter=4"]) == 0
    assert "resumed from iter 2" in (run_dir(tmp_path) / "stdout.log").read_text()


def test_load_training_state_goes_on_from_another_run(finished: Path, tmp_path: Path) -> None:
    more = [*QUICK, "trainer.max_iter=8"]
    shutil.copytree(finished, tmp_path / "same")
    assert train(tmp_path / "same", more) == 0
    theirs = checkpoints(Path(shutil.copytree(finished, tmp_path / "theirs")))
    trainer = torch.load(theirs / "trainer/iter_000000006.pt")
    trainer["metrics"]["wandb_run_id"] = "theirs"  # which is not gone on with
    torch.save(trainer, theirs / "trainer/iter_000000006.pt")
    other = [f"checkpoint.load_path={theirs}/model/iter_000000006.pt", "checkpoint.load_training_state=True"]
    assert train(tmp_path / "other", [*more, *other]) == 0
    assert difference(saved(tmp_path / "same"), saved(tmp_path / "other")) is None


def test_only_load_scheduler_state_takes_the_step_count(finished: Path, tmp_path: Path) -> None:
    source = [f"checkpoint.load_path={run_dir(finished)}", "checkpoint.only_load_scheduler_state=True"]
    assert train(tmp_path, [*QUICK, *source, "trainer.max_iter=7"]) == 0
    trees = saved(tmp_path)
    assert trees["scheduler"]["last_epoch"] == 7
    assert {int(values["step"]) for values in trees["optim"]["state"].values()} == {1}


def test_load_ema_to_reg_starts_from_the_average(finished: Path, tmp_path: Path) -> None:
    path = checkpoints(finished) / "model/iter_000000006.pt"
    more = [*QUICK, "trainer.max_iter=2", "optimizer.lr=1e-12", f"checkpoint.load_path={path}"]
    assert train(tmp_path, [*more, "checkpoint.load_ema_to_reg=True"]) == 0
    average = torch.load(path)["net_ema.head.weight"]
    assert saved(tmp_path)["model"]["net.head.weight"].equal(average.bfloat16())
    more += ["checkpoint.load_training_state=True", "trainer.max_iter=8"]  # whose masters are of other weights
    assert train(tmp_path / "on", [*more, "checkpoint.load_ema_to_reg=True"]) == 0
    assert saved(tmp_path / "on")["model"]["net.head.weight"].equal(average.bfloat16())


def test_the_average_comes_with_what_else_a_file_says() -> None:
    source = {name: torch.full((1,), i) for i, name in enumerate(("net.w", "net_ema.w", "action_transform", "other"))}
    found = checkpointer._average_as_weights(source, "x")
    assert {name: int(found[name]) for name in found} == {"net.w": 1, "net_ema.w": 1, "action_transform": 2}


def test_keys_not_to_resume_starts_them_anew_and_refuses_unknown_ones(copy: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys_not_to_resume has 'optimizer'. Did you mean optim"):
        train(copy, [*QUICK, "trainer.max_iter=8", "checkpoint.keys_not_to_resume=[optimizer]"])
    assert train(copy, [*QUICK, "trainer.max_iter=8", "checkpoint.keys_not_to_resume=[optim,scheduler]"]) == 0
    trees = saved(copy)
    assert trees["trainer"]["iteration"] == 8
    assert trees["scheduler"]["last_epoch"] == 2
    assert {int(values["step"]) for values in trees["optim"]["state"].values()} == {2}


def test_weights_that_do_not_fit_are_listed_by_name_unless_allowed(copy: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    weights = torch.load(checkpoints(copy) / "model/iter_000000006.pt")
    weights = {name: value for name, value in weights.items() if not name.startswith("net_ema.")}
    del weights["net.head.bias"]
    weights["net.other"] = torch.zeros(3)
    weights["net.head.weight"] = torch.zeros(2, 2)
    torch.save(weights, path)
    source = [*QUICK, f"checkpoint.load_path={path}", "trainer.max_iter=2"]
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "strict", source)
    for name in ("net.head.bias", "net.other", "net.head.weight"):
        assert name in str(caught.value)
    allowed = ["'checkpoint.allow_missing=[\"*head.bias\"]'", "'checkpoint.allow_unexpected=[\"net.other\"]'"]
    allowed = [item.strip("'") for item in allowed] + ["checkpoint.dcp_allow_mismatched_size=True"]
    assert train(tmp_path / "allowed", [*source, *allowed]) == 0
    assert train(tmp_path / "loose", [*source, "checkpoint.strict_resume=False"]) == 0


def test_a_path_that_is_not_there_is_an_error_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.load_path: /nowhere/x.pt does not exist"):
        train(tmp_path, [*QUICK, "checkpoint.load_path=/nowhere/x.pt"])
    with pytest.raises(CheckpointError, match="holds no training state"):
        train(tmp_path, [*QUICK, f"checkpoint.load_path={tmp_path}", "checkpoint.load_training_state=True"])


# --- what stays


def iterations(root: Path, kind: str) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (checkpoints(root) / kind).iterdir())


def test_retention(tmp_path: Path) -> None:
    base = [item for item in QUICK if "keep_last" not in item and "max_iter" not in item]
    assert train(tmp_path / "default", [*base, "trainer.max_iter=4"]) == 0
    for kind in ("trainer", "optim"):  # to save space, say: no weights go with them
        (checkpoints(tmp_path / "default") / kind / "iter_000000002.pt").unlink()
    base += ["trainer.max_iter=10"]
    assert train(tmp_path / "default", base) == 0
    assert iterations(tmp_path / "default", "model") == [2, 4, 6, 8, 10]
    assert iterations(tmp_path / "default", "optim") == [8, 10]
    assert train(tmp_path / "last", [*base, "checkpoint.keep_last=2", "trainer.max_iter=8"]) == 0
    (checkpoints(tmp_path / "last") / "model/iter_000000009.pt").touch()  # of a save that was killed: none of the two
    assert train(tmp_path / "last", [*base, "checkpoint.keep_last=2"]) == 0
    assert iterations(tmp_path / "last", "model") == iterations(tmp_path / "last", "optim") == [8, 10]
    assert train(tmp_path / "every", [*base, "checkpoint.keep_last=1", "checkpoint.keep_every=4"]) == 0
    assert iterations(tmp_path / "every", "model") == [4, 8, 10]
    assert iterations(tmp_path / "every", "optim") == [10]
    assert train(tmp_path / "dcp", [*base, "checkpoint.keep_last=2", "ckpt_type=dcp"]) == 0
    assert sorted(p.name for p in checkpoints(tmp_path / "dcp").glob("iter_*")) == ["iter_000000008", "iter_000000010"]


def test_the_last_state_is_saved_once_and_a_finished_run_stays_as_it_is(finished: Path, copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in checkpoints(copy).rglob("*.pt")}
    settings = (run_dir(copy) / "config.yaml").read_text()
    for max_iter in (6, 4):
        assert train(copy, [*QUICK, f"trainer.max_iter={max_iter}"]) == 0
        assert {path: path.stat().st_mtime_ns for path in checkpoints(copy).rglob("*.pt")} == before
        said = f"nothing to do: the run's newest checkpoint is of iteration 6, and trainer.max_iter={max_iter}. "
        assert said in (run_dir(copy) / "stdout.log").read_text()
        assert (run_dir(copy) / "config.yaml").read_text() == settings


# --- saves that cannot be


def test_a_failed_write_stops_the_run_and_the_last_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = storage.create

    def full_disk(path: Any) -> Any:
        if "optim" in str(path) and "iter_000000004" in str(path):
            raise OSError(28, "No space left on device")
        return create(path)

    monkeypatch.setattr(storage, "create", full_disk)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)Saving iteration 4 to .* failed: .*optim.* was not written: the disk or quota is full",
    ):
        train(tmp_path, QUICK)
    monkeypatch.undo()
    assert pointed(tmp_path) == "iter_000000002.pt"
    assert train(tmp_path, QUICK) == 0


def test_a_set_that_cannot_be_read_back_is_not_pointed_to(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_layout.write_standard

    def torn(saved: CheckpointSet, trees: Any) -> None:
        write(saved, trees)
        truncate(Path(saved.path("optim")))

    monkeypatch.setattr(checkpoint_layout, "write_standard", torn)
    with pytest.raises(CheckpointError, match=r"cannot be read back: .*optim/iter_000000008\.pt"):
        train(copy, [*QUICK, "trainer.max_iter=8"])
    assert pointed(copy) == "iter_000000006.pt"


@pytest.mark.parametrize("ckpt_type", ["standard", "dcp"])
def test_weights_that_are_not_finite_are_not_saved(copy: Path, ckpt_type: str) -> None:
    """A rate beyond float32 leaves finite losses and gradients in the step that breaks the weights."""
    with pytest.raises(TrainingError) as caught:
        train(copy, [*QUICK, "trainer.max_iter=7", "optimizer.lr=1e39", f"ckpt_type={ckpt_type}"])
    message = str(caught.value)
    assert "Iteration 7 is not saved: " in message and "net.embed.weight" in message
    assert str(checkpoints(copy) / "model/iter_000000006.pt") in message
    assert saved(copy)["trainer"]["iteration"] == 6 and not [*checkpoints(copy).rglob("*iter_000000007*")]
    assert train(copy, [*QUICK, "trainer.max_iter=7", f"ckpt_type={ckpt_type}"]) == 0, "the same run goes on"


def test_too_little_memory_or_disk_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "host_memory_available", lambda: 1000)
    with pytest.raises(ConfigError, match="ckpt_type=dcp"):
        train(tmp_path, QUICK)
    assert train(tmp_path / "dcp", [*QUICK, "ckpt_type=dcp"]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(storage, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"needs .* but .* free.*IMAGINAIRE_OUTPUT_ROOT"):
        train(tmp_path, QUICK)


# --- other layouts and places


def test_convert_there_and_back_is_exact_and_resumes(finished: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    for root in (there, back):
        run_dir(root).mkdir(parents=True)
    convert(str(run_dir(finished)), str(run_dir(there)), "dcp")
    convert(str(run_dir(there)), str(run_dir(back)), "standard")
    assert difference(saved(finished), saved(there)) is None
    assert difference(saved(finished), saved(back)) is None
    whole = tmp_path / "whole"
    shutil.copytree(finished, whole)
    more = [*QUICK, "trainer.max_iter=8"]
    assert train(whole, more) == train(there, [*more, "ckpt_type=dcp"]) == train(back, more) == 0
    assert difference(saved(whole), saved(there)) is None
    assert difference(saved(whole), saved(back)) is None
    with pytest.raises(CheckpointError, match="already has"):
        convert(str(run_dir(finished)), str(run_dir(there)), "dcp")
    with pytest.raises(CheckpointError, match="holds no training state"):
        convert(str(tmp_path / "nothing"), str(there), "dcp")


def test_a_run_with_the_other_type_goes_on_from_what_is_there(copy: Path) -> None:
    assert train(copy, [*QUICK, "trainer.max_iter=8", "ckpt_type=dcp"]) == 0
    assert (checkpoints(copy) / "latest_checkpoint.txt").read_text() == "iter_000000008\n"
    assert checkpoint_layout.newest_complete(str(checkpoints(copy))).iteration == 8  # type: ignore[union-attr]


# --- what a review broke once


def test_load_ema_to_reg_says_where_a_run_starts_and_not_how_it_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path / "first", [*QUICK, "trainer.max_iter=1"]) == 0
    more = [*QUICK, "checkpoint.load_ema_to_reg=True", f"checkpoint.load_path={run_dir(tmp_path / 'first')}"]
    assert train(tmp_path / "whole", more) == 0
    assert train(tmp_path / "parts", [*more, "trainer.max_iter=3"]) == 0
    assert train(tmp_path / "parts", more) == 0
    assert difference(saved(tmp_path / "whole"), saved(tmp_path / "parts")) is None


class NumpyState(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"mean": numpy.float64(1.0)}


def test_callback_state_that_no_file_can_hold_is_said_before_the_first_step(tmp_path: Path) -> None:
    node = "+trainer.callbacks.mean={_target_: tests.imaginaire.checkpoint.test_checkpointer.NumpyState}"
    with pytest.raises(CheckpointError, match=r"callbacks.mean.mean is a numpy.float64.*float\(x\)"):
        train(tmp_path, [*QUICK, node])


def test_a_second_signal_does_not_cut_the_last_save_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = storage.create

    def slow(path: Any) -> Any:
        if "iter_000000006" in str(path):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return create(path)

    monkeypatch.setattr(storage, "create", slow)
    train(tmp_path, [*QUICK, "checkpoint.save_iter=1000"])
    assert saved(tmp_path)["trainer"]["iteration"] == 6


def test_an_error_in_the_run_leaves_only_whole_sets_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write that is under way when training fails is finished (standard) or not published (dcp)."""
    create = storage.create
    fails = [*QUICK, "model._target_=tests.imaginaire.checkpoint.test_checkpointer.FailsLater", "trainer.max_iter=20"]
    fails += ["checkpoint.dcp_async_mode_enabled=True"]
    for ckpt_type in ("standard", "dcp"):
        root = tmp_path / ckpt_type
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(storage, "create", lambda path: (time.sleep(0.2), create(path))[1])
            train(root, [*fails, f"ckpt_type={ckpt_type}"])
        assert train(root, [*QUICK, f"ckpt_type={ckpt_type}", "trainer.max_iter=8"]) == 0


class FailsLater(project.RestlessModel):
    def training_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 4:
            raise ZeroDivisionError
        return super().training_step(batch, iteration)
