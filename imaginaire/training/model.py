# SPDX-License-Identifier: Apache-2.0
"""The contract between the trainer and everything it trains, and the average of weights that most models keep."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from imaginaire.checkpoint import weights
from imaginaire.config import lazy_config
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims, in_runs, is_dtensor, reshard, to_local
from imaginaire.errors import ConfigError, TrainingError, listed
from imaginaire.findings import CheckContext, Finding
from imaginaire.optim import schedules

CAST_NUMEL = 1 << 26  # elements whose temporary float32 copies exist at a time


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
    ema: "PowerEMA | None" = None
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
        return optimizer, schedules.ConfiguredLR(optimizer, lazy_config.instantiate(scheduler_cfg))

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


# The average of the weights -------------------------------------------------------------------------------------------


def power_ema_exponent(rate: float) -> float:
    """gamma, the largest real root of x^3 + 7 x^2 + (16 - s^-2) x + (12 - s^-2) = 0 at the relative width s = rate."""
    if rate > 0:
        roots = numpy.roots([1.0, 7.0, 16.0 - rate**-2, 12.0 - rate**-2])
        gamma = float(roots[numpy.isreal(roots)].real.max())
        if gamma > -1:  # at -1 and below, the decay would be 1 or more
            return gamma
    raise ConfigError(f"ema.rate is {rate}; the relative width of a power-function average lies between 0 and 0.3.")


class PowerEMA:
    """The power-function average of a module's parameters, frozen ones included (EDM2, arXiv 2312.02696, eq. 123, 127).

    ema = beta ema + (1 - beta) w with beta = (1 - 1 / (j + 1))^(gamma + 1) at j = iteration + iteration_shift, and 0
    for j < 1, so that the first update copies the weights. gamma follows from the relative width, ``rate``.
    ``shadows`` maps names to float32 tensors or DTensors. Build it after the module was sharded. Buffers are not
    averaged; `state` includes the module's current ones. With ``offload`` the average lies on the host, which computes
    it, and so do the trained weights while the average is in their place.
    """

    def __init__(
        self, module: nn.Module, rate: float = 0.1, iteration_shift: int = 0, *, offload: bool = False
    ) -> None:
        self.rate = rate
        self.iteration_shift = iteration_shift
        self.exponent = power_ema_exponent(rate)
        self._module = module
        self._infinite: set[str] | None = None  # frozen parameters that a step of the average would make NaN
        with torch.no_grad():
            parameters = _parameters(module)
            if offload and any(is_dtensor(p) for p in parameters.values()):
                raise ConfigError(
                    "ema.offload=True keeps the average of one card's weights on its host, but parameters are sharded:"
                    " set fsdp_shard_size=0, or ema.offload=False (each rank has its shards of the average)."
                )
            self._place = torch.device("cpu") if offload else None  # None: where the parameter is
            self.shadows = {
                name: p.to(self._place or p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
                for name, p in parameters.items()
            }

    def beta(self, iteration: int) -> float:
        """The decay at an iteration, counted before it is increased."""
        j = iteration + self.iteration_shift
        return 0.0 if j < 1 else (1.0 - 1.0 / (j + 1)) ** (self.exponent + 1.0)

    @torch.no_grad()
    def update(self, module: nn.Module, iteration: int) -> None:
        """One step of the average, after the optimizer's."""
        pairs = self._pairs(module)
        beta = self.beta(iteration)
        if self._infinite is None:  # known at the first step: a look at every one would make the host wait
            self._infinite = _infinite(module)
        copied = [pair for name, pair in zip(self.shadows, pairs, strict=True) if beta == 0.0 or name in self._infinite]
        if copied:
            torch._foreach_copy_([shadow for shadow, _ in copied], [weight for _, weight in copied])
        if beta == 0.0:
            return
        moving = [pair for name, pair in zip(self.shadows, pairs, strict=True) if name not in self._infinite]
        is_cast = any(weight.dtype != shadow.dtype or weight.device != shadow.device for shadow, weight in moving)
        for run in in_runs(moving, lambda pair: pair[1].numel(), CAST_NUMEL if is_cast else math.inf):
            weights = [weight for _, weight in run]
            if self._place is not None:  # in one copy, for which the host waits
                flat = torch.cat([weight.flatten() for weight in weights]).to(self._place)
                parts = flat.split([weight.numel() for weight in weights])
                weights = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
            weights = [weight.to(shadow.dtype) for weight, (shadow, _) in zip(weights, run, strict=True)]
            torch._foreach_lerp_([shadow for shadow, _ in run], weights, 1.0 - beta)

    @contextmanager
    def scope(self, module: nn.Module) -> Iterator[None]:
        """A context in which the module has the averaged weights; its own come back exactly, after an exception too."""
        with torch.no_grad():
            pairs = self._pairs(module)
            stash = [weight.to(self._place or weight.device, copy=True) for _, weight in pairs]
        try:
            with torch.no_grad():
                torch._foreach_copy_([weight for _, weight in pairs], [shadow for shadow, _ in pairs])
            yield
        finally:
            with torch.no_grad():
                for (_, weight), own in zip(self._pairs(module), stash, strict=True):
                    weight.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """Averaged parameters and copies of the module's persistent buffers, by name: a complete state dict."""
        buffers = {
            name: value.detach().clone()
            for name, value in self._module.state_dict().items()
            if name not in self.shadows and isinstance(value, Tensor)
        }
        return {**self.shadows, **buffers}

    def _pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Local tensors (shadow, weight), matched by name."""
        parameters = _parameters(module)
        if parameters.keys() != self.shadows.keys():
            gone = sorted(self.shadows.keys() - parameters.keys())[:5]
            new = sorted(parameters.keys() - self.shadows.keys())[:5]
            raise ConfigError(f"The EMA is of a module with other parameters: it has {gone}, the module {new}.")
        return [(to_local(shadow), to_local(parameters[name])) for name, shadow in self.shadows.items()]


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; FSDP modules show their shards (after an evaluation the root may be gathered)."""
    reshard(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _infinite(module: nn.Module) -> set[str]:
    """The frozen parameters with numbers that are not finite (here, of sharded ones)."""
    frozen = {name: to_local(p.detach()) for name, p in module.named_parameters() if not p.requires_grad}
    if not frozen:
        return set()
    finite = torch.stack([p.isfinite().all() for p in frozen.values()]).tolist()
    return {name for name, is_finite in zip(frozen, finite, strict=True) if not is_finite}
