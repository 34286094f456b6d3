# SPDX-License-Identifier: Apache-2.0
"""The whole service in this process and its workers: served until a signal stops it, or tried with one clip."""

import contextlib
import fcntl
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.service.queue import ticket_of
from cosmos_predict2.rl.rewards.service.settings import ServiceSettings, open_queue
from cosmos_predict2.rl.rewards.service.supervisor import Supervisor
from imaginaire.errors import ConfigError, missing_package
from imaginaire.listening import in_address, listening

log = logging.getLogger(__name__)


def serve(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or Ctrl-C; running jobs are finished, waiting ones stay in the queue."""
    try:
        import uvicorn

        from cosmos_predict2.rl.rewards.service.server import Service, create_app
    except ImportError as error:
        raise missing_package(str(error.name), "reward") from error

    with listening(settings.host, settings.port) as listener, sole_owner(settings.queue):
        queue = open_queue(settings.queue, settings.limits())
        if waiting := queue.recover():
            log.info("%d jobs of the service before wait again", waiting)
        supervisor = Supervisor(settings, queue)
        service = Service(settings, queue, supervisor)

        class Server(uvicorn.Server):
            should_exit: bool

            def handle_exit(self, sig: int, frame: Any) -> None:
                """Without the base's note of the signal, which would end this process before its workers are done."""
                service.is_draining = True
                self.force_exit = self.should_exit
                self.should_exit = True

        options = uvicorn.Config(
            create_app(service),
            ws="none",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
            server_header=False,
        )
        supervisor.start()
        address = f"http://{in_address(settings.host)}:{listener.getsockname()[1]}"
        log.info("rewards %s at %s", ", ".join(service.names), address)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                Server(options).run(sockets=[listener])
        finally:
            service.is_draining = True
            supervisor.stop()
            queue.close()
        log.info("the reward service has stopped; what waits is kept in the queue")
    return 0


@contextlib.contextmanager
def sole_owner(queue: str) -> Iterator[None]:
    """Only one service at a time has a queue on disk."""
    if "://" in queue:
        yield
        return
    path = Path(f"{queue}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another service has the queue {queue}. Stop it, or give --queue another file; "
                "services on several machines share a redis:// queue."
            ) from error
        yield


def try_rewards(settings: ServiceSettings) -> int:
    """Score a moving square by each reward and print the scores; 1 where one fails."""
    with listening(settings.host, settings.port):  # the port is free
        pass
    if "://" in settings.queue:
        open_queue(settings.queue, settings.limits()).close()
    with tempfile.TemporaryDirectory() as folder:
        settings.queue = str(Path(folder) / "queue.sqlite3")
        queue = open_queue(settings.queue, settings.limits())
        supervisor = Supervisor(settings, queue)
        supervisor.start()
        failures = 0
        try:
            for reward in settings.rewards:
                name = reward.reward_type
                began = time.monotonic()
                is_good, text = _tried(supervisor, name)
                took = time.monotonic() - began
                failures += not is_good
                print(f"{name:20} {'ok   ' if is_good else 'FAILS'} {took:6.1f} s  {text}", flush=True)
        finally:
            supervisor.stop()
            queue.close()
    return int(failures > 0)


def _tried(supervisor: Supervisor, name: str) -> tuple[bool, str]:
    clips = moving_square()
    context = {"true_video": clips.video_B_C_F_H_W, "num_conditional_frames": torch.tensor([1])}
    body = wire.encode(clips, {name: 1.0}, media="video", context=context)
    ticket = ticket_of(None)
    supervisor.queue.put(ticket, {name: ""}, body, "trial", 1)
    while True:
        status = supervisor.queue.look(ticket, name)
        assert status is not None
        if status.state == "done":
            assert status.result is not None
            result = json.loads(status.result)
            return all(result["valid"]), json.dumps(result["scores"])
        if status.state == "failed":
            return False, str(status.error)
        if supervisor.is_broken(name):
            return False, supervisor.why_broken(name)
        time.sleep(0.02)


def moving_square() -> Clips:
    """One video of a bright square that crosses a grey picture."""
    video = torch.full((1, 3, 13, 64, 96), 90, dtype=torch.uint8)
    for f in range(13):
        video[:, :, f, 24:40, 4 * f : 4 * f + 16] = 220
    return Clips(None, video, ["a bright square moves to the right"], 16.0)
