# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.actions.statistics."""

import json
from pathlib import Path

import attrs
import numpy
import pytest

from cosmos_predict2.actions.statistics import (
    column_statistics,
    dataset_statistics,
    order_one_transform,
    other_range,
    outliers,
    read_statistics,
    sampled_statistics,
    transform_of,
    unit_transform,
)
from cosmos_predict2.actions.transforms import ActionTransform, controller
from imaginaire.errors import ConfigError, DataError


def _rows(seed: int, num: int = 50) -> numpy.ndarray:
    rows = numpy.random.default_rng(seed).normal(0, 2, (num, 3))
    rows[:, 1] = 0.25  # never changes
    return rows


def test_unit_range_with_mask_and_a_column_that_never_changes() -> None:
    rows = _rows(0)
    columns = dataset_statistics([rows], mask=[True, True, False]).action
    unit = unit_transform(columns).apply(rows)
    assert numpy.allclose(2 * (rows[:, 0] - columns.q01[0]) / (columns.q99[0] - columns.q01[0]) - 1, unit[:, 0])
    assert (unit[:, 1] == 0).all() and numpy.array_equal(unit[:, 2], rows[:, 2])


def test_a_broken_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "dataset_statistics.json"
    good = dataset_statistics([_rows(0)]).to_dict()
    for content, message in [
        ("{", "cannot be read as statistics"),
        ([], "holds a list"),
        ({"proprio": {}}, "'action'"),
        ({"action": {k: v for k, v in good["action"].items() if k != "q01"}}, "action lacks q01"),
        ({"action": {**good["action"], "q99": [1.0]}}, r"differ in number: .*q99 \[1\]"),
        ({"action": {**good["action"], "mask": [True]}}, r"mask \[1\]"),
        ({"action": {**good["action"], "mean": "much"}}, "not lists of numbers"),
        (
            {"action": {**good["action"], "q01": good["action"]["q99"], "q99": good["action"]["q01"]}},
            r"q01\[0\]=.* above",
        ),
        ({"action": {**good["action"], "min": [9.0] * len(good["action"]["min"])}}, r"min\[0\]=9 is above max\[0\]"),
        ({"action": {**good["action"], "std": [-1.0] * len(good["action"]["std"])}}, "no spread is below 0"),
        ({"a": good, "b": good}, "a, b"),
    ]:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(DataError, match=message):
            read_statistics(path)
    assert read_statistics(path, "b").num_transitions == 50
    with pytest.raises(DataError, match="'c'"):
        read_statistics(path, "c")
    with pytest.raises(DataError, match="one recording"):
        dataset_statistics([])


def test_statistics_and_their_file_become_a_transform_that_does_the_same(tmp_path: Path) -> None:
    rows = numpy.random.RandomState(0).uniform(-2, 3, (50, 4))
    rows[:, 2] = 0.7  # never changes
    statistics = dataset_statistics([rows[:20], rows[20:]], proprio=[rows[:, :2]], mask=[True, True, True, False])
    columns = statistics.action
    transform = unit_transform(columns)
    again = ActionTransform.from_json(transform.to_json())
    assert again == transform and again.stats == columns.to_dict()
    assert ActionTransform.from_dict({**transform.to_dict(), "stats": None}) == transform, "stats are a note"

    assert (statistics.num_transitions, statistics.num_trajectories) == (50, 2)
    assert numpy.allclose(columns.q99, numpy.quantile(rows, 0.99, axis=0))
    for name in (None, "mine"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({name: statistics.to_dict()} if name else statistics.to_dict()))
        assert read_statistics(path).to_dict() == statistics.to_dict()
        assert transform_of({"kind": "controller", "statistics": str(path)}) == transform
    with pytest.raises(ConfigError, match="'scale'"):
        transform_of({"statistics": str(path), "scale": [1.0]})


COLUMNS = {  # what an action's numbers may be like: 1000 rows of each, and its scale and offset
    "in [-1, 1] already": (numpy.linspace(-1, 1, 1000), 1.0, 0.0),
    "the same times 20": (numpy.linspace(-20, 20, 1000), 1 / 16, 0.0),
    "metres per step": (numpy.linspace(-0.02, 0.01, 1000), 64.0, 0.0),
    "gripper, 0 or 1": (numpy.arange(1000) % 2, 1.0, 0.0),
    "gripper, 0 to 255": (numpy.linspace(0, 255, 1000), 1 / 256, 0.0),
    "gripper that hardly moves": (numpy.arange(1000) > 995, 1.0, 0.0),
    "joint target": (numpy.linspace(-1.5, -1.0, 1000), 4.0, 5.0),
    "pixel": (numpy.linspace(400, 520, 1000), 1 / 64, -7.25),
    "always 0": (numpy.zeros(1000), 1.0, 0.0),
    "always 0, but for noise": (numpy.linspace(-1e-9, 1e-9, 1000), 1.0, 0.0),
    "always 0.7": (numpy.full(1000, 0.7), 1.0, -0.75),
}


