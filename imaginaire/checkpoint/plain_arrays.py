# SPDX-License-Identifier: Apache-2.0
"""NumPy's arrays and scalars inside a pickle, read as plain data: no code of the file is run.

    value = plain_arrays.read(content)

Python's own containers, numbers and texts come back as they are, arrays of numbers and texts as arrays, arrays of
objects as lists; anything else is `Refused` or a `ValueError`.
"""

import math
from typing import Any

import numpy
from numpy.typing import NDArray

from imaginaire.checkpoint import plain_pickle
from imaginaire.checkpoint.plain_pickle import Made, Named

_ARRAYS = {
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"} | _ARRAYS
_KINDS = "biufSU"  # of dtypes: numbers and texts


def read(content: bytes) -> Any:
    """The value that a pickle holds."""
    return _plain(plain_pickle.read(content, _NAMES.__contains__))


def _plain(value: Any) -> Any:
    """The value with NumPy's arrays and scalars built from their bytes; object arrays as lists."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, Made):
        return value
    if value.name == "_codecs.encode":
        return str(value.args[0]).encode(str(value.args[1]) if len(value.args) > 1 else "utf-8")
    if value.name.endswith("scalar"):
        data = _plain(value.args[1])
        return numpy.frombuffer(data, _dtype(value.args[0]), 1)[0]
    if value.name.endswith("_reconstruct") and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, is_fortran, data = value.state
        if isinstance(data, list):
            return [_plain(item) for item in data]
        return _array(_plain(data), _dtype(dtype), shape, "F" if is_fortran else "C")
    if value.name.endswith("_frombuffer"):
        data, dtype, shape, order = value.args
        return _array(data, _dtype(dtype), shape, order)
    raise ValueError(f"{value.name} stands where a value is expected")


def _array(data: Any, dtype: numpy.dtype[Any], shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {list(shape)} does not have the bytes that it needs")
    array: NDArray[Any] = numpy.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")
    return array


def _dtype(made: Any) -> numpy.dtype[Any]:
    """The dtype that a file builds: numbers and texts alone."""
    if not isinstance(made, Made) or made.name != "numpy.dtype" or isinstance(made.args[0], Named):
        raise ValueError("an array without a dtype")
    state = made.state if isinstance(made.state, tuple) else (3, "|")
    dtype = numpy.dtype(str(made.args[0]))
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of dtype {dtype}")
    return dtype.newbyteorder(">") if state[1] == ">" else dtype
