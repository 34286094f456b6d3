# SPDX-License-Identifier: Apache-2.0
"""A run of the video model goes on in another layout: whole to sharded and back, from both kinds of checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.models.test_tiny_twin import CONFIG, NAME, SHORT
from tests.multiprocess import run_distributed
from tests.training import saved, train

OPTIONS = [*SHORT, "optimizer=adamw", "~optimizer.adam_lr", "optimizer.lr=1e-3", "trainer.run_validation=False"]
SHARDED = ["trainer.distributed_parallelism=fsdp", "model.config.fsdp_shard_size=-1", "dataloader_train.batch_size=2"]


def _train(root: Path, kind: str, steps: int, *options: str) -> None:
    assert train(root, [*OPTIONS, f"ckpt_type={kind}", f"trainer.max_iter={steps}", *options], config=CONFIG) == 0


def _train_sharded(root: Path, whole: str, sharded: str, options: list[str]) -> None:
    _train(root / "whole", whole, 3, *SHARDED, *options)
    _train(root / "sharded", sharded, 2, *SHARDED, *options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "whole", "sharded"), [("base", "standard", "dcp"), ("lora", "dcp", "standard")]
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, architecture: str, whole: str, sharded: str) -> None:
    options = [f"model.config.train_architecture={architecture}"]
    _train(tmp_path / "uninterrupted", "standard", 3, *options)
    _train(tmp_path / "whole", whole, 2, *options)
    run_distributed(_train_sharded, 2, (tmp_path, whole, sharded, options))
    _train(tmp_path / "sharded", sharded, 3, *options)
    expected = saved(tmp_path / "uninterrupted", NAME)
    for run in ("whole", "sharded"):
        found = saved(tmp_path / run, NAME)
        assert found["trainer"]["iteration"] == 3
        torch.testing.assert_close(found["model"], expected["model"], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found["optim"]["state"], expected["optim"]["state"], rtol=1e-3, atol=1e-5)
