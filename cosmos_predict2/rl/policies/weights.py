# SPDX-License-Identifier: Apache-2.0
"""The weights of policies, wherever they are."""

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
