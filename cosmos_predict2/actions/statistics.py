# SPDX-License-Identifier: Apache-2.0
"""``dataset_statistics.json``: how large the numbers of a robot's actions are, as policies and environments need it.

    {"action": {"mean": [...], "std", "min", "max", "q01", "q99", "mask"?}, "proprio"?: {...},
     "num_transitions": n, "num_trajectories": m}

or the same once more nested, under the name of each data set.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy
from numpy.typing import ArrayLike, NDArray

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract, ActionTransform, KnownRange, with_known_ranges
from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, UserError, listed, near, raised_as

log = logging.getLogger(__name__)

Floats = NDArray[numpy.float64]

NAMES = ("mean", "std", "min", "max", "q01", "q99")
MOST_ROWS = 500_000  # that statistics are computed of: more would not change a figure, but take minutes to read
FEW_ROWS = 2_000  # that show whether actions change at all
CONSTANT = 1e-6, 1e-4  # a column that varies by less, absolutely or beside its mean, is noise around a constant
OUTLIER = 100.0  # a normalised number above it is hardly meant
FAR_OFF = 5.0  # how many times wider or narrower a usual range is not by chance: units are factors of 10 and more
NUM_NAMED = 4  # numbers of an action in a warning
SHOWN = 8  # numbers of an action in a line of the log
STATISTICS, QUANTILES = "statistics", "quantiles"  # in place of an action_transform: one that the data give
STILL = "%s: the actions never change, so a model can learn nothing from them"


def _floats(values: ArrayLike) -> Floats:
    return numpy.asarray(values, dtype=numpy.float64)


@attrs.frozen(kw_only=True, eq=False)
class ColumnStatistics:
    """Figures of each of d columns; a column whose ``mask`` is False (a gripper, mostly) is never normalised."""

    mean: Floats = attrs.field(converter=_floats)
    std: Floats = attrs.field(converter=_floats)
    min: Floats = attrs.field(converter=_floats)
    max: Floats = attrs.field(converter=_floats)
    q01: Floats = attrs.field(converter=_floats)
    q99: Floats = attrs.field(converter=_floats)
    mask: NDArray[numpy.bool_] | None = attrs.field(
        default=None, converter=lambda values: None if values is None else numpy.asarray(values, dtype=bool)
    )

    @property
    def is_scaled(self) -> NDArray[numpy.bool_]:
        return numpy.ones(self.mean.shape, dtype=bool) if self.mask is None else self.mask

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(self, name).tolist() for name in NAMES}
        return row if self.mask is None else {**row, "mask": self.mask.tolist()}


@attrs.frozen(kw_only=True, eq=False)
class DatasetStatistics:
    """Statistics of a data set's actions and states."""

    action: ColumnStatistics
    proprio: ColumnStatistics | None = None
    num_transitions: int = 0
    num_trajectories: int = 0

    def to_dict(self) -> dict[str, Any]:
        proprio = {} if self.proprio is None else {"proprio": self.proprio.to_dict()}
        counts = {"num_transitions": self.num_transitions, "num_trajectories": self.num_trajectories}
        return {"action": self.action.to_dict(), **proprio, **counts}


def column_statistics(rows: ArrayLike, mask: ArrayLike | None = None) -> ColumnStatistics:
    """Figures of the columns of [n, d]; q01 and q99 are interpolated quantiles, std that of the whole population."""
    table = _floats(rows)
    if table.ndim != 2 or not len(table) or not numpy.isfinite(table).all():
        raise DataError(f"Statistics need rows of finite numbers; there is {list(table.shape)}.")
    q01, q99 = numpy.quantile(table, [0.01, 0.99], axis=0)
    return ColumnStatistics(
        mean=table.mean(0), std=table.std(0), min=table.min(0), max=table.max(0), q01=q01, q99=q99, mask=mask
    )


