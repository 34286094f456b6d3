# SPDX-License-Identifier: Apache-2.0
"""Environments in processes of their own, and with workers that answer here: they keep the contract, and faults are
raised or mended."""

import itertools
import math
import pickle
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.contract import check_environment, check_frames
from cosmos_predict2.rl.envs.simulators import rendering, worker_process, workers
from cosmos_predict2.rl.envs.simulators.worker_process import DONE, STEPPED
from cosmos_predict2.rl.envs.simulators.worker_process import _ServedEnv as Answering
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv, WorkerError
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts
from cosmos_predict2.rl.episodes.policy_evaluation import evaluate
from cosmos_predict2.rl.interfaces import Decision
from imaginaire.config import L
from imaginaire.config.lazy_config import instantiate
from imaginaire.errors import ConfigError, DataError
from tests.programs import finished, python
from tests.rl.envs.task_envs import DEADLY, DIES, HANGS, RAISES, TellingTask, ToyTask
from tests.rl.envs.test_company import CHUNK, Plan


def actions(*last: float) -> Tensor:
    """A chunk for each environment, whose last number is given."""
    chunk = torch.zeros(len(last), 3, 4)
    chunk[:, 1, 3] = torch.tensor(last)
    return chunk


def test_workers_keep_the_contract() -> None:
    node = L(WorkerEnv)(make=L(ToyTask)(), num_envs=3, keep_frames=True, _recursive_=False)
    env = instantiate(node)
    check_environment(pickle.loads(pickle.dumps(env)))  # as it travels to actors of Ray
    assert not env._workers  # and the first one has none
    env.views = ("above", "half as large")
    check_frames(env, 0)


def test_each_worker_has_its_own_seed_and_renderer_and_what_the_environment_was_built_with() -> None:
    env = WorkerEnv(TellingTask, 2, render="egl", chunk=2, terminate_on_success=False)
    with mock.patch.object(rendering, "variables", lambda render, number: {"NUMBER": f"{number}"}):
        seen, _ = env.reset(options={"seeds": [5, 6]})
    assert seen["state"].tolist() == [[5, 0], [6, 1]] and env.metadata["chunk"] == 2
    chunk = torch.arange(16.0).reshape(2, 2, 4) / 16
    _, reward, terminated, _, info = env.chunk_step(chunk)
    assert torch.equal(reward, chunk[:, :, 0])  # in their order
    assert info["success"].all() and info["executed"].all() and not terminated.any()
    env.close()


def test_a_script_without_a_main_guard_ends_at_once_with_the_cure(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv\n"
        "from tests.rl.envs.task_envs import ToyTask\n"
        "WorkerEnv(ToyTask, 1).reset()\n"
    )
    done = finished(python(), script, PYTHONPATH=str(Path(__file__).parents[3]))
    assert done.returncode and "WorkerError: Environment 0: its process ended" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr and "it is started again" not in done.stderr


def test_an_environment_that_cannot_be_built_says_why() -> None:
    env = WorkerEnv(partial(ToyTask, breaks="building"), 1)
    with pytest.raises(DataError, match="Environment 0: no assets here"):
        env.reset()
    env.close()


@pytest.mark.parametrize("make", [lambda: ToyTask(), ToyTask()], ids=["lambda", "built before"])
def test_what_a_worker_cannot_build_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"Give a class|give a callable"):
        WorkerEnv(make, 1)


class Stubborn:
    """Decides on the same actions again and again; where episodes are over, the others do nothing special."""

    def __init__(self, *last: float) -> None:
        self.actions = actions(*last)

    def act(self, observation: Any, **options: Any) -> Decision:
        num = len(observation["full_image"])
        chosen = self.actions if num == len(self.actions) else actions(*[0.0] * num)
        return Decision(chosen, {"number": torch.zeros(num)})


