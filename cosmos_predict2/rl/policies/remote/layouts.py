# SPDX-License-Identifier: Apache-2.0
"""Names by which requests of openpi and GR00T hold what a policy sees, and translation to our observations and back.

Axes before those of a picture or a part of the state are time, of which the last step counts, and before it the
environments.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.rl.interfaces import Observation, observation_of
from imaginaire.errors import ConfigError, DataError, first_line, near

_FORMS = "pictures=[A, B] state={PART: NUMBERS} text=NAME actions={PART: NUMBERS} size=[ROWS, COLUMNS]"


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _counts(parts: Mapping[str, int]) -> dict[str, int]:
    return {str(name): int(count) for name, count in parts.items()}


@attrs.frozen
class Layout:
    """``pictures`` begins with the one that is full_image, wrist_image are the others. ``state`` and ``actions`` name
    parts, in order, and how many numbers each has; openpi's actions are one part.

    A name is that of an entry, or of an entry within a map, joined by "/" (openpi) or "." (GR00T).
    """

    pictures: tuple[str, ...] = attrs.field(converter=_names, validator=attrs.validators.min_len(1))
    state: Mapping[str, int] = attrs.field(converter=_counts)
    text: str
    actions: Mapping[str, int] = attrs.field(converter=_counts)
    size: tuple[int, ...] = attrs.field(default=(), converter=tuple[int, ...])  # of pictures, where others are refused
    joint: str = "/"
    is_nested: bool = False  # openpi: names with "/" are entries within maps
    is_channels_first: bool = False


_POSE = dict.fromkeys(("x", "y", "z", "roll", "pitch", "yaw"), 1)
_ARM = {"single_arm": 5, "gripper": 1}
_LIBERO_OF_GR00T = "annotation.human.action.task_description"
LAYOUTS = {
    "openpi": {
        "libero": Layout(
            ["observation/image", "observation/wrist_image"], {"observation/state": 8}, "prompt", {"actions": 7}
        ),
        "droid": Layout(
            ["observation/exterior_image_1_left", "observation/wrist_image_left"],
            {"observation/joint_position": 7, "observation/gripper_position": 1},
            "prompt",
            {"actions": 8},
        ),
        "aloha": Layout(
            ["images/cam_high", "images/cam_left_wrist", "images/cam_right_wrist"],
            {"state": 14},
            "prompt",
            {"actions": 14},
            is_nested=True,
            is_channels_first=True,
        ),
    },
    "gr00t": {
        "libero": Layout(
            ["image", "wrist_image"], {**_POSE, "gripper": 2}, _LIBERO_OF_GR00T, {**_POSE, "gripper": 1}, joint="."
        ),
        "so100": Layout(["front", "wrist"], _ARM, "annotation.human.task_description", _ARM, joint="."),
    },
}


def layout_of(protocol: str, name: str | None, fields: Mapping[str, Any], stated: Layout | None = None) -> Layout:
    """The layout of this name, else the one that a server ``stated``, else libero's; with others of its fields."""
    known = LAYOUTS[protocol]
    if name is not None and name not in known:
        raise ConfigError(f"{protocol} has no layout '{name}'.{near(name, known)}")
    try:
        found = attrs.evolve(stated or known[name or "libero"], **fields)
    except (TypeError, ValueError, AttributeError) as error:
        given = " ".join(f"{key}={value}" for key, value in fields.items())
        raise ConfigError(f"No layout has {given} ({first_line(error)}). Expected {_FORMS}.") from error
    if protocol == "openpi":
        return found

    def full(modality: str, names: Iterable[str]) -> list[str]:  # "video.front" for "front"
        return [name if name.startswith(f"{modality}.") else f"{modality}.{name}" for name in names]

    state = dict(zip(full("state", found.state), found.state.values()))
    actions = dict(zip(full("action", found.actions), found.actions.values()))
    return attrs.evolve(found, pictures=full("video", found.pictures), state=state, actions=actions)


# --- requests, as a server reads them


def observed(layout: Layout, request: Any, num_views: int = 1, *, reads_state: bool = True) -> Observation:
    """The observation of a request, for E environments. Of the pictures ``num_views`` have to be there."""
    entries = _entries(request, layout.joint)
    names = [name for i, name in enumerate(layout.pictures) if i < num_views or name in entries]
    views = [_picture(name, _entry(entries, name), layout.size) for name in names]
    if odd := [name for name, view in zip(names[2:], views[2:]) if view.shape != views[1].shape]:
        raise DataError(f"'{odd[0]}' has another size than '{names[1]}': pictures beside the first are of one size.")
    state = [_numbers(name, _entry(entries, name), count) for name, count in layout.state.items() if reads_state]
    sentences = _sentences(layout.text, _entry(entries, layout.text))
    if len(lengths := {len(sentences), *map(len, (*views, *state))}) > 1:
        raise DataError(f"The request is of {' and '.join(map(str, sorted(lengths)))} environments at once.")
    return observation_of(views, torch.cat(state, dim=1) if state else None, sentences)


