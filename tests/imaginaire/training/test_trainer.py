# SPDX-License-Identifier: Apache-2.0
"""The loop: order of hooks, accumulation, precision, what is not finite, what hangs, what runs out."""

import copy
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.project.config as project
from cosmos_predict2.world_model.assembly import check_parts
from imaginaire.config import compose
from imaginaire.data.facts import facts_of
from imaginaire.distributed.places import EXIT_INTERRUPTED, EXIT_TIMEOUT
from imaginaire.errors import CheckpointError, ConfigError, DataError, TrainingError
from imaginaire.findings import CheckContext, Finding, error, warning
from imaginaire.training import preflight, trainer
from imaginaire.training.callbacks import Callback
from imaginaire.training.callbacks.base import HOOKS
from imaginaire.training.model import ImaginaireModel
from tests.multiprocess import Process
from tests.programs import HANG_S
from tests.training import difference, losses, records, run_dir, saved, train

pytestmark = pytest.mark.slow

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "trainer.max_iter=4"]


class Recorder(Callback):
    seen: list[tuple[str, int | None]] = []
    has_graph: set[tuple[str, bool]] = set()  # of a loss that a hook got


def _recording(hook: str) -> Any:
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        iterations = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
        Recorder.seen.append((hook, iterations[0] if iterations else None))
        losses = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and "training_step" in hook]
        Recorder.has_graph.update((hook, loss.requires_grad) for loss in losses)

    return note


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook))


RECORD = "+trainer.callbacks.recorder={_target_: tests.imaginaire.training.test_trainer.Recorder}"


def test_hooks_come_in_the_documented_order(tmp_path: Path) -> None:
    Recorder.seen.clear()
    overrides = ["trainer.max_iter=2", "dataloader_train.num_workers=0", "trainer.validation_iter=2"]
    train(tmp_path, [*overrides, "trainer.max_val_iter=1", RECORD])
    seen = [entry for entry in Recorder.seen if entry[0] != "on_save_checkpoint_success"]
    validation = "validation_start validation_step_start validation_step_end validation_end "
    micro = "before_dataloading after_dataloading training_step_start training_step_batch_start "
    micro += "before_forward after_forward before_backward after_backward "
    step = f"{micro} training_step_batch_end {micro} before_optimizer_step before_zero_grad "
    step += "training_step_batch_end training_step_end "
    expected = "optimizer_init_start optimizer_init_end load_checkpoint_start load_checkpoint_end train_start "
    expected += validation + 2 * step + validation
    expected += "save_checkpoint_start save_checkpoint save_checkpoint_end train_end app_end"
    assert [name for name, _ in seen] == [f"on_{name}" for name in expected.split()]
    ends = [iteration for name, iteration in seen if name == "on_training_step_end"]
    inside = [iteration for name, iteration in seen if name == "on_before_optimizer_step"]
    assert ends == [1, 2] and inside == [0, 1]
    assert Recorder.has_graph == {("on_training_step_end", False), ("on_training_step_batch_end", False)}
    assert ("on_save_checkpoint_success", 2) in Recorder.seen
    Recorder.seen.clear()
    train(tmp_path, [*overrides, "trainer.max_iter=3", RECORD])
    loading = [name for name, _ in Recorder.seen if "load_checkpoint" in name]
    assert loading == ["on_load_checkpoint_start", "on_load_checkpoint", "on_load_checkpoint_end"]


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.long), "bfloat16", "float16"])
def test_each_precision_learns(tmp_path: Path, precision: str) -> None:
    overrides = ["model._target_=examples.minimal.model.MinimalModel", f"model.precision={precision}", *QUICK]
    overrides += ["trainer.max_iter=40", "dataloader_train.batch_size=16", "~trainer.callbacks.sway", "model.width=32"]
    if precision == "float16":
        with pytest.raises(ConfigError, match=r"float16.*grad_scaler_args.enabled=True"):
            train(tmp_path, overrides)
        overrides.append("trainer.grad_scaler_args={enabled: True, init_scale: 1024.0}")
    train(tmp_path, overrides)
    values = [value for _, value in losses(tmp_path)]
    assert values[-1] < values[0] / 10
    trees = saved(tmp_path)
    kept = torch.bfloat16 if precision == "bfloat16" else torch.float32  # float16 is autocast over float32 weights
    assert trees["model"]["net.head.weight"].dtype == kept
    assert ("master" in trees["optim"]["state"]["net.head.weight"]) == (precision == "bfloat16")
    assert bool(trees["trainer"]["grad_scaler"]) == (precision == "float16")