def usual_statistics(rows: ArrayLike, mask: ArrayLike | None = None) -> ColumnStatistics:
    """`column_statistics` for a policy that scales and clips by q01 and q99: where these are equal, as of a gripper
    that hardly ever moves, they are min and max, or its rare values would be lost."""
    columns = column_statistics(rows, mask)
    low, high = _usual(columns)
    return attrs.evolve(columns, q01=low, q99=high)


def dataset_statistics(
    actions: Iterable[ArrayLike], proprio: Iterable[ArrayLike] | None = None, *, mask: ArrayLike | None = None
) -> DatasetStatistics:
    """Statistics over recordings, each an array [T, d]; ``mask`` as in the file, of the actions."""
    tables = [_floats(rows) for rows in actions]
    if not tables:
        raise DataError("Statistics need one recording at least.")
    return DatasetStatistics(
        action=column_statistics(numpy.concatenate(tables), mask),
        proprio=None if proprio is None else column_statistics(numpy.concatenate([_floats(rows) for rows in proprio])),
        num_transitions=sum(map(len, tables)),
        num_trajectories=len(tables),
    )


def sampled_statistics(
    lengths: Sequence[int] | NDArray[Any], rows_of: Callable[[int], ArrayLike], most_rows: int = MOST_ROWS
) -> DatasetStatistics:
    """Statistics over recordings of these lengths, where ``rows_of(i)`` reads the rows [T, d] of recording i.

    Where they have more than ``most_rows`` rows together, evenly spaced recordings with about as many are read.
    """
    share = min(1.0, most_rows / max(1, int(numpy.sum(lengths))))
    count = max(1, round(share * len(lengths)))
    chosen = numpy.linspace(0, len(lengths) - 1, count).round().astype(int)
    return dataset_statistics(rows for i in chosen.tolist() if len(rows := _floats(rows_of(i))))


def read_statistics(path: Path | str, name: str | None = None) -> DatasetStatistics:
    """The statistics of a file; ``name``: of which data set, where it has several."""
    with raised_as(DataError, f"{path} cannot be read as statistics", OSError, ValueError):
        content = foreign_json.load(Path(path))
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; statistics are an object with 'action'.")
    if "action" not in content:
        content = _nested(content, path, name)
    try:
        return DatasetStatistics(
            action=_columns(content["action"], f"{path}: action"),
            proprio=_columns(content["proprio"], f"{path}: proprio") if content.get("proprio") else None,
            num_transitions=int(content.get("num_transitions", 0)),
            num_trajectories=int(content.get("num_trajectories", 0)),
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} has numbers that cannot be read: {error}") from error


def unit_transform(columns: ColumnStatistics, kind: str = "controller", **form: Any) -> ActionTransform:
    """2 (a - q01) / (q99 - q01) - 1, not clipped, 0 in a column that never changes; with the statistics in it."""
    spread, is_scaled = columns.q99 - columns.q01, columns.is_scaled
    moves = is_scaled & (spread != 0)
    scale = numpy.where(moves, 2 / numpy.where(spread == 0, 1.0, spread), 1.0)
    offset = numpy.where(moves, -1 - columns.q01 * scale, numpy.where(is_scaled, -columns.q01, 0.0))
    return ActionTransform(kind=kind, scale=scale.tolist(), offset=offset.tolist(), stats=columns.to_dict(), **form)


def order_one_transform(columns: ColumnStatistics, kind: str = "controller", **form: Any) -> ActionTransform:
    """The transform that brings the usual values of each column (q01 to q99) to the order of 1, with the statistics.
    ``form``: accumulate, quaternion and rot6d of raw actions that have them.

    Each column is multiplied by the power of two that brings its largest usual value between 0.7 and 1.4. Zero stays
    zero, as a motion of zero means no motion; only a column of a controller whose usual values lie apart from it (joint
    targets, positions) is centred. Powers of two change no digit of a number, and stay the same where a few recordings
    are added. Where q01 and q99 are equal, as of a gripper that hardly ever moves, min and max take their place. A
    constant is only shifted.
    """
    low, high = _usual(columns)
    near_zero = 0.1 * (high - low)
    has_zero = (kind == "relative_pose") | ((low <= near_zero) & (high >= -near_zero))
    centre = numpy.where(has_zero, 0.0, (low + high) / 2)
    size = numpy.where(has_zero, numpy.maximum(numpy.abs(low), numpy.abs(high)), (high - low) / 2)
    is_constant = size <= numpy.maximum(CONSTANT[0], CONSTANT[1] * numpy.abs(centre))
    size = numpy.where(is_constant, numpy.maximum(size, 1.0), size)
    scale = numpy.exp2(-numpy.round(numpy.log2(size)))
    offset = -numpy.round(8 * centre * scale) / 8
    stats = columns.to_dict()
    return ActionTransform(kind=kind, scale=scale.tolist(), offset=offset.tolist(), stats=stats, **form)


