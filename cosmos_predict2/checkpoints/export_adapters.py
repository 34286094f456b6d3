# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters alone, as others read them.

``peft`` is a folder with adapter_model.safetensors and adapter_config.json, in our network's names; ``diffusers-lora``
one with pytorch_lora_weights.safetensors, in diffusers' names. ``comfyui`` and ``kohya`` are single files in our names,
with the alpha of each layer beside its factors. In the header of each stand rank, alpha, targets, the base with its
fingerprint, and the commit of the run.
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

from cosmos_predict2.checkpoints import wan_names
from cosmos_predict2.checkpoints.adapters import DIFFUSERS_KEY, PEFT_CONFIG, Adapter, Factors, patterns_of, read_adapter
from cosmos_predict2.checkpoints.card import card_texts, read_card
from cosmos_predict2.checkpoints.diffusers_names import to_diffusers_name
from cosmos_predict2.checkpoints.dit_weights import ACTION_EMBEDDERS
from cosmos_predict2.checkpoints.export import FILES, Export, written_file
from imaginaire import storage
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training import provenance

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Form:
    """The names of factors in one form."""

    prefix: str
    parts: tuple[str, str] = ("lora_A", "lora_B")
    is_renamed: bool = False  # layers have the names of diffusers
    is_flat: bool = False  # with "_" for each "."


ADAPTER_FORMS = {
    "peft": _Form("base_model.model."),
    "diffusers-lora": _Form("transformer.", is_renamed=True),
    "comfyui": _Form("diffusion_model."),
    "kohya": _Form("lora_unet_", parts=("lora_down", "lora_up"), is_flat=True),
}


def export_adapter(job: Export, adapter: Adapter | None = None) -> Mapping[str, Tensor]:
    """Write the adapters of the source, or those given; gives what was written, by the names in the file."""
    form = ADAPTER_FORMS[job.form]
    file, is_single = written_file(job), job.form not in FILES
    if is_single and not file.endswith(".safetensors"):
        raise ConfigError(f"{file} does not end in .safetensors, which --to {job.form} writes: one file.")
    if not job.overwrite and storage.exists(file):
        raise CheckpointError(f"{file} exists already. Choose another destination, or --overwrite.")
    if adapter is None:
        adapter = read_adapter(job.source, alpha=job.lora_alpha, which=job.which)
    _require_only_adapters(adapter, job)
    rename: Callable[[str], str] = _their_name if form.is_renamed else str
    names = {layer: rename(layer) for layer in adapter.layers}
    card = read_card(job.source)
    targets = _targets(list(names.values()), adapter, card.lora_targets, rename)
    tensors: dict[str, Tensor] = {}
    for layer, name in names.items():
        factors = adapter.layers[layer]
        key = form.prefix + (name.replace(".", "_") if form.is_flat else name)
        for part, factor in zip(form.parts, factors.factors()):
            tensors[f"{key}.{part}.weight"] = factor.to(job.dtype or factor.dtype).contiguous()
        if is_single:
            tensors[f"{key}.alpha"] = torch.tensor(_plain(factors.scaling * factors.rank), dtype=torch.float64)
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
    if not is_single:
        storage.makedirs(job.destination)
    if job.form == "peft":
        settings = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": adapter.base or None, **config}
        settings |= {"fan_in_fan_out": False, "inference_mode": True}
        storage.write_json(storage.join(job.destination, PEFT_CONFIG), settings)
    elif job.form == "diffusers-lora":
        metadata[DIFFUSERS_KEY] = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    else:  # what kohya's programs show of a file
        metadata |= {"ss_network_module": "networks.lora", "ss_network_dim": metadata["rank"]}
        metadata["ss_network_alpha"] = metadata["alpha"]
    storage.write_bytes(file, safetensors.torch.save(tensors, metadata))
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
    name = wan_names.to_diffusers_name(f"{layer}.weight") or to_diffusers_name(f"{layer}.weight")
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
