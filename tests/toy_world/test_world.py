# SPDX-License-Identifier: Apache-2.0

import numpy
import pytest

from cosmos_predict2.toy_world.episodes import Episodes, _perform, make_episodes
from cosmos_predict2.toy_world.physics import (
    COLOURS,
    COLUMNS,
    GOAL,
    GRIPPER,
    GRIPPER_MARGIN,
    OBJECT_MARGIN,
    PARKED,
    SETTINGS,
    STATE_SIZE,
    TASKS,
    Floats,
    gap,
    object_position,
)
from cosmos_predict2.toy_world.rendering import COVER, THINGS, detect, render, render_wrist
from cosmos_predict2.toy_world.world import ToyWorld


def drive_expert(world: ToyWorld) -> dict:
    done = numpy.zeros(world.num_envs, dtype=bool)
    verbs = [task.verb for task in world.tasks]
    while not done.all():
        action = numpy.zeros((world.num_envs, world.action_dim))
        goals, no_error = world.states[:, GOAL], numpy.zeros(world.num_envs)
        wanted = _perform(world.states, goals, no_error, world.tasks, verbs, world.setting)
        action[:, [0, 1, 2 if world.action_dim == 4 else 6]] = wanted
        _, reward, done, info = world.step(action)
    return {**info, "reward": reward}


def test_observations_rewards_and_info_have_their_shapes() -> None:
    world = ToyWorld(3, size=56, action_dim=7, setting="hard", tasks=("carry_box",))
    assert world.reset().shape == (3, 56, 56, 3)
    frames, reward, done, info = world.step(numpy.zeros((3, 7)))
    assert frames.shape == (3, 56, 56, 3) and frames.dtype == numpy.uint8
    assert reward.shape == done.shape == (3,) and done.dtype == bool
    assert {key: value.shape for key, value in info.items()} == dict.fromkeys(("success", "ever", "distance"), (3,))
    assert (ToyWorld(1).size, ToyWorld(1, setting="hard").size) == (48, 64)


def test_an_episode_is_a_function_of_its_seed() -> None:
    actions = numpy.random.default_rng(0).uniform(-1, 1, (24, 4, 4))

    def play(world: ToyWorld, order: list[int]) -> list:
        world.reset(order)
        return [world.step(action[order])[0][numpy.argsort(order)] for action in actions]

    one = play(ToyWorld(4, tasks=tuple(TASKS)), [0, 1, 2, 3])
    other = play(ToyWorld(4, tasks=tuple(TASKS)), [2, 0, 3, 1])
    assert numpy.array_equal(one, other)
    assert not numpy.array_equal(one[0], play(ToyWorld(4, tasks=tuple(TASKS), seed=1), [0, 1, 2, 3])[0])


@pytest.mark.parametrize("setting", ["default", "hard"])
@pytest.mark.parametrize("task", TASKS)
def test_tables_are_laid_by_the_setting(setting: str, task: str) -> None:
    world = ToyWorld(300, setting=setting, tasks=(task,))
    states, size, number = world.states, world.size, TASKS[task].target
    place, goal, gripper = (states[:, columns] for columns in (object_position(number), GOAL, GRIPPER))
    low, high = world.setting.goal_distance
    distance = numpy.hypot(*(goal - place).T)
    assert low - 0.01 <= distance.min() < low + 1 and high - 1 < distance.max() <= high + 0.01
    for points, margin in ((place, OBJECT_MARGIN), (goal, OBJECT_MARGIN), (gripper, GRIPPER_MARGIN)):
        assert points.min() >= margin - 0.01 and points.max() <= size - margin + 0.01
    clear = gap(*gripper.T, *place.T, number)
    assert clear.min() > 0.5
    if setting == "default":
        assert clear.max() <= 8.01
        cosine = ((gripper - place) * (place - goal)).sum(1) / numpy.hypot(*(gripper - place).T) / distance
        assert cosine.min() > numpy.cos(numpy.deg2rad(80.1))
    other = states[:, object_position(1 - number)]
    assert (other == PARKED).all() == (not TASKS[task].is_crowded)


def test_the_whole_table_and_all_directions_are_used() -> None:
    states = ToyWorld(1000).states
    to_goal = states[:, GOAL] - states[:, object_position(0)]
    sectors = numpy.histogram(numpy.arctan2(to_goal[:, 1], to_goal[:, 0]), bins=8, range=(-numpy.pi, numpy.pi))[0]
    assert sectors.min() > 80
    assert abs(states[:, object_position(0)].mean(0) - 24).max() < 1


