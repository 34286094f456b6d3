# SPDX-License-Identifier: Apache-2.0
"""The one sink of metrics: ``metrics.jsonl``, a console line, TensorBoard and Weights & Biases.

Values logged for an iteration are collected and written as one record when the trainer flushes it. A run folder in an
object store is mirrored: files grow in a local folder and are uploaded at most once a minute and at the end. Each is a
side channel: a full disk or a tracker's error costs its records, not the run.
"""

import json
import logging
import math
import netrc
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlparse

import numpy as np
from torch import Tensor

from imaginaire import foreign_json, storage
from imaginaire.errors import ConfigError, near
from imaginaire.log import Pace, duration, percent
from imaginaire.training.callbacks.base import SideChannel

log = logging.getLogger(__name__)

JSONL = "metrics.jsonl"
UPLOAD_INTERVAL_S = 60.0
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_MODES = ("online", "offline", "disabled")

_CONSOLE = (  # metric, how it is shown
    ("train/loss", "loss {:.4f}"),
    ("train/grad_norm", "grad_norm {:.3f}"),
    ("optim/lr_0", "lr {:.3g}"),
    ("train/s_per_iter", "{:.3g} s/iter"),
    ("train/data_percent", "data {:.0f} %"),
    ("device/peak_gpu_mem_gb", "mem {:.1f} GB"),
    ("device/cpu_mem_gb", "host mem {:.1f} GB"),
)
_REMEMBERED = ("device/peak_gpu_mem_gb", "device/cpu_mem_gb")  # measured more rarely than losses are shown


