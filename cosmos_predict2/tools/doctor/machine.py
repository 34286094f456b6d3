# SPDX-License-Identifier: Apache-2.0
"""The machine and what is installed on it: Python, torch, the GPU's driver, our packages and what each optional one
would bring; cores, memory, shared memory, open files, disks, and variables that change what a run does.
"""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement

from cosmos_predict2.tools.jobs import num_cores
from imaginaire import storage
from imaginaire.errors import first_line
from imaginaire.findings import Finding, Level, graded
from imaginaire.training import memory, provenance

_GB = 10**9
_CLIP = 93 * 3 * 704 * 1280  # bytes of one clip of 720p, as a worker hands it over
_CHECKPOINT = 31 * _GB  # of the 2B network with its average and optimizer
_OPEN_FILES = 4096
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


@dataclass(frozen=True, slots=True)
class Optional:
    """A package of an extra; ``module`` of one that is compiled for a torch."""

    distribution: str
    extra: str
    brings: str
    module: str = ""


OPTIONAL = [
    Optional("nvidia-ml-py", "gpu", "temperature, power and load of the GPU in the logs"),
    Optional("flash-attn", "flash", "the attention backends flash and flash2", "flash_attn"),
    Optional("transformer-engine", "te", "the attention backend transformer_engine", "transformer_engine"),
    Optional("megatron-core", "compat", "experiment files that import megatron.core.parallel_state"),
    Optional("s3fs", "s3", "checkpoints and runs on s3://"),
    Optional("huggingface_hub", "weights", "the download of released weights, hub ids as paths"),
    Optional("transformers", "weights", "the text encoders T5 and Reason1"),
    Optional("sentencepiece", "weights", "the tokenizer of T5"),
    Optional("h5py", "data", "LIBERO's HDF5 recordings"),
    Optional("pyarrow", "data", "LeRobot's parquet tables"),
    Optional("wandb", "track", "curves at Weights & Biases"),
    Optional("tensorboard", "track", "curves in TensorBoard"),
]
_FROM_SOURCE = [  # no extra can install these
    ("flash_attn_interface", "FlashAttention-3", "the fastest attention on Hopper GPUs",
     "build it from the hopper folder of github.com/Dao-AILab/flash-attention"),
    ("apex", "NVIDIA apex", "its fused optimizer; without it torch's fused one is used",
     "build it from github.com/NVIDIA/apex ('apex' on the package index is another project)"),
]  # fmt: skip


def all_findings() -> Iterator[Finding]:
    yield from ours()
    yield from required()
    yield from accelerators()
    yield from optional()
    yield from processors()
    yield from memories()
    yield open_files()
    yield from disks()
    yield from environment(os.environ)


# --- what is installed


def ours() -> Iterator[Finding]:
    yield Finding("packages/python", platform.python_version())
    root = provenance.root()
    git = provenance.git_state(root)
    commit = "no git checkout" if git is None else git["commit"][:12] + (" with changes" if git["dirty"] else "")
    version = provenance.version_of(provenance.DISTRIBUTION)
    value = f"{version or 'not installed'} ({commit}) in {root}"
    cure = "it runs from this folder only: make setup, or pip install -c constraints.txt -e ."
    yield graded(f"packages/{provenance.DISTRIBUTION}", value, "note" if version else "warning", cure)
    for line in provenance.foreign_packages():
        yield Finding("packages/a foreign package", line, "error")


