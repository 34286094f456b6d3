# SPDX-License-Identifier: Apache-2.0
"""The command line of training, up to the point where a run would begin."""

import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from imaginaire import log as logs
from imaginaire.config import compose
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training import trainer
from scripts import train
from tests.programs import python

ROOT = Path(__file__).resolve().parents[2]
BASE = "cosmos_predict2/configs/base/config.py"


def run(
    *arguments: str, cwd: Path = ROOT, interpreter: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter or python(), "-m", "scripts.train", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Sequence[str]) -> int:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "out"))
    monkeypatch.chdir(ROOT)
    return train.main(arguments)


def test_list_prints_names_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, tmp_path, ["--config=examples/minimal/config.py", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "minimal" in lines and lines == sorted(lines)
    assert all(line and " " not in line for line in lines)


def test_the_long_list_has_a_line_on_each_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, tmp_path, ["--config=examples/minimal/config.py", "--list", "--long"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == compose.experiment_names("examples/minimal/config.py")
    assert all("model=" in words and "dataloader_train=" in words and words[0] != "(" for words in lines.values())
    assert lines["minimal"].startswith("A complete project of one's own: registers the experiment minimal")
    assert lines["minimal"].endswith("(model=MinimalModel, dataloader_train=Waves, trainer.max_iter=400)")
    tiny = "(model=predict2_video2world_fsdp_tiny, dataloader_train=toy, trainer.max_iter=4000)"
    assert lines["predict2_video2world_training_tiny_groot_gr1_480"].endswith(
        f"clips, and its tiny twin on the toy world {tiny}"
    )
    inherited = lines["predict2_video2world_training_2b_agibot_head_center_fisheye_color_480p_10fps"]
    assert inherited.endswith("trainer.max_iter=100000)"), "of the experiment that it starts from"
    assert called(monkeypatch, tmp_path, ["--long"]) == 2
    assert "--list --long" in capsys.readouterr().err


def test_list_without_experiments_says_so_beside_the_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compose, "experiment_names", lambda path: [])
    assert called(monkeypatch, tmp_path, ["--list"]) == 0
    captured = capsys.readouterr()
    assert not captured.out and captured.err == f"no experiments in {BASE}\n"


def test_dryrun_prints_and_writes_what_runs_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config=examples/minimal/config.py", "--dryrun", "--", "experiment=minimal", "optimizer.lr=1e-2"]
    assert called(monkeypatch, tmp_path, arguments) == 0
    out = capsys.readouterr().out
    path = tmp_path / "out/examples/minimal/minimal/config.yaml"
    assert f"config: {path}" in out and "# override: optimizer.lr=1e-2" in out and "note:" not in out
    assert path.read_text() in out and "lr: 0.01\n" in path.read_text()
    assert called(monkeypatch, tmp_path, [f"--config={path}", "--dryrun", "--", "trainer.max_iter=3"]) == 0
    assert capsys.readouterr().out.count("max_iter: 3\n") == 1


def test_dryrun_composes_without_an_experiment_and_notes_what_is_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, tmp_path, ["--dryrun"]) == 0
    assert "note: dataloader_train is not set" in capsys.readouterr().out
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(blocked))
    assert train.main(["--dryrun"]) == 0
    out = capsys.readouterr().out
    assert "note: nothing was written: " in out and "cannot be created" in out and "\nconfig: " not in out


@pytest.mark.parametrize("trace", ["runs.jsonl", "checkpoints/"])
def test_dryrun_leaves_the_configuration_of_a_run_that_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    folder = tmp_path / "out/examples/minimal/minimal"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("what ran")
    (folder / trace).mkdir() if trace.endswith("/") else (folder / trace).write_text("")
    arguments = ["--config=examples/minimal/config.py", "--dryrun", "--", "experiment=minimal", "trainer.max_iter=3"]
    assert called(monkeypatch, tmp_path, arguments) == 0
    out = capsys.readouterr().out
    assert "note: a run has started in " in out and f"config: {folder / 'config.dryrun.yaml'}" in out
    assert (folder / "config.yaml").read_text() == "what ran"
    assert "max_iter: 3\n" in (folder / "config.dryrun.yaml").read_text()


def test_base_values_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from imaginaire.config.compose import compose
    from imaginaire.config.lazy_config import to_yaml

    monkeypatch.chdir(ROOT)
    config = compose(
        BASE, ["optimizer=adamw", "scheduler=lambdacosine", "ckpt_type=dcp", "callbacks=[basic,long,debug]"]
    )
    assert config.job.path.startswith("cosmos_predict2/debug/delete_20")
    assert (config.trainer.max_iter, config.trainer.logging_iter, config.trainer.validation_iter) == (400_000, 10, 100)
    assert not config.trainer.run_validation and config.model is None
    basic = ["low_prec", "iter_speed", "device_monitor", "manual_gc", "loss_log", "grad_clip", "self_checks"]
    basic += ["action_following", "progress_bar"]
    assert list(config.trainer.callbacks) == [*basic, "heart_beat"]
    assert config.trainer.callbacks.iter_speed.every_n == 10 and config.trainer.profiling.enable_profiling
    assert config.scheduler.warm_up_steps == [1000] and config.optimizer.betas == [0.9, 0.99]
    plain = compose(BASE)
    assert plain.optimizer.master_weights and plain.optimizer.lr == 1e-4 and plain.scheduler.rate == 1.0
    assert "StandardCheckpointer" in to_yaml(plain)


