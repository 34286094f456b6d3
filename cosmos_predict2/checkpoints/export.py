# SPDX-License-Identifier: Apache-2.0
"""One network's weights written in a form that others read: released ``.pt``, safetensors, diffusers' folder; and its
LoRA adapters alone, as PEFT and diffusers read them.

Tensors are read, cast once and written one after another, so a safetensors file of any size needs the memory of its
largest tensor. ``peft`` is a folder with adapter_model.safetensors and adapter_config.json, in our network's names;
``diffusers-lora`` one with pytorch_lora_weights.safetensors, in diffusers' names. In the header of both stand rank,
alpha, targets, the base with its fingerprint, and the commit of the run.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.adapters import (
    DIFFUSERS_FILE,
    DIFFUSERS_KEY,
    PEFT_CONFIG,
    PEFT_FILES,
    Adapter,
    Factors,
    agreed_alpha,
    merge_lora_state,
    patterns_of,
    read_adapter,
)
from cosmos_predict2.checkpoints.card import ALPHA_KEY, ModelCard, card_tensors, card_texts, read_card
from cosmos_predict2.checkpoints.diffusers_names import diffusers_config, frame_rate_note, net_kwargs, to_diffusers_name
from cosmos_predict2.checkpoints.dit_weights import (
    ACTION_EMBEDDERS,
    Family,
    describe,
    inside_a_pipeline,
    open_dit,
    require_family,
)
from cosmos_predict2.released import NETWORKS
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, local_file, names_at, shape_of
from imaginaire.distributed.parallel import in_runs
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training import provenance

log = logging.getLogger(__name__)

FORMS = ("pt", "safetensors", "diffusers")
ADAPTER_FORMS = ("peft", "diffusers-lora")
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


# Adapters alone -------------------------------------------------------------------------------------------------------


def export_adapter(job: Export, adapter: Adapter | None = None) -> Mapping[str, Tensor]:
    """Write the adapters of the source, or those given; gives what was written, by the names in the file."""
    file = storage.join(job.destination, PEFT_FILES[0] if job.form == "peft" else DIFFUSERS_FILE)
    if not job.overwrite and storage.exists(file):
        raise CheckpointError(f"{file} exists already. Choose another destination, or --overwrite.")
    if adapter is None:
        adapter = read_adapter(job.source, alpha=job.lora_alpha, which=job.which)
    _require_only_adapters(adapter, job)
    rename: Callable[[str], str] = str if job.form == "peft" else _their_name
    names = {layer: rename(layer) for layer in adapter.layers}
    card = read_card(job.source)
    targets = _targets(list(names.values()), adapter, card.lora_targets, rename)
    tensors: dict[str, Tensor] = {}
    for layer, name in names.items():
        for part, factor in zip("AB", adapter.layers[layer].factors()):
            prefix = "base_model.model" if job.form == "peft" else "transformer"
            tensors[f"{prefix}.{name}.lora_{part}.weight"] = factor.to(job.dtype or factor.dtype).contiguous()
    config = _settings({name: adapter.layers[layer] for layer, name in names.items()})
    config |= {"target_modules": targets, "lora_dropout": 0.0, "bias": "none", "init_lora_weights": True}
    git = card.starts.get("git") if card.starts else provenance.git_state(Path(__file__).parent)
    metadata = {
        "format": "pt",
        "rank": str(config["r"]),
        "alpha": str(config["lora_alpha"]),
        "target_modules": json.dumps(targets),
        "base": adapter.base,
        "base_fingerprint": adapter.base_fingerprint,
        "commit": str((git or {}).get("commit", "")),
        "source": job.source,
        **card_texts(card),
    }
    storage.makedirs(job.destination)
    if job.form == "peft":
        settings = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": adapter.base or None, **config}
        settings |= {"fan_in_fan_out": False, "inference_mode": True}
        storage.write_json(storage.join(job.destination, PEFT_CONFIG), settings)
    else:
        metadata[DIFFUSERS_KEY] = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    data = safetensors.torch.save(tensors, metadata)
    storage.write_bytes(file, data)
    log.info(
        "%s: rank %d, alpha %s%s, %s; trained on %s",
        *(job.source, config["r"], config["lora_alpha"]),
        " (others by layer)" if config["rank_pattern"] or config["alpha_pattern"] else "",
        *(",".join(targets), adapter.base or "?"),
    )
    return tensors


def _require_only_adapters(adapter: Adapter, job: Export) -> None:
    """Raise where embedders of actions, which the base does not have, were trained beside the adapters."""
    if not any(name.startswith(ACTION_EMBEDDERS.rstrip("*")) for name in adapter.network):
        return
    if not adapter.base or storage.is_remote(adapter.base) or not storage.exists(adapter.base):
        log.warning(
            "%s is action-conditioned; its base %s is not here. If that has no embedders of actions, the adapters alone"
            " are of no use: --to safetensors --merge-lora has the embedders, too",
            *(job.source, adapter.base or "(unknown)"),
        )
    elif not read_card(adapter.base).opened().has_action_embedders:
        raise CheckpointError(
            f"{job.source} learnt its embedders of actions beside the adapters, since {adapter.base} has none, and"
            f" --to {job.form} writes adapters alone. Write all weights: --to safetensors --merge-lora."
        )


def shortest_targets(layers: Collection[str], modules: Iterable[str]) -> list[str]:
    """The shortest ends of names, from a word on, that select exactly these layers among the modules."""
    others = set(modules) - set(layers)
    targets: dict[str, None] = {}
    for layer in layers:
        words = layer.split(".")
        ends = (".".join(words[i:]) for i in reversed(range(len(words))) if not words[i].isdigit())
        targets[next((end for end in ends if not _selects(end, others)), layer)] = None
    return list(targets)


def _selects(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _targets(layers: list[str], adapter: Adapter, of_run: str, rename: Callable[[str], str]) -> list[str]:
    """Patterns that select the layers: the run's own if they select the same layers by the layout's names, else the
    ends of their names, as far as the whole network is known."""
    modules = {name for full in adapter.network for name in accumulate(rename(full).split("."), "{}.{}".format)}
    recorded = [target.strip() for target in of_run.split(",") if target.strip()]
    chosen = {name for name in modules if any(_selects(target, [name]) for target in recorded)}
    if chosen and chosen == set(layers):
        return recorded
    return shortest_targets(layers, modules) if modules else sorted(layers)


def _their_name(layer: str) -> str:
    name = to_diffusers_name(f"{layer}.weight")
    if name is None:
        raise CheckpointError(f"{layer} has no name in diffusers' transformer: use --to peft.")
    return name.removesuffix(".weight")


def _settings(layers: Mapping[str, Factors]) -> dict[str, Any]:
    """Rank and alpha as PEFT has them: those of most layers, and patterns for the others. A scale of alpha / sqrt(rank)
    is written as the alpha that gives it when it is divided by the rank."""
    ranks = {name: factors.rank for name, factors in layers.items()}
    alphas = {name: _plain(factors.scaling * factors.rank) for name, factors in layers.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    patterns = dict(rank_pattern=patterns_of(ranks, rank), alpha_pattern=patterns_of(alphas, alpha))
    return dict(r=rank, lora_alpha=alpha, **patterns)


def _plain(alpha: float) -> float:
    """Alpha without the last digits, which differ from layer to layer; a whole number as an int."""
    alpha = round(alpha, 9)
    return int(alpha) if alpha == int(alpha) else alpha
