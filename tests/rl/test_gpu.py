# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards on a GPU: rollout and training agree exactly there, too, and runs resume."""

import math
from pathlib import Path

import pytest

from tests.rl.runs import run
from tests.rl.test_flow_grpo import VARIANTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["reference", "adapters", "nft", "predict2p5"])  # the last in bfloat16
def test_a_run_learns_resumes_and_has_ratios_of_one(name: str, tmp_path: Path) -> None:
    run(tmp_path, *VARIANTS[name])
    records = run(tmp_path, *VARIANTS[name], "trainer.max_iter=3", "checkpoint.save_iter=9")
    assert [one["iteration"] for one in records] == [1, 2, 3]
    for one in records:
        assert math.isfinite(one["train/loss"]) and one["train/grad_norm"] > 0
        assert one["train/agreement_valid_rate"] == 1
        assert name == "nft" or (one["train/log_prob_ratio"], one["train/ratio_std"]) == (1.0, 0.0)