@pytest.mark.parametrize("optimizer", ["fusedadamw", "adamw"])
@pytest.mark.parametrize("scheduler", ["lambdalinear", "lambdacosine", "constant"])
@pytest.mark.parametrize("ckpt_type", ["standard", "dcp", "dummy"])
def test_every_group_entry_composes_and_round_trips(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str, scheduler: str, ckpt_type: str
) -> None:
    from imaginaire.config.compose import compose
    from imaginaire.config.lazy_config import save_yaml, to_yaml

    monkeypatch.chdir(ROOT)
    chosen = [f"optimizer={optimizer}", f"scheduler={scheduler}", f"ckpt_type={ckpt_type}"]
    config = compose(BASE, chosen)
    save_yaml(config, tmp_path / "config.yaml")
    assert to_yaml(compose(str(tmp_path / "config.yaml"))) == (tmp_path / "config.yaml").read_text()


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for text in ("--config", "--list", "--dryrun", "--debug", "experiment=NAME", "torchrun", "IMAGINAIRE_OUTPUT_ROOT"):
        assert text in out
    assert out.index("--config=examples/minimal/config.py") == out.index("--config=", out.index("examples:"))
    assert [code for code in ("0", "1", "2", "70", "75", "130") if f"\n  {code:<5}" not in out] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dryrn"], "unknown flag --dryrn. Did you mean --dryrun?"),
        (["--conifg=x", "--list"], "unknown flag --conifg. Did you mean --config?"),
        (["--config"], "argument --config: expected one argument. See --help."),
        (["--list", "--dryrun"], "argument --dryrun: not allowed with argument --list. See --help."),
    ],
)
def test_a_wrong_flag_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    assert called(monkeypatch, tmp_path, arguments) == 2
    assert capsys.readouterr().err == f"ConfigError: {text}\n"


@pytest.fixture
def minimal_that_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[BaseException], int]]:
    """Start the example in a run that has its log file open and then raises."""

    def started(error: BaseException) -> int:
        def launch(config: Any) -> int:
            logs.setup(str(tmp_path / "run"))
            raise error

        monkeypatch.setattr(trainer, "launch", launch)
        return called(monkeypatch, tmp_path, ["--config=examples/minimal/config.py", "--", "experiment=minimal"])

    before = logging.getLogger().level
    yield started
    for handler in [h for h in logging.getLogger().handlers if getattr(h, "of_imaginaire", False)]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.getLogger().setLevel(before)
    logging.captureWarnings(False)


def test_what_ends_a_run_is_in_its_log_and_once_on_stderr(
    minimal_that_raises: Callable[[BaseException], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert minimal_that_raises(TrainingError("it diverged")) == 2
    assert capsys.readouterr().err == "TrainingError: it diverged\n"
    assert "TrainingError: it diverged" in (tmp_path / "run/stdout.log").read_text()
    with pytest.raises(ZeroDivisionError):  # the interpreter prints it
        minimal_that_raises(ZeroDivisionError("by nought"))
    assert not capsys.readouterr().err
    text = (tmp_path / "run/stdout.log").read_text()
    assert "|ERROR|" in text and "Traceback" in text and "ZeroDivisionError: by nought" in text


def test_an_interrupt_before_training_is_one_line(
    minimal_that_raises: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert minimal_that_raises(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistake_is_a_message_and_a_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--", "trainer.max_itr=3"], ["a=b", "--dryrun"], ["--config=none.py"], ["--list", "a=b", "--x"]):
        assert called(monkeypatch, tmp_path, arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("ConfigError: ") and "Traceback" not in captured.err and not captured.out
    monkeypatch.setenv("IMAGINAIRE_DEBUG", "1")
    assert called(monkeypatch, tmp_path, ["--", "trainer.max_itr=3"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_another_rank_waits_for_the_first_one_to_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train.report(ConfigError("no"), debug=False) == 2
    assert waited and "[rank 9] ConfigError: no" in capsys.readouterr().err


@pytest.mark.slow
def test_list_of_a_noisy_config_file_is_clean(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "print('noise')\n"
        "from imaginaire.config.compose import register_experiment\n"
        "from imaginaire.config.schema import Config\n"
        "def make_config():\n"
        "    print('more noise')\n"
        "    for name in ('b', 'a'):\n"
        "        register_experiment(name, {})\n"
        "    return Config()\n"
    )
    done = run(f"--config={tmp_path / 'noisy.py'}", "--list")
    assert (done.returncode, done.stdout) == (0, "a\nb\n")
    (tmp_path / "empty.py").write_text("from imaginaire.config.schema import Config as make_config\n")
    done = run(f"--config={tmp_path / 'empty.py'}", "--list")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"no experiments in {tmp_path / 'empty.py'}\n"


@pytest.mark.slow
def test_dryrun_is_quick_and_mistakes_have_no_traceback(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--dryrun", interpreter=sys.executable, IMAGINAIRE_OUTPUT_ROOT=str(tmp_path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime - before.ru_utime < 10  # 2.5 s as a rule; of the processor, for other work may be going on
    assert list(tmp_path.rglob("config.yaml"))
    for arguments in (["--", "experiment="], ["experiment=none"], ["--config=/none.py"], ["a.b=1", "--list"]):
        done = run(*arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) <= 30
        assert "Traceback" not in done.stderr and done.stderr.startswith("ConfigError"), done.stderr


@pytest.mark.slow
def test_torchrun_hands_the_arguments_through(tmp_path: Path) -> None:
    command = [python(), "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    command += ["-m", "scripts.train", "--dryrun", "--config=examples/minimal/config.py", "--", "experiment=minimal"]
    environment = {**os.environ, "IMAGINAIRE_OUTPUT_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "note: 2 processes here" in done.stdout and done.stdout.count("\nconfig: ") == 1
