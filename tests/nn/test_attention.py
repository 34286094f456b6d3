# SPDX-License-Identifier: Apache-2.0
"""Attention operators agree with the formula; names, devices and packages that do not fit are errors."""

import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cosmos_predict2.nn.blocks import (
    DENSE_STAND_INS,
    AttentionOp,
    attend,
    attend_by_heads,
    attend_by_products,
    attend_fused,
    check_attention,
    choose_attention,
)
from tests.nn.networks import inputs, small_net

CPU = torch.device("cpu")
OPS: dict[str, AttentionOp] = {
    "attend": attend,
    "fused": attend_fused,
    "by products": attend_by_products,
    "by heads": attend_by_heads,
}


def tensors(tokens: int, context: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, 3, 16) for n in (tokens, context, context)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("blnk,bsnk->bnls", q, k) / 16**0.5, dim=-1)
    return torch.einsum("bnls,bsnk->blnk", weights, v)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(("tokens", "context"), [(7, 7), (9, 4), (530, 520)])
def test_values_and_gradients_are_those_of_the_formula(op: AttentionOp, tokens: int, context: int) -> None:
    given, wide = tensors(tokens, context), tensors(tokens, context, torch.float64)
    out, expected = op(*given), formula(*wide)
    assert out.shape == given[0].shape and out.dtype == torch.float32
    assert_close(out.double(), expected, rtol=1e-4, atol=2e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weight).sum(), given)
    for gradient, true in zip(found, torch.autograd.grad((expected * weight).sum(), wide)):
        assert_close(gradient.double(), true, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_followed(op: AttentionOp, dtype: torch.dtype) -> None:
    out = op(*tensors(9, 4, dtype))
    assert out.dtype == dtype
    expected = formula(*tensors(9, 4, torch.float64))
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=5e-2, atol=2e-2)
    assert_close(out.double(), expected, **tolerance)


@pytest.mark.parametrize("name", ["auto", "minimal_a2a", "natten", "torch", "sdpa", "math"])
def test_names_that_work_everywhere(name: str) -> None:
    op, chosen, reason = choose_attention(name, CPU, torch.float32, 24)
    assert chosen in ("torch", "math")
    assert bool(reason) == (name not in ("torch", "sdpa", "math")), "a word on what was not asked for"
    check_attention(op, 24, CPU, torch.float32)
    assert ("dense in place of natten" in reason) == (name in DENSE_STAND_INS)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"transformer-engine.*transformer_engine"):
        choose_attention("transformer-engine", CPU, torch.float32, 64)


@pytest.mark.parametrize("name", ["flash", "flash2", "flash3", "transformer_engine"])
def test_gpu_kernels_require_a_gpu(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' works on CUDA in float16 or bfloat16"):
        choose_attention(name, "cpu", torch.bfloat16, 64)
    with pytest.raises(ValueError, match=f"'{name}' works on CUDA"):
        choose_attention(name, "cuda", torch.float32, 64)
    with pytest.raises(ValueError, match="atten_backend='torch'"):
        choose_attention(name, "cuda", torch.bfloat16, 20)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("flash2", "flash_attn", "flash"),
        ("flash3", "flash_attn_interface", ""),
        ("transformer_engine", "transformer_engine", "te"),
    ],
)
def test_a_missing_package_is_named(name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.pytorch", None)
    with pytest.raises(ImportError, match=rf"atten_backend='{name}' needs") as error:
        choose_attention(name, "cuda", torch.bfloat16, 64)
    assert f".[{extra}]" in str(error.value) or not extra


def _flash3_old(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attend_by_products(q, k, v), q[..., 0]


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("flash2", "flash_attn", attend_by_products),
        ("flash3", "flash_attn_interface", attend_by_products),
        ("flash3", "flash_attn_interface", _flash3_old),
    ],
)
def test_installed_kernels_are_called_with_our_layout(
    name: str, module: str, function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(flash_attn_func=function))
    op, chosen, _ = choose_attention(name, "cuda", torch.bfloat16, 64)
    assert chosen == name
    check_attention(op, 64, CPU, torch.bfloat16)


def test_transformer_engine_is_built_for_the_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class DotProductAttention(torch.nn.Module):
        def __init__(self, num_heads: int, head_dim: int, **options: object) -> None:
            super().__init__()
            built.append((num_heads, head_dim))
            assert options["qkv_format"] == "bshd" and options["attn_mask_type"] == "no_mask"

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_by_products(q, k, v).flatten(2)

    engine = types.SimpleNamespace(DotProductAttention=DotProductAttention)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.SimpleNamespace(pytorch=engine))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    op, chosen, _ = choose_attention("transformer_engine", "cuda", torch.bfloat16, 64)
    check_attention(op, 64, CPU, torch.bfloat16)
    assert chosen == "transformer_engine" and built == [(2, 64)]


@pytest.mark.parametrize(
    "fault",
    [
        lambda q, k, v: attend(q, k, v) * 1.05,
        lambda q, k, v: attend(q, k, v).transpose(1, 2),
        lambda q, k, v: attend(q, k, v).float(),
    ],
)
def test_a_wrong_operator_is_found_out(fault: AttentionOp) -> None:
    with pytest.raises(ValueError, match=r"net\.atten_backend"):
        check_attention(fault, 64, CPU, torch.bfloat16)


def test_the_network_takes_its_operator_once_and_leaves_a_wrapped_one_alone() -> None:
    net = small_net(atten_backend="math")
    assert net.attention is None
    choice = net.choose_attention()
    assert choice.name == "math" and net.blocks[1].cross_attn.attention is attend_by_products
    expected, calls = net(**inputs()), []

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape)
        return attend_by_products(q, k, v)

    for block in net.blocks:
        block.self_attn.attention = counted
    assert_close(net(**inputs()), expected, rtol=0, atol=0)
    assert calls == [(2, 48, 2, 24)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("allows_tf32", [False, True])  # True: as under torchrun
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_chooses_is_right(dtype: torch.dtype, allows_tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allows_tf32)
    for head_dim in (64, 128):
        op, _, _ = choose_attention("auto", "cuda", dtype, head_dim)
        check_attention(op, head_dim, "cuda", dtype)
