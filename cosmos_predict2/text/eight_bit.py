# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 8 bits: each row of a weight as int8, and its largest magnitude as float32.

A quarter of the bytes of float32. Inputs, sums and everything but the linear layers stay in float32.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from imaginaire.checkpoint.weight_files import LazyTensors

NAME = "int8"  # in place of a dtype's
LARGEST, SMALLEST = 127, 1e-30  # of a row of zeros the scale is no zero


class EightBitLinear(nn.Module):
    """y = scale * (weight x) + bias, where scale has one number for each output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        shape, device = linear.weight.shape, linear.weight.device
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[0], device=device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantized(weight_O_I: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [O, I], float32 [O]): rows divided by a 127th of their largest magnitude, rounded."""
    weight_O_I = weight_O_I.float()
    scale_O = weight_O_I.abs().amax(dim=1).clamp(min=SMALLEST) / LARGEST
    return (weight_O_I / scale_O[:, None]).round().to(torch.int8), scale_O


def replace_linears(model: nn.Module, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Give the model, on the meta device, such layers; its weights, quantized when they are read."""
    found = {f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name in found.values():
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, EightBitLinear(getattr(owner, child)))
    halves = _Halves(source)
    places: dict[str, tuple[Mapping[str, Tensor] | _Halves, str]] = {}
    for name in source:
        if name in found:
            places |= {name: (halves, name), f"{found[name]}.scale": (halves, f"{name}/scale")}
        else:
            places[name] = (source, name)
    return LazyTensors(places)


class _Halves:
    """Weights in 8 bits and their scales; the last one read is kept for its other half."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self._source, self._name = source, ""

    def __getitem__(self, key: str) -> Tensor:
        name, _, is_scale = key.partition("/")
        if self._name != name:
            self._name, (self._weight, self._scale) = name, quantized(self._source[name])
        return self._scale if is_scale else self._weight
