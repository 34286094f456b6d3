# SPDX-License-Identifier: Apache-2.0
"""Applied to a policy's network from outside: precision, adapters (LoRA), recomputation and sharding (FSDP2).

While episodes are played each rank holds the whole weights (`gathered`): ranks may decide as often as they like.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmos_predict2.checkpoints.adapters import (
    Adapter,
    Factors,
    agreed_alpha,
    apply_lora,
    base_fingerprint,
    merge_lora_state,
)
from cosmos_predict2.rl.interfaces import completed
from imaginaire.distributed.parallel import ParallelDims, full_tensor, shard_blocks
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.optim import lora
from imaginaire.training.model import evaluating

log = logging.getLogger(__name__)

_INSIDE = (".base_layer", ".lora_A", ".lora_B", ".lora_A.default", ".lora_B.default")  # an adapter's own modules


def correlated(normal_E_K_N: Tensor, correlation: float) -> Tensor:
    """Standard normal draws as an autoregressive sequence over actions: those of actions k and j of a number correlate
    by ``correlation`` to the power |k - j|, and each alone is as likely as before.

    Draws of their own tremble, and average out over a motion: attempts then hardly differ in where it leads. Correlated
    ones shift the motion as a whole. A policy's log-probability stays that of each number by itself. For normal draws
    of a fixed deviation its gradient in their means is the joint one's times the covariance, which favours whole
    motions; for tokens, and in weights that several numbers share, this is a heuristic. A mean of exp(sum of
    log-ratios) is no longer 1: k3 of a whole decision takes a common shift of its numbers for farther than it is.
    """
    if correlation == 0:
        return normal_E_K_N
    k = torch.arange(normal_E_K_N.shape[1], device=normal_E_K_N.device)
    share = torch.tril(correlation ** (k[:, None] - k[None]).clamp(min=0))
    share[:, 1:] *= (1 - correlation**2) ** 0.5
    return torch.einsum("kj,ejn->ekn", share.to(normal_E_K_N), normal_E_K_N)


@runtime_checkable
class PolicyNetwork(Protocol):
    """The ``network`` of a policy, a module, which is sharded, adapted and cast in part.

    Optional: ``FLOAT32``, parts of names of what stays in float32 where the rest is of half precision.
    """

    PASSES: tuple[str, ...]  # its methods that are called from outside

    @property
    def FLOAT32(self) -> tuple[str, ...]: ...

    def blocks(self) -> list[nn.Module]: ...


class PolicyNetworkDefaults:
    FLOAT32: tuple[str, ...] = ()


def network_of(policy: nn.Module) -> Any:
    """A policy's `PolicyNetwork`; None where there is none."""
    return completed(policy.network, PolicyNetworkDefaults) if hasattr(policy, "network") else None


def cast(policy: nn.Module, dtype: torch.dtype, *, is_uniform: bool = False) -> None:
    """Weights in a precision. In a half one the buffers of a network stay as they are (rounded frequencies of rotary
    positions are off by a radian some hundred tokens on), and so does what its ``FLOAT32`` names; with ``is_uniform``,
    which sharding needs, only the buffers."""
    network = network_of(policy)
    if network is None or dtype.itemsize >= torch.float32.itemsize:
        policy.to(dtype)
        return
    kept = () if is_uniform else network.FLOAT32
    for name, weight in policy.named_parameters():
        weight.data = weight.data.to(torch.float32 if any(part in name for part in kept) else dtype)


# --- adapters


def add_adapters(network: nn.Module, rank: int, path: str, without: tuple[str, ...] = ()) -> None:
    """Add those of ``path`` (PEFT's folder) for good, and where ``rank`` is not 0 train new ones alone, with alpha =
    rank; layers whose names begin with one of ``without`` get none."""
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
        log.warning("%s was trained on %s with the adapters of %s added: it works on both alone", source, base, below)
    layers, factors = lora.adapters(network), lora.adapter_state(network)
    names = {name: (f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight") for name in layers}
    return Adapter(
        source,
        {name: Factors(factors, a, b, layers[name].scaling) for name, (a, b) in names.items()},
        base,
        base_fingerprint(layers, {name: layer.weight for name, layer in layers.items()}),
        tuple(name for name, _ in network.named_modules() if name and not name.endswith(_INSIDE)),
    )


# --- recomputation and sharding


def check_sharding(fsdp_shard_size: int, context: CheckContext) -> Iterator[Finding]:
    """An error where a policy is to be sharded by processes each of which has it whole."""
    if fsdp_shard_size and context.config is not None and context.config.trainer.distributed_parallelism == "ddp":
        text = f"ddp, by which each process has the whole policy, but model.config.fsdp_shard_size={fsdp_shard_size}"
        yield error("trainer.distributed_parallelism", text, "Set trainer.distributed_parallelism=fsdp")


def parallelize_policy(policy: nn.Module, dims: ParallelDims, fsdp_shard_size: int, *, recompute: bool) -> None:
    """Recompute blocks in backward where that is asked for, then shard; names of parameters stay as they are."""
    if dims.context_parallel_size > 1:
        raise ConfigError("model_parallel.context_parallel_size must be 1: policies are trained data-parallel.")
    mesh = dims.fsdp_mesh(fsdp_shard_size)
    if mesh is None and not recompute:
        return
    network = network_of(policy)
    if not (isinstance(network, nn.Module) and isinstance(network, PolicyNetwork)):
        option = "recompute=true" if recompute else f"fsdp_shard_size={fsdp_shard_size}"
        needed = "policies whose network has blocks and PASSES"
        raise ConfigError(f"model.config.{option} is for {needed}: a {type(policy).__name__} has none.")
    if recompute:
        for block in network.blocks():
            block.forward = functools.partial(_recomputed, block.forward)
    if mesh is not None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        shard_blocks(network, network.blocks(), mesh)
        for name in network.PASSES:
            register_fsdp_forward_method(network, name)
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
        )


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@contextmanager
def deciding(policy: nn.Module) -> Iterator[None]:
    """Inside, a policy is in evaluation mode and whole on every rank, so that no pass waits for other ranks."""
    with evaluating(policy), gathered(policy):
        yield


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, every rank holds the whole weights of what is sharded, without gradients."""
    from torch.distributed.fsdp import FSDPModule

    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not parts[0], recurse=False)  # the whole, which backward begins with
            part.reshard()


# --- precision of log-probabilities


# How far two log-probabilities of an element may be apart on average, in nats: the same formula, rounded otherwise in
# batches of other sizes. By the precision of the weights. On CPUs the tiny policies differ by 2e-7 in both precisions;
# these bounds are guesses for GPUs, where float32 products are TF32 and kernels depend on the batch.
TOLERANCE, OF_HALF = 5e-3, 0.05


def tolerance_of(policy: Any) -> float:
    """The tolerance of the lowest precision among the weights."""
    weights = policy.parameters() if isinstance(policy, nn.Module) else ()
    is_half = any(weight.dtype not in (torch.float32, torch.float64) for weight in weights)
    return OF_HALF if is_half else TOLERANCE


def difference(drawn_B_K_N: Tensor, computed_B_K_N: Tensor) -> float:
    """Mean distance of the elements of two log-probabilities; infinite where their shapes differ."""
    if drawn_B_K_N.shape != computed_B_K_N.shape:
        return float("inf")
    return float((drawn_B_K_N.float() - computed_B_K_N.float()).abs().mean())
