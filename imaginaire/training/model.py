# SPDX-License-Identifier: Apache-2.0
"""The contract between the trainer and everything it trains."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from imaginaire.checkpoint import weights
from imaginaire.config import lazy_config
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import TrainingError, listed
from imaginaire.findings import CheckContext, Finding
from imaginaire.optim import schedules
from imaginaire.optim.ema import PowerEMA


def weight_dtype(precision: torch.dtype) -> torch.dtype:
    """The dtype that weights trained in a precision are kept in."""
    return torch.float32 if precision == torch.float16 else precision


class ImaginaireModel(nn.Module):
    """All that the trainer and its callbacks use of a model. Only `training_step` must be written.

    A model keeps what it trains in ``net`` and, when it averages weights, a `PowerEMA` of it in ``ema``; a model that
    does otherwise overrides the methods that use them. The class methods are called before anything is built, with the
    arguments of the model's lazy call.
    """

    net: nn.Module
    ema: PowerEMA | None = None
    precision: torch.dtype = torch.float32
    seed: int = 0  # the run's; the trainer sets it before training
    run_dir: str = ""  # likewise: where its checkpoints lie

    ranks_per_sample: int = 1  # neighbouring data-parallel ranks that get the same training batches; it divides them
    validation_metric: str = "loss"  # of a validation's output: what the log shows; another one replaces the loss
    validation_note: str = ""  # what the log shows beside it, where {name} is a number of the validation
    batch_kinds: tuple[str, ...] = ()  # whose losses and gradient norms are also logged apart, such as image and video
    memory_advice = ""  # what to lower where memory runs out, if it is not what the trainer proposes
    progress: Callable[[str], None] = staticmethod(lambda text: None)  # see `train_batches`; set by the trainer
    phase: Callable[[str], AbstractContextManager[Any]] = staticmethod(lambda name: nullcontext())  # likewise

    def __getstate__(self) -> dict[str, Any]:
        """Without what the trainer set, so that a copy of the model does not copy the trainer."""
        return {name: value for name, value in self.__dict__.items() if name not in ("progress", "phase")}

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterable[Finding]:
        """Findings on the configuration of this model, with its data and its start."""
        return ()

    @classmethod
    def checkpoint_switches(cls, path: str) -> dict[str, Any]:
        """Arguments, by key, with which the weights at a path were written; a run resumes with the same ones only."""
        return {}

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the trained weights: float32 also for float16, which the trainer gets by autocast."""
        return weight_dtype(self.precision)

    def autocast(self, device: torch.device) -> torch.autocast:
        """float16 runs by autocast over float32 weights, as its gradients must be unscaled in float32.

        Inside, weights may change, such as to their averages and back: casts of them are not kept.
        """
        is_on = self.precision == torch.float16
        return torch.autocast(device.type, torch.float16, enabled=is_on, cache_enabled=False)

    def training_step(self, batch: Any, iteration: int) -> tuple[dict[str, Any], Tensor]:
        """Metrics and tensors for callbacks, and the loss."""
        raise NotImplementedError(f"{type(self).__name__} must define training_step")

    def validation_step(self, batch: Any, iteration: int) -> tuple[dict[str, Any], Tensor]:
        return self.training_step(batch, iteration)

    def train_batches(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """The batches to train on. Reinforcement learning turns the loader's prompts into scored experience here.

        This may take minutes before it yields. Then call ``self.progress("rollout 3 of 8")`` whenever some of the work
        is done: without a call for ``trainer.timeout_period`` seconds the watchdog takes the run for hung. What lies in
        ``with self.phase("rollout"):``, ``"reward"`` or ``"reward_wait"`` is logged as ``timer/rollout`` and so on.
        """
        yield from dataloader

    def at_boundary(self) -> bool:
        """True if a run that stops now would go on from here: not while batches of one experience are still to come.

        Saves and stops wait for it, alike on all ranks.
        """
        return True

    def batch_kind(self, batch: Any) -> str:
        """The kind of a batch, one of `batch_kinds`; called only where there are some."""
        raise NotImplementedError(f"{type(self).__name__} has batch_kinds, so it must define batch_kind")

    def on_load_path(self, path: str) -> None:
        """Called with ``checkpoint.load_path`` before its weights are loaded: the place to read what lies beside them,
        as in the header of a file."""

    def on_data(self, *loaders: Any) -> None:
        """Called with the loaders of training and validation before either is read, with the weights loaded: the place
        to give data sets (`imaginaire.data.stream.data_sets`) what the run or its checkpoint settled."""

    def parallelize(self, dims: ParallelDims) -> None:
        """Shard, split, recompute, compile: called once, before the optimizer exists.

        What was built on the meta device gets its memory and weights here; afterwards nothing may be without.
        """

    def data_facts(self, data_sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Facts of the training data that a run records in ``runs.jsonl``, for whoever uses its weights.

        ``data_sets`` has the arguments of each of them, with its class as ``_target_``.
        """
        return {}

    def init_optimizer_scheduler(self, optimizer_cfg: Any, scheduler_cfg: Any) -> tuple[Optimizer, LRScheduler]:
        optimizer = lazy_config.instantiate(optimizer_cfg, model=self)
        return optimizer, schedules.build_scheduler(optimizer, lazy_config.instantiate(scheduler_cfg))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return parallel.clip_grad_norm_(self.parameters(), max_norm)

    def ema_scope(self) -> AbstractContextManager[Any]:
        """A context in which the network holds its averaged weights."""
        return nullcontext() if self.ema is None else self.ema.scope(self.net)

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        """Called before `parallelize`, with all that has memory on the device: the place to cast to the training
        precision."""

    def on_before_zero_grad(self, optimizer: Optimizer, scheduler: LRScheduler, iteration: int) -> None:
        """Called after each optimizer step: the place of the weight average."""
        if self.ema is not None:
            self.ema.update(self.net, iteration)

    def on_after_backward(self) -> None:
        pass

    def has_gradient(self) -> bool:
        """True if there was anything to learn from in the batches of this step, alike on all ranks. If not, the step
        counts and its schedule goes on, but the optimizer leaves the weights and its moments as they are."""
        return True

    def published_name(self, name: str) -> str | None:
        """The name, group/metric, by which trackers show a metric, too: that of published runs of this kind."""
        return None

    def has_start_weights(self) -> bool:
        """True if training starts from trained weights. If not, adapters that learn nothing are only a warning."""
        return True

    def adapters_begin_at_zero(self) -> bool:
        """True if adapters must not change the model before it is trained."""
        return True

    def expected_first_loss(self, output: Mapping[str, Any]) -> tuple[float, float] | None:
        """The range in which the loss of the first step must lie, by that step's output; None: not known."""
        return None

    def checkpoint_state(self) -> dict[str, Tensor]:
        """The live tensors to save, as they are (DTensors where sharded): "net.*" and, with an average, "net_ema.*"."""
        state = {name: value for name, value in self.state_dict().items() if isinstance(value, Tensor)}
        if self.ema is not None:
            state |= {f"net_ema.{name}": value for name, value in self.ema.state().items()}
        return state

    def load_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        """Copy saved tensors into the live ones and account for every name."""
        return weights.load_into(self.checkpoint_state(), state)

    def account_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        """The report on tensors that were read straight into those of `checkpoint_state`, as from shards."""
        return weights.account(self.checkpoint_state(), state)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in evaluation mode; afterwards each is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# Modules that are built without memory (device "meta") and get it once they are sharded -------------------------------


def has_meta(module: nn.Module) -> bool:
    """True if any parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def to_device(module: nn.Module, device: torch.device, memory_format: torch.memory_format) -> None:
    """Move whatever has memory, in place; what has none stays as it is."""
    if not has_meta(module):
        module.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
        return

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        has_format = tensor.dim() in (4, 5) and memory_format != torch.preserve_format
        return tensor.to(device, memory_format=memory_format) if has_format else tensor.to(device)

    module._apply(moved)


def require_memory(module: nn.Module) -> None:
    """Raise where a parameter or buffer has no memory, and so was never initialised or loaded."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not (lacking := [name for name, tensor in tensors if tensor.is_meta]):
        return

    raise TrainingError(
        f"{len(lacking)} of the {len(tensors)} parameters and buffers of {type(module).__name__} have no memory (device"
        f" meta) after parallelize(), so nothing initialised or loaded them: {listed(lacking)}. What"
        " is built on the meta device gets memory there: to_empty(device=...), then weights or a start of its own."
    )
