# SPDX-License-Identifier: Apache-2.0
"""The hooks of the training loop, the group that calls them, and side channels, which a callback may fail in.

A callback overrides the hooks it needs. ``iteration`` counts finished optimizer steps: hooks inside a step get the
number before it; `on_training_step_end`, validation and saving get the number after it.
"""

import difflib
import functools
import inspect
import logging
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from imaginaire import distributed
from imaginaire.buildable import describe, signature, target_of
from imaginaire.config import lazy_config
from imaginaire.distributed import places
from imaginaire.distributed.places import lost_peer
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_IN_STEP_S = 60.0  # within which ranks that run a sharded network together meet an error that is common to them


class Callback:
    """Something that watches or adjusts training; every hook does nothing unless overridden.

    The group sets ``config``, ``trainer`` and ``name`` (its key in ``trainer.callbacks``) before the first hook.
    """

    config: Any
    trainer: Any
    name: str = ""
    resumed: Sequence[str] = ()  # attributes with which a resumed run goes on: what ``weights_only`` reads back

    def on_train_start(self, model: Any, iteration: int = 0) -> None: ...
    def on_before_dataloading(self, iteration: int = 0) -> None: ...
    def on_after_dataloading(self, iteration: int = 0) -> None: ...
    def on_training_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None: ...
    def on_training_step_batch_start(self, model: Any, batch: Any, iteration: int = 0) -> None: ...
    def on_before_forward(self, iteration: int = 0) -> None: ...
    def on_after_forward(self, iteration: int = 0) -> None: ...
    def on_before_backward(self, model: Any, loss: Tensor, iteration: int = 0) -> None: ...
    def on_after_backward(self, model: Any, iteration: int = 0) -> None: ...
    def on_before_optimizer_step(
        self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int = 0
    ) -> None: ...
    def on_before_zero_grad(self, model: Any, optimizer: Any, scheduler: Any, iteration: int = 0) -> None: ...
    def on_training_step_batch_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None: ...
    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None: ...
    def on_validation_start(self, model: Any, dataloader: Any, iteration: int = 0) -> None: ...
    def on_validation_step_start(self, model: Any, batch: Any, iteration: int = 0) -> None: ...
    def on_validation_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None: ...
    def on_validation_end(self, model: Any, iteration: int = 0) -> None: ...
    def on_load_checkpoint_start(self, model: Any) -> None: ...
    def on_load_checkpoint(self, model: Any, state: dict[str, Any]) -> None: ...
    def on_load_checkpoint_end(self, model: Any, iteration: int = 0) -> None: ...
    def on_save_checkpoint_start(self, model: Any, iteration: int = 0) -> None: ...
    def on_save_checkpoint(self, model: Any, state: dict[str, Any]) -> None: ...
    def on_save_checkpoint_end(self, model: Any, iteration: int = 0) -> None: ...
    def on_save_checkpoint_success(self, iteration: int = 0, elapsed_time: float = 0.0) -> None: ...
    def on_optimizer_init_start(self) -> None: ...
    def on_optimizer_init_end(self) -> None: ...
    def on_train_end(self, model: Any, iteration: int = 0) -> None: ...
    def on_app_end(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run: numbers, strings, containers, tensors."""
        return {name: getattr(self, name) for name in self.resumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in self.resumed if name in state})


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class EveryN(Callback):
    """Calls `every_n_impl` at the end of a step when ``(iteration // step_size) % every_n == 0``.

    ``every_n=0`` never fires there. ``run_at_start`` adds iteration 1. ``barrier_after_run`` makes the other ranks wait
    for a slow one.
    """

    def __init__(
        self,
        every_n: int | None = None,
        step_size: int = 1,
        run_at_start: bool = False,
        barrier_after_run: bool = False,
    ) -> None:
        if (every_n is not None and every_n < 0) or step_size < 1:
            raise ConfigError(
                f"{type(self).__name__}: every_n must be at least 0 and step_size at least 1; "
                f"found every_n={every_n}, step_size={step_size}."
            )
        self.every_n = every_n
        self.step_size = step_size
        self.run_at_start = run_at_start
        self.barrier_after_run = barrier_after_run

    def fires_at(self, iteration: int) -> bool:
        every_n = self.config.trainer.logging_iter if self.every_n is None else self.every_n
        if every_n == 0:
            return False
        return (iteration == 1 and self.run_at_start) or (iteration // self.step_size) % every_n == 0

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if self.fires_at(iteration):
            self.every_n_impl(self.trainer, model, batch, output, loss, iteration)
            if self.barrier_after_run:
                distributed.barrier(f"{self.name} at iteration {iteration}")

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define every_n_impl")


class SideChannel:
    """Work that a run can do without: trackers, log files, samples, traces. Its failure costs its data alone.

    The first failure is a warning with the reason; later ones are logged at level debug. A full disk may be emptied, so
    what fails is tried again at its next turn. Nothing of the training itself belongs inside: its errors must not be
    swallowed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context in which an exception is this channel's failure."""
        try:
            yield
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException | str) -> None:
        self.failures += 1
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        level, reason = logging.WARNING if self.failures == 1 else logging.DEBUG, " ".join(reason.split())[:500]
        log.log(level, f"{self.name} failed; training goes on without it (reported once): {reason}", stacklevel=2)
        if not isinstance(error, str):
            log.debug("where %s failed", self.name, exc_info=error)

    def together(self, turn: str, work: Callable[[], Result], *, in_step: bool) -> Result | None:
        """The result of what all ranks do, each its part; None on all of them where it failed on any.

        ``turn`` names this turn and no other. ``in_step``: the parts wait for each other, as those of a sharded network
        do. An error that not all ranks meet then ends the run, since the others may wait in it for ever.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            if lost_peer(error):  # not this channel's failure: the run cannot go on
                raise
            failure = error
        patience = _IN_STEP_S if failure is not None and in_step else distributed.timeout_s()
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = places.exchange(f"{self.name} {turn}", reason, patience)
        if reasons is None or (in_step and failure is not None and not all(reasons)):
            raise failure or RuntimeError(f"{self.name}: waited in vain for the other ranks at {turn}")
        if not any(reasons):
            return result
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
        if distributed.is_rank0():
            where = f"on rank {rank}, " if len(reasons) > 1 else ""
            self.failed(failure if failure is not None and rank == 0 else f"{where}{reason}")
        return None


class CallbackGroup:
    """The callbacks of a run. Each hook of `Callback` is a method here that calls it on all of them, in config order.

    Built from ``config.trainer.callbacks``, a mapping of names to lazy nodes; ``null`` switches one off. The profiler
    and memory snapshots join by themselves when ``trainer.profiling`` enables them.
    """

    def __init__(self, config: Any, trainer: Any) -> None:
        self.callbacks: dict[str, Callback] = {}
        nodes: dict[str, Any] = {}
        if config.trainer.profiling.enable_profiling:
            nodes["profiler"] = {"_target_": "imaginaire.training.callbacks.monitor.Profiler"}
        if config.trainer.profiling.enable_memory_snapshot:
            nodes["memory_snapshot"] = {"_target_": "imaginaire.training.callbacks.monitor.MemorySnapshot"}
        nodes |= dict((config.trainer.callbacks or {}).items())
        nodes = {name: node for name, node in nodes.items() if node is not None}
        for name, node in nodes.items():
            _require_callback(f"trainer.callbacks.{name}", node)  # all of them, before one is called
        for name, node in nodes.items():
            self.callbacks[name] = _build(name, node, config, trainer)
        for name, callback in self.callbacks.items():
            callback.config, callback.trainer, callback.name = config, trainer, name
        for hook in HOOKS:
            overriding = [c for c in self.callbacks.values() if getattr(type(c), hook) is not getattr(Callback, hook)]
            setattr(self, hook, _dispatcher([getattr(callback, hook) for callback in overriding]))

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"no callback hook is called '{name}'")  # the real ones are set above

    def __getitem__(self, name: str) -> Callback:
        return self.callbacks[name]

    def __contains__(self, name: str) -> bool:
        return name in self.callbacks

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """This rank's state of each callback, by name."""
        return {name: callback.state_dict() for name, callback in self.callbacks.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Hand each callback its state; names on one side only are logged, not rejected."""
        for name, callback in self.callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
        if gone := [name for name in state if name not in self.callbacks and state[name]]:
            log.info("callbacks in the checkpoint but not in this config, state dropped: %s", ", ".join(gone))
        if new := [name for name in self.callbacks if name not in state]:
            log.info("callbacks new since the checkpoint, starting afresh: %s", ", ".join(new))


def _dispatcher(methods: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for method in methods:
            method(*args, **kwargs)

    return call


def _require_callback(key: str, node: Any) -> None:
    """Raise unless a node makes a callback, by its class or the annotated type of its function: nothing is called."""
    if isinstance(node, Callback):
        _require_arguments(key, type(node))
        return
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key} must be a lazy node such as L(GradClip)(clip_norm=1.0), or null; found {node!r}.")
    target = target_of(node, key)
    made = target.func if isinstance(target, functools.partial) else target
    kind = made if isinstance(made, type) else _returned(made)
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ConfigError(
            f"{key}._target_ is {describe(made)}: no class of callbacks. Derive one from"
            " imaginaire.training.callbacks.Callback, or annotate the function: def make(...) -> Callback."
        )
    _require_arguments(key, kind)


def _require_arguments(key: str, kind: type[Callback]) -> None:
    """Raise for a hook that does not take what it is called with: the arguments of the base class, by position.

    A method that has nearly the name of a hook is a warning: it may be a misspelled one.
    """
    base: type[Callback] = EveryN if issubclass(kind, EveryN) else Callback
    for hook in (*HOOKS, "every_n_impl"):
        own, expected = getattr(kind, hook, None), getattr(base, hook, None)
        if own is None or expected is None or own is expected:
            continue
        given = list(inspect.signature(expected).parameters)
        try:
            inspect.signature(own).bind(*given)
        except TypeError as error:
            raise ConfigError(
                f"{key}: {describe(own)} does not take what it is called with ({error}). It is called with"
                f" ({', '.join(given)})."
            ) from error
    for name in sorted({name for name in dir(kind) if name.startswith("on_")} - set(HOOKS)):
        if close := difflib.get_close_matches(name, HOOKS, cutoff=0.8):
            log.warning(
                f"{key}: {kind.__name__}.{name} is no hook, so it is never called. Did you mean {', '.join(close)}?"
                f" Another name, such as _{name}, ends this."
            )


def _returned(function: Any) -> Any:
    """The annotated type of what a function returns; None where it has none that resolves."""
    try:
        return typing.get_type_hints(function).get("return")
    except (TypeError, NameError, AttributeError):
        return None


def _build(name: str, node: Any, config: Any, trainer: Any) -> Callback:
    """The callback of a lazy node. ``config`` and ``trainer`` are passed where its constructor takes them."""
    if isinstance(node, Callback):
        return node
    key = f"trainer.callbacks.{name}"
    parameters = signature(target_of(node, key))
    offered = {"config": config, "trainer": trainer}
    given = {k: v for k, v in offered.items() if k in parameters and node.get(k) is None}
    callback = lazy_config.instantiate(node, **given)
    if not isinstance(callback, Callback):
        raise ConfigError(f"{key} makes a {type(callback).__name__}, not the annotated callback.")
    return callback