def _entries(request: Any, joint: str) -> dict[str, Any]:
    """The entries of a map and of the maps in it, by joined names."""
    if not isinstance(request, Mapping):
        raise DataError(f"A request is a map of names, not {_form(request)}.")
    found: dict[str, Any] = {}
    for name, value in request.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{joint}{inner}".removeprefix("language."): one for inner, one in value.items()}
        else:
            found[str(name)] = value
    return found


def _entry(entries: Mapping[str, Any], name: str) -> Any:
    if name not in entries:
        raise DataError(f"The request has no '{name}'.{near(name, entries)}")
    return entries[name]


def _picture(name: str, value: Any, size: tuple[int, ...]) -> Tensor:
    """uint8 [E, H, W, 3]; of floats in [0, 1], and of channels before rows, too."""
    array = _of_last_step(numpy.asarray(value), 3)
    if array.ndim == 4 and array.shape[1] == 3:  # as openpi decides it
        array = array.transpose(0, 2, 3, 1)
    is_float = array.dtype.kind == "f"
    is_inside = not is_float or bool(((array >= 0) & (array <= 1)).all())
    if array.ndim != 4 or array.shape[-1] != 3 or not array.size or not (is_float or array.dtype == numpy.uint8):
        raise DataError(f"'{name}' is {_form(value)}; a picture is uint8 [rows, columns, 3], or floats in [0, 1].")
    if not is_inside:
        raise DataError(f"'{name}' has floats outside of [0, 1]: send uint8.")
    if size and array.shape[1:3] != size:
        raise DataError(f"'{name}' has {_by(array.shape[1:3])} pixels; the policy takes {_by(size)}.")
    return torch.from_numpy((255 * array if is_float else array).astype(numpy.uint8))


def _numbers(name: str, value: Any, count: int) -> Tensor:
    """float32 [E, count]; a single number may have no axis."""
    array = _of_last_step(numpy.atleast_1d(value), 1)
    if array.dtype.kind not in "biuf" or array.shape[1:] != (count,) or not numpy.isfinite(array).all():
        raise DataError(f"'{name}' is {_form(value)}; {count} finite numbers are expected.")
    return torch.from_numpy(array.astype(numpy.float32))


def _of_last_step(array: NDArray[Any], num_axes: int) -> NDArray[Any]:
    """[E, ...] of [...], of [T, ...] and of [E, T, ...], where ... are so many axes."""
    if array.ndim == num_axes + 2 and array.shape[1]:
        return array[:, -1]
    return array[-1:] if array.ndim == num_axes + 1 else array[None]


def _sentences(name: str, value: Any) -> list[str]:
    """E sentences, of a list of them or of lists of them in time, or the only one."""
    values = value if isinstance(value, list) else [value]
    rows = [row[-1] if isinstance(row, list) and row else row for row in values]
    found = [row.decode(errors="replace") if isinstance(row, bytes) else row for row in rows]
    if not found or not all(isinstance(row, str) for row in found):
        raise DataError(f"'{name}' is {_form(value)}; a sentence is expected.")
    return found


def _form(value: Any) -> str:
    is_array = isinstance(value, numpy.ndarray)
    return f"{value.dtype} {list(value.shape)}" if is_array else f"a {type(value).__name__}"


def _by(size: Iterable[int]) -> str:
    return "x".join(map(str, size))


# --- requests, as a client writes them


def shown(
    layout: Layout, observation: Observation, row: int, *, fills_state: bool = False
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Pictures [H, W, 3] and float32 parts of the state of one environment, by their names."""
    views = [observation["full_image"][row], *observation["wrist_image"][row]]
    pictures = {name: view.cpu().numpy() for name, view in zip(layout.pictures, views)}
    for name, picture in pictures.items():
        if layout.size and picture.shape[:2] != layout.size:
            sizes = f"{_by(picture.shape[:2])} pixels, the policy takes {_by(layout.size)}"
            raise ConfigError(f"The picture for '{name}' has {sizes}: --image_size.")
    state_S, count = observation["state"][row].float().cpu(), sum(layout.state.values())
    if fills_state and not len(state_S):
        state_S = torch.zeros(count)
    if layout.state and len(state_S) != count:
        parts = ", ".join(f"{name} {count}" for name, count in layout.state.items())
        raise ConfigError(
            f"The environment's state has {len(state_S)} numbers, the policy takes {count} ({parts}). Give --options"
            " state={PART: NUMBERS}, or zero_state=true for zeros where an environment shows no state."
        )
    parts_of = state_S.split([*layout.state.values()]) if layout.state else ()
    return pictures, {name: part.numpy() for name, part in zip(layout.state, parts_of)}
