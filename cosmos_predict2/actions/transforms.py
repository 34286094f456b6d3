# SPDX-License-Identifier: Apache-2.0
"""Actions as a world model sees them: from poses or from a controller, scaled, and back again; and their contract.

All in NumPy float64; data sets store float32. A pose is [x, y, z, roll, pitch, yaw] in metres and radians with
R = Rz(yaw) Ry(pitch) Rx(roll), a gripper state 0 (open) to 1 (closed). N poses give N - 1 actions: action k leads from
frame k to frame k + 1, and its gripper number is the state of frame k + 1. Errors are ``DataError``: the caller adds
which file it was.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import attrs
import numpy
from numpy.typing import ArrayLike, NDArray

from cosmos_predict2.actions.rotations import (
    check_rot6d,
    euler_to_matrix,
    matrix_to_euler,
    matrix_to_quaternion,
    matrix_to_rot6d,
)
from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, near, raised_as

Floats = NDArray[numpy.float64]
Accumulate = str | int | None

# Data sets, inference and environments share it: published action-conditioned weights were trained with it.
ACTION_SCALE = 20.0
KINDS = ("relative_pose", "controller")
EULER = 3  # numbers of a rotation as angles
COMBINATIONS = ("sum", "first", "last")
SAME_RATE = 0.02  # a file's rate may be rounded: 29.97 and 30


# ---- the transform, as a model's settings keep it --------------------------------------------------------------------


@dataclass(frozen=True)
class ActionContract:
    """The contract of recorded actions and states: names of their numbers, in order, their rate and units. Empty and
    None: not recorded, which fits everything.

    What is trained on recordings keeps it as plain data: a world model in its action transform's ``stats``, starts
    beside the range of actions, a clone in its card. Where two of them meet, another order or rate is an error.
    """

    names: tuple[str, ...] = ()
    rate: float | None = None  # actions per second
    state_names: tuple[str, ...] = ()  # of the robot's state, where it is read
    units: tuple[str, ...] = ()  # of each number of an action, of a gripper its ends; empty: not known
    # Not compared: by either of them the numbers mean the same.
    idle: str = ""  # frames that windows of training do not begin with
    clip_actions: bool | str = False  # of the environment that a policy learnt in: to [-1, 1], or "recorded" ranges

    @classmethod
    def read(cls, record: Any) -> "ActionContract":
        """The contract that a record has; older ones and those of others have none."""
        if not isinstance(record, Mapping):
            return cls()
        rate = record.get("rate")
        names, states, units = (tuple(map(str, record.get(key) or ())) for key in ("names", "state_names", "units"))
        clips = record.get("clip_actions")
        return cls(
            names,
            float(rate) if isinstance(rate, int | float) else None,
            states,
            units,
            str(record.get("idle") or ""),
            clips if isinstance(clips, bool | str) else False,
        )

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items() if value}

    def without_state(self) -> "ActionContract":
        """The contract of the actions alone, for what does not read the robot's state."""
        return replace(self, state_names=())

    def require(self, other: "ActionContract", what: str, and_what: str, cure: str) -> None:
        """Raise where ``what``, of this contract, takes other actions or another state than ``and_what`` has."""
        if problem := self.problem(other, what, and_what):
            raise ConfigError(f"{problem}: {cure}")

    def problem(self, other: "ActionContract", what: str, and_what: str) -> str | None:
        """Say how ``what``, of this contract, and ``and_what`` differ; null: not at all, as far as is recorded."""
        both = ("actions", self.names, other.names), ("robot's state", self.state_names, other.state_names)
        for kind, ours, theirs in both:
            if ours and theirs and _are_others(ours, theirs):
                return f"{what} takes the {kind} ({', '.join(ours)}), but {and_what} ({', '.join(theirs)})"
        for k, (own, found) in enumerate(zip(self.units, other.units)):
            if own and found and own != found:
                name = self.names[k] if k < len(self.names) else f"number {k}"
                return f"{what} takes {name} in {own}, but {and_what} {found}"
        if self.rate and other.rate and abs(self.rate / other.rate - 1) > SAME_RATE:
            return f"{what} takes {self.rate:g} actions per second, but {and_what} {other.rate:g}"
        return None


