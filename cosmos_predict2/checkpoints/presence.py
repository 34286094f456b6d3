# SPDX-License-Identifier: Apache-2.0
"""Whether weights are where they are expected, and how to get them."""

import re

import torch
from torch import nn

from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.checkpoints.families import describe, require_family
from cosmos_predict2.checkpoints.released import REPOSITORIES
from imaginaire import lazy_config, storage, weights
from imaginaire.errors import CheckpointError

_RELEASED = re.compile(
    r"Cosmos-Predict2-(?P<size>[\d.]+B)-(?P<type>[\w-]+)/(?:model-(?P<resolution>\d+)p-(?P<fps>\d+)fps)?"
)


def problem_with(path: str) -> str | None:
    """What keeps weights at a path from being opened, with the command that fetches released ones; None if nothing."""
    try:
        weights.read(path)
    except CheckpointError as error:
        hint = download_command(path)
        return f"{error}" + (f" Download it: {hint}" if hint and not storage.exists(path) else "")
    return None


def download_command(path: str) -> str:
    """The command that brings the released file that a path names; empty for other paths."""
    if not any(repository in path for repository in REPOSITORIES):
        return ""
    command = "python -m scripts.download_checkpoints"
    if (found := _RELEASED.search(path)) is None:
        return command
    command += f" --model_types {found['type'].lower().replace('-', '_')} --model_sizes {found['size']}"
    if found["resolution"]:
        command += f" --resolution {found['resolution']} --fps {found['fps']}"
    return command


def check_dit(node: object, path: str, which: str = "auto") -> None:
    """Raise when weights are not of the network of a lazy node: compares names and shapes only, and builds nothing."""
    if (problem := problem_with(path)) is not None:
        raise CheckpointError(problem)
    with torch.device("meta"):
        net: nn.Module = lazy_config.instantiate(node)
    targets = {name: tensor for name, tensor in net.state_dict().items() if not weights.is_extra(name)}
    source = open_dit(path, which)
    if (wanted := describe(targets)) is not None:
        require_family(describe(source), wanted, path, source)
    if not any(".lora_A." in name for name in source):
        weights.account(targets, source).require(source=path)