def test_a_worker_that_dies_in_a_reset_is_replaced_and_its_episode_begins(tmp_path: Path) -> None:
    """In the first one of all, when the others have no memory to share yet, and later."""
    deadly = tmp_path / "deadly"
    env = WorkerEnv(partial(ToyTask, deadly=str(deadly)), 2)
    expected = ToyTask().reset(0, DEADLY, 0)
    for restarts in (1, 2):
        deadly.touch()
        observed, info = env.reset(options={"trial_ids": [1, DEADLY], "task_ids": [0, 0]})
        assert env.restarts == restarts and env.lost == 0 and info["valid"].all() and info["active"].all()
        assert torch.equal(observed["full_image"][1], torch.from_numpy(expected["full_image"]))
        seen, *_, info = env.chunk_step(torch.full((2, 3, 4), 0.5))
        assert info["executed"][:, 0].all() and not torch.equal(seen["full_image"][1], observed["full_image"][1])
    env.close()


def test_the_time_of_a_worker_is_for_one_action_however_many_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    ours: Any = mock.Mock(_heard=lambda deadlines: [*deadlines], _bury=mock.Mock(return_value=[]))
    answers = [(STEPPED, k, False, None) for k in range(20)] + [("done", "its result")]
    ours._workers = {0: mock.Mock(receive=mock.Mock(side_effect=answers))}
    seen: list[int] = []
    found = WorkerEnv._ask(ours, {0: ("play",)}, 5.0, lambda env, reward, *_: seen.append(int(reward)))
    assert found == {0: "its result"} and seen == [*range(20)] and not ours._bury.called


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_costs_its_episode_only(caplog: pytest.LogCaptureFixture) -> None:
    env = WorkerEnv(partial(ToyTask, breaks="steps"), 3, step_timeout=5.0, max_deaths=2, keep_frames=True)
    starts = Starts([0, 0, 0], [0, 1, 2], [0, 0, 0], [0, 1, 2])
    played = LocalRollout(Stubborn(0.0, DIES, HANGS), env, keep_frames=True).collect(starts)  # type: ignore[arg-type]
    assert played.is_valid_E.tolist() == [True, False, False] and not played.success_E[1:].any()
    assert played.finish_step_E.tolist() == [8, 1, 1]
    assert played.executed_M_E_A.sum(dim=(0, 2)).tolist() == [8, 1, 1]
    assert played.frames_E_F_H_W_C is not None and len(played.frames_E_F_H_W_C[0]) == 1 + 9
    assert (env.lost, env.restarts) == (2, 2)
    assert "signal 9" in caplog.text and "no answer in 5 seconds" in caplog.text
    found = evaluate(Stubborn(0.0, DIES, 0.0), env, starts, ["all"])  # type: ignore[arg-type]
    assert found.total.episodes == 2  # the lost one does not count
    again = LocalRollout(Stubborn(0.0, 0.0, 0.0), env).collect(starts)  # type: ignore[arg-type]
    assert again.is_valid_E.all()  # which also ends the count of deaths in a row
    env.reset(options={"trial_ids": [0, 1, 2]})
    state = env.get_state()
    assert not env.chunk_step(actions(0.0, DIES, 0.0))[4]["valid"][1]
    env.load_state(state)  # in the worker that took its place
    assert env.chunk_step(actions(0.0, 0.0, 0.0))[4]["valid"].all()
    env.reset()
    assert not env.chunk_step(actions(0.0, DIES, 0.0))[4]["valid"][1]
    env.reset()
    with pytest.raises(WorkerError, match="died 3 times in a row"):
        env.chunk_step(actions(0.0, DIES, 0.0))
    env.close()


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
    """Episodes differ in length, one is lost, and one is the second of its place."""
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
    assert [*map(len, env._actions)] == [*map(len, other._actions)]


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


