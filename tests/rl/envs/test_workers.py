# SPDX-License-Identifier: Apache-2.0
"""Environments in processes of their own: they keep the contract, and what goes wrong in one is said or mended."""

import itertools
import os
import pickle
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.simulators import rendering, workers
from cosmos_predict2.rl.envs.simulators.worker_process import STEPPED
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv, WorkerError
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts
from cosmos_predict2.rl.episodes.policy_evaluation import evaluate
from cosmos_predict2.rl.interfaces import Decision
from imaginaire.config import L
from imaginaire.config.lazy_config import instantiate
from imaginaire.errors import ConfigError, DataError
from tests.programs import HANG_S, python
from tests.rl.envs.task_envs import DEADLY, DIES, HANGS, TellingTask, ToyTask


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
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [python(), str(script)], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=HANG_S
    )
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
