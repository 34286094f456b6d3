# SPDX-License-Identifier: Apache-2.0
"""How much host memory there is, and what to do when memory ran out."""

from pathlib import Path

import psutil
import torch

from imaginaire.config.schema import Config

_CGROUPS = (  # folder; file of what a container may use, and of what it uses; entry of the file cache in memory.stat
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory_available() -> int:
    """Bytes that can still be taken: the machine's, or less where a container's limit is nearer."""
    available = int(psutil.virtual_memory().available)
    for folder, limit_file, used_file, cache_entry in _CGROUPS:
        try:
            limit, used = ((Path(folder) / name).read_text().strip() for name in (limit_file, used_file))
            stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            cache = int(stat.get(cache_entry, 0))  # counted as used, but given back on demand
            available = min(available, int(limit) - int(used) + cache)
    return max(available, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def advice(config: Config, error: BaseException) -> str:
    """What to lower, by the keys that this configuration has."""
    advice = []
    batch_size = getattr(config.dataloader_train, "get", lambda key: None)("batch_size")
    if isinstance(batch_size, int) and batch_size > 1:
        accumulate = config.trainer.grad_accum_iter
        advice.append(
            f"dataloader_train.batch_size={batch_size // 2} trainer.grad_accum_iter={accumulate * 2} (the same update)"
        )
    model = getattr(config.model, "get", lambda key: None)("config")
    if model is not None and "fsdp_shard_size" in model:
        advice.append(f"a larger model.config.fsdp_shard_size (now {model['fsdp_shard_size']})")
    if model is not None and "train_architecture" in model and model["train_architecture"] != "lora":
        advice.append("model.config.train_architecture=lora (trains adapters only)")
    advice.append(f"a larger model_parallel.context_parallel_size (now {config.model_parallel.context_parallel_size})")
    if config.dataloader_train is not None and "num_workers" in config.dataloader_train:
        advice.append(
            f"fewer dataloader_train.num_workers (now {config.dataloader_train.get('num_workers')}) when the host ran "
            "out"
        )
    listed = "\n".join(f"  - {item}" for item in advice)
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"Out of memory: {cause}\nTry, in this order:\n{listed}"
