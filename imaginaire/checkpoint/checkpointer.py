# SPDX-License-Identifier: Apache-2.0
"""Saving, resuming and keeping checkpoints.

A save copies the state to the host while training stands still and writes it in the background; the next save waits
for the one before. The four parts are written first and ``latest_checkpoint.txt`` last, each by rename, so the pointer
always names a complete set and a killed run resumes from it. A failed write stops the run at its next step. Weights
that are not finite stop the run before they are saved.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from imaginaire import distributed, storage
from imaginaire.buildable import describe, locate, target_of
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.layout import KINDS, CheckpointSet
from imaginaire.checkpoint.plain_pickle import Like, Tree
from imaginaire.checkpoint.weight_files import POINTER, LazyTensors, open_address
from imaginaire.config import lazy_config
from imaginaire.config.schema import CheckpointConfig
from imaginaire.distributed import parallel
from imaginaire.errors import CheckpointError, ConfigError, TrainingError, UserError, near
from imaginaire.optim import state as optim_state
from imaginaire.training.memory import host_memory_available
from imaginaire.training.model import ImaginaireModel

log = logging.getLogger(__name__)

KEY = "checkpoint.type"
_CLOSE_TIMEOUT_S = 30  # for a sharded write whose other ranks may be gone


@dataclass(slots=True)
class TrainingState:
    """Everything that a checkpoint holds; ``trainer_state`` gives the trainer's own part (a collective)."""

    model: ImaginaireModel
    optimizer: Optimizer
    scheduler: LRScheduler
    trainer_state: Callable[[], dict[str, Any]]
    load_trainer_state: Callable[[dict[str, Any]], None]

    def trees(self) -> dict[str, Tree]:
        """The four parts with live tensors."""
        return {
            "model": self.model.checkpoint_state(),
            "optim": optim_state.named_state(self.optimizer, self.model),
            "scheduler": self.scheduler.state_dict(),
            "trainer": self.trainer_state(),
        }


