# SPDX-License-Identifier: Apache-2.0
"""Recomputation, context parallelism, compilation and sharding, applied to a network from outside.

Context parallelism spreads the latent frames of a clip over a group of processes. All that a block does is local to a
frame but self-attention, around which two all-to-alls exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.nn.action_dit import ActionDiT
from cosmos_predict2.nn.attention import AttentionOp
from cosmos_predict2.nn.dit import DiT
from imaginaire.distributed.context_parallel import exchange, gather, split
from imaginaire.distributed.parallel import ParallelDims, divisors
from imaginaire.errors import ConfigError

CONTEXT_KEY = "model_parallel.context_parallel_size"


def parallelize_dit(
    net: DiT,
    dims: ParallelDims,
    *,
    fsdp_shard_size: int = 0,
    sac_config: Mapping[str, Any] | None = None,
    compile: bool = False,
) -> "ContextParallel":
    """Recompute, spread over the context-parallel group, compile and shard a network, in this order.

    Names of modules and parameters stay as they are. The network's attention must have been chosen.
    """
    if sac_config or compile:
        from cosmos_predict2.world_model.recompute import apply_recompute, compile_blocks
    if sac_config:
        apply_recompute(net, **sac_config)
    context = ContextParallel(net, dims.cp_group)
    if compile:
        compile_blocks(net)
    _shard(net, dims, fsdp_shard_size)
    return context


def _shard(net: DiT, dims: ParallelDims, fsdp_shard_size: int) -> None:
    mesh = dims.fsdp_mesh(fsdp_shard_size)
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    *blocks, last = net.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)  # the backward pass begins with it
    others: list[torch.nn.Module | None] = [net.final_layer, net.extra_pos_embedder, net.t_embedder, net.crossattn_proj]
    others += net.action_mlps() if isinstance(net, ActionDiT) else []
    for module in others:
        if module is not None:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    # A warning for code that adds in place to what such a module returns, which nothing in the network does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


class ContextParallel:
    """Lets a network see this rank's part of each clip; with a group of None, all of it.

    It begins switched off. `activate` holds until its next call, so that recomputation in the backward pass sees what
    the forward pass saw. Image batches, of one frame each, run with it off, alike on all ranks.
    """

    def __init__(self, net: DiT, group: dist.ProcessGroup | None) -> None:
        self.net = net
        self.group = group
        self.size = group.size() if group is not None else 1
        self.rank = group.rank() if group is not None else 0
        self.is_on = False
        if group is None:
            return
        if net.num_heads % self.size:
            raise ConfigError(
                f"{CONTEXT_KEY}: {self.size} does not divide the network's {net.num_heads} attention heads. Use one of "
                f"{divisors(net.num_heads)}."
            )
        if net.attention is None:
            net.choose_attention()
        for i in range(len(net.blocks)):
            attention = net.get_block(i).self_attn
            assert not isinstance(attention.attention, _SpreadAttention), "the network is spread over a group already"
            attention.attention = _SpreadAttention(attention.attention, self)

    def activate(self, on: bool) -> None:
        """Let the network see this rank's frames, or all of what it is given."""
        self.is_on = on and self.size > 1
        if self.size > 1:
            self.net.see_part(*((self.rank, self.size) if self.is_on else (0, 1)))

    def split_frames(self, x: Tensor, dim: int = 2) -> Tensor:
        """This rank's part along time; all of it while off."""
        return split(x, dim, self.group) if self.is_on else x

    def gather_frames(self, x: Tensor, dim: int = 2) -> Tensor:
        """The parts of all ranks along time; x itself while off."""
        return gather(x, dim, self.group) if self.is_on else x

    def part_of(self, condition: Condition) -> Condition:
        """The condition of this rank's frames; all of it while off."""
        if not self.is_on or condition.gt_frames_B_C_T_H_W is None:
            return condition
        frames = condition.gt_frames_B_C_T_H_W.shape[2] // self.size
        return condition.frames(self.rank * frames, (self.rank + 1) * frames)


class _SpreadAttention:
    """An attention operator over all tokens of a clip that is spread over a group, by this rank's heads."""

    def __init__(self, op: AttentionOp, context: ContextParallel) -> None:
        self.op = op
        self.context = context

    def __call__(self, q_B_L_N_K: Tensor, k_B_L_N_K: Tensor, v_B_L_N_K: Tensor) -> Tensor:
        if not self.context.is_on:
            return self.op(q_B_L_N_K, k_B_L_N_K, v_B_L_N_K)
        group = self.context.group
        qkv_3_B_L_N_K = torch.stack((q_B_L_N_K, k_B_L_N_K, v_B_L_N_K))  # one message in place of three
        q, k, v = exchange(qkv_3_B_L_N_K, 3, 2, group).unbind(0)
        return exchange(self.op(q, k, v), 1, 2, group)


def degree_problems(
    *,
    world_size: int | None,
    context_parallel_size: int,
    num_heads: int,
    state_t: int,
    patch_temporal: int = 1,
    fsdp_shard_size: int = 0,
) -> Iterator[tuple[str, str]]:
    """(config key, sentence) for each degree that does not divide the processes, heads or latent frames; ``world_size``
    is None where it is unknown."""
    size, frames = context_parallel_size, state_t // patch_temporal
    works = [d for d in divisors(num_heads) if frames % d == 0]
    if size not in works:
        yield (
            CONTEXT_KEY,
            f"{size} does not divide the {num_heads} attention heads of the network and the {frames} latent frames of "
            f"a clip (state_t). Use one of {works}",
        )
    if world_size is None:
        return
    if size > 0 and world_size % size:
        usable = [d for d in works if world_size % d == 0]
        yield CONTEXT_KEY, f"{size} does not divide the {world_size} processes. Use one of {usable}"
    shard = min(fsdp_shard_size, world_size)
    if shard > 0 and world_size % shard:
        yield (
            "model.config.fsdp_shard_size",
            f"{fsdp_shard_size} does not divide the {world_size} processes. Use one of {divisors(world_size)}, -1 (all "
            "of them) or 0 (no sharding)",
        )