class Metrics:
    """The log of all callbacks. Ranks other than the writer may log too; nothing comes of it.

    Order: constructor, `load_state_dict` on a resume, `open`, then `log` and `flush`, `close`.
    """

    def __init__(
        self,
        run_dir: str,
        job: Any,
        is_writer: bool,
        config: Mapping[str, Any] | None = None,
        max_iter: int | None = None,
    ) -> None:
        self._run_dir = run_dir.removeprefix("file://")
        self._is_writer = is_writer
        self._config = config
        self._wandb = WandbTracker(job)
        self._pace = Pace(max_iter)
        self._values: dict[str, float | Tensor] = {}
        self._values_iteration = 0
        self._remembered: dict[str, float] = {}
        self._also_called: dict[str, str] = {}
        self._folder = self._run_dir
        self._is_open = False
        self._start = 0
        self._records: Path | None = None
        self._board: Any = None
        self._to_file, self._to_board = SideChannel(JSONL), SideChannel("TensorBoard")
        self._to_store = SideChannel("upload of metrics")
        self._last_upload = time.monotonic()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def open(self, iteration: int) -> None:
        """Begin writing at ``iteration``: records of later ones, left by a run that is now repeated, are dropped."""
        if not self._is_writer:
            return
        self._is_open = True
        self._start = iteration
        last_kept = -1
        with self._to_file.attempt():
            last_kept = self._open_records(iteration)
        with self._to_board.attempt():
            self._board = _summary_writer(Path(self._folder, "tensorboard"), iteration)
        self._wandb.start(self._folder, self._config)
        if self._values and (self._values_iteration > iteration or self._values_iteration <= last_kept):
            self._values = {}  # restored, but already on record
        self._write()

    def _open_records(self, iteration: int) -> int:
        """Prepare the folder and the file of records; the last iteration in it."""
        if storage.is_remote(self._run_dir):
            self._temporary = tempfile.TemporaryDirectory(prefix="metrics-")
            self._folder = self._temporary.name
            log.info("metrics: written in %s, sent to %s every %d s", self._folder, self._run_dir, UPLOAD_INTERVAL_S)
            if storage.exists(remote := storage.join(self._run_dir, JSONL)):
                Path(self._folder, JSONL).write_text(storage.read_text(remote), encoding="utf-8")
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        path = Path(self._folder, JSONL)
        last_kept = _truncate(path, iteration)
        path.touch()
        self._records = path
        return last_kept

    def log(self, values: Mapping[str, float | Tensor], iteration: int) -> None:
        """Add scalars to the record of ``iteration``; a tensor is read when the record is written."""
        if not self._is_writer:
            return
        if iteration != self._values_iteration:
            self._write()
        self._values_iteration = iteration
        self._values.update(values)

    def also_call(self, names: Mapping[str, str]) -> None:
        """Have the trackers show metrics under a second name, each by its own; the file has them once."""
        self._also_called.update(names)

    def flush(self, iteration: int) -> None:
        """Write what was logged up to ``iteration``, as one record. Called at the end of every iteration."""
        if iteration > self._start:
            self._pace.step(iteration)
        if self._values_iteration <= iteration:
            self._write()

    def _write(self) -> None:
        if not self._values or not self._is_open:
            return
        values = _as_floats(self._values)  # waits for the device: an error of the training may show here
        iteration = self._values_iteration
        self._values = {}
        if self._records is not None:
            with self._to_file.attempt():
                _append(self._records, values, iteration)
        shown = values | {other: values[name] for name, other in self._also_called.items() if name in values}
        self._on_board(lambda board: [board.add_scalar(name, value, iteration) for name, value in shown.items()])
        self._wandb.log(shown, iteration)
        self._remembered |= {name: values[name] for name in _REMEMBERED if name in values}
        if "train/loss" in values:
            known = self._remembered | values
            log.info("%s", console_line(known, iteration, self._pace.total, self._pace.left_s()))
        if self._temporary is not None and time.monotonic() - self._last_upload >= UPLOAD_INTERVAL_S:
            self._upload()

    def _on_board(self, work: Callable[[Any], object]) -> None:
        """Hand TensorBoard's writer on; after a failure, which its thread does not survive, it is gone."""
        board, self._board = self._board, None
        if board is not None:
            with self._to_board.attempt():
                work(board)
                self._board = board

    def log_image(self, name: str, image: np.ndarray[Any, Any], iteration: int) -> None:
        """A uint8 array H W C, to TensorBoard and W&B."""
        if self._is_writer:
            self._on_board(lambda board: board.add_image(name, image, iteration, dataformats="HWC"))
            self._wandb.log_media(name, lambda wandb: wandb.Image(image), iteration)

    def log_video(self, name: str, video: np.ndarray[Any, Any], iteration: int, fps: int) -> None:
        """A uint8 array T C H W, to W&B."""
        if self._is_writer:
            self._wandb.log_media(name, lambda wandb: wandb.Video(video, fps=fps), iteration)

    def close(self) -> None:
        """Write what is left and end the trackers. A second call does nothing."""
        if not self._is_open:
            return
        self._write()
        self._is_open = False
        self._on_board(lambda board: board.close())
        self._board = None
        self._wandb.close()
        if self._to_file.failures:
            log.warning("%s: %d records were not written", JSONL, self._to_file.failures)
        if self._temporary is not None:
            self._upload()
            self._temporary.cleanup()
            self._temporary = None

    def state_dict(self) -> dict[str, Any]:
        """The W&B run, and what is logged but not yet written: a run killed in between writes it on resume."""
        return {
            "wandb_run_id": self._wandb.run_id,
            "values": _as_floats(self._values),
            "iteration": self._values_iteration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's run and records; one written by another program may lack both."""
        self._wandb.run_id = state.get("wandb_run_id")
        if self._is_writer and state.get("values"):
            self._values, self._values_iteration = dict(state["values"]), state["iteration"]

    def _upload(self) -> None:
        self._last_upload = time.monotonic()
        self._on_board(lambda board: board.flush())
        folder = Path(self._folder)
        with self._to_store.attempt():  # tried again a minute later
            for path in [folder / JSONL, *sorted((folder / "tensorboard").glob("*"))]:
                storage.copy_into(self._run_dir, path, *path.relative_to(folder).parts)


def console_line(
    values: Mapping[str, float], iteration: int, max_iter: int | None = None, left_s: float | None = None
) -> str:
    """``iter 100/3000 3 % loss 0.1234 grad_norm 1.002 lr 0.0001 0.21 s/iter, 9 min left data 3 % mem 12.1 GB``, without
    what is unknown."""
    shown = [f"iter {iteration}" if max_iter is None else f"iter {iteration}/{max_iter} {percent(iteration, max_iter)}"]
    for name, form in _CONSOLE:
        is_host_beside_gpu = name == "device/cpu_mem_gb" and "device/peak_gpu_mem_gb" in values
        if name in values and not is_host_beside_gpu:
            shown.append(form.format(values[name]))
        if name == "train/s_per_iter" and left_s:
            shown[-1] += f", {duration(left_s)} left"
    return " ".join(shown)


def _as_floats(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: value if type(value) is int else float(value) for name, value in values.items()}


def _append(path: Path, values: Mapping[str, float], iteration: int) -> None:
    """One JSON object in a line; NaN and infinities, which JSON lacks, become null."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    record = json.dumps({"iteration": iteration, **finite}).encode() + b"\n"
    with path.open("ab+") as file:  # opened each time: the file may have been removed meanwhile
        if file.tell():
            file.seek(-1, os.SEEK_END)
            record = record if file.read() == b"\n" else b"\n" + record  # a half line of a full disk stays alone
        file.write(record)


def _truncate(path: Path, iteration: int) -> int:
    """Drop records after ``iteration`` and a torn last line; at iteration 0, where nothing is resumed, all of them.

    Gives the last iteration that is left, or -1.
    """
    if not path.exists():
        return -1
    kept, dropped, last = [], 0, -1
    for line, found in _records(path):
        if found is None or found > iteration or iteration == 0:
            dropped += 1
        else:
            kept.append(line)
            last = max(last, found)
    if dropped:
        storage.write_atomically(path, lambda file: file.writelines(kept))
        records = "1 record" if dropped == 1 else f"{dropped} records"
        log.info("%s: dropped %s after iteration %d", path, records, iteration)
    return last


def _records(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """Lines with their iteration; None for a line that is no record."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield line, int(foreign_json.loads(line, constants=True)["iteration"]) if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                yield line, None


def _summary_writer(folder: Path, iteration: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info("TensorBoard: not installed; for it: pip install -e '.[track]'")
        return None
    return SummaryWriter(str(folder), purge_step=iteration + 1 if iteration else None, max_queue=1000, flush_secs=30)


# Weights & Biases -----------------------------------------------------------------------------------------------------


class WandbTracker:
    """One W&B run: it never asks, never hangs a training and never ends one. The first failure of any call is one
    warning, and from then on nothing more is sent."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._asked_mode = asked_mode(job.wandb_mode)
        self.run_id: str | None = None
        self._run: Any = None

    def start(self, folder: str, config: Mapping[str, Any] | None) -> None:
        """Start or continue the run; its local files go below ``folder``."""
        mode = chosen_mode(*self._asked_mode)
        if mode == "disabled":
            return
        try:
            import wandb
        except ImportError:
            log.info("W&B: wandb is not installed; for it: pip install -e '.[track]'")
            return
        is_continued = self.run_id is not None
        self.run_id = self.run_id or secrets.token_hex(4)

        limits: dict[str, Any] = {"init_timeout": INIT_TIMEOUT_S, "login_timeout": INIT_TIMEOUT_S}
        limits["finish_timeout"] = FINISH_TIMEOUT_S

        def init() -> Any:
            run = wandb.init(
                project=self._job.project,
                group=self._job.group,
                name=self._job.name,
                id=self.run_id,
                resume="allow" if mode == "online" else None,
                dir=folder,
                mode=mode,  # type: ignore[arg-type]
                config=dict(config or {}),
                settings=wandb.Settings(silent=True, console="off", **limits),
            )
            run.define_metric("iteration")
            run.define_metric("*", step_metric="iteration")  # a resumed run may repeat them; W&B's own step may not
            return run

        self._run = self._guarded("init", init, INIT_TIMEOUT_S)
        if self._run is not None:
            where = self._run.url if mode == "online" else f"send it with: wandb sync {Path(self._run.dir).parent}"
            log.info("W&B: run %s %s (%s)", self.run_id, "continued" if is_continued else "started", where)

    def log(self, values: Mapping[str, Any], iteration: int) -> None:
        if self._run is not None:
            self._guarded("log", lambda: self._run.log({**values, "iteration": iteration}))

    def log_media(self, name: str, make: Callable[[Any], Any], iteration: int) -> None:
        """``make`` gives what is sent, by the module ``wandb``."""
        if self._run is not None:
            import wandb

            self._guarded("log", lambda: self._run.log({name: make(wandb), "iteration": iteration}))

    def close(self) -> None:
        if self._run is not None:
            self._guarded("finish", self._run.finish, FINISH_TIMEOUT_S)
            self._run = None

    def _guarded(self, what: str, call: Callable[[], Any], limit_s: float | None = None) -> Any:
        """The call's result; after an error nothing more is sent. W&B has time limits too, which not all waits obey."""
        try:
            return call() if limit_s is None else within(2 * limit_s, call)
        except (Exception, SystemExit) as error:  # a guest's failure, or its wish to exit, is not ours
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log.warning("W&B %s failed, so it is off for the rest of this run: %s", what, reason)
            self._run = None
            return None


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result, from a thread that is left alone when it takes longer: a TimeoutError."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    thread = Thread(target=run, name="wandb", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return made.result()


def asked_mode(configured: str | None) -> tuple[str, str | None]:
    """(where from, which): ``WANDB_MODE`` before ``job.wandb_mode``; None when neither is set."""
    source, mode = "WANDB_MODE", os.environ.get("WANDB_MODE")
    if not mode:
        source, mode = "job.wandb_mode", configured
    if mode and mode not in _MODES:
        raise ConfigError(f"{source}={mode} is not a W&B mode.{near(mode, _MODES)}")
    return source, mode or None


def chosen_mode(source: str, mode: str | None) -> str:
    """online, offline or disabled: what was asked for, else online; without a key online becomes disabled."""
    if mode in ("offline", "disabled"):
        return mode
    if has_key():
        return "online"
    if mode == "online":
        log.warning("W&B: %s asks for online, but there is no key: `wandb login` or WANDB_API_KEY. Disabled.", source)
    else:
        log.info("W&B: disabled, no key found (WANDB_API_KEY, `wandb login`, or WANDB_MODE=offline)")
    return "disabled"


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        found = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return False
    return found is not None
