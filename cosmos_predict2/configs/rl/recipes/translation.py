# SPDX-License-Identifier: Apache-2.0
"""From a recipe's file to an experiment with overrides.

translation = translate("configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml")
compose(CONFIG, translation.overrides)
"""

from cosmos_predict2.configs.rl.recipes.rows import Translation
from cosmos_predict2.configs.rl.recipes.wfm_translation import translate_wfm
from imaginaire.config.files import load_toml
from imaginaire.errors import ConfigError


def translate(path: str) -> Translation:
    """The run of a recipe's file, of either schema."""
    content = load_toml(path)
    if "policy" in content or "train" in content:
        raise ConfigError(
            "[policy] and [train] are of recipes of Cosmos-RL's diffusers trainer, which are not translated. Its NFT"
            " recipe is: python -m scripts.train -- experiment=predict2p5_2b_nft"
        )
    return translate_wfm(content)
