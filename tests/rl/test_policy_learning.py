# SPDX-License-Identifier: Apache-2.0
"""A policy gets better by imagination, and much better in the simulator: the default runs, one seed."""

from pathlib import Path

import pytest

from benchmarks import policy_learning


@pytest.mark.long
@pytest.mark.parametrize("experiment", policy_learning.EXPERIMENTS)
def test_a_clone_gets_better(experiment: str, tmp_path: Path) -> None:
    row = policy_learning.learn(experiment, 0, policy_learning.clone(0, tmp_path, "0,12"), tmp_path)
    print(row)
    assert policy_learning.missed([row]) == []