def test_every_number_is_brought_to_the_order_of_one_and_a_motion_of_zero_stays_zero() -> None:
    rows = numpy.stack([numpy.asarray(values, dtype=float) for values, _, _ in COLUMNS.values()], axis=1)
    transform = order_one_transform(column_statistics(rows))
    offset = transform.offset or (0.0,) * transform.dim
    for k, (name, (_, scale, shift)) in enumerate(COLUMNS.items()):
        assert (transform.scale[k], offset[k]) == (scale, shift), name
    normalised = transform.apply(rows)
    assert numpy.abs(normalised).max() < 1.5 and numpy.allclose(transform.undo(normalised), rows, atol=1e-12)
    assert not outliers(column_statistics(rows), transform)
    assert transform.stats is not None and transform.stats["q99"][1] == pytest.approx(19.6, abs=0.1)


def test_an_outlier_does_not_shrink_the_others_and_is_named() -> None:
    rows = numpy.linspace(-1, 1, 1000)[:, None] * [1.0, 1.0]
    rows[500, 1] = -1e6
    columns = column_statistics(rows)
    transform = order_one_transform(columns)
    assert transform.scale == (1.0, 1.0) and outliers(columns, transform) == {1: -1e6}


UNITS = {  # of the numbers of an action: the change, the note on all episodes, and of a single one
    "a held-out part": (lambda a: a[::7], None, None),
    "half as far": (lambda a: a * 0.5, None, None),
    "metres": (lambda a: a * [1e-3, 1, 1, 1], "number 0 in -0.392..0.392 (the weights: -392..392).", None),
    "micrometres": (lambda a: a * [1e3, 1, 1, 1], "number 0 in -3.92e+05..3.92e+05 (the", "number 0 in -3.92e+05.."),
    "targets in metres": (lambda a: a * [1, 1e-3, 1, 1], "number 1 in 0.302..0.498 (the", "number 1 in 0.302..0.498"),
    "an unused gripper": (lambda a: a * [1, 1, 0, 1], None, None),
    "a constant that moves": (lambda a: a + [[0, 0, 0, k % 2] for k in range(len(a))], "number 3 in 0..1 (the", "3 in"),
    "all in other units": (
        lambda a: a * 1e-3,
        "number 0 in -0.392..0.392 (the weights: -392..392), number 1 in",
        "1 in",
    ),
}


@pytest.mark.parametrize("change", UNITS)
def test_actions_in_other_units_than_the_recorded_are_named_with_both_ranges(change: str) -> None:
    turn, of_all, of_one = UNITS[change]
    unit = numpy.linspace(-1, 1, 1001)
    rows = numpy.stack([400 * unit, 400 + 100 * unit, (unit > 0.995) * 1.0, 0 * unit], axis=1)
    transform = ActionTransform.from_json(order_one_transform(column_statistics(rows)).to_json())
    columns = column_statistics(turn(rows))
    for is_whole, text in ((True, of_all), (False, of_one)):
        note = other_range(columns, transform, is_whole=is_whole)
        assert (note is None) if text is None else (note is not None and text in note), note
    assert other_range(columns, controller(4), is_whole=True) is None, "nothing is recorded"
    for damaged in ([1], {name: ["a"] * 4 for name in transform.stats or ()}, {"mean": [[1], 2]}):
        assert other_range(columns, attrs.evolve(transform, stats=damaged), is_whole=True) is None  # type: ignore[arg-type]


def test_statistics_of_many_recordings_read_evenly_spaced_ones() -> None:
    read: list[int] = []

    def rows_of(i: int) -> numpy.ndarray:
        read.append(i)
        return numpy.full((10, 2), float(i))

    everything = sampled_statistics([10] * 9, rows_of)
    assert read == list(range(9)) and (everything.num_trajectories, everything.num_transitions) == (9, 90)
    read.clear()
    some = sampled_statistics([10] * 9, rows_of, most_rows=30)
    assert read == [0, 4, 8] and some.action.max.tolist() == [8, 8]
