# SPDX-License-Identifier: Apache-2.0
"""Several ranks: what one is told all do, and what one meets is said once."""

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tests.project.config as project
from imaginaire import distributed
from imaginaire.checkpoint import checkpointer
from imaginaire.distributed import parallel
from imaginaire.distributed.places import EXIT_INTERRUPTED
from imaginaire.errors import TrainingError
from imaginaire.training.callbacks import Callback
from tests.multiprocess import run_distributed
from tests.programs import finished, warm_python
from tests.training import saved, train

pytestmark = pytest.mark.slow

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "trainer.max_iter=50"]
FSDP = ["trainer.distributed_parallelism=fsdp", "model.fsdp_shard_size=2"]
HERE = "tests.imaginaire.training.test_processes"


class AskedToStop(project.RestlessModel):
    """Its second rank gets the signal in the third iteration."""

    def training_step(self, batch: Any, iteration: int) -> Any:
        if iteration == 2 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, iteration)


class DivergesOnOneRank(project.RestlessModel):
    def training_step(self, batch: Any, iteration: int) -> Any:
        output, loss = super().training_step(batch, iteration)
        return output, loss * float("nan") if iteration == 1 and distributed.rank() == 1 else loss


class BreaksOneShard(project.RestlessModel):
    """A shard of its second rank is not finite after the second step."""

    def on_before_zero_grad(self, optimizer: Any, scheduler: Any, iteration: int) -> None:
        super().on_before_zero_grad(optimizer, scheduler, iteration)
        if iteration == 1 and distributed.rank() == 1:
            parallel.to_local(next(self.net.parameters()).detach())[-1] = float("inf")


class Uneven(torch.utils.data.IterableDataset[Any]):
    """One more sample on the second rank."""

    def __init__(self, **left_from_the_config: Any) -> None: ...

    def __iter__(self) -> Any:
        for _ in range(2 + distributed.rank()):
            yield {"window": torch.zeros(32), "next": torch.zeros(1)}


