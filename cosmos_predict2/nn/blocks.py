# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: modulation by time, self-attention with rotary positions, cross-attention to text, MLP; and the
attention operators in them: ``op(q, k, v) -> out``, all (batch, tokens, heads, head width), no mask.

    op, name, reason = choose_attention("auto", device, torch.bfloat16, head_dim=128)
    check_attention(op, head_dim=128, device=device, dtype=torch.bfloat16)      # once, before anything long

An operator follows the dtype of what it is given. Optional packages are imported when they are chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cosmos_predict2.nn.layers import EPS, Linear, RMSNorm, are_plain_float32, product, rotate

AttentionOp: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

# Names that configs and guides use, and what each means here.
BACKENDS = {
    "auto": "auto",
    "minimal_a2a": "auto",
    "natten": "auto",  # weights trained with windows, run with dense attention
    "torch": "torch",
    "sdpa": "torch",
    "math": "math",
    "flash": "flash",
    "flash2": "flash2",
    "flash3": "flash3",
    "transformer_engine": "transformer_engine",
}
DENSE_STAND_INS = ("natten",)  # by these names attention is dense, which the caller should report
HALF = (torch.float16, torch.bfloat16)
LARGE_SCORES = 512 * 512  # from so many scores a head, CPUs are faster by heads than in the fused kernel
MOST_SCORES = 1 << 24  # up to so many in all: 64 MB a layer
# Relative L2 error against float32 that rounding explains.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TF32_TOLERANCE = 2e-3  # of float32 on a GPU whose products may use TF32


class AttentionChoice(NamedTuple):
    """An operator, the name of its backend, and the reason for a choice that the caller did not make, for the log."""

    op: AttentionOp
    name: str
    reason: str


