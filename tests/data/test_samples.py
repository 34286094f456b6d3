# SPDX-License-Identifier: Apache-2.0
"""Bad samples stop the run or are replaced, counted and logged; names are kept in arrays."""

import logging
import pickle
from collections.abc import Callable

import pytest

from cosmos_predict2.data.samples import BadSamples, PackedStrings
from imaginaire.errors import CheckpointError, DataError


def _reader(bad: set[int], error: type[Exception] = DataError) -> Callable[[int], str]:
    def read(index: int) -> str:
        if index in bad:
            raise error(f"clip{index}.mp4 is broken.")
        return f"clip{index}"

    return read


def test_without_skipping_a_bad_sample_is_an_error_with_its_cure() -> None:
    with pytest.raises(DataError, match=r"clip2\.mp4"):
        BadSamples().read(2, 5, _reader({2}))


@pytest.mark.parametrize("error", [DataError, CheckpointError])
def test_the_next_good_sample_takes_its_place(caplog: pytest.LogCaptureFixture, error: type[Exception]) -> None:
    policy = BadSamples(skip=True)
    with caplog.at_level(logging.WARNING):
        assert policy.read(3, 5, _reader({3, 4}, error)) == "clip0"
    assert policy.count == 2
    assert [record.getMessage() for record in caplog.records] == [
        "skipped sample 3 (1 so far): clip3.mp4 is broken.",
        "skipped sample 4 (2 so far): clip4.mp4 is broken.",
    ]


def test_the_replacement_depends_on_the_index_alone() -> None:
    read = _reader({1, 2, 6})
    assert [BadSamples(skip=True).read(i, 8, read) for i in range(8)] == [f"clip{i}" for i in (0, 3, 3, 3, 4, 5, 7, 7)]


@pytest.mark.parametrize(("most", "length", "tried"), [(3, 10, 3), (16, 4, 4)])
def test_after_so_many_in_a_row_it_is_an_error(most: int, length: int, tried: int) -> None:
    policy = BadSamples(skip=True, most=most)
    with pytest.raises(DataError, match=f"bad sample {tried} in a row"):
        policy.read(0, length, _reader(set(range(length))))
    assert policy.count == tried


def test_other_errors_are_bugs_and_pass() -> None:
    with pytest.raises(KeyError):
        BadSamples(skip=True).read(0, 3, _reader({0}, KeyError))


def test_indices_are_those_of_a_sequence() -> None:
    assert BadSamples().read(-1, 4, _reader(set())) == "clip3"
    for index in (4, -5):
        with pytest.raises(IndexError):
            BadSamples().read(index, 4, _reader(set()))


def test_packed_strings_read_like_a_list() -> None:
    strings = ["a", "", "größe", "日本", "\udcff.mp4"]  # the last is a file name that is not UTF-8
    packed = PackedStrings(iter(strings))
    assert list(packed) == strings and len(packed) == 5
    assert packed[-1] == strings[-1] and packed[1:3] == strings[1:3]
    assert packed.index("日本") == 3 and "b" not in packed
    assert list(pickle.loads(pickle.dumps(packed))) == strings
    for place in (5, -6):
        with pytest.raises(IndexError):
            packed[place]
    assert list(PackedStrings()) == []
