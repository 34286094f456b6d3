# SPDX-License-Identifier: Apache-2.0
"""The data of a policy's run: which task each group of episodes has, and which of its starts."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import Dataset

from cosmos_predict2.rl.envs.recorded_starts import HELD_OUT_EVERY, RecordedStarts
from cosmos_predict2.rl.envs.remote import facts_of
from cosmos_predict2.rl.episodes.episodes import release
from cosmos_predict2.rl.interfaces import VecEnv
from imaginaire.data.stream import data_sets
from imaginaire.errors import ConfigError, DataError, near

PARTS = ("train", "held_out")


class EpisodeStarts(Dataset[dict[str, int]]):
    """``num`` starts from number ``first`` on, of the tasks in turn. The environment knows what they are.

    ``num_tasks`` are null those of the environment.
    """

    def __init__(self, num: int, num_tasks: int | None = None, first: int = 0) -> None:
        if num < 1 or first < 0 or (num_tasks is not None and num_tasks < 1):
            raise ConfigError(f"EpisodeStarts(num={num}, num_tasks={num_tasks}, first={first}): at least 1, 1 and 0.")
        self.num, self.num_tasks, self.first = num, num_tasks, first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, int]:
        return self.of_number(self.first + index)

    def of_number(self, number: int) -> dict[str, int]:
        if self.num_tasks is None:
            raise ConfigError("EpisodeStarts.num_tasks is null, and no model has set how many its environment has.")
        return {"task_id": number % self.num_tasks, "trial_id": number // self.num_tasks}


class RecordedEpisodeStarts(EpisodeStarts):
    """The starts of recordings that are of a part, "train" or "held_out": all, or the first ``num`` of them.

    ``starts`` are those of the environment, or its address; null of one that has others, such as a simulator, whose
    first ``num`` are taken.
    """

    def __init__(self, starts: RecordedStarts | str | None, part: str = "train", num: int | None = None) -> None:
        if part not in PARTS:
            raise ConfigError(f"part '{part}' of starts.{near(part, PARTS)}")
        self.numbers: Sequence[int] = range(num or 0)
        num_tasks, where = None, ""
        if isinstance(starts, str):
            facts = facts_of(starts)
            self.numbers, num_tasks, where = facts["parts"].get(part, [])[:num], facts["metadata"]["num_tasks"], starts
        elif starts is not None:
            self.numbers, num_tasks = starts.numbers(part)[:num], starts.num_tasks
            where = f"{starts.path} ({len(starts)} starts)"
        if not self.numbers and not where:
            raise DataError("RecordedEpisodeStarts(starts=null) needs num, the number of starts of the environment.")
        if not self.numbers:
            found = f"{where}: none of its starts is of the part '{part}'"
            raise DataError(f"{found}. Without a split every {HELD_OUT_EVERY}th recording is held out: give more.")
        super().__init__(len(self.numbers), num_tasks)

    def __getitem__(self, index: int) -> dict[str, int]:
        return self.of_number(self.numbers[index])


def settle_num_tasks(loaders: Iterable[Any], envs: Sequence[VecEnv], *, is_remote: bool) -> None:
    """Give the number of tasks of each loader's environment to its `EpisodeStarts`, or raise where theirs is another.

    An environment that plays elsewhere is asked only where the data say nothing: simulators start by being asked, and
    those of the other environments than the first are released again.
    """
    for loader, env, key in reversed([*zip(loaders, envs, ("dataloader_train", "dataloader_val"))]):
        for data in data_sets(loader):
            if not isinstance(data, EpisodeStarts) or (is_remote and data.num_tasks is not None):
                continue
            found = int(env.metadata.get("num_tasks", 1))
            if data.num_tasks not in (None, found):
                wrong = f"{key}.dataset.num_tasks={data.num_tasks}, but the environment has {found} tasks"
                raise ConfigError(f"{wrong}: set it to null, and choose tasks in the environment (tasks=[...]).")
            data.num_tasks = found
        if env is not envs[0]:
            release(env)
