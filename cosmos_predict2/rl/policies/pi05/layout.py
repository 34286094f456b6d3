# SPDX-License-Identifier: Apache-2.0
"""The public layout of PI0.5: config.json, model.safetensors, a tokenizer and assets/**/norm_stats.json.

Names of older and of lerobot's files are translated by pattern; then every name is loaded, kept aside on purpose, or
an error. What is kept aside, and the files beside the weights, an export copies from where the policy came from.

lerobot 0.4 and newer have processors in place of the assets, with the statistics inside:

    policy_preprocessor.json    steps before the network; the normaliser's names the safetensors file of its statistics
    policy_postprocessor.json   steps behind it, likewise

lerobot fills the state with zeros up to ``max_state_dim`` before it writes it into the prompt, and openpi does not: a
folder with processors is asked as lerobot asks it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, json_in, local_file, names_at
from imaginaire.errors import MISSHAPEN, CheckpointError, raised_as

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
BEFORE, BEHIND = "policy_preprocessor.json", "policy_postprocessor.json"
_STATE_STEP = "pi05_prepare_state_tokenizer_processor_step"
_NORMALISER, _UNNORMALISER = "normalizer_processor", "unnormalizer_processor"
# They bring pictures, names and tensors into lerobot's form, which is not ours, or begin with a switch that is off.
_WITHOUT_EFFECT = ("rename_observations_processor", "to_batch_processor", "tokenizer_processor", "device_processor")
_SWITCHED = ("relative_actions_processor", "absolute_actions_processor", "delta_actions_processor")
_ENDS = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}


# --- weights


@dataclass(frozen=True)
class NameUses:
    """The use of each name of a file: of the network, or kept aside (by its public name)."""

    loaded: Mapping[str, str]  # the network's name -> the file's
    kept: Mapping[str, str]  # the public name -> the file's
    is_head_tied: bool  # lm_head is the embedding, under its own name


def plan(names: Iterable[str], own: Iterable[str]) -> NameUses:
    """Uses of a file's names, by the network's own."""
    inner = any(f"{_TOWER}vision_model." in name for name in own)  # a level more, of older transformers
    public = weights.new_names(names, modern_name)
    kept = {name: public.pop(name) for name in _UNUSED if name in public}
    is_tied = _HEAD in public and _EMBEDDING not in public
    if is_tied:
        public[_EMBEDDING] = public.pop(_HEAD)
    elif _HEAD in public:
        kept[_HEAD] = public.pop(_HEAD)
    loaded = {name if inner else name.replace(f"{_TOWER}vision_model.", _TOWER): old for name, old in public.items()}
    return NameUses(loaded, kept, is_tied)


def modern_name(name: str) -> str | None:
    """The public name of a file's name; None for what PI0.5 has no use for."""
    for pattern, new in _OLD:
        name = re.sub(pattern, new, name)
    return None if any(re.search(pattern, name) for pattern in _DROPPED) else name


def public_name(name: str) -> str:
    """The public name of the network's own."""
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
    cure = "Give a PI0.5 folder whose config.json is of these weights."
    report.require(allow_missing=(NOISE_HEAD,), source=path, cure=cure)


