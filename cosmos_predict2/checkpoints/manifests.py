# SPDX-License-Identifier: Apache-2.0
"""Which tensors a released file must hold, and what is wrong with one that lies here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.checkpoints.families import LATENT_CHANNELS, describe, require_family
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.released import NETWORKS
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, ConfigError, near

# How the released networks with actions read these: Predict2 a chunk of 12 actions of 7 numbers, Predict2.5 the 4
# actions of one latent frame.
ACTIONS: dict[str, tuple[type[ActionDiT], dict[str, int]]] = {
    "2B Video2World": (FlatActionDiT, dict(action_dim=7, num_action_per_chunk=12)),
    "2B Predict2.5": (ChunkActionDiT, dict(action_dim=7, temporal_compression_ratio=4)),
}


def dit_manifest(network: str) -> dict[str, Tensor]:
    """Every entry of a released network's state dict by name, without memory (meta tensors)."""
    if network not in NETWORKS:
        raise ConfigError(f"There is no released network '{network}'.{near(network, NETWORKS)}")
    cls = DiT if network.endswith("Text2Image") else Video2WorldDiT
    return dict(build_on_meta(NETWORKS[network], cls).state_dict())


def build_on_meta(net: Mapping[str, Any], cls: type[DiT] = Video2WorldDiT) -> DiT:
    """The network of these arguments without memory."""
    with torch.device("meta"):
        return cls(**net)


@dataclass(frozen=True)
class Manifest:
    """What a file must hold, and patterns of what else it may."""

    tensors: Mapping[str, Tensor]
    may_hold: tuple[str, ...] = ()


def manifest_of(network: str) -> Manifest:
    """The manifest of a released network, of one derived from it (``2B action-conditioned``), or of ``tokenizer``."""
    if network == "tokenizer":
        from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE

        with torch.device("meta"):
            return Manifest(WanVAE(WanConfig()).state_dict())
    if network == "2B multiview":
        views = {"view_embeddings.weight": torch.empty(7, 7, device="meta")}
        net = build_on_meta({**NETWORKS["2B Video2World"], "in_channels": LATENT_CHANNELS + 7})
        return Manifest({**_weights_of(net.state_dict()), **views}, ("pos_embedder_options.*",))
    base = network.removesuffix(" action-conditioned")
    if base == "2B" or base not in NETWORKS:
        base = f"{base} Video2World"
    if network.endswith(" action-conditioned"):
        cls, actions = ACTIONS[base]
        return Manifest(_weights_of(build_on_meta({**NETWORKS[base], **actions}, cls).state_dict()))
    return Manifest(_weights_of(dit_manifest(base)))


def file_faults(path: str, network: str) -> tuple[list[str], str]:
    """What is wrong with a released file, by its names and shapes; and its dtypes, as a note."""
    manifest = manifest_of(network)
    try:
        if network == "tokenizer":
            source = weights.read(path)
        else:
            source = open_dit(path)
            require_family(describe(source), describe(manifest.tensors), path, source)
        weights.account(manifest.tensors, source).require(source=path, allow_unexpected=manifest.may_hold)
    except CheckpointError as error:
        return [str(error)], ""
    return [], dtype_note(source)


def _weights_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not weights.is_extra(name)}


def dtype_note(source: Mapping[str, Tensor]) -> str:
    """``567 tensors, bfloat16``; with several dtypes, how many of each."""
    counts = Counter(str(source[name].dtype).removeprefix("torch.") for name in source)
    kinds = ", ".join(dtype if len(counts) == 1 else f"{count} {dtype}" for dtype, count in counts.most_common())
    return f"{len(source)} tensors, {kinds}"
