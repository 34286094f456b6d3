# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.packed_strings."""

import pickle

import pytest

from cosmos_predict2.data.packed_strings import PackedStrings


def test_it_reads_like_a_list() -> None:
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


def test_it_holds_two_arrays_and_no_string() -> None:
    packed = PackedStrings(f"clip_{i:06d}" for i in range(1000))
    assert sum(value.nbytes for value in vars(packed).values()) == 1000 * 11 + 1001 * 8
