# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step keeps for its backward pass, as formulas of sizes, and what it needs while it computes.

Everything is counted for one rank. With n tokens of width D, m tokens of text, F the width of the MLP and R frames with
a noise level of their own, a block whose weights are trained keeps without recomputation, in elements,

    21 n D + 2 n F + 3 m D + R (15 D + 3 rank)        and a few numbers per token that are float32 always.

A frozen map keeps no input, but an adapter on it keeps a float32 copy of that. Embedders of actions that are trained
beside adapters ask for the gradients of modulations, 6 n D a block. The counts are those of fused attention
and norms, as GPUs have them; what a compiler saves by fusing is not in them.
"""

from dataclasses import dataclass
from typing import cast

import torch

from cosmos_predict2.tools.plan.workload import Workload
from cosmos_predict2.world_model.recompute import POLICIES

ADAPTER_BYTES = 4  # adapters, and what they keep, are float32


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank."""

    kept: int  # by all blocks and what is around them, when the backward pass begins
    recomputed: int  # what the block that is computed anew brings back besides
    transient: int  # gradients in flight while one block goes backward

    @property
    def peak(self) -> int:
        return self.kept + self.recomputed + self.transient


def activations(work: Workload) -> Activations:
    """Activations of a micro-batch under the workload's policy."""
    sizes = _Sizes(work)
    whole = sum(sizes.linears(name, adapted) for name, adapted in _linears(work).items())
    is_trained = work.lora_rank is None
    modulates = is_trained or work.trains_embedders
    whole += sizes.around_linears(is_trained, modulates)
    policy = POLICIES[work.mode]
    blocks = len(work.net.blocks)
    n_d = sizes.tokens * sizes.width * sizes.element
    # The MLP's, as measured on CPUs: of its hidden layer while one of its inputs is freed already, and of the residual.
    in_flight = sizes.element if is_trained else 1.5 * max(ADAPTER_BYTES, sizes.element)
    transient = int((sizes.tokens * sizes.hidden + 2 * sizes.tokens * sizes.width) * in_flight)
    ends = sizes.ends(is_trained)
    if policy is None:
        # The final layer keeps its norm and its map's input; a frozen one does not, nor the first block its own.
        own = 2 * n_d if is_trained else n_d * (work.trains_embedders - 1)
        return Activations(blocks * whole + ends + own, 0, transient)
    light = n_d + sum(sizes.output(name) for name in policy.linears)
    light += sum(n_d + sizes.statistics(sizes.heads) for _ in policy.attentions)
    recomputing = len(range(0, blocks, work.every_n_blocks))
    kept = recomputing * light + (blocks - recomputing) * whole + ends
    return Activations(kept, max(0, whole - light), transient)


def _linears(work: Workload) -> dict[str, bool]:
    """The linear maps of a block, and whether each has an adapter."""
    block = work.net.get_block(0)
    names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
    if work.lora_rank is None:
        return dict.fromkeys(names, False)
    return {n: any(n == t or f"blocks.0.{n}".endswith(f".{t}") for t in work.lora_targets) for n in names}


class _Sizes:
    """The letters of the formulas, and the bytes that follow from them."""

    def __init__(self, work: Workload) -> None:
        net, block = work.net, work.net.get_block(0)
        self.element = work.precision.itemsize
        self.statistic = max(4, self.element)
        self.tokens = work.rank_tokens
        self.batch_size = work.batch_size
        self.text = work.batch_size * work.text_tokens
        self.frames = work.rank_frames
        self.width = net.model_channels
        self.heads = net.num_heads
        self.hidden = block.mlp.layer1.out_features
        self.text_width = block.cross_attn.k_proj.in_features
        self.rank = net.adaln_lora_dim or 0
        self.features = cast(torch.nn.Linear, net.x_embedder.proj[1]).in_features
        self.features_out = net.final_layer.linear.out_features
        self.lora_rank = work.lora_rank
        self.head_dim = net.head_dim
        self.is_spread = work.context_parallel > 1

    def statistics(self, per_token: int) -> int:
        return self.tokens * per_token * self.statistic

    def output(self, name: str) -> int:
        """Bytes of the result of a block's linear map."""
        if name.startswith("adaln_modulation"):
            is_first_of_two = self.rank and name.endswith(".1")
            return self.frames * (self.rank if is_first_of_two else 3 * self.width) * self.element
        rows = self.text if name in ("cross_attn.k_proj", "cross_attn.v_proj") else self.tokens
        return rows * (self.hidden if name == "mlp.layer1" else self.width) * self.element

    def linears(self, name: str, has_adapter: bool) -> int:
        """Bytes that a linear map keeps of its input, where no other one keeps the same."""
        rows, columns = self.tokens, self.width
        if name in ("cross_attn.k_proj", "cross_attn.v_proj"):
            rows, columns = self.text, self.text_width
        elif name == "mlp.layer2":
            columns = self.hidden
        elif name.startswith("adaln_modulation"):
            rows, columns = self.frames, self.rank if name.endswith(".2") and self.rank else self.width
        is_shared = name in ("self_attn.k_proj", "self_attn.v_proj", "cross_attn.k_proj", "cross_attn.v_proj")
        if self.lora_rank is None:
            return 0 if is_shared else rows * columns * self.element
        if not has_adapter:
            return 0
        inner = rows * self.lora_rank * max(ADAPTER_BYTES, self.element)
        if self.element >= ADAPTER_BYTES:  # no copy
            return inner + (0 if is_shared or name.endswith("output_proj") else rows * columns * self.element)
        return inner + rows * columns * ADAPTER_BYTES

    def around_linears(self, is_trained: bool, modulates: bool) -> int:
        """Bytes that a block's norms, modulations, attentions and activations keep; ``modulates`` where modulations
        have a gradient."""
        n_d, n_f = self.tokens * self.width, self.tokens * self.hidden
        norms = 3 * n_d + (3 * n_d if modulates else 0)  # inputs; results, for the gradient of their scales
        gates = (3 * n_d if modulates else 0) + self.frames * self.width * 3 * (3 + 1)
        self_attn = 2 * n_d + 3 * n_d + n_d * (1 + self.is_spread)  # before the norms; q, k, v; the result
        cross = n_d + n_d + n_d + 3 * self.text * self.width
        if is_trained:  # the results are the inputs of the output projections, which count them
            self_attn -= n_d
            cross -= n_d
        per_token = 3 * 2 + 3 * self.heads + 2 * self.heads  # means and deviations; norms of q and k; log-sums
        elements = norms + gates + self_attn + cross + n_f
        return elements * self.element + self.statistics(per_token) + self.text * self.heads * self.statistic

    def ends(self, is_trained: bool) -> int:
        """Bytes outside of the blocks: patches, positions, the final layer's input, the result."""
        result = self.tokens * self.features_out * self.element
        positions = self.tokens // self.batch_size * self.head_dim * self.statistic  # of all clips alike
        patches = self.tokens * self.features * self.element if is_trained else 0
        return result + positions + patches + self.tokens * self.width * self.element
