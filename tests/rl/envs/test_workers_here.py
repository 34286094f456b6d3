# SPDX-License-Identifier: Apache-2.0
"""Environments of workers, which answer here in this process: company, ends, lost episodes and saved states."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.envs.simulators.worker_process import DONE
from cosmos_predict2.rl.envs.simulators.worker_process import _Worker as Answering
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv, WorkerError
from tests.rl.envs.task_envs import RAISES, TellingTask, ToyTask
from tests.rl.envs.test_company import CHUNK, Plan


class Here:
    """A worker that answers at once; ``dies`` has those that are to be lost with their next request."""

    def __init__(self, env: int, make: Any, dies: set[int]) -> None:
        self.env, self.dies, self.is_built, self.answers = env, dies, False, list[tuple[Any, ...]]()
        self.answering = Answering(self, make())  # type: ignore[arg-type]
        self.answers.append((DONE, self.answering.facts()))
        self.process = self.connection = self

    def send(self, content: Any) -> None:
        """A request of the environment, or an answer of the worker."""
        if content is None or content[0] == "close":
            return
        if isinstance(content[0], str) and hasattr(self.answering, content[0]):
            if self.env in self.dies and content[0] == "play":
                self.dies.discard(self.env)
                self.answers.append((None, "as planned"))
                return
            self.answering.answer(*content)
        else:
            self.answers.append(content)

    def receive(self) -> tuple[Any, ...]:
        return self.answers.pop(0)

    def join(self, timeout: float | None = None) -> None: ...

    def end(self) -> None:
        self.answering.env.close()


class EnvHere(WorkerEnv):
    dies: set[int]

    def _started(self, env: int) -> Any:
        return Here(env, self.make, self.dies)

    def _heard(self, deadlines: Mapping[int, float]) -> Any:
        return [i for i in deadlines if self._workers[i].answers]  # type: ignore[attr-defined]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NUMBER", "0")
    envs: list[EnvHere] = []

    def make(num_envs: int = 4, task: Any = ToyTask, **options: Any) -> EnvHere:
        env = EnvHere(task, num_envs, **options)
        env.dies, env.action_dim = set(), 4  # type: ignore[attr-defined]
        envs.append(env)
        return env

    yield make
    for env in envs:
        env.close()


@pytest.mark.parametrize("options", [dict(), dict(terminate_on_success=False, keep_frames=True)])
def test_an_episode_of_a_worker_is_the_same_in_any_company(options: dict[str, Any], made: Any) -> None:
    plan = Plan(4, num_calls=16)
    found = plan.played(made(**options))
    for i in range(4):
        assert plan.played(made(**options), only=i) == {i: found[i]}


def begun(env: Any) -> Any:
    numbers = list(range(env.num_envs))
    env.reset(options=dict(task_ids=numbers, trial_ids=numbers, seeds=numbers))
    return env


def chunk(env: Any, num: int | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(env.num_envs if num is None else num, CHUNK, 4, generator=generator) * 2 - 1


def test_a_state_taken_over_shows_the_same_and_goes_on_the_same(made: Any) -> None:
    """Of episodes that differ in length, of which one is lost and one is a second one."""
    env, other = begun(made(keep_frames=True)), made(keep_frames=True)
    env.chunk_step(chunk(env, 2), [1, 3], 2)
    env.dies.add(0)
    env.chunk_step(chunk(env, 2, seed=1), [0, 3], 3)
    env.reset(options=dict(env_ids=[3], task_ids=[1], trial_ids=[9], seeds=[9]))
    other.load_state(env.get_state())
    for count in (1, 2, CHUNK, CHUNK):
        results = [one.chunk_step(chunk(one, seed=count), None, count) for one in (env, other)]
        for one, expected in zip(results[1][:4], results[0][:4], strict=True):
            for name in one if isinstance(one, dict) else [None]:
                values = (one, expected) if name is None else (one[name], expected[name])
                assert torch.equal(*values) if isinstance(values[0], torch.Tensor) else values[0] == values[1]
        for name, value in results[0][4].items():
            assert torch.equal(results[1][4][name], value), name
        assert results[0][4]["valid"].tolist() == [False, True, True, True]
    assert results[0][4]["finish_step"].tolist()[1:] == [8, 8, 8]
    assert torch.equal(
        torch.tensor([len(one) for one in env._actions]), torch.tensor([len(one) for one in other._actions])
    )


def test_a_lost_episode_is_invalid_until_the_next_one_begins_and_others_go_on(made: Any) -> None:
    env = begun(made())
    env.dies.add(2)
    _, reward, _, _, info = env.chunk_step(chunk(env), None, 2)
    assert info["valid"].tolist() == [True, True, False, True] and info["active"].tolist() == [True, True, False, True]
    assert info["executed"].sum(dim=1).tolist() == [2, 2, 0, 2] and not reward[2].any() and not info["success"][2]
    assert (env.lost, env.restarts) == (1, 1)
    _, info = env.reset(options=dict(env_ids=[2, 1]))
    assert info["valid"].all() and info["active"].all()


def test_an_environment_that_is_lost_too_often_in_a_row_ends_the_run_and_one_that_plays_between_does_not(
    made: Any,
) -> None:
    env = begun(made(2, max_deaths=1))
    for _ in range(3):
        env.dies.add(0)
        env.chunk_step(chunk(env))
        begun(env)
        for _ in range(2):
            env.chunk_step(chunk(env))  # to the end
        begun(env)
    env.dies.add(0)
    env.chunk_step(chunk(env))
    begun(env)
    env.chunk_step(chunk(env), None, 2)  # not to its end
    env.dies.add(0)
    with pytest.raises(WorkerError, match=r"died 2 times in a row \(max_deaths=1\)"):
        env.chunk_step(chunk(env))


def test_success_ends_an_episode_where_it_is_asked_to(made: Any) -> None:
    for ends, counts in ((True, [1, 0]), (False, [CHUNK, 2])):
        env, found = begun(made(1, TellingTask, terminate_on_success=ends)), []
        for _ in range(2):
            _, reward, _, truncated, info = env.chunk_step(chunk(env))
            found.append(int(info["executed"].sum()))
            assert reward.count_nonzero() == found[-1] and not truncated.any()
        assert found == counts and info["success"].all() and not info["active"].any()
    assert [made(1, chunk=given).metadata["chunk"] for given in (None, 2, 50)] == [3, 2, 8]


def test_what_a_simulator_raises_costs_its_episode_until_it_happens_too_often(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = begun(made(2, partial(ToyTask, breaks="steps"), max_deaths=1))
    steps = torch.zeros(2, CHUNK, 4)
    steps[1, 1, 3] = RAISES
    info = env.chunk_step(steps)[4]
    assert info["valid"].tolist() == info["active"].tolist() == [True, False] and (env.lost, env.restarts) == (1, 1)
    assert "environment 1 died: RuntimeError: the simulation is unstable" in caplog.text
    assert "in _misbehave" in caplog.text  # the worker's traceback
    _, info = env.reset(options={"env_ids": [1], "trial_ids": [1]})  # it goes on
    assert info["valid"].all()
    with pytest.raises(WorkerError, match=r"Environment 1: .* 2 times in a row .*the simulation is unstable") as raised:
        env.chunk_step(steps[1:], env_ids=[1])
    assert raised.value.env == 1 and "in _misbehave" in raised.value.traceback


def test_workers_that_are_released_start_again_with_the_next_reset(made: Any) -> None:
    env = made(2)
    first, _ = env.reset(options={"trial_ids": [0, 1]})
    env.release()
    assert not env._workers
    again, info = env.reset(options={"trial_ids": [0, 1]})
    assert torch.equal(again["full_image"], first["full_image"]) and info["valid"].all()
