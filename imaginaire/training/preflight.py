# SPDX-License-Identifier: Apache-2.0
"""Check a composed configuration before anything heavy is built: weights, data, number of processes.

Every class that ``model`` or a loader names may have a class method ``check`` (`imaginaire.findings`); a model also has
``checkpoint_switches`` (`ImaginaireModel`). Training on one kind of data and validating on another, by the facts of the
data sets (`imaginaire.data.facts`), is a warning.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from imaginaire import distributed, storage
from imaginaire.buildable import arguments_of, target_of
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.checkpointer import check_type
from imaginaire.checkpoint.weight_files import POINTER
from imaginaire.config import lazy_config, registry
from imaginaire.config import nodes as config_nodes
from imaginaire.config.schema import Config
from imaginaire.data.facts import facts_of, gives_facts
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.findings import CheckContext, Finding, error, is_checked, refusals, warning
from imaginaire.training import run_folder
from imaginaire.training.model import ImaginaireModel

log = logging.getLogger(__name__)


_SECTIONS = ("model", "dataloader_train", "dataloader_val")
_CONTEXT_KEY = "model_parallel.context_parallel_size"


def check_launch(config: Config) -> None:
    """Raise one error that lists every error found, and log the warnings; called on every rank before the build."""
    if config.dataloader_train is None:
        raise ConfigError(
            "dataloader_train is not set: there is nothing to train on. Choose an experiment (experiment=NAME; --list"
            f" prints all) or set dataloader_train. Registered experiments:{registry.table()}"
        )
    for key in ("model", "optimizer", "scheduler"):
        if getattr(config, key) is None:
            raise ConfigError(f"{key} is not set. Choose an experiment that has one, or a group entry ({key}=NAME).")
    for key in (*_SECTIONS, "optimizer", "scheduler"):
        node = getattr(config, key)
        if node is not None and not isinstance(node, DictConfig):
            name = type(node).__name__
            raise ConfigError(f"{key} is a {name} that exists already. Name it, so that it is built: L({name})(...).")
    _check_model_class(target_of(config.model, "model"))
    run_folder.check_writable(config.job.path_local)
    found = findings(config, distributed.world_size())
    if not any(one.key == _CONTEXT_KEY for one in found):  # else the model names the sizes that also suit itself
        parallel.check_context_parallel_size(config.model_parallel.context_parallel_size, distributed.world_size())
    for one in found:
        if one.level != "error":
            log.log(logging.WARNING if one.level == "warning" else logging.INFO, "%s", one)
    if wrong := [one for one in found if one.level == "error"]:
        kind = DataError if all(one.key.startswith("dataloader") for one in wrong) else ConfigError
        raise kind("\n".join(["The run cannot start:", *(f"  - {one}" for one in wrong[:20])]))


def _check_model_class(target: Any) -> None:
    if not isinstance(target, type):
        return  # a function that builds one; the trainer looks at what it gives
    name = target.__name__
    if not issubclass(target, ImaginaireModel):
        raise ConfigError(f"model: {name} is no imaginaire.training.model.ImaginaireModel. Derive it from that class.")
    if target.training_step is ImaginaireModel.training_step:
        raise ConfigError(f"model: {name} does not define training_step(batch, iteration) -> (metrics, loss).")


def check_built(config: Config, model: Any, dataloader_train: Any, dataloader_val: Any) -> None:
    """Raise when what the configuration built is not what a trainer takes."""
    if not isinstance(model, ImaginaireModel):
        raise ConfigError(f"model builds a {type(model).__name__}, not an imaginaire.training.model.ImaginaireModel.")
    if dataloader_train is None:
        raise ConfigError("dataloader_train is not set: there is nothing to train on.")
    for key, loader in (("dataloader_train", dataloader_train), ("dataloader_val", dataloader_val)):
        if isinstance(loader, Dataset):
            kind = type(loader).__name__
            raise ConfigError(
                f"{key} builds the data set {kind}, not a loader. Wrap it: "
                f"L(ResumableLoader)(dataset=L({kind})(...), batch_size=...)."
            )
    if config.trainer.run_validation and dataloader_val is None:
        raise ConfigError(
            "trainer.run_validation=True, but dataloader_val is not set. Set it, or run_validation=False."
        )


def check_precision(model: ImaginaireModel, *, has_scaler: bool) -> None:
    """Raise for float16 that cannot train."""
    if model.precision == torch.float16 and not has_scaler:
        raise ConfigError(
            "The model trains in float16, where small gradients vanish without a gradient scaler. Set "
            "trainer.grad_scaler_args.enabled=True, or use bfloat16."
        )
    if any(p.dtype == torch.float16 for p in model.parameters() if p.requires_grad):
        raise ConfigError(
            f"{type(model).__name__} holds float16 weights, whose gradients cannot be unscaled. Keep them in "
            "model.weight_dtype (float32): the trainer computes in float16 by autocast."
        )


def notes(config: Config) -> list[str]:
    """The findings as sentences to print, for a dry run: nothing is refused."""
    size = config.model_parallel.context_parallel_size
    found = [f"needs a multiple of {size} processes (model_parallel.context_parallel_size)"] if size > 1 else []
    if config.dataloader_train is None:
        found.append("dataloader_train is not set: this composes, but cannot train")
    found += [f"{key}: {fault}" for key, fault in config_nodes.faults(config)]
    try:
        found += map(str, findings(config))
    except UserError as error:
        found.append(str(error))
    return found


def findings(config: Config, world_size: int | None = None) -> list[Finding]:
    """Everything that the checks report, each once; ``world_size`` None: it is not known yet."""
    sections = [name for name in _SECTIONS if name != "dataloader_val" or config.trainer.run_validation]
    nodes = {name: dict(config_nodes.nodes(getattr(config, name), name)) for name in sections}
    context = CheckContext(
        config=config,
        world_size=world_size,
        start_path=_start_path(config),
        resume_path=_resume_path(config),
        training=_calls(nodes["dataloader_train"]),
        validation=_calls(nodes.get("dataloader_val", {})),
    )
    return list(dict.fromkeys(_findings(config, context, nodes)))


def _findings(config: Config, context: CheckContext, nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for section in nodes.values():
        for key, node in section.items():
            target = target_of(node, key)
            if is_checked(target):
                is_held = key != "model" and isinstance(target, type) and issubclass(target, ImaginaireModel)
                for one in target.check(arguments_of(node), replace(context, key=key)):
                    # A model reports keys as the run's own; one that another model holds has its place there.
                    yield replace(one, key=re.sub(r"^model\b", key, one.key)) if is_held else one
    if config.trainer.run_validation:
        yield from _kind_of_validation(config)
    yield from refusals("scheduler", lambda: lazy_config.instantiate(config.scheduler))  # needs no model
    yield from refusals("checkpoint.type", lambda: check_type(config.checkpoint))
    if _is_missing(config.checkpoint.load_path) and not _resumes(config):
        yield error("checkpoint.load_path", f"{config.checkpoint.load_path} does not exist")
    yield from _switch_problems(config, context.resume_path)


def _resumes(config: Config) -> bool:
    return storage.exists(storage.join(config.job.path_local, "checkpoints", POINTER))


def _is_missing(load_path: str) -> bool:
    is_local = load_path.startswith((".", "/")) or load_path.endswith((".pt", ".safetensors"))
    return is_local and not storage.exists(load_path)


def _start_path(config: Config) -> str | None:
    """See `CheckContext.start_path`; None also where the path does not exist, which has a finding of its own."""
    path = config.checkpoint.load_path
    if _resumes(config) or "model" in config.checkpoint.keys_not_to_resume or _is_missing(path):
        return None
    return path


def _resume_path(config: Config) -> str:
    checkpoint = config.checkpoint
    exceptions = checkpoint.allow_missing or checkpoint.allow_unexpected  # whoever lists some decides by hand
    if exceptions or not checkpoint.strict_resume or "model" in checkpoint.keys_not_to_resume:
        return ""
    sets = checkpoint_layout.all_sets(storage.join(config.job.path_local, "checkpoints"))
    return next((saved.path("model") for saved in sets if saved.has("model")), "")


def _calls(nodes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: {**arguments_of(node), "_target_": node.get("_target_")} for key, node in nodes.items()}


def data_sets(section: Any) -> list[dict[str, Any]]:
    """The arguments of every lazy node of a loader's section, each with its class as ``_target_``."""
    return [call for call in _calls(dict(config_nodes.nodes(section))).values() if call["_target_"] is not None]


