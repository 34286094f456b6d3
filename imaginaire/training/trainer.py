# SPDX-License-Identifier: Apache-2.0
"""The training loop.

Policy is in callbacks, arithmetic in the model and in `parallel`, files in the checkpointer. The trainer owns the
order of events and one number, the samples seen. An iteration ends with its save: whatever callbacks and validation
did at that iteration is part of it, and a resumed run goes on as if it had never stopped.
"""

import gc
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imaginaire import distributed, random
from imaginaire import log as logs
from imaginaire.buildable import locate
from imaginaire.checkpoint import checkpointer
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.checkpointer import TrainingState
from imaginaire.config import compose, lazy_config
from imaginaire.config.lazy_config import to_data
from imaginaire.config.schema import NEVER, Config
from imaginaire.data import stream as data
from imaginaire.data import workers
from imaginaire.data.stream import DataStream
from imaginaire.distributed import parallel, places
from imaginaire.distributed.places import EXIT_INTERRUPTED, StopRequests, Watchdog, lost_peer
from imaginaire.errors import CheckpointError, ConfigError, DataError, TrainingError, UserError
from imaginaire.optim import schedules
from imaginaire.training import memory, preflight, provenance
from imaginaire.training.callbacks import CallbackGroup
from imaginaire.training.callbacks.trackers import Metrics
from imaginaire.training.model import ImaginaireModel, evaluating, require_memory, to_device
from imaginaire.training.run_folder import RunFolder, write_config
from imaginaire.training.step import StepGuard, Timers, grad_scaler

log = logging.getLogger(__name__)

_PROGRESS_S = 30.0  # between two lines of a model's progress in the log
_COMMON_ERROR_S = 5.0  # within which all ranks meet an error that is common to them


def launch(config: Config) -> int:
    """Run a composed configuration to its end; the exit code (0, or 75 when a signal asked to stop)."""
    is_ours = not distributed.is_initialized()  # a caller's process group is the caller's to end
    distributed.init()
    config = compose.with_job_name(config, distributed.broadcast_object(config.job.name))
    logs.setup(None, distributed.rank())
    preflight.check_launch(config)
    trainer = None
    try:
        kind = config.trainer.type
        trainer = (locate(kind, "trainer.type") if isinstance(kind, str) else kind)(config)
        trainer.watchdog.beat("building the data loaders", long=True)
        dataloader_train = lazy_config.instantiate(config.dataloader_train)
        dataloader_val = lazy_config.instantiate(config.dataloader_val) if config.trainer.run_validation else None
        trainer.watchdog.beat("building the model", long=True)
        model = lazy_config.instantiate(config.model)
        trainer.train(model, dataloader_train, dataloader_val)
        return EXIT_INTERRUPTED if trainer.interrupted else 0
    except UserError as error:
        if trainer is not None:
            trainer.close()
            trainer.remove_run_dir(error)
        raise
    finally:
        if trainer is not None:
            trainer.close()
        workers.close_readers()
        if is_ours:
            distributed.shutdown()


