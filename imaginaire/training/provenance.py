# SPDX-License-Identifier: Apache-2.0
"""The record of a run: its code, its command, its machine; and a check that the imported code is ours.

Another distribution can provide packages of the same names; an import then takes whichever comes first on the path.
"""

import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from imaginaire import distributed, storage
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.training.model import ImaginaireModel

log = logging.getLogger(__name__)

DISTRIBUTION = "cosmos-posttrain"
PACKAGES = ("imaginaire", "cosmos_predict2")
LIBRARIES = ["torch", "numpy", "hydra-core", "omegaconf", "safetensors", "fsspec"]
LIBRARIES += ["apex", "flash-attn", "transformer-engine"]

# Environment variables that change what a run does. Saved by name: never the whole environment, which holds secrets.
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "HF_HOME"}
_VARIABLES |= {"LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "WANDB_MODE", "WORLD_SIZE"}
_PREFIXES = ("IMAGINAIRE_", "NCCL_", "PYTORCH_", "SLURM_JOB_", "TORCH_", "TORCHINDUCTOR_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")


def foreign_packages() -> list[str]:
    """One line for each of our packages that another distribution provides or hides; empty when all is ours."""
    providers = _other_providers()
    lines = []
    for package in PACKAGES:
        others, spec = sorted(providers[package]), importlib.util.find_spec(package)  # imports nothing
        place = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
        if others or (place is not None and place.parent != root()):
            cure = f"pip uninstall {' '.join(others)}" if others else "remove that folder from PYTHONPATH"
            lines.append(
                f"'{package}' is imported from {place}, ours is at {root()}, and provided by"
                f" {', '.join(others) or 'no known distribution'} too. Cure: {cure}"
            )
    return lines


def root() -> Path:
    return Path(__file__).resolve().parents[2]


@functools.cache
def _other_providers() -> dict[str, set[str]]:
    """Installed distributions, other than ours, by which of our packages they bring."""
    providers: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for distribution in importlib.metadata.distributions():
        listing = f"\n{distribution.read_text('RECORD') or ''}"
        names = (distribution.read_text("top_level.txt") or "").split()
        for package in PACKAGES:
            if package in names or f"\n{package}/" in listing:
                providers[package].add(distribution.metadata["Name"])
    return {package: names - {DISTRIBUTION, DISTRIBUTION.replace("-", "_")} for package, names in providers.items()}


def run_record() -> dict[str, Any]:
    """The record beside a run's configuration, in plain values (YAML and JSON take it as it is)."""
    known = [name for name in sorted(os.environ) if name in _VARIABLES or name.startswith(_PREFIXES)]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "folder": str(Path.cwd()),
        "git": git_state(root()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "libraries": {name: version for name in LIBRARIES if (version := version_of(name)) is not None},
        "distribution": {
            DISTRIBUTION: version_of(DISTRIBUTION),
            "imported_from": str(root()),
            "foreign": foreign_packages(),
        },
        "cuda": _cuda(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "environment": {name: os.environ[name] for name in known if not any(word in name.upper() for word in SECRET)},
    }


def record_start(
    run_dir: str,
    model: ImaginaireModel,
    optimizer: Optimizer,
    dims: ParallelDims,
    device: torch.device,
    start_iteration: int,
    data_sets: Sequence[Mapping[str, Any]],
) -> None:
    """Log a start of training, and add it to the ``runs.jsonl`` of the run."""
    parameters = list(model.parameters())
    facts = {
        "start_iteration": start_iteration,
        "device": str(device),
        "backend": torch.distributed.get_backend() if distributed.is_initialized() else "none",
        "world_size": dims.world_size,
        "context_parallel_size": dims.context_parallel_size,
        "optimizer": type(optimizer).__name__,
        "precision": str(model.precision).removeprefix("torch."),
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    log.info(
        "training {model}: {parameters:,} parameters ({trained_parameters:,} trained), {device} x{world_size}, "
        "precision {precision}, run folder {folder}".format(
            model=type(model).__name__, folder=run_dir, **{**facts, "device": device.type}
        )
    )
    if distributed.is_rank0():
        add_start(run_dir, facts | model.data_facts(data_sets))


def add_start(run_dir: str, facts: dict[str, Any]) -> None:
    """Add one start of a run to its ``runs.jsonl``."""
    path = storage.join(run_dir, "runs.jsonl")
    before = storage.read_text(path) if storage.exists(path) else ""
    storage.write_text(path, before + json.dumps(run_record() | facts, default=str) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a git checkout or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a file system too slow to ask
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def version_of(distribution: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    driver = Path("/proc/driver/nvidia/version")
    return {
        "runtime": torch.version.cuda,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
