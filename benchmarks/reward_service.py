# SPDX-License-Identifier: Apache-2.0
"""The reward service end to end: videos per second and latencies at 1, 8 and 64 clients.

    python -m benchmarks.reward_service [--quick] [--videos 256] [--queue redis://HOST:PORT/DB]

Each client posts the latent of one video in bfloat16, waits for its score with a pull, and posts the next. The reward
takes the mean of a latent, so what is measured is the service: HTTP, the durable queue, the worker, the wait. Clients,
service and worker share this machine.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.remote import RemoteReward
from imaginaire.distributed import free_port

CLIENTS = (1, 8, 64)
SHAPES = {"93 frames, 480p": (1, 16, 24, 54, 96), "17 frames, 240p": (1, 16, 5, 30, 40)}


def mean(clips: Clips, context: Mapping[str, Any]) -> torch.Tensor:
    """The reward that is served."""
    assert clips.latents_B_C_T_H_W is not None
    return clips.latents_B_C_T_H_W.float().mean(dim=(1, 2, 3, 4))


def main() -> None:
    parser = machine.parser(__doc__, "quick")
    parser.add_argument("--videos", type=int, default=256, help="videos of each measurement (default: %(default)s)")
    parser.add_argument("--queue", help="a Redis to use in place of a temporary file of SQLite")
    arguments = parser.parse_args()
    num_videos = 64 if arguments.quick else arguments.videos
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        service = start(port, arguments.queue or str(Path(folder) / "queue.sqlite3"))
        try:
            await_ready(service, port)
            print(f"{machine.described(torch.device('cpu'))}; {num_videos} videos")
            for name, shape in SHAPES.items():
                measure(name, shape, port, num_videos)
        finally:
            service.terminate()
            service.wait(timeout=60)


def start(port: int, queue: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "scripts.reward_service", "--port", str(port), "--queue", queue]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "IMAGINAIRE_LOG_LEVEL": "WARNING"}
    return subprocess.Popen([*command, "--rewards", "mean=benchmarks.reward_service:mean"], env=environment)


def await_ready(service: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait until a first request would be scored."""
    import urllib.request

    while True:
        if service.poll() is not None:
            raise SystemExit("the service did not start")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.2)


def measure(name: str, shape: tuple[int, ...], port: int, num_videos: int) -> None:
    """Print a table for latents of one shape."""
    latents = torch.randn(shape).to(torch.bfloat16)
    print(f"\n{name}: latents of {latents.numel() * 2 / 1e6:.1f} MB")
    print(f"  {'clients':>8} {'videos/s':>9} {'MB/s':>7}   latency ms: {'p50':>6} {'p90':>7} {'p99':>7}")
    for clients in CLIENTS:
        seconds, latencies = run(latents, clients, num_videos, port)
        rate = num_videos / seconds
        cut = statistics.quantiles(latencies, n=100)
        shown = f"{1000 * cut[49]:13.0f} {1000 * cut[89]:7.0f} {1000 * cut[98]:7.0f}"
        megabytes = rate * latents.numel() * 2 / 1e6
        print(f"  {clients:8} {rate:9.1f} {megabytes:7.0f} {shown:>32}", flush=True)


def run(latents: torch.Tensor, clients: int, num_videos: int, port: int) -> tuple[float, list[float]]:
    """Seconds for all videos, and the seconds of each from its post to its score."""
    url = f"http://127.0.0.1:{port}/api/reward"
    latencies: list[float] = []
    stamp = time.time()

    def client(number: int) -> None:
        reward = RemoteReward("mean", enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/pull")
        for k in range(number, num_videos, clients):
            began = time.perf_counter()
            ticket = reward.submit(Clips(latents, None, [f"video {k} of {clients} at {stamp}"], 16.0), {}, f"{k}")
            scores = reward.fetch(ticket, 120.0)
            if not bool(scores.is_valid_B.all()):
                raise SystemExit("a score is invalid: see the log")
            latencies.append(time.perf_counter() - began)
        reward.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(latencies) != num_videos:
        raise SystemExit("a client failed: see the log")
    return time.perf_counter() - began, latencies


if __name__ == "__main__":
    main()