def quantile_transform(columns: ColumnStatistics, kind: str = "controller", **form: Any) -> ActionTransform:
    """The transform that brings q01 to -1 and q99 to 1, with the statistics; nothing is clipped.

    As in `order_one_transform`, min and max stand in for equal quantiles, and a constant is only shifted.
    """
    low, high = _usual(columns)
    is_constant = high - low <= numpy.maximum(CONSTANT[0], CONSTANT[1] * numpy.abs(low))
    unit = unit_transform(attrs.evolve(columns, q01=low, q99=numpy.where(is_constant, low, high)), kind, **form)
    return attrs.evolve(unit, stats=columns.to_dict())


FITS = {STATISTICS: order_one_transform, QUANTILES: quantile_transform}


def declared_transform(given: ActionTransform | Mapping[str, Any] | str | None) -> ActionTransform | None:
    """The transform of an argument; None where it leaves that to the data."""
    return None if given is None or (isinstance(given, str) and given in FITS) else transform_of(given)


def fitted_transform(
    given: ActionTransform | None,
    statistics_of: Callable[[int], DatasetStatistics],
    *,
    what: str,
    is_logged: bool,
    fit: str = STATISTICS,
    known: Mapping[int, KnownRange] | None = None,
    contract: ActionContract = UNKNOWN,
    kind: str = "controller",
    **form: Any,
) -> ActionTransform:
    """The ``given`` transform, or else one by the statistics of the data set, which a run may replace by its own;
    numbers of a ``known`` range by that. It carries the data's ``contract``, and a fitted one the statistics.

    ``statistics_of(n)`` are those of about n rows. ``is_logged``: warn of actions that never change and of outliers,
    and log the ranges; ``what`` names the data set there.
    """
    if given is not None:
        with suppress(DataError):  # what is wrong with a recording is reported when it is read
            if is_logged and all(is_constant(statistics_of(rows).action) for rows in (FEW_ROWS, MOST_ROWS)):
                log.warning(STILL, what)
        return given if contract == UNKNOWN else given.with_contract(contract)
    statistics = statistics_of(MOST_ROWS)
    columns = statistics.action
    transform = with_known_ranges(attrs.evolve(FITS[fit](columns, kind, **form), proposed=True), known or {})
    transform = transform.with_contract(contract)
    for k, of_number in (known or {}).items():
        if problem := of_number.problem(columns.q01[k], columns.q99[k]):
            raise DataError(
                f"{what}: number {k} of the actions has other units than is stated: {problem}. Convert it, or set"
                " action_transform to a scale of your own."
            )
    if not is_logged:
        return transform
    if is_constant(columns):
        log.warning(STILL, what)
    for k, value in outliers(columns, transform).items():
        log.warning(
            "%s: number %d of the actions has a row with %g, where 98 %% lie between %g and %g: look at that"
            " recording, which the model will see times %g",
            *(what, k, value, columns.q01[k], columns.q99[k], transform.scale[k]),
        )
    ranges = [f"{low + 0:.3g}..{high + 0:.3g}" for low, high in zip(columns.q01[:SHOWN], columns.q99[:SHOWN])]
    log.info(
        "%s: actions are normalised by %s: 98 %% of %d rows of %d episodes lie in %s%s; %s",
        what,
        "their own statistics" if transform.proposed else "the known ranges of their units",
        statistics.num_transitions,
        statistics.num_trajectories,
        ", ".join(ranges),
        ", ..." if len(columns.q01) > SHOWN else "",
        transform,
    )
    return transform