def required() -> Iterator[Finding]:
    """Packages that our distribution requires; those that are in order are one line."""
    in_order = []
    is_installed = provenance.version_of(provenance.DISTRIBUTION) is not None
    for text in importlib.metadata.requires(provenance.DISTRIBUTION) or [] if is_installed else []:
        requirement = Requirement(text)
        if "extra ==" in text:
            continue
        name, found = requirement.name, provenance.version_of(requirement.name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            in_order.append(f"{name} {found}")
        else:
            value = "not installed" if found is None else f"{found}, but {text} is needed"
            yield Finding(f"packages/{name}", value, "error", f"pip install -c constraints.txt '{text}'")
    if in_order:
        yield Finding("packages/required", ", ".join(in_order))


def optional() -> Iterator[Finding]:
    for package in OPTIONAL:
        key, cure = f"optional packages/{package.distribution}", f"pip install -e '.[{package.extra}]'"
        if (version := provenance.version_of(package.distribution)) is None:
            yield Finding(key, f"not installed: {package.brings}", "warning", cure)
        elif package.module and (problem := _import_problem(package.module)):
            value = f"{version}, but it cannot be imported: {problem}"
            yield Finding(key, value, "error", f"build it for this torch: {cure}")
        else:
            yield Finding(key, f"{version}: {package.brings}")
    for module, name, brings, cure in _FROM_SOURCE:
        key = f"optional packages/{name}"
        if importlib.util.find_spec(module) is None:
            yield Finding(key, f"not installed: {brings}", "warning", cure)
        elif problem := _import_problem(module):
            yield Finding(key, f"cannot be imported: {problem}", "error", cure)
        else:
            yield Finding(key, f"installed: {brings}")


def accelerators() -> Iterator[Finding]:
    """Driver, CUDA, NCCL and the GPUs."""
    driver = _driver()
    if not torch.cuda.is_available():
        if driver is None:
            yield Finding("device/GPU", "none: everything runs on the CPU")
        elif torch.version.cuda is None:
            cure = f"pip install -c constraints.txt --force-reinstall torch=={torch.__version__.partition('+')[0]}"
            yield Finding("device/GPU", f"driver {driver}, but torch {torch.__version__} is for CPUs", "error", cure)
        else:
            value = f"driver {driver}, torch is for CUDA {torch.version.cuda}, but sees no device"
            yield Finding("device/GPU", value, "error", "look at CUDA_VISIBLE_DEVICES; a container needs --gpus all")
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    cudnn = torch.backends.cudnn.version()
    yield Finding("device/CUDA", f"{torch.version.cuda}, driver {driver or 'unknown'}, cuDNN {cudnn}, NCCL {nccl}")
    for index in range(torch.cuda.device_count()):
        yield gpu(index, torch.cuda.get_device_properties(index), torch.cuda.get_arch_list())


def gpu(index: int, properties: Any, architectures: list[str]) -> Finding:
    """One GPU, and whether this torch holds kernels for it."""
    generation = f"{properties.major}.{properties.minor}"
    value = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, compute capability {generation}"
    built = [int(name[3:].rstrip("af")) for name in architectures if name.startswith("sm_")]
    mine = properties.major * 10 + properties.minor
    # binaries run on later devices of their major number; compute_ entries are compiled at run time
    fits = any(code // 10 == properties.major and code <= mine for code in built)
    fits = fits or any(int(name[8:].rstrip("af")) <= mine for name in architectures if name.startswith("compute_"))
    if built and not fits:
        cure = f"install a torch whose kernels include sm_{mine}; this one has {', '.join(architectures)}"
        return Finding(f"device/GPU {index}", value, "error", cure)
    if properties.major < 8:
        return Finding(f"device/GPU {index}", value, "warning", "bfloat16 is slow before compute capability 8.0")
    return Finding(f"device/GPU {index}", value)


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = run.stdout.split()
    return lines[0] if run.returncode == 0 and lines else None


def _import_problem(module: str) -> str | None:
    """The error of importing a compiled package: most often it was built for another torch."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package may do anything while it is imported
        return first_line(error)
    return None


# --- the machine below


def processors() -> Iterator[Finding]:
    cores, limit = num_cores(), cpu_limit()
    value = f"{cores} cores" + (f", of which a container may use {limit:g}" if limit is not None else "")
    few = min(cores, limit or cores) < 2
    cure = "training and data workers share one core: expect to wait for data"
    yield graded("machine/processor", value, "warning" if few else "note", cure)
    yield Finding("machine/vector units", torch.backends.cpu.get_cpu_capability())


def cpu_limit() -> float | None:
    """Cores' worth of time that a container may use; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
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
    try:
        free = storage.free_bytes(place)
    except OSError as problem:
        return Finding(key, str(problem), "error", "set IMAGINAIRE_OUTPUT_ROOT to a disk that exists")
    if free is None:
        return Finding(key, "remote: not checked")
    existing = storage.nearest_folder(place)
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
        value = "is set" if any(word in name for word in provenance.SECRET) else variables[name]
        slow, effect = _SLOW.get(name, ((), ""))
        level: Level = "warning" if variables[name].upper() in slow else "note"
        yield graded(f"environment/{name}", value, level, f"{effect}: unset {name} unless you debug")
