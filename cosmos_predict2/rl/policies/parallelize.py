# SPDX-License-Identifier: Apache-2.0
"""What is applied to a policy from outside: recomputation of its blocks, and sharding (FSDP2).

A policy that can be sharded has a ``network`` with ``blocks()`` and the methods that are its passes, ``PASSES``. While
episodes are played each rank holds the whole weights (`gathered`), so that ranks may decide as often as they like.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cosmos_predict2.rl.policies.weights import network_of
from imaginaire.distributed.parallel import ParallelDims, shard_blocks
from imaginaire.errors import ConfigError
from imaginaire.training.model import evaluating


def parallelize_policy(policy: nn.Module, dims: ParallelDims, fsdp_shard_size: int, *, recompute: bool) -> None:
    """Recompute blocks in backward where that is asked for, then shard; names of parameters stay as they are."""
    mesh = dims.fsdp_mesh(fsdp_shard_size)
    if mesh is None and not recompute:
        return
    network = network_of(policy)
    if not hasattr(network, "blocks"):
        option = "recompute=true" if recompute else f"fsdp_shard_size={fsdp_shard_size}"
        raise ConfigError(f"model.config.{option} is for policies with blocks: a {type(policy).__name__} has none.")
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
