# SPDX-License-Identifier: Apache-2.0
"""PI0.5 folders as lerobot 0.4 and newer save them: processors beside the weights, with the statistics inside.

    policy_preprocessor.json    steps before the network; the normaliser's names the safetensors file of its statistics
    policy_postprocessor.json   steps behind it, likewise

lerobot fills the state with zeros up to ``max_state_dim`` before it writes it into the prompt, and openpi does not: a
folder with processors is asked as lerobot asks it.
"""

import os
from collections.abc import Mapping
from typing import Any

from imaginaire import foreign_json
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, local_file, names_at
from imaginaire.errors import CheckpointError

BEFORE, BEHIND = "policy_preprocessor.json", "policy_postprocessor.json"
_STATE_STEP = "pi05_prepare_state_tokenizer_processor_step"
_NORMALISER, _UNNORMALISER = "normalizer_processor", "unnormalizer_processor"
# They bring pictures, names and tensors into lerobot's form, which is not ours, or begin with a switch that is off.
_WITHOUT_EFFECT = ("rename_observations_processor", "to_batch_processor", "tokenizer_processor", "device_processor")
_SWITCHED = ("relative_actions_processor", "absolute_actions_processor", "delta_actions_processor")
_ENDS = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}


def has_processors(folder: str) -> bool:
    return BEFORE in names_at(folder)


def settings(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the processors and features of a folder say, in the names of `Pi05Config`."""
    steps = _steps(folder, BEFORE)
    found: dict[str, Any] = {"discrete_state_input": _STATE_STEP in steps}
    if _STATE_STEP in steps:
        of_step = steps[_STATE_STEP].get("config") or {}
        found["state_dim"] = of_step.get("max_state_dim") or config.get("max_state_dim") or 32
    try:
        cameras = [one for one in (config.get("input_features") or {}).values() if one["type"] == "VISUAL"]
        found |= {"num_images": len(cameras)} if cameras else {}
        if action := (config.get("output_features") or {}).get("action"):
            found["action_env_dim"] = int(action["shape"][0])
    except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder}: input_features or output_features cannot be read: {error!r}.") from error
    return found


def norm_stats(folder: str) -> dict[str, dict[str, Any]]:
    """The statistics of states and actions as norm_stats.json has them: what is -1 and what is 1 to the model, and
    nothing added to their difference."""
    return {
        "state": _ends(folder, BEFORE, _NORMALISER, "STATE", "observation.state"),
        "actions": _ends(folder, BEHIND, _UNNORMALISER, "ACTION", "action"),
    }


def _ends(folder: str, file: str, name: str, kind: str, feature: str) -> dict[str, Any]:
    step = _steps(folder, file).get(name)
    if step is None:
        raise CheckpointError(f"{folder}/{file} has no step '{name}', so that it is unknown how {feature} is scaled.")
    try:
        mode = str(step["config"]["norm_map"].get(kind, "IDENTITY"))
        shape = (step["config"]["features"].get(feature) or {}).get("shape") or [0]
        size = int(shape[0])
    except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder}/{file}: the step '{name}' cannot be read: {error!r}.") from error
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
    try:
        listed = foreign_json.load_object(local_file(below(folder, file)))["steps"]
        steps = {str(step.get("registry_name") or step.get("class")): step for step in listed}
        switches = {name: (step.get("config") or {}).get("enabled") for name, step in steps.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}/{file} cannot be read: {error!r}.") from error
    for name in steps:
        is_off = name in _SWITCHED and not switches[name]
        if not is_off and name not in (*_WITHOUT_EFFECT, _STATE_STEP, _NORMALISER, _UNNORMALISER):
            raise CheckpointError(
                f"{folder}/{file} has the step '{name}', which is not known here: what it does to states or actions"
                " would be left out. Save the policy without it."
            )
    return steps
