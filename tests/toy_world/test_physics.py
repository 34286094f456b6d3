# SPDX-License-Identifier: Apache-2.0
import numpy
import pytest

from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.toy_world.physics import (
    BOX_X,
    CLOSED,
    GRASP_GAP,
    GRIPPER_RADIUS,
    GRIPPER_X,
    GRIPPER_Y,
    HELD,
    NOTHING,
    OBJECT_RADII,
    PARKED,
    PUCK_RADIUS,
    PUCK_X,
    PUCK_Y,
    SETTINGS,
    STATE_SIZE,
    TASKS,
    Floats,
    advance,
    gap,
    simulate,
)

DEFAULT = SETTINGS["default"]
TOUCHING = GRIPPER_RADIUS + PUCK_RADIUS


def scene(gripper: tuple, puck: tuple = (PARKED, PARKED), box: tuple = (PARKED, PARKED)) -> Floats:
    state = numpy.zeros((1, STATE_SIZE))
    state[0] = [*gripper, 0, NOTHING, *puck, *box, 24, 24]
    return state


def run(state: Floats, *actions: tuple, size: int = 48) -> Floats:
    """The last state after these (dx, dy, grip)."""
    padded = numpy.array([[(*action, 0.0) for action in actions]])
    return simulate(state, padded, DEFAULT, size)[0, -1]


def random_episodes(size: int = 48) -> Floats:
    """States [N, T, 10] of every task under actions that nobody chose."""
    episodes = make_episodes(150, 7, tasks=tuple(TASKS), size=size, length=1)
    rng = numpy.random.default_rng(0)
    knots = rng.uniform(-1, 1, (150, 12, 4))
    return simulate(episodes.states[:, 0], numpy.repeat(knots, 4, axis=1), DEFAULT, size)


def test_a_step_leaves_its_input_alone() -> None:
    for num in (1, 5):
        states = numpy.repeat(scene((20, 24), (30, 24)), num, axis=0)
        for _ in range(3):
            before = states.copy()
            after = advance(states, numpy.ones((num, 4)), DEFAULT, 48)
            assert numpy.array_equal(states, before) and not numpy.array_equal(after, before)
            states = after


def test_the_gripper_moves_at_its_speed_and_stops_at_the_wall() -> None:
    end = run(scene((20, 20)), (1, -0.5, 0))
    assert end[[GRIPPER_X, GRIPPER_Y]].tolist() == [21.5, 19.25]
    assert run(scene((20, 20)), *[(5, 0, 0)] * 40)[GRIPPER_X] == 48 - GRIPPER_RADIUS  # and actions are clipped


def test_nothing_moves_an_object_but_contact() -> None:
    states = random_episodes()
    for column, number in ((PUCK_X, 0), (BOX_X, 1)):
        place = states[..., column : column + 2]
        moved = (numpy.diff(place, axis=1) != 0).any(-1)
        now = states[:, 1:]
        free = gap(now[..., GRIPPER_X], now[..., GRIPPER_Y], now[..., column], now[..., column + 1], number)
        across = gap_between_objects(now)
        assert ((free[moved] <= GRASP_GAP + 1e-3) | (across[moved] < 0.1)).all()
        assert moved.mean() > 0.05  # the test saw pushes
        far = (free > DEFAULT.speed + 0.1) & (across > 2 * DEFAULT.speed) & (now[..., column] > 0)
        assert far.any() and not moved[far].any()


def gap_between_objects(states: Floats) -> Floats:
    dx, dy = (states[..., BOX_X + i] - states[..., PUCK_X + i] for i in (0, 1))
    outside = (d - numpy.clip(d, -OBJECT_RADII[1], OBJECT_RADII[1]) for d in (dx, dy))
    return numpy.hypot(*outside) - PUCK_RADIUS


@pytest.mark.parametrize("size", [48, 64])
def test_things_stay_on_the_table_and_out_of_each_other(size: int) -> None:
    states = random_episodes(size)
    x, y = states[..., GRIPPER_X], states[..., GRIPPER_Y]
    assert (numpy.minimum(x, y) > GRIPPER_RADIUS - 0.3).all()
    assert (numpy.maximum(x, y) < size - GRIPPER_RADIUS + 0.3).all()
    for column, number in ((PUCK_X, 0), (BOX_X, 1)):
        place = states[..., column : column + 2][states[..., column] > 0]
        margin = OBJECT_RADII[number] - 1e-3
        assert (place >= margin).all() and (place <= size - margin).all()
        free = gap(x, y, states[..., column], states[..., column + 1], number)
        assert free.min() > -0.3 and numpy.quantile(free, 0.01) > -1e-3
    assert gap_between_objects(states).min() > -0.3


