# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment resumes, and ends as the run that was never killed.

The points to kill at are the calls of `imaginaire.storage`, and the four saves of a DCP set: one run records them, then
for each a process runs with these functions wrapped, ends itself with SIGKILL at that point, and the run is taken up
again.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from imaginaire import storage
from imaginaire.checkpoint import dcp
from imaginaire.distributed.places import EXIT_INTERRUPTED
from imaginaire.errors import ConfigError
from tests.imaginaire.training.test_resume import compare
from tests.multiprocess import Process
from tests.programs import HANG_S
from tests.training import run_dir, train

OVERRIDES = ["trainer.max_iter=9", "checkpoint.save_iter=3", "checkpoint.keep_last=2", "trainer.run_validation=False"]


class _Wrapped:
    """A file whose fourth write is the middle of it."""

    def __init__(self, file: BinaryIO, middle: Callable[[], None]) -> None:
        self._file = file
        self._middle = middle
        self._writes = 0

    def write(self, content: Any) -> int:
        self._writes += 1
        if self._writes == 4:
            self._file.write(bytes(content)[: len(content) // 2])
            self._file.flush()
            self._middle()
            return self._file.write(bytes(content)[len(content) // 2 :])
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _wrap_storage(root: str, reach: Callable[[str], None]) -> None:
    create, rename, remove = storage.create, os.replace, storage.remove

    def place(path: Any) -> str | None:
        """kind/iter_N.pt or the pointer, for what belongs to the checkpoints; temporaries by their target's name."""
        text = os.fspath(path)
        if f"{root}/" not in text or "/checkpoints/" not in text:
            return None
        folder, _, name = text.partition("/checkpoints/")[2].rpartition("/")
        if ".tmp-" in name:
            name = name[1:].partition(".tmp-")[0]
        return f"{folder}/{name}" if folder else name

    def wrapped_create(path: Any) -> Any:
        at = place(path)
        if at is None:
            return create(path)
        reach(f"before {at}")
        return _Wrapped(create(path), lambda: reach(f"amid {at}"))

    def wrapped_rename(source: Any, target: Any) -> None:
        at = place(target)
        if at is not None:
            reach(f"before rename to {at}")
        rename(source, target)
        if at is not None:
            reach(f"after rename to {at}")

    def wrapped_remove(path: Any) -> None:
        at = place(path)
        if at is not None:
            reach(f"before removing {at}")
        remove(path)
        if at is not None:
            reach(f"after removing {at}")

    storage.create, os.replace, storage.remove = wrapped_create, wrapped_rename, wrapped_remove  # type: ignore[assignment]


def _wrap_dcp(reach: Callable[[str], None]) -> None:
    """Before and after each of the four saves, and amid it: the shards are there, the index is not."""
    write, finish = dcp.write_tree, FileSystemWriter.finish

    def wrapped_write(path: str, tree: Any, group: Any) -> None:
        at = path.partition("/checkpoints/")[2]
        reach(f"before {at}")
        write(path, tree, group)
        reach(f"after {at}")

    def wrapped_finish(self: FileSystemWriter, **parts: Any) -> None:
        reach(f"amid {os.fspath(self.path).partition('/checkpoints/')[2]}")
        finish(self, **parts)

    dcp.write_tree, FileSystemWriter.finish = wrapped_write, wrapped_finish  # type: ignore[method-assign]


def _run(root: str, ckpt_type: str, kill_at: str | None, record: str) -> None:
    Path(f"{record}.pid").write_text(str(os.getpid()))
    times: dict[str, int] = {}

    def reach(point: str) -> None:
        times[point] = times.get(point, 0) + 1
        if times[point] > 1:
            point = f"{point} ({times[point]})"
        with Path(record).open("a") as file:
            file.write(point + "\n")
        if point == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    _wrap_storage(root, reach)
    _wrap_dcp(reach)
    raise SystemExit(train(Path(root), [*OVERRIDES, f"ckpt_type={ckpt_type}"]))


def _process(root: Path, ckpt_type: str, kill_at: str | None, record: Path) -> Process:
    process = Process(_run, (str(root), ckpt_type, kill_at, str(record)))
    process.start()
    return process


def _points(tmp_path: Path, ckpt_type: str) -> list[str]:
    """Every point of an uninterrupted run, in order; the run itself is the one to compare with."""
    process = _process(tmp_path / "whole", ckpt_type, None, tmp_path / "points")
    process.join(HANG_S)
    assert process.exitcode == 0
    return (tmp_path / "points").read_text().splitlines()


def _kill_and_resume(tmp_path: Path, ckpt_type: str, point: str) -> str | None:
    root = tmp_path / point.replace(" ", "_").replace("/", "-")
    record = tmp_path / f"{root.name}.points"
    process = _process(root, ckpt_type, point, record)
    process.join(HANG_S)
    assert process.exitcode == -signal.SIGKILL, f"'{point}' was not reached: exit code {process.exitcode}"
    assert record.read_text().splitlines()[-1] == point
    assert train(root, [*OVERRIDES, f"ckpt_type={ckpt_type}"]) == 0
    leftovers = [path.name for path in run_dir(root).rglob("*.tmp-*")]
    assert leftovers == []
    return compare(tmp_path / "whole", root)


def _check(tmp_path: Path, ckpt_type: str, choose: Callable[[list[str]], list[str]]) -> int:
    points = choose(_points(tmp_path, ckpt_type))
    results = {point: _kill_and_resume(tmp_path, ckpt_type, point) for point in points}
    different = {point: found for point, found in results.items() if found is not None}
    assert different == {}
    return len(points)


FEW = {
    "standard": [
        "before model/iter_000000003.pt",
        "amid optim/iter_000000006.pt",
        "after rename to trainer/iter_000000006.pt",
        "after removing optim/iter_000000003.pt",
    ],
    "dcp": ["amid iter_000000006/optim", "after iter_000000006/trainer", "after removing iter_000000003/optim"],
}


@pytest.mark.slow
@pytest.mark.parametrize("ckpt_type", ["standard", pytest.param("dcp", marks=pytest.mark.long)])
def test_a_run_killed_at_a_few_points_of_a_save_resumes(tmp_path: Path, ckpt_type: str) -> None:
    def few(points: list[str]) -> list[str]:
        assert set(FEW[ckpt_type]) <= set(points), points
        return FEW[ckpt_type]

    assert _check(tmp_path, ckpt_type, few) == len(FEW[ckpt_type])


@pytest.mark.long
@pytest.mark.parametrize("ckpt_type", ["standard", "dcp"])
def test_a_run_killed_at_every_point_resumes(tmp_path: Path, ckpt_type: str) -> None:
    """Every file of every save: before, amid, before and after its rename; the pointer; each delete."""
    count = _check(tmp_path, ckpt_type, lambda points: points)
    print(f"killed at {count} distinct points, every resume equal")
    assert count >= 20


@pytest.mark.slow
def test_ctrl_c_saves_and_a_second_start_of_a_running_run_is_refused(tmp_path: Path) -> None:
    assert train(tmp_path / "whole", OVERRIDES) == 0
    root = tmp_path / "asked"
    process = _process(root, "standard", None, tmp_path / "points")
    while process.exitcode is None and not (run_dir(root) / "runs.jsonl").exists():
        time.sleep(0.005)
    pid = int((tmp_path / "points.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match=rf"in use by .* pid {pid} since .*another job.name"):
        train(root, OVERRIDES)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    process.join(HANG_S)
    assert process.exitcode == EXIT_INTERRUPTED
    log = (run_dir(root) / "stdout.log").read_text()
    assert "SIGINT: saving after this step, then leaving. Ctrl-C again quits at once." in log
    assert train(root, OVERRIDES) == 0
    assert compare(tmp_path / "whole", root) is None