def is_constant(columns: ColumnStatistics) -> bool:
    """True if no number of the actions ever changes."""
    return bool(numpy.all(columns.max - columns.min <= CONSTANT[0]))


def outliers(columns: ColumnStatistics, transform: ActionTransform) -> dict[int, float]:
    """The columns with a number that lies far from all usual ones once it is normalised, and the raw number."""
    ends = numpy.stack([columns.min, columns.max])
    normalised = numpy.abs(transform.apply(ends))
    largest = normalised.argmax(0)
    return {int(k): float(ends[largest[k], k]) for k in range(len(largest)) if normalised[largest[k], k] > OUTLIER}


def recorded_columns(transform: ActionTransform) -> ColumnStatistics | None:
    """The statistics of raw actions that a transform carries, None where it has none."""
    stats: Any = transform.stats  # a note of the weights, not validated yet
    try:
        columns = ColumnStatistics(**{name: stats[name] for name in NAMES})
    except (TypeError, ValueError, LookupError):
        return None
    is_fitting = all(getattr(columns, name).shape == (transform.dim,) for name in NAMES)
    return columns if is_fitting else None


def other_range(columns: ColumnStatistics, transform: ActionTransform, *, is_whole: bool) -> str | None:
    """A note about numbers of raw actions in another range than the transform records, by a factor or a place that
    hints at other units; None if there are none, or it records nothing.

    In less than a whole data set (``is_whole``) a number may hardly move, or do mostly what is rare in the rest.
    """
    if (theirs := recorded_columns(transform)) is None:
        return None
    if is_whole and is_constant(columns) and not is_constant(theirs):
        return "the raw actions never change, unlike those that the weights were trained with"
    (low, high), (their_low, their_high) = _usual(columns), _usual(theirs)
    noise = numpy.maximum(CONSTANT[0], CONSTANT[1] * numpy.abs(their_low))  # of a number that is constant there
    width, their_width = high - low, numpy.maximum(their_high - their_low, noise)
    is_far = (low < theirs.min - their_width) | (high > theirs.max + their_width)
    if is_whole:
        is_narrower = (width * FAR_OFF < their_width) & (width > CONSTANT[0])  # a constant number is not in use here
        is_far |= (width > FAR_OFF * their_width) | is_narrower
    far_off = numpy.flatnonzero(is_far).tolist()
    if not far_off:
        return None
    named = [
        f"number {k} in {low[k]:.3g}..{high[k]:.3g} (the weights: {their_low[k]:.3g}..{their_high[k]:.3g})"
        for k in far_off
    ]
    return (
        "the raw actions lie in other ranges than those that the weights were trained with:"
        f" {listed(named, NUM_NAMED)}. Are they in other units (metres for millimetres, degrees for radians)? Convert"
        " them to the units of the weights' data, which the scale of the weights was made for"
    )


def _usual(columns: ColumnStatistics) -> tuple[Floats, Floats]:
    """Bounds of the usual values of each column: of all of them if q01 and q99 are equal."""
    is_rare = columns.q01 == columns.q99
    return numpy.where(is_rare, columns.min, columns.q01), numpy.where(is_rare, columns.max, columns.q99)


def column_lines(columns: ColumnStatistics, names: Sequence[str] = ()) -> list[str]:
    """A table with a line for each column: its name (or number), minimum, q01, mean, q99, maximum, deviation."""
    shown = ("min", "q01", "mean", "q99", "max", "std")
    labels = [*names, *(str(k) for k in range(len(names), len(columns.mean)))]
    width = max(6, *map(len, labels))
    rows = [" ".join(f"{getattr(columns, name)[k]:>10.4g}" for name in shown) for k in range(len(columns.mean))]
    head = " ".join(f"{name:>10}" for name in shown)
    return [f"{'number':<{width}} {head}", *(f"{label:<{width}} {row}" for label, row in zip(labels, rows))]


