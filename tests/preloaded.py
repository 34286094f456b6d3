# SPDX-License-Identifier: Apache-2.0
"""What a rank would otherwise do before its first step, done once in the process that all ranks are forked from."""

import gc

from imaginaire.config.compose import compose
from tests.training import CONFIG

compose(CONFIG, ["experiment=restless"])  # Hydra looks for its plugins, and the experiments of the base are imported
gc.freeze()  # a collection in a fork would copy the pages of all that is imported
