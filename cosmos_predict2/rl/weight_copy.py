# SPDX-License-Identifier: Apache-2.0
"""A copy of the trained weights that stays, or follows: the reference of a KL term, the sampling policy of NFT."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from imaginaire.distributed.parallel import reshard, to_local


class WeightCopy:
    """The trained parameters of a module by name, as they were; sharded as they are."""

    def __init__(self, module: nn.Module) -> None:
        with torch.no_grad():
            self.weights = {name: weight.detach().clone() for name, weight in _trained(module).items()}

    @torch.no_grad()
    def follow(self, module: nn.Module, decay: float = 0.0) -> None:
        """copy = decay copy + (1 - decay) weights."""
        for name, weight in _trained(module).items():
            copy = to_local(self.weights[name])
            copy.lerp_(to_local(weight).to(copy.dtype), 1.0 - decay)

    @contextmanager
    def scope(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module computes with the copy; afterwards with its own weights again, also after an exception."""
        with torch.no_grad():
            own = {name: to_local(weight).clone() for name, weight in _trained(module).items()}
            self._put(module, {name: to_local(weight) for name, weight in self.weights.items()})
        try:
            yield
        finally:
            self._put(module, own)

    @torch.no_grad()
    def _put(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        for name, weight in _trained(module).items():
            to_local(weight).copy_(weights[name])


def _trained(module: nn.Module) -> dict[str, Tensor]:
    reshard(module)
    return {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
