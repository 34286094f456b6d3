# SPDX-License-Identifier: Apache-2.0
"""Messages of policies, robots and world models: msgpack, with arrays in the layout of openpi or of GR00T.

Nothing is unpickled. A message has a largest size, and an array has the size that it claims; arrays hold numbers or
text, never objects.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from imaginaire import foreign_json
from imaginaire.errors import DataError, UserError, first_line, optional_module

TOKEN = "WFM_POLICY_TOKEN"
RECORD = "cosmos_posttrain"  # in the greeting of our servers
LARGEST = 64 << 20  # bytes of a message: three pictures of 1080 rows have 19 million
_KINDS = "biufUS"  # of an array's dtype
_NPY = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, SyntaxError)


def package(name: str) -> Any:
    """An optional module of a protocol."""
    return optional_module(name, "serve")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Inside, whatever another program's words break is a `DataError` about them."""
    try:
        yield
    except UserError:
        raise
    except _FAULTS as error:
        raise DataError(f"{what} cannot be used: {first_line(error)}.") from error


@dataclass(frozen=True)
class Modality:
    """GR00T's parts of one modality (video, state, action, language), and their steps in time.

    N1.5 writes them as JSON in a string (``is_text``) and has the modality's name in those of its parts.
    """

    keys: tuple[str, ...]
    steps: tuple[int, ...] = (0,)
    is_text: bool = False

    def to_wire(self) -> dict[str, Any]:
        content: Any = {"delta_indices": list(self.steps), "modality_keys": list(self.keys)}
        if self.is_text:
            content = json.dumps(content, separators=(",", ":"))
        else:
            content |= dict.fromkeys(("sin_cos_embedding_keys", "mean_std_embedding_keys", "action_configs"))
        return {"__ModalityConfig_class__": True, "as_json": content}


def pack(message: Any, protocol: str) -> bytes:
    """The bytes of a message of plain values, arrays and `Modality`s."""
    to_wire = _to_openpi if protocol == "openpi" else _to_gr00t
    return package("msgpack").packb(message, default=to_wire)  # type: ignore[no-any-return]


def unpack(data: bytes, protocol: str, source: str, largest: int = LARGEST) -> Any:
    """The message that ``source`` sent; its arrays are copies, which may be written to."""
    unpackb, of_wire = package("msgpack").unpackb, _of_openpi if protocol == "openpi" else _of_gr00t
    with reading(f"A message of {source}"):
        if len(data) > largest:
            raise ValueError(f"it has {len(data)} bytes, and {largest} are the most")
        return unpackb(data, object_hook=of_wire)


def _to_openpi(value: Any) -> Any:
    value = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    _require_plain(value.dtype)
    if isinstance(value, numpy.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _of_openpi(value: Mapping[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _array(value[b"data"], numpy.dtype(value[b"dtype"]), value[b"shape"])
    if b"__npgeneric__" in value:
        dtype = numpy.dtype(value[b"dtype"])
        _require_plain(dtype)
        return dtype.type(value[b"data"])
    return value


def _to_gr00t(value: Any) -> Any:
    if isinstance(value, Modality):
        return value.to_wire()
    _require_plain(value.dtype)
    file = io.BytesIO()
    numpy.save(file, value, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _of_gr00t(value: Mapping[Any, Any]) -> Any:
    if "__ModalityConfig_class__" in value:
        content = value["as_json"] if "as_json" in value else value["as_dict"]  # of one version of N1.6
        is_text = isinstance(content, str)
        content = foreign_json.loads(content) if is_text else content
        return Modality(tuple(map(str, content["modality_keys"])), tuple(map(int, content["delta_indices"])), is_text)
    if "__ndarray_class__" in value:
        file = io.BytesIO(value["as_npy"])
        shape, is_fortran, dtype = _NPY[npy.read_magic(file)](file)  # before anything of its size is made
        return _array(file.read(), dtype, shape, "F" if is_fortran else "C")
    return value


def _array(data: bytes, dtype: numpy.dtype[Any], shape: Any, order: Any = "C") -> NDArray[Any]:
    _require_plain(dtype)
    sizes = [int(size) for size in shape]
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {dtype} with the shape {sizes} has {len(data)} bytes")
    return numpy.frombuffer(data, dtype).reshape(sizes, order=order).copy()


def _require_plain(dtype: numpy.dtype[Any]) -> None:
    if dtype.kind not in _KINDS or not dtype.itemsize:
        raise ValueError(f"arrays of {dtype} are not taken; they hold numbers or text")
