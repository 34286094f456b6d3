# SPDX-License-Identifier: Apache-2.0
"""A run whose folder is on s3://, against a server that speaks S3 over HTTP."""

import os
from pathlib import Path
from unittest import mock

import pytest

from imaginaire import storage
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS
from imaginaire.config.compose import compose
from imaginaire.errors import CheckpointError
from imaginaire.training.trainer import launch
from tests.training import CONFIG, difference, saved, train

pytestmark = pytest.mark.slow

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "checkpoint.save_iter=3"]


def train_there(root: str, overrides: list[str]) -> int:
    with mock.patch.dict(os.environ, {"IMAGINAIRE_OUTPUT_ROOT": root, "WANDB_MODE": "disabled"}):
        return launch(compose(CONFIG, ["experiment=restless", *overrides]))


@pytest.mark.parametrize("ckpt_type", ["standard", pytest.param("dcp", marks=pytest.mark.long)])
def test_a_run_on_s3_resumes_and_equals_one_on_disk(
    tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, ckpt_type: str
) -> None:
    overrides = [*QUICK, f"ckpt_type={ckpt_type}", "checkpoint.keep_last=2"]
    assert train(tmp_path, [*overrides, "trainer.max_iter=4"]) == 0
    assert train_there(s3_bucket, [*overrides, "trainer.max_iter=2"]) == 0
    assert train_there(s3_bucket, [*overrides, "trainer.max_iter=4"]) == 0
    assert storage._copies == set(), "copies of loaded files stay on the local disk"
    folder = storage.join(s3_bucket, "tests/engine/restless/checkpoints")
    found = checkpoint_layout.read_pointer(folder)
    assert found is not None and found.iteration == 4 and found.faults() == []
    trees = {kind: found.read(kind) for kind in KINDS}
    trees["trainer"].pop("files")
    assert difference(trees, saved(tmp_path)) is None
    assert [s.iteration for s in checkpoint_layout.all_sets(folder)] == [4, 3]
    top = storage.listdir(storage.join(s3_bucket, "tests/engine/restless"))
    assert {"config.yaml", "metrics.jsonl", "runs.jsonl"} <= set(top)
    if ckpt_type == "standard":
        _a_torn_set_is_named_and_weights_load_under_the_names_of_the_guides(tmp_path, s3_bucket, monkeypatch)


def _a_torn_set_is_named_and_weights_load_under_the_names_of_the_guides(
    tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = storage.join(s3_bucket, "tests/engine/restless/checkpoints/optim/iter_000000004.pt")
    with storage.open(path) as file:
        content = file.read()
    storage.write_atomically(path, lambda file: file.write(content[: len(content) // 2]))
    with pytest.raises(CheckpointError, match=r"(?s)optim/iter_000000004.pt.*iter_000000003.pt.*fallback=True"):
        train_there(s3_bucket, [*QUICK, "trainer.max_iter=5"])
    assert train_there(s3_bucket, [*QUICK, "trainer.max_iter=5", "checkpoint.fallback=True"]) == 0
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL"):
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", os.environ[f"AWS_{name}"])
        monkeypatch.delenv(f"AWS_{name}")
    path = f"{s3_bucket}/tests/engine/restless/checkpoints/model/iter_000000003.pt"
    assert train(tmp_path / "next", [*QUICK, f"checkpoint.load_path={path}", "trainer.max_iter=1"]) == 0
