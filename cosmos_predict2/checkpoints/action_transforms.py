# SPDX-License-Identifier: Apache-2.0
"""Which actions weights were trained with: kept in the checkpoint itself, and asked for before anything is imagined.

    transform = require_transform("checkpoints/posttraining/.../iter_000001000.pt")
    actions = transform.apply(raw_actions)

A training checkpoint has the transform as the bytes of its JSON under ``action_transform``, beside ``net.*``; an
exported safetensors file in its metadata; a run in its config.yaml where that names one. Released files say nothing:
what is known of them is here.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.dit_weights import inside_a_pipeline
from cosmos_predict2.checkpoints.runs import run_config, safetensors_metadata
from cosmos_predict2.released import PREDICT25, describe_missing, download_command
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, ConfigError, near

log = logging.getLogger(__name__)

KEY = "action_transform"  # in checkpoints, in metadata and in model.config.pipe_config
CONFIG_KEY = f"model.config.pipe_config.{KEY}"
FLAG = f"--{KEY}"
NAMES = {"relative_pose": relative_pose, "controller": controller}

# Files that were published without saying it, by a part of their path.
_RELEASED: list[tuple[str, ActionTransform]] = [
    (r"Cosmos-Predict2-2B-Sample-Action-Conditioned(/|$)", relative_pose()),
    (re.escape(PREDICT25["2B/robot/action-cond"][1].rpartition("/")[2].partition("_")[0]), relative_pose()),
    (r"(^|/)libero-\w+-2b-\d+k\.pt$", controller()),
]


def recorded_transform(path: str) -> ActionTransform | None:
    """The transform that weights at a path were trained with, as they, their run or their release say; else None."""
    found = written_transform(path)
    return released_transform(path) if found is None else found


def written_transform(path: str) -> ActionTransform | None:
    """The transform that is written in the weights, their header or their run's config.yaml; else None."""
    address = inside_a_pipeline(path)
    if download_command(address) and not storage.is_remote(address) and not storage.exists(address):
        raise CheckpointError(describe_missing(address))
    source = weights.read(address)
    try:
        if KEY in source:
            return tensor_transform(source[KEY])
        if text := safetensors_metadata(path).get(KEY):
            return ActionTransform.from_json(text)
        pipe = (run_config(path) or {}).get("pipe_config")
        row = pipe.get(KEY) if isinstance(pipe, dict) else None
        return ActionTransform.from_dict(row) if isinstance(row, dict) else None
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def released_transform(path: str) -> ActionTransform | None:
    """The transform of a published file, known by its name; else None."""
    return next((transform for pattern, transform in _RELEASED if re.search(pattern, path)), None)


def require_transform(path: str, given: Any = None, *, flag: str = FLAG) -> ActionTransform:
    """The transform of weights that are about to be used; an error where nothing says it, or two say different ones.

    ``given`` is what the user says: a transform, its values, or text as `parse_transform` takes it.
    """
    asked = None if given is None or given == "" else parse_transform(given)
    written = written_transform(path) if path else None
    if written is not None and asked is not None and written != asked:
        raise CheckpointError(
            f"{path} was trained with actions {written}, but {flag} (or {CONFIG_KEY}) says {asked}. Leave it out: the"
            " weights fit theirs alone."
        )
    known = released_transform(path)
    if written is None and asked is not None and known is not None and known != asked:
        log.warning("%s is known for actions %s; %s are used, as asked", path, known, asked)
    found = asked or written or known
    if found is None:
        whose = f"{path} does not say which actions it was trained with, and it can use no others."
        raise CheckpointError(
            f"{whose if path else 'Random weights bring no transform of actions.'} Say it with {flag}"
            " (relative_pose:20 for pose differences as in Bridge, controller:20x7 for a"
            f" controller's seven numbers times 20, or JSON with kind, scale, offset), or in a config as {CONFIG_KEY}."
        )
    return found


def parse_transform(value: Any) -> ActionTransform:
    """A transform from itself, a mapping of its values, their JSON, or a name: relative_pose, controller:20x7.

    After the colon stands the scale, for a controller with how many numbers: 20x7 is seven times 20.
    """
    if isinstance(value, ActionTransform):
        return value
    if isinstance(value, Mapping):
        return ActionTransform.from_dict({str(key): value[key] for key in value})
    text = str(value).strip()
    if text.startswith("{"):
        return ActionTransform.from_json(text)
    name, _, numbers = text.partition(":")
    if name not in NAMES:
        raise ConfigError(f"There is no action transform '{text}'.{near(name, NAMES)} Or give JSON.")
    match = re.fullmatch(r"([-+.\deE]+)(?:x(\d+))?", numbers or "20")
    try:
        scale = float(match[1]) if match else 0.0
    except ValueError:
        match = None
    if match is None or (match[2] and name == "relative_pose"):
        example = "relative_pose:20" if name == "relative_pose" else "controller:20x7"
        raise ConfigError(f"The action transform '{text}' cannot be read; an example is {example}.")
    return controller(int(match[2] or 7), scale) if name == "controller" else relative_pose(scale)


def transform_tensor(transform: ActionTransform) -> Tensor:
    """The bytes of the transform's JSON, as a checkpoint holds them."""
    return torch.frombuffer(bytearray(transform.to_json().encode()), dtype=torch.uint8).clone()


def tensor_transform(tensor: Tensor) -> ActionTransform:
    """The transform that `transform_tensor` wrote."""
    data = bytes(tensor.detach().cpu().to(torch.uint8).tolist())
    try:
        return ActionTransform.from_json(data.decode())
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"Its '{KEY}' cannot be read: {error}") from error
