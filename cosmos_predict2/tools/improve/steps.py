# SPDX-License-Identifier: Apache-2.0
"""Steps of a long way: each is a program in a process of its own, with a marker of what it read and what it took.

    with Runner(Path("runs/reach"), steps) as runner:
        for step in steps:
            runner.run(step)

RUN/steps/NAME.json is the marker, RUN/logs/NAME.log all that the program printed. A step whose marker is done, and
whose command and inputs are as they were, is not done again. A training that was interrupted resumes; what another
program left half done, or another command or other inputs made, is removed first.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from imaginaire import foreign_json, storage
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.log import FIRST_LINE_S, LINES_S, duration

RUNNING, DONE, FAILED = "running", "done", "failed"
EXIT_INTERRUPTED = 75
_ROOT, _TRAIN = "IMAGINAIRE_OUTPUT_ROOT", "scripts.train"  # where runs go, and the program that reads it
_WHOLE = 1 << 20  # bytes of a file that is read whole for its digest
_ENDS = 1 << 16  # of a larger one: the beginning and the end
_LEFT = re.compile(r"\b(\d+) (s|min|h|days)(?: (\d+) (min|h))? left\b")  # as `imaginaire.log.duration` writes it
_ERROR = re.compile(r"(error|\w+Error): ")  # how our programs say what a user can mend
_SECONDS = {"s": 1, "min": 60, "h": 3600, "days": 86400}
BUSY = 1.5  # programs that want a processor, for each that there is
LEAST_MEASURED_S = 60.0  # of steps that are done, before their speed predicts that of the others
_TAIL = 12  # lines of a program that failed without a message of ours


@dataclass(frozen=True)
class WayStep:
    """A program with its arguments, what it reads besides them, and what it makes."""

    name: str
    title: str
    words: tuple[str, ...]  # what follows "python"
    reads: tuple[Path, ...] = ()
    makes: tuple[Path, ...] = ()
    guess_s: float = 10.0  # before anything was measured here
    codes: tuple[int, ...] = (0,)  # exit codes of a program that did its work
    cure: str = ""  # where it ends with another one


@dataclass
class Runner:
    """Runs steps in a folder, one after another, and reports how long the way still takes."""

    folder: Path
    steps: Sequence[WayStep]
    shown: IO[str] = field(default_factory=lambda: sys.stdout)
    left_out: Set[str] = frozenset()  # names of steps that are not done, as far as is known
    _lock: IO[bytes] | None = None
    _digests: dict[Path, str] = field(default_factory=dict)  # of inputs from outside, which no step changes

    def __enter__(self) -> "Runner":
        (self.folder / "steps").mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._lock = (self.folder / "steps/.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            why = "another process works there, or a step of one that was killed. Wait for it, or give another folder"
            raise ConfigError(f"--out {self.folder}: {why}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    # ---- markers -----------------------------------------------------------------------------------------------------

    def marker(self, step: WayStep) -> dict[str, Any]:
        """The record of a step; empty where it was never started."""
        try:
            return foreign_json.load_object(self.folder / f"steps/{step.name}.json")
        except (OSError, ValueError):
            return {}

    def why(self, step: WayStep) -> str:
        """The reason why a step is to be done; empty where it is done."""
        marker = self.marker(step)
        if not marker:
            return "not done yet"
        if change := self._changed(step, marker):
            return change
        if marker.get("state") != DONE:
            return "it failed" if marker.get("state") == FAILED else "it was interrupted"
        if marker.get("code", 0) not in step.codes:
            return f"it ended with exit code {marker['code']}, which is not allowed any more"
        gone = [path for path in step.makes if not path.exists()]
        return f"{gone[0]} is gone" if gone else ""

    def _changed(self, step: WayStep, marker: Mapping[str, Any]) -> str:
        if marker.get("command") != [self._name(word) for word in step.words]:
            return "its command is another one now"
        known = marker.get("reads", {})
        changed = [path for path in step.reads if known.get(self._name(path)) != self._digest(path)]
        return f"{changed[0]} has changed" if changed else ""

    def _digest(self, path: Path) -> str:
        if path not in self._digests or self.folder in path.parents:
            self._digests[path] = digest(path)
        return self._digests[path]

    def _name(self, path: Path | str) -> str:
        """A path or a word of a command without the folder's name: it may be moved, and named in other ways."""
        whole = rf"(?<![\w./-]){re.escape(str(self.folder))}(?![\w.-])"  # in no other name
        return re.sub(whole, "RUN", str(path))

    # ---- running -----------------------------------------------------------------------------------------------------

    def command(self, step: WayStep) -> str:
        """The step as a user would type it."""
        place = f"{_ROOT}={shlex.quote(str(self.folder))} " if _TRAIN in step.words else ""
        return f"{place}python {shlex.join(step.words)}"

    def run(self, step: WayStep) -> bool:
        """Do the step if it is to be done; whether it was."""
        number = f"step {self.steps.index(step) + 1} of {len(self.steps)}, {step.title}"
        if step.name in self.left_out:
            self._say(f"{number}: left out")
            return False
        if not (reason := self.why(step)):
            self._say(f"{number}: done before")
            return False
        marker = self.marker(step)
        if not marker or self._changed(step, marker) or marker.get("state") == DONE:
            marker = {}
        if not marker or _TRAIN not in step.words:
            for made in step.makes:  # other programs refuse to write over what is there
                if made.is_dir() and not made.is_symlink():
                    shutil.rmtree(made)
                else:
                    made.unlink(missing_ok=True)
        again = "" if reason == "not done yet" else f" ({reason})"
        self._say(f"\n{number}{again}: {self._of_all(step, 0.0, None)}\n    {self.command(step)}")
        marker = {
            "state": RUNNING,
            "command": [self._name(word) for word in step.words],
            "typed": self.command(step),
            "reads": {self._name(path): self._digest(path) for path in step.reads},
            "seconds": marker.get("seconds", 0.0),
            "processor_seconds": marker.get("processor_seconds", 0.0),
            "guess_s": step.guess_s,
        }
        path = self.folder / f"steps/{step.name}.json"
        storage.write_json(path, marker)
        began, before = time.monotonic(), _processor_seconds()
        try:
            code, printed = self._process(step, number)
        except SystemExit:  # Ctrl-C and the like, which the step has got, too
            self._say(f"{number}: interrupted. The same command goes on from here.")
            raise
        finally:
            marker["seconds"] += time.monotonic() - began
            marker["processor_seconds"] += _processor_seconds() - before
            storage.write_json(path, marker)
        if code == EXIT_INTERRUPTED:  # it was stopped from outside, with its state saved
            raise SystemExit(code)
        missing = [path for path in step.makes if not path.exists()]
        if code not in step.codes or (code and missing):  # a crash ends with 1, as a gate's no does, which has a card
            errors = [line for line in printed if _ERROR.match(line)]
            marker["error"] = errors[-1].partition(": ")[2] if errors else "\n".join(printed[-_TAIL:])
            storage.write_json(path, {**marker, "state": FAILED, "code": code})
            printed_to = f"All that it printed: {self.folder / 'logs' / step.name}.log."
            text = f"{number}, ended with exit code {code}: {marker['error']}\n{printed_to}"
            raise TrainingError(f"{text} The same command goes on from here.{step.cure}")
        if missing:
            raise TrainingError(f"{number}: it ended well, but {missing[0]} is not there.")
        storage.write_json(
            path, {**marker, "state": DONE, "code": code, "finished": time.strftime("%Y-%m-%d %H:%M:%S")}
        )
        return True

    def _say(self, text: str) -> None:
        print(text, file=self.shown, flush=True)

    def _process(self, step: WayStep, number: str) -> tuple[int, list[str]]:
        """Exit code, and the lines that the program printed; its standard output is shown, the log is not."""
        assert self._lock is not None
        environment = {**os.environ, _ROOT: str(self.folder)}
        printed: list[str] = []
        ends: list[float] = []  # of the step, by each of its lines with a time left
        began = time.monotonic()
        next_line = began + FIRST_LINE_S
        with (self.folder / f"logs/{step.name}.log").open("ab") as file:
            child = subprocess.Popen(
                [sys.executable, *step.words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to this process, which passes it on once
                pass_fds=[self._lock.fileno()],  # a step that outlives this process keeps the folder
            )
            threads = [
                threading.Thread(target=self._copy, args=(step, pipe, file, printed, ends, shown), daemon=True)
                for pipe, shown in ((child.stdout, True), (child.stderr, False))
            ]
            for thread in threads:
                thread.start()
            with _passed_on(child):
                while child.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.1)
                    if (now := time.monotonic()) >= next_line:
                        next_line = now + max(LINES_S, (now - began) / 20)
                        in_step = max(0.0, ends[-1] - now) if ends else None
                        of_step = "" if in_step is None else f"{duration(in_step)} left, "
                        self._say(f"{number}: {of_step}{self._of_all(step, now - began, in_step)}{busy()}")
            for thread in threads:
                thread.join()
        return child.returncode, printed

    def _copy(
        self, step: WayStep, pipe: IO[bytes], file: IO[bytes], printed: list[str], ends: list[float], is_shown: bool
    ) -> None:
        for line in pipe:
            file.write(line)
            file.flush()
            text = line.decode(errors="backslashreplace").rstrip()
            printed.append(text)
            if (left_s := time_left(text, step)) is not None:
                ends.append(time.monotonic() + left_s)
            if is_shown and text:
                self._say(f"    | {text}")

    def _of_all(self, now: WayStep, in_step_s: float, left_s: float | None) -> str:
        """``about 6 min left of 20 min``, of the whole way, by the speed of the steps that are done and of this one; at
        first by how many programs share the processors."""
        markers = {step.name: self.marker(step) for step in self.steps if step is not now}
        done = [step for step in self.steps if step is not now and markers[step.name].get("state") == DONE]
        took, guessed = sum(markers[step.name]["seconds"] for step in done), sum(step.guess_s for step in done)
        in_all, guessed_in_all = took, guessed
        if left_s is not None and in_step_s >= LEAST_MEASURED_S:
            in_all, guessed_in_all = took + in_step_s + left_s, guessed + now.guess_s
        is_measured = guessed_in_all >= LEAST_MEASURED_S
        speed = in_all / guessed_in_all if is_measured else max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        left = max(0.0, speed * now.guess_s - in_step_s) if left_s is None else left_s
        later = [step for step in self.steps[self.steps.index(now) + 1 :] if step not in done]
        left += speed * sum(step.guess_s for step in later if step.name not in self.left_out)
        return f"about {duration(left)} left of {duration(took + in_step_s + left)}"


