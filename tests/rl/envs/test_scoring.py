# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of episodes: what a reset draws, how episodes end, what is saved; and how imagined chunks are scored."""

import itertools
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.rl.envs.scoring import Book, Chunk, Scored, Scoring, score
from imaginaire.errors import ConfigError


def book(num_envs: int = 4, seed: int = 5, max_steps: int = 3) -> Book:
    return Book(num_envs, num_tasks=7, num_trials=2**40, max_steps=max_steps, seed=seed)


def drawn(one: Book, ids: list[int], seed: int | None = None) -> list[tuple[int, int, int]]:
    one.begin(seed, {"env_ids": ids})
    return [(int(one.task_ids[i]), int(one.trial_ids[i]), int(one.seeds[i])) for i in ids]


def test_what_an_environment_draws_depends_on_nobody_else() -> None:
    """On the run's seed, its number and how often it was reset; or on the seed of the reset and its number."""
    one, other = book(), book()
    every = [drawn(one, [0, 1, 2, 3]) for _ in range(3)]
    assert len({row for rows in every for row in rows}) == 12
    found = [drawn(other, [2])[0], drawn(other, [1, 2])[1], drawn(other, [3, 2, 0])[1]]
    assert found == [rows[2] for rows in every]
    assert drawn(book(seed=6), [0, 1, 2, 3]) != every[0]
    seeded = drawn(one, [0, 1, 2, 3], seed=5)
    assert drawn(other, [3, 1], seed=5) == [seeded[3], seeded[1]] and len({*seeded, *every[0]}) == 8
    assert drawn(other, [3], seed=6) != [seeded[3]]


def test_numbers_are_taken_modulo_what_there_is() -> None:
    one = Book(3, num_tasks=2, num_trials=5, max_steps=3, seed=0)
    one.begin(None, {"task_ids": [0, 3, 4], "trial_ids": [4, 5, 12], "seeds": [9, 8, 7]})
    assert (one.task_ids.tolist(), one.trial_ids.tolist()) == ([0, 1, 0], [4, 0, 2])
    assert one.seeds.tolist() == [9, 8, 7]


def step(one: Book, ids: list[int], success: list[bool], *, ends: bool = False) -> list[tuple[bool, bool]]:
    """(terminated, truncated) of each by a step."""
    one.steps[ids] += 1
    terminated, truncated = one.end(numpy.array(ids), numpy.array(success), ends)
    return list(zip(terminated.tolist(), truncated.tolist(), strict=True))


def test_success_that_passes_is_none_and_at_the_last_step_it_terminates() -> None:
    one = book()
    one.begin(None, None)
    one.limits[3] = 2
    ids = [0, 1, 2, 3]
    assert step(one, ids, [True, False, False, False]) == [(False, False)] * 4
    assert one.info(numpy.array(ids))["success"].tolist() == [True, False, False, False]
    assert step(one, ids, [False, True, False, True]) == [(False, False)] * 3 + [(True, False)]
    assert step(one, ids[:3], [False, True, False]) == [(False, True), (True, False), (False, True)]
    info = one.info(numpy.array(ids), Chunk.empty(4, 2))
    assert info["success"].tolist() == [False, True, False, True] and not info["active"].any()
    assert info["finish_step"].tolist() == [3, 3, 3, 2] and info["executed"].shape == (4, 2)
    one.begin(None, {"env_ids": [1, 3]})
    info = one.info(numpy.array(ids))
    assert info["success"].tolist() == [False] * 4 and info["finish_step"].tolist() == [3, -1, 3, -1]
    assert step(one, [1], [True], ends=True) == [(True, False)]


