# SPDX-License-Identifier: Apache-2.0
"""Weights from wherever they are into a network, every name accounted for."""

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters import merge_lora_state
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.card_checks import agreed_alpha, alpha_differences
from cosmos_predict2.checkpoints.dit_weights import clean_name, open_dit, quiet
from cosmos_predict2.checkpoints.families import ACTION_EMBEDDERS, describe, require_family
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weights import LoadReport
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora

log = logging.getLogger(__name__)

CURE = (
    "Choose other weights, or a network like theirs (model.config.pipe_config.net). Parameters that your own network"
    " has besides begin anew in training where its class lists them: begins_anew = (PATTERN, ...)."
)


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
    report.require(allow_missing=allow_missing, source=path, cure=CURE)
    adapted = sum(name.endswith(".lora_A.default.weight") and name not in targets for name in opened)
    if adapted:
        alpha = agreed_alpha(path, read_card(path).lora_alpha, lora_alpha)
        log.info("weights: the adapters of %d layers in %s are merged, with alpha %g", adapted, path, alpha)
    return report


def check_dit(net: nn.Module, path: str, which: str = "auto", allow_missing: Iterable[str] = ()) -> None:
    """Raise where weights are not of a network, which may be on the meta device: compares names and shapes."""
    with quiet():
        source = open_dit(path, which)
    targets, source, allow_missing = fitted(net, source, path, allow_missing)
    weights.account(targets, source).require(allow_missing=allow_missing, source=path, cure=CURE)


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
        alpha = agreed_alpha(path, read_card(path).lora_alpha, lora_alpha)
        return targets, merge_lora_state(source, alpha, where=path), allow_missing
    if has_adapters and not any(".base_layer." in name for name in source):
        allow_missing += ("*.lora_A.*", "*.lora_B.*")
        return targets, weights.renamed(source, _below_adapters(targets)), allow_missing
    if has_adapters:
        for problem in alpha_differences(read_card(path), lora.lora_spec(net)):
            raise CheckpointError(problem)
    return targets, source, allow_missing


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


def _below_adapters(targets: Mapping[str, Tensor]) -> Any:
    """Plain names to those of a network whose Linears lie inside adapters."""

    def rename(name: str) -> str:
        layer, _, last = name.rpartition(".")
        inside = f"{layer}.base_layer.{last}"
        return inside if inside in targets else name

    return rename