def test_an_overflow_in_float16_lowers_the_scale_and_leaves_the_step_out(tmp_path: Path) -> None:
    overrides = [*QUICK, "model.precision=float16", "trainer.grad_scaler_args={enabled: True, init_scale: 1.0e+9}"]
    train(tmp_path, [*overrides, "trainer.max_non_finite=200", "trainer.max_iter=30"])
    trees = saved(tmp_path)
    assert trees["trainer"]["grad_scaler"]["scale"] < 1e9
    skipped = trees["trainer"]["skipped_steps"]
    assert 0 < skipped < 30
    assert trees["scheduler"]["last_epoch"] == 30 - skipped


# --- not finite


EXPLODE = ["model._target_=tests.project.config.Explosive", *QUICK, "trainer.max_iter=8"]


def test_a_loss_that_is_not_finite_stops_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project.Explosive, "bad", (3,))
    with pytest.raises(TrainingError) as caught:
        train(tmp_path, EXPLODE)
    message = str(caught.value)
    assert "stopped at iteration 3" in message and "the loss is inf" in message
    assert "non-finite gradients" in message and "trainer.non_finite=skip" in message


def test_the_losses_of_all_micro_batches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project.Explosive, "bad", ())
    losses: list[float] = []
    given = iter([1.0, math.inf, 1.0, 1.0])
    compute = project.Explosive.training_step

    def step(model: Any, *arguments: Any) -> Any:
        output, loss = compute(model, *arguments)
        losses.append(next(given))
        return output, loss * losses[-1]

    monkeypatch.setattr(project.Explosive, "training_step", step)
    with pytest.raises(TrainingError, match=r"stopped at iteration 1 .*the loss is inf"):
        train(tmp_path, [*EXPLODE, "trainer.grad_accum_iter=4"])
    assert len(losses) == 4


_SCALED = ["model.precision=float16", "trainer.grad_scaler_args={enabled: True, init_scale: 1024.0}"]


@pytest.mark.parametrize("scaler", [[], _SCALED])
def test_such_a_step_is_left_out_and_counted_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaler: list[str]
) -> None:
    monkeypatch.setattr(project.Explosive, "bad", (3, 4))
    train(tmp_path, [*EXPLODE, *scaler, "trainer.non_finite=skip"])
    trees = saved(tmp_path)
    assert trees["trainer"]["skipped_steps"] == 2
    assert trees["scheduler"]["last_epoch"] == 6
    assert all(torch.isfinite(value).all() for value in trees["model"].values())
    assert max(record.get("train/skipped_steps", 0) for record in records(tmp_path)) == 2


def test_too_many_in_a_row_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project.Explosive, "bad", (2, 3, 4, 5))
    skip = [*EXPLODE, "trainer.non_finite=skip", "trainer.max_non_finite=3"]
    train(tmp_path, [*skip, "trainer.max_iter=3"])
    with pytest.raises(TrainingError, match="4 steps in a row were skipped"):  # also where it went on in between
        train(tmp_path, skip)
    monkeypatch.setattr(project.Explosive, "bad", (1, 3, 5, 7))  # as many, but not in a row
    train(tmp_path / "apart", skip)


# --- validation


