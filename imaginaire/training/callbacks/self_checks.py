# SPDX-License-Identifier: Apache-2.0
"""Checks before and in the first step of a run, made once; a run that begins wrongly stops at once.

Such faults do not crash: weights that no file filled, adapters that already change the model, ranks that hold other
weights or other data than they should. They would be found in the results, days later.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imaginaire import distributed
from imaginaire.distributed import parallel
from imaginaire.errors import TrainingError, listed
from imaginaire.optim import lora
from imaginaire.training.callbacks.base import Callback
from imaginaire.training.callbacks.report import named_tensors

log = logging.getLogger(__name__)


class SelfChecks(Callback):
    """Raises TrainingError where one of these is not so, and else logs one line with what was found:

    * every parameter has memory and finite values;
    * sharded parameters are equal on all their replicas (the trainer compares those that are not sharded);
    * the ranks of a context-parallel group read the same data;
    * adapters begin without an effect, and the gradient of some lora_B is not zero (but for random weights);
    * the first loss lies within ``model.expected_first_loss(output)``, where the model gives a range.

    A trained parameter that the first gradient does not reach is a warning. A resumed run looks at the first three.
    ``trainer.callbacks.self_checks=null`` looks at nothing.
    """

    def __init__(self) -> None:
        self._facts: list[str] = []
        self._is_fresh = False
        self._is_over = True
        self._has_data = False
        self._losses = [0.0, 0.0, 0.0]  # sums over the micro-batches: what was found, least and most expected

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._is_fresh = iteration == 0
        self._is_over = self._has_data = False
        parameters = list(model.named_parameters())
        _require(_first_unusable(parameters))
        self._facts = [f"{len(parameters)} parameters finite"]
        if (name := parallel.replicas_equal(model, sharded=True)) is not None:
            _require(f"{name} differs between the replicas of its shards. All ranks must start from one file and seed.")
        if distributed.world_size() > 1:
            self._facts.append("replicas equal")
        is_own_start = not self.config.checkpoint.load_path  # other weights may have adapters that are trained
        if self._is_fresh and is_own_start and model.adapters_begin_at_zero():
            self._check_adapters(model)

    def on_training_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None:
        if self._has_data:
            return
        self._has_data = True
        dims = self.trainer.dims
        if dims.context_parallel_size > 1:
            _require(_other_data(batch, dims.cp_group))
            self._facts.append(f"same data on {dims.context_parallel_size} context-parallel ranks")

    def on_before_optimizer_step(
        self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int = 0
    ) -> None:
        if self._is_over or not self._is_fresh:
            return
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        lost = [name for name, p in trained if p.grad is None]
        if lost and not self.config.trainer.ddp.find_unused_parameters:
            log.warning(
                "the gradient of the first step does not reach %s. If that is intended, freeze what is not trained"
                " (requires_grad_(False)), or say so: trainer.ddp.find_unused_parameters=True.",
                listed(lost, 5),
            )
        factors = [p for name, p in trained if p.grad is not None and ".lora_B." in name]
        if factors and model.has_gradient() and _are_zero([parallel.to_local(p.grad) for p in factors]):
            self._check_idle_adapters(model)
        self._facts.append(f"the gradient reaches {len(trained) - len(lost)} of {len(trained)} trained parameters")

    def on_training_step_batch_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if self._is_over or not self._is_fresh:
            return
        expected = model.expected_first_loss(output)
        if expected is not None:
            for i, value in enumerate((float(loss.detach()), *expected)):
                self._losses[i] += value

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if not self._is_over:
            self._is_over = True
            self._check_loss()
            log.info("self-checks: %s: ok", ", ".join(self._facts))

    def _check_adapters(self, model: nn.Module) -> None:
        adapters = lora.adapters(model)
        found = [name for name, adapter in adapters.items() if bool(parallel.to_local(adapter.factors[1]).any())]
        _require(
            f"the adapters of {listed(found, 5)} change the model before it is trained (lora_B is not zero). Start from"
            " weights without adapters, or set model.config.init_lora_weights=False if they are to begin at random."
            if found
            else None
        )
        if adapters:
            self._facts.append(f"{len(adapters)} adapters without effect")

    def _check_idle_adapters(self, model: Any) -> None:
        has_start = self.config.checkpoint.load_path or model.has_start_weights()
        problem = "the gradient of every lora_B is zero, so the adapters learn nothing: they lie behind weights of 0."
        if has_start:
            _require(f"{problem} Start from trained weights (model.config.model_manager_config.dit_path).")
        log.warning("%s That is how random weights begin: set model.config.model_manager_config.dit_path", problem)

    def _check_loss(self) -> None:
        sums = torch.tensor([*self._losses, float(any(self._losses)) * self.config.trainer.grad_accum_iter]).double()
        found, low, high, count = distributed.all_reduce_(sums).tolist()
        if not count:
            return
        found, low, high = found / count, low / count, high / count
        if not low <= found <= high:
            raise TrainingError(
                f"The self-check of the first step: the loss is {found:.4g}, but with trained weights it lies between"
                f" {low:.4g} and {high:.4g} on this data. Are the start weights those of this network, resolution and"
                f" tokenizer, and are the pixels in [-1, 1]? {_SWITCH}"
            )
        self._facts.append(f"first loss {found:.4g} (at most {high:.4g} was expected)")


_SWITCH = "To go on all the same: trainer.callbacks.self_checks=null."


def _require(problem: str | None) -> None:
    """Raise on all ranks where any has a problem (a collective)."""
    for rank, found in enumerate(distributed.all_gather_object(problem)):
        if found is not None:
            where = f" (rank {rank})" if distributed.world_size() > 1 else ""
            raise TrainingError(f"The self-check of the start{where}: {found} {_SWITCH}")


def _first_unusable(parameters: list[tuple[str, nn.Parameter]]) -> str | None:
    for name, parameter in parameters:
        local = parallel.to_local(parameter.detach())
        if local.is_meta:
            return f"{name} has no memory: no file filled it and nothing drew it. The model must do so before training."
        if not bool(torch.isfinite(local).all()):
            return f"{name} holds values that are not finite. The file that it comes from is damaged, or overflowed."
    return None


def _other_data(batch: Any, group: dist.ProcessGroup) -> str | None:
    """The first difference between the batches of a context-parallel group, in words."""
    mine = {name: parallel.checksum(tensor) for name, tensor in named_tensors(batch)}
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    names = dict.fromkeys(name for of_rank in everyone for name in of_rank)
    other = [name for name in names if any(of_rank.get(name) != everyone[0].get(name) for of_rank in everyone)]
    if not other:
        return None
    return (
        f"{listed(other, 5)} differ between the ranks of a context-parallel group, which must read the same samples."
        " Their loader must go by the data-parallel rank (imaginaire.data.stream.ResumableLoader, or get_sampler of"
        " cosmos_predict2.data.loaders), and draw alike on these ranks."
    )


def _are_zero(tensors: list[Tensor]) -> bool:
    """True if all of them are zero on all ranks (a collective)."""
    is_any = torch.stack([tensor.any().float().cpu() for tensor in tensors]).max()
    return not float(distributed.all_reduce_(is_any, "max"))
