# SPDX-License-Identifier: Apache-2.0
"""One network's weights written in a form that others read: released ``.pt``, safetensors, diffusers' folder.

Tensors are read, cast once and written one after another, so a safetensors file of any size needs the memory of its
largest tensor.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.adapters import agreed_alpha, merge_lora_state
from cosmos_predict2.checkpoints.card import ALPHA_KEY, ModelCard, card_tensors, card_texts, read_card
from cosmos_predict2.checkpoints.diffusers_names import diffusers_config, frame_rate_note, net_kwargs, to_diffusers_name
from cosmos_predict2.checkpoints.dit_weights import Family, describe, inside_a_pipeline, open_dit, require_family
from cosmos_predict2.released import NETWORKS
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, local_file, names_at, shape_of
from imaginaire.distributed.parallel import in_runs
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

FORMS = ("pt", "safetensors", "diffusers")
SHARD_BYTES = 5 * 10**9  # as diffusers cuts
_STEM = "diffusion_pytorch_model"
_README = """\
# Transformer for diffusers

The weights of {source} ({family}), for `CosmosTransformer3DModel`:

```python
transformer = CosmosTransformer3DModel.from_pretrained("{folder}", torch_dtype=torch.bfloat16)
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
    """Weights to read, and the form to write them in."""

    source: str
    destination: str
    form: str
    which: str = "auto"
    dtype: torch.dtype | None = None  # None: as it is
    merge_lora: bool = False
    lora_alpha: float | None = None
    rope_scale: tuple[float, float, float] | None = None  # (t, h, w), where neither release nor run records it
    overwrite: bool = False


def export(job: Export) -> Mapping[str, Tensor]:
    """Write the weights; gives what was written, by the names in the file."""
    tensors, card = open_dit(job.source, job.which), read_card(job.source).opened()
    family = require_family(describe(tensors), None, job.source, tensors)
    tensors, card = _with_adapters(job, tensors, card)
    existing = storage.join(job.destination, "config.json") if job.form == "diffusers" else job.destination
    if not job.overwrite and storage.exists(existing):
        raise CheckpointError(f"{existing} exists already. Choose another destination, or --overwrite.")
    log.info("%s: %s, %d tensors", job.source, family, len(tensors))
    if job.which == "auto" and card.has_average:
        log.info("taking the trained weights where the source has them; --weights ema takes the averaged ones")
    if job.form == "diffusers":
        config = diffusers_config(net_arguments(job, family, card), has_condition_mask=family.kind != "Text2Image")
        tensors = weights.renamed(tensors, to_diffusers_name)
        _write_folder(job.destination, tensors, config, job.dtype, card_texts(card))
        note = frame_rate_note(config)
        text = _README.format(source=job.source, family=family, folder=job.destination, note=note)
        storage.write_text(storage.join(job.destination, "README.md"), text)
        log.info("frame rate: %s", note)
        return tensors
    tensors = weights.renamed(tensors, lambda name: f"net.{name}")
    if job.form == "safetensors":
        facts = {} if card.lora_alpha is None else {"alpha": repr(card.lora_alpha)}
        facts |= {} if card.lora_rank is None else {"base": card.base}
        file = _TensorFile.of(tensors, job.dtype, {"format": "pt", **facts, **card_texts(card)})
        storage.write_atomically(job.destination, file.write)
    else:
        # Copies: a view of a mapped file would take the whole file along.
        state = {name: _cast(tensors[name], job.dtype).clone() for name in tensors} | card_tensors(card)
        state |= {} if card.lora_alpha is None else {ALPHA_KEY: torch.tensor(card.lora_alpha, dtype=torch.float64)}
        storage.write_atomically(job.destination, lambda file: torch.save(state, file))
    return tensors


def _with_adapters(
    job: Export, tensors: Mapping[str, Tensor], card: ModelCard
) -> tuple[Mapping[str, Tensor], ModelCard]:
    """The tensors with their adapters merged or kept, as the job asks, and their card."""
    without = replace(card, lora_rank=None, lora_alpha=None, lora_targets="")
    if card.lora_rank is None:
        if job.merge_lora or job.lora_alpha is not None:
            log.warning("%s has no LoRA adapters: there is nothing to merge, and no alpha", job.source)
        return tensors, without
    alpha = agreed_alpha(job.source, card.lora_alpha, job.lora_alpha)
    if job.merge_lora:
        return merge_lora_state(tensors, alpha, where=job.source, dtype=job.dtype), without
    if job.form == "diffusers":
        raise CheckpointError(
            f"{job.source} has LoRA adapters, which diffusers' transformer folder has no place for: --merge-lora, or"
            " --to diffusers-lora for the adapters alone."
        )
    if alpha is None:
        log.warning(
            "the adapters are written beside the weights, and their alpha, which nothing records, is not: give it with"
            " --lora_alpha NUMBER"
        )
    return tensors, replace(card, lora_alpha=alpha)


def net_arguments(job: Export, family: Family, card: ModelCard) -> dict[str, Any]:
    """The arguments that the network was built with, as diffusers must know them: from its shapes, and RoPE ratios from
    the record or the release."""
    _require_a_class(job.source, family)
    recorded = {key: value for key, value in card.net.items() if not key.startswith("_")}
    recorded = recorded or diffusers_net(job.source) or {}
    released = NETWORKS.get(family.network or "", {})
    if job.rope_scale is not None:
        recorded = {**recorded, **{f"rope_{axis}_extrapolation_ratio": r for axis, r in zip("thw", job.rope_scale)}}
    if not (recorded or released):
        raise ConfigError(
            f"{job.source} is {family}, which is no released size, and no config.yaml of its run lies above it, so its"
            " RoPE ratios are unknown. Give them: --rope_scale T H W."
        )
    return {**released, **recorded, **family.net_arguments}


def _require_a_class(source: str, family: Family) -> None:
    """diffusers' class holds Text2Image and Video2World networks of the published sizes and our own, no others."""
    if family.kind not in ("Text2Image", "Video2World"):
        raise CheckpointError(f"{source} is {family}: diffusers has no class for it. Export it as .pt or .safetensors.")
    if family.size == "0.6B":
        raise CheckpointError(f"{source} is {family}: diffusers has no 0.6B model. Export it as .pt or .safetensors.")
    if "-natten" in source.rpartition("/")[2]:
        raise CheckpointError(
            f"{source} holds weights for sparse (NATTEN) attention, which diffusers has no class for. Export them as"
            " .pt or .safetensors."
        )


def diffusers_net(source: str) -> dict[str, Any] | None:
    """Our network's arguments from the config.json of a diffusers folder; None for any other source."""
    folder = inside_a_pipeline(source)
    if "config.json" not in names_at(folder):
        return None
    try:
        config = foreign_json.load_object(local_file(below(folder, "config.json")))
        return net_kwargs(config) if "num_attention_heads" in config else None
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}/config.json is not diffusers' of a Cosmos network: {error!r}.") from error


# Writing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorFile:
    """The content of a safetensors file: its tensors, their dtypes, and their places in it."""

    tensors: Mapping[str, Tensor]
    header: dict[str, dict[str, Any]]
    cast: torch.dtype | None
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], cast: torch.dtype | None, metadata: Mapping[str, str]) -> "_TensorFile":
        header: dict[str, dict[str, Any]] = {}
        end = 0
        for name in tensors:
            dtype = _target(tensors[name], cast)
            shape = shape_of(tensors, name)
            start, end = end, end + _bytes(shape, dtype)
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        return cls(tensors, header, cast, metadata)

    def write(self, file: BinaryIO) -> None:
        text = json.dumps({"__metadata__": self.metadata, **self.header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in self.header:
            data = _cast(self.tensors[name], self.cast).contiguous()
            file.write(data.flatten().view(torch.uint8).numpy().data)


def _write_folder(
    folder: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    cast: torch.dtype | None,
    record: Mapping[str, str],
) -> None:
    """config.json and the tensors in one file, or in shards with an index; the first file has the record."""
    storage.makedirs(folder)
    sizes = {name: _bytes(shape_of(tensors, name), _target(tensors[name], cast)) for name in tensors}
    shards = list(in_runs(sizes, sizes.__getitem__, SHARD_BYTES))
    files = [f"{_STEM}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = f"{_STEM}.safetensors.index.json"
    if len(shards) == 1:
        files = [f"{_STEM}.safetensors"]
    for file, names in zip(files, shards):
        part = dict(zip(names, names))
        metadata = {"format": "pt", **(record if file == files[0] else {})}
        content = _TensorFile.of(weights.renamed(tensors, part.get), cast, metadata)
        storage.write_atomically(storage.join(folder, file), content.write)
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards) for name in names}
        content_of_index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        storage.write_json(storage.join(folder, index), content_of_index)
        files.append(index)
    storage.write_json(storage.join(folder, "config.json"), config)
    for name in names_at(folder):  # what an earlier export left, which a reader would take for a part of this one
        if name.startswith(_STEM) and name not in files:
            storage.remove(storage.join(folder, name))


def _target(tensor: Tensor, cast: torch.dtype | None) -> torch.dtype:
    return cast if cast is not None and tensor.is_floating_point() else tensor.dtype


def _cast(tensor: Tensor, cast: torch.dtype | None) -> Tensor:
    return tensor.to(_target(tensor, cast))


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
