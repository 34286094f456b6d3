# SPDX-License-Identifier: Apache-2.0
"""Building the network of a pipeline, and finding out beforehand whether all weights are there and fit."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cosmos_predict2.checkpoints import load_dit
from cosmos_predict2.checkpoints.dit_loading import check_dit
from cosmos_predict2.nn.attention import check_attention, choose_attention
from cosmos_predict2.nn.dit import DiT
from imaginaire.config import lazy_config
from imaginaire.config.names import target_of
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext

log = logging.getLogger(__name__)


def build_net(
    node: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    path: str = "",
    which: str = "auto",
    seed: int = 0,
    is_baseline: bool = False,
) -> DiT:
    """The network of a lazy node, in evaluation mode, with weights from ``path`` or random ones.

    Of a baseline, random weights are no cause for a warning.
    """
    with torch.device("meta"):
        net: DiT = lazy_config.instantiate(node)
    net = net.to(dtype).to_empty(device=device)
    net.reset_buffers()
    settle_attention(net, device, dtype)
    if path:
        report = load_dit(net, path, which)
        log.info("weights: %s (%s%s)", path, "averaged, net_ema.; " if which == "net_ema" else "", report.summary())
    else:
        net.init_weights(torch.Generator(device).manual_seed(seed))
        if is_baseline:
            log.info("weights: random, as before the training")
        else:
            log.warning("weights: random, as asked for: what is generated is noise")
    return net.eval().requires_grad_(False)


def check_parts(net: Any, dit_path: str, others: Sequence[Any], which: str = "auto") -> None:
    """Raise for weights that are not there or not of these lazy nodes, before one of them is built.

    The other parts are checked by their ``check``, where their class has one; None is passed over.
    """
    if dit_path:
        check_dit(net, dit_path, which)
    for node in others:
        if (check := getattr(target_of(node), "check", None)) is not None:
            arguments = {str(key): node[key] for key in node if not str(key).startswith("_")}
            for finding in check(arguments, CheckContext()):
                raise CheckpointError(finding.text)


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
