# SPDX-License-Identifier: Apache-2.0
"""Small recordings of made-up robots, clean or with one classic fault, as LeRobot data sets or as arrays."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_predict2.data.lerobot.info import read_info
from cosmos_predict2.data.lerobot.writer import VIDEO_PATH, Recording, Writer
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.tools.check.episodes import CheckedEpisode, small_grey
from tests.data.sources_lerobot import change_json

EPISODES, FRAMES, PIXELS = 16, 30, 48
TOP, WRIST = "observation.images.top", "observation.images.wrist"
ACTION, STATE, SUCCESS = "action", "observation.state", "next.success"
ODD = slice(0, EPISODES // 3)  # episodes with a fault that others have not


@dataclass
class RobotSet:
    """Episodes by column [F, d], pictures uint8 [F, H, W, 3] by camera."""

    columns: list[dict[str, Any]]
    videos: list[dict[str, Any]]
    fps: float = 10
    names: dict[str, list[str]] = field(default_factory=dict)


def _picture(place: Any, target: Any, *, is_lab: bool, size: float = 4.0) -> Any:
    """A dark hand and a green target on a plain table, or in a lab that looks different from each side."""
    y, x = np.mgrid[:PIXELS, :PIXELS]
    picture = np.full((PIXELS, PIXELS, 3), 230, np.uint8)
    if is_lab:
        picture[: PIXELS // 4, : PIXELS // 2] = 120
        picture[:, PIXELS - 6 :] = 170
    picture[abs(x - target[0]) + abs(y - target[1]) < 5] = 60, 160, 60
    picture[(x - place[0]) ** 2 + (y - place[1]) ** 2 < size**2] = 30, 30, 60
    return picture


Frame = tuple[Any, Any, dict[str, Any]]  # action, state (None: there is none) and pictures by camera


def _recorded(
    play: Callable[[Any], Iterator[Frame]], seed: int, num: int = EPISODES, *, last: int = 3, **more: Any
) -> RobotSet:
    """Episodes that are played one after the other from one stream of draws; the last frames show success."""
    rng, made = np.random.default_rng(seed), RobotSet([], [], **more)
    for _ in range(num):
        actions, states, pictures = zip(*play(rng))
        success = np.arange(FRAMES) >= FRAMES - last
        found = {ACTION: np.array(actions, np.float32), SUCCESS: success.astype(np.float32)}
        made.columns.append(found if states[0] is None else {**found, STATE: np.array(states, np.float32)})
        made.videos.append({camera: np.stack([one[camera] for one in pictures]) for camera in pictures[0]})
    return made


def delta_gripper(
    seed: int = 0, *, lab: bool = True, pause: int = 0, fps: float = 10, quaternion: bool = False
) -> RobotSet:
    """Motions of a hand, x, y, z and gripper (1 closes), with its state; the states are metres and a width."""

    def play(rng: Any) -> Iterator[Frame]:
        place, target = rng.uniform(-0.5, 0.5, 3), rng.uniform(-0.5, 0.5, 3)
        width, grip, turn = 0.08, -1.0, rng.uniform(-0.2, 0.2, 3)
        for t in range(FRAMES):
            is_paused = FRAMES // 2 <= t < FRAMES // 2 + pause
            move = np.zeros(3) if is_paused else np.clip(2 * (target - place) + rng.normal(0, 0.5, 3), -1, 1)
            if not is_paused:
                grip = 1.0 if t > FRAMES // 2 and int(t / 4) % 2 else -1.0
            twist = np.zeros(3) if is_paused else rng.normal(0, 0.3, 3)
            rotation = np.concatenate([turn / 2, [1.0]]) / np.linalg.norm([*turn / 2, 1.0])
            picture = _picture(PIXELS / 2 + 40 * place[:2], PIXELS / 2 + 40 * target[:2], is_lab=lab)
            action = [*move, *(twist if quaternion else ()), grip]
            yield action, [*place, *(rotation if quaternion else ()), width], {TOP: picture}
            place, turn = np.clip(place + 0.1 * move, -0.55, 0.55), turn + 0.2 * twist
            width = np.clip(width - 0.03 * grip, 0, 0.08)

    turns, rotations = (("roll", "pitch", "yaw"), ("qx", "qy", "qz", "qw")) if quaternion else ((), ())
    names = {ACTION: ["x", "y", "z", *turns, "gripper"], STATE: ["x", "y", "z", *rotations, "gripper"]}
    return _recorded(play, seed, fps=fps, names=names)


def absolute_joints(seed: int = 1, *, fps: float = 30) -> RobotSet:
    """Goals of six joints in radians, the last one a gripper from 0 to 1, which the robot follows a little late."""
    rest = np.array([0.3, -1.2, 1.5, 0.4, -0.2, 0.5])

    def play(rng: Any) -> Iterator[Frame]:
        phase, speed = rng.uniform(0, 6, 6), rng.uniform(0.1, 0.3, 6)
        joints = rest + rng.normal(0, 0.1, 6)
        for t in range(FRAMES):
            goal = rest + np.array([0.8, 0.5, 0.4, 0.6, 0.5, 0.5]) * np.sin(phase + speed * t) + rng.normal(0, 0.02, 6)
            hand = PIXELS / 2 + 14 * np.array([np.sin(joints[0]), np.cos(joints[1])])
            yield goal, joints, {TOP: _picture(hand, (10, 40), is_lab=True)}
            joints = joints + 0.6 * (goal - joints) + rng.normal(0, 0.005, 6)

    joints = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
    names = [f"{name}.pos" for name in joints]
    return _recorded(play, seed, last=2, fps=fps, names={ACTION: names, STATE: names})


def moving_dot(seed: int = 2) -> RobotSet:
    """A dot on a plain table that motions move, without a state or names."""
    made = delta_gripper(seed, lab=False)
    for columns in made.columns:
        del columns[STATE]
        columns[ACTION] = columns[ACTION][:, :2]
    return replace(made, names={})


def two_cameras(seed: int = 3) -> RobotSet:
    """Places that a hand goes to, without a state, seen from above and by a camera that sees the hand at rest."""

    def play(rng: Any) -> Iterator[Frame]:
        place, target = rng.uniform(-0.5, 0.5, 2), rng.uniform(-0.5, 0.5, 2)
        for _ in range(FRAMES):
            top = _picture(PIXELS / 2 + 40 * place, PIXELS / 2 + 40 * target, is_lab=True)
            wrist = _picture((24, 24), PIXELS / 2 + 40 * (target - place), is_lab=False)
            place = np.clip(place + np.clip(target - place, -0.1, 0.1) / 2 + rng.normal(0, 0.04, 2), -0.55, 0.55)
            yield place, None, {TOP: top, WRIST: wrist}

    return _recorded(play, seed)


def arm(seed: int = 6) -> RobotSet:
    """Turns of two joints, seen from above and by a camera in the hand, which turns with it."""

    def play(rng: Any) -> Iterator[Frame]:
        joints, target = rng.uniform([-2.5, -1.5], [-0.6, 1.5]), rng.uniform(-18, 18, 2)
        goal = rng.uniform([-2.5, -1.5], [-0.6, 1.5])
        for _ in range(FRAMES):
            (x, u), (y, v) = np.cos(turn := np.array([joints[0], joints.sum()])), np.sin(turn)
            hand, turned = 11 * np.array([x + u, y + v]), np.array([[u, v], [-v, u]])
            top = _picture(PIXELS / 2 + hand, PIXELS / 2 + target, is_lab=False)
            wrist = _picture(PIXELS / 2 - turned @ hand, PIXELS / 2 + turned @ (target - hand), is_lab=False)
            action = np.clip(goal - joints + rng.normal(0, 0.4, 2), -1, 1)
            yield action, joints, {TOP: top, WRIST: wrist}
            joints = np.clip(joints + 0.15 * action, [-3, -2], [0, 2])

    return _recorded(play, seed, 2 * EPISODES)


CLEAN: Mapping[str, Callable[[], RobotSet]] = {
    "delta_gripper": delta_gripper,
    "absolute_joints": absolute_joints,
    "moving_dot": moving_dot,
    "quaternion_at_5_hz": lambda: delta_gripper(4, fps=5, quaternion=True),
    "with_pauses": lambda: delta_gripper(5, pause=8),
    "two_cameras": two_cameras,
    "arm": arm,
}


# Faults ---------------------------------------------------------------------------------------------------------------


def _each(change: Callable[[dict[str, Any], dict[str, Any]], None], which: slice = slice(None)) -> Callable:
    """A change of the columns and pictures of each episode, or of some."""

    def plant(made: RobotSet) -> None:
        for columns, videos in [*zip(made.columns, made.videos)][which]:
            change(columns, videos)

    return plant


def _turn(axis: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, videos: videos.update({name: np.flip(one, axis).copy() for name, one in videos.items()})


def _action(change: Callable[[Any], Any], *names: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda columns, _: columns.update({name: change(columns[name]) for name in names or (ACTION,)})


def _later(rows: Any) -> Any:
    return np.concatenate([rows[:1], rows[:-1]])


def _of_others(made: RobotSet) -> None:
    actions = [columns[ACTION] for columns in made.columns]
    for columns, action in zip(made.columns, [*actions[5:], *actions[:5]]):
        columns[ACTION] = action[::-1].copy()


def _starts_of_others(made: RobotSet) -> None:
    """What a reset draws before it places things, which makes the first picture that of another episode."""
    firsts = [videos[TOP][0].copy() for videos in made.videos]
    for videos, first in zip(made.videos, [*firsts[5:], *firsts[:5]]):
        videos[TOP][0] = first


def _wait(columns: dict[str, Any], videos: dict[str, Any]) -> None:
    """Three quarters of the frames wait in the middle."""
    rows = np.concatenate([np.arange(4), np.full(FRAMES - 8, 4), np.arange(4, 8)])
    for table in (columns, videos):
        table.update({name: values[rows] for name, values in table.items()})
    columns[ACTION][4:-4, :3] = 0


def _repeat_pictures(columns: dict[str, Any], videos: dict[str, Any]) -> None:
    videos[TOP] = np.repeat(videos[TOP][::2], 2, axis=0)[: len(videos[TOP])]


def _repeat_rows(columns: dict[str, Any], videos: dict[str, Any]) -> None:
    for table in (columns, videos):
        table.update({name: np.repeat(values[::2], 2, axis=0)[:FRAMES] for name, values in table.items()})


def _opposite_gripper(rows: Any) -> Any:
    return np.concatenate([rows[:, :-1], 1 - rows[:, -1:]], axis=1)


# name: clean set, what is planted, the kind that is to be found
PLANTED: Mapping[str, tuple[str, Callable[[RobotSet], None], str]] = {
    "mirrored_by_motion": ("moving_dot", _each(_turn(2), ODD), "turned_pictures"),
    "upside_down_beside_a_state": ("delta_gripper", _each(_turn(1), ODD), "turned_pictures"),
    "gripper_sign_of_some": (
        "delta_gripper", _each(_action(lambda rows: rows * np.float32([1, 1, 1, -1])), ODD), "action_sign",
    ),
    "gripper_against_state": ("absolute_joints", _each(_action(_opposite_gripper)), "action_sign"),
    "late_by_state": ("delta_gripper", _each(_action(_later)), "late_actions"),
    "late_by_state_of_goals": ("absolute_joints", _each(_action(_later)), "late_actions"),
    "late_by_pictures": ("moving_dot", _each(_action(_later)), "late_actions"),
    "late_places_by_pictures": ("two_cameras", _each(_action(_later)), "late_actions"),
    "late_in_some_by_state": ("arm", _each(_action(_later), ODD), "late_actions"),
    "late_in_some_by_pictures": ("moving_dot", _each(_action(_later), ODD), "late_actions"),
    "mirrored_top_of_an_arm": (
        "arm", _each(lambda _, videos: videos.update({TOP: np.flip(videos[TOP], 2).copy()}), ODD),
        "turned_pictures",
    ),
    "other_rate": ("delta_gripper", lambda made: None, "rate"),
    "of_other_episodes": ("delta_gripper", _of_others, "no_effect"),
    "of_other_episodes_by_pictures": ("moving_dot", _of_others, "no_effect"),
    "starts_of_other_episodes": ("delta_gripper", _starts_of_others, "first_picture"),
    "starts_of_other_episodes_of_an_arm": ("arm", _starts_of_others, "first_picture"),
    "idle": ("delta_gripper", _each(_wait), "idle"),
    "fewer_rows_than_frames": ("moving_dot", lambda made: None, "too_long"),
    "degrees_in_some": ("absolute_joints", _each(_action(lambda rows: rows * 57.3, ACTION, STATE), ODD), "units"),
    "swapped_motions_in_some": (
        "delta_gripper", _each(_action(lambda rows: rows[:, [1, 0, 2, 3]]), ODD), "swapped_columns",
    ),
    "swapped_joints_in_some": (
        "absolute_joints", _each(_action(lambda rows: rows[:, [0, 2, 1, 3, 4, 5]], ACTION, STATE), ODD),
        "swapped_columns",
    ),
    "quaternion_order_of_some": (
        "quaternion_at_5_hz", _each(_action(lambda rows: rows[:, [0, 1, 2, 6, 3, 4, 5, 7]], STATE), ODD),
        "quaternion_order",
    ),
    "repeated_pictures": ("delta_gripper", _each(_repeat_pictures), "frozen_frames"),
    "every_row_twice": ("moving_dot", _each(_repeat_rows), "frozen_frames"),
    "constant_camera": (
        "two_cameras", _each(lambda _, videos: videos.update({WRIST: videos[WRIST][:1].repeat(FRAMES, 0)})),
        "constant_camera",
    ),
    "inverted_success": ("moving_dot", _each(_action(lambda rows: 1 - rows, SUCCESS)), "success"),
    "success_in_percent": ("moving_dot", _each(_action(lambda rows: 100 * rows, SUCCESS)), "success"),
}  # fmt: skip


@functools.cache
def _drawn(name: str) -> RobotSet:
    return CLEAN[name]()


def clean(name: str) -> RobotSet:
    """A set without a fault, which may be changed: drawing one takes longer than looking at it."""
    return copy.deepcopy(_drawn(name))


def planted(name: str) -> RobotSet:
    of_clean, plant, _ = PLANTED[name]
    made = clean(of_clean)
    plant(made)
    return made


def as_episodes(made: RobotSet) -> list[CheckedEpisode]:
    """The episodes as they are read once they are written, without writing them."""
    found = []
    for k, (columns, videos) in enumerate(zip(made.columns, made.videos)):
        action = columns[ACTION].astype(float)
        films = {name: torch.from_numpy(film).permute(3, 0, 1, 2) for name, film in videos.items()}
        pictures = {name: small_grey(film) for name, film in films.items()}
        time, state = np.arange(len(action)) / made.fps, columns.get(STATE, action[:, :0]).astype(float)
        found.append(CheckedEpisode(f"episode_{k:06d}", time, action, state, {SUCCESS: columns[SUCCESS]}, 0, pictures))
    return found


def names_of(made: RobotSet, column: str) -> list[str]:
    width = made.columns[0][column].shape[1] if column in made.columns[0] else 0
    return made.names.get(column) or [f"{column}[{k}]" for k in range(width)]


def write(made: RobotSet, folder: Path, name: str = "") -> Path:
    """A LeRobot data set of it; two faults are of files and are planted here."""
    writer = Writer(folder, made.fps, "made up")
    for i, (columns, videos) in enumerate(zip(made.columns, made.videos)):
        films = {camera: torch.from_numpy(one).permute(3, 0, 1, 2) for camera, one in videos.items()}
        if name == "fewer_rows_than_frames":  # the writer keeps files that are there
            for camera, film in films.items():
                place = VIDEO_PATH.format(episode_chunk=0, episode_index=i, video_key=camera)
                write_video(folder / place, film, made.fps)
            columns = {key: values[:-1] for key, values in columns.items()}
            films = {camera: film[:, :-1] for camera, film in films.items()}
        writer.add(Recording(columns, films, "push"))
    writer.finish()
    features = dict(read_info(folder).features)
    for column, names in made.names.items():
        features[column] = {**features[column], "names": names}
    change_json(folder / "meta/info.json", features=features)
    if name == "other_rate":
        change_json(folder / "meta/info.json", fps=made.fps * 2)
    return folder
