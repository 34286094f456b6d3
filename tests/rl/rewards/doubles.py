# SPDX-License-Identifier: Apache-2.0
"""Rewards that behave well or badly, requests for them, and a service in a process of its own."""

import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.remote import Answer, NoAnswer, ask
from imaginaire.distributed import free_port
from tests.programs import HANG_S

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.rl.rewards.doubles"


def mean(clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The mean of the latents; what the prompt asks for happens."""
    for prompt in clips.prompts:
        if prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.startswith("sleep "):
            time.sleep(float(prompt.split()[1]))
        if prompt == "raise":
            raise ArithmeticError("this prompt cannot be scored")
    assert clips.latents_B_C_T_H_W is not None
    value = clips.latents_B_C_T_H_W.float().mean(dim=(1, 2, 3, 4))
    return {"value": value, "double": 2 * value}


class Noted:
    """Like ``mean``, and writes each clip that it scores to ``path``.txt."""

    def __init__(self, path: str, pause_s: float = 0.0) -> None:
        self.path = path
        self.pause_s = pause_s

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        with open(f"{self.path}.txt", "a") as file:
            file.write("".join(f"{prompt}\n" for prompt in clips.prompts))
        time.sleep(self.pause_s)
        return mean(clips, context)


class Pixels:
    needs_pixels = True

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        assert clips.video_B_C_F_H_W is not None
        return clips.video_B_C_F_H_W.float().mean(dim=(1, 2, 3, 4))


def latents(size: int = 1, value: float = 1.0) -> Tensor:
    return torch.full((size, 16, 1, 2, 2), value)


def clips_of(*prompts: str, value: float = 1.0) -> Clips:
    return Clips(latents(len(prompts), value), None, list(prompts), 16.0)


def body(*prompts: str, reward: str = "mean", value: float = 1.0, request_id: str | None = None) -> bytes:
    return wire.encode(clips_of(*prompts, value=value), {reward: 1.0}, media="latent", request_id=request_id)


class Served:
    """A service in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, config: str = "", **environment: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.arguments = list(arguments)
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        if config:
            (folder / "service.toml").write_text(config)
            self.arguments += ["--config", str(folder / "service.toml")]

    def start(self, is_ready: bool = True) -> "Served":
        command = [sys.executable, "-m", "scripts.reward_service", "--port", str(self.port)]
        if "--queue" not in self.arguments:
            command += ["--queue", str(self.folder / "queue.sqlite3")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with open(self.folder / "service.log", "ab") as file:
            self.process = subprocess.Popen([*command, *self.arguments], cwd=ROOT, env=environment, stderr=file)
        ends = time.monotonic() + HANG_S
        while is_ready and not self.is_ready():
            assert self.process.poll() is None, self.log()
            if time.monotonic() > ends:
                raise TimeoutError(self.log())
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=HANG_S)

    def log(self) -> str:
        return (self.folder / "service.log").read_text(errors="replace")[-5000:]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def is_ready(self) -> bool:
        try:
            return ask(self.url("/readyz"), None, {}, HANG_S).status == 200
        except NoAnswer:
            return False

    def enqueue(self, data: bytes, **headers: str) -> Answer:
        kind = {"Content-Type": "application/octet-stream", **headers}
        return ask(self.url("/api/reward/enqueue"), data, kind, HANG_S)

    def pull(self, ticket: str, reward: str = "mean", wait: float | None = None, **headers: str) -> Answer:
        fields = {"uuid": ticket, "type": reward} | ({} if wait is None else {"wait": str(wait)})
        form = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        return ask(self.url("/api/reward/pull"), urllib.parse.urlencode(fields).encode(), form, HANG_S)

    def result(self, ticket: str, reward: str = "mean", **headers: str) -> dict[str, Any]:
        """The result of a job at its end, through kills of the service."""
        ends = time.monotonic() + HANG_S
        while True:
            try:
                answer = self.pull(ticket, reward, wait=5, **headers)
                if answer.status != 202:
                    assert answer.status == 200, f"{answer}\n{self.log()}"
                    return answer.content
            except NoAnswer:
                time.sleep(0.1)
            if time.monotonic() > ends:
                raise TimeoutError(self.log())

    def worker_ids(self) -> list[int]:
        import psutil

        assert self.process is not None
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


@contextmanager
def served(folder: Path, *arguments: str, **options: Any) -> Iterator[Served]:
    service = Served(folder, *arguments, **options)
    try:
        yield service.start()
    finally:
        if service.process is not None and service.process.poll() is None:
            service.stop()


def in_threads(number: int, call: Any) -> list[Any]:
    """call(k) for each k at the same time."""
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(call, range(number)))
