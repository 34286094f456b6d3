# SPDX-License-Identifier: Apache-2.0
"""A pickle as plain data: all that plain data need is read, and nothing else happens."""

import codecs
import copyreg
import pickle
import random
import tracemalloc
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import numpy
import pytest

from imaginaire.checkpoint import plain_pickle
from imaginaire.checkpoint.plain_pickle import Made, Named, Refused


def _random_tree(draw: random.Random, depth: int = 4) -> Any:
    scalars = [None, True, False, 0, 255, 256, -1, 2**31, -(2**70), 1.5, "", "text", "é\n漢", "x" * 300, b"\0\xff", b""]
    kind = draw.randrange(4 if depth else 1)
    if kind == 0:
        return draw.choice(scalars)
    items = [_random_tree(draw, depth - 1) for _ in range(draw.randrange(5))]
    if kind == 1:
        return items
    return tuple(items) if kind == 2 else {draw.choice(["a", 1, None, b"k", 2.5]): item for item in items}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_are_read_as_pickle_reads_them(protocol: int) -> None:
    for seed in range(100):
        tree = _random_tree(random.Random(seed))
        shared = [tree, tree]
        content = pickle.dumps(shared, protocol=protocol)
        found = plain_pickle.read(content, {"_codecs.encode", "__builtin__.bytes"}.__contains__)
        assert _as_pickle(found) == shared
        assert not isinstance(tree, list) or found[0] is found[1]


def _as_pickle(found: Any) -> Any:
    """With what protocols 0 to 2 write for bytes."""
    if isinstance(found, Made):
        assert found.name == "_codecs.encode" or not found.args
        return found.args[0].encode("latin1") if found.args else b""
    if isinstance(found, dict):
        return {_as_pickle(key): _as_pickle(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_as_pickle, found))
    return found


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_are_names_arguments_and_states(protocol: int) -> None:
    content = pickle.dumps([PurePosixPath("/a/b"), OrderedDict(x=1).__class__, _Stated()], protocol=protocol)
    path, ordered, stated = plain_pickle.read(content, lambda name: True)
    assert isinstance(path, Made) and path.name == "pathlib.PurePosixPath" and path.args == ("/", "a", "b")
    assert isinstance(ordered, Named) and ordered.name == "collections.OrderedDict"
    assert stated.name == f"{__name__}._Stated" and stated.state == {"value": 1}
    with pytest.raises(Refused, match=r"pathlib\.PurePosixPath"):
        plain_pickle.read(content, lambda name: False)


