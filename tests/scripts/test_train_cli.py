# SPDX-License-Identifier: Apache-2.0
"""The command line of training, up to the point where a run would begin."""

import contextlib
import io
import logging
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imaginaire import log as logs
from imaginaire.config import compose, registry
from imaginaire.config.lazy_config import save_yaml, to_yaml
from imaginaire.config.registry import find_config_file, load_config
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training import trainer
from scripts import train
from tests.multiprocess import run_distributed
from tests.programs import finished, python

ROOT = Path(__file__).resolve().parents[2]
BASE = "cosmos_predict2/configs/base/config.py"
MINIMAL = "--config=examples/minimal/config.py"


Start = Callable[..., int]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """The program in this process, from the root of the repository, with its own output folder."""
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "out"))
    monkeypatch.chdir(ROOT)
    return lambda *arguments: train.main(arguments)


def test_list_prints_names_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(MINIMAL, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "minimal" in lines and lines == sorted(lines)
    assert all(line and " " not in line for line in lines)
    monkeypatch.setattr(compose, "experiment_names", lambda path: [])
    assert start("--list") == 0
    captured = capsys.readouterr()
    assert not captured.out and BASE in captured.err


def test_the_default_config_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").touch()
    assert find_config_file(train.DEFAULT_CONFIG) == ROOT / train.DEFAULT_CONFIG
    assert find_config_file("own.py") == tmp_path / "own.py"
    assert load_config(ROOT / train.DEFAULT_CONFIG).job.project is not None
    assert "cosmos_predict2.configs.base.config" in sys.modules


def test_the_long_list_has_a_line_on_each_experiment(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(MINIMAL, "--list", "--long") == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == compose.experiment_names("examples/minimal/config.py")
    providers = {name: str(getattr(registry.entry_of("experiment", name), "provider", None)) for name in lines}
    own = [words for name, words in lines.items() if providers[name].startswith(("cosmos_predict2.", "examples."))]
    assert "model=MinimalModel" in " ".join(own), "other tests of this process may have registered theirs"
    assert all("model=" in words and "dataloader_train=" in words and words[0] != "(" for words in own)
    assert lines["minimal"].endswith("(model=MinimalModel, dataloader_train=Waves, trainer.max_iter=400)")
    tiny = "(model=predict2_video2world_fsdp_tiny, dataloader_train=toy, trainer.max_iter=4000)"
    assert lines["predict2_video2world_training_tiny_groot_gr1_480"].endswith(tiny)
    inherited = lines["predict2_video2world_training_2b_agibot_head_center_fisheye_color_480p_10fps"]
    assert inherited.endswith("trainer.max_iter=100000)"), "of the experiment that it starts from"


def test_dryrun_prints_and_writes_what_runs_again(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(MINIMAL, "--dryrun", "--", "experiment=minimal", "optimizer.lr=1e-2") == 0
    out = capsys.readouterr().out
    path = tmp_path / "out/examples/minimal/minimal/config.yaml"
    assert f"config: {path}" in out and "# override: optimizer.lr=1e-2" in out and "note:" not in out
    assert path.read_text() in out and "lr: 0.01\n" in path.read_text()
    assert start(f"--config={path}", "--dryrun", "--", "trainer.max_iter=3") == 0
    assert capsys.readouterr().out.count("max_iter: 3\n") == 1


def test_dryrun_composes_without_an_experiment_and_notes_what_is_absent(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--dryrun") == 0
    assert "note: dataloader_train is not set" in capsys.readouterr().out
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(blocked))
    assert train.main(["--dryrun"]) == 0
    out = capsys.readouterr().out
    assert "note: nothing was written: " in out and "cannot be created" in out and "\nconfig: " not in out


@pytest.mark.parametrize("trace", ["runs.jsonl", "checkpoints/"])
def test_dryrun_leaves_the_configuration_of_a_run_that_has_started(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    folder = tmp_path / "out/examples/minimal/minimal"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("what ran")
    (folder / trace).mkdir() if trace.endswith("/") else (folder / trace).write_text("")
    assert start(MINIMAL, "--dryrun", "--", "experiment=minimal", "trainer.max_iter=3") == 0
    out = capsys.readouterr().out
    assert "note: a run has started in " in out and f"config: {folder / 'config.dryrun.yaml'}" in out
    assert (folder / "config.yaml").read_text() == "what ran"
    assert "max_iter: 3\n" in (folder / "config.dryrun.yaml").read_text()


def test_base_values_and_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    config = compose.compose(
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
    plain = compose.compose(BASE)
    save_yaml(config, tmp_path / "config.yaml")
    assert to_yaml(compose.compose(str(tmp_path / "config.yaml"))) == (tmp_path / "config.yaml").read_text()
    assert plain.optimizer.master_weights and plain.optimizer.lr == 1e-4 and plain.scheduler.rate == 1.0
    assert "StandardCheckpointer" in to_yaml(plain)


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for text in ("--config", "--list", "--dryrun", "--debug", "experiment=NAME", "torchrun", "IMAGINAIRE_OUTPUT_ROOT"):
        assert text in out
    assert out.index("--config=examples/minimal/config.py") == out.index("--config=", out.index("examples:"))
    assert [code for code in ("0", "1", "2", "70", "75", "130") if f"\n  {code:<5}" not in out] == []


WRONG = [  # arguments, what the message names
    ("--dryrn", "Did you mean --dryrun?"),
    ("--conifg=x --list", "Did you mean --config?"),
    ("--config", "--config"),
    ("--list --dryrun", "--dryrun"),
    ("--long", "--list --long"),
    ("--experiment minimal", "-- experiment=minimal"),
    ("--experiment", "-- experiment=NAME"),
    ("--optimizer.lr=1", "-- optimizer.lr=1"),
    ("-- a=b --dryrun", "--dryrun"),
    ("a=b --config=x.py", "--config"),
    ("-- a=b -- c=d", "--"),
    ("-- trainer.max_itr=3", "trainer.max_itr"),
    ("a=b --dryrun", "--dryrun"),
    ("--config=none.py", "none.py"),
    ("--list a=b --x", "--x"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG)
def test_a_mistake_is_one_line_and_a_code(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    assert start(*arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("ConfigError: ") and len(shown.err.splitlines()) == 1 and not shown.out
    assert named in shown.err
    monkeypatch.setenv("IMAGINAIRE_DEBUG", "1")
    assert start(*arguments.split()) == 2 and "Traceback" in capsys.readouterr().err


@pytest.fixture
def minimal_that_raises(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Start the example in a run that has its log file open and then raises."""

    def started(error: BaseException) -> int:
        def launch(config: Any) -> int:
            logs.setup(str(tmp_path / "run"))
            raise error

        monkeypatch.setattr(trainer, "launch", launch)
        return start(MINIMAL, "--", "experiment=minimal")

    before = logging.getLogger().level
    yield started
    for handler in [h for h in logging.getLogger().handlers if getattr(h, "of_imaginaire", False)]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.getLogger().setLevel(before)
    logging.captureWarnings(False)


def test_what_ends_a_run_is_in_its_log_and_once_on_stderr(
    minimal_that_raises: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert minimal_that_raises(TrainingError("it diverged")) == 2
    assert capsys.readouterr().err == "TrainingError: it diverged\n"
    assert "TrainingError: it diverged" in (tmp_path / "run/stdout.log").read_text()
    with pytest.raises(ZeroDivisionError):  # the interpreter prints it
        minimal_that_raises(ZeroDivisionError("by nought"))
    assert not capsys.readouterr().err
    assert minimal_that_raises(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"
    text = (tmp_path / "run/stdout.log").read_text()
    assert "|ERROR|" in text and "Traceback" in text and "ZeroDivisionError: by nought" in text


def test_another_rank_waits_for_the_first_one_to_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(train, "time", SimpleNamespace(sleep=waited.append))
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
    done = finished(python(), "-m", "scripts.train", f"--config={tmp_path / 'noisy.py'}", "--list", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "a\nb\n")


@pytest.mark.slow
def test_dryrun_is_quick_and_mistakes_have_no_traceback(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["-m", "scripts.train"]
    done = finished(sys.executable, *words, "--dryrun", cwd=ROOT, IMAGINAIRE_OUTPUT_ROOT=str(tmp_path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime - before.ru_utime < 10  # 2.5 s as a rule; of the processor, for other work may be going on
    assert list(tmp_path.rglob("config.yaml"))
    done = finished(python(), *words, "--", "experiment=none", cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("ConfigError"), done.stderr


def _dryrun() -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = train.main(["--dryrun", "--config=examples/minimal/config.py", "--", "experiment=minimal"])
    return code, said.getvalue()


@pytest.mark.slow
def test_a_dryrun_of_two_processes_speaks_once(tmp_path: Path) -> None:
    """As torchrun starts them; that it hands arguments through is seen where it trains."""
    done = run_distributed(_dryrun, 2, env={"IMAGINAIRE_OUTPUT_ROOT": str(tmp_path)})
    assert [code for code, _ in done] == [0, 0]
    assert "note: 2 processes here" in done[0][1] and "".join(said for _, said in done).count("\nconfig: ") == 1
