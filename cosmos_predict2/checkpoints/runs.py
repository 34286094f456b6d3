# SPDX-License-Identifier: Apache-2.0
"""What a training run recorded beside its checkpoints, and the names that it saved without what wrappers add."""

import json
import logging
import math
from typing import Any

from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import local_file, shape_of
from imaginaire.config.lazy_yaml import plain_data, refuse_interpolations
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

STARTS = "runs.jsonl"  # a line of facts for each start of a run
RATE_KEY = "frame_rate"  # there: frames per second of the clips
ALPHA_KEY = "lora_alpha"  # in an exported .pt, beside the weights
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of recomputation, compile, FSDP1


def clean_name(name: str) -> str:
    """The name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def recorded_alpha(path: str) -> float | None:
    """``lora_alpha`` of the adapters of a checkpoint: as the file has it, or the run that it lies in; else None."""
    if "alpha" in (header := safetensors_metadata(path)):
        return float(header["alpha"])
    value = (run_config(path) or {}).get("lora_alpha")
    if isinstance(value, int | float):
        return float(value)
    return float(found) if (found := weights.read(path).get(ALPHA_KEY)) is not None else None


def known_alpha(path: str, given: float | None = None) -> float | None:
    """The alpha of a checkpoint's adapters: what is recorded, else what the user says; an error where they differ."""
    recorded = recorded_alpha(path)
    return given if recorded is None else agreed_alpha(path, recorded, given)


def agreed_alpha(where: str, recorded: float, given: float | None) -> float:
    """The recorded alpha; an error where the user says another."""
    if given is not None and not math.isclose(given, recorded, rel_tol=1e-6):
        raise CheckpointError(
            f"{where} records alpha {recorded:g}, but --lora_alpha (lora_alpha in Python) says {given:g}. Leave it out:"
            " the recorded one is what the adapters were trained with. To make them weaker or stronger, give --lora"
            " PATH:WEIGHT at inference."
        )
    return recorded


def recorded_base(path: str) -> str:
    """The weights that the run of a checkpoint started from; empty where nothing says so, or where it had none."""
    if "base" in (header := safetensors_metadata(path)):
        return header["base"]
    manager = (run_config(path) or {}).get("model_manager_config")
    return str(manager.get("dit_path") or "") if isinstance(manager, dict) else ""


def safetensors_metadata(path: str) -> dict[str, str]:
    """The metadata of a safetensors file; nothing for any other, or where there is none."""
    if not path.endswith(".safetensors"):
        return {}
    import safetensors

    try:
        with safetensors.safe_open(local_file(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return {}  # reading its tensors says why


def run_config(path: str) -> dict[str, Any] | None:
    """``model.config`` of the ``config.yaml`` of the run that a checkpoint lies in, as plain data; None without one."""
    tree: Any = run_tree(path)
    for key in ("model", "config"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def run_tree(path: str) -> dict[str, Any] | None:
    """All of the ``config.yaml`` of the run that a checkpoint lies in, as plain data; None without one."""
    folder = run_folder(path)
    if folder is None:
        return None
    file = storage.join(folder, "config.yaml")
    try:
        tree: Any = plain_data(storage.read_text(file), file)
        refuse_interpolations(tree, file)
    except (ConfigError, CheckpointError) as error:
        log.warning("the run's configuration is not read: %s", error)
        return None
    return tree if isinstance(tree, dict) else None


def recorded_fact(path: str, key: str) -> Any:
    """What the run that a checkpoint lies in recorded of its data, at the last start that says it; else None."""
    folder = run_folder(path) if path else None
    file = storage.join(folder, STARTS) if folder is not None else ""
    if not file or not storage.exists(file):
        return None
    try:
        starts = [json.loads(line) for line in storage.read_text(file).splitlines() if line.strip()]
        found = next((start[key] for start in reversed(starts) if key in start), None)
        refuse_interpolations(found, file)
        return found
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("%s: its '%s' cannot be read (%s)", file, key, error)
        return None


def run_folder(path: str) -> str | None:
    """The folder of the run that a checkpoint lies in, itself or up to three above it; None where none has a
    ``config.yaml``."""
    folder = path.rstrip("/")
    for _ in range(4):
        if not folder or folder.endswith(":/"):
            return None
        is_place = not folder.startswith("hf://") and storage.is_folder(folder)
        if is_place and storage.exists(storage.join(folder, "config.yaml")):
            return folder
        folder = folder.rpartition("/")[0]
    return None


def switches_of(path: str) -> dict[str, Any]:
    """What a run had set when it wrote a checkpoint, by key of ``model.config``: as far as names and shapes tell, and
    ``lora_alpha`` as its ``config.yaml`` has it. Nothing for a file that cannot be read: loading says why."""
    try:
        state = weights.read(path)
        factors = [name for name in state if name.startswith("net.") and name.endswith(".lora_A.default.weight")]
        rank = shape_of(state, factors[0])[0] if factors else None
    except CheckpointError:
        return {}
    found: dict[str, Any] = {"train_architecture": "lora" if factors else "base"}
    if rank is not None:
        found["lora_rank"] = rank
        if (alpha := recorded_alpha(path)) is not None:
            found["lora_alpha"] = alpha
    return found | {"pipe_config.ema.enabled": any(name.startswith("net_ema.") for name in state)}
