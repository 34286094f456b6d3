# SPDX-License-Identifier: Apache-2.0
"""A policy is cloned by the trainer: recorded actions become likelier."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attrs
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from cosmos_predict2.data.views import split
from cosmos_predict2.rl.policies import files, network
from cosmos_predict2.rl.policies.cloning import CloneStart, CloneWindows, begin
from cosmos_predict2.rl.policies.files import RESULT
from cosmos_predict2.rl.policies.null import Constant, by_errors, decision_errors
from cosmos_predict2.world_model.config import PRECISIONS, EMAConfig
from imaginaire import distributed, random, storage
from imaginaire.checkpoint import weights
from imaginaire.config import lazy_config
from imaginaire.config.nodes import as_config
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.data.stream import POSITION_KEY, WEIGHT_KEY
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext, Finding
from imaginaire.optim import schedules
from imaginaire.training.callbacks import Callback
from imaginaire.training.model import ImaginaireModel, PowerEMA

log = logging.getLogger(__name__)

KEY = "model.config"
FIGURES = "clone.json"
UNTRAINED = (
    "These are the weights that it began with: its held-out loss was {:.3g} then and {:.3g} at last, so it fits its"
    " recordings and no others. Record more episodes that succeed, clone a smaller policy, or begin with published"
    " weights (model.config.base); longer is worse."
)
CORRELATION = 0.9  # so that attempts differ in where they lead: documentations/trust_limits.md
TEMPERATURE = 0.3  # at 1 few of them succeed where what is played does: documentations/trust_measured.md


@attrs.define(kw_only=True, slots=False)
class CloningConfig(Section):
    """A policy, and how it is trained."""

    policy: str = "pi05"  # of the registry, or module:Class
    data: Any = None  # the data set of training
    base: str = ""  # published weights to begin with, or those of a clone; empty: tiny random ones
    lora_rank: int = attrs.field(default=0, validator=at_least(0))  # 0: the weights themselves are trained
    arguments: Any = attrs.field(factory=dict)  # others of the policy's ``to_clone``, such as augment or variant
    # deviation of draws, of policies that take it; null: the policy's own
    noise: Any = attrs.field(default=None, validator=above(0))
    # of draws of neighbouring actions, and of tokens, of policies that take them; null: those of base, and without one
    # .9 and .3
    correlation: Any = attrs.field(default=None, validator=at_least(0, at_most=0.999))
    temperature: Any = attrs.field(default=None, validator=above(0))
    num_knots: int = attrs.field(default=4, validator=at_least(1))  # motions of a chunk, each held for equally long
    shift: float = attrs.field(default=0.0, validator=at_least(0))  # of a picture's side, by which it is moved at most
    seed: int = attrs.field(default=0, validator=at_least(0))  # of drawn weights
    precision: str = attrs.field(default="float32", validator=one_of(*PRECISIONS))
    fsdp_shard_size: int = 0  # processes that the policy is sharded over; -1: all, 0: each has it whole
    recompute: bool = False  # blocks are computed anew in backward, which saves memory
    ema: EMAConfig = attrs.field(factory=EMAConfig)

    @property
    def draws(self) -> dict[str, float | None]:
        """How attempts differ from what is played."""
        usual = (None, None) if self.base else (CORRELATION, TEMPERATURE)
        given = (self.correlation, self.temperature)
        correlation, temperature = (b if a is None else a for a, b in zip(given, usual, strict=True))
        return dict(noise=self.noise, correlation=correlation, temperature=temperature)


class CloningModel(ImaginaireModel):
    """A `Cloneable` policy in ``net``."""

    memory_advice = (
        "Try model.config.precision=bfloat16, model.config.recompute=true, model.config.lora_rank=32, a smaller"
        " dataloader_train.batch_size with more trainer.grad_accum_iter, or several GPUs with"
        " model.config.fsdp_shard_size=-1."
    )
    beginning: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config = as_config(CloningConfig, config, KEY)
        if config.data is None:
            raise ConfigError(f"{KEY}.data must be set: the data set of training, ${{dataloader_train.dataset}}.")
        self.precision = PRECISIONS[config.precision]
        data = lazy_config.instantiate(config.data)
        windows: CloneWindows = data.windows
        self._folder = tempfile.TemporaryDirectory(prefix="clone")  # of drawn weights, and what is written beside them
        start = CloneStart(windows, Path(self._folder.name), config.seed, data.chunk, config.num_knots)
        own = {"base": config.base, "lora_rank": config.lora_rank, **dict(config.arguments)}
        given = {name: value for name, value in own.items() if value}
        try:
            self.net: nn.Module = begin(config.policy, start, given, f"{KEY}.arguments.", **config.draws)
        except BaseException:  # whose traceback would keep the folder
            self.close()
            raise
        network.cast(self.net, self.weight_dtype, is_uniform=bool(config.fsdp_shard_size))
        self.constant, self.sentences = Constant.of(windows), sorted(set(windows.tasks))
        self.views, self.recorded_size, self.contract = windows.views, windows.recorded_size, windows.contract
        shown: list[Any] = [self.views] if len(self.views) > 1 else []
        shown += [windows.state_statistics()] if windows.state_B_S is not None else []
        known = json.dumps([windows.statistics(), self.sentences, *shown], sort_keys=True)
        digest = hashlib.blake2b(known.encode(), digest_size=7).digest()
        self.register_buffer("beginning", torch.tensor(int.from_bytes(digest, "little")))
        self._expected = int(self.beginning)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        return network.check_sharding(as_config(CloningConfig, arguments["config"], KEY).fsdp_shard_size, context)

    # --- set-up

    def parallelize(self, dims: ParallelDims) -> None:
        network.parallelize_policy(self.net, dims, self.config.fsdp_shard_size, recompute=self.config.recompute)
        if (ema := self.config.ema).enabled:
            self.ema = PowerEMA(self.net, ema.rate, ema.iteration_shift, offload=ema.offload)

    def init_optimizer_scheduler(self, optimizer_cfg: Any, scheduler_cfg: Any) -> Any:
        optimizer = lazy_config.instantiate(optimizer_cfg, model=self.net)
        return optimizer, schedules.ConfiguredLR(optimizer, lazy_config.instantiate(scheduler_cfg))

    def load_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        report = super().load_checkpoint_state(state)
        self._require_same_data()
        return report

    def account_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._require_same_data()
        return super().account_checkpoint_state(state)

    def _require_same_data(self) -> None:
        if int(self.beginning) != self._expected:
            raise CheckpointError(
                "The checkpoint is of a clone of other recordings, whose actions have other statistics or sentences, or"
                " of other cameras."
                f" Give another job.name, and to go on from its policy {KEY}.base=RUN/policy."
            )

    def close(self) -> None:
        """Remove what it began with: nothing is written from now on."""
        self._folder.cleanup()

    # --- steps

    def training_step(self, batch: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        draws = random.generator(self.seed, int(batch[POSITION_KEY][0]), "shifts of pictures")
        views = split(batch["full_image"], len(self.views), dim=1)
        pictures = torch.cat([shifted(view, self.config.shift, draws) for view in views], dim=1)
        return {}, self._loss(self._windows({**batch, "full_image": pictures}), batch, "cloning")

    def validation_step(self, batch: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        windows = self._windows(batch)
        loss = self._loss(windows, batch, "cloning validation")
        with network.deciding(self.net):
            error_B = decision_errors(self.net, windows, self.constant, self.seed, batch[POSITION_KEY].tolist())  # type: ignore[arg-type]
        constant_B = self.constant.errors(windows.actions_B_A_D.double())
        rows = {"error": error_B, "constant": constant_B, "episode": batch["episode"].cpu()}
        return {"action_error": error_B.mean(), "constant_error": constant_B.mean(), "rows": rows}, loss

    def _windows(self, batch: Mapping[str, Any]) -> CloneWindows:
        """Policies take recorded actions on the host."""
        state = batch.get("state")
        return CloneWindows(
            batch["full_image"],
            batch["actions"].cpu(),
            batch["task"],
            self.views,
            state_B_S=None if state is None else state.cpu(),
        )

    def _loss(self, windows: CloneWindows, batch: Mapping[str, Any], purpose: str) -> Tensor:
        policy: Any = self.net
        draws = random.generator(self.seed, int(batch[POSITION_KEY][0]), purpose)
        return policy.cloning_loss(policy.record_of(windows.observation, windows.actions_B_A_D), draws)


def shifted(pictures_B_H_W_C: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Each picture moved by its own draw of up to a share of its side, where the edge's colour fills what is free."""
    most = [round(share * side) for side in pictures_B_H_W_C.shape[-3:-1]]
    if not any(most):
        return pictures_B_H_W_C
    moved = pictures_B_H_W_C.clone()
    for i, picture in enumerate(pictures_B_H_W_C):
        by = [int(torch.randint(-n, n + 1, (), generator=generator)) for n in most]
        rows, columns = (
            torch.arange(side, device=picture.device).sub(offset).clamp(0, side - 1)
            for side, offset in zip(picture.shape[-3:-1], by, strict=True)
        )
        moved[i] = picture.index_select(-3, rows).index_select(-2, columns)
    return moved


