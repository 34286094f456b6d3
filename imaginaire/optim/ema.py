# SPDX-License-Identifier: Apache-2.0
"""Power-function average of the weights (EDM2, arXiv 2312.02696, eq. 123 and 127), in float32 and by parameter name.

ema = beta ema + (1 - beta) w with beta = (1 - 1 / (j + 1))^(gamma + 1) at j = iteration + iteration_shift, and 0 for
j < 1, so that the first update copies the weights. gamma follows from the relative width, ``rate``.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from imaginaire.distributed.parallel import in_runs, reshard, to_local
from imaginaire.errors import ConfigError

CAST_NUMEL = 1 << 26  # elements whose temporary float32 copies exist at a time


def power_ema_exponent(rate: float) -> float:
    """gamma, the largest real root of x^3 + 7 x^2 + (16 - s^-2) x + (12 - s^-2) = 0 at the relative width s = rate."""
    if rate > 0:
        roots = numpy.roots([1.0, 7.0, 16.0 - rate**-2, 12.0 - rate**-2])
        gamma = float(roots[numpy.isreal(roots)].real.max())
        if gamma > -1:  # at -1 and below, the decay would be 1 or more
            return gamma
    raise ConfigError(f"ema.rate is {rate}; the relative width of a power-function average lies between 0 and 0.3.")


def check_rate(instance: Any, attribute: Any, value: Any) -> None:
    """A validator of config fields: a relative width that an average can have."""
    if isinstance(value, int | float):
        power_ema_exponent(value)


class PowerEMA:
    """The averaged parameters of a module, frozen ones included: ``shadows`` maps names to float32 tensors or DTensors.

    Build it after the module was sharded. Buffers are not averaged; `state` includes the module's current ones.
    """

    def __init__(self, module: nn.Module, rate: float = 0.1, iteration_shift: int = 0) -> None:
        self.rate = rate
        self.iteration_shift = iteration_shift
        self.exponent = power_ema_exponent(rate)
        self._module = module
        self._infinite: set[str] | None = None  # frozen parameters that a step of the average would make NaN
        with torch.no_grad():
            parameters = _parameters(module)
            self.shadows = {
                name: p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in parameters.items()
            }

    def beta(self, iteration: int) -> float:
        """The decay at an iteration, counted before it is increased."""
        j = iteration + self.iteration_shift
        return 0.0 if j < 1 else (1.0 - 1.0 / (j + 1)) ** (self.exponent + 1.0)

    @torch.no_grad()
    def update(self, module: nn.Module, iteration: int) -> None:
        """One step of the average, after the optimizer's."""
        pairs = self._pairs(module)
        beta = self.beta(iteration)
        if self._infinite is None:  # known at the first step: a look at every one would make the host wait
            self._infinite = _infinite(module)
        copied = [pair for name, pair in zip(self.shadows, pairs, strict=True) if beta == 0.0 or name in self._infinite]
        if copied:
            torch._foreach_copy_([shadow for shadow, _ in copied], [weight for _, weight in copied])
        if beta == 0.0:
            return
        moving = [pair for name, pair in zip(self.shadows, pairs, strict=True) if name not in self._infinite]
        is_cast = any(weight.dtype != shadow.dtype for shadow, weight in moving)
        for run in in_runs(moving, lambda pair: pair[1].numel(), CAST_NUMEL if is_cast else math.inf):
            weights = [weight.to(shadow.dtype) for shadow, weight in run]
            torch._foreach_lerp_([shadow for shadow, _ in run], weights, 1.0 - beta)

    @contextmanager
    def scope(self, module: nn.Module) -> Iterator[None]:
        """A context in which the module has the averaged weights; its own come back exactly, after an exception too."""
        with torch.no_grad():
            pairs = self._pairs(module)
            stash = [weight.clone() for _, weight in pairs]
        try:
            with torch.no_grad():
                torch._foreach_copy_([weight for _, weight in pairs], [shadow for shadow, _ in pairs])
            yield
        finally:
            with torch.no_grad():
                for (_, weight), own in zip(self._pairs(module), stash, strict=True):
                    weight.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """Averaged parameters and copies of the module's persistent buffers, by name: a complete state dict."""
        buffers = {
            name: value.detach().clone()
            for name, value in self._module.state_dict().items()
            if name not in self.shadows and isinstance(value, Tensor)
        }
        return {**self.shadows, **buffers}

    def _pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Local tensors (shadow, weight), matched by name."""
        parameters = _parameters(module)
        if parameters.keys() != self.shadows.keys():
            gone = sorted(self.shadows.keys() - parameters.keys())[:5]
            new = sorted(parameters.keys() - self.shadows.keys())[:5]
            raise ConfigError(
                f"The EMA was built from a module with other parameters: it has {gone}, the module {new}."
            )
        return [(to_local(shadow), to_local(parameters[name])) for name, shadow in self.shadows.items()]


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; FSDP modules show their shards (after an evaluation the root may be gathered)."""
    reshard(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _infinite(module: nn.Module) -> set[str]:
    """The frozen parameters with numbers that are not finite (here, of sharded ones)."""
    frozen = {name: to_local(p.detach()) for name, p in module.named_parameters() if not p.requires_grad}
    if not frozen:
        return set()
    finite = torch.stack([p.isfinite().all() for p in frozen.values()]).tolist()
    return {name for name, is_finite in zip(frozen, finite, strict=True) if not is_finite}
