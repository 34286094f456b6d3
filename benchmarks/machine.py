# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs on: the device that the project chooses, its name, and a clock that waits for it."""

import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from imaginaire import distributed


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Where models live here, and the precision that they have there."""
    device = distributed.device()
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def described(device: torch.device) -> str:
    """PyTorch's version with the GPU's name, or with the threads on this kind of processor."""
    is_gpu = device.type == "cuda"
    place = torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} threads, {platform.machine()}"
    return f"torch {torch.__version__}, {place}"


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes, with what it starts on the device."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the device has done all that it was told."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
