# SPDX-License-Identifier: Apache-2.0
"""The ``t5_xxl/NAME.pickle`` files of data sets: a list with one float16 array [tokens, width], its zeros cut off.

A pickle may run any code when it is loaded. These are read as plain data, in which the handful of NumPy names that such
a file needs are names only; all others are refused. Files of a few bytes that would fill the memory are refused, too.
"""

import pickle

import numpy as np
import torch
from torch import Tensor

from imaginaire import storage
from imaginaire.checkpoint import plain_pickle
from imaginaire.checkpoint.plain_pickle import Refused
from imaginaire.errors import DataError
from imaginaire.storage.object_store import StrPath

NUM_TOKENS = 512
LARGEST_BYTES = 512 * 2**20  # far above any real file
MOST_STEPS = 1000  # of the pickle; a real file has less than a hundred


def write(path: StrPath, embedding: Tensor) -> None:
    """Write one embedding [tokens, width] in the exchange form: float16, without the zeros at its end, protocol 4."""
    array = np.ascontiguousarray(trimmed(embedding).to("cpu", torch.float16).numpy())
    storage.write_atomically(path, lambda file: pickle.dump([array], file, protocol=4))


def trimmed(embedding: Tensor) -> Tensor:
    """The embedding up to its last token that is not zero; one token at least."""
    used = (embedding != 0).any(dim=-1).nonzero()
    return embedding[: int(used[-1]) + 1 if len(used) else 1]


def padded(embedding: Tensor, num_tokens: int) -> Tensor:
    """float32 [num_tokens, width] of an embedding with fewer or more tokens."""
    result = torch.zeros(num_tokens, embedding.shape[1], dtype=torch.float32)
    kept = embedding[:num_tokens]
    result[: len(kept)] = kept
    return result


def rows_of(content: bytes, path: str) -> Tensor:
    """The embedding in the bytes of a file as float32 [tokens, width]; ``path`` names it in errors."""
    expected = f"{path} should hold a list with one array [tokens, width] of floating-point numbers"
    try:
        loaded = plain_pickle.read_arrays(content, MOST_STEPS)
    except Refused as refused:
        raise DataError(
            f"{path} asks for {refused}, which the embedding of a prompt does not need: it was not loaded. Do not open "
            "this file with anything else unless you trust where it comes from."
        ) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(f"{path} is no readable pickle ({type(error).__name__}: {error}). Write it again.") from error
    array = loaded[0] if isinstance(loaded, list) and len(loaded) == 1 else None
    if not isinstance(array, np.ndarray):
        what = f"a {type(loaded).__name__}" if array is None else f"a list of a {type(array).__name__}"
        what = "an array that is in no list: pickle [array]" if isinstance(loaded, np.ndarray) else what
        raise DataError(f"{expected}; found {what}.")
    if array.ndim != 2 or array.dtype.kind != "f" or 0 in array.shape:
        raise DataError(f"{expected}; found {array.dtype} {list(array.shape)}.")
    return torch.from_numpy(array.astype(np.float32))
