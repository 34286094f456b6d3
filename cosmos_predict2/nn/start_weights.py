# SPDX-License-Identifier: Apache-2.0
"""Starts of the parameters that no file gives: constants, cut normals and uniform numbers."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cosmos_predict2.nn.layers import RMSNorm

CUT = 3.0  # standard deviations beyond which nothing is drawn


@dataclass(frozen=True)
class Start:
    """A constant where ``std`` is 0, else numbers around zero: normal, cut at three standard deviations, or uniform."""

    value: float = 0.0
    std: float = 0.0
    is_uniform: bool = False

    @torch.no_grad()
    def draw_(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The tensor, written anew."""
        if not self.std:
            return tensor.fill_(self.value)
        if self.is_uniform:
            return tensor.uniform_(-1, 1, generator=generator).mul_(self.std * 3**0.5)
        tensor.normal_(generator=generator)
        beyond = tensor.abs() > CUT  # one in 370: inverting the distribution for these alone is ten times faster
        again = tensor.new_empty(int(beyond.sum()))
        tensor[beyond] = nn.init.trunc_normal_(again, a=-CUT, b=CUT, generator=generator)
        return tensor.mul_(self.std)


@runtime_checkable
class HasStarts(Protocol):
    """A module with parameters of its own, whose starts it gives by their names in it."""

    def starts(self) -> dict[str, Start]: ...


@runtime_checkable
class HasBuffers(Protocol):
    """A module with buffers that are a function of its arguments, which it writes."""

    def reset_buffers(self) -> None: ...


def starts(net: nn.Module) -> dict[str, Start]:
    """The start of each parameter by its name: a matrix has the variance 1 / (numbers that it sums), the last matrix of
    a modulation is zero, and norms are one. Whatever lies inside a Linear's place counts as that Linear. What reads
    actions begins as torch's layers do, and with no effect. A module with other parameters is a `HasStarts`."""
    zeros = tuple(
        f"{name}.{len(module) - 1}."
        for name, module in net.named_modules()
        if isinstance(module, nn.Sequential) and "adaln_modulation" in name
    )
    found: dict[str, Start] = {}
    for prefix, module in net.named_modules():
        own: dict[str, Start] = module.starts() if isinstance(module, HasStarts) else {}
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if (last := name.rpartition(".")[2]) in own:
                found[name] = own[last]
            elif isinstance(module, RMSNorm):
                found[name] = Start(1.0)
            elif isinstance(module, nn.Linear) and name.startswith("action_embedder_"):
                is_first = ".fc1." in name
                found[name] = Start(std=(3 * module.in_features) ** -0.5, is_uniform=True) if is_first else Start()
            elif isinstance(module, nn.Linear):
                is_zero = name.startswith(zeros) or parameter.ndim == 1
                found[name] = Start() if is_zero else Start(std=module.in_features**-0.5)
            else:
                kind = type(module).__name__
                raise ValueError(
                    f"{name}: there is no rule for how a parameter of a {kind} begins. Give {kind} a method starts()"
                    f" that returns {{'{last}': Start(...)}} (cosmos_predict2.nn.start_weights)."
                )
    return found