def transform_of(given: ActionTransform | Mapping[str, Any] | str) -> ActionTransform:
    """The transform of an argument: itself, its values, or kind and ``statistics``, the file whose quantiles q01 and
    q99 become -1 and 1 (``statistics_name``: of which data set in it)."""
    if isinstance(given, ActionTransform):
        return given
    if isinstance(given, str):
        raise ConfigError(
            f"action_transform is '{given}'; it is {' or '.join(FITS)}, or kind and scale as in a YAML mapping."
        )
    if "statistics" not in given:
        return ActionTransform.from_dict(given)
    known = ("kind", "statistics", "statistics_name")
    if unknown := [str(key) for key in given if key not in known]:
        raise ConfigError(
            f"action_transform has '{unknown[0]}' beside statistics, which determine scale and offset. Known with"
            f" statistics: {', '.join(known)}."
        )
    statistics = read_statistics(given["statistics"], given.get("statistics_name"))
    return unit_transform(statistics.action, str(given.get("kind", "controller")))


def controller_transform(given: ActionTransform | Mapping[str, Any] | str | None, cure: str) -> ActionTransform | None:
    """The transform of an argument for actions of a controller; None where the data are to give it."""
    transform = declared_transform(given)
    if transform is not None and transform.kind != "controller":
        raise ConfigError(f"action_transform.kind is '{transform.kind}', but the data hold controller actions. {cure}")
    return transform


def _nested(content: Mapping[str, Any], path: Path | str, name: str | None) -> Mapping[str, Any]:
    names = [key for key, value in content.items() if isinstance(value, dict) and "action" in value]
    if not names:
        raise DataError(f"{path} has no 'action', neither at its top nor under a name; it has {', '.join(content)}.")
    if name is None and len(names) > 1:
        raise DataError(f"{path} has the statistics of {len(names)} data sets: name one of {', '.join(names)}.")
    if name is not None and name not in names:
        raise DataError(f"{path} has no statistics of '{name}'.{near(name, names)}")
    return content[name or names[0]]


def refuse_impossible(row: Mapping[str, Any], where: str, error: type[UserError] = DataError) -> None:
    """Raise where the figures of a file cannot be of any data: not finite, q01 above q99, min above max, std below 0.

    Actions that are scaled by such figures are NaN, or go the other way.
    """
    try:
        found = {name: _floats(row[name]) for name in NAMES if name in row}
    except (TypeError, ValueError) as fault:
        raise error(f"{where}: the statistics are not lists of numbers: {fault}.") from fault
    for name, values in found.items():
        if values.ndim != 1 or not numpy.isfinite(values).all():
            raise error(f"{where}: {name} is {row[name]}; one finite number for each column is needed.")
    for low, high in (("min", "max"), ("q01", "q99")):
        if low in found and high in found and found[low].shape == found[high].shape:
            for i in numpy.flatnonzero(found[low] > found[high])[:1]:
                raise error(f"{where}: {low}[{i}]={found[low][i]:g} is above {high}[{i}]={found[high][i]:g}.")
    if (found.get("std", _floats([])) < 0).any():
        raise error(f"{where}: std is {row['std']}; no spread is below 0.")


def _columns(row: Any, where: str) -> ColumnStatistics:
    if not isinstance(row, dict) or (absent := [name for name in NAMES if name not in row]):
        what = ", ".join(absent) if isinstance(row, dict) else "an object with " + ", ".join(NAMES)
        raise DataError(f"{where} lacks {what}.")
    refuse_impossible(row, where)
    columns = ColumnStatistics(**{name: row[name] for name in NAMES}, mask=row.get("mask"))
    sizes = {name: getattr(columns, name).shape for name in NAMES}
    if columns.mask is not None:
        sizes["mask"] = columns.mask.shape
    if len(set(sizes.values())) > 1 or columns.mean.ndim != 1:
        raise DataError(
            f"{where}: the columns differ in number: {', '.join(f'{k} {list(v)}' for k, v in sizes.items())}."
        )
    return columns
