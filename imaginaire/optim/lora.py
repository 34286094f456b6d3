# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv 2106.09685) of Linear layers: y = W x + alpha / rank * B A x; A and B are trained.

Keys follow peft's layout with the adapter name "default": ``X.base_layer.weight``, ``X.lora_A.default.weight``
[rank, in] and ``X.lora_B.default.weight`` [out, rank].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from imaginaire import random
from imaginaire.distributed.parallel import copy_shard, is_dtensor
from imaginaire.errors import ConfigError, near


@dataclass(frozen=True)
class LoraSpec:
    """The settings that a set of adapters was built with."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank={self.rank} alpha={self.alpha:g} targets={','.join(self.targets)}"


class LoraLinear(nn.Module):
    """A frozen Linear with an adapter beside it, which computes in its own precision (float32 unless it was cast)."""

    def __init__(self, base: nn.Linear, spec: LoraSpec) -> None:
        super().__init__()
        self.spec = spec
        self.scaling = spec.alpha / spec.rank
        self.base_layer = base
        device = base.weight.device
        self.lora_A = nn.ModuleDict({"default": _bare_linear(base.in_features, spec.rank, device)})
        self.lora_B = nn.ModuleDict({"default": _bare_linear(spec.rank, base.out_features, device)})

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The weights of A and B."""
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return a, b

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a Linear for its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        x = x.to(self.factors[0].dtype)
        update: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        if self.scaling != 1:
            update = self.scaling * update
        return (y + update).to(y.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The base layer with W + alpha / rank * B A, summed in float32 and kept in W's dtype."""
        weight = self.base_layer.weight
        if is_dtensor(weight) or not isinstance(weight, nn.Parameter):  # or it is kept in another form
            raise ConfigError("Weights that are sharded or in another form cannot be merged: merge a saved checkpoint.")
        a, b = self.factors
        update = b.float() @ a.float()
        weight.copy_(weight.float() + self.scaling * update)
        return self.base_layer


def inject(module: nn.Module, rank: int, alpha: float, target_modules: Sequence[str] | str) -> nn.Module:
    """Put adapters on every Linear whose name is a target or ends with ``.target``; all else is frozen.

    ``target_modules`` is a list or a comma-separated string. One number is drawn from the global generator; each
    adapter's start follows from it and from the layer's name. On the meta device nothing begins: `init_adapters` is for
    later.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise ConfigError(f"lora_rank is {rank!r}; expected an integer of 1 or more.")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"lora_alpha is {alpha!r}; expected a positive number.")
    names = target_modules.split(",") if isinstance(target_modules, str) else target_modules
    targets = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not targets:
        raise ConfigError("lora_target_modules is empty; name at least one Linear, such as q_proj.")
    if adapters(module):
        raise ConfigError(f"The module already has LoRA adapters ({lora_spec(module)}); merge them before others.")
    seed = int(torch.randint(2**62, (), device="cpu"))
    layers, spec = _targets(module, targets), LoraSpec(rank, float(alpha), targets)
    module.requires_grad_(False)
    for name, layer in layers.items():
        _replace(module, name, LoraLinear(layer, spec))
    if not any(layer.weight.is_meta for layer in layers.values()):
        init_adapters(module, seed)
    return module


@torch.no_grad()
def init_adapters(module: nn.Module, seed: int, init: bool = True) -> None:
    """Begin every adapter as `inject` does, by ``seed`` and the layer's name; sharded ones begin alike.

    A is uniform as in nn.Linear, and B zero, which leaves the output as it was; without ``init`` B is drawn like A.
    """
    for name, adapter in adapters(module).items():
        generator = random.generator(seed, 0, f"lora/{name}")
        a, b = adapter.factors
        for factor in (a,) if init else (a, b):
            drawn = torch.empty(factor.shape, dtype=torch.float32)  # on the CPU: one start for all devices
            copy_shard(factor, nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))
        if init:
            nn.init.zeros_(b)


def merge(module: nn.Module) -> nn.Module:
    """The module with every adapter added to its layer's weight and plain Linears back in their places."""
    for name, adapter in adapters(module).items():
        _replace(module, name, adapter.merged())
    return module


def adapters(module: nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers by name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, LoraLinear)}


def lora_spec(module: nn.Module) -> LoraSpec | None:
    """Rank, alpha and targets of the module's adapters; None without any."""
    return next((adapter.spec for adapter in adapters(module).values()), None)


def adapter_state(module: nn.Module) -> dict[str, Tensor]:
    """The adapters' factors by full name; DTensors where the module is sharded."""
    return {
        f"{name}.{key}.default.weight": factor.detach()
        for name, adapter in adapters(module).items()
        for key, factor in zip(("lora_A", "lora_B"), adapter.factors, strict=True)
    }


def _targets(module: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The Linear layers that the targets name; an error for each target that names none or something else."""
    named = {name: child for name, child in module.named_modules() if name}
    found: dict[str, nn.Linear] = {}
    unknown = []
    for target in targets:
        matches = [name for name in named if name == target or name.endswith(f".{target}")]
        if not matches:
            suffixes = {name if "." in target else name.rsplit(".", 1)[-1] for name in named}
            unknown.append(f"'{target}' matches no module.{near(target, suffixes)}")
        for name in matches:
            layer = named[name]
            if not isinstance(layer, nn.Linear):
                unknown.append(f"'{target}' matches {name}, which is a {type(layer).__name__}, not a Linear.")
            else:
                found[name] = layer
    if unknown:
        raise ConfigError("LoRA cannot adapt these targets (model.config.lora_target_modules): " + " ".join(unknown))
    return {name: found[name] for name in named if name in found}


def _bare_linear(in_features: int, out_features: int, device: torch.device) -> nn.Linear:
    """A Linear without bias whose weight is not drawn: nothing is taken from the global generator."""
    layer = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.float32)
    return layer.to_empty(device=device)


def _replace(module: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, child)
