# SPDX-License-Identifier: Apache-2.0
"""The public layout of PI0.5: config.json, model.safetensors, a tokenizer and assets/**/norm_stats.json, or in place of
the last lerobot's processors.

Names of older and of lerobot's files are translated by pattern; then every name is loaded, kept aside on purpose, or
an error. What is kept aside, and the files beside the weights, an export copies from where the policy came from.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.policies.pi05 import lerobot
from cosmos_predict2.rl.policies.pi05.inputs import norm_stats_file, norm_stats_of
from cosmos_predict2.rl.policies.pi05.lerobot import BEFORE, BEHIND
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, local_file, names_at
from imaginaire.errors import CheckpointError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_OLD = (  # of files made by lerobot, by older transformers and by PI0's converter: pattern, and what it means
    (r"^model\.(?=paligemma_with_expert|action_|time_|state_|noise_)", ""),
    (r"^action_time_mlp_", "time_mlp_"),
    (r"paligemma\.language_model\.lm_head\.", "paligemma.lm_head."),
    (r"paligemma\.language_model\.model\.", "paligemma.model.language_model."),
    (r"paligemma\.(?=vision_tower|multi_modal_projector)", "paligemma.model."),
    (r"vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),  # newer transformers, too
)
_EXPERT, _PALIGEMMA = "paligemma_with_expert.gemma_expert.", "paligemma_with_expert.paligemma."
_HEAD, _EMBEDDING = f"{_PALIGEMMA}lm_head.weight", f"{_PALIGEMMA}model.language_model.embed_tokens.weight"
_TOWER = "vision_tower."
_DROPPED = (  # of PI0, which a PI0.5 file may still hold
    r"^state_proj\.",
    rf"^{re.escape(_EXPERT)}model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight$",
)
_UNUSED = (f"{_EXPERT}lm_head.weight", f"{_EXPERT}model.embed_tokens.weight")
NOISE_HEAD = "noise_head.*"  # a flow_noise policy begins with a new one where the file has none


@dataclass(frozen=True)
class Plan:
    """What each name of a file is: of the network, or kept aside (by its public name)."""

    loaded: Mapping[str, str]  # the network's name -> the file's
    kept: Mapping[str, str]  # the public name -> the file's
    is_head_tied: bool  # lm_head is the embedding, under its own name


def plan(names: Iterable[str], own: Iterable[str]) -> Plan:
    """How a file's names are used, by the network's own."""
    inner = any(f"{_TOWER}vision_model." in name for name in own)  # a level more, of older transformers
    public: dict[str, str] = {}
    for name in names:
        new = modern_name(name)
        if new is None:
            continue
        if new in public:
            raise CheckpointError(f"'{public[new]}' and '{name}' are both '{new}'.")
        public[new] = name
    kept = {name: public.pop(name) for name in _UNUSED if name in public}
    is_tied = _HEAD in public and _EMBEDDING not in public
    if is_tied:
        public[_EMBEDDING] = public.pop(_HEAD)
    elif _HEAD in public:
        kept[_HEAD] = public.pop(_HEAD)
    loaded = {name if inner else name.replace(f"{_TOWER}vision_model.", _TOWER): old for name, old in public.items()}
    return Plan(loaded, kept, is_tied)


def modern_name(name: str) -> str | None:
    """The public name of a file's name; None for what PI0.5 has no use for."""
    for pattern, new in _OLD:
        name = re.sub(pattern, new, name)
    return None if any(re.search(pattern, name) for pattern in _DROPPED) else name


def public_name(name: str) -> str:
    """Of the network's own name."""
    return name if f"{_TOWER}vision_model." in name else name.replace(_TOWER, f"{_TOWER}vision_model.")


def tensors_of(path: str) -> Mapping[str, Tensor]:
    """The tensors of a public folder, beside which lerobot's processors may have files of their own, a hub id or a
    file."""
    return weights.read(below(path, WEIGHTS) if WEIGHTS in names_at(path) else path)


def load(network: nn.Module, path: str) -> None:
    """The weights of a public folder, a hub id or a file, every name accounted for."""
    source = tensors_of(path)
    found = plan(source, network.state_dict())
    back = {old: new for new, old in found.loaded.items()}
    report = weights.load_into(network.state_dict(), weights.renamed(source, back.get))
    report.require(
        allow_missing=(NOISE_HEAD,), source=path, cure="Give a PI0.5 folder whose config.json is of these weights."
    )


def export(
    state: Mapping[str, Tensor],
    source: str,
    folder: Path,
    options: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
) -> None:
    """Write a network's state beside copies of all else that ``source`` holds, in the public names.

    Each tensor has the dtype that it has there, so that weights which were not trained come out bit for bit.
    ``options`` are put into config.json, and ``statistics`` are those of actions in place of the source's.
    """
    old = tensors_of(source)
    found = plan(old, state)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        kind = old[found.loaded[name]].dtype if name in found.loaded else value.dtype
        tensors[public_name(name)] = value.detach().to("cpu", kind).contiguous()
    for name, where in found.kept.items():
        is_tied = name == _HEAD and torch.equal(old[where], old[found.loaded[_network_embedding(found)]])
        tensors[name] = tensors[_EMBEDDING].clone() if is_tied else old[where].contiguous()
    if found.is_head_tied:
        tensors[_HEAD] = tensors.pop(_EMBEDDING)
    folder.mkdir(parents=True, exist_ok=True)
    content = safetensors.torch.save(tensors, {"format": "pt"})
    storage.write_atomically(folder / WEIGHTS, lambda file: file.write(content))
    copy_beside(source, folder, options, statistics)


def _network_embedding(found: Plan) -> str:
    return next(name for name in found.loaded if name.endswith("language_model.embed_tokens.weight"))


def copy_beside(
    source: str, folder: Path, options: Mapping[str, Any], statistics: Mapping[str, Any] | None = None
) -> None:
    """config.json with ``options`` in it, the statistics, and the small files of a tokenizer."""
    config = {**settings(source), **options}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    asset_id, is_lerobots = str(config.get("asset_id") or ""), "assets" not in names_at(source)
    stats = "" if is_lerobots else norm_stats_file(source, asset_id)
    inside = stats[stats.rindex("assets/") :] if "assets/" in stats else "assets/norm_stats.json"
    (folder / inside).parent.mkdir(parents=True, exist_ok=True)
    if statistics is None and not is_lerobots:
        (folder / inside).write_bytes(local_file(stats).read_bytes())
    else:
        own = {} if statistics is None else {"actions": statistics}
        content = {**norm_stats_of(source, asset_id), **own}
        (folder / inside).write_text(json.dumps({"norm_stats": content}, indent=1) + "\n", encoding="utf-8")
    for name in names_at(source):
        is_processor = name.startswith((BEFORE.removesuffix(".json"), BEHIND.removesuffix(".json")))
        if "token" in name or name.endswith(".model") or (is_processor and statistics is None):
            (folder / name).write_bytes(local_file(below(source, name)).read_bytes())


def settings(folder: str) -> dict[str, Any]:
    """The content of config.json, with what lerobot's processors say besides."""
    config = read_json(below(folder, CONFIG))
    return {**lerobot.settings(folder, config), **config} if lerobot.has_processors(folder) else config


def read_json(address: str) -> dict[str, Any]:
    file = local_file(address)  # raises its own error where there is none
    try:
        return foreign_json.load_object(file)
    except ValueError as error:
        raise CheckpointError(f"{address} cannot be read: {error}.") from error
