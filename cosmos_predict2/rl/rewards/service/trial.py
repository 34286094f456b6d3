# SPDX-License-Identifier: Apache-2.0
"""The service's own trial: one clip through the queue and the worker of each reward."""

import json
import tempfile
import time
from pathlib import Path

import torch

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.service.metrics import Metrics
from cosmos_predict2.rl.rewards.service.opening import open_queue
from cosmos_predict2.rl.rewards.service.queue import ticket_of
from cosmos_predict2.rl.rewards.service.running import listening
from cosmos_predict2.rl.rewards.service.settings import ServiceSettings
from cosmos_predict2.rl.rewards.service.supervisor import Supervisor

SIZE = (13, 64, 96)  # frames, height, width


def try_rewards(settings: ServiceSettings) -> int:
    """Score a moving square by each reward and print the scores; 1 where one fails."""
    with listening(settings.host, settings.port):  # the port is free
        pass
    if "://" in settings.queue:
        open_queue(settings.queue, settings.limits()).close()
    with tempfile.TemporaryDirectory() as folder:
        settings.queue = str(Path(folder) / "queue.sqlite3")
        queue = open_queue(settings.queue, settings.limits())
        supervisor = Supervisor(settings, queue, Metrics())
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
    frames, height, width = SIZE
    video = torch.full((1, 3, frames, height, width), 90, dtype=torch.uint8)
    for f in range(frames):
        video[:, :, f, 24:40, 4 * f : 4 * f + 16] = 220
    return Clips(None, video, ["a bright square moves to the right"], 16.0)