def test_validation_changes_nothing_in_training(tmp_path: Path) -> None:
    train(tmp_path / "without", [*QUICK])
    train(tmp_path / "with", [*QUICK, "trainer.run_validation=True", "trainer.validation_iter=1"])
    assert difference(saved(tmp_path / "without"), saved(tmp_path / "with")) is None


def test_a_run_validates_before_its_first_iteration_unless_it_is_told_not_to(tmp_path: Path) -> None:
    for option, expected in ((True, [0, 2]), (False, [2])):
        options = ["trainer.run_validation=True", f"trainer.validate_at_start={option}", "trainer.max_iter=2"]
        train(tmp_path / str(option), [*QUICK, *options])
        found = [record["iteration"] for record in records(tmp_path / str(option)) if "val/loss" in record]
        assert found == expected


class Watching(project.RestlessModel):
    modes: list[tuple[bool, bool]] = []
    weights: list[tuple[torch.Tensor, torch.Tensor]] = []
    is_copied: list[bool] = []  # the average is what the weights are

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.frozen = torch.nn.Dropout().eval()

    def training_step(self, batch: Any, iteration: int) -> Any:
        self.modes.append((self.training, self.frozen.training))
        return super().training_step(batch, iteration)

    def validation_step(self, batch: Any, iteration: int) -> Any:
        assert self.ema is not None
        weight, averaged = self.net.head.weight, self.ema.shadows["head.weight"]
        self.weights.append((weight.float(), averaged.bfloat16().float()))
        return self.training_step(batch, iteration)

    def on_before_zero_grad(self, *args: Any) -> None:
        super().on_before_zero_grad(*args)
        assert self.ema is not None
        weight, averaged = self.net.head.weight, self.ema.shadows["head.weight"]
        self.is_copied.append(averaged.equal(weight.float()))
        averaged.add_(1.0)  # after so few steps it is all but the weights


def test_validation_keeps_frozen_parts_in_their_mode_and_uses_averaged_weights(tmp_path: Path) -> None:
    overrides = [f"model._target_={__name__}.Watching", "dataloader_train.num_workers=0"]
    overrides.append("scheduler.f_start=[1.0]")  # so that the first step moves the weights
    train(tmp_path, [*overrides, "trainer.max_iter=3", "trainer.validation_iter=2"])
    assert set(Watching.modes) == {(True, False), (False, False)}
    assert len(Watching.weights) == 6, "at 0, at 2, and at the end"
    assert all(used.equal(averaged) for used, averaged in Watching.weights)
    assert Watching.is_copied == [True, False, False], "the average begins at the weights of the first step"


# --- what cannot start


class Missing(torch.utils.data.Dataset[int]):
    @classmethod
    def check(cls, arguments: Any, context: CheckContext) -> Iterator[Finding]:
        if not Path(arguments["folder"]).exists():
            yield error(context.key, f"the folder {arguments['folder']} does not exist")

    def __init__(self, folder: str, **others: Any) -> None:
        raise AssertionError("built in spite of its check")


class NoBatches(project.RestlessModel):
    def train_batches(self, dataloader: Any) -> Any:
        return iter(())


class RefusedByService(project.RestlessModel):
    def train_batches(self, dataloader: Any) -> Any:
        raise ConfigError("The service has no such reward.")


class RefusedLater(project.RestlessModel):
    def training_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 3:
            raise ConfigError("The service is gone.")
        return super().training_step(batch, iteration)


class WithoutStep(ImaginaireModel):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()


class CheckedWaves(project.Waves):
    check, facts = True, ["waves"]  # its own, and neither a check of arguments nor facts that a class gives


def test_a_member_that_is_no_check_is_none() -> None:
    data = f"dataloader_train.dataset._target_={__name__}.CheckedWaves"
    config = compose.compose("tests/project/config.py", ["experiment=restless", data])
    assert preflight.findings(config) == []
    assert facts_of(config.dataloader_train.dataset).kind == "CheckedWaves"
    check_parts(None, "", [config.dataloader_train.dataset])


