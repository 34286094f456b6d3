# SPDX-License-Identifier: Apache-2.0
"""Whether the parts of a world model can be built: weights that are there and fit, attention that the device has."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.card_checks import unregistered
from cosmos_predict2.checkpoints.dit_loading import check_dit
from cosmos_predict2.nn.attention import check_attention, choose_attention
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.world_model.network import network_of
from imaginaire.config.names import target_of
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext

log = logging.getLogger(__name__)


def check_parts(net: Any, dit_path: str, others: Sequence[Any], which: str = "auto") -> None:
    """Raise for weights that are not there or not of these lazy nodes, before one of them is built.

    The other parts are checked by their ``check``, where their class has one; None is passed over.
    """
    if dit_path:
        try:
            check_dit(network_of(net), dit_path, which)
        except CheckpointError as error:
            if problem := unregistered(read_card(dit_path)):
                raise CheckpointError(problem) from error
            raise
    for node in others:
        if (check := getattr(target_of(node), "check", None)) is not None:
            arguments = {str(key): node[key] for key in node if not str(key).startswith("_")}
            for finding in check(arguments, CheckContext()):
                raise CheckpointError(finding.text)


def check_device(device: str) -> None:
    """Raise for a device that torch does not know or this machine does not have."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: use cpu, cuda, or cuda:1.")
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"--device {device} (or --use_cuda_graphs): torch sees {count} GPUs here. Use --device cpu.")


def attention_problem(net: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the network of a lazy node cannot attend as it asks to on a device; None where it can."""
    width, heads = net.get("model_channels"), net.get("num_heads")
    if not width or not heads:
        return None  # a network of another kind
    try:
        choose_attention(str(net.get("atten_backend", "auto")), device, dtype, width // heads)
    except (ImportError, ValueError) as error:
        return str(error).rstrip(".")
    return None


def settle_attention(net: DiT, device: torch.device, dtype: torch.dtype) -> None:
    """Choose the attention operator, hold it against torch's on the real head size, and say which it is."""
    try:
        choice = net.choose_attention(device=device, dtype=dtype)
        check_attention(choice.op, net.head_dim, device, dtype)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"net.atten_backend={net.atten_backend}: {error}") from error
    why = f"; {choice.reason}" if choice.reason else ""
    log.info("attention: %s (asked: %s%s)", choice.name, net.atten_backend, why)
