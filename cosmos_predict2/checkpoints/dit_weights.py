# SPDX-License-Identifier: Apache-2.0
"""Weights of the video network from wherever they are, under the network's own names, and into a network.

Every argument that takes weights goes through ``open_dit``: released ``.pt`` files, training checkpoints and run
folders, DCP folders, safetensors, hub ids, and diffusers' pipeline or transformer folders.
"""

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters.adapters import merge_lora_state
from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name, is_diffusers
from cosmos_predict2.checkpoints.families import ACTION_EMBEDDERS, describe, require_family
from cosmos_predict2.checkpoints.runs import clean_name, known_alpha, recorded_alpha
from cosmos_predict2.released import describe_missing, download_command
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, below, names_at
from imaginaire.checkpoint.weights import LoadReport
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora

log = logging.getLogger(__name__)

WHICH = ("auto", "net", "net_ema")


def open_dit(path_or_id: str, which: str = "auto") -> Mapping[str, Tensor]:
    """Tensors of the network by its own names, lazy; LoRA factors stay beside their ``base_layer``.

    ``which`` is ``net``, ``net_ema`` or ``auto``: ``net``, or the averaged copy where that is all there is.
    """
    if which not in WHICH:
        raise CheckpointError(f"which={which!r}: expected one of {', '.join(WHICH)}.")
    address = inside_a_pipeline(str(path_or_id))
    if download_command(address) and not storage.is_remote(address) and not storage.exists(address):
        raise CheckpointError(describe_missing(address))
    source = weights.renamed(weights.read(address), clean_name)
    if is_diffusers(source):
        return _from_diffusers(source, address, which)
    try:
        return weights.select(source, which)
    except CheckpointError as error:
        raise CheckpointError(f"{path_or_id}: {error}") from error


def load_dit(
    net: nn.Module,
    path_or_id: str,
    which: str = "auto",
    allow_missing: Iterable[str] = (),
    *,
    lora_alpha: float | None = None,
) -> LoadReport:
    """Load a network's weights, every name accounted for; the report of what matched.

    ``allow_missing`` are patterns of the network's own names that the file may lack. ``action_embedder_*`` among them
    lets a network with actions take weights of one without; never a part of the embedders.
    Adapters in the file are merged into its weights, unless the network has adapters itself.
    """
    path = str(path_or_id)
    opened = open_dit(path, which)
    targets, source, allow_missing = fitted(net, opened, path, allow_missing, lora_alpha)
    report = weights.load_into(targets, source)
    report.require(allow_missing=allow_missing, source=path)
    adapted = sum(name.endswith(".lora_A.default.weight") and name not in targets for name in opened)
    if adapted:
        alpha = known_alpha(path, lora_alpha)
        log.info("weights: the adapters of %d layers in %s are merged, with alpha %g", adapted, path, alpha)
    return report


def fitted(
    net: nn.Module,
    source: Mapping[str, Tensor],
    path: str,
    allow_missing: Iterable[str] = (),
    lora_alpha: float | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, Tensor], tuple[str, ...]]:
    """The network's tensors, the source in its form (adapters merged or kept), and what may be missing.

    Raises where the two are of different members of the family altogether.
    """
    allow_missing = tuple(allow_missing)
    targets = {clean_name(name): tensor for name, tensor in net.state_dict().items() if not weights.is_extra(name)}
    found, wanted = describe(source), describe(targets)
    if wanted is not None:
        require_family(found, wanted, path, source, actions_may_begin=ACTION_EMBEDDERS in allow_missing)
    _require_whole_embedders(targets, source, path)
    has_adapters = any(".lora_A." in name for name in targets)
    if any(".lora_A." in name for name in source) and not has_adapters:
        return targets, merge_lora_state(source, known_alpha(path, lora_alpha), where=path), allow_missing
    if has_adapters and not any(".base_layer." in name for name in source):
        allow_missing += ("*.lora_A.*", "*.lora_B.*")
        return targets, weights.renamed(source, _below_adapters(targets)), allow_missing
    if has_adapters:
        require_alpha(net, path)
    return targets, source, allow_missing


def require_alpha(net: nn.Module, path: str) -> None:
    """Raise where a network's adapters would take over those of a checkpoint that were trained with another alpha."""
    spec, recorded = lora.lora_spec(net), recorded_alpha(path)
    if spec is not None and recorded is not None and spec.alpha != recorded:
        raise CheckpointError(
            f"{path} has adapters that were trained with alpha {recorded:g}, the network's have {spec.alpha:g}: their"
            f" effect would change by a factor of {spec.alpha / recorded:g}. Set model.config.lora_alpha={recorded:g}."
        )


def _require_whole_embedders(targets: Mapping[str, Tensor], source: Mapping[str, Tensor], path: str) -> None:
    """Raise where a file has some of a network's embedders of actions and not the others."""
    wanted = [name for name in targets if fnmatchcase(name, ACTION_EMBEDDERS) and ".lora_" not in name]
    held = {name.replace(".base_layer.", ".") for name in source}
    absent = [name for name in wanted if name.replace(".base_layer.", ".") not in held]
    if 0 < len(absent) < len(wanted):
        raise CheckpointError(
            f"{path} has {len(wanted) - len(absent)} of the {len(wanted)} tensors of the network's action embedders,"
            f" and lacks {', '.join(absent[:4])}{', ...' if len(absent) > 4 else ''}: it is damaged, or of another"
            " network."
        )


def inside_a_pipeline(address: str) -> str:
    """The transformer's folder of a diffusers pipeline; any other address as it is."""
    names = names_at(address)
    if "transformer" in names and "model_index.json" in names and not any(n.endswith(TENSOR_SUFFIXES) for n in names):
        return below(address, "transformer")
    return address


def _from_diffusers(source: Mapping[str, Tensor], address: str, which: str) -> Mapping[str, Tensor]:
    if which == "net_ema":
        raise CheckpointError(
            f"{address} is in diffusers' layout, which holds no averaged copy: leave --load_ema out (in Python: ask for"
            " 'net')."
        )
    if unknown := [name for name in source if from_diffusers_name(name) is None]:
        raise CheckpointError(
            f"{address} is a diffusers transformer with {len(unknown)} names that this network does not have:"
            f" {', '.join(unknown[:5])}."
        )
    return weights.renamed(source, from_diffusers_name)


def _below_adapters(targets: Mapping[str, Tensor]) -> Any:
    """Plain names to those of a network whose Linears lie inside adapters."""

    def rename(name: str) -> str:
        layer, _, last = name.rpartition(".")
        inside = f"{layer}.base_layer.{last}"
        return inside if inside in targets else name

    return rename