def test_a_saved_book_goes_on_with_the_same_draws() -> None:
    one, other = book(), book()
    one.begin(None, {"task_ids": [1, 2, 3, 4], "trial_ids": [5, 6, 7, 8], "seeds": [9, 10, 11, 12]})
    step(one, [1, 2], [True, False], ends=True)
    arrays: dict[str, Any] = {"x": numpy.arange(3.0)}
    found = other.from_bytes(one.to_bytes({"kind": "book"}, arrays), {"kind": "book"})
    assert found["x"].tolist() == [0, 1, 2]
    ids = numpy.arange(4)
    for key, value in one.info(ids).items():
        assert torch.equal(other.info(ids)[key], value), key
    assert other.seeds.tolist() == [9, 10, 11, 12] and other.has_begun.all()
    assert drawn(one, [0, 1, 2, 3]) == drawn(other, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((-1.0, 1.0), [-1.0, 0.5, 1.0]),
        (None, [-3.0, 0.5, 2.0]),
        (([-2.0, 0.0, 0.0], [0.0, 0.25, 5.0]), [-2.0, 0.25, 2.0]),
    ],
)
def test_actions_are_clipped_to_the_bounds_of_each_number(bounds: Any, expected: list[float]) -> None:
    one = book(1)
    one.begin(None, None)
    given = torch.tensor([[[-3.0, 0.5, 2.0]]], dtype=torch.float64)
    actions, count = one.check_actions(given, numpy.array([0]), 3, None, bounds=bounds)
    assert actions.flatten().tolist() == expected and count == 1 and actions.dtype == torch.float32


COUNTS, NUM_ACTIONS = [5, 1, 3], 5


def plain(scoring: Scoring, values: Any, successes: Any, differs: Any, count: int, previous: float, streak: int) -> Any:
    """The scores of one environment, with pictures after each of ``count`` executed actions, or after the last."""
    rewards, of_values, shows = [0.0] * NUM_ACTIONS, [0.0] * NUM_ACTIONS, False
    values = [numpy.mean(values[max(0, k + 1 - scoring.mean_of) : k + 1]) for k in range(len(values))]
    actions = [count - 1] if scoring.judge == "last" else range(count)
    for picture, action in enumerate(actions):
        is_done = (
            values[picture] >= scoring.success_threshold
            if scoring.success_threshold is not None
            else successes[picture]
        )
        paid = scoring.reward_coef * (float(is_done) if scoring.sparse else values[picture])
        if scoring.reward_on == "each" or action == count - 1:
            rewards[action] = paid - (previous if scoring.use_rel_reward else 0.0)
        of_values[action], previous = values[picture], paid
        streak = streak + 1 if is_done else 0
        is_success = streak >= scoring.confirm
        shows = is_success or (shows and scoring.terminate_on_success)
    return rewards, shows, values[picture], of_values, differs[picture], previous, streak


OPTIONS = [
    dict(zip(("judge", "reward_on", "sparse", "use_rel_reward", "success_threshold", "terminate_on_success"), values))
    for values in itertools.product(
        ("all", "last"), ("each", "last"), (False, True), (False, True), (None, 0.5), (False, True)
    )
]


@pytest.mark.parametrize(("confirm", "mean_of"), [(1, 1), (2, 1), (1, 3)])
def test_a_chunk_is_scored_as_by_a_loop_over_its_pictures(confirm: int, mean_of: int) -> None:
    generator = torch.Generator().manual_seed(confirm)
    for options in OPTIONS:
        if options["use_rel_reward"] and options["reward_on"] == "last":
            continue
        if mean_of > 1 and options["judge"] == "last":
            with pytest.raises(ConfigError, match=r"scoring\.mean_of=3 .* scoring\.judge=all"):
                Scoring(mean_of=mean_of, **options)
            continue
        scoring = Scoring(confirm=confirm, mean_of=mean_of, reward_coef=2.0, **options)
        pictures = 1 if scoring.judge == "last" else max(COUNTS)
        values = (torch.randint(0, 5, (3, pictures), generator=generator) / 4).numpy()
        successes, differs = (torch.rand(3, pictures, generator=generator).numpy() < 0.5 for _ in range(2))
        previous, streak = numpy.array([0.5, -1.0, 2.0], dtype=numpy.float32), numpy.array([0, 1, 2])
        found = score(scoring, (values, successes, differs), numpy.array(COUNTS), NUM_ACTIONS, previous, streak)
        for i, count in enumerate(COUNTS):
            expected = plain(scoring, values[i], successes[i], differs[i], count, float(previous[i]), int(streak[i]))
            actual = [getattr(found, name)[i] for name in Scored.__dataclass_fields__]
            for one, other, name in zip(actual, expected, Scored.__dataclass_fields__, strict=True):
                assert numpy.allclose(one, other), (name, options, i)
        assert previous.tolist() == [0.5, -1.0, 2.0] and streak.tolist() == [0, 1, 2]
