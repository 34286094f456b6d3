# SPDX-License-Identifier: Apache-2.0
"""Whether the weights that an adapter is added to are those that it was trained on.

The fingerprint of a base is over samples of the matrices that the adapter changes. They are rounded to bfloat16 first,
so that one set of weights has one fingerprint in float32, bfloat16, and in float32 read from a float16 file.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_LAYERS = 16  # at most: of a file of 28 GB, some megabytes are read
_VALUES = 64  # of each


def base_fingerprint(layers: Collection[str], weights: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits that tell the matrices ``weights[layer]`` of these layers from others."""
    names = sorted(layers)
    digest = hashlib.sha256()
    for name in names[:: max(1, -(-len(names) // _LAYERS))]:
        matrix = weights[name].detach().flatten()
        sampled = matrix[:: max(1, matrix.numel() // _VALUES)][:_VALUES].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(weights[name].shape)}".encode() + sampled.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_base(
    path: str, base: str, expected: str, found: Mapping[str, Tensor], layers: Collection[str], name: str
) -> bool:
    """Whether an adapter's base is what lies here; warns with both names where it is not.

    ``base`` and ``expected`` are the name and fingerprint that the adapter records, ``found`` the matrices here, and
    ``name`` what they were read from. True too where there is nothing to compare.
    """
    if not expected or any(found[layer].dtype == torch.float16 for layer in layers):
        return True  # rounded a second time, float16 does not give the bfloat16 of the base
    actual = base_fingerprint(layers, found)
    if actual != expected:
        log.warning(
            "%s was trained on %s (fingerprint %s), but is added to %s (fingerprint %s): what it learnt may not suit"
            " these weights",
            path,
            base or "other weights",
            expected,
            name or "other weights",
            actual,
        )
    return actual == expected
