# SPDX-License-Identifier: Apache-2.0
"""A way of steps goes on where it was, and does again what a change has touched."""

import io
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_predict2.tools.improve.steps import Runner, WayStep, busy, digest, time_left
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.storage import write_json
from tests.programs import warm_python

# Copies its input and notes in a file that it ran.
COPY = "import sys; from pathlib import Path; a, b, c = map(Path, sys.argv[1:4]); b.write_text(a.read_text() + '.')"
COPY += "; c.open('a').write(b.name + ' ')"


def copying(folder: Path, source: str, target: str, code: str = COPY) -> WayStep:
    """A step that makes ``target`` of ``source``."""
    paths = tuple(folder / name for name in (source, target, "ran"))
    words = ("-c", code, *map(str, paths))
    return WayStep(target, target, words, reads=(paths[0],), makes=(paths[1],))


def ran(folder: Path, steps: list[WayStep]) -> str:
    """The steps that ran when the way was gone."""
    (folder / "ran").write_text("")
    with Runner(folder, steps, shown=io.StringIO()) as runner:
        for step in steps:
            runner.run(step)
    return (folder / "ran").read_text().strip()


def test_what_a_change_touches_is_done_again_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    steps = [copying(tmp_path, *pair) for pair in (("data", "a"), ("a", "b"), ("data", "c"))]
    assert ran(tmp_path, steps) == "a b c"
    assert ran(tmp_path, steps) == ""
    (tmp_path / "a").write_text("made by hand")
    assert ran(tmp_path, steps) == "b"
    steps[2] = copying(tmp_path, "data", "c", COPY + "; 1")
    assert ran(tmp_path, steps) == "c"
    (tmp_path / "b").unlink()
    assert ran(tmp_path, steps) == "b"
    (tmp_path / "data").write_text("y")
    assert ran(tmp_path, steps) == "a b c"


