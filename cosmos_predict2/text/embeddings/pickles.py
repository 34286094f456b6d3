# SPDX-License-Identifier: Apache-2.0
"""The ``t5_xxl/NAME.pickle`` files of data sets: a list with one float16 array [tokens, width], its zeros cut off.

A pickle may run any code when it is loaded. These are read as plain data, in which the handful of NumPy names that such
a file needs are names only; all others are refused. Files of a few bytes that would fill the memory are refused, too.
"""

import pickle
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imaginaire import storage
from imaginaire.checkpoint import plain_pickle
from imaginaire.checkpoint.plain_pickle import Made, Refused
from imaginaire.errors import DataError
from imaginaire.storage.object_store import StrPath

NUM_TOKENS = 512
LARGEST_BYTES = 512 * 2**20  # far above any real file
MOST_STEPS = 1000  # of the pickle; a real file has less than a hundred

_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")  # protocols 2 to 4
_FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")  # protocol 5
_KIND = re.compile(r"[biuf][1-8]")  # numbers; all else has no place in an embedding
_ALLOWED = {"numpy.ndarray", "numpy.dtype", *_RECONSTRUCT, *_FROM_BUFFER, "_codecs.encode"}  # the last: protocol 2


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
        loaded = plain_pickle.read(content, _ALLOWED.__contains__, MOST_STEPS)
        if not (isinstance(loaded, list) and len(loaded) == 1 and isinstance(loaded[0], Made)):
            is_array = isinstance(loaded, Made) and loaded.name in (*_RECONSTRUCT, *_FROM_BUFFER)
            what = "an array that is in no list: pickle [array]" if is_array else f"a {type(loaded).__name__}"
            raise DataError(f"{expected}; found {what}.")
        array = _numbers(loaded[0])
    except Refused as refused:
        raise DataError(
            f"{path} asks for {refused}, which the embedding of a prompt does not need: it was not loaded. Do not open "
            "this file with anything else unless you trust where it comes from."
        ) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no readable pickle ({type(error).__name__}: {error}). Write it again.") from error
    if array.ndim != 2 or array.dtype.kind != "f" or 0 in array.shape:
        raise DataError(f"{expected}; found {array.dtype} {list(array.shape)}.")
    return torch.from_numpy(array.astype(np.float32))


def _numbers(made: Made) -> np.ndarray:
    """The array of shape, kind and bytes. NumPy's own would take any bytes for pointers to objects."""
    if made.name in _RECONSTRUCT:
        _, shape, kind, is_fortran, content = made.state
    elif made.name in _FROM_BUFFER:
        content, kind, shape, order = made.args
        is_fortran = order == "F"
    else:
        raise Refused(f"a call of {made.name}")
    dtype, content = _dtype(kind), _bytes(content)
    flat = np.frombuffer(content, dtype) if content else np.empty(0, dtype)
    return flat.reshape(tuple(int(length) for length in shape), order="F" if is_fortran else "C")


def _dtype(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, Made) or kind.name != "numpy.dtype":
        raise Refused("an array of objects")
    name = kind.args[0]
    if not isinstance(name, str) or _KIND.fullmatch(name) is None:
        raise Refused(f"numpy.dtype({str(name)[:20]!r})")
    order = kind.state[1] if kind.state is not None else "="
    return np.dtype(f"{order if order in ('<', '>', '|') else '='}{name}")


def _bytes(content: Any) -> bytes:
    if isinstance(content, Made) and content.name == "_codecs.encode":  # how protocol 2 writes bytes
        text, encoding = content.args
        if encoding != "latin1":
            raise Refused(f"the codec {str(encoding)[:20]}")
        content = str(text).encode("latin1")
    if not isinstance(content, bytes):
        raise Refused("an array of objects")
    return content
