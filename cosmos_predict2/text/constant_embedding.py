# SPDX-License-Identifier: Apache-2.0
"""The one embedding that every sample of a model has which takes no text: as a rule that of the empty prompt."""

import torch
from torch import Tensor

from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings
from imaginaire import storage, weights
from imaginaire.errors import DataError
from imaginaire.object_store import StrPath

CURE = 'Write one: python -m scripts.encode_prompts --text_encoder reason1 --prompt "" --no_negative_prompt --output F'


def read_constant_embedding(path: StrPath) -> Tensor:
    """[S, E], in the file's precision: a .pt of one tensor [S, E] or [1, S, E], or a file of scripts.encode_prompts.

    Of a file with several prompts it is that of the empty one.
    """
    if not storage.exists(path):
        raise DataError(f"There is no embedding {path}. {CURE}")
    if str(path).endswith(".safetensors"):
        known = read_prompt_embeddings(path)
        if "" not in known and len(known) != 1:
            raise DataError(f"{path} has embeddings of {len(known)} prompts, and none is empty. {CURE}")
        return known["" if "" in known else next(iter(known))]
    found = weights.load_pt(path)
    if isinstance(found, Tensor) and found.ndim == 3 and found.shape[0] == 1:
        found = found[0]
    if not isinstance(found, Tensor) or found.ndim != 2 or not found.is_floating_point():
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DataError(f"{path} holds {what}, but an embedding is a tensor [tokens, width] or [1, tokens, width].")
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"{path} holds an embedding with values that are not finite.")
    return found