def export(
    state: Mapping[str, Tensor],
    source: str,
    folder: Path,
    options: Mapping[str, Any],
    statistics: Mapping[str, Any] | None,
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
    embedding = next(name for name in found.loaded if name.endswith("language_model.embed_tokens.weight"))
    for name, where in found.kept.items():
        is_tied = name == _HEAD and torch.equal(old[where], old[found.loaded[embedding]])
        tensors[name] = tensors[_EMBEDDING].clone() if is_tied else old[where].contiguous()
    if found.is_head_tied:
        tensors[_HEAD] = tensors.pop(_EMBEDDING)
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(folder / WEIGHTS, safetensors.torch.save(tensors, {"format": "pt"}))
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


# --- settings and statistics


def settings(folder: str) -> dict[str, Any]:
    """The content of config.json, with what lerobot's processors say besides."""
    config = json_in(folder, CONFIG)
    return {**_processor_settings(folder, config), **config} if BEFORE in names_at(folder) else config


def norm_stats_file(folder: str, asset_id: str = "") -> str:
    """The address of the one norm_stats.json below a checkpoint's assets, or below one of these."""
    found: list[str] = []
    waiting = [root := below(folder, f"assets/{asset_id}" if asset_id else "assets")]
    while waiting:
        place = waiting.pop()
        for name in names_at(place):
            (found if name == "norm_stats.json" else waiting).append(below(place, name))
    if len(found) != 1:
        raise CheckpointError(
            f"{root}: {len(found)} files **/norm_stats.json {sorted(found)}, but exactly one must define how states and"
            " actions are scaled. Name the folder below assets of the data that the weights were trained on as"
            " policy.asset_id, or copy its file to assets/<data set>/norm_stats.json."
        )
    return found[0]


def norm_stats_of(folder: str, asset_id: str = "") -> dict[str, Any]:
    """The statistics of a folder: of its assets, or of lerobot's processors where it has no assets."""
    if BEFORE in (names := names_at(folder)) and "assets" not in names:
        return {
            "state": _ends(folder, BEFORE, _NORMALISER, "STATE", "observation.state"),
            "actions": _ends(folder, BEHIND, _UNNORMALISER, "ACTION", "action"),
        }
    file = norm_stats_file(folder, asset_id)
    with raised_as(CheckpointError, f"{file} has no norm_stats", KeyError, ValueError, TypeError):
        return dict(foreign_json.load(local_file(file))["norm_stats"])


# --- lerobot's processors


def _processor_settings(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a folder's processors and features have, in the names of `Pi05Config`."""
    steps = _steps(folder, BEFORE)
    found: dict[str, Any] = {"discrete_state_input": _STATE_STEP in steps}
    if _STATE_STEP in steps:
        of_step = steps[_STATE_STEP].get("config") or {}
        found["state_dim"] = of_step.get("max_state_dim") or config.get("max_state_dim") or 32
    with raised_as(CheckpointError, f"{folder}: input_features or output_features cannot be read", *MISSHAPEN):
        cameras = [one for one in (config.get("input_features") or {}).values() if one["type"] == "VISUAL"]
        found |= {"num_images": len(cameras)} if cameras else {}
        if action := (config.get("output_features") or {}).get("action"):
            found["action_env_dim"] = int(action["shape"][0])
    return found


def _ends(folder: str, file: str, name: str, kind: str, feature: str) -> dict[str, Any]:
    """Statistics as norm_stats.json has them: what is -1 and what is 1 to the model, and nothing added to their
    difference."""
    step = _steps(folder, file).get(name)
    if step is None:
        raise CheckpointError(f"{folder}/{file} has no step '{name}', so that it is unknown how {feature} is scaled.")
    with raised_as(CheckpointError, f"{folder}/{file}: the step '{name}' cannot be read", *MISSHAPEN):
        mode = str(step["config"]["norm_map"].get(kind, "IDENTITY"))
        shape = (step["config"]["features"].get(feature) or {}).get("shape") or [0]
        size = int(shape[0])
    if mode == "IDENTITY":
        return {"q01": [-1.0] * size, "q99": [1.0] * size, "epsilon": 0.0}
    names = _ENDS.get(mode, ("mean", "std"))
    if mode not in (*_ENDS, "MEAN_STD"):
        raise CheckpointError(f"{folder}/{file}: {kind} is scaled by {mode}, which is none of {', '.join(_ENDS)}.")
    state_file = str(step.get("state_file") or "")
    if os.path.basename(state_file) != state_file:
        raise CheckpointError(f"{folder}/{file} names a file outside its folder: {state_file}.")
    tensors = weights.read(below(folder, state_file)) if state_file in names_at(folder) else {}
    if absent := [one for one in names if f"{feature}.{one}" not in tensors]:
        raise CheckpointError(
            f"{below(folder, state_file or file)}: the statistics of {feature} ({', '.join(absent)}) are missing: these"
            " weights were saved without data. Give those of yours as assets/<data set>/norm_stats.json"
            ' ({"norm_stats": {"state": {"q01": [...], "q99": [...]}, "actions": {...}}}).'
        )
    first, second = (tensors[f"{feature}.{one}"].double().flatten() for one in names)
    if mode == "MEAN_STD":
        first, second = first - second, first + second
    return {"q01": first.tolist(), "q99": second.tolist(), "epsilon": 0.0}


def _steps(folder: str, file: str) -> dict[str, Mapping[str, Any]]:
    """The steps of a processor by their names; an error for one that changes numbers in a way not known here."""
    if file not in names_at(folder):
        raise CheckpointError(f"{folder} has {BEFORE if file == BEHIND else BEHIND}, but no {file}: copy both.")
    with raised_as(CheckpointError, f"{folder}/{file} cannot be read", ValueError, TypeError, KeyError, AttributeError):
        listed = foreign_json.load_object(local_file(below(folder, file)))["steps"]
        steps = {str(step.get("registry_name") or step.get("class")): step for step in listed}
        switches = {name: (step.get("config") or {}).get("enabled") for name, step in steps.items()}
    for name in steps:
        is_off = name in _SWITCHED and not switches[name]
        if not is_off and name not in (*_WITHOUT_EFFECT, _STATE_STEP, _NORMALISER, _UNNORMALISER):
            raise CheckpointError(
                f"{folder}/{file} has the step '{name}', which is not known here: what it does to states or actions"
                " would be left out. Save the policy without it."
            )
    return steps
