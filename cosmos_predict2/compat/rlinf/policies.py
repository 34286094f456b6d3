# SPDX-License-Identifier: Apache-2.0
"""The policy of RLinf's configuration, ``actor.model``, and how several GPUs train it, ``actor.fsdp_config``."""

import os
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.fields import Fields, require_one_of, sharded, shown_value
from cosmos_predict2.compat.rlinf.fields import CONFIG, OPENVLA_OPTIONS, PI05_OPTIONS, POLICY, RL
from cosmos_predict2.compat.rlinf.files import POLICIES
from cosmos_predict2.released import EMBODIED_DIR, describe_missing
from imaginaire import storage
from imaginaire.errors import ConfigError

MODEL, FSDP = "actor.model", "actor.fsdp_config"
PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", None: "float32"}
OPENPI: Mapping[str, dict[str, Any]] = {"pi05_libero": dict(action_horizon=10, discrete_state_input=False)}
_FOREIGN_FIELDS = {  # fields of other policies, by kind; switches may be off
    "toy": ("is_lora", "lora_path", "use_proprio", "openpi."),
    "openvla_oft": ("noise", "openpi."),
    "openvla": ("noise", "openpi."),
    "pi05": ("noise", *(name for name in OPENVLA_OPTIONS if name != "use_proprio")),
}


def policy_settings(fields: Fields, num_processes: int, *, is_toy_world: bool) -> dict[str, Any]:
    """The settings of the policy: its weights and options, its precision, and its sharding among the processes."""
    kind, path = POLICIES[fields[f"{MODEL}.model_type"]], f"{MODEL}.model_path"
    fields.require_same("rollout.model.model_path", path)
    precision = precision_of(fields)
    _require_own(fields, kind)
    if kind == "toy":
        return {f"{CONFIG}.precision": precision, **({f"{POLICY}.path": fields[path]} if fields[path] else {})}
    options = _pi05_options(fields, is_toy_world) if kind == "pi05" else _openvla_options(fields, kind, is_toy_world)
    lora_path = fields[f"{MODEL}.lora_path"]
    if fields[f"{MODEL}.is_lora"]:
        options |= {"lora_rank": fields[f"{MODEL}.lora_rank"], **({"lora_path": lora_path} if lora_path else {})}
    elif lora_path:
        raise ConfigError(f"{MODEL}.lora_path = {shown_value(lora_path)} without {MODEL}.is_lora = true: set it, too.")
    key = f"{FSDP}.sharding_strategy"
    require_one_of(key, fields[key], ("full_shard", "no_shard"))
    is_sharded = fields[key] == "full_shard" and num_processes > 1
    return {
        f"{CONFIG}.precision": precision,
        # Rows of another batch are rounded otherwise.
        **({f"{RL}.ratio_tolerance": 0.1} if precision == "bfloat16" else {}),
        f"{POLICY}.path": _weights(fields, path),
        **{f"++{POLICY}.{name}": value for name, value in options.items()},
        **sharded(-1 if is_sharded else 1),
        f"{CONFIG}.recompute": bool(fields[f"{FSDP}.gradient_checkpointing"]),
    }


def _require_own(fields: Fields, kind: str) -> None:
    names = tuple(f"{MODEL}.{name}" for name in _FOREIGN_FIELDS[kind])
    names += (f"{FSDP}.gradient_checkpointing",) if kind == "toy" else ()
    for path, value in fields.given.items():
        if path.startswith(names) and value:
            name = fields[f"{MODEL}.model_type"]
            raise ConfigError(
                f"{path} = {shown_value(value)}, but a policy of type {name} has no such thing: remove it."
            )


def precision_of(fields: Fields) -> str:
    """The weights' precision, by its name in torch."""
    key = f"{MODEL}.precision"
    if fields[key] not in PRECISIONS:
        require_one_of(key, fields[key], ("bf16", "fp32"))
    mixed = (f"{FSDP}.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer"))
    for path in ("rollout.model.precision", *mixed):
        if fields[path] is not None:
            fields.require_same(path, key)
    return PRECISIONS[fields[key]]


def _weights(fields: Fields, key: str) -> str:
    path = str(fields[key] or "")
    if not path:
        raise ConfigError(f"{key} = {shown_value(fields[key])}: this policy begins with published weights. Give them.")
    is_here = storage.exists(path) or os.path.isdir(path)
    if not is_here and (path.startswith(f"{EMBODIED_DIR}/") or path.count("/") != 1):  # else a repository of the hub
        fields.missing.append(f"{key}: {describe_missing(path).rstrip('.')}. A relative path is below {os.getcwd()}.")
    return path


def _openvla_options(fields: Fields, kind: str, is_toy_world: bool) -> dict[str, Any]:
    sampling = "algorithm.sampling_params"
    if fields[f"{sampling}.top_k"] != -1:
        raise ConfigError(
            f"{sampling}.top_k = {fields[f'{sampling}.top_k']}, but tokens are drawn from the whole distribution: -1."
        )
    chunk = fields[f"{MODEL}.num_action_chunks"]
    if kind == "openvla" and chunk != 1:
        raise ConfigError(f"{MODEL}.num_action_chunks = {chunk}, but the original OpenVLA decides on 1 action at once.")
    sizes = {} if is_toy_world else dict(action_chunk=chunk, action_dim=fields[f"{MODEL}.action_dim"])
    return {
        "variant": "autoregressive" if kind == "openvla" else "oft",
        "temperature": float(fields[f"{sampling}.temperature_train"]),
        **sizes,
        **fields.options(MODEL, OPENVLA_OPTIONS),
    }


def _pi05_options(fields: Fields, is_toy_world: bool) -> dict[str, Any]:
    section = f"{MODEL}.openpi"
    name = fields[f"{section}.config_name"]
    require_one_of(f"{section}.config_name", name, OPENPI, ": PI0.5 alone is here")
    for inner, outer in (("action_chunk", "num_action_chunks"), ("action_env_dim", "action_dim")):
        fields.require_same(f"{section}.{inner}", f"{MODEL}.{outer}")
    fields.require_same(f"{section}.num_steps", f"{MODEL}.num_steps")
    chunk = dict(action_chunk=fields[f"{MODEL}.num_action_chunks"], action_env_dim=fields[f"{MODEL}.action_dim"])
    sizes = {} if is_toy_world else {**OPENPI[name], **chunk}  # a clone's config.json has them
    names = {**{name: name for name in PI05_OPTIONS}, "num_images_in_input": "num_images"}
    return {"num_steps": fields[f"{MODEL}.num_steps"], **sizes, **fields.options(section, names)}
