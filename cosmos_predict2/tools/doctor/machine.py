# SPDX-License-Identifier: Apache-2.0
"""The machine below: cores, memory, shared memory, open files, disks, and variables that change what a run does."""

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from cosmos_predict2.data.jobs import num_cores
from imaginaire import storage
from imaginaire.findings import Finding, Level, graded
from imaginaire.training import memory

_GB = 10**9
_CLIP = 93 * 3 * 704 * 1280  # bytes of one clip of 720p, as a worker hands it over
_CHECKPOINT = 31 * _GB  # of the 2B network with its average and optimizer
_OPEN_FILES = 4096
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
_SHOWN = {
    "COSMOS_PREDICT2_ARGS", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT",
    "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "PYTHONPATH", "WANDB_API_KEY", "WANDB_MODE",
}  # fmt: skip
_SHOWN_PREFIXES = ("IMAGINAIRE_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "UCX_", "FI_")
_SLOW: dict[str, tuple[tuple[str, ...], str]] = {  # variable -> values at which it slows a run, what it does
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel is waited for"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "NCCL writes a great deal"),
    "NCCL_IB_DISABLE": (("1",), "machines talk over TCP, not over InfiniBand"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through host memory"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked"),
}


def all_findings() -> Iterator[Finding]:
    yield from processors()
    yield from memories()
    yield open_files()
    yield from disks()
    yield from environment(os.environ)


def processors() -> Iterator[Finding]:
    cores, limit = num_cores(), cpu_limit()
    value = f"{cores} cores" + (f", of which a container may use {limit:g}" if limit is not None else "")
    few = min(cores, limit or cores) < 2
    cure = "training and data workers share one core: expect to wait for data"
    yield graded("machine/processor", value, "warning" if few else "note", cure)
    yield Finding("machine/vector units", torch.backends.cpu.get_cpu_capability())


def cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that a container may use; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memories() -> Iterator[Finding]:
    total, free = int(psutil.virtual_memory().total), memory.host_memory_available()
    value = f"{free / _GB:.1f} of {total / _GB:.1f} GB can be taken"
    cure = "enough for the tiny models only: end other programs, or raise the container's limit"
    yield graded("machine/memory", value, "warning" if free < 4 * _GB else "note", cure)
    yield shared_memory(Path("/dev/shm"))


def shared_memory(place: Path) -> Finding:
    """Number of data workers that the shared memory feeds: each holds two clips in it."""
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    workers = free // (2 * _CLIP)
    value = f"{free / _GB:.2f} GB free: room for {workers} data workers with 720p clips"
    level: Level = "error" if free < 16 * 2**20 else "warning" if workers < 4 else "note"
    cure = "docker run --shm-size=16g (or --ipc=host), or dataloader_train.num_workers=0"
    return graded("machine/shared memory", value, level, cure)


def open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level: Level = "warning" if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES else "note"
    cure = "ulimit -n 65536 before the start: many workers open many files"
    return graded("machine/open files", f"{soft} at once", level, cure)


def disks() -> Iterator[Finding]:
    """Free space where checkpoints, data and runs go."""
    output = os.environ.get("IMAGINAIRE_OUTPUT_ROOT") or "checkpoints"
    for place, what in {"checkpoints": "weights", "datasets": "data", output: "runs"}.items():
        yield _disk(f"machine/disk of {place} ({what})", place)


def _disk(key: str, place: str) -> Finding:
    if storage.is_remote(place):
        return Finding(key, "remote: not checked")
    try:
        free = storage.free_bytes(place)
    except OSError as problem:
        return Finding(key, str(problem), "error", "set IMAGINAIRE_OUTPUT_ROOT to a disk that exists")
    assert free is not None
    existing = Path(place).absolute()
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        cure = f"chown {existing}, or set IMAGINAIRE_OUTPUT_ROOT to a folder that can be written"
        return Finding(key, f"{existing} cannot be written", "error", cure)
    level: Level = "error" if free < _GB else "warning" if free < 2 * _CHECKPOINT else "note"
    cure = f"one checkpoint of the 2B model with its optimizer takes {_CHECKPOINT / _GB:.0f} GB"
    return graded(key, f"{free / _GB:.0f} GB free", level, cure)


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """The variables that are set and matter; secrets are named, never shown."""
    for name in sorted(variables):
        if name not in _SHOWN and not name.startswith(_SHOWN_PREFIXES):
            continue
        value = "is set" if any(word in name for word in _SECRET) else variables[name]
        slow, effect = _SLOW.get(name, ((), ""))
        level: Level = "warning" if variables[name].upper() in slow else "note"
        yield graded(f"environment/{name}", value, level, f"{effect}: unset {name} unless you debug")
