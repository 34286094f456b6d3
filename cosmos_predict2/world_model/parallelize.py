# SPDX-License-Identifier: Apache-2.0
"""Recomputation, context parallelism, compilation and sharding, applied to a network from outside.

Context parallelism spreads the latent frames of a clip over a group of processes. All that a block does is local to a
frame but self-attention, around which two all-to-alls exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Recomputation buys memory with operations: a mode names the linear maps of a block whose results are kept, and whether
those of its attentions are; the rest of the block is computed a second time in the backward pass. Selection is by
module, so adapters and other additions to a block do not change it. Modules and parameters keep their places and names:
the forward of a block is replaced. The gradients are those of mode "none".
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.nn.blocks import AttentionOp
from cosmos_predict2.nn.dit import DiT
from imaginaire.distributed.context_parallel import exchange, gather, split
from imaginaire.distributed.parallel import ParallelDims, divisors
from imaginaire.errors import ConfigError, near

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
    for module in net.outer_modules:
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
        if net.causal:
            raise ConfigError(f"{CONTEXT_KEY}: {self.size}, but a causal network sees whole clips. Set it to 1.")
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


# Recomputation --------------------------------------------------------------------------------------------------------


RECOMPUTE_KEY = "model.config.pipe_config.net.sac_config"


@dataclass(frozen=True)
class KeptResults:
    """Results that a block keeps: of these linear maps, and of the attentions of these modules."""

    linears: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")
_CROSS = tuple(f"cross_attn.{name}" for name in _PROJECTIONS)
_MLP = ("mlp.layer1", "mlp.layer2")
_MODULATIONS = tuple(
    f"adaln_modulation_{part}.{i}"
    for part in ("self_attn", "cross_attn", "mlp")
    for i in (1, 2)  # 0 is the SiLU
)
_ALL_LINEARS = (*_MODULATIONS, *(f"self_attn.{name}" for name in _PROJECTIONS), *_CROSS, *_MLP)
_720 = KeptResults(("self_attn.v_proj", "self_attn.output_proj", *_CROSS, "mlp.layer1"), ("self_attn",))

POLICIES: dict[str, KeptResults | None] = {  # None: nothing is computed anew
    "none": None,
    "block_wise": KeptResults(),
    "mm_only": KeptResults(_ALL_LINEARS, ("self_attn", "cross_attn")),
    "linear_selfattn": KeptResults(_ALL_LINEARS, ("self_attn",)),
    "predict2_2b_720": _720,
    "predict2_14b_720": _720,
    "predict2_2b_720_aggressive": KeptResults((), ("self_attn", "cross_attn")),
    "predict2_2b_720_aggressive_v2": KeptResults(),
    "predict2_14b_720_aggressive": KeptResults(("cross_attn.v_proj", "cross_attn.output_proj", "mlp.layer1")),
}

_NAMES = {*_ALL_LINEARS, "self_attn", "cross_attn"}

PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.linear.default", "mkldnn._linear_pointwise.default"}
ATTENTIONS = {
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn_3.fwd.default",
}


def apply_recompute(net: DiT, mode: str = "none", every_n_blocks: int = 1, **others: Any) -> None:
    """Let every n-th block of the network, and its final layer, compute anew in backward what the mode does not keep.

    In place, once, before compilation and sharding; adapters may come before or after.
    """
    policy = checked_policy(mode, every_n_blocks, **others)
    if policy is None:
        return
    if any("forward" in vars(module) for module in (*net.blocks, net.last_layer)):
        raise ConfigError(f"This network recomputes already: apply {RECOMPUTE_KEY}.mode once.")
    for i in range(0, len(net.blocks), every_n_blocks):
        block = net.get_block(i)
        _mark(block, policy)
        _recompute(block, policy)
    _recompute(net.last_layer, KeptResults())


def checked_policy(mode: str = "none", every_n_blocks: int = 1, **others: Any) -> KeptResults | None:
    """The policy of a network's ``sac_config``, or an error that names the key; None: nothing is computed anew."""
    for key in others:
        raise ConfigError(f"{RECOMPUTE_KEY}.{key} is no key of it.{near(str(key), ('mode', 'every_n_blocks'))}")
    if mode not in POLICIES:
        raise ConfigError(f"{RECOMPUTE_KEY}.mode is {mode!r}.{near(str(mode), POLICIES)}")
    if isinstance(every_n_blocks, bool) or not isinstance(every_n_blocks, int) or every_n_blocks < 1:
        raise ConfigError(f"{RECOMPUTE_KEY}.every_n_blocks is {every_n_blocks!r}; expected an integer of 1 or more.")
    return POLICIES[mode]


def compile_blocks(net: DiT, **options: Any) -> None:
    """Let torch.compile compile each block by itself, in place; ``options`` are those of torch.compile.

    Blocks are alike, so that one of them is compiled for all. Marks are different in each, and the compiler's trace has
    the names without them: they go, or each block would be compiled anew, up to the compiler's limit of eight.
    """
    for block in net.blocks:
        for mark in getattr(block, "recompute_marks", ()):
            mark.remove()
        block.compile(**options)


# The module that computes now, for the policy: it is shown operations only.
_here = threading.local()


def _mark(block: nn.Module, policy: KeptResults) -> None:
    """Note, while one of the policy's modules computes, which one it is."""
    marks = []
    for name in (*policy.linears, *policy.attentions):
        module = _find(block, name)
        if module is not None:
            marks.append(module.register_forward_pre_hook(functools.partial(_enter, name)))
            # in any case: a recomputation stops by an exception
            marks.append(module.register_forward_hook(_leave, always_call=True))
    block.recompute_marks = marks  # type: ignore[assignment]


def _find(block: nn.Module, name: str) -> nn.Module | None:
    """The module of that name, or the frozen map below its adapter; None for a modulation without low rank."""
    try:
        module = block.get_submodule(name)
    except AttributeError:
        return None
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def _enter(name: str, module: nn.Module, args: Any) -> None:
    _here.names = (*getattr(_here, "names", ()), name)


def _leave(module: nn.Module, args: Any, out: Any) -> None:
    _here.names = _here.names[:-1]


def _recompute(module: nn.Module, policy: KeptResults) -> None:
    module.forward = functools.partial(_forward, module.forward, policy)


def _forward(forward: Callable[..., Tensor], policy: KeptResults, *args: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args)
    options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)  # nothing random in a block
    if policy.linears or policy.attentions:
        decide = functools.partial(_decide, policy)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, decide)
    return checkpoint(forward, *args, **options)  # type: ignore[no-any-return]


def _decide(policy: KeptResults, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    names = policy.attentions if str(op) in ATTENTIONS else policy.linears if str(op) in PRODUCTS else ()
    keep = bool(names) and _module_name() in names
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _module_name() -> str:
    """The module that computes now, by its name in the block: from the compiler's trace, or the marks."""
    traced = fx_traceback.get_current_meta().get("nn_module_stack")
    if not traced:
        return (getattr(_here, "names", ()) or ("",))[-1]
    path, _ = list(traced.values())[-1]
    parts = path.removesuffix(".base_layer").split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[-n:])) in _NAMES), "")
