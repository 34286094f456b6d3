# SPDX-License-Identifier: Apache-2.0
"""From a recipe's file to an experiment with overrides.

translation = translate("configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml")
compose(CONFIG, translation.overrides)
"""

from cosmos_predict2.configs.rl.recipes.nft import translate_nft
from cosmos_predict2.configs.rl.recipes.rows import Translation
from cosmos_predict2.configs.rl.recipes.wfm_translation import translate_wfm
from imaginaire.config.files import load_toml


def translate(path: str) -> Translation:
    """The run of a recipe's file, of either schema."""
    content = load_toml(path)
    if "policy" in content or "train" in content:
        return translate_nft(content)
    return translate_wfm(content)
