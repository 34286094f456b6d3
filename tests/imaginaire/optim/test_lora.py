# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: where they go, and what they change."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from imaginaire.errors import ConfigError
from imaginaire.optim.lora import LoraSpec, adapter_state, adapters, init_adapters, inject, lora_spec, merge

TARGETS = ["q_proj", "mlp.layer1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.k_proj = nn.Linear(8, 8)
        self.mlp = nn.ModuleDict({"layer1": nn.Linear(8, 16), "layer2": nn.Linear(16, 8)})
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.q_proj(x) + self.k_proj(x))
        return x + self.mlp["layer2"](torch.relu(self.mlp["layer1"](x)))


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(dtype)


def _adapted(seed: int = 1, init: bool = True, **options: Any) -> nn.Module:
    net = inject(_net(), **{"rank": 4, "alpha": 8.0, "target_modules": TARGETS, **options})
    init_adapters(net, seed, init)
    return net


def test_adapters_go_to_the_targets_with_pefts_keys() -> None:
    net = _adapted()
    assert list(adapters(net)) == ["0.q_proj", "0.mlp.layer1", "1.q_proj", "1.mlp.layer1"]
    keys = net.state_dict().keys()
    expected = {"0.q_proj.base_layer.weight", "0.q_proj.lora_A.default.weight", "0.q_proj.lora_B.default.weight"}
    assert {key for key in keys if key.startswith("0.q_proj.")} == expected
    assert "0.mlp.layer1.base_layer.bias" in keys and "0.mlp.layer2.weight" in keys
    assert net.state_dict()["0.mlp.layer1.lora_A.default.weight"].shape == (4, 8)
    assert net.state_dict()["0.mlp.layer1.lora_B.default.weight"].shape == (16, 4)
    assert lora_spec(net) == LoraSpec(4, 8.0, ("q_proj", "mlp.layer1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_is_unchanged_at_the_start(dtype: torch.dtype) -> None:
    net = _net(dtype)
    x = torch.randn(3, 8).to(dtype)
    before = net(x)
    inject(net, 4, 8, TARGETS)
    after = net(x)
    assert torch.equal(before, after) and after.dtype == dtype
    assert all(value.dtype == torch.float32 for value in adapter_state(net).values())


def test_gradient_reaches_exactly_the_adapters() -> None:
    net = _adapted(init=False)
    net(torch.randn(3, 8)).sum().backward()
    for name, param in net.named_parameters():
        assert param.requires_grad == ("lora_" in name)
        assert (param.grad is not None and bool(param.grad.abs().sum() > 0)) == ("lora_" in name)


def test_start_depends_on_seed_and_name_only() -> None:
    state = adapter_state(_adapted(seed=1))
    again = adapter_state(_adapted(seed=1, target_modules=["mlp.layer1"]))
    assert all(torch.equal(value, state[name]) for name, value in again.items())
    first, second = state["0.q_proj.lora_A.default.weight"], state["1.q_proj.lora_A.default.weight"]
    assert not torch.equal(adapter_state(_adapted(seed=2))["0.q_proj.lora_A.default.weight"], first)
    assert not torch.equal(first, second)
    assert first.abs().max() <= 1 / 8**0.5  # kaiming_uniform(a=sqrt(5)) as in nn.Linear


def test_merge_keeps_the_output_and_the_first_names() -> None:
    net = _adapted(init=False)
    x = torch.randn(3, 8)
    before = net(x)
    merged = merge(net)
    assert merged.state_dict().keys() == _net().state_dict().keys()
    assert not adapters(merged) and type(merged[0].q_proj) is nn.Linear
    assert_close(merged(x), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_modules": ["q_prj", "v"]},
            "'q_prj' matches no module. Did you mean q_proj.*'v' matches no module. Known: 0, 1",
        ),
        ({"target_modules": ["mlp.layr1"]}, "'mlp.layr1' matches no module. Did you mean"),
        ({"target_modules": ["norm"]}, "'norm' matches 0.norm, which is a LayerNorm, not a Linear"),
        ({"target_modules": ""}, "lora_target_modules is empty"),
        ({"rank": 0}, "lora_rank is 0"),
        ({"alpha": 0}, "lora_alpha is 0"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _adapted(**options)


def test_a_refused_injection_leaves_the_module_as_it_was() -> None:
    net = _net()
    with pytest.raises(ConfigError):
        inject(net, 4, 8, ["q_proj", "nothing"])
    assert not adapters(net) and all(param.requires_grad for param in net.parameters())
    inject(net, 4, 8, TARGETS)
    with pytest.raises(ConfigError, match="already has LoRA adapters"):
        inject(net, 4, 8, ["k_proj"])


def test_an_adapted_module_can_be_copied_and_its_state_loaded() -> None:
    net = _adapted(init=False)
    twin = copy.deepcopy(net)
    other = _adapted(seed=7)
    other.load_state_dict(net.state_dict())
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), net(x)) and torch.equal(other(x), net(x))
    assert adapters(net)["0.q_proj"].weight is adapters(net)["0.q_proj"].base_layer.weight
