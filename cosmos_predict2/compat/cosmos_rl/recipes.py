# SPDX-License-Identifier: Apache-2.0
"""Translation of a recipe's file to an experiment with overrides.

translation = translate("configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml")
compose(CONFIG, translation.overrides)
"""

from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.cosmos_rl.diffusion_nft import translate_nft
from cosmos_predict2.compat.cosmos_rl.policies import translate_vla
from cosmos_predict2.compat.cosmos_rl.world_models import translate_wfm
from cosmos_predict2.compat.fields import Translation
from imaginaire.config.files import load_toml


def translate(path: str, gpus_here: int = 0) -> Translation:
    """The run of a recipe's file, of any schema, on a machine with so many GPUs."""
    return translate_content(load_toml(path), gpus_here)


def translate_content(content: Mapping[str, Any], gpus_here: int = 0) -> Translation:
    """The same of a recipe that was read: of a policy, for DiffusionNFT, or for a world model ("WFM")."""
    if "vla" in content:
        return translate_vla(content, gpus_here)
    return translate_nft(content) if "policy" in content or "train" in content else translate_wfm(content)
