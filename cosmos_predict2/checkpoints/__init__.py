# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.checkpoints.adapters import apply_lora, merge_lora_state, parse_lora
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name, to_diffusers_name
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.released import checkpoint_dir, describe_missing

__all__ = [
    "ModelCard",
    "apply_lora",
    "checkpoint_dir",
    "describe_missing",
    "from_diffusers_name",
    "load_dit",
    "merge_lora_state",
    "open_dit",
    "parse_lora",
    "read_card",
    "to_diffusers_name",
]
