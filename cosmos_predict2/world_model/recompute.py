# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation in the backward pass: memory bought with operations.

    apply_recompute(net, "predict2_2b_720")      # before torch.compile and before sharding
    compile_blocks(net)

A mode names the linear maps of a block whose results are kept, and whether those of its attentions are; the rest of
the block is computed a second time. Selection is by module, so adapters and other additions to a block do not change
it. Modules and parameters keep their places and names: the forward of a block is replaced. The gradients are those of
mode "none".
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cosmos_predict2.nn.dit import DiT
from imaginaire.errors import ConfigError, near

KEY = "model.config.pipe_config.net.sac_config"
KEYS = ("mode", "every_n_blocks")


@dataclass(frozen=True)
class Policy:
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
_720 = Policy(("self_attn.v_proj", "self_attn.output_proj", *_CROSS, "mlp.layer1"), ("self_attn",))

POLICIES: dict[str, Policy | None] = {  # None: nothing is computed anew
    "none": None,
    "block_wise": Policy(),
    "mm_only": Policy(_ALL_LINEARS, ("self_attn", "cross_attn")),
    "linear_selfattn": Policy(_ALL_LINEARS, ("self_attn",)),
    "predict2_2b_720": _720,
    "predict2_14b_720": _720,
    "predict2_2b_720_aggressive": Policy((), ("self_attn", "cross_attn")),
    "predict2_2b_720_aggressive_v2": Policy(),
    "predict2_14b_720_aggressive": Policy(("cross_attn.v_proj", "cross_attn.output_proj", "mlp.layer1")),
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
    if any("forward" in vars(module) for module in (*net.blocks, net.final_layer)):
        raise ConfigError(f"This network recomputes already: apply {KEY}.mode once.")
    for i in range(0, len(net.blocks), every_n_blocks):
        block = net.get_block(i)
        _mark(block, policy)
        _recompute(block, policy)
    _recompute(net.final_layer, Policy())


def checked_policy(mode: str = "none", every_n_blocks: int = 1, **others: Any) -> Policy | None:
    """The policy of a network's ``sac_config``, or an error that names the key; None: nothing is computed anew."""
    for key in others:
        raise ConfigError(f"{KEY}.{key} is no key of it.{near(str(key), KEYS)}")
    if mode not in POLICIES:
        raise ConfigError(f"{KEY}.mode is {mode!r}.{near(str(mode), POLICIES)}")
    if isinstance(every_n_blocks, bool) or not isinstance(every_n_blocks, int) or every_n_blocks < 1:
        raise ConfigError(f"{KEY}.every_n_blocks is {every_n_blocks!r}; expected an integer of 1 or more.")
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


def _mark(block: nn.Module, policy: Policy) -> None:
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


def _recompute(module: nn.Module, policy: Policy) -> None:
    module.forward = functools.partial(_forward, module.forward, policy)


def _forward(forward: Callable[..., Tensor], policy: Policy, *args: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args)
    call = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing random in a block
    if policy.linears or policy.attentions:
        out: Tensor = call(forward, *args, context_fn=functools.partial(_contexts, policy))
    else:
        out = call(forward, *args)
    return out


def _contexts(policy: Policy) -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_decide, policy))


def _decide(policy: Policy, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    names = policy.attentions if str(op) in ATTENTIONS else policy.linears if str(op) in PRODUCTS else ()
    keep = bool(names) and _module_name() in names
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _module_name() -> str:
    """The module that computes now, by its name in the block: as the compiler's trace says it, or the marks."""
    traced = fx_traceback.get_current_meta().get("nn_module_stack")
    if not traced:
        return (getattr(_here, "names", ()) or ("",))[-1]
    path, _ = list(traced.values())[-1]
    parts = path.removesuffix(".base_layer").split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[-n:])) in _NAMES), "")
