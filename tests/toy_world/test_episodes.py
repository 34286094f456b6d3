# SPDX-License-Identifier: Apache-2.0

import re
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.media import read_image, read_video
from cosmos_predict2.toy_world.episodes import DIRECTIONS, Episodes, Mix, make_episodes
from cosmos_predict2.toy_world.physics import (
    ALL_TASKS,
    GOAL,
    GRIPPER,
    GRIPPER_X,
    GRIPPER_Y,
    HELD,
    PARKED,
    SETTINGS,
    STATE_SIZE,
    TASKS,
    Floats,
    gap,
    object_position,
    simulate,
)

ALL = tuple(TASKS)


@pytest.fixture(scope="module")
def mixed() -> Episodes:
    return make_episodes(1500, 21, tasks=ALL)


@pytest.fixture(scope="module")
def pushes() -> Episodes:
    return make_episodes(1000, 22)


def test_an_episode_depends_on_seed_and_number_alone() -> None:
    many, few = make_episodes(12, 5, tasks=ALL), make_episodes(3, 5, tasks=ALL, first=6)
    assert numpy.array_equal(many.states[6:9], few.states) and numpy.array_equal(many.actions[6:9], few.actions)
    assert many.captions[6:9] == few.captions and many.drivers[6:9] == few.drivers
    assert not numpy.array_equal(make_episodes(12, 6, tasks=ALL).states[0], many.states[0])


def test_the_recorded_actions_replay_the_states(mixed: Episodes) -> None:
    replayed = simulate(mixed.states[:, 0], mixed.actions, SETTINGS["default"], 48)
    assert numpy.array_equal(replayed, mixed.states)
    assert abs(mixed.actions).max() <= 1 and mixed.actions.dtype == numpy.float32


def test_numbers_are_the_same_on_every_machine() -> None:
    episodes = make_episodes(2, 0, tasks=ALL, length=4)
    scaled = episodes.states * 2**16
    assert numpy.array_equal(scaled, numpy.rint(scaled))
    assert episodes.states[:, -1].round(4).tolist() == EXPECTED


EXPECTED = [
    [16.4069, 20.254, 1.0, 0.0, 17.6727, 30.9607, -1000.0, -1000.0, 30.8494, 31.164],
    [16.549, 37.0009, 0.0, -1.0, 17.799, 12.656, 27.0029, 28.8769, 28.3037, 27.6215],
]


# Honesty --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["default", "hard"])
@pytest.mark.parametrize("tasks", [("push_puck",), ("carry_puck",), ("push_box", "choose_puck")])
def test_an_object_moves_in_at_least_half_of_the_windows(setting: str, tasks: tuple) -> None:
    episodes = make_episodes(500, 31, setting=setting, tasks=tasks, first=2**40)
    assert (episodes.travel(12) > 1.0).mean() >= 0.5


def test_every_action_that_a_policy_may_use_varies_in_every_kind_of_episode() -> None:
    episodes = make_episodes(600, 32, tasks=("carry_puck", "push_puck"))
    drivers = numpy.array(episodes.drivers)
    for driver in set(episodes.drivers):
        actions = episodes.actions[drivers == driver]
        assert (actions[..., :3].std((0, 1)) > 0.2).all(), driver
    assert 0.05 < (episodes.actions[..., 2] > 0).mean() < 0.95


def alignment(episodes: Episodes) -> float:
    """Mean cosine between the way of a pushed puck and the way to the ring."""
    place = episodes.states[:, :, object_position(0)]
    way = place[:, -1] - place[:, 0]
    to_ring = episodes.states[:, 0, GOAL] - place[:, 0]
    length = numpy.hypot(*way.T)
    cosine = (way * to_ring).sum(1)[length > 2] / (length * numpy.hypot(*to_ring.T))[length > 2]
    return float(cosine.mean())


def test_the_ring_does_not_tell_where_the_puck_goes(pushes: Episodes) -> None:
    assert alignment(make_episodes(300, 22, mix="expert")) > 0.9  # the test can see it where it is so
    assert abs(alignment(pushes)) < 0.35
    elsewhere = make_episodes(1000, 22, ring_elsewhere=1.0)
    assert abs(alignment(elsewhere)) < 0.15


def test_the_ring_moves_nothing(pushes: Episodes) -> None:
    kept = make_episodes(1000, 22, ring_elsewhere=0.0)
    assert numpy.array_equal(kept.actions, pushes.actions)
    others = [i for i in range(STATE_SIZE) if i not in range(STATE_SIZE)[GOAL]]
    assert numpy.array_equal(kept.states[..., others], pushes.states[..., others])
    is_elsewhere = (kept.states[:, 0, GOAL] != pushes.states[:, 0, GOAL]).any(1)
    assert is_elsewhere.mean() == pytest.approx(0.75, abs=0.05)
    assert numpy.array_equal(pushes.states[:, :1, GOAL] + numpy.zeros((1, 25, 1)), pushes.states[:, :, GOAL])


def test_skill_decides_about_success() -> None:
    rates = [
        make_episodes(300, 34, mix=Mix({"expert": 1.0}, {"expert": (skill, skill)}, 0.0)).success.mean()
        for skill in (0.0, 0.4, 0.7, 1.0)
    ]
    assert rates == sorted(rates) and rates[0] < 0.3 and rates[-1] >= 0.99


