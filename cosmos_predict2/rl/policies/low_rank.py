# SPDX-License-Identifier: Apache-2.0
"""LoRA of a policy: adapters beside the Linear layers of its network, added to them where the policy is written, or
written alone."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters.adapters import (
    Adapter,
    Factors,
    apply_lora,
    base_fingerprint,
    merge_lora_state,
)
from cosmos_predict2.checkpoints.card_checks import agreed_alpha
from cosmos_predict2.rl.policies.weights import network_of
from imaginaire.distributed.parallel import full_tensor
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora

log = logging.getLogger(__name__)


def add_adapters(network: nn.Module, rank: int, path: str, without: tuple[str, ...] = ()) -> None:
    """Add those of ``path`` (PEFT's folder) for good, and where ``rank`` is not 0 train new ones alone, with alpha =
    rank; layers whose names begin as ``without`` says get none."""
    if path:
        apply_lora(network, path)
    if rank:
        layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        lora.inject(network, rank, rank, [name for name in layers if not name.startswith(without)])


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """The state without adapters: each is added to its layer's weight."""
    state = {name: full_tensor(tensor) for name, tensor in network.state_dict().items()}
    spec = lora.lora_spec(network)
    return state if spec is None else dict(merge_lora_state(state, spec.alpha))


def trained_adapter(policy: Any, source: str, arguments: Mapping[str, Any], alpha: float | None = None) -> Adapter:
    """The adapters of a policy as they are written alone, in the names of its network; ``arguments`` built it."""
    network = network_of(policy)
    spec = None if network is None else lora.lora_spec(network)
    if network is None or spec is None:
        raise CheckpointError(
            f"{source} holds a {type(policy).__name__} without adapters: they are trained with policy.lora_rank."
            " Write its weights: --to public."
        )
    agreed_alpha(source, spec.alpha, alpha)
    whole = [name for name, weight in network.named_parameters() if weight.requires_grad and ".lora_" not in name]
    if whole:
        raise CheckpointError(
            f"{source} trained {whole[0].partition('.')[0]} whole beside the adapters, and --to peft writes adapters"
            " alone. Write all weights: --to public."
        )
    base = str(arguments.get("path", ""))
    if below := arguments.get("lora_path"):
        log.warning(
            "%s was trained on %s with the adapters of %s added: it is of use on both alone", source, base, below
        )
    layers, factors = lora.adapters(network), lora.adapter_state(network)
    names = {name: (f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight") for name in layers}
    return Adapter(
        source,
        {name: Factors(factors, a, b, layers[name].scaling) for name, (a, b) in names.items()},
        base,
        base_fingerprint(layers, {name: layer.weight for name, layer in layers.items()}),
        tuple(name for name, _ in network.named_modules() if name and not _is_inside(name)),
    )


def _is_inside(name: str) -> bool:
    """True for an adapter's own modules."""
    return name.endswith((".base_layer", ".lora_A", ".lora_B", ".lora_A.default", ".lora_B.default"))