UNKNOWN = ActionContract()


def _are_others(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """True for names of other numbers; a place in a part, arm[1], may have a name of its own in another record."""
    both = zip(ours, theirs)
    return len(ours) != len(theirs) or any(a != b and a.endswith("]") == b.endswith("]") for a, b in both)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"action_transform: {values!r} is no list of numbers, one for each of an action.") from error


@attrs.frozen(kw_only=True)
class ActionTransform:
    """Transform of raw actions into the numbers that a model sees: a = raw * scale + offset, for d numbers.

    ``relative_pose``: raw actions are pose differences in the gripper's own frame, see `pose_differences`;
    ``controller``: the commands of the robot's controller. Weights fit one transform only, so it is kept with them.
    """

    kind: str
    scale: tuple[float, ...] = attrs.field(converter=_numbers)
    offset: tuple[float, ...] = attrs.field(default=(), converter=_numbers)  # empty: zeros
    accumulate: Accumulate = None  # the pose that differences are taken from, see pose_differences
    quaternion: bool = False
    rot6d: str | None = None  # in place of a quaternion: the first two "rows" or "columns" of the rotation's matrix
    # What is known of the raw actions, as dataset_statistics.json has it: a note, which two transforms may differ in.
    stats: dict[str, Any] | None = attrs.field(default=None, eq=False)
    # The default of a data set: a run whose weights or config have another keeps theirs.
    proposed: bool = attrs.field(default=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if not any(self.offset):
            object.__setattr__(self, "offset", ())
        if self.kind not in KINDS:
            raise ConfigError(f"action_transform.kind is '{self.kind}'.{near(str(self.kind), KINDS)}")
        if not self.scale or not numpy.isfinite(self.scale).all() or 0.0 in self.scale:
            raise ConfigError(f"action_transform.scale is {self.scale}; it needs a number other than 0 per dimension.")
        if self.offset and (len(self.offset) != len(self.scale) or not numpy.isfinite(self.offset).all()):
            raise ConfigError(
                f"action_transform.offset has {len(self.offset)} numbers {self.offset}, but scale {len(self.scale)}."
            )
        check_accumulate(self.accumulate)
        turn = rotation_size(self.quaternion, self.rot6d)
        if self.kind == "controller" and (turn != EULER or self.accumulate is not None):
            raise ConfigError("action_transform: quaternion, rot6d and accumulate belong to kind 'relative_pose' only.")
        if self.kind == "relative_pose" and len(self.scale) != 4 + turn:
            raise ConfigError(
                f"action_transform.scale has {len(self.scale)} numbers; a relative pose with gripper has"
                f" {4 + turn}{self._rotation}."
            )

    @property
    def dim(self) -> int:
        """Numbers per action."""
        return len(self.scale)

    @property
    def raw_form(self) -> tuple[str, int, Accumulate, str | None]:
        """Form of the raw actions: transforms that share it differ in factors and summands alone."""
        return self.kind, self.dim, self.accumulate, self.rot6d

    @property
    def _rotation(self) -> str:
        return ", quaternion" if self.quaternion else f", rot6d of {self.rot6d}" if self.rot6d else ""

    @property
    def contract(self) -> ActionContract:
        """The contract of the raw actions, where ``stats`` have it."""
        return ActionContract.read(self.stats)

    def with_contract(self, contract: ActionContract) -> "ActionTransform":
        """The same for raw actions of this contract, whatever ``stats`` have of those that it was made for."""
        stats = {key: value for key, value in (self.stats or {}).items() if key not in asdict(contract)}
        return attrs.evolve(self, stats={**stats, **contract.to_dict()} or None)

    def yields_to(self, own: "ActionTransform") -> bool:
        """True if a run with its ``own`` transform takes actions by this one: the same, or a proposal for such ones."""
        return self == own or (self.proposed and self.raw_form == own.raw_form)

    def apply(self, raw: ArrayLike) -> Floats:
        """The model's input for raw actions [..., d]."""
        return self._checked(raw) * numpy.asarray(self.scale) + self._offset()

    def undo(self, actions: ArrayLike) -> Floats:
        """Raw actions of what the model sees."""
        return (self._checked(actions) - self._offset()) / numpy.asarray(self.scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON or YAML values."""
        row = attrs.asdict(self)
        for key in ("stats", "proposed", "rot6d"):
            if not row[key]:
                del row[key]
        return {**row, "scale": list(self.scale), "offset": list(self.offset)}

    def to_json(self) -> str:
        """JSON in one line, as samples and checkpoints carry it."""
        return self._json

    @functools.cached_property  # each sample carries it
    def _json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def __str__(self) -> str:
        """Short, for messages: which kind, and what is not as usual."""
        scale = f"{self.scale[0]:g}" if len(set(self.scale)) == 1 else _short(self.scale)
        rest = f", offset {_short(self.offset)}" if self.offset else ""
        rest += f", accumulate {self.accumulate}" if self.accumulate is not None else ""
        return f"{self.kind} of {self.dim} numbers, scale {scale}{rest}{self._rotation}"

    @classmethod
    def from_json(cls, text: str) -> "ActionTransform":
        with raised_as(ConfigError, "action_transform is no JSON", ValueError):
            row = foreign_json.loads(text)
        if not isinstance(row, Mapping):
            raise ConfigError(f"action_transform is {row!r}; an object with kind and scale is expected.")
        return cls.from_dict(row)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "ActionTransform":
        known = [field.name for field in attrs.fields(cls)]
        if unknown := [key for key in row if key not in known]:
            raise ConfigError(f"action_transform has no '{unknown[0]}'.{near(str(unknown[0]), known)}")
        if absent := [key for key in ("kind", "scale") if key not in row]:
            raise ConfigError(f"action_transform lacks {' and '.join(absent)}; it has {', '.join(row) or 'nothing'}.")
        return cls(**row)

    def _offset(self) -> Floats:
        return numpy.asarray(self.offset or (0.0,) * self.dim)

    def _checked(self, values: ArrayLike) -> Floats:
        array = numpy.asarray(values, dtype=numpy.float64)
        if array.ndim == 0 or array.shape[-1] != self.dim:
            raise DataError(f"Actions have the shape {list(array.shape)}, but the transform is of {self.dim} numbers.")
        return array


def _short(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value + 0.0:g}" for value in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def relative_pose(
    scale: float = ACTION_SCALE,
    gripper_scale: float = 1.0,
    *,
    accumulate: Accumulate = None,
    quaternion: bool = False,
    rot6d: str | None = None,
) -> ActionTransform:
    """The transform of pose differences: position and angles scaled, a quaternion or rot6d not, the gripper apart."""
    turn = rotation_size(quaternion, rot6d)
    numbers = (scale,) * 3 + (scale if turn == EULER else 1.0,) * turn + (gripper_scale,)
    form: dict[str, Any] = dict(accumulate=accumulate, quaternion=quaternion, rot6d=rot6d)
    return ActionTransform(kind="relative_pose", scale=numbers, **form)


def rotation_size(quaternion: bool, rot6d: str | None) -> int:
    """Numbers of a rotation in this form."""
    if rot6d is None:
        return 4 if quaternion else EULER
    check_rot6d(rot6d)
    if quaternion:
        raise ConfigError(f"quaternion=True and rot6d={rot6d}: a rotation has one form, set one of them.")
    return 6


def controller(dim: int = 7, scale: float = ACTION_SCALE) -> ActionTransform:
    """The transform of controller actions: every number scaled alike, the gripper's too."""
    return ActionTransform(kind="controller", scale=(scale,) * dim)


# ---- known ranges ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownRange:
    """A number of an action whose raw range is known before any recording is read: a gripper, a joint in a stated unit.
    The raw value ``low`` becomes ``to`` for a model, and ``high`` 1: of a gripper the open and the closed one.

    Usual values that lie beyond either end by more than ``slack`` of the range contradict it.
    """

    low: float
    high: float
    to: float = 0.0
    slack: float = 0.1

    def problem(self, q01: float, q99: float) -> str | None:
        """Say what contradicts the range if 98 % of the raw values lie between these; null: nothing."""
        least, most = sorted((self.low, self.high))
        slack = self.slack * (most - least)
        is_inside = q01 >= least - slack and q99 <= most + slack
        return None if is_inside else f"98 % lie in {q01:.4g}..{q99:.4g}, but {least:g} to {most:g} is the range"


def with_known_ranges(transform: ActionTransform, known: Mapping[int, KnownRange]) -> ActionTransform:
    """The transform with these numbers by their ranges. If that is all of them it is no proposal any more, so that
    weights of other units are refused."""
    scale, offset = list(transform.scale), list(transform.offset or (0.0,) * transform.dim)
    for k, of_number in known.items():
        scale[k] = (1.0 - of_number.to) / (of_number.high - of_number.low)
        offset[k] = of_number.to - of_number.low * scale[k]
    is_open = transform.proposed and len(known) < transform.dim
    return attrs.evolve(transform, scale=scale, offset=offset, proposed=is_open)


# ---- actions ---------------------------------------------------------------------------------------------------------


def check_accumulate(accumulate: Accumulate) -> None:
    """Raise unless it is None, "window" or a number of frames."""
    is_number = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1
    if not (accumulate is None or accumulate == "window" or is_number):
        raise ConfigError(
            f"accumulate is {accumulate!r}. None: differences to the frame before; 'window': to the first frame; a"
            " number such as 4: to a base that is renewed every so many frames."
        )


def base_frames(num_frames: int, accumulate: Accumulate = None) -> NDArray[numpy.int64]:
    """The frame that each of the ``num_frames - 1`` actions is relative to."""
    check_accumulate(accumulate)
    before = numpy.arange(max(0, num_frames - 1))
    if accumulate is None:
        return before
    return numpy.zeros_like(before) if accumulate == "window" else before - before % int(accumulate)


def pose_differences(
    states: ArrayLike,
    gripper: ArrayLike,
    *,
    accumulate: Accumulate = None,
    quaternion: bool = False,
    rot6d: str | None = None,
) -> Floats:
    """Unscaled actions: where each pose lies and how it is turned, seen from its base, and the gripper state there.

    The base is the frame before (None), the first one ("window"), or one that moves up every n frames (such as 4).
    Columns of ``states`` beyond the sixth are not looked at.
    """
    poses, closed = check_poses(states, gripper)
    if len(poses) < 2:
        return numpy.empty((0, 4 + rotation_size(quaternion, rot6d)))
    rotation = euler_to_matrix(poses[:, 3:])
    base = base_frames(len(poses), accumulate)
    to_base = numpy.swapaxes(rotation[base], -1, -2)
    moved = (to_base @ (poses[1:, :3] - poses[base, :3])[:, :, None])[:, :, 0]
    turned = to_base @ rotation[1:]
    if rot6d is not None:
        turn = matrix_to_rot6d(turned, rot6d)
    else:
        turn = matrix_to_quaternion(turned) if quaternion else matrix_to_euler(turned)
    return numpy.concatenate([moved, turn, closed[1:, None]], axis=1)


def actions_from_field(
    field: ArrayLike, gripper: ArrayLike, *, scale: float = ACTION_SCALE, gripper_scale: float = 1.0
) -> Floats:
    """Actions [N - 1, 7] of the recorded ``action`` rows [N - 1, 6 or more] and the gripper states of N frames.

    Public inference code feeds these where training took pose differences: the two agree as far as the recording does.
    """
    rows, closed = _table(field, "action", 6), _vector(gripper)
    if len(closed) != len(rows) + 1:
        raise DataError(
            f"{len(rows)} actions need the gripper states of {len(rows) + 1} frames; there are {len(closed)}."
        )
    return relative_pose(scale, gripper_scale).apply(numpy.concatenate([rows[:, :6], closed[1:, None]], axis=1))


def summed_actions(rows: ArrayLike, frames: ArrayLike) -> Floats:
    """Controller actions [F - 1, d] that lead along F frames, of rows [T, d] of which row t leads from frame t on.

    Between frames that are not neighbours small moves and turns add up; the last number, the gripper's command, is
    that of the last row in between.
    """
    table, places = _table(rows, "actions", 1), numpy.asarray(frames)
    if len(places) and places[-1] > len(table):
        raise DataError(f"{len(table)} actions do not lead to frame {places[-1]}.")
    sums = numpy.concatenate([numpy.zeros((1, table.shape[1])), numpy.cumsum(table, axis=0)])
    moved = numpy.diff(sums[places], axis=0)
    is_next = numpy.diff(places) == 1
    moved[is_next] = table[places[:-1][is_next]]  # exactly, without the rounding of a sum
    moved[:, -1] = table[places[1:] - 1, -1]
    return moved


def combined_actions(rows: Floats, frames: NDArray[numpy.int64], how: str | Sequence[str]) -> Floats:
    """Actions [F - 1, d] that lead along F frames, of rows [T, d] of which row t leads from frame t on: moves add up
    ("sum", as `summed_actions` does it); of absolute targets one is taken, the "last" before the next frame or the
    "first". A list has a word for each number."""
    if how == "sum":
        return summed_actions(rows, frames)
    if isinstance(how, str):
        return rows[frames[:-1]] if how == "first" else rows[frames[1:] - 1]
    if len(how) != rows.shape[1]:
        raise ConfigError(f"combine_actions has {len(how)} words, but an action {rows.shape[1]} numbers.")
    no_gripper = numpy.pad(rows, ((0, 0), (0, 1)))
    by_word = {word: combined_actions(no_gripper, frames, word) for word in set(how)}
    return numpy.stack([by_word[word][:, k] for k, word in enumerate(how)], axis=1)


def check_poses(states: ArrayLike, gripper: ArrayLike) -> tuple[Floats, Floats]:
    """Poses [N, 6] and gripper states [N] as arrays, after checking that they are finite and go together."""
    poses, closed = _table(states, "state", 6)[:, :6], _vector(gripper)
    if len(closed) != len(poses):
        raise DataError(f"There are {len(poses)} states, but {len(closed)} gripper states.")
    return poses, closed


def _table(values: ArrayLike, what: str, least: int) -> Floats:
    """Rows of at least so many finite numbers."""
    with raised_as(DataError, f"'{what}' is not rows of equally many numbers", TypeError, ValueError):
        table = numpy.asarray(values, dtype=numpy.float64)
    if table.size == 0:
        return numpy.empty((0, least))
    if table.ndim != 2 or table.shape[1] < least:
        raise DataError(f"'{what}' has the shape {list(table.shape)}; it needs rows of {least} numbers or more.")
    if not numpy.isfinite(table).all():
        row = int(numpy.argmax(~numpy.isfinite(table).all(axis=1)))
        raise DataError(f"'{what}' has a number that is not finite in row {row}.")
    return table


def _vector(values: ArrayLike) -> Floats:
    with raised_as(DataError, "The gripper states are not numbers", TypeError, ValueError):
        vector = numpy.asarray(values, dtype=numpy.float64)
    if vector.ndim == 2 and vector.shape[1] == 1:
        vector = vector[:, 0]
    if vector.ndim != 1:
        raise DataError(f"The gripper states have the shape {list(vector.shape)}; one number per frame is needed.")
    if not (is_finite := numpy.isfinite(vector)).all():
        row = int(numpy.argmin(is_finite))
        raise DataError(f"The gripper states have {vector[row]} in row {row}; finite numbers are needed.")
    return vector
