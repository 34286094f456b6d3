# SPDX-License-Identifier: Apache-2.0
"""The ``t5_xxl/NAME.pickle`` files of data sets: a list with one float16 array [tokens, width], its zeros cut off.

A pickle may run any code when it is loaded. These are read with an unpickler that knows the handful of NumPy names that
such a file needs and refuses all others before anything happens. Files of a few bytes that would fill the memory are
refused before they are loaded at all.
"""

import io
import pickle
import pickletools
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.object_store import StrPath

NUM_TOKENS = 512
LARGEST_BYTES = 512 * 2**20  # far above any real file
MOST_STEPS = 1000  # of the unpickler; a real file has less than a hundred

_RECONSTRUCT = ("numpy.core.multiarray", "numpy._core.multiarray")
_FROM_BUFFER = ("numpy.core.numeric", "numpy._core.numeric")
_KIND = re.compile(r"[biuf][1-8]")  # numbers; all else has no place in an embedding
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((module, "_reconstruct") for module in _RECONSTRUCT),  # protocols 2 to 4
    *((module, "_frombuffer") for module in _FROM_BUFFER),  # protocol 5
    ("_codecs", "encode"),  # protocol 2
}


def read(path: StrPath, num_tokens: int = NUM_TOKENS) -> Tensor:
    """The embedding of a file as float32 [num_tokens, width]: padded with zeros, or cut."""
    return padded(read_rows(path), num_tokens)


def read_rows(path: StrPath) -> Tensor:
    """The embedding of a file as float32 [tokens, width], as many tokens as it has."""
    size = storage.size(path)
    if size > LARGEST_BYTES:
        raise DataError(f"{path} has {storage.readable_bytes(size)}: too large for the embedding of one prompt.")
    with storage.open(path) as file:
        return _array(file.read(), str(path))


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


def _array(content: bytes, path: str) -> Tensor:
    try:
        _check_steps(content)
        loaded = _arrays(_Unpickler(io.BytesIO(content)).load())
    except _Refused as refused:
        raise DataError(
            f"{path} asks for {refused}, which the embedding of a prompt does not need: it was not loaded. Do not open "
            "this file with anything else unless you trust where it comes from."
        ) from None
    except Exception as error:  # a damaged pickle raises anything at all
        raise DataError(f"{path} is no readable pickle ({type(error).__name__}: {error}). Write it again.") from error
    expected = f"{path} should hold a list with one array [tokens, width] of floating-point numbers"
    if not isinstance(loaded, list) or len(loaded) != 1:
        length = f" of {len(loaded)}" if isinstance(loaded, (list, tuple, dict)) else ""
        raise DataError(f"{expected}; found {type(loaded).__name__}{length}.")
    array = loaded[0]
    if not isinstance(array, np.ndarray):
        raise DataError(f"{expected}; found a list with {type(array).__name__}.")
    if array.ndim != 2 or array.dtype.kind != "f" or 0 in array.shape:
        raise DataError(f"{expected}; found {array.dtype} {list(array.shape)}.")
    return torch.from_numpy(array.astype(np.float32))


def _check_steps(content: bytes) -> None:
    """Raise where loading would take more time or memory than the file's size lets expect."""
    for count, (step, argument, _) in enumerate(pickletools.genops(content)):
        # The unpickler keeps a table as long as the highest number that a step gives to an object.
        is_far = step.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > count
        if count >= MOST_STEPS or is_far:
            raise _Refused("more memory or steps than its numbers take")


def _arrays(loaded: Any) -> Any:
    """What was loaded, with arrays in place of their stand-ins; lists in lists, which may be endless, as they are."""
    if isinstance(loaded, _Array):
        return loaded.array()
    if type(loaded) is list and len(loaded) < 3:
        return [item.array() if isinstance(item, _Array) else item for item in loaded]
    return loaded


class _Refused(Exception):
    pass


class _Kind:
    """In place of numpy.dtype: what it was called with, for NumPy to see when all has been read."""

    def __init__(self, name: Any, *_: Any) -> None:
        if not isinstance(name, str) or _KIND.fullmatch(name) is None:
            raise _Refused(f"numpy.dtype({str(name)[:20]!r})")
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">", "=", "|") else "="

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"{self.order}{self.name}")


class _Array:
    """In place of numpy.ndarray: shape, kind and bytes. NumPy's own would take any bytes for pointers to objects."""

    def __init__(self, *_: Any) -> None:
        self.parts: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        self.parts = (content, kind, shape, "F" if is_fortran else "C")

    def array(self) -> np.ndarray:
        content, kind, shape, order = self.parts
        if not isinstance(kind, _Kind) or not isinstance(content, (bytes, bytearray)):
            raise _Refused("an array of objects")
        flat = np.frombuffer(content, kind.dtype()) if content else np.empty(0, kind.dtype())
        return flat.reshape(tuple(int(length) for length in shape), order=order)


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    made = _Array()
    made.parts = (content, kind, shape, "F" if order == "F" else "C")
    return made


class _Unpickler(pickle.Unpickler):
    """Gives stand-ins for all that a file may name: nothing of NumPy runs on what the file says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("a persistent object")


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """What protocol 2 calls to get bytes back; any other codec has no place here."""
    if encoding != "latin1":
        raise _Refused(f"the codec {encoding}")
    return text.encode("latin1")


_STAND_INS: dict[str, Any] = {
    "ndarray": _Array,
    "dtype": _Kind,
    "_reconstruct": lambda *_: _Array(),
    "_frombuffer": _from_buffer,
    "encode": _latin1_bytes,
}