class KeepBestPolicy(Callback):
    """Writes the policy of the lowest held-out loss, and what it is worth. Without validation it is the last one."""

    resumed = ("best", "history")

    def __init__(self) -> None:
        super().__init__()
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, float]] = []
        self._losses: list[tuple[float, float]] = []
        self._rows: list[dict[str, Tensor]] = []

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if "://" in self.trainer.run_dir:
            raise ConfigError(f"{self.trainer.run_dir}: a clone is a local folder: set IMAGINAIRE_OUTPUT_ROOT.")

    def on_validation_start(self, model: Any, dataloader: Any, iteration: int = 0) -> None:
        self._losses, self._rows = [], []

    def on_validation_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        rows = output["rows"]
        counts = batch.get(WEIGHT_KEY, torch.ones(len(rows["episode"]))).cpu() > 0
        self._losses.append((float(loss), float(counts.sum())))
        self._rows.append({name: value[counts] for name, value in rows.items()})

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        gathered = distributed.all_gather_object((self._losses, self._rows))
        losses = [pair for of_rank, _ in gathered for pair in of_rank]
        loss = sum(one * count for one, count in losses) / sum(count for _, count in losses)
        rows = {name: torch.cat([part[name] for _, of_rank in gathered for part in of_rank]) for name in self._rows[0]}
        figures, verdict = by_errors(rows["error"], rows["constant"], rows["episode"])
        now = {"iteration": iteration, "loss": loss, **figures}
        self.history.append({"iteration": iteration, "loss": loss, "error": figures["error"]})
        if not self.best or loss < self.best["loss"]:
            self.best = {**now, "verdict": asdict(verdict)}
            self._write(model)
        if distributed.is_rank0():
            storage.write_json(Path(self.trainer.run_dir) / FIGURES, self.figures(model, iteration), indent=4)

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        if not self.best:
            self.best = {"iteration": iteration}
            self._write(model)
        folder = Path(self.trainer.run_dir) / RESULT
        if distributed.is_rank0():
            storage.write_json(Path(self.trainer.run_dir) / FIGURES, self.figures(model, iteration), indent=4)
            verdict = self.best.get("verdict", {"text": "Nothing was held out:", "next_step": "the last weights."})
            log.info("policy of iteration %d: %s", self.best["iteration"], folder)
            if self.best["iteration"] or len(self.history) < 2:
                log.info("%s %s", verdict["text"], verdict["next_step"])
            else:  # longer makes it worse
                log.warning("%s %s", verdict["text"], UNTRAINED.format(*(self.history[i]["loss"] for i in (0, -1))))
        model.close()

    def figures(self, model: CloningModel, iteration: int) -> dict[str, Any]:
        """The content of clone.json."""
        data: Any = OmegaConf.to_container(self.config.dataloader_train.dataset, resolve=True)
        return {
            "policy": model.config.policy,
            "iterations": iteration,
            "best": self.best,
            "history": self.history,
            "data": {key: value for key, value in data.items() if key != "_target_"},
            "run": self.trainer.run_dir,
        }

    def _write(self, model: CloningModel) -> None:
        """Sharded weights are gathered by all ranks, and the first one writes them."""
        with model.ema_scope(), torch.no_grad():
            if distributed.is_rank0():
                about = {"data": str(self.config.dataloader_train.dataset.path), **self.best, "seed": model.seed}
                about |= {"sentences": list(model.sentences), "views": list(model.views)}
                about["recorded_size"] = list(model.recorded_size)
                about["contract"] = model.contract.to_dict()
                files.write_policy(Path(self.trainer.run_dir) / RESULT, model.net, about)
            elif (whole := network.network_of(model.net)) is not None:
                network.merged_state(whole)