def test_a_folder_that_was_moved_is_done(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/data").write_text("x")
    assert ran(tmp_path / "old", [copying(tmp_path / "old", "data", "a")]) == "a"
    (tmp_path / "old").rename(tmp_path / "new")
    assert ran(tmp_path / "new", [copying(tmp_path / "new", "data", "a")]) == ""


def test_a_folder_whose_name_stands_in_other_words_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``--out out`` the flag of each step holds the name; here the code does, in pathlib."""
    monkeypatch.chdir(tmp_path)
    Path("lib").mkdir()
    Path("lib/data").write_text("x")
    assert ran(Path("lib"), [copying(Path("lib"), "data", "a")]) == "a"
    assert ran(tmp_path / "lib", [copying(tmp_path / "lib", "data", "a")]) == ""


def test_a_step_that_failed_keeps_what_it_has_and_another_command_does_not(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    fails = copying(tmp_path, "data", "a", COPY + "; print('half of it', file=sys.stderr); sys.exit(3)")
    with pytest.raises(TrainingError, match=r"(?s)exit code 3.*half of it"):
        ran(tmp_path, [fails])
    assert (tmp_path / "a").exists()
    seen = "import sys; from pathlib import Path; print(Path(sys.argv[2]).exists())"
    with Runner(tmp_path, [fails], shown=io.StringIO()) as runner:
        assert runner.why(fails) == "it failed"
    with pytest.raises(TrainingError, match="is not there"):
        ran(tmp_path, [copying(tmp_path, "data", "a", seen)])
    assert "False" in (tmp_path / "logs/a.log").read_text()


@pytest.mark.parametrize("program", ["scripts.train", "scripts.other"])
def test_a_training_goes_on_and_other_programs_begin_anew(tmp_path: Path, program: str) -> None:
    code = "import sys; from pathlib import Path; p = Path(sys.argv[1]); is_there = p.exists();"
    code += "p.write_text(''); sys.exit(0 if is_there else 3)"
    step = WayStep("a", "a", ("-c", code, str(tmp_path / "a"), program), makes=(tmp_path / "a",))
    for k in range(2):
        with Runner(tmp_path, [step], shown=io.StringIO()) as runner:
            if k:  # both cost what they took in all
                write_json(tmp_path / "steps/a.json", {**runner.marker(step), "seconds": 1000.0})
            if k and program == "scripts.train":
                assert runner.run(step)
            else:
                with pytest.raises(TrainingError):
                    runner.run(step)
            assert (runner.marker(step)["seconds"] >= 1000) == bool(k)


def test_a_crash_of_a_gate_is_not_its_no(tmp_path: Path) -> None:
    """Both end with 1, but only a verdict leaves a card."""
    (tmp_path / "data").write_text("x")
    crash, refuse = "raise ValueError('no card')", COPY + "; sys.exit(1)"
    steps = [replace(copying(tmp_path, "data", "a", code), codes=(0, 1), cure=" Mend it.") for code in (crash, refuse)]
    with pytest.raises(TrainingError, match=r"(?s)ended with exit code 1: .*no card.* Mend it\."):
        ran(tmp_path, steps[:1])
    assert ran(tmp_path, steps[1:]) == "a" and ran(tmp_path, steps[1:]) == ""
    with pytest.raises(TrainingError, match="ended with exit code 1"):
        ran(tmp_path, [replace(steps[1], codes=(0,))])  # the flag that allowed it is not given any more


def test_a_stop_goes_to_the_step_and_the_folder_is_free_after_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    slow = "import signal, sys, time; from pathlib import Path; b = Path(sys.argv[2]);"
    slow += "signal.signal(signal.SIGTERM, lambda *_: (b.write_text('saved'), sys.exit(75)));"
    slow += "b.write_text('begun'); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path; from tests.tools.improve.test_steps import copying; "
        "from cosmos_predict2.tools.improve.steps import Runner; folder = Path(sys.argv[1]); "
        "step = copying(folder, 'data', 'a', sys.argv[2]); runner = Runner(folder, [step]); runner.__enter__(); "
        "runner.run(step)"
    )
    process = subprocess.Popen([warm_python(), "-c", code, str(tmp_path), slow], stdout=subprocess.PIPE)
    while not (tmp_path / "a").exists():
        assert process.poll() is None
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="another process works there"), Runner(tmp_path, []):
        pass
    os.kill(process.pid, signal.SIGTERM)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and b"interrupted. The same command goes on from here." in shown
    assert (tmp_path / "a").read_text() == "saved"
    with Runner(tmp_path, []):
        pass


def test_time_left_is_read_from_what_programs_print() -> None:
    tokenizer, run = (WayStep("a", "a", ("-m", f"scripts.{name}")) for name in ("fit_tiny_tokenizer", "train"))
    assert time_left("embeddings: 120 of 400, 30 %, 1 h 20 min left", tokenizer) == 4800
    assert time_left("[INFO] iter 100/3000 3 % loss 0.1 0.21 s/iter, 45 s left data 3 %", run) == 45
    assert time_left("[INFO] iter 100/3000 3 % loss 0.1 0.21 s/iter", run) is None
    assert time_left("[INFO] validation: 4 of 4, 100 %, 6 s left", run) is None  # of 33 min of the run


def test_a_machine_with_more_programs_than_processors_is_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, expected in ((2.9, ""), (7.64, " (a busy machine: load 7.6 on 2 processors)")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 1.0, 1.0))
        assert busy() == expected


def test_the_time_left_follows_the_load_and_then_what_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new user beside other programs was told 19 minutes, which became 79."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 1.0, 1.0))
    steps = [replace(copying(tmp_path, "data", name), guess_s=600.0) for name in ("a", "b", "c")]
    with Runner(tmp_path, steps, io.StringIO()) as runner:
        assert runner._of_all(steps[0], 0.0, None) == "about 1 h 30 min left of 1 h 30 min", (
            "a third of a processor each"
        )
        assert runner._of_all(steps[0], 300.0, 900.0) == "about 55 min left of 60 min", "the step takes twice its time"
        monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 1.0, 1.0))
        assert runner._of_all(steps[0], 0.0, None) == "about 30 min left of 30 min"


def test_steps_that_are_left_out_take_no_time_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a gate's no does with those of learning."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 1.0, 1.0))
    steps = [replace(copying(tmp_path, "data", name), guess_s=600.0) for name in ("a", "b", "c")]
    shown = io.StringIO()
    with Runner(tmp_path, steps, shown) as runner:
        left = [runner._of_all(step, 0.0, None) for step in steps]
        begun = runner._of_all(steps[0], 300.0, None)
        runner.left_out = {"b"}
        without = runner._of_all(steps[0], 0.0, None)
        assert not runner.run(steps[1]) and not (tmp_path / "b").exists()
    assert [text.partition(" left")[0] for text in left] == ["about 30 min", "about 20 min", "about 10 min"]
    assert begun == "about 25 min left of 30 min" and without == "about 20 min left of 20 min"
    assert shown.getvalue() == f"step 2 of 3, {steps[1].title}: left out\n"


def test_a_digest_sees_a_file_of_a_folder_that_was_renamed(tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("content")
    before = digest(tmp_path)
    (tmp_path / "first.txt").rename(tmp_path / "second.txt")
    assert digest(tmp_path) != before


def test_a_digest_sees_contents_and_not_the_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(bytes(3 << 20))
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "none") == ""
    (tmp_path / "b/x").write_bytes(bytes((3 << 20) - 1) + b"1")
    assert digest(tmp_path / "a") != digest(tmp_path / "b")
