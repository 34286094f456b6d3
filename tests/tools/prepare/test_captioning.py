# SPDX-License-Identifier: Apache-2.0
"""Any command may be the captioner: what it prints is kept, what it fails at is named."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import caption_videos as script
from tests.programs import HANG_S, call

PYTHON = sys.executable


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    (tmp_path / "videos").mkdir()
    for name in ("a", "b b", "c"):
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(b"only the captioner looks inside")
    return tmp_path


def _captioner(tmp_path: Path, body: str) -> str:
    """A command whose Python body knows the clip's path as ``path``."""
    program = tmp_path / "captioner.py"
    program.write_text(f"import os, sys, time\npath = sys.argv[1]\n{body}\n")
    return f"{PYTHON} {program} {{video}}"


def _run(dataset: Path, command: str, *more: str) -> int:
    return call(script, "--data", dataset, "--command", command, *more)


def _metas(dataset: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted((dataset / "metas").iterdir())}


def test_what_the_command_prints_is_the_caption(dataset: Path) -> None:
    command = _captioner(dataset, "print('  Ä clip', os.path.basename(path), '\\n')")
    assert _run(dataset, command) == 0
    assert _metas(dataset) == {"a": "Ä clip a.mp4\n", "b b": "Ä clip b b.mp4\n", "c": "Ä clip c.mp4\n"}


def test_captions_that_are_there_are_kept_and_empty_ones_are_not(dataset: Path) -> None:
    (dataset / "metas").mkdir()
    (dataset / "metas" / "a.txt").write_text("by hand")
    (dataset / "metas" / "c.txt").write_text(" \n")
    assert _run(dataset, _captioner(dataset, "print('made')")) == 0
    assert _metas(dataset) == {"a": "by hand", "b b": "made\n", "c": "made\n"}
    assert _run(dataset, f"{PYTHON} -c 'raise SystemExit(3)' {{video}}") == 0  # nothing is left to do
    assert _run(dataset, _captioner(dataset, "print('again')"), "--overwrite", "--workers", "0") == 0
    assert set(_metas(dataset).values()) == {"again\n"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit('no such codec')", "ended with exit code 1: no such codec"),
        ("print('thinking', file=sys.stderr)", "printed nothing; its messages end: thinking"),
        ("sys.stdout.buffer.write(bytes([255, 254]))", "is not UTF-8"),
        ("print('x' * 200_000)", "which are no caption"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_clip_that_fails_is_named_and_the_others_are_captioned(
    dataset: Path, body: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = _captioner(dataset, f"if 'b b' in path:\n    {body}\nelse:\n    print('fine')")
    assert _run(dataset, command, "--retries", "0") == 1
    assert "b b.mp4: " in caplog.text and text in caplog.text and "1 of 3 clips failed" in caplog.text
    assert _metas(dataset) == {"a": "fine\n", "c": "fine\n"}


def test_a_clip_that_failed_is_tried_again(dataset: Path) -> None:
    body = "mark = path + '.tried'\nif not os.path.exists(mark):\n    open(mark, 'w')\n    sys.exit(1)\nprint('second')"
    assert _run(dataset, _captioner(dataset, body), "--retries", "0") == 1
    for mark in (dataset / "videos").glob("*.tried"):
        mark.unlink()
    assert _run(dataset, _captioner(dataset, body), "--retries", "1") == 0
    assert set(_metas(dataset).values()) == {"second\n"}


def test_a_captioner_that_hangs_is_ended_with_all_it_started(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b b", "c"):
        (dataset / "videos" / f"{name}.mp4").unlink()
    command = "sh -c 'tail -f \"$1\" & wait' sh {video}"
    assert _run(dataset, command, "--timeout", "0.5", "--retries", "0") == 1
    assert "a.mp4: the captioner was not done after 0.5 s" in caplog.text
    deadline = time.monotonic() + HANG_S
    while (left := _running(str(dataset))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _running(word: str) -> list[list[str]]:
    """The command lines of all processes that name it."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if any(word in part for part in line)]


def test_long_messages_and_no_limit_of_time_are_allowed(dataset: Path) -> None:
    command = _captioner(dataset, "sys.stderr.write('x' * 10**6); print('made')")
    assert _run(dataset, command, "--timeout", "inf") == 0
    assert set(_metas(dataset).values()) == {"made\n"}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("captioner", "{video}"),
        ("no_such_program {video}", "'no_such_program', which is not found"),
        ("echo 'x {video}", "cannot be split"),
    ],
)
def test_a_command_that_cannot_run_is_known_before(
    dataset: Path, command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(dataset, command) == 2
    assert text in capsys.readouterr().err and not (dataset / "metas").exists()


def test_words_reach_the_command_as_they_are(dataset: Path) -> None:
    program = dataset / "echo.py"
    program.write_text("import sys\nprint(sys.argv[1:])")
    assert _run(dataset, f"{PYTHON} {program} 'two words' '$HOME; rm x' --clip={{video}}") == 0
    assert _metas(dataset)["b b"] == f"{['two words', '$HOME; rm x', f'--clip={dataset}/videos/b b.mp4']}\n"


def test_pictures_are_captioned_where_there_are_no_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "echo {video}") == 2
    assert "videos" in capsys.readouterr().err
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "p.jpg").write_bytes(b"")
    assert _run(tmp_path, "echo {video}", "--dry-run") == 0 and not (tmp_path / "metas").exists()
    assert _run(tmp_path, "echo {video}") == 0
    assert _metas(tmp_path) == {"p": f"{tmp_path}/images/p.jpg\n"}


@pytest.mark.slow
def test_several_commands_run_at_once(dataset: Path) -> None:
    body = "open(path + '.here', 'w')\n"
    body += "while len([n for n in os.listdir(os.path.dirname(path)) if n.endswith('.here')]) < 2:\n"
    body += "    time.sleep(0.01)\nprint('met another one')"
    assert _run(dataset, _captioner(dataset, body), "--workers", "2", "--timeout", str(HANG_S)) == 0
    assert set(_metas(dataset).values()) == {"met another one\n"}
