# SPDX-License-Identifier: Apache-2.0
"""Public LeRobot data sets of known robots, by value: columns of an action, camera, gripper, idle frames, success.

Several programs wrote DROID as LeRobot data sets, each with columns of its own. A form is what one of them writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cosmos_predict2.actions.transforms import KnownRange
from cosmos_predict2.data.lerobot.info import EMBODIMENTS, Info, Part
from imaginaire.errors import ConfigError, DataError, near

TARGETS, MOVES = True, False  # of a part: positions, or velocities and differences


@dataclass(frozen=True)
class Form:
    """The columns of one published layout."""

    action: tuple[Part, ...] = ()  # each with its end
    camera: str | None = None  # the usual one; None: data sets differ
    commands: tuple[Part, ...] = ()  # that show whether a frame is idle
    success: str | None = None  # column; None: not recorded, so the outcome is unknown


@dataclass(frozen=True)
class Robot:
    """The forms by what writes them. In all of them an action has as many numbers, and grippers at the same places."""

    action_dim: int
    forms: Mapping[str, Form]
    grippers: Mapping[int, KnownRange]
    units: Mapping[str, Mapping[int, KnownRange]] = field(default_factory=dict)  # info.json does not name: a choice


POSITION, VELOCITY = Part("action.joint_position", 0, 7, TARGETS), Part("action.joint_velocity", 0, 7, MOVES)
OPENPI = Part("actions", 0, 7, MOVES), Part("actions", 7, 8, TARGETS)
AGIBOT = {  # of grippers the state: where no command was sent, it stands among the commands, which have another unit
    "actions.joint.position": 14,
    "observation.states.effector.position": 2,
    "actions.head.position": 2,
    "actions.waist.position": 2,
}

ROBOTS = {
    "droid": Robot(
        action_dim=8,
        forms={
            "lerobot (port_droid.py)": Form(
                (Part("action", 0, 8, TARGETS),),
                "observation.images.exterior_1_left",
                commands=(VELOCITY,),
                success="is_episode_successful",
            ),
            "nvidia/Cosmos3-DROID": Form(
                (POSITION, Part("action.gripper_position", 0, 1, TARGETS)),
                "observation.image.exterior_image_1_left",
                commands=(POSITION,),  # it has no velocities
            ),
            "openpi (convert_droid_data_to_lerobot.py)": Form(OPENPI, "exterior_image_1_left", commands=OPENPI[:1]),
        },
        grippers={7: KnownRange(0.0, 1.0)},
    ),
    "agibot_world": Robot(
        action_dim=22,
        forms={
            "any4lerobot (agibot2lerobot, with grippers)": Form(
                (  # head, waist and base move the camera
                    *(Part(name, 0, width, TARGETS) for name, width in AGIBOT.items()),
                    Part("actions.robot.velocity", 0, 2, MOVES),
                ),
                "observation.images.head",
            ),
        },
        grippers={14: KnownRange(0.0, 120.0), 15: KnownRange(0.0, 120.0)},
    ),
    "so100": Robot(  # and SO-101, which has the same joints
        action_dim=6,
        forms={"lerobot (lerobot-record)": Form((Part("action", 0, 6, TARGETS),))},
        grippers={5: KnownRange(100.0, 0.0)},
        units={
            # lerobot before its change 777, and again from 0.4.4 on; joints turn by less than 360 degrees either way.
            "degrees": {k: KnownRange(-90.0, 90.0, to=-1.0, slack=1.5) for k in range(5)},
            # Between these: hundredths of half the range that the operator calibrated.
            "m100": {k: KnownRange(-100.0, 100.0, to=-1.0, slack=0.05) for k in range(5)},
        },
    ),
}
KNOWN_ROBOTS = (*EMBODIMENTS, *ROBOTS)


def choose_form(info: Info, name: str | None) -> Form:
    """The form of a robot that a data set is in; the error for another names what differs from the nearest. Without a
    robot of the table it is empty."""
    if name not in ROBOTS:
        return Form()
    found = {what: list(_differences(info, form)) for what, form in ROBOTS[name].forms.items()}
    nearest = min(found, key=lambda what: len(found[what]))
    if found[nearest]:
        raise DataError(
            f"{info.root} is no data set of '{name}' in a known form ({', '.join(found)}). The nearest is that of"
            f" {nearest}, but {'; '.join(found[nearest])}. For columns of your own use dataloader_train=lerobot_train"
            " with camera and action_keys."
        )
    return ROBOTS[name].forms[nearest]


def known_ranges(name: str | None, units: str | None) -> Mapping[int, KnownRange]:
    """The numbers of a robot's action with a known range, in their places."""
    robot = ROBOTS.get(name or "", Robot(0, {}, {}))
    if units is not None and str(units) not in robot.units:
        cure = near(str(units), robot.units) if robot.units else f" embodiment={name} has none: leave it out."
        raise ConfigError(f"units is '{units}'.{cure}")
    if robot.units and units is None:
        raise ConfigError(
            f"units is required with embodiment={name}: {' or '.join(robot.units)}. meta/info.json does not record it,"
            " and recordings of either kind look alike. python -m scripts.check_dataset shows the ranges."
        )
    return {**robot.units.get(units or "", {}), **robot.grippers}


def units_of(name: str | None, units: str | None) -> tuple[str, ...]:
    """The unit of each number of a robot's action, as `known_ranges` has it, of a gripper its open and its closed end;
    empty where it is not known."""
    known_ranges(name, units)  # raises for units that there are not
    robot = ROBOTS.get(name or "", Robot(0, {}, {}))
    ends = {k: f"{one.low:g} (open) to {one.high:g} (closed)" for k, one in robot.grippers.items()}
    known = dict.fromkeys(robot.units.get(units or "", {}), str(units)) | ends
    return tuple(known.get(k, "") for k in range(robot.action_dim))


def _differences(info: Info, form: Form) -> Iterator[str]:
    for column, width in {part.column: part.end for part in form.action}.items():  # of several parts the last
        shape = info.features.get(column, {}).get("shape")
        if column not in info.features:
            yield f"there is no column '{column}'"
        elif shape != [width]:
            yield f"'{column}' has the shape {shape}, not [{width}]"
