# SPDX-License-Identifier: Apache-2.0
"""The memory that there is, and advice when it ran out."""

from pathlib import Path

import psutil
import torch

from imaginaire.errors import TrainingError

_ADVICE = (
    "Try a smaller dataloader_train.batch_size with a larger trainer.grad_accum_iter (the same update), a larger"
    " model.config.fsdp_shard_size or model_parallel.context_parallel_size, model.config.train_architecture=lora"
    " (trains adapters only); where the host ran out, fewer dataloader_train.num_workers."
)
_CGROUPS = (  # folder; file of what a container may use, and of what it uses; entry of the file cache in memory.stat
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: torch.device, *, has_graphs: bool = False) -> int:
    """Bytes that can be had there, those that PyTorch holds unused among them, unless captured graphs may hold them."""
    if device.type != "cuda":
        return host_memory_available()
    held = 0 if has_graphs else torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


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


def explained(error: BaseException, advice: str = "") -> TrainingError | None:
    """The error of a device or a host without memory, with a model's own ``advice`` or that for most models; None for
    another."""
    if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)):
        return None
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TrainingError(f"Out of memory: {cause}\n{advice or _ADVICE}")
