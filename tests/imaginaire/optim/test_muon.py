# SPDX-License-Identifier: Apache-2.0
"""Muon with AdamW as one optimizer: the formula, the division of the parameters, exact resuming."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from imaginaire.errors import ConfigError
from imaginaire.optim.adamw import fused_adamw
from imaginaire.optim.muon import COEFFICIENTS, Muon, muon, orthogonal
from imaginaire.optim.state import load_named_state, named_state
from tests.imaginaire.optim.gradients import equal, take_steps
from tests.training import difference


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 10), "norm": nn.LayerNorm(10), "down": nn.Linear(10, width)})
            for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["down"](block["norm"](block["up"](x)).relu())
        return self.head(x)


def _net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _reference(w: Tensor, grads: list[Tensor], lr: float, momentum: float, nesterov: bool, decay: float) -> Tensor:
    """The formula, literally, for one matrix in float64."""
    a, b, c = COEFFICIENTS
    w, average = w.double(), torch.zeros_like(w).double()
    for grad in grads:
        g = grad.double()
        average = momentum * average + (1 - momentum) * g
        x = momentum * average + (1 - momentum) * g if nesterov else average
        x = x / x.norm()
        for _ in range(5):
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        w = (1 - lr * decay) * w - lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_follow_the_formula_and_the_rest_is_adamw(dtype: torch.dtype, nesterov: bool) -> None:
    model, other = _net(dtype), _net(dtype)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = muon(model, lr=0.03, adam_lr=2e-3, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    adam = fused_adamw(other, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.99))
    grads: dict[str, list[Tensor]] = {name: [] for name in start}
    for number in range(6):
        take_steps([number], (model, optimizer), (other, adam))
        for name, param in model.named_parameters():
            grads[name].append(param.grad.clone())
    theirs = dict(other.named_parameters())
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        if param.dim() == 2 and name.startswith("blocks."):
            expected = _reference(start[name], grads[name], 0.03, 0.9, nesterov, 0.1)
            found = state.get("master", param)
            assert set(state) - {"master"} == {"momentum_buffer"}
            assert found.dtype == state["momentum_buffer"].dtype == (dtype if dtype.itemsize == 8 else torch.float32)
            assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(param, found.to(dtype))
        else:
            assert torch.equal(param, theirs[name])
            assert {"step", "exp_avg", "exp_avg_sq"} <= set(state)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (3, 16, 4)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    u, s, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrices = scale * u @ torch.diag_embed(s.clamp(min=0.2)) @ vh
    found = orthogonal(matrices)
    values = (u.mT @ found @ vh.mT).diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.65 and values.max() < 1.2
    assert_close(u @ torch.diag_embed(values) @ vh, found)
    assert_close(orthogonal(matrices.mT), found.mT)


def test_steps_in_bfloat16_give_nearly_the_same() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(5, 16, 24)
    exact, rounded = orthogonal(matrices), orthogonal(matrices, torch.bfloat16)
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    alike = (exact * rounded).sum(dim=(1, 2)) / (exact.norm(dim=(1, 2)) * rounded.norm(dim=(1, 2)))
    assert alike.min() > 0.999
    weights = []
    for precision in ("float32", "bfloat16"):
        model = _net()
        take_steps([0], (model, muon(model, precision=precision)))
        weights.append(model.blocks[0]["up"].weight.detach())
    assert not torch.equal(*weights)
    assert_close(*weights, rtol=0, atol=1e-3)


def test_parameters_are_divided_by_name_and_shape() -> None:
    model = _net()
    model.blocks[1]["down"].weight.requires_grad_(False)
    names = {param: name for name, param in model.named_parameters()}
    matrices, others = muon(model).param_groups
    taken = {"blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight"}
    assert {names[param] for param in matrices["params"]} == taken
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {names[param] for param in others["params"]} == trained - taken
    assert (matrices["lr"], others["lr"]) == (0.02, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_name", [True, False])
def test_resuming_equals_no_interruption(dtype: torch.dtype, by_name: bool) -> None:
    straight = _net(dtype)
    optimizer = muon(straight, weight_decay=0.01)
    take_steps(range(3), (straight, optimizer))
    resumed = copy.deepcopy(straight)
    file = io.BytesIO()
    torch.save(named_state(optimizer, straight) if by_name else optimizer.state_dict(), file)
    file.seek(0)
    again = muon(resumed, weight_decay=0.01)
    if by_name:
        assert load_named_state(again, resumed, torch.load(file, weights_only=True)) == []
    else:
        again.load_state_dict(torch.load(file, weights_only=True))
    take_steps(range(3, 6), (straight, optimizer), (resumed, again))
    assert equal(straight, resumed)
    assert difference(named_state(optimizer, straight), named_state(again, resumed)) is None
    if not by_name:
        return
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(named_state(optimizer, straight), files[0])
    torch.save(named_state(again, resumed), files[1])
    assert files[0].getvalue() == files[1].getvalue()  # a checkpoint records the digest of its files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "float16"}, r"'float16'\. Did you mean .*bfloat16"),
        ({"momentum": 1.0}, r"optimizer\.momentum is 1\.0"),
        ({"lr": -1.0}, "found -1.0"),
        ({"adam_lr": -2.0}, "found -2.0"),
        ({"betas": [0.9, 1.0]}, r"optimizer\.betas"),
        ({"weight_decay": -0.1}, r"optimizer\.weight_decay"),
    ],
)
def test_wrong_options_are_explained(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        muon(_net(), **options)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable matrix in a 'blocks' of Linear"):
        muon(nn.Linear(2, 2))


def test_auto_takes_bfloat16_where_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("imaginaire.optim.muon.has_fast_bfloat16", lambda device, fast=fast: fast)
        optimizer = Muon([{"params": [nn.Parameter(torch.zeros(2, 2))]}], precision="auto")
        assert optimizer.param_groups[0]["precision"] == expected
