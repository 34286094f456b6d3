# SPDX-License-Identifier: Apache-2.0
"""LoRA of a policy: adapters beside the Linear layers of its network, added to them where the policy is written."""

from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters.adapters import apply_lora, merge_lora_state
from imaginaire.distributed.parallel import full_tensor
from imaginaire.optim import lora


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
