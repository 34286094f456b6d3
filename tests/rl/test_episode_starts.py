# SPDX-License-Identifier: Apache-2.0
"""The starts that a policy's run plays: of all tasks that its environment has."""

from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts, settle_num_tasks
from imaginaire.errors import ConfigError

TASKS = ["push_puck", "touch_puck"]


def _settled(data: EpisodeStarts, env: Any, is_remote: bool = False) -> list[tuple[int, int]]:
    settle_num_tasks([SimpleNamespace(dataset=data)], [env], is_remote=is_remote)
    return [(one["task_id"], one["trial_id"]) for one in (data[i] for i in range(len(data)))]


def test_all_tasks_of_the_environment_are_played_in_turn() -> None:
    env = ToyEnv(2, tasks=TASKS)
    assert _settled(EpisodeStarts(5), env) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert _settled(EpisodeStarts(3, first=5), env) == [(1, 2), (0, 3), (1, 3)]
    assert _settled(EpisodeStarts(2), SimpleNamespace(metadata={})) == [(0, 0), (0, 1)]  # one of a user's
    assert _settled(EpisodeStarts(3, num_tasks=2), env) == [(0, 0), (1, 0), (0, 1)]


def test_another_number_of_tasks_than_the_environment_has_is_refused() -> None:
    for num_tasks in (1, 3):
        with pytest.raises(ConfigError, match=rf"dataloader_train.dataset.num_tasks={num_tasks}.*has 2 tasks.*null"):
            _settled(EpisodeStarts(5, num_tasks), ToyEnv(2, tasks=TASKS))
    assert _settled(EpisodeStarts(2, num_tasks=3), None, is_remote=True) == [(0, 0), (1, 0)]  # which asks nobody
    with pytest.raises(ConfigError, match="num_tasks is null"):
        EpisodeStarts(5)[0]


def test_the_simulators_of_validation_are_released_after_they_were_asked_and_those_of_training_stay() -> None:
    released: list[str] = []
    envs: list[Any] = [
        SimpleNamespace(metadata={"num_tasks": num}, release=lambda num=num: released.append(str(num)))
        for num in (2, 3)
    ]
    loaders = [SimpleNamespace(dataset=EpisodeStarts(4)) for _ in envs]
    settle_num_tasks(loaders, envs, is_remote=False)
    assert [loader.dataset.num_tasks for loader in loaders] == [2, 3] and released == ["3"]