def busy() -> str:
    """A note where more programs run than this machine has processors: the way is slower by them."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    return f" (a busy machine: load {load:.1f} on {processors} processors)" if load > BUSY * processors else ""


def time_left(line: str, step: WayStep) -> float | None:
    """Seconds that a step still needs by a line of its program; None where it has none. A run also prints what is left
    of a validation: only the lines of its iterations are of the whole."""
    if (found := _LEFT.search(line)) is None or (_TRAIN in step.words and " iter " not in line):
        return None
    count, unit, more, smaller = found.groups()
    return int(count) * _SECONDS[unit] + (int(more) * _SECONDS[smaller] if more else 0)


@contextlib.contextmanager
def _passed_on(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """SIGINT and SIGTERM go to the step, which saves its state; this process ends as the step has."""

    def stop(*_: object) -> None:
        raise SystemExit(EXIT_INTERRUPTED)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    except BaseException:
        child.terminate()
        child.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of a folder's files; of large files size and both ends. Empty
    where there is nothing."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    if not files:
        return ""
    for one in files:
        size = one.stat().st_size
        name = "" if one == path else str(one.relative_to(path))
        found.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        with one.open("rb") as file:
            if size <= _WHOLE:
                found.update(file.read())
            else:
                found.update(file.read(_ENDS))
                file.seek(-_ENDS, os.SEEK_END)
                found.update(file.read())
    return found.hexdigest()


def _processor_seconds() -> float:
    """Processor-seconds of the child processes that have ended, and of their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
