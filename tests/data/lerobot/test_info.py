# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.lerobot.info: which episodes are for what."""

import numpy
import pytest

from cosmos_predict2.data.lerobot.info import choose_episodes, held_out
from imaginaire.errors import ConfigError, DataError

ONE = {"train": "0:20"}


def chosen(split: str, splits: dict[str, str] = ONE, count: int = 20, val_fraction: float = 0.1) -> list[int]:
    return choose_episodes(splits, count, split, val_fraction).tolist()


@pytest.mark.parametrize("count", [2, 3, 10, 97])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_train_and_val_part_all_episodes(count: int, fraction: float) -> None:
    train, val = chosen("train", ONE, count, fraction), chosen("val", ONE, count, fraction)
    assert sorted(train + val) == chosen("full", ONE, count, fraction) == list(range(count))
    assert len(val) == max(1, round(fraction * count)) and train
    assert val == chosen("test", ONE, count, fraction)


def test_what_is_held_out_is_spread_over_all_episodes() -> None:
    places = numpy.flatnonzero(held_out(100, 0.1))
    assert len(places) == 10 and (numpy.diff(places) == 10).all()
    assert not held_out(100, 0).any() and not held_out(1, 0.5).any()


def test_splits_of_the_data_set_count_where_it_has_several() -> None:
    splits = {"train": "0:15", "test": "15:20"}
    assert chosen("train", splits) == list(range(15))
    assert chosen("test", splits) == chosen("val", splits) == list(range(15, 20))
    assert chosen("full", splits) == list(range(20))
    with pytest.raises(ConfigError, match="'val'"):
        chosen("val", {"train": "0:15", "all": "0:20"})


def test_wrong_splits_are_named() -> None:
    with pytest.raises(ConfigError, match="'trian'"):
        chosen("trian")
    with pytest.raises(ConfigError, match="val_fraction=1"):
        chosen("train", val_fraction=1)
    with pytest.raises(DataError, match="'0-15'"):
        chosen("train", {"train": "0-15", "test": "15:20"})
