# SPDX-License-Identifier: Apache-2.0
"""Bad samples stop the run or are replaced; names are kept in arrays; which frames make a sample."""

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cosmos_predict2.data.samples import SAMPLINGS, BadSamples, FrameRule, PackedStrings
from imaginaire.errors import CheckpointError, ConfigError, DataError


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


@pytest.mark.parametrize(("most", "length", "tried"), [(3, 10, 3), (16, 4, 4)])
def test_after_so_many_in_a_row_it_is_an_error(most: int, length: int, tried: int) -> None:
    policy = BadSamples(skip=True, most=most)
    with pytest.raises(DataError, match=f"bad sample {tried} in a row"):
        policy.read(0, length, _reader(set(range(length))))
    assert policy.count == tried


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


# ---- which frames ----------------------------------------------------------------------------------------------------


def choose_frames(
    total: int, num_frames: int, *, native_fps: float, draw: Callable[[int], int], **rule: Any
) -> list[int]:
    return FrameRule(num_frames=num_frames, **rule).choose(total, native_fps, draw)


def _draw(value: int) -> Callable[[int], int]:
    """Gives ``value``, or the last possible number."""
    return lambda n: min(value, n - 1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("total", [13, 14, 40])
def test_a_clip_just_long_enough_gives_all_its_frames(sampling: str, total: int) -> None:
    frames = choose_frames(total, 13, native_fps=30, draw=_draw(99), sampling=sampling)
    assert len(frames) == 13 and frames == sorted(frames)
    assert frames[0] >= 0 and frames[-1] < total
    if total == 13:
        assert frames == list(range(13))


def test_first_and_center_draw_nothing() -> None:
    def draw(n: int) -> int:
        raise AssertionError("drawn")

    assert choose_frames(20, 5, native_fps=30, draw=draw, sampling="first") == [0, 1, 2, 3, 4]
    assert choose_frames(20, 4, native_fps=30, draw=draw, sampling="center") == [8, 9, 10, 11]
    assert choose_frames(21, 5, native_fps=30, draw=draw, sampling="uniform") == [0, 5, 10, 15, 20]
    assert choose_frames(21, 1, native_fps=30, draw=draw, sampling="uniform") == [10]


@pytest.mark.parametrize(
    ("native", "wanted", "frames"),
    [
        (30, 10, [0, 3, 6, 9, 12]),
        (30, 30, [0, 1, 2, 3, 4]),
        (24, 16, [0, 2, 3, 5, 6]),  # 0, 1.5, 3, 4.5, 6: halves go up
        (10, 20, [0, 1, 1, 2, 2]),  # a slower clip's frames are repeated
        (29.97, 10, [0, 3, 6, 9, 12]),
    ],
)
def test_a_rate_takes_the_nearest_frames(native: float, wanted: float, frames: list[int]) -> None:
    assert choose_frames(100, 5, native_fps=native, draw=_draw(0), fps=wanted) == frames
    rule = FrameRule(num_frames=5, fps=wanted)
    assert rule.frames_needed(native) == frames[-1] + 1
    assert rule.choose(frames[-1] + 1, native, _draw(99)) == frames
    with pytest.raises(DataError, match=f"at fps={wanted:g} needs {frames[-1] + 1}"):
        rule.choose(frames[-1], native, _draw(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_frames=0), "num_frames=0"),
        (dict(num_frames=2.0), "num_frames=2.0"),
        (dict(num_frames=True), "num_frames=True"),
        (dict(num_frames=5, stride=0), "stride=0"),
        (dict(num_frames=5, fps=0), "fps=0"),
        (dict(num_frames=5, fps=float("nan")), "fps=nan"),
        (dict(num_frames=5, sampling="randon"), "randon"),
        (dict(num_frames=5, fps=10, stride=2), "stride"),
        (dict(num_frames=5, sampling="uniform", stride=2), "stride"),
    ],
)
def test_a_wrong_rule_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameRule(**arguments)  # type: ignore[arg-type]
