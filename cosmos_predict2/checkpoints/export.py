# SPDX-License-Identifier: Apache-2.0
"""One network's weights written in a form that others read: a released ``.pt``, safetensors, a folder of DCP, of
diffusers, of Wan2.1's own repository.

Tensors are read, cast once and written one after another, so a safetensors file of any size needs the memory of its
largest tensor. The card of the weights is written with them.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor

from cosmos_predict2.checkpoints import diffusers_names
from cosmos_predict2.checkpoints.adapters import DIFFUSERS_FILE, PEFT_FILES, agreed_alpha, merge_lora_state
from cosmos_predict2.checkpoints.card import ALPHA_KEY, card_tensors, card_texts
from cosmos_predict2.checkpoints.networks import CONFIG, Config, Network, open_network, require_constants
from cosmos_predict2.checkpoints.publishing import CARD, model_card
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.dcp import write_tree
from imaginaire.checkpoint.weight_files import names_at, shape_of
from imaginaire.distributed.parallel import in_runs
from imaginaire.errors import CheckpointError

log = logging.getLogger(__name__)

FORMS = ("pt", "safetensors", "diffusers", "original", "dcp-weights")
FILES = {"dcp-weights": ".metadata", "diffusers": CONFIG, "original": CONFIG}  # of the forms that are folders
FILES |= {"peft": PEFT_FILES[0], "diffusers-lora": DIFFUSERS_FILE}
SHARD_BYTES = 5 * 10**9  # as diffusers cuts
_STEM = "diffusion_pytorch_model"
_README = """\

For diffusers:

```python
{variable} = {name}.from_pretrained("{folder}", torch_dtype=torch.bfloat16)
```

## Frame rate

