# SPDX-License-Identifier: Apache-2.0
"""Installed packages: Python, torch, the GPU's driver, our own, and what each optional one would bring."""

import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from packaging.requirements import Requirement

from imaginaire.findings import Finding, graded
from imaginaire.training import provenance


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


def ours() -> Iterator[Finding]:
    yield Finding("packages/python", platform.python_version())
    root = provenance.root()
    git = provenance.git_state(root)
    commit = "no git checkout" if git is None else git["commit"][:12] + (" with changes" if git["dirty"] else "")
    version = _version(provenance.DISTRIBUTION)
    value = f"{version or 'not installed'} ({commit}) in {root}"
    cure = "it runs from this folder only: make setup, or pip install -c constraints.txt -e ."
    yield graded(f"packages/{provenance.DISTRIBUTION}", value, "note" if version else "warning", cure)
    for line in provenance.foreign_packages():
        yield Finding("packages/a foreign package", line, "error")


def required() -> Iterator[Finding]:
    """Packages that our distribution requires; those that are in order are one line."""
    in_order = []
    for text in importlib.metadata.requires(provenance.DISTRIBUTION) or [] if _version(provenance.DISTRIBUTION) else []:
        requirement = Requirement(text)
        if "extra ==" in text:
            continue
        name, found = requirement.name, _version(requirement.name)
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
        if (version := _version(package.distribution)) is None:
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
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