def _several(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["asked"] = train(root / "asked", [*QUICK, f"model._target_={HERE}.AskedToStop"])
    skip = [*QUICK, f"model._target_={HERE}.DivergesOnOneRank", "trainer.max_iter=4"]
    found["skipped"] = train(root / "skip", [*skip, "trainer.non_finite=skip"])
    try:
        train(root / "stop", skip)
    except TrainingError as error:
        found["stopped"] = str(error)
    broken = [*QUICK, *FSDP, f"model._target_={HERE}.BreaksOneShard", "trainer.max_iter=2", "checkpoint.save_iter=1"]
    try:
        train(root / "broken", broken)
    except TrainingError as error:
        found["broken"] = str(error)
    found["most held"] = _most_held(root / "gather")
    uneven = f"{{_target_: torch.utils.data.DataLoader, dataset: {{_target_: {HERE}.Uneven}}, shuffle: False}}"
    validates = ["trainer.run_validation=True", f"dataloader_val={uneven}"]
    found["uneven"] = train(root / "uneven", [*QUICK, "trainer.max_iter=2", *validates])
    found["gradients"] = _noted_gradients(root / "gradients")
    return found


def _most_held(root: Path) -> int:
    """The number of gathered tensors that this rank holds of a snapshot."""
    kept: list[int] = []
    snapshot = checkpointer.StandardCheckpointer._snapshot

    def counting(self: Any, state: Any) -> Any:
        trees = snapshot(self, state)
        kept.append(sum(value is not None for value in trees["model"].values()))
        return trees

    with mock.patch.object(checkpointer.StandardCheckpointer, "_snapshot", counting):
        train(root, [*QUICK, *FSDP, "trainer.max_iter=1"])
    return max(kept)


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("two")
    return root, run_distributed(_several, 2, args=(root,))


def test_ranks_act_together(found_by_two: tuple[Path, list[dict[str, Any]]]) -> None:
    root, (first, second) = found_by_two
    assert first["asked"] == second["asked"] == EXIT_INTERRUPTED
    assert saved(root / "asked")["trainer"]["iteration"] == 3
    assert first["skipped"] == 0 and saved(root / "skip")["trainer"]["skipped_steps"] == 1
    assert "the loss of rank 1 is not finite" in first["stopped"]
    assert "the loss is nan" in second["stopped"]
    assert first["broken"] == second["broken"] and "1 of " in first["broken"]
    assert saved(root / "broken")["trainer"]["iteration"] == 1
    assert first["most held"] > 0 and second["most held"] == 0
    assert first["uneven"] == second["uneven"] == 0, "ranks with fewer validation batches wait for the others"


class Gradients(Callback):
    """Notes the gradients of every step: as averaged over micro-batches and ranks, and as clipped."""

    averaged: list[dict[str, Tensor]] = []
    clipped: list[dict[str, Tensor]] = []

    def on_after_backward(self, model: Any, iteration: int = 0) -> None:
        self._averaged = _gradients(model)  # of the last micro-batch in the end

    def on_before_zero_grad(self, model: Any, *args: Any) -> None:
        Gradients.averaged.append(self._averaged)
        Gradients.clipped.append(_gradients(model))


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: parallel.full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


SPLITS = {  # of four samples a step: samples a micro-batch, on one process or on two
    1: {"one batch": ["dataloader_train.batch_size=4"], "accumulated": ["trainer.grad_accum_iter=2"]},
    2: {
        "replicated": ["trainer.grad_accum_iter=1"],
        "replicated, accumulated": ["trainer.grad_accum_iter=2", "dataloader_train.batch_size=1"],
        "sharded, accumulated": ["trainer.grad_accum_iter=2", "dataloader_train.batch_size=1", *FSDP],
    },
}


def _noted_gradients(root: Path) -> dict[str, tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
    base = ["model._target_=examples.minimal.model.MinimalModel", "model.precision=float32", "model.dropout=0.0"]
    base += ["~trainer.callbacks.sway", *QUICK, "trainer.max_iter=2", "trainer.grad_accum_iter=1"]
    base += ["dataloader_train.batch_size=2", f"trainer.callbacks.grad_clip.clip_norm={CLIP_NORM}"]
    base.append(f"+trainer.callbacks.gradients={{_target_: {HERE}.Gradients}}")
    Gradients = sys.modules[HERE].Gradients  # type: ignore[attr-defined]  # the class that the configuration names
    found = {}
    for name, split in SPLITS[distributed.world_size()].items():
        Gradients.averaged, Gradients.clipped = [], []
        train(root / name, [*base, *split])
        found[name] = Gradients.averaged, Gradients.clipped
    return found


CLIP_NORM = 0.01  # far below the norm of every step, and of every part of one


def test_gradients_do_not_depend_on_how_the_samples_of_a_step_are_split(
    tmp_path: Path, found_by_two: tuple[Path, list[dict[str, Any]]]
) -> None:
    """The gradients and not the weights: Adam would make the same step of a loss that is twice as large."""
    of_one, of_two = _noted_gradients(tmp_path), found_by_two[1][0]["gradients"]
    averaged, clipped = of_one.pop("one batch")
    assert len(averaged) == 2
    for step in clipped:
        norm = torch.stack([gradient.square().sum() for gradient in step.values()]).sum().sqrt()
        assert float(norm) == pytest.approx(CLIP_NORM, rel=1e-3)
    assert set(of_one | of_two) | {"one batch"} == set(SPLITS[1] | SPLITS[2])
    for name, (of_split, of_split_clipped) in (of_one | of_two).items():
        for found, expected in ((of_split, averaged), (of_split_clipped, clipped)):
            scale = max(float(gradient.abs().max()) for step in expected for gradient in step.values())
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5 * scale, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_torchrun_says_a_mistake_once(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "scripts.train"]
    words += ["--config=tests/project/config.py", "--", "experiment=restless", "trainer.max_itr=2"]
    result = finished(warm_python(), *words, IMAGINAIRE_OUTPUT_ROOT=str(tmp_path), OMP_NUM_THREADS="1")
    assert result.returncode != 0
    assert result.stderr.count("Unknown key trainer.max_itr") == 1, result.stderr[-3000:]
