# SPDX-License-Identifier: Apache-2.0
import numpy
import pytest

from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.physics import COLOURS, COLUMNS, PARKED, STATE_SIZE, TASKS, Floats
from cosmos_predict2.toy_world.rendering import THINGS, detect, render
from cosmos_predict2.toy_world.world import ToyWorld


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
