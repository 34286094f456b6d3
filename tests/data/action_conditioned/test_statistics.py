# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.statistics."""

import json
from pathlib import Path

import numpy
import pytest

from cosmos_predict2.data.action_conditioned.actions import ActionTransform
from cosmos_predict2.data.action_conditioned.statistics import (
    column_statistics,
    dataset_statistics,
    read_statistics,
    transform_of,
    unit_transform,
    write_statistics,
)
from imaginaire.errors import ConfigError, DataError


def _rows(seed: int, num: int = 50) -> numpy.ndarray:
    rows = numpy.random.default_rng(seed).normal(0, 2, (num, 3))
    rows[:, 1] = 0.25  # never changes
    return rows


def test_statistics_are_those_of_all_rows() -> None:
    tables = [_rows(0), _rows(1, 30)]
    statistics = dataset_statistics(tables, proprio=[table[:, :2] for table in tables], mask=[True, True, False])
    everything = numpy.concatenate(tables)
    assert (statistics.num_transitions, statistics.num_trajectories) == (80, 2)
    assert numpy.allclose(statistics.action.mean, everything.mean(0))
    assert numpy.allclose(statistics.action.std, everything.std(0))
    assert numpy.allclose(statistics.action.q99, numpy.quantile(everything, 0.99, axis=0))
    assert statistics.proprio is not None and len(statistics.proprio.mean) == 2


def test_unit_range_and_back_with_mask_and_a_column_that_never_changes() -> None:
    rows = _rows(0)
    columns = dataset_statistics([rows], mask=[True, True, False]).action
    unit = columns.to_unit(rows)
    assert numpy.allclose(2 * (rows[:, 0] - columns.q01[0]) / (columns.q99[0] - columns.q01[0]) - 1, unit[:, 0])
    assert (unit[:, 1] == 0).all() and numpy.array_equal(unit[:, 2], rows[:, 2])
    assert numpy.allclose(columns.from_unit(unit), rows, atol=1e-12)
    with pytest.raises(DataError, match=r"3 columns, the values have \[7\]"):
        columns.to_unit(numpy.zeros(7))


@pytest.mark.parametrize("name", [None, "libero_spatial"])
def test_both_layouts_are_read(tmp_path: Path, name: str | None) -> None:
    statistics = dataset_statistics([_rows(0)], mask=[True, True, False])
    path = tmp_path / "dataset_statistics.json"
    write_statistics(path, statistics, name)
    assert set(json.loads(path.read_text())) == ({name} if name else {"action", "num_transitions", "num_trajectories"})
    again = read_statistics(path)
    assert again.to_dict() == statistics.to_dict() and again.proprio is None


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "dataset_statistics.json"
    good = dataset_statistics([_rows(0)]).to_dict()
    for content, message in [
        ("{", "cannot be read as statistics"),
        ([], "holds a list"),
        ({"proprio": {}}, "no 'action'"),
        ({"action": {k: v for k, v in good["action"].items() if k != "q01"}}, "action lacks q01"),
        ({"action": {**good["action"], "q99": [1.0]}}, r"differ in number: .*q99 \[1\]"),
        ({"action": {**good["action"], "mask": [True]}}, r"mask \[1\]"),
        ({"action": {**good["action"], "mean": "much"}}, "cannot be read: "),
        ({"a": good, "b": good}, "of 2 data sets: say which of a, b"),
    ]:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(DataError, match=message):
            read_statistics(path)
    assert read_statistics(path, "b").num_transitions == 50
    with pytest.raises(DataError, match="no statistics of 'c'"):
        read_statistics(path, "c")
    with pytest.raises(DataError, match="one recording"):
        dataset_statistics([])


def test_statistics_become_a_transform_that_does_the_same(tmp_path: Path) -> None:
    rows = numpy.random.RandomState(0).uniform(-2, 3, (50, 4))
    rows[:, 2] = 0.7  # never changes
    columns = column_statistics(rows, mask=[True, True, True, False])
    transform = unit_transform(columns)
    assert numpy.allclose(transform.apply(rows), columns.to_unit(rows), atol=1e-12)
    again = ActionTransform.from_json(transform.to_json())
    assert again == transform and again.stats == columns.to_dict()
    assert ActionTransform.from_dict({**transform.to_dict(), "stats": None}) == transform, "stats are a note"


def test_a_data_set_may_be_told_the_file_of_statistics(tmp_path: Path) -> None:
    rows = numpy.random.RandomState(0).uniform(-2, 3, (50, 4))
    statistics = dataset_statistics([rows])
    for name in (None, "mine"):
        path = tmp_path / f"{name}.json"
        write_statistics(path, statistics, name)
        found = transform_of({"kind": "controller", "statistics": str(path)})
        assert found == unit_transform(statistics.action)
    with pytest.raises(ConfigError, match="'scale' beside statistics"):
        transform_of({"statistics": str(path), "scale": [1.0]})
