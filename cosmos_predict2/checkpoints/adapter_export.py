# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters alone, in the layouts that PEFT and diffusers read.

``peft``: a folder with adapter_model.safetensors and adapter_config.json, in the names of our network.
``diffusers-lora``: a folder with pytorch_lora_weights.safetensors, in the names of diffusers' transformer.

In the header of both stand rank, alpha, targets, the base with its fingerprint, and the commit of the run.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

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
    patterns_of,
    read_adapter,
)
from cosmos_predict2.checkpoints.card import card_texts, read_card
from cosmos_predict2.checkpoints.diffusers_names import to_diffusers_name
from cosmos_predict2.checkpoints.dit_weights import ACTION_EMBEDDERS
from imaginaire import storage
from imaginaire.errors import CheckpointError
from imaginaire.training import provenance

log = logging.getLogger(__name__)

ADAPTER_FORMS = ("peft", "diffusers-lora")


@dataclass(frozen=True)
class AdapterExport:
    """Adapters to read, and the layout to write them in."""

    source: str  # a checkpoint with adapters, a run's folder, or an adapter in any layout
    destination: str  # a folder
    form: str
    which: str = "auto"  # "net" or "net_ema" of a checkpoint with both
    dtype: torch.dtype | None = None  # None: as they are
    lora_alpha: float | None = None  # where nothing records it
    overwrite: bool = False


def export_adapter(job: AdapterExport, adapter: Adapter | None = None) -> Mapping[str, Tensor]:
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


def _require_only_adapters(adapter: Adapter, job: AdapterExport) -> None:
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
