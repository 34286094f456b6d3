# SPDX-License-Identifier: Apache-2.0
"""A run folder is continued with the switches that its checkpoints were written with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import CheckpointSet
from imaginaire.config.compose import compose
from imaginaire.training import preflight

CONFIG = "cosmos_predict2/configs/base/config.py"
EXPERIMENT = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
LORA = "model.config.train_architecture=lora"
NO_AVERAGE = "model.config.pipe_config.ema.enabled=False"
LAYER = "blocks.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    yield tmp_path / "posttraining/video2world/tiny_groot_gr1_480"


def _save(run: Path, *, has_lora: bool, has_average: bool, is_dcp: bool = False) -> None:
    """A checkpoint with the names, and hardly the numbers, of such a run."""
    state = {"net.x_embedder.proj.1.weight": torch.zeros(1, 1)}
    if has_lora:
        state |= {f"net.{LAYER}.base_layer.weight": torch.zeros(3, 3)}
        state |= {f"net.{LAYER}.lora_A.default.weight": torch.zeros(16, 3)}
    if has_average:
        state |= {name.replace("net.", "net_ema."): tensor for name, tensor in state.items()}
    trees = {"model": state, "optim": {}, "scheduler": {}, "trainer": {"iteration": 2}}
    (run / "checkpoints").mkdir(parents=True)
    saved = CheckpointSet(str(run / "checkpoints"), checkpoint_layout.set_name(2, dcp=is_dcp))
    (checkpoint_layout.write_dcp if is_dcp else checkpoint_layout.write_standard)(saved, trees)


def _problems(*overrides: str) -> dict[str, str]:
    found = preflight.findings(compose(CONFIG, [EXPERIMENT, *overrides]))
    return {finding.key: f"{finding.text}. {finding.cure}" for finding in found}


@pytest.mark.parametrize("is_dcp", [False, True], ids=["standard", "dcp"])
def test_a_run_with_adapters_is_not_continued_without_them(root: Path, is_dcp: bool) -> None:
    _save(root, has_lora=True, has_average=True, is_dcp=is_dcp)
    assert _problems(LORA) == {}
    found = _problems()
    assert list(found) == ["model.config.train_architecture"]
    text = found["model.config.train_architecture"]
    assert text.startswith("base, but ") and "iter_000000002" in text and "was saved with lora" in text
    assert "job.name=tiny_groot_gr1_480_2" in text and f"go on with {LORA}" in text
    assert _problems("job.name=another") == {}  # as it says


@pytest.mark.parametrize("was_on", [True, False])
def test_an_average_is_neither_dropped_nor_begun_on_the_way(root: Path, was_on: bool) -> None:
    _save(root, has_lora=False, has_average=was_on)
    same, other = ([], [NO_AVERAGE]) if was_on else ([NO_AVERAGE], [])
    assert _problems(*same) == {}
    found = _problems(*other)
    assert list(found) == ["model.config.pipe_config.ema.enabled"]
    assert f"saved with {was_on}" in found["model.config.pipe_config.ema.enabled"]
    # who lists exceptions decides by hand
    assert _problems(*other, 'checkpoint.allow_unexpected=["net_ema.*"]') == {}
    assert _problems(*other, "checkpoint.strict_resume=False") == {}


def test_another_rank_or_alpha_is_told_by_name(root: Path) -> None:
    _save(root, has_lora=True, has_average=True)
    recorded = {"model": {"config": {"lora_alpha": 32.0}}}
    (root / "config.yaml").write_text(yaml.safe_dump(recorded))
    found = _problems(LORA, "model.config.lora_rank=8")
    assert list(found) == ["model.config.lora_rank", "model.config.lora_alpha"]
    assert "go on with model.config.lora_alpha=32.0" in found["model.config.lora_alpha"]
    assert _problems(LORA, "model.config.lora_alpha=32") == {}


def test_a_damaged_checkpoint_is_left_to_the_loading(root: Path) -> None:
    _save(root, has_lora=True, has_average=True)
    (root / "checkpoints/model/iter_000000002.pt").write_bytes(b"torn")
    assert _problems() == {}