class ImaginaireTrainer:
    """Trains an `ImaginaireModel`, from its newest checkpoint on."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = distributed.device()
        self.dims = parallel.init_dims(
            config.model_parallel.context_parallel_size, replicate_only=config.trainer.distributed_parallelism == "ddp"
        )
        self.run_dir = config.job.path_local
        self.timers = Timers(self.device)
        self.iteration = 0
        self.resumed_iteration = 0
        self.interrupted = False
        self.save_wanted = False  # a callback asks for a checkpoint of this iteration, alike on all ranks
        self.last_iteration: int = config.trainer.max_iter  # a callback may end the run earlier, alike on all ranks
        self._step_began_at: dict[str, int | None] | None = None  # the data's place, while a step has changed no weight
        self._has_begun = False
        self._is_applying = False  # the weights are neither of this iteration nor of the next
        self._validation_due = False
        self._start = self._reported_at = time.monotonic()
        self._run_folder = RunFolder(self.run_dir)
        torch.backends.cudnn.deterministic = config.trainer.cudnn.deterministic
        torch.backends.cudnn.benchmark = config.trainer.cudnn.benchmark
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        random.seed_all(config.trainer.seed, 0, "build")  # the same on all ranks, so that they build equal models
        try:
            is_writer = distributed.is_rank0()
            max_iter = config.trainer.max_iter if config.trainer.max_iter < NEVER else None
            self.metrics = Metrics(self.run_dir, config.job, is_writer, to_data(config), max_iter)
            self.callbacks = CallbackGroup(config, self)
            self.checkpointer = checkpointer.make(config.checkpoint, self.run_dir, self.callbacks)
            self.watchdog = Watchdog(config.trainer.timeout_period, self.run_dir)
        except UserError as error:
            self._run_folder.release()
            self.remove_run_dir(error)
            raise

    @property
    def samples_seen(self) -> int:
        return self.stream.samples_seen

    def train(self, model: ImaginaireModel, dataloader_train: Any, dataloader_val: Any = None) -> None:
        """Train until ``trainer.max_iter`` or until a signal asks to stop; the last state is saved."""
        preflight.check_built(self.config, model, dataloader_train, dataloader_val)
        self.model = model
        self.dataloader_val = dataloader_val  # callbacks take their fixed samples from it
        model.seed = self.config.trainer.seed
        model.run_dir = str(self.run_dir)
        model.progress = self._report_progress
        model.phase = self.timers
        try:
            with StopRequests() as self._stop:
                try:
                    self._prepare(model, dataloader_train)
                    self._loop(model, dataloader_val)
                    self._finish(model)
                except Exception as error:  # signals are still only noted: torchrun sends one when a rank is gone
                    self._leave(error)
                    raise
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            # A worker's death is raised by a signal handler, so anywhere.
            if (cause := memory.explained(error, model.memory_advice) or workers.explained(error)) is not None:
                raise cause from error
            raise
        finally:
            self.checkpointer.close()
            self._run_folder.release()

    def close(self) -> None:
        """Let go of everything, also after an exception; a second call does nothing."""
        gc.enable()  # a callback may have switched it off
        self.watchdog.close()
        self.checkpointer.close()
        self.metrics.close()
        self._run_folder.release()

    def remove_run_dir(self, error: UserError) -> None:
        """Remove what a refused start made of the run folder. Its error is on the terminal.

        Some settings are refused in the first step alone, such as those of a service that it asks.
        """
        is_refused = isinstance(error, ConfigError) and self.iteration == self.resumed_iteration
        if is_refused or not self._has_begun:
            self._run_folder.remove()

    # --- before the first step

    def _prepare(self, model: ImaginaireModel, dataloader_train: Any) -> None:
        config = self.config
        self.watchdog.beat("preparing the model", long=True)
        memory_format = getattr(torch, config.trainer.memory_format)
        to_device(model, self.device, memory_format)
        model.on_train_start(memory_format)
        parallel.synchronise_replicas(model)
        model.parallelize(self.dims)
        require_memory(model)
        self.broadcast_buffers = parallel.BufferBroadcaster(model, config.trainer.ddp.broadcast_buffers)
        self.averager = parallel.GradientAverager(
            model,
            static_graph=config.trainer.ddp.static_graph,
            find_unused_parameters=config.trainer.ddp.find_unused_parameters,
        )
        self.callbacks.on_optimizer_init_start()
        self.optimizer, self.scheduler = model.init_optimizer_scheduler(config.optimizer, config.scheduler)
        self.grad_scaler = grad_scaler(self.device, dict(config.trainer.grad_scaler_args))
        self.guard = StepGuard(config.trainer)
        preflight.check_precision(model, has_scaler=self.grad_scaler.is_enabled())
        self.callbacks.on_optimizer_init_end()
        checkpoint_layout.check_plain(self.callbacks.state_dict(), "callbacks")

        dims = self.dims.sharing_samples(model.ranks_per_sample)
        self.stream = DataStream(dataloader_train, config.trainer.seed, dims, partial(self.timers, "data"))
        self._seed_rank()
        self._state = TrainingState(model, self.optimizer, self.scheduler, self.state_dict, self.load_state_dict)
        if not isinstance(self.checkpointer, checkpointer.DummyCheckpointer):
            checkpointer.check_room(self._state, self.run_dir, gathers=not self.checkpointer.is_dcp)
        self.watchdog.beat("reading the checkpoint", long=True)
        self.iteration = self.resumed_iteration = self.checkpointer.load(self._state)
        if (name := parallel.replicas_equal(model)) is not None:
            raise TrainingError(f"{name} differs between the ranks after loading. Do all of them see the same files?")
        self.watchdog.beat("preparing the model for its data", long=True)  # its simulators may start
        model.on_data(dataloader_train, *([] if self.dataloader_val is None else [self.dataloader_val]))
        schedules.note_end(self.scheduler, config.trainer.max_iter)
        if distributed.is_rank0() and (self.iteration == 0 or self.iteration < config.trainer.max_iter):
            write_config(self.run_dir, lazy_config.to_yaml(config), is_resumed=self.iteration > 0)
        self.metrics.open(self.iteration)
        sets = preflight.data_sets(config.dataloader_train)
        provenance.record_start(self.run_dir, model, self.optimizer, self.dims, self.device, self.iteration, sets)

    def _loop(self, model: ImaginaireModel, dataloader_val: Any) -> None:
        config, callbacks = self.config.trainer, self.callbacks
        batches = data.without_end(model, self.stream)
        callbacks.on_train_start(model, self.iteration)
        self._has_begun = True
        is_first = self.iteration == 0 and config.max_iter > 0 and config.validate_at_start
        if config.run_validation and (is_first or self._validation_due):
            self.validate(model, dataloader_val)
            self.metrics.flush(self.iteration)
        if not model.training:
            model.train()
        if self.save_wanted:
            self._save()
        is_save_due = False
        while self.iteration < self.last_iteration and not (self.interrupted and model.at_boundary()):
            batch, output, loss = self._step(model, batches)
            self.iteration += 1
            self.watchdog.beat(f"callbacks at iteration {self.iteration}")
            callbacks.on_training_step_end(model, batch, output, loss, self.iteration)
            is_last = self.iteration == self.last_iteration
            if config.run_validation and (is_last or self.iteration % config.validation_iter == 0):
                self.validate(model, dataloader_val)
            self.metrics.flush(self.iteration)
            self.checkpointer.check()
            is_save_due |= self.save_wanted or self.iteration % self.config.checkpoint.save_iter == 0
            if is_save_due and model.at_boundary():
                self._save()
                is_save_due = False
        batches.close()

    def _step(self, model: ImaginaireModel, batches: Iterator[Any]) -> tuple[Any, dict[str, Any], Tensor]:
        """One optimizer step over ``grad_accum_iter`` micro-batches; the last of them with its results."""
        callbacks, iteration, micro_batches = self.callbacks, self.iteration, self.config.trainer.grad_accum_iter
        total: Tensor | None = None
        self._step_began_at = self.stream.state_dict()
        self.guard.begin()
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            self._beat(f"iteration {iteration + 1}, waiting for data")
            self._reported_at = time.monotonic()
            callbacks.on_before_dataloading(iteration)
            with self.timers("train_batches"):  # less the wait for the loader, which is timed as "data"
                batch = next(batches)
            callbacks.on_after_dataloading(iteration)
            self._beat(f"iteration {iteration + 1}, micro-batch {micro + 1} of {micro_batches}")
            batch = data.move_to(batch, self.device)
            callbacks.on_training_step_start(model, batch, iteration)
            callbacks.on_training_step_batch_start(model, batch, iteration)
            output, loss = self._forward_backward(model, batch, is_last)
            total = loss if total is None else total + loss
            if is_last:
                self._optimizer_step(model, total / micro_batches)
            callbacks.on_training_step_batch_end(model, batch, output, loss, iteration)
        return batch, output, loss

    def _forward_backward(self, model: ImaginaireModel, batch: Any, is_last: bool) -> tuple[dict[str, Any], Tensor]:
        callbacks, iteration = self.callbacks, self.iteration
        parallel.set_gradient_sync(model, is_last)
        callbacks.on_before_forward(iteration)
        with self.timers("forward"), model.autocast(self.device):
            output, loss = model.training_step(batch, iteration)
        callbacks.on_after_forward(iteration)
        callbacks.on_before_backward(model, loss, iteration)
        self._beat(f"iteration {iteration + 1}, backward")
        with self.timers("backward"):
            self.grad_scaler.scale(loss / self.config.trainer.grad_accum_iter).backward()
            model.on_after_backward()
        with self.timers("comm"):
            if is_last:
                self.averager()
                self.broadcast_buffers()
        callbacks.on_after_backward(model, iteration)
        return output, loss.detach()

    def _optimizer_step(self, model: ImaginaireModel, loss: Tensor) -> None:
        callbacks, optimizer, scheduler, scaler = self.callbacks, self.optimizer, self.scheduler, self.grad_scaler
        iteration = self.iteration
        with self.timers("optimizer"):
            if scaler.is_enabled():
                scaler.unscale_(optimizer)
            callbacks.on_before_optimizer_step(model, optimizer, scheduler, scaler, iteration)
            may_apply, stop = self.guard.agree(float(loss), self._stop.wanted)
            self.interrupted = self.interrupted or stop
            self._is_applying = True
            if may_apply and not model.has_gradient():
                optimizer.zero_grad(set_to_none=True)  # zeros would still move weights, by momentum and decay
            if may_apply and self._apply(optimizer):
                self.guard.in_a_row = 0
                scheduler.step()
                callbacks.on_before_zero_grad(model, optimizer, scheduler, iteration)
                model.on_before_zero_grad(optimizer, scheduler, iteration)
            else:
                if not may_apply and scaler.is_enabled():
                    scaler.update()  # closes what unscale_ opened
                self.guard.skip(model, optimizer, self._place())
                self.metrics.log({"train/skipped_steps": float(self.guard.skipped)}, iteration + 1)
            optimizer.zero_grad(set_to_none=True)
            self._step_began_at, self._is_applying = None, False

    def _apply(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False when the gradient scaler found an overflow and left it out."""
        scale = self.grad_scaler.get_scale()
        self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
        return not self.grad_scaler.is_enabled() or self.grad_scaler.get_scale() >= scale

    # --- validation

    @torch.no_grad()
    def validate(self, model: ImaginaireModel, dataloader: Any) -> None:
        """One pass over the validation data with averaged weights; training's randomness and modes stay untouched.

        A pass that a signal cuts short is made up for when the run is resumed.
        """
        config, callbacks, iteration = self.config.trainer, self.callbacks, self.iteration
        self._validation_due = True
        if self.interrupted:
            return
        callbacks.on_validation_start(model, dataloader, iteration)
        with evaluating(model), model.ema_scope(), random.preserved():
            random.seed_all(config.seed, self.dims.dp_rank, "validation")  # the same draws in every validation
            for batch in self._validation_batches(dataloader):
                batch = data.move_to(batch, self.device)
                callbacks.on_validation_step_start(model, batch, iteration)
                with model.autocast(self.device):
                    output, loss = model.validation_step(batch, iteration)
                callbacks.on_validation_step_end(model, batch, output, loss, iteration)
        if not self.interrupted:
            self._validation_due = False
            callbacks.on_validation_end(model, iteration)

    def _validation_batches(self, dataloader: Any) -> Iterator[Any]:
        """The batches of one pass. A rank that has no more waits for the others; all stop when any was asked to."""
        batches = iter(data.open_pass(dataloader))
        count, nothing = 0, object()
        while True:
            self.watchdog.beat(f"validation at iteration {self.iteration}, batch {count + 1}", long=count == 0)
            is_over = count == self.config.trainer.max_val_iter
            batch, failure = nothing, None
            try:
                batch = nothing if is_over else next(batches, nothing)
            except Exception as error:  # all ranks leave together, so that they can save what was trained
                failure = error
            place = distributed.rank() + 1.0  # 0 is none
            flags = torch.tensor([float(batch is not nothing), float(self._stop.wanted), (failure is not None) * place])
            any_batch, stop, failed = distributed.all_reduce_(flags, "max").tolist()
            if failed:
                raise failure or DataError(f"Rank {failed - 1:.0f} cannot read the validation data; see its own error.")
            if stop:
                self.interrupted = True
                log.warning("validation at iteration %d is cut short: the run was asked to stop", self.iteration)
            if stop or not any_batch:
                return
            if batch is not nothing:
                yield batch
            count += 1

    # --- saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint (a collective); `torch.load(weights_only=True)` reads it."""
        place = self._step_began_at or self.stream.state_dict()
        return {
            "iteration": self.iteration,
            "samples_seen": place["samples_seen"],
            "data": place,
            "grad_scaler": self.grad_scaler.state_dict(),
            "skipped_steps": self.guard.skipped,
            "skipped_in_a_row": self.guard.in_a_row,
            "validation_due": self._validation_due,
            "metrics": self.metrics.state_dict(),
            "world_size": self.dims.world_size,
            "context_parallel_size": self.dims.context_parallel_size,
            "rng": distributed.all_gather_object(random.get_rng_state()),
            "callbacks": distributed.all_gather_object(self.callbacks.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on the same number of processes or on another."""
        position = state.get("data")
        if position is None:
            log.warning("the checkpoint records no data position: it was written by another program, data starts anew")
        self.iteration = int(state["iteration"])
        self.stream.load_state_dict(position or {})
        if self.grad_scaler.is_enabled() and state.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        self._validation_due = bool(state.get("validation_due", False))
        self.guard.skipped = state.get("skipped_steps", 0)
        self.guard.in_a_row = state.get("skipped_in_a_row", 0)
        if state.get("metrics"):
            self.metrics.load_state_dict(state["metrics"])
        layout = (self.dims.world_size, self.dims.context_parallel_size)
        saved_layout = (state.get("world_size"), state.get("context_parallel_size"))
        of_callbacks = state.get("callbacks") or [{}]
        if layout == saved_layout:
            random.set_rng_state(state["rng"][self.dims.rank])
            self.callbacks.load_state_dict(of_callbacks[self.dims.rank])
            return
        self._seed_rank()
        self.callbacks.load_state_dict(of_callbacks[0])  # the same on all ranks, or replicas would part
        change = f"written by {saved_layout[0]} processes, this run has {self.dims.world_size}"
        log.info("the checkpoint was %s: the generators of each rank are seeded anew", change)

    def _save(self) -> None:
        self.watchdog.beat(f"saving iteration {self.iteration}", long=True)
        self.checkpointer.save(self._state, self.iteration)
        self.save_wanted = False

    def _leave(self, error: Exception) -> None:
        """Report where a lost rank is, or save what was trained since the last save, before an error ends the run.

        An error in a step repeats its data when the run is resumed. Weights that a step has half changed, or whose loss
        was not finite, are not saved.
        """
        self._stop.is_leaving = True
        if lost_peer(error) and workers.explained(error) is None:
            self.watchdog.ask(str(error).splitlines()[0].partition(". This is typically")[0])
            return
        if isinstance(error, TrainingError | CheckpointError) or self._is_applying or not self._has_progress():
            return
        if not self.model.at_boundary():
            log.error("iteration %d is not saved: the error came in the middle of an experience", self.iteration)
            return
        self.watchdog.beat(f"saving iteration {self.iteration} after an error", long=True)
        if places.exchange(f"save after an error at iteration {self.iteration}", "", _COMMON_ERROR_S) is None:
            log.error("iteration %d is not saved: not all ranks met an error here", self.iteration)
            return
        try:
            self._save()
            self.checkpointer.finalize()
            log.info("an error ends the run, but its state of iteration %d is saved", self.iteration)
        except Exception as other:  # the first error is the one that is raised
            log.error("iteration %d could not be saved after the error: %s", self.iteration, other)

    def _finish(self, model: ImaginaireModel) -> None:
        self.watchdog.beat(f"finishing at iteration {self.iteration}", long=True)
        if self.iteration == self.resumed_iteration and self.last_iteration < self.config.trainer.max_iter:
            log.info("nothing to do: the run has ended at iteration %d, before trainer.max_iter", self.iteration)
        elif self.iteration == self.resumed_iteration and not self.interrupted:
            log.warning(
                f"nothing to do: the run's newest checkpoint is of iteration {self.iteration}, and trainer.max_iter="
                f"{self.config.trainer.max_iter}. Set a larger one to go on, or another job.name to begin anew."
            )
        if self._has_progress():
            self._save()
        self.callbacks.on_train_end(model, self.iteration)
        self.checkpointer.finalize()
        distributed.barrier("end of training")
        self.callbacks.on_app_end()
        if self.interrupted:
            log.info("stopped by a signal at iteration %d; start the same command again to go on", self.iteration)
        elif self.iteration != self.resumed_iteration:
            seconds = time.monotonic() - self._start
            log.info("finished: iteration %d, %.0f s, run folder %s", self.iteration, seconds, self.run_dir)

    def _has_progress(self) -> bool:
        return self.iteration != self.resumed_iteration and self.checkpointer.saved_iteration != self.iteration

    # --- details

    def _beat(self, place: str) -> None:
        """A sign of life within a step; the first of a process compiles, and fills caches."""
        self.watchdog.beat(place, long=self.iteration == self.resumed_iteration)

    def _report_progress(self, text: str) -> None:
        """Report how the model makes the next batch: a sign of life, and now and then a line in the log."""
        self._beat(f"iteration {self.iteration + 1}, {text}")
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_S:
            self._reported_at = now
            log.info("iteration %d: %s", self.iteration + 1, text)

    def _place(self) -> str:
        newest = self.checkpointer.saved_iteration or self.resumed_iteration
        saved = f"newest checkpoint {newest}" if newest else "no checkpoint yet"
        return f"iteration {self.iteration + 1} ({self.samples_seen} samples, {saved})"

    def _seed_rank(self) -> None:
        """Seed the global generators of this rank; ranks that share a sample draw alike."""
        random.seed_all(self.config.trainer.seed, self.samples_seen, f"rank{self.dims.dp_rank}")