def test_a_straight_push_takes_the_puck_along() -> None:
    end = run(scene((18, 24), (18 + TOUCHING, 24)), *[(1, 0, 0)] * 4)
    assert end[PUCK_X] == pytest.approx(18 + TOUCHING + 6) and end[PUCK_Y] == pytest.approx(24)
    assert end[PUCK_X] - end[GRIPPER_X] == pytest.approx(TOUCHING)


def push_at(degrees: float) -> tuple[float, float]:
    """Motion of a puck (x, y) in one step to the right by a gripper that touches it at this angle off the middle."""
    angle = numpy.deg2rad(degrees)
    puck = (20 + TOUCHING * numpy.cos(angle), 24 + TOUCHING * numpy.sin(angle))
    end = run(scene((20, 24), puck), (0.1, 0, 0))
    return end[PUCK_X] - puck[0], end[PUCK_Y] - puck[1]


def test_inside_the_friction_cone_the_puck_sticks_and_outside_it_slips() -> None:
    cone = numpy.rad2deg(numpy.arctan(DEFAULT.friction))
    for degrees in (0, 30, 60, cone - 1):
        dx, dy = push_at(degrees)
        assert dx == pytest.approx(0.15, abs=0.004) and abs(dy) < 0.004
    dx, dy = push_at(82)
    assert 0 < dx < 0.1 and dy > 0
    assert push_at(100) == pytest.approx((0, 0), abs=1e-4)  # away from it


def test_a_wall_stops_the_puck_and_the_puck_the_gripper() -> None:
    end = run(scene((25, 24), (36, 24)), *[(1, 0, 0)] * 20)
    assert end[PUCK_X] == 48 - PUCK_RADIUS
    assert end[GRIPPER_X] == pytest.approx(48 - PUCK_RADIUS - TOUCHING, abs=1e-3)


def test_a_pushed_object_pushes_the_other() -> None:
    end = run(scene((8, 24), (18, 24), (30, 24)), *[(1, 0, 0)] * 10)
    assert end[BOX_X] > 32 and end[BOX_X] - end[PUCK_X] == pytest.approx(PUCK_RADIUS + 5, abs=0.01)
    assert run(scene((8, 24), (18, 24), (30, 24)), *[(1, 0, 0)] * 30)[BOX_X] == 48 - 5


def test_a_closed_gripper_holds_what_is_near_and_opens_again() -> None:
    near, far = scene((20, 24), (20 + TOUCHING + 0.9, 24)), scene((20, 24), (20 + TOUCHING + 1.1, 24))
    end = run(near, (0, 0, 1), *[(0, 1, 1)] * 4)
    assert end[HELD] == 0 and end[CLOSED] == 1
    assert end[[PUCK_X, PUCK_Y]] - end[[GRIPPER_X, GRIPPER_Y]] == pytest.approx([TOUCHING + 0.9, 0])
    assert end[PUCK_Y] == 30
    assert run(far, (0, 0, 1), *[(0, 1, 1)] * 4)[PUCK_Y] == 24
    dropped = run(near, (0, 0, 1), (0, 1, 1), (0, -1, -1), (-1, 0, 0))
    assert dropped[HELD] == NOTHING and dropped[PUCK_Y] == 25.5


def test_the_other_entries_of_an_action_do_nothing_and_seven_numbers_are_as_good_as_four() -> None:
    rng = numpy.random.default_rng(1)
    start = make_episodes(20, 3, tasks=("carry_puck",), length=1).states[:, 0]
    four = rng.uniform(-1, 1, (20, 10, 4))
    seven = rng.uniform(-1, 1, (20, 10, 7))
    seven[..., [0, 1, 6]] = four[..., :3]
    expected = simulate(start, four, DEFAULT, 48)
    four[..., 3] = 0
    assert numpy.array_equal(simulate(start, four, DEFAULT, 48), expected)
    assert numpy.array_equal(simulate(start, seven, DEFAULT, 48), expected)
    with pytest.raises(ValueError, match="4 or 7 numbers, got 5"):
        simulate(start, numpy.zeros((20, 1, 5)), DEFAULT, 48)
