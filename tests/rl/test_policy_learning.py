# SPDX-License-Identifier: Apache-2.0
"""Policies get better by imagination, and much better in the simulator: the default runs, one seed."""

from pathlib import Path

import pytest

from benchmarks import policy_learning


@pytest.mark.long
@pytest.mark.parametrize("experiment", [*policy_learning.EXPERIMENTS, "tiny_vla_grpo_openvla_oft_simulator"])
def test_a_clone_gets_better(experiment: str, tmp_path: Path) -> None:
    policy = policy_learning.clone(policy_learning.policy_of(experiment), 0, tmp_path)
    row = policy_learning.learn(experiment, 0, policy, tmp_path)
    print(row)
    assert policy_learning.missed([row]) == []
