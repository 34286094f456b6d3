# SPDX-License-Identifier: Apache-2.0
"""A PEFT configuration of a set of adapters: the scale of each layer, or why they cannot be added.

PEFT keeps it in adapter_config.json, diffusers in the header of its file. Only plain LoRA is W + scale * B A: a setting
that is switched on and that this module does not know is an error which names it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from imaginaire.errors import CheckpointError

# They say how the adapters were made or found, not what they add. Biases and other tensors of the file are counted by
# whoever reads it.
_OF_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "velora_config",
}  # fmt: skip
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the weights below the adapters too


@dataclass(frozen=True)
class PeftSettings:
    """Rank and alpha of every layer, by patterns where they differ, and how the scale follows from them."""

    where: str  # the file
    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False  # alpha / sqrt(rank) in place of alpha / rank

    @classmethod
    def of(cls, config: Any, where: str) -> "PeftSettings":
        """The settings of a configuration; an error for one that is not plain LoRA."""
        try:
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            ranks = {str(key): int(value) for key, value in (config.get("rank_pattern") or {}).items()}
            alphas = {str(key): float(value) for key, value in (config.get("alpha_pattern") or {}).items()}
            for pattern in [*ranks, *alphas]:
                re.compile(pattern)
        except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
            raise CheckpointError(f"{where} is not a PEFT configuration with r and lora_alpha: {error!r}.") from error
        if config.get("peft_type", "LORA") != "LORA":
            raise CheckpointError(f"{where} describes a {config['peft_type']} adapter; only LORA is known.")
        others = {key: value for key, value in config.items() if value and key not in _READ | _OF_NO_EFFECT}
        if config.get("init_lora_weights", True) not in _STARTS:
            others["init_lora_weights"] = config["init_lora_weights"]
        if others:
            shown = ", ".join(f"{key}={str(value)[:60]}" for key, value in others.items())
            raise CheckpointError(
                f"{where} has {shown}; only plain LoRA, W + scale * B A, can be added to the weights. Merge the adapter"
                " where it was trained (merge_and_unload of PEFT, fuse_lora of diffusers), and use the merged weights."
            )
        return cls(where, rank, alpha, ranks, alphas, bool(config.get("use_rslora")))

    def scaling(self, layer: str, rank: int) -> float:
        """Factor of B A in a layer, given its name in the file and the rank of its factors."""
        own_rank = _of_layer(self.ranks, layer, self.rank)
        if rank != own_rank:
            raise CheckpointError(f"{self.where}: {layer} has rank {rank}, the settings say {own_rank}.")
        alpha = _of_layer(self.alphas, layer, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def _of_layer(table: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that is the layer's name, or the end of it from a word on, as PEFT looks it up."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def patterns_of(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """A table for the layers that differ from what is usual; the names are matched from their beginning."""
    return {f"^{layer}": value for layer, value in values.items() if value != usual}
