# SPDX-License-Identifier: Apache-2.0
"""Reading a pickle as plain data, no class, function or object of this process taking part, and a file of torch.

``pickle.Unpickler`` with a short list of names still hands live classes to the file, and a file may change what it is
handed: BUILD sets attributes of classes and functions, which stay changed for the rest of the process. This reader
interprets the steps that ``pickletools`` lists. A name becomes a `Named`, whatever is called or built a `Made`, and the
caller makes of them what it expects to find. All other steps (persistent objects, registered extensions, ...) are
refused, and a small file cannot take more memory than its bytes let expect.

What ``torch.save`` wrote is read by torch's own restricted reader, see `load_plain`.
"""

import io
import math
import pickle
import pickletools
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

# What reading a damaged zip raises: its fields are read as they come.
FAULTS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, OverflowError, KeyError, NotImplementedError, RuntimeError),
)

Tree = Any  # dictionaries, lists, plain values and tensors
Like = Callable[[tuple[str, ...], torch.Size, torch.dtype], Tensor]  # gives the tensor to load into

_LOCK = threading.RLock()
_LONGEST_NUMBER = 8 * 255  # bits of an integer
_MOST_AXES, _LONGEST_AXIS = 64, 2**48  # of an array; a longer shape would be multiplied for minutes


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """``torch.load(weights_only=True)`` on the CPU; of all other classes ``io.BytesIO`` alone is let through.

    In BytesIO Transformer Engine kept the extra state that released files have.
    """
    with only([io.BytesIO]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def refused_object(error: pickle.UnpicklingError) -> str:
    """The name of the object that `load_plain` refused; torch's own message recommends switching the check off."""
    names = re.findall(r"(?:GLOBAL|class|global:?) ([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    if not names:
        return ""
    what = "a NumPy array or number" if names[0].startswith("numpy.") else "the object"
    return f"{what} '{names[0].rstrip('.')}'"


@contextmanager
def only(classes: list[Any]) -> Iterator[None]:
    """A context in which torch allows only these classes: libraries add theirs to its list when they are imported."""
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(classes)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


class Refused(Exception):
    """A pickle asks for something that plain data do not need."""


@dataclass(slots=True, eq=False)
class Named:
    """A class, function or object that a file names."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """An object that a file builds: the name that it calls, the arguments, and the state that it gives the result."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


def read(content: bytes, is_allowed: Callable[[str], bool], most_steps: int | None = None) -> Any:
    """The tree of plain values, `Named` and `Made` in a pickle of any protocol; sets are lists.

    Raises `Refused` for a name that is not allowed and for what has no place in plain data, ValueError for damage.
    """
    reader, steps_left = _Reader(is_allowed), len(content) if most_steps is None else most_steps
    try:
        for step, argument, _ in pickletools.genops(content):
            if step.name == "STOP":
                break
            steps_left -= 1
            if steps_left < 0:
                raise Refused("more memory or steps than its numbers take")
            if step.name in _REFUSED:
                raise Refused(_REFUSED[step.name])
            _STEPS[step.name](reader, argument)
        return reader.stack.pop()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"its steps do not fit together ({type(error).__name__}: {error})") from error


class _Reader:
    """The stack of a pickle, and what its steps do there."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self.is_allowed = is_allowed
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
            raise Refused(f"a number of {value.bit_length()} bits")
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise ValueError("a step without its values")
        del self.stack[-count:]
        return items

    def name(self, full: str) -> None:
        if not self.is_allowed(full):
            raise Refused(full)
        self.stack.append(Named(full))

    def call(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        if not isinstance(function, Named) or not isinstance(args, tuple):
            raise TypeError(f"a call of a {type(function).__name__}")
        self.stack.append(Made(function.name, args))

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, Made) or made.state is not None:
            raise Refused(f"a change of {made.name if isinstance(made, Made | Named) else type(made).__name__}")
        made.state = state

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError(f"items for a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise TypeError(f"entries for a {type(target).__name__}")
        target.update(_pairs(items))

    def remember(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    # The hash of a tuple in a tuple in ... would overflow the stack of the process.
    if others := {type(key) for key in items[::2]} - _KEYS:
        raise TypeError(f"a {others.pop().__name__} as a key")
    return dict(zip(items[::2], items[1::2]))


def _text(value: Any) -> str:
    """Only a text: of lists that share their members, a few bytes would write gigabytes."""
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} in the place of a text")
    return value


_KEYS = {str, bytes, int, float, bool, type(None), Made}
_REFUSED = {
    name: what
    for names, what in {
        "PERSID BINPERSID": "a persistent object",
        "EXT1 EXT2 EXT4": "a registered extension",
        "INST OBJ NEWOBJ_EX": "an object of another form than plain data have",
        "NEXT_BUFFER READONLY_BUFFER": "a buffer outside the file",
        "STRING BINSTRING SHORT_BINSTRING": "a text of Python 2",
        "DUP": "a copy of a value",
    }.items()
    for name in names.split()
}
_STEPS: dict[str, Callable[[_Reader, Any], Any]] = {
    name: step
    for names, step in {
        "PROTO FRAME": lambda r, _: None,
        "MARK": lambda r, _: r.marks.append(len(r.stack)),
        "POP": lambda r, _: r.stack.pop(),
        "POP_MARK": lambda r, _: r.since_mark(),
        "NONE": lambda r, _: r.push(None),
        "NEWTRUE": lambda r, _: r.push(True),
        "NEWFALSE": lambda r, _: r.push(False),
        "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT": lambda r, number: r.push(number),
        "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8": lambda r, text: r.push(text),
        "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8": lambda r, content: r.push(bytes(content)),
        "EMPTY_TUPLE": lambda r, _: r.push(()),
        "TUPLE": lambda r, _: r.push(tuple(r.since_mark())),
        "TUPLE1": lambda r, _: r.push(r.last(1)),
        "TUPLE2": lambda r, _: r.push(r.last(2)),
        "TUPLE3": lambda r, _: r.push(r.last(3)),
        "EMPTY_LIST EMPTY_SET": lambda r, _: r.push([]),
        "LIST FROZENSET": lambda r, _: r.push(r.since_mark()),
        "APPEND": lambda r, _: r.extend([r.stack.pop()]),
        "APPENDS ADDITEMS": lambda r, _: r.extend(r.since_mark()),
        "EMPTY_DICT": lambda r, _: r.push({}),
        "DICT": lambda r, _: r.push(_pairs(r.since_mark())),
        "SETITEM": lambda r, _: r.set_items(list(r.last(2))),
        "SETITEMS": lambda r, _: r.set_items(r.since_mark()),
        "GLOBAL": lambda r, both: r.name(both.replace(" ", ".", 1)),
        "STACK_GLOBAL": lambda r, _: r.name(".".join(map(_text, r.last(2)))),
        "REDUCE NEWOBJ": lambda r, _: r.call(),
        "BUILD": lambda r, _: r.build(),
        "PUT BINPUT LONG_BINPUT MEMOIZE": lambda r, index: r.remember(index),
        "GET BINGET LONG_BINGET": lambda r, index: r.push(r.memo[index]),
    }.items()
    for name in names.split()
}


# NumPy's arrays ------------------------------------------------------------------------------------------------------

_ARRAYS = {
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
_ARRAY_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"} | _ARRAYS
_DTYPE = re.compile(r"[<>=|]?([biuf][1-9]|[SU][0-9]{1,9})")  # numbers and texts


def read_arrays(content: bytes, most_steps: int | None = None) -> Any:
    """The value of a pickle that may hold NumPy's arrays and scalars, of numbers and texts; object arrays are lists.

    Raises as `read` does; ValueError also where an array does not have the bytes that it needs.
    """
    try:
        return _plain(read(content, _ARRAY_NAMES.__contains__, most_steps), {})
    except TypeError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("its values lie too deep in each other") from error


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """``known``: what was read of objects by their id. A few bytes may name one any number of times."""
    if not isinstance(value, dict | list | Made):
        return value
    if id(value) not in known:
        known[id(value)] = _read_plain(value, known)
    return known[id(value)]


def _read_plain(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {_plain(key, known): _plain(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, known) for item in value]
    if value.name == "_codecs.encode":
        text, coding = (*map(_text, value.args), "utf-8")[:2]
        if coding not in ("latin1", "utf-8"):
            raise ValueError("bytes of a text in another coding than latin1 or utf-8")
        return text.encode(coding)
    if value.name.endswith("scalar"):
        data = _plain(value.args[1], known)
        return numpy.frombuffer(data, _dtype(value.args[0]), 1)[0]
    if value.name.endswith("_reconstruct") and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, is_fortran, data = value.state
        if isinstance(data, list):
            return [_plain(item, known) for item in data]
        return _array(_plain(data, known), _dtype(dtype), shape, "F" if is_fortran else "C")
    if value.name.endswith("_frombuffer"):
        data, dtype, shape, order = value.args
        return _array(data, _dtype(dtype), shape, order)
    raise Refused(f"a call of {value.name} in the place of a value")


def _array(data: Any, dtype: numpy.dtype[Any], shape: Any, order: Any) -> NDArray[Any]:
    is_shape = type(shape) is tuple and len(shape) <= _MOST_AXES
    if not is_shape or not all(type(length) is int and 0 <= length <= _LONGEST_AXIS for length in shape):
        raise ValueError("an array without a shape")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {list(shape)} does not have the bytes that it needs")
    array: NDArray[Any] = numpy.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")
    return array


def _dtype(made: Any) -> numpy.dtype[Any]:
    """The dtype that a file builds: numbers and texts alone."""
    if not isinstance(made, Made) or made.name != "numpy.dtype" or isinstance(made.args[0], Named):
        raise ValueError("an array without a dtype")
    state = made.state if isinstance(made.state, tuple) else (3, "|")
    if not _DTYPE.fullmatch(name := _text(made.args[0])):  # NumPy evaluates some of the others
        raise Refused(f"an array of dtype {name[:20]!r}")
    dtype = numpy.dtype(name)
    return dtype.newbyteorder(">") if state[1] == ">" else dtype
