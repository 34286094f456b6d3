# SPDX-License-Identifier: Apache-2.0
"""The public names of the action-conditioned models, and the same configuration as configs/base/config.py, whose groups
and experiments have those with actions."""

from cosmos_predict2.configs.action_conditioned.networks import (
    get_action_dit_path,
    get_cosmos_predict2_action_conditioned_pipeline,
    get_cosmos_predict2p5_action_conditioned_pipeline,
)
from cosmos_predict2.configs.base.config import make_config

__all__ = [
    "get_action_dit_path",
    "get_cosmos_predict2_action_conditioned_pipeline",
    "get_cosmos_predict2p5_action_conditioned_pipeline",
    "make_config",
]