@pytest.mark.parametrize(("setting", "least"), [("default", 0.99), ("hard", 0.93)])
def test_a_skilled_expert_does_every_task(setting: str, least: float) -> None:
    for task in TASKS:
        info = drive_expert(ToyWorld(200, setting=setting, tasks=(task,), action_dim=7))
        assert info["success"].mean() >= least, task
        assert (info["ever"] >= info["success"]).all()
        assert (info["reward"][info["success"]] > 0.6).all()


def test_a_random_policy_seldom_succeeds() -> None:
    world = ToyWorld(300)
    rng = numpy.random.default_rng(0)
    for _ in range(24):
        *_, info = world.step(rng.uniform(-1, 1, (300, 4)))
    assert info["success"].mean() < 0.1


def test_a_carried_object_counts_when_it_was_put_down() -> None:
    world = ToyWorld(1, tasks=("carry_puck",))
    states = world.states.copy()
    states[:, object_position(0)] = states[:, GOAL]
    states[:, GRIPPER] = states[:, GOAL] - [10.5, 0]
    world.set_states(states)
    assert not world.step(numpy.array([[0, 0, 1.0, 0]]))[3]["success"][0]
    assert world.step(numpy.array([[0, 0, -1.0, 0]]))[3]["success"][0]


def test_a_touch_that_shoves_the_puck_away_does_not_count() -> None:
    world = ToyWorld(1, tasks=("touch_puck",))
    place = world.states[:, object_position(0)]
    states = world.states.copy()
    side = numpy.where(place[:, 0] < 24, 1.0, -1.0)
    states[:, GRIPPER] = place - [[10.4 * side[0], 0]]
    world.set_states(states)
    push = numpy.array([[side[0], 0, 0, 0]])
    assert world.step(push)[3]["success"][0]
    *_, info = world.step(push * 2)
    world.step(push)
    *_, info = world.step(push)
    assert not info["success"][0] and info["ever"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(setting="hrad"), "Did you mean hard"),
        (dict(tasks=("push",)), "push_puck"),
        (dict(tasks="push_puck"), "list of names"),
        (dict(tasks=()), "at least one"),
        (dict(size=24), "40 pixels"),
        (dict(action_dim=6), "4 or 7"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToyWorld(2, **arguments)


def test_wrong_shapes_are_named() -> None:
    world = ToyWorld(2)
    with pytest.raises(ValueError, match=r"\(2, 3\); expected \(2, 4\)"):
        world.step(numpy.zeros((2, 3)))
    with pytest.raises(ValueError, match="2 environments, but 3 seeds"):
        world.reset([1, 2, 3])
    with pytest.raises(ValueError, match=r"expected \(2, 10\)"):
        world.set_states(numpy.zeros((1, 10)))


@pytest.mark.parametrize("size", [40, 128])
def test_any_size_of_table_works(size: int) -> None:
    world = ToyWorld(50, size=size, tasks=tuple(TASKS))
    assert drive_expert(world)["success"].mean() > 0.85
    assert world.render().shape == (50, size, size, 3)


@pytest.fixture(scope="module", params=[48, 64])
def episodes(request: pytest.FixtureRequest) -> Episodes:
    return make_episodes(40, 11, tasks=tuple(TASKS), size=request.param)


def place(states: Floats, thing: str) -> Floats:
    column = COLUMNS.index("goal_x" if thing == "ring" else f"{thing}_x")
    return states[..., column : column + 2]


def test_the_detector_finds_things_within_a_fifth_of_a_pixel(episodes: Episodes) -> None:
    found = detect(render(episodes.states, episodes.size))
    for thing in THINGS:
        true = place(episodes.states, thing)
        is_there = true[..., 0] > 0
        error = numpy.hypot(*numpy.moveaxis(found.position[thing] - true, -1, 0))[is_there]
        assert error.mean() < 0.08, thing
        assert numpy.quantile(error, 0.95 if thing == "ring" else 0.99) < 0.2, thing
        assert error.max() < (0.8 if thing == "ring" else 0.25), thing  # what is hidden can only be guessed
        assert numpy.isnan(found.position[thing][~is_there]).all()
        assert abs((found.position[thing] - true)[is_there].mean(0)).max() < 0.02, thing  # no half-pixel slip
    assert numpy.array_equal(found.is_closed, episodes.states[..., 2] > 0)


def test_a_shift_of_an_eighth_of_a_pixel_shows() -> None:
    states = numpy.full((17, STATE_SIZE), PARKED)
    states[:, 0] = 20 + numpy.arange(17) / 8
    states[:, 1] = 24
    states[:, 2:4] = [0, -1]
    states[:, 8:] = [24, 24]
    x = detect(render(states, 48)).position["gripper"][:, 0]
    assert numpy.diff(x) == pytest.approx(1 / 8, abs=0.07)
    assert x[16] - x[0] == pytest.approx(2, abs=0.03)


def test_pixels_away_from_things_never_change(episodes: Episodes) -> None:
    frames = render(episodes.states, episodes.size).reshape(-1, episodes.size, episodes.size, 3)
    states = episodes.states.reshape(-1, STATE_SIZE)
    y, x = numpy.mgrid[: episodes.size, : episodes.size] + 0.5
    free = numpy.ones(frames.shape[:3], dtype=bool)
    for thing, reach in (("gripper", 6), ("puck", 7), ("box", 9), ("ring", 11)):
        centre = place(states, thing)[:, :, None, None]
        free &= numpy.hypot(x - centre[:, 0], y - centre[:, 1]) > reach
    assert 0.5 < free.mean() < 0.95
    assert (frames[free] == COLOURS["table"]).all()


def test_a_still_scene_is_a_still_picture_and_each_picture_depends_on_its_state_alone(episodes: Episodes) -> None:
    together = render(episodes.states, episodes.size)
    assert numpy.array_equal(render(episodes.states[3, 7], episodes.size), together[3, 7])
    assert numpy.array_equal(episodes.render(3, 5, 9), together[3, 5:9])
    assert together.dtype == numpy.uint8 and together.flags.c_contiguous


def test_a_camera_at_the_wrist_sees_what_a_cover_hides_from_above() -> None:
    states = make_episodes(40, 2, setting="covered", tasks=("push_puck",)).states[:, 0]
    cover = SETTINGS["covered"].cover
    assert cover is not None
    moved = states.copy()
    moved[:, object_position(0)] += 48 - 2 * moved[:, object_position(0)]  # through the middle of the table
    moved[:, GOAL] += 48 - 2 * moved[:, GOAL]
    assert numpy.array_equal(render(states, 48, cover), render(moved, 48, cover))
    hidden = (render(numpy.full(STATE_SIZE, -1000.0), 48, cover) == COVER).all(-1)
    assert hidden[cover:-cover, cover:-cover].all() and hidden.sum() == (48 - 2 * cover) ** 2
    world = ToyWorld(2, setting="covered")
    assert numpy.array_equal(world.reset(), render(world.states, 48, cover))
    wrist = detect(render_wrist(states, 48), THINGS)
    x, y = states[:, GRIPPER].astype(int).T
    assert (render(states, 48, cover)[range(40), y, x] == COLOURS["open gripper"]).all()
    assert abs(wrist.position["gripper"] - 24).max() < 0.2
    seen = wrist.position["puck"] - (states[:, object_position(0)] - states[:, GRIPPER] + 24)
    assert numpy.nanmean(abs(seen)) < 0.2 and numpy.isnan(seen).mean() < 0.1
    assert (render_wrist(states, 48) != render_wrist(moved, 48)).any((1, 2, 3)).mean() > 0.95
    far = states[:1].copy()
    far[:, GOAL] = far[:, GRIPPER] + 40
    nothing = far.copy()
    nothing[:, GOAL] = PARKED
    assert numpy.array_equal(render_wrist(far, 48), render_wrist(nothing, 48))


def test_things_at_the_edge_are_cut_off() -> None:
    states = numpy.full((4, STATE_SIZE), 24.0)
    states[:, 2:4] = [0, -1]
    states[:, 4:6] = [[0, 0], [48, 48], [0, 48], [70, -70]]
    frames = render(states, 48)
    red = (frames == COLOURS["puck"]).all(-1)
    assert red[0, 0, 0] and red[1, -1, -1] and red[2, -1, 0] and not red[3].any()
    assert 10 < red[0].sum() < 40 and 10 < red[1].sum() < 40
    assert (frames[3] == render(states[3:] * 0 + [[24, 24, 0, -1, PARKED, PARKED, 24, 24, 24, 24]], 48)).all()


def test_the_worlds_pictures_are_those_of_its_states() -> None:
    world = ToyWorld(6, tasks=tuple(TASKS))
    rng = numpy.random.default_rng(0)
    for _ in range(8):
        frames, *_ = world.step(rng.uniform(-1, 1, (6, 4)))
        assert numpy.array_equal(frames, render(world.states, 48))


@pytest.mark.parametrize("shape", [(48, 48), (2, 48, 48, 4)])
def test_the_detector_refuses_what_is_no_picture(shape: tuple) -> None:
    with pytest.raises(ValueError, match="uint8 pictures"):
        detect(numpy.zeros(shape, dtype=numpy.uint8))
    with pytest.raises(ValueError, match="float32"):
        detect(numpy.zeros((2, 48, 48, 3), dtype=numpy.float32))
