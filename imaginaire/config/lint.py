# SPDX-License-Identifier: Apache-2.0
"""What is odd about a configuration on any machine: a dry run reports it, and tests check every experiment for it."""

import re
from collections.abc import Iterator

from imaginaire.config.schema import NEVER, Config

_TIME_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}|\d{2}[-:]\d{2}[-:]\d{2}|20\d{6}|\d{8,}")


def faults(config: Config) -> Iterator[tuple[str, str]]:
    """(config key, sentence) of what the author of an experiment should mend, though it runs."""
    name, max_iter, save_iter = config.job.name, config.trainer.max_iter, config.checkpoint.save_iter
    if _TIME_STAMP.search(name):
        yield "job.name", f"'{name}' has a time stamp: the next start gets another folder, and does not resume"
    if max_iter < save_iter < NEVER:
        yield (
            "checkpoint.save_iter",
            f"{save_iter} is beyond trainer.max_iter={max_iter}: the only checkpoint is that of the end",
        )


def remarks(config: Config) -> Iterator[tuple[str, str]]:
    """(config key, sentence) of what one may want to know, and may well intend."""
    max_iter = config.trainer.max_iter
    cycles = config.scheduler.get("cycle_lengths") if config.scheduler is not None else None
    if cycles and (end := sum(cycles)) < max_iter:
        yield (
            "scheduler.cycle_lengths",
            f"the schedule ends at {end}, before trainer.max_iter={max_iter}: from there on its last f_min holds",
        )
