# SPDX-License-Identifier: Apache-2.0
"""Which tensors a released file must hold, and what is wrong with one that lies here."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.checkpoints.families import describe, require_family
from cosmos_predict2.checkpoints.released import NETWORKS
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from imaginaire import weights
from imaginaire.errors import CheckpointError, ConfigError, near


def dit_manifest(network: str) -> dict[str, Tensor]:
    """Every entry of a released network's state dict by name, without memory (meta tensors)."""
    if network not in NETWORKS:
        raise ConfigError(f"There is no released network '{network}'.{near(network, NETWORKS)}")
    return dict(build_on_meta(NETWORKS[network], is_image=network.endswith("Text2Image")).state_dict())


def build_on_meta(net: Mapping[str, Any], *, is_image: bool = False) -> DiT:
    """The network of these arguments without memory."""
    with torch.device("meta"):
        return (DiT if is_image else Video2WorldDiT)(**net)


def dit_faults(path: str, network: str, which: str = "auto") -> tuple[list[str], str]:
    """What is wrong with a file of a released network, by names and shapes; and its dtypes, as a note."""
    wanted = {name: tensor for name, tensor in dit_manifest(network).items() if not weights.is_extra(name)}
    try:
        source = open_dit(path, which)
        require_family(describe(source), describe(wanted), path, source)
        weights.account(wanted, source).require(source=path)
    except CheckpointError as error:
        return [str(error)], ""
    return [], dtype_note(source)


def dtype_note(source: Mapping[str, Tensor]) -> str:
    """``567 tensors, bfloat16``; with several dtypes, how many of each."""
    counts = Counter(str(source[name].dtype).removeprefix("torch.") for name in source)
    kinds = ", ".join(dtype if len(counts) == 1 else f"{count} {dtype}" for dtype, count in counts.most_common())
    return f"{len(source)} tensors, {kinds}"