class Diverging(ToyTask):
    """Environment 1 pays what is no number, or sees it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def step(self, action: Any) -> Any:
        observed, reward, is_success = super().step(action)
        bad = action[3] == RAISES
        if bad and self.what == "state":
            observed["state"] = observed["state"] * math.nan
        return observed, math.nan if bad and self.what == "reward" else reward, is_success


@pytest.mark.parametrize(
    ("what", "said"), [("reward", "a step paid nan"), ("state", "observation's state has numbers that are not finite")]
)
def test_numbers_of_a_simulation_that_diverged_cost_its_episode(
    what: str, said: str, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = begun(made(2, partial(Diverging, what)))
    steps = torch.zeros(2, CHUNK, 4)
    steps[1, -1, 3] = RAISES
    _, reward, _, _, info = env.chunk_step(steps)
    assert info["valid"].tolist() == [True, False] and env.lost == 1
    assert reward.isfinite().all() and said in caplog.text


@pytest.mark.parametrize("requests", [[("reset", 0, 0, 0), ("close",)], [EOFError]])
def test_a_worker_closes_its_environment_however_it_ends(requests: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "signal", mock.Mock())
    monkeypatch.setattr(ToyTask, "close", close := mock.Mock())
    connection = mock.Mock(recv=mock.Mock(side_effect=requests))
    worker_process.serve(connection, pickle.dumps(ToyTask), {})
    assert connection.send.call_count == len(requests)
    close.assert_called_once_with()


class Growing(ToyTask):
    """A second start with larger pictures."""

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        observed = super().reset(task_id, trial_id, seed)
        return observed if trial_id == 0 else {**observed, "full_image": observed["full_image"].repeat(2, axis=0)}


def test_observations_of_other_shapes_are_refused(made: Any) -> None:
    env = made(2, Growing)
    env.reset(options={"task_ids": [0, 0], "trial_ids": [0, 0]})
    for number in (1, 0):
        with pytest.raises(DataError, match=rf"Environment {number}: an observation's full_image has shape \[.*others"):
            env.reset(options={"env_ids": [number], "task_ids": [0], "trial_ids": [1]})


def test_workers_that_are_released_start_again_with_the_next_reset(made: Any) -> None:
    env = made(2)
    first, _ = env.reset(options={"trial_ids": [0, 1]})
    env.release()
    assert not env._workers
    again, info = env.reset(options={"trial_ids": [0, 1]})
    assert torch.equal(again["full_image"], first["full_image"]) and info["valid"].all()


def test_the_first_way_that_draws_is_taken_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    faults = {"egl": "libEGL.so.1: cannot open shared object file", "osmesa": 1}
    with mock.patch.object(rendering, "_probed", faults.get):
        rendering.works.cache_clear()
        assert rendering.variables("auto") == {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}
        with pytest.raises(ConfigError, match=r"libEGL.so.1.*\n?.*apt-get install libegl1"):
            rendering.variables("egl")
        with mock.patch.dict(faults, egl=2):  # both draw
            rendering.works.cache_clear()
            assert (rendering.works("auto"), rendering.works("osmesa")) == (("egl", 2), ("osmesa", 1))
            rendering.works.cache_clear()
        monkeypatch.setenv("MUJOCO_GL", "egl")  # somebody's choice is not overruled
        rendering.works.cache_clear()
        with pytest.raises(ConfigError, match="render=auto"):
            rendering.variables("auto")
        with pytest.raises(ConfigError, match="Did you mean osmesa"):
            rendering.variables("mesa")
    rendering.works.cache_clear()


@pytest.mark.parametrize(
    ("code", "printed", "said", "found"),
    [
        (0, "drawn 3\n", "", 3),
        (0, "drawn 0\n", "", "the picture is black"),
        (1, "", "warning\nOSError: no libOSMesa.\n", "OSError: no libOSMesa"),
        (-11, "", "", "exit code -11"),
    ],
)
def test_a_way_draws_where_a_picture_is_seen(code: int, printed: str, said: str, found: int | str) -> None:
    done = subprocess.CompletedProcess([], code, printed, said)
    with mock.patch.object(subprocess, "run", return_value=done) as run:
        assert rendering._probed("osmesa") == found
    assert run.call_args.kwargs["env"]["MUJOCO_GL"] == "osmesa"


@pytest.mark.parametrize(
    ("visible", "world_size", "devices"),
    [("", "1", ["0", "1", "2", "0"]), ("4,6", "1", ["0", "0", "0", "0"]), ("2,1", "2", ["1", "1", "1", "1"])],
)
def test_workers_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: str, world_size: str, devices: list[str]
) -> None:
    """Each of several processes has its own; GPUs unknown to EGL are left out, as in containers without graphics."""
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with mock.patch.object(rendering, "works", lambda render: ("egl", 3)):
        assert [rendering.variables("egl", i)["MUJOCO_EGL_DEVICE_ID"] for i in range(4)] == devices