class Unreadable(project.Waves):
    def __init__(self, **arguments: Any) -> None:
        Path("/no/such/file").read_text()


_OF_A_LOADER = ("batch_size", "num_workers", "shuffle", "pin_memory", "timeout", "prefetch_factor", "collate_fn")
_OF_A_MODEL = ("width", "window", "depth", "dropout", "precision", "ema_rate", "fsdp_shard_size")
_LINEAR = ["model._target_=torch.nn.Linear", "+model.in_features=1", "+model.out_features=1"]
_WAVES = ["dataloader_train._target_=examples.minimal.data.Waves", "~dataloader_train.dataset"]
_UNREADABLE = [f"dataloader_train.dataset._target_={__name__}.Unreadable"]
_MISSING = [f"dataloader_train.dataset._target_={__name__}.Missing", "+dataloader_train.dataset.folder=/no/such/folder"]


@pytest.mark.parametrize(
    ("overrides", "kind", "named"),
    [
        (["~dataloader_val"], ConfigError, "dataloader_val"),
        (["~dataloader_train"], ConfigError, "(?s)dataloader_train.*restless"),
        (["model_parallel.context_parallel_size=2"], ConfigError, "context_parallel_size=2"),
        ([*_LINEAR, *(f"~model.{name}" for name in _OF_A_MODEL)], ConfigError, "model: Linear"),
        ([f"model._target_={__name__}.WithoutStep"], ConfigError, "model: WithoutStep"),
        ([*_WAVES, *(f"~dataloader_train.{name}" for name in _OF_A_LOADER)], ConfigError, "dataloader_train .*Waves"),
        (_UNREADABLE, ConfigError, "dataloader_train.dataset: .*FileNot"),
        (["+trainer.callbacks.loss_log.logging_iter_multipler=0"], ConfigError, "loss_log.logging_iter_multipler"),
        (_MISSING, DataError, "dataloader_train.dataset: .*/no/such/folder"),
        ([f"model._target_={__name__}.NoBatches", *QUICK], DataError, "NoBatches"),
        ([f"model._target_={__name__}.RefusedByService", *QUICK], ConfigError, "no such reward"),
    ],
)
def test_a_refused_start_names_its_key_and_leaves_no_folder(
    tmp_path: Path, overrides: list[str], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        train(tmp_path, overrides)
    assert named == "NoBatches" or not any(tmp_path.iterdir()), "the folder of a run that never was"


def test_a_run_that_is_refused_on_its_way_keeps_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is gone"):
        train(tmp_path, [f"model._target_={__name__}.RefusedLater", *QUICK, "checkpoint.save_iter=2"])
    assert (run_dir(tmp_path) / "checkpoints/model/iter_000000002.pt").exists()


_loaded: list[str] = []


class Noted(project.RestlessModel):
    @classmethod
    def check(cls, arguments: Any, context: CheckContext) -> Iterator[Finding]:
        data = context.training.values()
        assert any("Waves" in str(node["_target_"]) and node["length"] == 60 for node in data), data
        yield from [warning(context.key, "this is known")] * 2
        if (path := context.start_path or "").startswith("hf://"):
            yield error("checkpoint.load_path", f"{path} is of another model")
        if context.config.trainer.max_iter == 6:
            yield error("trainer.max_iter", "6 is of no use")

    def on_load_path(self, path: str) -> None:
        _loaded.append(path)


def test_a_note_is_a_warning_once_and_weights_that_do_not_fit_stop_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [f"model._target_={__name__}.Noted", *QUICK]
    with pytest.raises(ConfigError, match=r"checkpoint.load_path: hf://a/b is of another model") as caught:
        train(tmp_path, [*options, "checkpoint.load_path=hf://a/b"])
    assert "this is known" not in str(caught.value)
    assert capfd.readouterr().err.count("model: this is known") == 1
    assert train(tmp_path, options) == 0
    path = str(run_dir(tmp_path) / "checkpoints" / "model" / "iter_000000004.pt")
    _loaded.clear()
    assert train(tmp_path, [*options, "job.name=next", f"checkpoint.load_path={path}"]) == 0
    assert _loaded == [path]
    options += ["job.name=next", "dataloader_train.batch_size=3", "trainer.max_iter=5"]
    assert train(tmp_path, [*options, "checkpoint.load_path=hf://a/b"]) == 0, "it resumes its own"
    assert _loaded == [path]
    own_log = (run_dir(tmp_path, "next") / "stdout.log").read_text()
    assert own_log.count("model: this is known") == 2, "once a start, though said before there is a run folder"
    assert "other settings than it was trained with:\n  dataloader_train.batch_size: " in own_log
    with pytest.raises(ConfigError, match=r"trainer\.max_iter: 6 is of no use"):
        train(tmp_path, [*options, "trainer.max_iter=6"])  # a resumed start is checked as a first one


class Rollouts(project.RestlessModel):
    """Makes each batch in three parts, which together take longer than the watchdog waits."""

    def train_batches(self, dataloader: Any) -> Any:
        for batch in dataloader:
            for part in range(3):
                time.sleep(0.9)
                self.progress(f"rollout {part + 1} of 3")
            yield batch


def test_batches_may_take_long_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer, "_PROGRESS_S", 1.5)
    options = [f"model._target_={__name__}.Rollouts", *QUICK, "trainer.max_iter=2", "trainer.grad_accum_iter=1"]
    options += ["trainer.timeout_period=2", "trainer.callbacks.iter_speed.hit_thres=1", "trainer.logging_iter=1"]
    assert train(tmp_path, options) == 0, "the watchdog ends a process that makes no progress"
    assert "rollout 2 of 3" in caplog.text or "rollout 3 of 3" in caplog.text
    (times,) = [record for record in records(tmp_path) if "timer/train_batches" in record]
    assert times["timer/train_batches"] >= 2.7 and times["timer/data"] < times["timer/train_batches"]


