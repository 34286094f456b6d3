# SPDX-License-Identifier: Apache-2.0
"""A small network that predicts the next value of a wave, as a model that the trainer can train."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imaginaire.distributed.parallel import ParallelDims, shard_blocks
from imaginaire.training.model import ImaginaireModel, PowerEMA


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer1 = nn.Linear(width, 2 * width)
        self.layer2 = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer2(functional.gelu(self.layer1(self.norm(x)))))


class Forecaster(nn.Module):
    def __init__(self, window: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(window, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, window: Tensor) -> Tensor:
        x = self.embed(window)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MinimalModel(ImaginaireModel):
    def __init__(
        self,
        window: int = 32,
        width: int = 48,
        depth: int = 2,
        dropout: float = 0.05,
        precision: str = "bfloat16",
        ema_rate: float = 0.1,
        fsdp_shard_size: int = 0,
    ) -> None:
        super().__init__()
        self.net: Forecaster = Forecaster(window, width, depth, dropout)
        self.precision = getattr(torch, precision)
        self._ema_rate = ema_rate
        self._fsdp_shard_size = fsdp_shard_size

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        self.net.to(self.weight_dtype)

    def parallelize(self, dims: ParallelDims) -> None:
        shard_blocks(self.net, self.net.blocks, dims.fsdp_mesh(self._fsdp_shard_size))
        self.ema = PowerEMA(self.net, rate=self._ema_rate)

    def training_step(self, batch: dict[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        prediction = self.net(batch["window"].to(self.weight_dtype)).float()
        return {}, functional.mse_loss(prediction, batch["next"].float())