def attend(q_B_L_N_K: Tensor, k_B_S_N_K: Tensor, v_B_S_N_K: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v by PyTorch, in the form that is fastest for the device and the number of tokens."""
    batch, num_tokens, num_heads, _ = q_B_L_N_K.shape
    scores = num_tokens * k_B_S_N_K.shape[1]
    if scores >= LARGE_SCORES and batch * num_heads * scores <= MOST_SCORES and are_plain_float32(q_B_L_N_K, k_B_S_N_K):
        return attend_by_heads(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K)
    return attend_fused(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K)


def attend_fused(q_B_L_N_K: Tensor, k_B_S_N_K: Tensor, v_B_S_N_K: Tensor) -> Tensor:
    """PyTorch's fused attention."""
    out_B_N_L_K = F.scaled_dot_product_attention(
        q_B_L_N_K.transpose(1, 2), k_B_S_N_K.transpose(1, 2), v_B_S_N_K.transpose(1, 2)
    )
    return out_B_N_L_K.transpose(1, 2)


def attend_by_products(q_B_L_N_K: Tensor, k_B_S_N_K: Tensor, v_B_S_N_K: Tensor) -> Tensor:
    """Two matrix products around a softmax in float32 or better."""
    q_B_N_L_K, k_B_N_S_K, v_B_N_S_K = (x.transpose(1, 2) for x in (q_B_L_N_K, k_B_S_N_K, v_B_S_N_K))
    scores_B_N_L_S = (q_B_N_L_K * q_B_N_L_K.shape[-1] ** -0.5) @ k_B_N_S_K.transpose(2, 3)
    dtype = torch.promote_types(scores_B_N_L_S.dtype, torch.float32)
    weights_B_N_L_S = torch.softmax(scores_B_N_L_S, dim=-1, dtype=dtype).to(v_B_N_S_K.dtype)
    return (weights_B_N_L_S @ v_B_N_S_K).transpose(1, 2)


def attend_by_heads(q_B_L_N_K: Tensor, k_B_S_N_K: Tensor, v_B_S_N_K: Tensor) -> Tensor:
    """The same, head by head, with the fast float32 products of CPUs; keeps all the weights for the backward pass."""
    q_B_L_N_K = q_B_L_N_K * q_B_L_N_K.shape[-1] ** -0.5
    batches = []
    for q_L_N_K, k_S_N_K, v_S_N_K in zip(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K):
        heads = []
        for q_L_K, k_S_K, v_S_K in zip(q_L_N_K.unbind(1), k_S_N_K.unbind(1), v_S_N_K.unbind(1)):
            weights_L_S = torch.softmax(product(q_L_K, k_S_K), dim=-1)
            heads.append(product(weights_L_S, v_S_K.t()))
        batches.append(torch.stack(heads, dim=1))
    return torch.stack(batches)


def canonical_backend(name: str) -> str:
    """The backend that a name of configs and guides means."""
    if name not in BACKENDS:
        raise ValueError(f"No attention backend is called '{name}'. Known: {', '.join(BACKENDS)}.")
    return BACKENDS[name]


def choose_attention(name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int) -> AttentionChoice:
    """The operator for this name, device and dtype. A missing package or a wrong dtype is an error, never a silent
    second choice; only ``auto`` chooses by itself."""
    backend, device = canonical_backend(name), torch.device(device)
    if backend == "auto":
        choice = _torch(device, dtype, "works everywhere" if device.type != "cuda" else "best of what is installed")
        if dtype in HALF and head_dim <= 256 and _is_hopper(device) and _has_flash3():
            reason = "FlashAttention-3 is installed and the device is of its generation"
            choice = AttentionChoice(_flash3(), "flash3", reason)
        if name in DENSE_STAND_INS:
            return choice._replace(reason=f"dense in place of {name}'s windows; {choice.reason}")
        return choice
    if backend == "math":
        return AttentionChoice(attend_by_products, "math", "")
    if backend == "torch":
        return _torch(device, dtype, "")
    _require_half_on_cuda(name, device, dtype, head_dim)
    if backend == "transformer_engine":
        return AttentionChoice(_TransformerEngine(), backend, "")
    if backend == "flash":
        backend = "flash3" if _is_hopper(device) and _has_flash3() else "flash2"
    return AttentionChoice(_flash3() if backend == "flash3" else _flash2(), backend, "")


def check_attention(op: AttentionOp, head_dim: int, device: torch.device | str, dtype: torch.dtype) -> None:
    """Compare an operator with plain products in float32 on a few tokens of the real head width; raise if it is off."""
    for tokens, context in ((128, 128), (128, 80)):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, n, 2, head_dim, generator=generator) for n in (tokens, context, context))
        q, k, v = (x.to(dtype) for x in (q, k, v))
        wide = torch.promote_types(dtype, torch.float32)
        expected = attend_by_products(q.to(wide), k.to(wide), v.to(wide))  # on the host: no TF32
        found = op(q.to(device), k.to(device), v.to(device))
        cure = "choose another backend with net.atten_backend (torch works everywhere)."
        if found.shape != expected.shape or found.dtype != dtype:
            raise ValueError(
                f"Attention gave {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {dtype}: {cure}"
            )
        error = float((found.to("cpu", wide) - expected).norm() / expected.norm())
        uses_tf32 = dtype == torch.float32 and found.is_cuda and torch.backends.cuda.matmul.allow_tf32
        limit = TF32_TOLERANCE if uses_tf32 else TOLERANCES[dtype]
        if not error <= limit:
            raise ValueError(
                f"Attention is off by {error:.1e} (relative) at head width {head_dim} in {dtype} on {device}, where "
                f"{limit:.0e} is rounding: {cure}"
            )


def _torch(device: torch.device, dtype: torch.dtype, reason: str) -> AttentionChoice:
    if device.type != "cuda":
        return AttentionChoice(attend, "torch", reason)
    if dtype not in HALF:
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    elif torch.cuda.get_device_capability(device)[0] >= 9:
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    else:
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    names = ", ".join(backend.name.removesuffix("_ATTENTION").lower() for backend in order)
    kernels = f"kernels in this order: {names}"
    op = partial(_attend_in_order, order)
    return AttentionChoice(op, "torch", f"{reason}; {kernels}" if reason else kernels)