def test_a_refused_start_leaves_the_config_that_was_there(tmp_path: Path) -> None:
    train(tmp_path, [*QUICK, "trainer.max_iter=2"])
    config = run_dir(tmp_path) / "config.yaml"
    before = config.read_text()
    (run_dir(tmp_path, "made") / "notes").mkdir(parents=True)  # by somebody else
    with pytest.raises(ConfigError, match="Unreadable"):
        train(tmp_path, ["job.name=made", *_UNREADABLE])
    assert (run_dir(tmp_path, "made") / "notes").is_dir()
    with pytest.raises(CheckpointError):  # weights that do not fit
        train(tmp_path, [*QUICK, "model.width=32"])
    assert config.read_text() == before


# --- what goes wrong on the way


class Hungry(project.RestlessModel):
    def training_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 1:
            torch.empty(2**60)
        return super().training_step(batch, iteration)


class HungryInItsWay(project.RestlessModel):
    memory_advice = "Imagine less at once."

    def training_step(self, batch: Any, iteration: int) -> Any:
        raise MemoryError  # of the host


@pytest.mark.parametrize(
    ("model", "advice"), [("Hungry", "dataloader_train.batch_size"), ("HungryInItsWay", "Imagine less at once")]
)
def test_out_of_memory_becomes_advice_in_keys_or_the_models_own(tmp_path: Path, model: str, advice: str) -> None:
    with pytest.raises(TrainingError, match=rf"Out of memory.*\n.*{advice}"):
        train(tmp_path, [f"model._target_={__name__}.{model}", *QUICK])


class Hanging(project.RestlessModel):
    def training_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 2:
            time.sleep(HANG_S)
        return super().training_step(batch, iteration)


