# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, as a guest: it never asks, never hangs a run and never ends one."""

import logging
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlparse

from imaginaire.errors import ConfigError, near

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_MODES = ("online", "offline", "disabled")


class WandbTracker:
    """One W&B run. The first failure of any call is one warning, and from then on nothing more is sent."""

    def __init__(self, job: Any, run_id: str | None = None) -> None:
        self._job = job
        self._asked_mode = asked_mode(job.wandb_mode)
        self.run_id = run_id
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
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    init_timeout=INIT_TIMEOUT_S,
                    login_timeout=INIT_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                ),
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

    def log_media(self, name: str, kind: str, data: Any, iteration: int, fps: int) -> None:
        """``kind`` is Image or Video; ``data`` a path or an array (image H W C, video T C H W)."""
        if self._run is None:
            return

        def send() -> None:
            import wandb

            fps_if_encoded = None if isinstance(data, str) else fps
            media = wandb.Image(data) if kind == "Image" else wandb.Video(data, fps=fps_if_encoded)
            self._run.log({name: media, "iteration": iteration})

        self._guarded("log", send)

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
        log.warning(
            "W&B: %s asks for online, but there is no key; run `wandb login` or set WANDB_API_KEY. Disabled.", source
        )
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