def _attend_in_order(order: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused attention with its kernels in a given order of preference."""
    with sdpa_kernel(order, set_priority=True):
        return attend_fused(q, k, v)


class _TransformerEngine:
    """Transformer Engine's attention, built at the first call, which has the number of heads.

    Not a module of the network: it would add ``_extra_state`` entries to the state dict.
    """

    def __init__(self) -> None:
        try:
            from transformer_engine.pytorch import DotProductAttention
        except ImportError as error:
            raise _missing("transformer_engine", "transformer-engine", "te") from error
        self.build = DotProductAttention
        self.built: dict[tuple[int, int], Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_heads, head_dim = q.shape[2:]
        if (num_heads, head_dim) not in self.built:
            self.built[num_heads, head_dim] = self.build(
                num_heads, head_dim, attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd"
            )
        out: Tensor = self.built[num_heads, head_dim](q, k, v)
        return out.view(q.shape)


def _flash2() -> AttentionOp:
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise _missing("flash2", "flash-attn", "flash") from error
    op: AttentionOp = flash_attn_func
    return op


def _flash3() -> AttentionOp:
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError as error:
        raise ImportError(
            "atten_backend='flash3' needs FlashAttention-3 (module flash_attn_interface), which is built from the "
            "hopper folder of the flash-attention sources. Install it, or use atten_backend='auto'."
        ) from error

    def attend_flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v)
        first: Tensor = out[0] if isinstance(out, tuple) else out  # older builds also give the log-sum-exp
        return first

    return attend_flash3


def _has_flash3() -> bool:
    try:
        import flash_attn_interface  # noqa: F401
    except ImportError:
        return False
    return True


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _missing(name: str, package: str, extra: str) -> ImportError:
    return ImportError(
        f"atten_backend='{name}' needs the package {package}: pip install -e '.[{extra}]' in the checkout, or use "
        "atten_backend='auto'."
    )


def _require_half_on_cuda(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    if device.type != "cuda" or dtype not in HALF:
        raise ValueError(
            f"atten_backend='{name}' works on CUDA in float16 or bfloat16; the network is {dtype} on {device}. Use "
            "atten_backend='auto', or precision bfloat16 on a GPU."
        )
    if head_dim % 8 or head_dim > 256:
        raise ValueError(
            f"atten_backend='{name}' takes head widths that are multiples of 8 up to 256, found {head_dim}: use "
            "atten_backend='torch'."
        )


# Blocks ---------------------------------------------------------------------------------------------------------------

Rope: TypeAlias = tuple[Tensor, Tensor]  # cosine and sine, (L, K / 2) each
KeysValues: TypeAlias = tuple[Tensor, ...]  # (B, S, N, K) each; of some networks those of two contexts


@dataclass
class CausalFrames:
    """Attention of each latent frame, of so many ``tokens``, to itself and those before it; no operator needs a mask.

    With ``keeps`` keys and values stay, and the next call has the frames behind these.
    """

    tokens: int
    keeps: bool = False
    kept: KeysValues | None = None

    def attend(self, attention: AttentionOp, q_B_L_N_K: Tensor, k_B_L_N_K: Tensor, v_B_L_N_K: Tensor) -> Tensor:
        k, v = k_B_L_N_K, v_B_L_N_K
        if self.kept is not None:
            k, v = torch.cat([self.kept[0], k], dim=1), torch.cat([self.kept[1], v], dim=1)
        if self.keeps:
            self.kept = k, v
        before = k.shape[1] - q_B_L_N_K.shape[1]
        starts = range(0, q_B_L_N_K.shape[1], self.tokens)
        ends = [(start, before + start + self.tokens) for start in starts]
        rows = [attention(q_B_L_N_K[:, at : at + self.tokens], k[:, :end], v[:, :end]) for at, end in ends]
        return torch.cat(rows, dim=1)


@dataclass
class FrameMemory:
    """Keys and values of the latent frames that a causal network has seen, for each of its blocks."""

    num_frames: int = 0
    blocks: list[CausalFrames] = field(default_factory=list)


class Attention(nn.Module):
    """Multi-head attention with normalised queries and keys; to itself, or to a context of another width."""

    def __init__(self, width: int, num_heads: int, context_width: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.q_proj = Linear(width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_proj = Linear(context_width or width, width, bias=False)
        self.k_norm = RMSNorm(self.head_dim)
        self.v_proj = Linear(context_width or width, width, bias=False)
        self.output_proj = Linear(width, width, bias=False)
        self.attention: AttentionOp = attend  # context parallelism puts its exchange around this

    def keys_values(self, context_B_S_E: Tensor) -> KeysValues:
        """Keys (normalised) and values, (B, S, N, K) each."""
        k_B_S_N_K = self.k_norm(self._heads(self.k_proj(context_B_S_E)))
        return k_B_S_N_K, self._heads(self.v_proj(context_B_S_E))

    def forward(
        self,
        x_B_L_D: Tensor,
        context: Tensor | KeysValues | None = None,
        rope: Rope | None = None,
        causal: CausalFrames | None = None,
    ) -> Tensor:
        """(B, L, D). ``context`` is a text (B, S, E), or what ``keys_values`` gave for it; None: x itself."""
        q_B_L_N_K = self.q_norm(self._heads(self.q_proj(x_B_L_D)))
        if isinstance(context, tuple):
            k_B_S_N_K, v_B_S_N_K = context
        else:
            k_B_S_N_K, v_B_S_N_K = self.keys_values(x_B_L_D if context is None else context)
        if rope is not None:
            q_B_L_N_K, k_B_S_N_K = rotate(q_B_L_N_K, *rope), rotate(k_B_S_N_K, *rope)
        attend = self.attention if causal is None else partial(causal.attend, self.attention)
        out: Tensor = self.output_proj(attend(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K).flatten(2))
        return out

    def _heads(self, x_B_L_D: Tensor) -> Tensor:
        return x_B_L_D.view(*x_B_L_D.shape[:2], self.num_heads, self.head_dim)


class MLP(nn.Module):
    """Linear, GELU (exact), linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer1 = Linear(width, hidden, bias=False)
        self.activation = nn.GELU()
        self.layer2 = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer2(self.activation(self.layer1(x)))
        return out


def modulation(width: int, num_vectors: int, lora_dim: int | None) -> nn.Sequential:
    """SiLU and the linear map from a time embedding to shift, scale (and gate); of low rank when a rank is given."""
    if lora_dim is None:
        return nn.Sequential(nn.SiLU(), Linear(width, num_vectors * width, bias=False))
    return nn.Sequential(
        nn.SiLU(), Linear(width, lora_dim, bias=False), Linear(lora_dim, num_vectors * width, bias=False)
    )


def modulated_norm(x_B_T_H_W_D: Tensor, shift_B_T_1_1_D: Tensor, scale_B_T_1_1_D: Tensor) -> Tensor:
    """LN(x) * (1 + scale) + shift, with T rows of modulation or one."""
    normed = F.layer_norm(x_B_T_H_W_D, x_B_T_H_W_D.shape[-1:], eps=EPS)
    return multiply_add(shift_B_T_1_1_D, normed, 1 + scale_B_T_1_1_D)


def multiply_add(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a * b. Half precision rounds the product too, as the networks did that released weights come from."""
    return x + a * b if x.dtype.itemsize < 4 else torch.addcmul(x, a, b)


class Block(nn.Module):
    """Self-attention, cross-attention and MLP, each modulated and gated by the time embedding."""

    def __init__(
        self, width: int, num_heads: int, context_width: int, mlp_ratio: float, adaln_lora_dim: int | None
    ) -> None:
        super().__init__()
        self.self_attn = Attention(width, num_heads)
        self.cross_attn = Attention(width, num_heads, context_width)
        self.mlp = MLP(width, int(width * mlp_ratio))
        self.adaln_modulation_self_attn = modulation(width, 3, adaln_lora_dim)
        self.adaln_modulation_cross_attn = modulation(width, 3, adaln_lora_dim)
        self.adaln_modulation_mlp = modulation(width, 3, adaln_lora_dim)

    def forward(
        self,
        x_B_T_H_W_D: Tensor,
        emb_B_T_D: Tensor,
        adaln_B_T_3D: Tensor | None,
        context: Tensor | KeysValues | None,
        rope: Rope,
        extra_1_T_H_W_D: Tensor | None = None,
        causal: CausalFrames | None = None,
    ) -> Tensor:
        """(B, T, H, W, D); ``emb`` and ``adaln`` hold one row per frame, or one for all. Context None: no text."""
        shape = x_B_T_H_W_D.shape
        x = x_B_T_H_W_D if extra_1_T_H_W_D is None else x_B_T_H_W_D + extra_1_T_H_W_D
        shift, scale, gate = _vectors(self.adaln_modulation_self_attn, emb_B_T_D, adaln_B_T_3D, x.dtype)
        y_B_L_D = self.self_attn(modulated_norm(x, shift, scale).flatten(1, 3), rope=rope, causal=causal)
        x = multiply_add(x, gate, y_B_L_D.view(shape))
        if context is not None:
            shift, scale, gate = _vectors(self.adaln_modulation_cross_attn, emb_B_T_D, adaln_B_T_3D, x.dtype)
            y_B_L_D = self.cross_attn(modulated_norm(x, shift, scale).flatten(1, 3), context)
            x = multiply_add(x, gate, y_B_L_D.view(shape))
        shift, scale, gate = _vectors(self.adaln_modulation_mlp, emb_B_T_D, adaln_B_T_3D, x.dtype)
        return multiply_add(x, gate, self.mlp(modulated_norm(x, shift, scale)))


def _vectors(
    layer: nn.Module, emb_B_T_D: Tensor, adaln_B_T_3D: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and gate, (B, T, 1, 1, D) each; computed as wide as the embedding is, and rounded once."""
    vectors_B_T_3D = layer(emb_B_T_D)
    if adaln_B_T_3D is not None:
        vectors_B_T_3D = vectors_B_T_3D + adaln_B_T_3D
    shift, scale, gate = vectors_B_T_3D.to(dtype)[:, :, None, None].chunk(3, dim=-1)
    return shift, scale, gate


class FinalLayer(nn.Module):
    """Modulated norm and linear map to the features of a patch."""

    def __init__(self, width: int, out_features: int, adaln_lora_dim: int | None) -> None:
        super().__init__()
        self.linear = Linear(width, out_features, bias=False)
        self.adaln_modulation = modulation(width, 2, adaln_lora_dim)

    def forward(self, x_B_T_H_W_D: Tensor, emb_B_T_D: Tensor, adaln_B_T_3D: Tensor | None) -> Tensor:
        """(B, T, H, W, out_features), as wide as the embedding is."""
        vectors_B_T_2D = self.adaln_modulation(emb_B_T_D)
        if adaln_B_T_3D is not None:
            vectors_B_T_2D = vectors_B_T_2D + adaln_B_T_3D[..., : vectors_B_T_2D.shape[-1]]
        shift, scale = vectors_B_T_2D[:, :, None, None].chunk(2, dim=-1)
        out: Tensor = self.linear(modulated_norm(x_B_T_H_W_D.to(emb_B_T_D.dtype), shift, scale))
        return out
