# SPDX-License-Identifier: Apache-2.0
"""Reading a pickle as plain data, no class, function or object of this process taking part, and a file of torch.

``pickle.Unpickler`` with a short list of names still hands live classes to the file, and a file may change what it is
handed: BUILD sets attributes of classes and functions, which stay changed for the rest of the process. This reader
interprets the steps of the format itself. A name becomes a `Named`, whatever is called or built a `Made`, and the
caller makes of them what it expects to find. All other steps (persistent objects, registered extensions, ...) are
refused, and a small file cannot take more memory than its bytes let expect.

What ``torch.save`` wrote is read by torch's own restricted reader, see `load_plain`.
"""

import io
import math
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_LONGEST_NUMBER = 255  # bytes of an integer
_SHORT, _SIGNED, _INT, _LONG, _FLOAT = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q", ">d"))


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


class Named:
    """A class, function or object that a file names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Made:
    """An object that a file builds: the name that it calls, the arguments, and the state that it gives the result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def read(content: bytes, is_allowed: Callable[[str], bool], most_steps: int | None = None) -> Any:
    """The tree of plain values, `Named` and `Made` in a pickle of any protocol; sets are lists.

    Raises `Refused` for a name that is not allowed and for what has no place in plain data, ValueError for damage.
    """
    try:
        return _Reader(content, is_allowed, most_steps).tree()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"its steps do not fit together ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, content: bytes, is_allowed: Callable[[str], bool], most_steps: int | None) -> None:
        self.content = content
        self.position = 0
        self.is_allowed = is_allowed
        self.steps_left = most_steps if most_steps is not None else len(content)
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}

    def tree(self) -> Any:
        content, steps = self.content, _STEPS
        while True:
            code = content[self.position]
            self.position += 1
            if code == _STOP:
                return self.stack.pop()
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Refused("more memory or steps than its numbers take")
            step = steps.get(code)
            if step is None:
                if code in _REFUSED:
                    raise Refused(_REFUSED[code])
                raise ValueError(f"byte {self.position - 1} is {code:#x}, no step of a pickle")
            step(self)

    # --- bytes of the file

    def take(self, length: int) -> bytes:
        start, end = self.position, self.position + length
        if end > len(self.content):
            raise ValueError(f"cut short: {length} bytes at {start} of {len(self.content)}")
        self.position = end
        return self.content[start:end]

    def byte(self) -> int:
        self.position += 1
        return self.content[self.position - 1]

    def number(self, form: struct.Struct) -> Any:
        self.position += form.size
        return form.unpack_from(self.content, self.position - form.size)[0]

    def line(self, encoding: str = "utf-8") -> str:
        end = self.content.index(b"\n", self.position)
        text = self.content[self.position : end]
        self.position = end + 1
        return text.decode(encoding)

    # --- steps

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_text(self, text: bytes) -> None:
        self.stack.append(text.decode("utf-8", "surrogatepass"))

    def push_integer(self, length: int) -> None:
        if length > _LONGEST_NUMBER:
            raise Refused(f"a number of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def push_written_number(self) -> None:
        text = self.line().rstrip("L")
        self.stack.append(text == "01" if text in ("00", "01") else int(text))

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

    def name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if not self.is_allowed(full):
            raise Refused(full)
        self.stack.append(Named(full))

    def name_on_stack(self) -> None:
        module, name = self.last(2)
        self.name(module, name)

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

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    # The hash of a tuple in a tuple in ... would overflow the stack of the process.
    if others := {type(key) for key in items[::2]} - _KEYS:
        raise TypeError(f"a {others.pop().__name__} as a key")
    return dict(zip(items[::2], items[1::2]))


_KEYS = {str, bytes, int, float, bool, type(None), Made}
_STOP = ord(".")
_REFUSED = {
    ord(code): what
    for codes, what in {
        "PQ": "a persistent object",
        "\x82\x83\x84": "a registered extension",
        "io\x92": "an object of another form than plain data have",
        "\x97\x98": "a buffer outside the file",
        "STU": "a text of Python 2",
        "2": "a copy of a value",
    }.items()
    for code in codes
}
_STEPS: dict[int, Callable[[_Reader], Any]] = {
    ord(code): step
    for code, step in {
        "\x80": lambda r: r.take(1),  # protocol
        "\x95": lambda r: r.take(8),  # frame
        "(": lambda r: r.marks.append(len(r.stack)),
        "0": lambda r: r.stack.pop(),
        "1": lambda r: r.since_mark(),
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "K": lambda r: r.push(r.byte()),
        "M": lambda r: r.push(r.number(_SHORT)),
        "J": lambda r: r.push(r.number(_SIGNED)),
        "\x8a": lambda r: r.push_integer(r.byte()),
        "\x8b": lambda r: r.push_integer(r.number(_INT)),
        "I": lambda r: r.push_written_number(),
        "L": lambda r: r.push_written_number(),
        "F": lambda r: r.push(float(r.line())),
        "G": lambda r: r.push(r.number(_FLOAT)),
        "V": lambda r: r.push(r.line("raw-unicode-escape")),
        "X": lambda r: r.push_text(r.take(r.number(_INT))),
        "\x8c": lambda r: r.push_text(r.take(r.byte())),
        "\x8d": lambda r: r.push_text(r.take(r.number(_LONG))),
        "B": lambda r: r.push(r.take(r.number(_INT))),
        "C": lambda r: r.push(r.take(r.byte())),
        "\x8e": lambda r: r.push(r.take(r.number(_LONG))),
        "\x96": lambda r: r.push(r.take(r.number(_LONG))),  # a bytearray
        ")": lambda r: r.push(()),
        "t": lambda r: r.push(tuple(r.since_mark())),
        "\x85": lambda r: r.push(r.last(1)),
        "\x86": lambda r: r.push(r.last(2)),
        "\x87": lambda r: r.push(r.last(3)),
        "]": lambda r: r.push([]),
        "l": lambda r: r.push(r.since_mark()),
        "\x8f": lambda r: r.push([]),  # a set
        "\x91": lambda r: r.push(r.since_mark()),  # a frozen set
        "a": lambda r: r.extend([r.stack.pop()]),
        "e": lambda r: r.extend(r.since_mark()),
        "\x90": lambda r: r.extend(r.since_mark()),  # items of a set
        "}": lambda r: r.push({}),
        "d": lambda r: r.push(_pairs(r.since_mark())),
        "s": lambda r: r.set_items(list(r.last(2))),
        "u": lambda r: r.set_items(r.since_mark()),
        "c": lambda r: r.name(r.line(), r.line()),
        "\x93": lambda r: r.name_on_stack(),
        "R": lambda r: r.call(),
        "\x81": lambda r: r.call(),  # of __new__
        "b": lambda r: r.build(),
        "p": lambda r: r.remember(int(r.line())),
        "q": lambda r: r.remember(r.byte()),
        "r": lambda r: r.remember(r.number(_INT)),
        "\x94": lambda r: r.remember(len(r.memo)),
        "g": lambda r: r.push(r.memo[int(r.line())]),
        "h": lambda r: r.push(r.memo[r.byte()]),
        "j": lambda r: r.push(r.memo[r.number(_INT)]),
    }.items()
}


# NumPy's arrays ------------------------------------------------------------------------------------------------------

_ARRAYS = {
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
_ARRAY_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"} | _ARRAYS
_DTYPE_KINDS = "biufSU"  # of dtypes: numbers and texts


def read_arrays(content: bytes) -> Any:
    """The value of a pickle that may hold NumPy's arrays and scalars, of numbers and texts; object arrays are lists.

    Raises as `read` does; ValueError also where an array does not have the bytes that it needs.
    """
    return _plain(read(content, _ARRAY_NAMES.__contains__))


def _plain(value: Any) -> Any:
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
    if dtype.kind not in _DTYPE_KINDS:
        raise ValueError(f"an array of dtype {dtype}")
    return dtype.newbyteorder(">") if state[1] == ">" else dtype
