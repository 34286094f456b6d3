# SPDX-License-Identifier: Apache-2.0
"""The network that is trained: built, filled with its start weights or random ones, and given adapters."""

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cosmos_predict2.checkpoints import load_dit
from cosmos_predict2.nn.dit import DiT
from imaginaire import distributed, lazy_config, lora

log = logging.getLogger(__name__)


def cast_base_weights(net: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a network; adapters stay in float32, whose small updates half precision would lose."""
    kept = {name: value.detach().clone() for name, value in lora.adapter_state(net).items()}
    net.to(dtype)
    for adapter in lora.adapters(net).values():
        adapter.lora_A.float()
        adapter.lora_B.float()
    with torch.no_grad():
        for name, value in lora.adapter_state(net).items():
            value.copy_(kept[name])


def build_network(config: Any) -> DiT:
    """The network of a Predict2Video2WorldModelConfig with its start weights and, for LoRA, its adapters."""
    path = config.model_manager_config.dit_path
    with torch.device("meta") if path else nullcontext():  # drawing 14B weights takes minutes, and none would stay
        net: DiT = lazy_config.instantiate(config.pipe_config.net)
    if path:
        net.to_empty(device="cpu")
        net.reset_buffers()
        report = load_dit(net, path)
        log.info("start weights: %s (%s)", path, report.summary())
    elif distributed.is_rank0():
        log.info("start weights: random (model.config.model_manager_config.dit_path is not set)")
    if config.train_architecture == "lora":
        lora.inject(net, config.lora_rank, config.lora_alpha, config.lora_target_modules, config.init_lora_weights)
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        log.info("lora: %s, %s trained parameters", lora.lora_spec(net), f"{trained:,}")
    return net