def test_the_mix_has_every_driver_with_its_share(pushes: Episodes) -> None:
    shares = {driver: numpy.mean([d == driver for d in pushes.drivers]) for driver in set(pushes.drivers)}
    assert shares == pytest.approx({"expert": 0.3, "noisy": 0.3, "push": 0.25, "wander": 0.15}, abs=0.06)


# Captions -------------------------------------------------------------------------------------------------------------


def check_caption(text: str, states: Floats, setting: str = "default") -> str:
    """Compare the claim of the sentence with the states; gives the kind of claim."""
    number = 0 if "red puck" in text else 1
    assert ("red puck" in text) != ("blue box" in text)
    place = states[:, object_position(number)]
    way = place[-1] - place[0]
    free = gap(states[:, GRIPPER_X], states[:, GRIPPER_Y], *place.T, number)
    steps = numpy.hypot(*numpy.diff(place, axis=0).T)
    is_carried = steps[states[1:, HELD] == number].sum() > steps[states[1:, HELD] != number].sum()
    if re.search(r"ring$", text):
        assert numpy.hypot(*(place[-1] - states[-1, GOAL])) < SETTINGS[setting].success_distance
        assert numpy.hypot(*way) > 2 and is_carried == bool(re.match("carry|take|bring", text))
        return "ring"
    if "touch" in text or "stay" in text:
        assert numpy.hypot(*way) <= 2
        is_touch = "without" not in text and "stay" not in text
        assert (free.min() <= 1) == is_touch
        return "touch" if is_touch else "miss"
    direction = next(d for d in sorted(DIRECTIONS, key=len, reverse=True) if text.endswith(d))
    wanted = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
    vector = sum(numpy.array(wanted[word]) for word in direction.split(" and "))
    assert way @ vector / numpy.hypot(*way) / numpy.hypot(*vector) > numpy.cos(numpy.deg2rad(22.6))
    assert is_carried == bool(re.search("carry|drag|take", text))
    return "way"


def test_a_ring_is_reached_by_experts_and_seldom_by_others() -> None:
    episodes = make_episodes(200, 5, mix="full_skill", tasks=("reach_ring",), setting="covered")
    assert episodes.success.all() and set(episodes.captions) == {ALL_TASKS["reach_ring"].sentence}
    assert (episodes.states[..., object_position(0)] == PARKED).all()
    left = numpy.hypot(*(episodes.states[:, 0, GOAL] - episodes.states[:, 0, GRIPPER]).T)
    assert left.min() > 2 * SETTINGS["covered"].success_distance
    mixed = make_episodes(200, 5, tasks=("reach_ring",), setting="covered")
    assert 0.1 < mixed.success.mean() < 0.3 and mixed.states[..., GRIPPER].min() > 0
    nothing = numpy.hypot(*(mixed.states[:, 0, GRIPPER] - mixed.states[:, -1, GRIPPER]).T)
    assert numpy.median(nothing) > 6


@pytest.mark.parametrize("setting", ["default", "hard"])
def test_captions_are_true(setting: str) -> None:
    kinds = set()
    for mix in ("mixed", "expert"):
        episodes = make_episodes(600, 41, mix=mix, tasks=ALL, setting=setting)
        for i, text in enumerate(episodes.captions):
            kinds.add(check_caption(text, episodes.states[i], setting))
            assert text.startswith("wander") <= (episodes.drivers[i] == "wander")
    assert kinds == {"ring", "way", "touch", "miss"}


def test_rewards_and_success_are_those_of_the_drawn_ring(mixed: Episodes) -> None:
    for i in range(300):
        if TASKS[mixed.tasks[i]].verb != "push":
            continue
        place = mixed.states[i, :, object_position(TASKS[mixed.tasks[i]].target)]
        distance = numpy.hypot(*(place - mixed.states[i, :, GOAL]).T)
        done = distance < 4
        assert mixed.success[i] == done[-1] and mixed.ever[i] == done.any()
        assert mixed.rewards[i] == pytest.approx((done - numpy.minimum(distance, 12) / 12)[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num=0), "num >= 1"),
        (dict(mix="expret"), "Did you mean expert"),
        (dict(mix=Mix({"driver": 1.0}, {"driver": (0, 1)}, 0.0)), "'driver'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_episodes(**{"num": 2, **arguments})


ASSETS = Path(__file__).parents[2] / "assets"


def test_the_toy_worlds_files_are_of_one_held_out_episode() -> None:
    folder = ASSETS / "toy_world"
    first = read_image(folder / "first_frame.png")
    clip, fps = read_video(folder / "clip.mp4")
    assert fps == 10 and clip.shape == (3, 25, 48, 48)
    held_out = ToyWorldVideos(num_episodes=200, num_frames=25, split="val", start=0)
    same = [i for i in range(200) if torch.equal(held_out[i]["video"][:, 0], first)]
    assert len(same) == 1
    item = held_out[same[0]]
    assert (clip.float() - item["video"].float()).abs().mean() < 4
    assert (folder / "prompt.txt").read_text().strip() == item["ai_caption"] == "push the red puck to the green ring"


def test_every_file_is_accounted_for() -> None:
    readme = (ASSETS / "README.md").read_text()
    for path in ASSETS.rglob("*"):
        if path.suffix in (".jpg", ".png", ".mp4", ".txt", ".webp"):
            assert f"{path.parent.name}/{path.name}" in readme, path