class _Stated:
    def __init__(self) -> None:
        self.value = 1


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"cx\ny\nN}X\x01\x00\x00\x00aNs\x86b.", Refused, "a change of x.y"),  # slot state of a class or function
        (b"cx\ny\n}X\x01\x00\x00\x00aNsb.", Refused, "a change of x.y"),
        (b"cx\ny\n)R}b}b.", Refused, "a change of x.y"),  # twice
        (b"]}X\x01\x00\x00\x00aNsb.", Refused, "a change of list"),
        (b"cx\ny\n)Rcx\ny\ncx\ny\ns.", ValueError, "entries for a Made"),  # SETITEM, APPEND, ... on an object
        (b"cx\ny\n)R(NNu.", ValueError, "entries for a Made"),
        (b"cx\ny\n(NNu.", ValueError, "entries for a Named"),
        (b"cx\ny\n)RNa.", ValueError, "items for a Made"),
        (b"cx\ny\n(NNe.", ValueError, "items for a Named"),
        (b"cx\ny\n)R)R.", ValueError, "a call of a Made"),
        (b"X\x01\x00\x00\x00a)R.", ValueError, "a call of a str"),
        (b"N\x81.", ValueError, "do not fit together"),
        (b"\x80\x02\x82\x01.", Refused, "a registered extension"),
        (b"\x83\x01\x00.", Refused, "a registered extension"),
        (b"\x84\x01\x00\x00\x00.", Refused, "a registered extension"),
        (b"Pid\n.", Refused, "a persistent object"),
        (b"NQ.", Refused, "a persistent object"),
        (b"(ios\nsystem\n.", Refused, "another form"),
        (b"(cx\ny\no.", Refused, "another form"),
        (b"cx\ny\n)}\x92.", Refused, "another form"),
        (b"\x97.", Refused, "outside the file"),
        (b"N2.", Refused, "a copy"),
        (b"\x8b\xff\xff\xff\x7f\x01.", ValueError, "not enough data"),
        (b"\x8b\x00\x01\x00\x00" + b"\x7f" * 256 + b".", Refused, "a number of 2047 bits"),
        (b"\xff.", ValueError, "opcode b'.xff' unknown"),
        (b"", ValueError, "exhausted"),
        (b"h\x05.", ValueError, "do not fit together"),
        (b"\x86.", ValueError, "without its values"),
        (b"})Ns.", ValueError, "a tuple as a key"),
    ],
)
def test_other_steps_are_refused(content: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plain_pickle.read(content, {"x.y"}.__contains__)


def test_a_registered_extension_hands_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copyreg.add_extension("os", "system", 200)
    try:
        with pytest.raises(Refused):
            plain_pickle.read(b"\x80\x02\x82\xc8X\x04\x00\x00\x00true\x85R.", lambda name: True)
    finally:
        copyreg.remove_extension("os", "system", 200)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04]r\xff\xff\xff\xff.",  # a table of 2 ** 32 objects
        b"]p99999999999\n.",
        b"\x8e\xff\xff\xff\xff\x00\x00\x00\x00.",  # 4 GB, it says; as bytes, text and a bytearray
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"I" + b"9" * 100_000 + b"\n.",
        b")" + b"\x85" * 10_000 + b"\x85}\x8c\x01x\x86s.",  # its hash would overflow the stack of C
        b"}" + b")" + b"\x85" * 10_000 + b"Ns.",
        b"]" + b"]a" * 1000 + b".",
    ],
)
def test_a_small_file_takes_little_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        plain_pickle.read(content, lambda name: False)
    except (Refused, ValueError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(content) + 100_000


def test_a_file_that_is_cut_or_flipped_anywhere_reads_or_is_damage() -> None:
    content = pickle.dumps({"a": [1, 2.5, ("x", None)], "b": PurePosixPath("x")}, protocol=4)
    for place in range(len(content)):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]):
            try:
                plain_pickle.read(damaged, lambda name: True)
            except (Refused, ValueError):
                continue


def nested(depth: int) -> list[Any]:
    """A list of 2 ** depth texts, in few bytes."""
    value: list[Any] = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


class Call:
    """What a file says of an object: a name, and the arguments that it is called with."""

    def __init__(self, name: Any, *args: Any) -> None:
        self.name, self.args = name, args

    def __reduce__(self) -> Any:
        return self.name, self.args


BUFFER = pickle.loads(b"cnumpy._core.numeric\n_frombuffer\n.")


@pytest.mark.parametrize(
    "value",
    [
        Call(BUFFER, b"", numpy.dtype("f8"), ("A", 3 * 10**8), "C"),  # a text, so many times
        Call(BUFFER, b"", numpy.dtype("f8"), (2**2000,) * 10_000, "C"),
        Call(BUFFER, b"", numpy.dtype("f8"), nested(40), "C"),
        Call(codecs.encode, nested(40), "latin1"),
        Call(codecs.encode, "x", "idna"),
        Call(numpy.dtype, nested(40)),
        Call(BUFFER, b"", Call(numpy.dtype, "(1,f4"), (0,), "C"),  # NumPy evaluates it: a SyntaxError
    ],
)
def test_arrays_of_a_small_file_take_little_memory(value: Call) -> None:
    """A shape was multiplied before it was looked at, and lists that share their members were written as texts."""
    content = pickle.dumps(value, protocol=4)
    tracemalloc.start()
    try:
        with pytest.raises((Refused, ValueError)):
            plain_pickle.read_arrays(content)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 10**7  # a hang ends by the limit of a test
    assert nested(3) == plain_pickle.read_arrays(pickle.dumps(nested(3)))
    with pytest.raises((Refused, ValueError)):
        plain_pickle.read(b"\x80\x04" + pickle.dumps(nested(40))[2:-1] + b"\x8c\x01x\x93.", lambda name: True)