class Checkpointer:
    """Loads either layout; how a set is written is the subclass's."""

    is_dcp = False

    def __init__(self, config: CheckpointConfig, run_dir: str, callbacks: Any) -> None:
        self.config = config
        self.folder = storage.join(run_dir, "checkpoints")
        self._callbacks = callbacks
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.saved_iteration: int | None = None  # of the newest save of this process

    # --- saving

    def save(self, state: TrainingState, iteration: int) -> None:
        """Copy the state and start writing it. Every rank calls this at the same iteration."""
        start = time.perf_counter()
        self._callbacks.on_save_checkpoint_start(state.model, iteration)
        self.finalize()
        self._require_finite(state.model, iteration)
        trees = self._snapshot(state)
        if distributed.is_rank0():
            self._callbacks.on_save_checkpoint(state.model, trees)
            for kind in ("scheduler", "trainer"):
                checkpoint_layout.check_plain(trees[kind], kind)
        saved = CheckpointSet(self.folder, self._name(iteration))
        self._writer = threading.Thread(target=self._write_and_report, args=(saved, trees, start), name="checkpoint")
        self._writer.start()
        self.saved_iteration = iteration
        self._callbacks.on_save_checkpoint_end(state.model, iteration)

    def _require_finite(self, model: ImaginaireModel, iteration: int) -> None:
        """Raise on all ranks when trained weights or their average are not finite. Buffers and frozen parameters may be
        infinite, as masks of -inf are."""
        constant = {name for name, _ in model.named_buffers()}
        constant |= {name for name, p in model.named_parameters() if not p.requires_grad}
        state = model.checkpoint_state()
        weights_of = {name: t for name, t in state.items() if name.replace("net_ema.", "net.", 1) not in constant}
        if names := parallel.not_finite(weights_of, on_any_rank=True):
            newest = checkpoint_layout.read_pointer(self.folder)
            kept = f"The same command continues from {newest.path('model')}." if newest else "Nothing is saved yet."
            raise TrainingError(
                f"Iteration {iteration} is not saved: {len(names)} of {len(weights_of)} tensors hold values that are"
                f" not finite, such as {', '.join(names[:3])}. Lower optimizer.lr, or look at train/grad_norm. {kept}"
            )

    def check(self) -> None:
        """Raise the error of the background writer, if any. The trainer calls this at every step."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                f"Saving iteration {self.saved_iteration} to {self.folder} failed: "
                f"{type(failure).__name__}: {str(failure).rstrip('.')}. The pointer names the last complete set: "
                "remove the cause, then start the same command again to continue from it."
            ) from failure

    def close(self) -> None:
        """Let a write in progress finish after an error; log an error when the write failed."""
        if self._writer is not None:
            self._writer.join(None if not self.is_dcp else _CLOSE_TIMEOUT_S)
            self._writer = None
        if self._failure is not None:
            log.error("iteration %s was not saved: %s", self.saved_iteration, self._failure)
            self._failure = None

    def finalize(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def _write_and_report(self, saved: CheckpointSet, trees: dict[str, Tree], start: float) -> None:
        try:
            if distributed.is_rank0():
                self._withdraw(saved)
            self._write(saved, trees)
            if distributed.is_rank0():
                self._publish(saved)
            seconds = time.perf_counter() - start
            if distributed.is_rank0():
                log.info("saved iter %d to %s (%.1f s)", saved.iteration, saved.folder, seconds)
            self._callbacks.on_save_checkpoint_success(saved.iteration, seconds)
        except BaseException as error:  # handed to the training thread by check()
            self._failure = error

    def _snapshot(self, state: TrainingState) -> dict[str, Tree]:
        """A copy of the state that training cannot change any more."""
        raise NotImplementedError

    def _write(self, saved: CheckpointSet, trees: dict[str, Tree]) -> None:
        """Runs in the background thread."""
        raise NotImplementedError

    def _publish(self, saved: CheckpointSet) -> None:
        """Read the set back, point to it, and only then remove older ones."""
        if faults := saved.faults():
            raise CheckpointError(f"What was written cannot be read back: {' '.join(faults)}")
        storage.forget_copies()
        checkpoint_layout.write_pointer(saved)
        try:
            self._apply_retention(saved)
        except (OSError, UserError) as error:
            log.warning("iter %d is saved, but older checkpoints could not be removed: %s", saved.iteration, error)

    def _withdraw(self, saved: CheckpointSet) -> None:
        """Point to an older set before the one that the pointer names is overwritten."""
        try:
            named = checkpoint_layout.read_pointer(self.folder)
        except CheckpointError:
            return
        if named is not None and named.iteration == saved.iteration:
            older = checkpoint_layout.newest_complete(self.folder, before=saved.iteration)
            if older is not None:
                checkpoint_layout.write_pointer(older)
            else:
                storage.remove(storage.join(self.folder, POINTER))

    def _apply_retention(self, saved: CheckpointSet) -> None:
        """Delete what ``keep_last`` and ``keep_every`` do not keep; by default optimizer files before the last two."""
        keep_last, keep_every = self.config.keep_last, self.config.keep_every
        sets = [s for s in checkpoint_layout.all_sets(self.folder) if s.iteration <= saved.iteration]
        age = 0
        for old in sets:
            was_complete = old.has("trainer")  # written last and removed first
            age += was_complete
            if was_complete and age <= (keep_last if keep_last is not None else 2):
                continue
            keeps_weights = keep_last is None or (keep_every is not None and old.iteration % keep_every == 0)
            for kind in ["optim"] if keeps_weights else reversed(KINDS):
                if old.has_leftovers(kind):
                    old.remove(kind)

    # --- loading

    def load(self, state: TrainingState) -> int:
        """Restore the run's own newest checkpoint, else ``load_path``; the iteration to go on from."""
        own = checkpoint_layout.own_set(self.folder, self._kinds(), fallback=self.config.fallback)
        self._callbacks.on_load_checkpoint_start(state.model)
        if own is not None:
            iteration = self._restore(own, state, is_own=True)
            log.info("resumed from iter %d of %s", own.iteration, self.folder)
        elif self.config.load_path:
            iteration = self._load_from_path(state)
        else:
            log.info("no checkpoint in %s: training from the start", self.folder)
            iteration = 0
        distributed.barrier("checkpoint loaded")
        storage.forget_copies()  # of remote files, which may fill the disk
        self._callbacks.on_load_checkpoint_end(state.model, iteration)
        return iteration

    def restore_weights(self, model: ImaginaireModel, iteration: int) -> None:
        """Put weights and averages of a saved iteration of this run back into the model. Every rank calls this."""
        self.finalize()
        distributed.barrier("checkpoints written")
        self._restore_model(CheckpointSet(self.folder, self._name(iteration)), model, from_average=False)
        distributed.barrier("weights restored")
        storage.forget_copies()

    def _name(self, iteration: int) -> str:
        return checkpoint_layout.set_name(iteration, dcp=self.is_dcp)

    def _kinds(self) -> list[str]:
        """The parts that a resumed run takes from its checkpoint."""
        skip = self.config.keys_not_to_resume
        if unknown := sorted(set(skip) - set(KINDS)):
            raise ConfigError(f"checkpoint.keys_not_to_resume has '{unknown[0]}'.{near(unknown[0], KINDS)}")
        return [kind for kind in KINDS if kind not in skip]

    def _load_from_path(self, state: TrainingState) -> int:
        config = self.config
        if not (config.load_training_state and "model" in config.keys_not_to_resume):
            state.model.on_load_path(config.load_path)
        if config.load_training_state:
            iteration = self._restore(checkpoint_layout.foreign_set(config.load_path, self._kinds()), state)
            log.info("loaded weights and training state of iter %d from %s", iteration, config.load_path)
            return iteration
        source = weights.read(config.load_path)
        if config.load_ema_to_reg:
            source = _average_as_weights(source, config.load_path)
        report = state.model.load_checkpoint_state(_with_copies(source, state.model.checkpoint_state()))
        self._require(report, config.load_path)
        iteration = 0
        if config.only_load_scheduler_state:
            saved = checkpoint_layout.foreign_set(config.load_path, ["scheduler"])
            state.scheduler.load_state_dict(saved.read("scheduler"))
            iteration = int(saved.read("trainer")["iteration"])
        log.info("loaded weights from %s (%s)", config.load_path, report.summary())
        return iteration

    def _restore(self, saved: CheckpointSet, state: TrainingState, *, is_own: bool = False) -> int:
        kinds = self._kinds()
        if skipped := [kind for kind in KINDS if kind not in kinds]:
            log.warning("not resuming %s, as checkpoint.keys_not_to_resume asks", ", ".join(sorted(skipped)))
        from_average = self.config.load_ema_to_reg and not is_own  # of a start, not of a resumed run
        if "model" in kinds:
            self._restore_model(saved, state.model, from_average, is_own=is_own)
        if "optim" in kinds:
            tree = saved.read("optim", _like_parameters(state.model))
            for note in optim_state.load_named_state(state.optimizer, state.model, tree):
                log.warning("%s", note)
            if "model" not in kinds or from_average:  # the saved masters belong to other weights
                optim_state.reset_masters(state.optimizer)
        if "scheduler" in kinds:
            state.scheduler.load_state_dict(saved.read("scheduler"))
        trainer = saved.read("trainer")
        self._callbacks.on_load_checkpoint(state.model, trainer)
        if not is_own:
            trainer = {**trainer, "metrics": None}  # its W&B run is the other run's
        if "trainer" in kinds:
            state.load_trainer_state(trainer)
            return int(trainer["iteration"])
        return 0

    def _restore_model(
        self, saved: CheckpointSet, model: ImaginaireModel, from_average: bool, *, is_own: bool = True
    ) -> None:
        source: Mapping[str, Tensor]
        if saved.is_dcp and not from_average:
            live = model.checkpoint_state()

            def like(place: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> Tensor:
                target = live.get(place[-1])  # a name or shape that does not fit is read whole, and reported below
                return target if target is not None and target.shape == size else torch.empty(size, dtype=dtype)

            source = saved.read("model", like)
            if not is_own:
                filled = _with_copies(source, live)
                weights.load_into(live, {name: filled[name] for name in filled if name not in source})
                source = filled
            report = model.account_checkpoint_state(source)
            report = replace(report, not_finite=parallel.not_finite({name: live[name] for name in report.matched}))
        else:
            source = open_address(saved.path("model")) if saved.is_dcp else saved.read("model")
            if from_average:
                source = _average_as_weights(source, saved.path("model"))
            if not is_own:
                source = _with_copies(source, model.checkpoint_state())
            report = model.load_checkpoint_state(source)
        self._require(report, saved.path("model"))

    def _require(self, report: weights.LoadReport, source: str) -> None:
        config = self.config
        if config.strict_resume:
            has_other_sizes = config.dcp_allow_mismatched_size
            report.require(config.allow_missing, config.allow_unexpected, has_other_sizes, source)
        elif not report.matched:
            raise CheckpointError(f"{source}: not one of its tensors fits this model ({report.summary()}).")
        weights.refuse_not_finite(report.not_finite, source)
        if report.missing or report.unexpected or report.wrong_shape:
            names = [*report.missing, *report.unexpected, *report.wrong_shape]
            listed = f" ({', '.join(names[:20])}{', ...' if len(names) > 20 else ''})" if config.verbose else ""
            log.warning("%s: %s%s", source, report.summary(), listed)


class StandardCheckpointer(Checkpointer):
    """``ckpt_type=standard``: four .pt files; rank 0 holds one snapshot, the other ranks one gathered tensor at a
    time."""

    def _snapshot(self, state: TrainingState) -> dict[str, Tree]:
        return {kind: _gather(tree, keep=distributed.is_rank0()) for kind, tree in state.trees().items()}

    def _write(self, saved: CheckpointSet, trees: dict[str, Tree]) -> None:
        if distributed.is_rank0():
            checkpoint_layout.write_standard(saved, trees)


class DistributedCheckpointer(Checkpointer):
    """``ckpt_type=dcp``: every rank writes its shards (in the background with ``dcp_async_mode_enabled``)."""

    is_dcp = True

    def save(self, state: TrainingState, iteration: int) -> None:
        # decided here, where all ranks are in step: the writer may still run when the process group is gone
        self._group = distributed.cpu_group("checkpoint")
        super().save(state, iteration)
        if not self.config.dcp_async_mode_enabled:
            self.finalize()

    def _snapshot(self, state: TrainingState) -> dict[str, Tree]:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        trees = state.trees()
        return {kind: BlockingAsyncStager(cache_staged_state_dict=False).stage(tree) for kind, tree in trees.items()}

    def _write(self, saved: CheckpointSet, trees: dict[str, Tree]) -> None:
        checkpoint_layout.write_dcp(saved, trees, self._group)


class DummyCheckpointer(Checkpointer):
    """``ckpt_type=dummy``: saves nothing; loads as the others do."""

    def save(self, state: TrainingState, iteration: int) -> None:
        self.saved_iteration = iteration


def check_type(config: CheckpointConfig) -> None:
    """Raise where ``checkpoint.type`` is no class of checkpointers, nor anything else that could make one."""
    node = config.type
    target = locate(node, KEY) if isinstance(node, str) else node
    target = target_of(node, KEY) if isinstance(node, Mapping) else target
    is_other_class = isinstance(target, type) and not issubclass(target, Checkpointer)
    if node is not None and (is_other_class or not callable(target)):
        raise ConfigError(f"{KEY} is {describe(target)}, no class of checkpointers. Choose ckpt_type=standard.")


def make(config: CheckpointConfig, run_dir: str, callbacks: Any) -> Checkpointer:
    """The configured class, given by itself, by name or as a lazy call; four .pt files when none is chosen."""
    node = config.type
    arguments: dict[str, Any] = {"config": config, "run_dir": run_dir, "callbacks": callbacks}
    if node is None:
        return StandardCheckpointer(**arguments)
    if isinstance(node, str):
        node = locate(node, KEY)
    made = node(**arguments) if isinstance(node, type) else lazy_config.instantiate(node, **arguments)
    if not isinstance(made, Checkpointer):
        raise CheckpointError(f"{KEY} makes a {type(made).__name__}, no checkpointer. Choose ckpt_type=standard.")
    return made


def check_room(state: TrainingState, run_dir: str, *, gathers: bool) -> None:
    """Raise on all ranks at the start when disk or host memory do not suffice for the first save."""
    trained = [p for p in state.model.parameters() if p.requires_grad]
    # of the whole tensors, also where they are sharded: weights and average ...
    needed = sum(tensor.nbytes for tensor in state.model.checkpoint_state().values())
    needed += sum(p.numel() * (8 if p.dtype == torch.float32 else 12) for p in trained)  # ... moments and masters
    distributed.from_rank0(lambda: _require_room(needed, run_dir, gathers=gathers))  # which gathers


def _require_room(needed: int, run_dir: str, *, gathers: bool) -> None:
    free = storage.free_bytes(run_dir)
    if free is not None and needed > free:
        raise CheckpointError(
            f"The next checkpoint needs {storage.readable_bytes(needed)}, but {run_dir} has"
            f" {storage.readable_bytes(free)} free. Free space, set "
            "IMAGINAIRE_OUTPUT_ROOT to another disk or s3://, or let fewer checkpoints stay (checkpoint.keep_last=2)."
        )
    available = host_memory_available()
    if gathers and needed > 0.9 * available:
        raise ConfigError(
            f"A checkpoint of this run is a snapshot of {storage.readable_bytes(needed)} on rank 0's host, which has"
            f" {storage.readable_bytes(available)} of memory available. Use ckpt_type=dcp: every rank"
            " then writes its own shards."
        )


def _gather(tree: Tree, *, keep: bool) -> Tree:
    """The tree with whole tensors copied to the host on the rank that keeps them; None in their place elsewhere."""
    if isinstance(tree, Tensor):
        whole = parallel.full_tensor(tree)
        if not keep:
            return None
        return whole.to("cpu", copy=not parallel.is_dtensor(tree) or whole.device.type != "cpu").contiguous()
    if isinstance(tree, dict):
        return {name: _gather(value, keep=keep) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_gather(value, keep=keep) for value in tree)
    return tree


def _like_parameters(model: ImaginaireModel) -> Like:
    """Optimizer state of a sharded parameter is loaded into the same shards, everything else whole."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def like(place: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(place[1]) if len(place) == 3 else None
        if parallel.is_dtensor(parameter) and parameter.shape == size:
            return torch.zeros_like(parameter, dtype=dtype)
        return torch.empty(size, dtype=dtype)

    return like


def _with_copies(source: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights to start from: names under "net."; an average, and copies of the network to compare with, begin as the
    weights where the source has none. Copies that this model does not keep are left out."""
    names = {name: name for name in source if not name.startswith(weights.COPIES) or name in live}
    if any(name.startswith("net.") for name in live) and not any(name.startswith("net.") for name in names):
        names = {f"net.{name}": name for name in names if not name.startswith("net_ema.")}
    for prefix in ("net_ema.", *weights.COPIES):
        if not any(name.startswith(prefix) for name in names):
            weights_of = {name: f"net.{name.removeprefix(prefix)}" for name in live if name.startswith(prefix)}
            names |= {name: names[weight] for name, weight in weights_of.items() if weight in names}
    return LazyTensors({name: (source, original) for name, original in names.items()})


def _average_as_weights(source: Mapping[str, Tensor], path: str) -> Mapping[str, Tensor]:
    """The averaged weights, also under the names of the trained weights, and the other entries of the file."""
    average = [name for name in source if name.startswith("net_ema.")]
    if not average:
        raise CheckpointError(f"checkpoint.load_ema_to_reg=True, but {path} holds no averaged weights (net_ema.*).")
    others = [name for name in source if weights.is_extra(name) and not name.startswith("net.")]
    names = {name: name for name in [*others, *average]} | {f"net.{name[8:]}": name for name in average}
    return LazyTensors({name: (source, original) for name, original in names.items()})
