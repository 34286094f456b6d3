# SPDX-License-Identifier: Apache-2.0
"""The one embedding that every sample of a model has which takes no text: as a rule that of the empty prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_predict2.text.prompt_embeddings import read_header, read_prompt_embeddings
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.errors import DataError
from imaginaire.storage.object_store import StrPath

CURE = 'Write one: python -m scripts.encode_prompts --text_encoder reason1 --prompt "" --no_negative_prompt --out F'


def read_constant_embedding(path: StrPath) -> Tensor:
    """[S, E], in the file's precision: a .pt of one tensor [S, E] or [1, S, E], or a file of scripts.encode_prompts.

    Of a file with several prompts it is that of the empty one.
    """
    _require_file(path)
    if str(path).endswith(".safetensors"):
        known = read_prompt_embeddings(path)
        return known[_only_prompt(path, list(known))]
    found = _saved_tensor(path)
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"{path} holds an embedding with values that are not finite.")
    return found


def constant_embedding_shape(path: StrPath) -> tuple[int, int]:
    """(tokens, width) of what `read_constant_embedding` would give, from the file's header alone."""
    _require_file(path)
    if str(path).endswith(".safetensors"):
        about = read_header(path)
        _only_prompt(path, about.texts)
        return about.num_tokens, about.width
    num_tokens, width = _saved_tensor(path).shape
    return num_tokens, width


def _require_file(path: StrPath) -> None:
    if not storage.exists(path) or storage.is_folder(path):
        raise DataError(f"There is no embedding {path}. {CURE}")


def _only_prompt(path: StrPath, texts: Sequence[str]) -> str:
    if "" not in texts and len(texts) != 1:
        raise DataError(f"{path} has embeddings of {len(texts)} prompts, and none is empty. {CURE}")
    return "" if "" in texts else texts[0]


def _saved_tensor(path: StrPath) -> Tensor:
    """[S, E], memory-mapped."""
    found = weights.load_pt(path)
    if isinstance(found, Tensor) and found.ndim == 3 and found.shape[0] == 1:
        found = found[0]
    if not isinstance(found, Tensor) or found.ndim != 2 or not found.is_floating_point():
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DataError(f"{path} holds {what}, but an embedding is a tensor [tokens, width] or [1, tokens, width].")
    return found
