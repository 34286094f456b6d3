# SPDX-License-Identifier: Apache-2.0
"""A network whose forward pass is captured once and replayed: no launch overhead between small kernels."""

from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.nn.dit import DiT, Prepared
from imaginaire.errors import ConfigError


class GraphedNetwork:
    """Called like the network it holds. Shapes, flags and the prepared context must stay those of the first call.

    A new context (another prompt) is captured anew.
    """

    def __init__(self, net: DiT, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(f"CUDA graphs need a GPU, but the device is {device}. Leave out --use_cuda_graphs.")
        self.net = net
        self._device = device
        self._key: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def __call__(
        self, x: Tensor, timesteps: Tensor, text: Tensor | None, *, prepared: Prepared | None, **inputs: Any
    ) -> Tensor:
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        shapes = tuple((name, tuple(value.shape)) for name, value in tensors.items())
        key = (tuple(x.shape), tuple(timesteps.shape), shapes, id(prepared), id(text))
        if key != self._key:
            with torch.cuda.device(self._device):  # streams belong to the current one
                self._capture(x, timesteps, text, prepared, inputs)
            self._key, self._held = key, (prepared, text)  # held, so that their ids stay their own
        self._x.copy_(x)
        self._timesteps.copy_(timesteps)
        for name, value in tensors.items():
            self._inputs[name].copy_(value)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._output.clone()

    def _capture(
        self, x: Tensor, timesteps: Tensor, text: Tensor | None, prepared: Prepared | None, inputs: dict[str, Any]
    ) -> None:
        self._x, self._timesteps = x.clone(), timesteps.clone()
        self._inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}

        def forward() -> Tensor:
            output: Tensor = self.net(self._x, self._timesteps, text, prepared=prepared, **self._inputs)
            return output

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # lazy initialisations must not be captured
                forward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = forward()