def test_a_hang_ends_with_stacks_and_its_own_exit_code(tmp_path: Path) -> None:
    overrides = [f"model._target_={__name__}.Hanging", *QUICK, "trainer.timeout_period=5"]
    process = Process(train, (tmp_path, overrides))
    process.start()
    process.join(HANG_S)
    log = (run_dir(tmp_path) / "stdout.log").read_text()
    assert process.exitcode == EXIT_TIMEOUT, log[-2000:]
    assert "made no progress at: iteration 3, micro-batch 1 of 2" in log
    assert "in training_step" in (run_dir(tmp_path) / "hang" / "rank_0.txt").read_text()


# --- what is left of a run


class RecordsData(project.RestlessModel):
    def data_facts(self, data_sets: Any) -> dict[str, Any]:
        return {"data": [str(arguments["_target_"]) for arguments in data_sets]}


def test_a_run_folder_records_what_ran(tmp_path: Path) -> None:
    target = f"model._target_={__name__}.RecordsData"
    train(tmp_path, [*QUICK, target, "scheduler.cycle_lengths=[5]", "trainer.max_iter=7"])
    train(tmp_path, [*QUICK, "trainer.max_iter=9", "optimizer.lr=0.001"])
    folder = run_dir(tmp_path)
    first, second = (json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines())
    assert first["start_iteration"] == 0 and second["start_iteration"] == 7
    assert first["optimizer"] == "FusedAdamW" and first["parameters"] > 1000 and "commit" in json.dumps(first)
    assert len(first["data"]) == 2 and "data" not in second, "the loader and its data set"
    log = (folder / "stdout.log").read_text()
    assert log.count("the schedule ends after 5 steps, trainer.max_iter is 7") == 1
    assert "scheduler.cycle_lengths: [5] -> [1000]\nThe new ones count" in log
    config = compose.compose(str(folder / "config.yaml"), [])
    assert config.trainer.max_iter == 9 and config.optimizer.lr == 0.001


def test_a_copy_of_a_model_leaves_the_trainer_behind() -> None:
    model = WithoutStep()
    model.progress = lambda text: None
    assert "progress" not in vars(copy.deepcopy(model))


# --- ends


class ReportsEarly(Callback):
    def on_after_backward(self, model: Any, iteration: int = 0) -> None:
        if iteration == 1:
            self.trainer.guard.report("something early", float("nan"))


def test_a_report_before_the_optimizer_step_counts(tmp_path: Path) -> None:
    node = "+trainer.callbacks.early={_target_: tests.imaginaire.training.test_trainer.ReportsEarly}"
    train(tmp_path, [*QUICK, "trainer.non_finite=skip", node])
    assert saved(tmp_path)["trainer"]["skipped_steps"] == 1


class StopsInValidation(project.RestlessModel):
    done = False

    def validation_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 4 and not StopsInValidation.done:
            StopsInValidation.done = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_step(batch, iteration)


def test_a_validation_that_a_signal_cut_short_is_made_up_for(tmp_path: Path) -> None:
    overrides = [f"model._target_={__name__}.StopsInValidation", "dataloader_train.num_workers=0"]
    assert train(tmp_path / "parts", overrides) == EXIT_INTERRUPTED
    assert saved(tmp_path / "parts")["trainer"]["iteration"] == 4
    assert train(tmp_path / "parts", overrides) == 0
    assert train(tmp_path / "whole", overrides) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(saved(tmp_path / "parts"), saved(tmp_path / "whole")) is None


def test_weights_that_change_inside_an_autocast_are_those_that_compute() -> None:
    """As averaged weights do while a callback generates: casts of what they replaced would be used in their place."""
    model = ImaginaireModel()
    model.net, model.precision = torch.nn.Linear(4, 4, bias=False), torch.float16
    x = torch.randn(2, 4)
    with torch.no_grad(), model.autocast(torch.device("cpu")):
        before = model.net(x)
        model.net.weight.mul_(2)
        after = model.net(x)
    assert after.dtype == torch.float16
    torch.testing.assert_close(after, 2 * before)
