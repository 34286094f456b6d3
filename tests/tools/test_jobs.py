# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.tools.jobs: many items over several cores."""

import os
from pathlib import Path

import pytest

from cosmos_predict2.tools.jobs import Outcome, run_jobs
from imaginaire.errors import DataError


def _square(number: int) -> int:
    if number == 3:
        raise DataError("three is broken")
    if number == 5:
        raise TypeError("a bug")
    if number == 6:
        Path("/").read_text()
    if number == 7:
        os._exit(1)
    return number**2


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_faults_are_collected_and_the_rest_goes_on_in_order(workers: int) -> None:
    outcome = run_jobs(_square, [4, 3, 6, 2, 1], what="numbers", workers=workers)
    assert outcome == Outcome([16, 4, 1], ["three is broken", "/: Is a directory."])
    assert outcome.report("numbers") == 1
    with pytest.raises(TypeError, match="a bug"):
        run_jobs(_square, [5, 1], what="numbers", workers=workers)


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_with_a_cure() -> None:
    with pytest.raises(DataError, match="fewer --workers"):
        run_jobs(_square, [7, 1, 2], what="numbers", workers=2)


def test_commands_are_waited_for_in_threads() -> None:
    outcome = run_jobs(_square, [4, 3, 2, 1], what="numbers", workers=3, in_threads=True)
    assert (outcome.results, outcome.faults) == ([16, 4, 1], ["three is broken"])