def _kind_of_validation(config: Config) -> Iterator[Finding]:
    """Validation on data of another kind than those of training, as where only the latter were chosen."""
    trained, validated = _kinds(config.dataloader_train), _kinds(config.dataloader_val)
    is_known = any(gives_facts(cls) for cls in (*trained.values(), *validated.values()))
    if not trained or not validated or trained.keys() & validated.keys() or not is_known:
        return
    yield warning(
        "dataloader_val",
        f"validation is on {_listed(validated)}, but training on {_listed(trained)}: the validation loss will say"
        " little about this training. Choose dataloader_val=NAME like dataloader_train, with the same overrides of"
        " dataset, or trainer.run_validation=False",
    )


def _kinds(section: Any) -> dict[str, type]:
    """The kinds of data sets in a loader's section, each with its class."""
    nodes = [(target_of(node), node) for node in data_sets(section)]
    return {facts_of(node).kind: cls for cls, node in nodes if isinstance(cls, type) and issubclass(cls, Dataset)}


def _listed(kinds: dict[str, type]) -> str:
    return ", ".join(f"{kind} ({cls.__name__})" if kind != cls.__name__ else kind for kind, cls in kinds.items())


def _switch_problems(config: Config, path: str) -> Iterator[Finding]:
    """Switches of the model that differ from those of the checkpoint that the run would resume."""
    target = target_of(config.model, "model")
    if not path or not (isinstance(target, type) and issubclass(target, ImaginaireModel)):
        return  # nothing to resume, or a function that builds the model
    for key, before in target.checkpoint_switches(path).items():
        now = OmegaConf.select(config.model, key)
        if now != before:
            yield error(
                f"model.{key}",
                f"{now}, but {path} of this run was saved with {before}",
                f"Give the new run a folder of its own (job.name={config.job.name}_2, say), or go on with"
                f" model.{key}={before}",
            )
