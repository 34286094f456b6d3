# SPDX-License-Identifier: Apache-2.0
"""The data of a policy's run: which task each group of episodes has, and which of its starts."""

from torch.utils.data import Dataset

from imaginaire.errors import ConfigError


class EpisodeStarts(Dataset[dict[str, int]]):
    """``num`` starts from number ``first`` on, of the tasks in turn. The environment knows what they are."""

    def __init__(self, num: int, num_tasks: int = 1, first: int = 0) -> None:
        if num < 1 or num_tasks < 1 or first < 0:
            raise ConfigError(f"EpisodeStarts(num={num}, num_tasks={num_tasks}, first={first}): at least 1, 1 and 0.")
        self.num, self.num_tasks, self.first = num, num_tasks, first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"task_id": index % self.num_tasks, "trial_id": self.first + index // self.num_tasks}
