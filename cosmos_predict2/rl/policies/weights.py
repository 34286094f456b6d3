# SPDX-License-Identifier: Apache-2.0
"""The weights of policies, wherever they are, and in which precision."""

from typing import Any

import torch
from torch import nn

from imaginaire.checkpoint import weights

_OF_A_RUN = ("net.", "net_ema.")
_CURE = "Give the policy's own file, or the run that trained it."


def load_weights(policy: nn.Module, path: str, which: str = "auto") -> None:
    """Put the weights of a policy's file, or of a run or checkpoint that trained one, into ``policy``, every name
    accounted for; ``which`` is "net", "net_ema" or "auto"."""
    source = weights.read(path)
    if any(name.startswith(_OF_A_RUN) for name in source):  # which may hold a world model besides
        source = weights.renamed(source, lambda name: name if name.startswith(_OF_A_RUN) else None)
    source = weights.select(source, which)
    weights.load_into(policy.state_dict(), source).require(source=path, cure=_CURE)


def cast(policy: nn.Module, dtype: torch.dtype, *, is_uniform: bool = False) -> None:
    """Weights in a precision. In a half one the buffers of a network stay as they are (rounded frequencies of rotary
    positions are off by a radian some hundred tokens on), and so does what its ``FLOAT32`` names; with ``is_uniform``,
    which sharding needs, only the buffers."""
    network: Any = getattr(policy, "network", None)
    if network is None or dtype.itemsize >= torch.float32.itemsize:
        policy.to(dtype)
        return
    kept = () if is_uniform else getattr(network, "FLOAT32", ())
    for name, weight in network.named_parameters():
        weight.data = weight.data.to(torch.float32 if any(part in name for part in kept) else dtype)
