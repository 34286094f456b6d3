# SPDX-License-Identifier: Apache-2.0
"""Each of the self-checks finds what it looks for, on every rank, and says how it goes away."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import TrainingError
from imaginaire.optim import lora
from imaginaire.training.callbacks.self_checks import SelfChecks
from imaginaire.training.model import ImaginaireModel
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.multiprocess import run_distributed


class Net(ImaginaireModel):
    """Two layers, of which the second lets nothing through while ``gate`` is zero."""

    def __init__(self, gate: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1, bias=False)
        nn.init.constant_(self.second.weight, gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).mean()


def make_trainer(folder: Path, model: nn.Module, dims: ParallelDims | None = None, load_path: str = "") -> Trainer:
    ddp = SimpleNamespace(find_unused_parameters=False)
    config = make_config({"self_checks": lazy(SelfChecks)}, ddp=ddp)
    config.checkpoint = SimpleNamespace(load_path=load_path)
    trainer = Trainer(config, folder, model)
    trainer.dims = dims or trainer.dims
    return trainer


def first_step(trainer: Trainer, iteration: int = 0, batch: Any = None) -> None:
    """The hooks of a step, with the gradient of the model on a batch."""
    trainer.start(iteration)
    cb, model = trainer.callbacks, trainer.model
    batch = {"x": torch.ones(2, 3)} if batch is None else batch
    cb.on_training_step_start(model, batch, iteration)
    loss = model(batch["x"])
    loss.backward()
    cb.on_before_optimizer_step(model, trainer.optimizer, trainer.scheduler, None, iteration)
    cb.on_training_step_batch_end(model, batch, {"loss": loss.detach()}, loss, iteration)
    cb.on_training_step_end(model, batch, {}, loss, iteration + 1)


def test_a_start_without_faults_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = lora.inject(Net(), 2, 2, "first")
    model.expected_first_loss = lambda output: (-100.0, 100.0)  # type: ignore[assignment]
    trainer = make_trainer(tmp_path, model)
    first_step(trainer)
    lines = [record.message for record in caplog.records if "self-checks" in record.message]
    assert len(lines) == 1
    for part in ("5 parameters finite", "1 adapters without effect", "2 of 2 trained parameters", "first loss"):
        assert part in lines[0]
    trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 2)
    assert len([record for record in caplog.records if "self-checks" in record.message]) == 1, "once"


def test_parameters_without_values_are_named(tmp_path: Path) -> None:
    broken, empty = Net(), Net()
    with torch.no_grad():
        broken.second.weight[0, 1] = float("nan")
    empty.first.bias = nn.Parameter(torch.empty(3, device="meta"))
    for model, text in (
        (broken, "second.weight holds values that are not finite"),
        (empty, "first.bias has no memory"),
    ):
        with pytest.raises(TrainingError, match=rf"{text}.*self_checks=null"):
            make_trainer(tmp_path, model).start()
        with pytest.raises(TrainingError, match=text):  # a resumed run looks, too
            make_trainer(tmp_path, model).start(7)


def test_adapters_that_change_the_model_are_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    model = lora.inject(Net(), 2, 2, "first")
    lora.init_adapters(model, seed=0, init=False)
    with pytest.raises(TrainingError, match=r"adapters of first change.*init_lora_weights=False"):
        make_trainer(tmp_path, model).start()
    make_trainer(tmp_path, model).start(7)  # trained by now
    make_trainer(tmp_path, model, load_path="other/run").start()
    model.adapters_begin_at_zero = lambda: False  # type: ignore[assignment]
    make_trainer(tmp_path, model).start()


def test_a_parameter_that_no_gradient_reaches_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.unused = nn.Parameter(torch.ones(2))
    first_step(make_trainer(tmp_path, model))
    assert "does not reach unused" in caplog.text and "find_unused_parameters=True" in caplog.text
    caplog.clear()
    model.zero_grad()
    first_step(make_trainer(tmp_path, model), iteration=7)
    trainer = make_trainer(tmp_path, model)
    trainer.config.trainer.ddp.find_unused_parameters = True
    first_step(trainer)
    assert "does not reach" not in caplog.text


def test_a_gradient_of_zero_is_no_fault_but_adapters_need_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_step(make_trainer(tmp_path, Net(gate=0.0)))
    model = lora.inject(Net(gate=0.0), 2, 2, "first")
    with pytest.raises(TrainingError, match=r"gradient of every lora_B is zero.*dit_path"):
        first_step(make_trainer(tmp_path, model))
    model.zero_grad()
    model.has_start_weights = lambda: False  # type: ignore[assignment]
    first_step(make_trainer(tmp_path, model))
    assert "That is how random weights begin" in caplog.text
    caplog.clear()
    model.zero_grad()
    model.has_start_weights, model.has_gradient = lambda: True, lambda: False  # type: ignore[assignment]
    first_step(make_trainer(tmp_path, model))  # of which nothing is learnt: it proves nothing about adapters


def test_a_first_loss_out_of_range_stops_the_run(tmp_path: Path) -> None:
    model = Net()
    for low, high in ((50.0, 60.0), (-60.0, -50.0)):
        model.expected_first_loss = lambda output, low=low, high=high: (low, high)  # type: ignore[assignment]
        with pytest.raises(TrainingError, match=f"between {low:g} and {high:g} .*self_checks=null"):
            first_step(make_trainer(tmp_path, model))
        model.zero_grad()
        first_step(make_trainer(tmp_path, model), iteration=7)
    model.expected_first_loss = lambda output: None  # type: ignore[assignment]
    first_step(make_trainer(tmp_path, model))


def _on_two_ranks(folder: Path) -> list[str]:
    """The finding of each check where two ranks differ, and none where they do not."""
    dims = parallel.init_dims(2)
    found = []

    def attempt(model: nn.Module, batch: Any = None, dims: ParallelDims = dims) -> None:
        try:
            first_step(make_trainer(folder / str(dims.rank), model, dims), batch=batch)
            found.append("ok")
        except TrainingError as error:
            found.append(str(error))

    def net() -> Net:
        torch.manual_seed(0)
        return Net()

    attempt(net(), {"x": torch.ones(2, 3), "meta": [{"start": torch.tensor(4)}]})
    attempt(net(), {"x": torch.ones(2, 3), "meta": [{"start": torch.tensor(dims.rank)}]})
    attempt(net(), {"x": torch.ones(2, 3), **({"late": torch.ones(1)} if dims.rank else {})})
    data_parallel = ParallelDims(2, dims.rank)
    attempt(net(), {"x": torch.full((2, 3), float(dims.rank))}, data_parallel)  # where data is to differ

    for mesh_shape in ((2, 1), (1, 2)):
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")))
        attempt(model, dims=data_parallel)
        weight = model.first.weight
        assert isinstance(weight, DTensor)
        with torch.no_grad():
            weight.to_local().add_(dims.rank)
        attempt(model, dims=data_parallel)

    broken = net()
    if dims.rank == 1:
        with torch.no_grad():
            broken.first.bias.fill_(float("inf"))
    attempt(broken, dims=data_parallel)
    return found


@pytest.mark.slow
def test_ranks_that_differ_are_found_by_all_of_them(tmp_path: Path) -> None:
    found, others = run_distributed(_on_two_ranks, 2, (tmp_path,))
    assert found == others, "every rank stops, and says the same"
    alike, data, keys, other_data, replicas, other_replicas, shards, other_shards, broken = found
    assert [alike, other_data, replicas, shards, other_shards] == ["ok"] * 5
    assert "batch.meta.0.start differ between the ranks of a context-parallel group" in data
    assert "batch.late differ" in keys
    assert "first.weight differs between the replicas of its shards" in other_replicas
    assert "(rank 1): first.bias holds values that are not finite" in broken