{note}
"""
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Export:
    """Weights or adapters to read, and the form to write them in."""

    source: str
    destination: str  # a file; of diffusers and of adapters a folder
    form: str
    which: str = "auto"  # "net" or "net_ema" where there are both
    dtype: torch.dtype | None = None  # None: as it is
    merge_lora: bool = False
    lora_alpha: float | None = None  # where nothing records it
    rope_scale: tuple[float, float, float] | None = None  # (t, h, w), where neither release nor run records it
    overwrite: bool = False


def export(job: Export) -> Mapping[str, Tensor]:
    """Write the weights; gives what was written, by the names in the file."""
    network, folder = network_of_job(job), job.destination
    card, existing = network.card, written_file(job)
    if not job.overwrite and storage.exists(existing):
        raise CheckpointError(f"{existing} exists already. Choose another destination, or --overwrite.")
    log.info("%s: %s, %d tensors", job.source, network.described, len(network.tensors))
    if job.which == "auto" and card.has_average:
        log.info("taking the trained weights where the source has them; --weights ema takes the averaged ones")
    if job.form in ("diffusers", "original"):
        rename, config = (network.rename, network.config) if job.form == "diffusers" else (str, _original(network))
        content = config()
        tensors = weights.renamed(network.tensors, rename)
        write_folder(folder, tensors, content, job.dtype, card_texts(card))
        if more := readme(content, folder, content["_class_name"]):
            storage.write_text(storage.join(folder, CARD), model_card(folder, job.source, more))
            log.info("frame rate: %s", diffusers_names.frame_rate_note(content))
        return tensors
    require_constants(network)
    tensors = weights.renamed(network.tensors, lambda name: f"{network.prefix}{name}")
    if job.form == "safetensors":
        facts = {} if card.lora_alpha is None else {"alpha": repr(card.lora_alpha)}
        facts |= {} if card.lora_rank is None else {"base": card.base}
        metadata = {"format": "pt", **facts, **card_texts(card)}
        storage.write_atomically(folder, partial(_write_tensors, tensors, job.dtype, metadata))
        return tensors
    # Copies: a view of a mapped file would take the whole file along.
    state = {name: cast_to(tensors[name], job.dtype).clone() for name in tensors} | card_tensors(card)
    state |= {} if card.lora_alpha is None else {ALPHA_KEY: torch.tensor(card.lora_alpha, dtype=torch.float64)}
    if job.form == "pt":
        storage.write_atomically(folder, lambda file: torch.save(state, file))
    else:
        write_tree(folder, state, None)
    return tensors


def readme(config: Config, folder: str, name: str) -> str:
    """The part of a card on weights for diffusers; empty for a network without frame rates."""
    if config["_class_name"] != diffusers_names.CLASS_NAME:
        return ""
    variable = "transformer" if name == config["_class_name"] else "pipe"
    words = dict(name=name, variable=variable, folder=os.path.basename(os.path.normpath(folder)))
    return _README.format(**words, note=diffusers_names.frame_rate_note(config))


def written_file(job: Export) -> str:
    """The file that is there when the export is."""
    return storage.join(job.destination, FILES[job.form]) if job.form in FILES else job.destination


def network_of_job(job: Export) -> Network:
    """The network to write with its adapters merged or kept, as the job asks, and its card for that."""
    network = open_network(job.source, job.which, job.rope_scale)
    card = network.card
    without = replace(card, lora_rank=None, lora_alpha=None, lora_targets="")
    if card.lora_rank is None:
        if job.merge_lora or job.lora_alpha is not None:
            log.warning("%s has no LoRA adapters: there is nothing to merge, and no alpha", job.source)
        return replace(network, card=without)
    alpha = agreed_alpha(job.source, card.lora_alpha, job.lora_alpha)
    if job.merge_lora:
        merged = merge_lora_state(network.tensors, alpha, where=job.source, dtype=job.dtype)
        return replace(network, tensors=merged, card=without)
    if job.form in ("diffusers", "original"):
        raise CheckpointError(
            f"{job.source} has LoRA adapters, which the folder of a network has no place for: --merge-lora, or --to"
            " diffusers-lora for the adapters alone."
        )
    if alpha is None:
        log.warning(
            "the adapters are written beside the weights, and their alpha, which nothing records, is not: give it with"
            " --lora_alpha NUMBER"
        )
    return replace(network, card=replace(card, lora_alpha=alpha))


def _original(network: Network) -> Callable[[], Config]:
    if network.original_config is None:
        raise CheckpointError(
            f"{network.source} is {network.described}: it was released as a single file, with the names that --to pt"
            " and --to safetensors write. --to original is for networks of Wan2.1."
        )
    return network.original_config


# Writing --------------------------------------------------------------------------------------------------------------


def _write_tensors(
    tensors: Mapping[str, Tensor], cast: torch.dtype | None, metadata: Mapping[str, str], file: BinaryIO
) -> None:
    """Fill a safetensors file: its header, then one tensor after another."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in tensors:
        shape, dtype = shape_of(tensors, name), _target(tensors[name], cast)
        start, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in tensors:
        file.write(cast_to(tensors[name], cast).flatten().view(torch.uint8).numpy().data)


def write_folder(
    folder: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    record: Mapping[str, str],
    stem: str = _STEM,
) -> None:
    """config.json and the tensors in one file, or in shards with an index; the first file has the record."""
    storage.makedirs(folder)
    sizes = {name: _bytes(shape_of(tensors, name), _target(tensors[name], dtype)) for name in tensors}
    shards = list(in_runs(sizes, sizes.__getitem__, SHARD_BYTES))
    files = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [f"{stem}.safetensors"]
    for file, names in zip(files, shards):
        part = weights.renamed(tensors, dict(zip(names, names)).get)
        metadata = {"format": "pt", **(record if file == files[0] else {})}
        storage.write_atomically(storage.join(folder, file), partial(_write_tensors, part, dtype, metadata))
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards) for name in names}
        files.append(f"{stem}.safetensors.index.json")
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        storage.write_json(storage.join(folder, files[-1]), index)
    storage.write_json(storage.join(folder, CONFIG), config)
    for name in names_at(folder):  # what an earlier export left, which a reader would take for a part of this one
        if name.startswith(stem) and name not in files:
            storage.remove(storage.join(folder, name))


def _target(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def cast_to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(_target(tensor, dtype))


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
