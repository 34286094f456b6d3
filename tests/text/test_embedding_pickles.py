# SPDX-License-Identifier: Apache-2.0
"""Pickled embeddings: what the public scripts wrote is read, and nothing that could run code."""

import os
import pickle
import pickletools
import resource
import subprocess
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.folder import read_embedding
from imaginaire.errors import DataError

PROTOCOLS = [0, 1, 2, 3, 4, 5]


def _array(tokens: int, width: int = 8) -> np.ndarray:
    return np.random.RandomState(0).standard_normal((tokens, width)).astype(np.float16)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [1, 5, 512, 600])
def test_public_files_are_read(tmp_path: Path, protocol: int, tokens: int) -> None:
    array = _array(tokens)
    (tmp_path / "a.pickle").write_bytes(pickle.dumps([array], protocol=protocol))
    embedding = pickles.padded(read_embedding(tmp_path / "a.pickle"), 512)
    assert embedding.shape == (512, 8) and embedding.dtype == torch.float32
    kept = min(tokens, 512)
    assert torch.equal(embedding[:kept], torch.from_numpy(array[:kept]).float())
    assert embedding[kept:].count_nonzero() == 0


@pytest.mark.parametrize("old", [True, False])
def test_both_names_of_numpy_are_read(tmp_path: Path, old: bool) -> None:
    names = (b"numpy._core.multiarray", b"numpy.core.multiarray")
    content = pickle.dumps([_array(5)], protocol=2)
    for name in names:
        content = content.replace(name, names[1] if old else names[0])
    (tmp_path / "a.pickle").write_bytes(content)
    assert read_embedding(tmp_path / "a.pickle").shape == (5, 8)


def test_what_is_written_is_in_the_exchange_form(tmp_path: Path) -> None:
    embedding = pickles.padded(torch.from_numpy(_array(5)), 512)
    pickles.write(tmp_path / "a.pickle", embedding)
    content = (tmp_path / "a.pickle").read_bytes()
    assert next(pickletools.genops(content))[1] == 4
    loaded = pickle.loads(content)
    assert isinstance(loaded, list) and len(loaded) == 1
    assert loaded[0].dtype == np.float16 and loaded[0].shape == (5, 8)
    assert torch.equal(read_embedding(tmp_path / "a.pickle"), embedding[:5])


def test_a_token_of_zeros_inside_is_kept_and_an_empty_embedding_has_one() -> None:
    embedding = torch.zeros(6, 2)
    assert pickles.trimmed(embedding).shape == (1, 2)
    embedding[3, 1] = 1
    assert pickles.trimmed(embedding).shape == (4, 2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_array_in_no_list_is_named(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(_array(5), protocol=protocol))
    with pytest.raises(DataError, match=r"a\.pickle should hold a list.*found an array that is in no list"):
        read_embedding(tmp_path / "a.pickle")


class _Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: [_Runs(os.system, f"touch {path}")],
        lambda path: [_Runs(exec, f"open({str(path)!r}, 'w')")],
        lambda path: [_Runs(open, str(path), "w")],
        lambda path: [_Runs(subprocess.Popen, ["touch", str(path)])],
        lambda path: [_array(5), _Runs(os.mkdir, str(path))],
        lambda path: [np.array([_Runs(os.mkdir, str(path))], dtype=object)],
        lambda path: {"t5_xxl": _Runs(os.mkdir, str(path))},
    ],
)
def test_code_is_refused_and_does_not_run(tmp_path: Path, protocol: int, make: Any) -> None:
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps(make(tmp_path / "ran"), protocol=protocol))
    with pytest.raises(DataError, match=r"bad\.pickle"):
        read_embedding(tmp_path / "bad.pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["O", "V8", "i4,O"])
def test_bytes_are_never_taken_for_objects(tmp_path: Path, protocol: int, kind: str) -> None:
    forged = _Runs(np.ndarray, (1,), _Runs(np.dtype, kind), b"A" * 16)  # a pointer to anywhere
    as_shape = _Runs(np.ndarray, forged, _Runs(np.dtype, "f4"))  # NumPy would follow it
    of_this_kind = np.zeros((1, 2), kind)
    for content, refused in (
        (as_shape, "asks for a call of numpy.ndarray"),
        (of_this_kind, "(asks for an array of|should hold a list with one array)"),
    ):
        (tmp_path / "bad.pickle").write_bytes(pickle.dumps([content], protocol=protocol))
        with pytest.raises(DataError, match=rf"bad\.pickle {refused}"):
            read_embedding(tmp_path / "bad.pickle")


def test_orders_of_bytes_and_axes_are_kept(tmp_path: Path) -> None:
    for array in (_array(5).astype(">f4"), np.asfortranarray(_array(5)), _array(5).astype(np.float64)):
        for protocol in (2, 4, 5):
            (tmp_path / "a.pickle").write_bytes(pickle.dumps([array], protocol=protocol))
            found = read_embedding(tmp_path / "a.pickle")
            assert torch.equal(found, torch.from_numpy(array.astype(np.float32)))


def _doubled(depth: int) -> bytes:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested, nested]
    return pickle.dumps([nested], protocol=4)


@pytest.mark.parametrize(
    "content",
    [
        _doubled(60),  # a few hundred bytes that mean 2 ** 60 lists
        b"\x80\x04(" + b"N2" * 100_000 + b"l.",
    ],
    ids=["lists", "steps"],
)
def test_a_small_file_takes_little_time_and_memory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.pickle").write_bytes(content)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(DataError, match=r"bad\.pickle"):
        read_embedding(tmp_path / "bad.pickle")
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_array(5)),
        pickle.dumps([_array(5), _array(5)]),
        pickle.dumps([[1.0]]),
        pickle.dumps([np.zeros(3, np.float16)]),
        pickle.dumps([np.zeros((3, 4), np.int64)]),
        pickle.dumps([np.zeros((0, 4), np.float16)], protocol=4),
        pickle.dumps(OrderedDict()),
        pickle.dumps([_array(5)])[:-20],
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        b"\x80\x04]\x8c\x01xa.",
    ],
)
def test_other_content_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pickle").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.pickle"):
        read_embedding(tmp_path / "a.pickle")
