# SPDX-License-Identifier: Apache-2.0
"""Which network with actions a file is of: its class, and what it must be built with.

network, arguments = action_network(describe(open_dit(path)))
net = network(**{**others, **arguments})
"""

from math import isqrt
from typing import Any

from cosmos_predict2.checkpoints.families import Family, action_readings
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.released import NETWORKS
from imaginaire.errors import CheckpointError

KINDS = ("flat", "chunk")


def action_network(
    family: Family | None,
    action_dim: int = 7,
    num_actions: int = 12,
    *,
    ratio: int = 4,
    kind: str | None = None,
    source: str = "the file",
) -> tuple[type[ActionDiT], dict[str, Any]]:
    """The class of the network that reads clips of ``num_actions`` actions, ``ratio`` to a latent frame, and its
    arguments as far as shapes or a release tell them (RoPE ratios of other sizes they do not).

    The shapes alone leave open how the numbers are arranged, so that the sizes of the data decide; where both kinds of
    network would fit, ``kind`` does.
    """
    if family is None or family.action_inputs is None:
        found = "no video network" if family is None else f"a {family}, which is told no actions"
        raise CheckpointError(f"{source} is {found}. Choose weights of an action-conditioned network.")
    reads = {"flat": num_actions * action_dim, "chunk": ratio * action_dim}
    fits = [name for name in KINDS if reads[name] == family.action_inputs and kind in (None, name)]
    if not fits:
        asked = f"{num_actions} actions of {action_dim} numbers"
        raise CheckpointError(
            f"{source} reads {family.action_inputs} numbers of actions at once. {asked.capitalize()} are"
            f" {reads['flat']} in one vector (flat) or {reads['chunk']} for each latent frame (chunk)"
            f"{'' if kind is None else f', and {kind} is asked for'}. What would fit:"
            f" {'; '.join(action_readings(family.action_inputs, ratio))}."
        )
    if len(fits) > 1:
        raise CheckpointError(
            f"{source} reads {family.action_inputs} numbers of actions at once, which a flat and a chunk network both"
            f" do with {num_actions} actions of {action_dim} numbers: say which it is (kind='flat' or"
            " 'chunk'), or give the folder of its run, which knows."
        )
    hidden = family.action_hidden if family.action_hidden != 4 * family.width else None
    arguments: dict[str, Any] = {
        **NETWORKS.get(family.network or "", {}),
        **family.net_arguments,
        "action_dim": action_dim,
        "hidden_dim_in_action_embedder": hidden,
        "action_on_tokens": family.has_action_tokens,
        "patch_spatial": isqrt(family.patch_volume),  # in time, actions have patches of one frame
    }
    if fits == ["chunk"]:
        return ChunkActionDiT, {**arguments, "temporal_compression_ratio": ratio}
    return FlatActionDiT, {**arguments, "num_action_per_chunk": num_actions}
