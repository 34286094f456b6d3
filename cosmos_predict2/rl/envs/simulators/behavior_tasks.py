# SPDX-License-Identifier: Apache-2.0
"""The 50 tasks of the BEHAVIOR challenge of 2025, read from OmniGibson's data: sentences, starts, lengths."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, near

NUM_TASKS, TRIALS = 50, 10  # and the starts of each that the challenge evaluates
INSTANCES, DEMONSTRATIONS = "2025-challenge-task-instances", "2025-challenge-demos"
EPISODES_OF_A_TASK = 10_000  # an episode's number is its task's times this, and more
UNKNOWN_LENGTH = 2000  # of a human's episode
_TABLE = f"{DEMONSTRATIONS}/meta/tasks.jsonl"


@dataclass(frozen=True)
class Task:
    """``instances`` are the numbers of its recorded starts; ``max_steps`` twice what humans took on average."""

    index: int
    name: str
    language: str
    instances: tuple[int, ...]
    max_steps: int


def read_tasks(data: Path, names: Sequence[str] | None = None, table: str = "") -> tuple[Task, ...]:
    """The tasks of these names, or all in the order of their numbers.

    ``table`` is a file of lines with task_index, task_name and task, the sentence: by default that of the
    demonstrations.
    """
    lines = _lines(Path(table) if table else data / _TABLE, data, ("task_index", "task_name", "task"))
    rows = sorted(lines, key=lambda row: int(row["task_index"]))
    lengths, starts = _lengths(data), _starts(data)
    tasks = {}
    for row in rows:
        index = int(row["task_index"])
        steps = int(2 * fmean(lengths.get(index) or [UNKNOWN_LENGTH]))
        tasks[row["task_name"]] = Task(index, row["task_name"], row["task"], starts.get(index, ()), steps)
    for name in names or ():
        if name not in tasks:
            raise ConfigError(f"BEHAVIOR has no task '{name}'.{near(name, tasks)}")
    chosen = tuple(tasks[name] for name in names) if names else tuple(tasks.values())
    if without := [task.name for task in chosen if not task.instances]:
        raise DataError(f"{data / INSTANCES}/metadata/test_instances.csv has no starts of {', '.join(without)}.")
    return chosen


def _lengths(data: Path) -> Mapping[int, list[int]]:
    """How many steps humans took, by task."""
    found = defaultdict(list)
    for row in _lines(data / INSTANCES / "metadata" / "episodes.jsonl", data, ("episode_index", "length")):
        found[int(row["episode_index"]) // EPISODES_OF_A_TASK].append(int(row["length"]))
    return found


def _starts(data: Path) -> Mapping[int, tuple[int, ...]]:
    """The numbers of the published starts for evaluations, by task: the third column."""
    path = data / INSTANCES / "metadata" / "test_instances.csv"
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1:]
        return {int(row[0]): tuple(int(number) for number in row[2].split(",")) for row in rows if row}
    except (OSError, ValueError, IndexError) as error:
        raise _missing(path, data, error) from error


def _lines(path: Path, data: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    try:
        rows = [foreign_json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [{key: row[key] for key in keys} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _missing(path, data, error) from error


def _missing(path: Path, data: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is missing or damaged ({error}). The data of BEHAVIOR's tasks are fetched by\n"
        f"  hf download behavior-1k/{INSTANCES} --repo-type dataset --local-dir {data / INSTANCES}\n"
        f"  hf download behavior-1k/{DEMONSTRATIONS} meta/tasks.jsonl --repo-type dataset --local-dir"
        f" {data / DEMONSTRATIONS}"
    )
