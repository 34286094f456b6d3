# SPDX-License-Identifier: Apache-2.0
"""Sizes of published policies, and their activations where they are trained: bytes kept for the backward pass.

Attention is written out, as the policies have it by default ("eager"), so that its scores are kept. Kept bytes are
compared with those of tiny policies, and with two runs on an H100: OpenVLA-OFT recomputed in bfloat16, 32 decisions at
a time, took 62.6 GB at most, 65.5 here; PI0.5's expert in float32, 128 decisions, 8.7 beside its weights, 9.1 here.
"""

from dataclasses import dataclass

PIXELS = 6 * 224 * 224  # of a picture, for two towers
BINS = 256  # of a number of an action


@dataclass(frozen=True)
class Transformer:
    """Sizes that say how much a block keeps for its backward pass."""

    blocks: int
    width: int
    mlp: int
    heads: int
    head_dim: int
    wide: int  # copies of the width that its norms keep in float32
    narrow: int  # in the precision: inputs and outputs of norms, branches before they are scaled
    gates: int  # copies of the MLP's width
    softmax_is_wide: bool = True  # kept in float32, and in the precision where that is another

    def kept(self, keys: int, bytes_each: int, *, has_keys: bool = True) -> int:
        """Bytes of a token in a block; ``has_keys`` unless its keys and values are counted elsewhere."""
        inner = (4 if has_keys else 2) * self.heads * self.head_dim
        scores = (4 + bytes_each * (bytes_each < 4)) if self.softmax_is_wide else bytes_each
        own = self.narrow * self.width + inner + self.gates * self.mlp
        return 4 * self.wide * self.width + bytes_each * own + scores * self.heads * keys


@dataclass(frozen=True)
class PolicySize:
    """A policy that sees pictures by towers and decides by a trunk, or by an expert that reads its keys and values."""

    parameters: int
    trained: int  # without adapters
    adapters: int  # of rank 32
    towers: tuple[Transformer, ...]
    beside: tuple[int, ...]  # tokens of each tower that are no patches
    trunk: Transformer
    words: int  # of a prompt, about
    answer: int  # tokens of the trunk after the prompt
    patches: int = 256  # of a picture
    pixels: int = PIXELS
    vocabulary: int = 0  # whose logits it computes at the places of actions
    bins: int = BINS
    expert: Transformer | None = None
    horizon: int = 0  # tokens of the expert
    expert_keys: int = 0  # width of its keys

    def seen(self, views: int) -> int:
        """Tokens of a decision that passes the trunk."""
        return views * self.patches + self.words + self.answer


_OPENVLA_TOWERS = (
    Transformer(23, 1024, 4096, 16, 64, wide=0, narrow=6, gates=2, softmax_is_wide=False),
    Transformer(26, 1152, 4304, 16, 72, wide=0, narrow=4, gates=2),
)
POLICIES = {
    "openvla_oft": PolicySize(
        parameters=7_541_237_184,
        trained=7_541_237_184,
        adapters=110_828_288,
        towers=_OPENVLA_TOWERS,
        beside=(5, 0),
        trunk=Transformer(32, 4096, 11008, 32, 128, wide=2, narrow=4, gates=4),
        words=36,
        answer=57,
        vocabulary=32_064,
    ),
    "openpi": PolicySize(  # its expert alone is trained
        parameters=3_350_000_000,
        trained=430_000_000,
        adapters=40_000_000,
        towers=(_OPENVLA_TOWERS[1],),
        beside=(0,),
        trunk=Transformer(18, 2048, 16384, 8, 256, wide=4, narrow=2, gates=4),
        words=20,
        answer=0,
        expert=Transformer(18, 1024, 4096, 8, 256, wide=4, narrow=4, gates=4),
        horizon=10,
        expert_keys=256,
    ),
}


@dataclass(frozen=True)
class Activations:
    """Bytes at the end of a forward pass, and what its passes need besides for a while."""

    before_trunk: int  # kept: of towers and projector
    trunk: int  # kept: of the trunk, or of the expert
    working: int

    def peak(self, gradients: int, *, accumulates: bool) -> int:
        """Beside all gradients. Where earlier micro-batches left none, they come while what the trunk kept goes."""
        kept = self.before_trunk + self.trunk
        left = kept if accumulates else max(kept - gradients, self.before_trunk)
        return left + self.working


def activations(size: PolicySize, rows: int, views: int, bytes_each: int, *, recomputes: bool) -> Activations:
    """Activations of a micro-batch of ``rows`` decisions that is trained on."""
    if size.expert is not None:
        return _of_expert(size, size.expert, rows, views, bytes_each, recomputes=recomputes)
    trunk, tokens, places = size.trunk, size.seen(views), size.answer - 1
    features = sum(tower.width for tower in size.towers)
    before = views * bytes_each * (size.pixels + size.patches * (9 * features + 2 * trunk.width))
    for tower, beside in zip(size.towers, size.beside, strict=True):
        seen = size.patches + beside
        of_block = bytes_each * tower.width if recomputes else tower.kept(seen, bytes_each)
        before += views * tower.blocks * seen * of_block
    of_block = trunk.kept(tokens, bytes_each)
    kept = trunk.blocks * tokens * (bytes_each * trunk.width if recomputes else of_block)
    kept += tokens * trunk.width * (4 + bytes_each) + bytes_each * tokens**2  # the last norm, and who sees whom
    kept += places * (bytes_each * (trunk.width + size.vocabulary) + 3 * 4 * size.bins)
    working = tokens * 3 * bytes_each * trunk.mlp + 2 * bytes_each * places * size.vocabulary  # gradients of the widest
    working += tokens * of_block if recomputes else 0
    return Activations(rows * before, rows * kept, rows * working)


def _of_expert(
    size: PolicySize, expert: Transformer, rows: int, views: int, bytes_each: int, *, recomputes: bool
) -> Activations:
    """Activations of an expert; the trunk before it passes without gradients, where its MLP is the widest."""
    seen, trunk = size.seen(views), size.trunk
    keys = seen + size.horizon
    of_keys = bytes_each * 2 * size.expert_keys
    of_norm = 16 * expert.width  # its scale, shift and gate, of the time
    of_block = size.horizon * expert.kept(keys, bytes_each, has_keys=False) + keys * of_keys + 2 * of_norm
    kept = expert.blocks * (size.horizon * bytes_each * expert.width + seen * of_keys if recomputes else of_block)
    kept += size.horizon * expert.width * (8 + bytes_each + 4 * (bytes_each < 4)) + of_norm  # the last norm
    kept += 5 * 4 * expert.width  # the time
    prefix = seen * (3 * bytes_each * (trunk.mlp + trunk.width) + trunk.blocks * of_keys)
    working = size.horizon * 3 * bytes_each * expert.mlp + (of_block if recomputes else 0)
    return Activations(0, rows * kept, rows * max(working, prefix - kept))


def decision_flops(size: PolicySize, views: int) -> int:
    """Operations of a forward pass of one decision."""
    return 2 * size.parameters * (size.seen(views) + size.horizon)
