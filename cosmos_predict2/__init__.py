# SPDX-License-Identifier: Apache-2.0
import imaginaire  # noqa: F401  (first: outside the environment it explains how to enter it)
from cosmos_predict2.renamed import KEYS, NAMES, RENAMED
from imaginaire import renamed

renamed.add(RENAMED)
renamed.KEYS.update(KEYS)
renamed.add_names(NAMES)
