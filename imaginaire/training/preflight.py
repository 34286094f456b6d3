# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before anything heavy is built: weights, data, disk, number of processes.

A class that a config names may offer a class method ``preflight(**arguments)`` that yields problems as sentences, and
a model class ``checkpoint_bytes(**arguments)``, the size of one of its checkpoints. Both get the arguments of the lazy
call as they stand in the config, and must be quick. A model class may also offer ``preflight_data(data, **arguments)``,
problems of a data set with it: ``data`` are the arguments of a class that one of the loaders names, with its
``_target_``;
``preflight_validation_data(data, training, **arguments)``, the same for a data set of ``dataloader_val``, with a list
of those of ``dataloader_train``;
``preflight_parallel(world_size, context_parallel_size, shards, **arguments)``, pairs of a config key and a sentence,
with a world size of None where it is not known yet;
``preflight_start(load_path, data, **arguments)``, such pairs for the weights that a new run starts from with these
data sets, a list of such ``data`` (``load_path`` is ``checkpoint.load_path``, or empty);
``preflight_resume(path, data, **arguments)``, such pairs for its run's newest checkpoint, which is about to be
continued; and
``checkpoint_switches(path)``: the values, by key of the class's own arguments, that the run had which wrote the
weights at a path; a run folder is not continued with others.

A class of data sets may have a ``data_kind``, a word for what it gives: training on one kind and validating on another
is a `Note`.

A problem that is a `Note` refuses nothing: it is said once, as a warning, before anything is built.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.utils.data import Dataset

from imaginaire import distributed, storage
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.checkpointer import DummyCheckpointer
from imaginaire.checkpoint.weight_files import POINTER
from imaginaire.config import checks as config_checks
from imaginaire.config import lazy_config, lint, registry
from imaginaire.config.compose import experiment_names_registered
from imaginaire.config.names import locate, target_of
from imaginaire.config.schema import Config
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.training import run_folder
from imaginaire.training.model import ImaginaireModel, Note

log = logging.getLogger(__name__)


_SECTIONS = ("model", "dataloader_train", "dataloader_val")


def check_launch(config: Config) -> None:
    """Raise one error that lists everything found wrong; called on every rank before models and data are built."""
    if config.dataloader_train is None:
        names = ", ".join(experiment_names_registered()) or "none"
        raise ConfigError(
            "dataloader_train is not set: there is nothing to train on. Choose an experiment (experiment=NAME) or set "
            f"dataloader_train. Registered experiments: {names}."
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
    found = parallel_problems(config, distributed.world_size())
    if not found:  # else the model has said what it can be divided by, which is less than the processes alone allow
        parallel.check_context_parallel_size(config.model_parallel.context_parallel_size, distributed.world_size())
    told = [*problems(config)]
    for text in dict.fromkeys(f"{key}: {text}" for key, text in told if isinstance(text, Note)):
        log.warning("%s", text)
    found += [(key, problem) for key, problem in told if not isinstance(problem, Note)]
    if found:
        listed = "\n".join(f"  - {key}: {problem}" for key, problem in found[:20])
        kind = DataError if all(key.startswith("dataloader") for key, _ in found) else ConfigError
        raise kind(f"The run cannot start:\n{listed}")


def _check_model_class(target: Any) -> None:
    if not isinstance(target, type):
        return  # a function that builds one; the trainer looks at what it gives
    name = target.__name__
    if not issubclass(target, ImaginaireModel):
        raise ConfigError(
            f"model: {name} is not an imaginaire.training.model.ImaginaireModel. Derive it from that class."
        )
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
            "trainer.run_validation=True, but dataloader_val is not set. Set dataloader_val, or run_validation=False."
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
    """The same as sentences to print, for a dry run: nothing is refused."""
    size = config.model_parallel.context_parallel_size
    found = [f"needs a multiple of {size} processes (model_parallel.context_parallel_size)"] if size > 1 else []
    if config.dataloader_train is None:
        found.append("dataloader_train is not set: this composes, but cannot train")
    found += [f"{key}: {remark}" for key, remark in (*lint.faults(config), *lint.remarks(config))]
    try:
        found += [f"{key}: {problem}" for key, problem in (*parallel_problems(config), *problems(config))]
    except UserError as error:
        found.append(str(error))
    return found


def parallel_problems(config: Config, world_size: int | None = None) -> list[tuple[str, str]]:
    """(config key, sentence) of degrees of parallelism that the model cannot be divided by."""
    of_model = getattr(target_of(config.model, "model"), "preflight_parallel", None)
    if not callable(of_model):
        return []
    shards = config.trainer.distributed_parallelism != "ddp"
    return list(of_model(world_size, config.model_parallel.context_parallel_size, shards, **_arguments(config.model)))


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """(config key, sentence) of everything that is wrong."""
    target = None if config.model is None else target_of(config.model, "model")
    arguments = {} if config.model is None else _arguments(config.model)
    datasets: list[dict[str, Any]] = []
    for section in _SECTIONS:
        of_model, known = getattr(target, "preflight_data", None), arguments
        if section == "dataloader_val":
            if not config.trainer.run_validation:
                continue  # it is not built
            if callable(of_val := getattr(target, "preflight_validation_data", None)):
                of_model, known = of_val, {**arguments, "training": [*datasets]}
            yield from _other_kind(config)
        for key, node in config_checks.nodes(getattr(config, section), section):
            if callable(preflight := getattr(target_of(node, key), "preflight", None)):
                for problem in preflight(**_arguments(node)):
                    yield _by_key(key, problem)
            if section != "model":
                datasets.append({**_arguments(node), "_target_": node.get("_target_")})
                for problem in of_model(datasets[-1], **known) if callable(of_model) else ():
                    yield key, problem if isinstance(problem, Note) else str(problem)
    yield from _scheduler_problems(config)
    load_path = config.checkpoint.load_path
    own = storage.join(config.job.path_local, "checkpoints", POINTER)
    is_local = load_path.startswith((".", "/")) or load_path.endswith((".pt", ".safetensors"))
    if is_local and not storage.exists(load_path) and not storage.exists(own):
        yield "checkpoint.load_path", f"{load_path} does not exist"
    elif not storage.exists(own) and "model" not in config.checkpoint.keys_not_to_resume:
        of_start = getattr(target_of(config.model, "model"), "preflight_start", None)
        if callable(of_start):
            yield from of_start(load_path, datasets, **_arguments(config.model))
    yield from _resume_problems(config, datasets)
    yield from _disk_problems(config)


def data_sets(section: Any) -> list[dict[str, Any]]:
    """The arguments of every lazy node of a loader's section, each with its class as ``_target_``."""
    found = (node for _, node in config_checks.nodes(section) if node.get("_target_") is not None)
    return [{**_arguments(node), "_target_": node["_target_"]} for node in found]


def _other_kind(config: Config) -> Iterator[tuple[str, str]]:
    """Validation on data of another kind than those of training, as where only the latter were chosen."""
    trained, validated = _kinds(config.dataloader_train), _kinds(config.dataloader_val)
    is_known = any(hasattr(cls, "data_kind") for cls in (*trained.values(), *validated.values()))
    if not trained or not validated or trained.keys() & validated.keys() or not is_known:
        return
    fitting: dict[str, int] = {}
    for name in registry.entries("dataloader_val"):
        with suppress(UserError, OmegaConfBaseException):  # this run does not use it
            entry = registry.node_of("dataloader_val", name)
            if (kinds := _kinds(entry)).keys() == trained.keys():
                is_open = "???" in _texts(entry)  # of a user's own data
                is_same_place = bool(_folders(entry) & _folders(config.dataloader_train))
                fitting[name] = 3 * is_same_place + 2 * (is_open and kinds == trained) + is_open
    nearest = [name for name in fitting if fitting[name] == max(fitting.values())]
    choices = " or ".join(f"dataloader_val={name}" for name in nearest[:4]) or "dataloader_val"
    yield (
        "dataloader_val",
        Note(
            f"validation is on {_listed(validated)}, but training on {_listed(trained)}: the validation loss will say"
            f" little about this training. Choose data like those of training ({choices}, with the same overrides of"
            " dataset), or trainer.run_validation=False"
        ),
    )


def _kinds(section: Any) -> dict[str, type]:
    """The kinds of data sets in a loader's section, each with its class; that of a class without one is its name."""
    targets = (target_of(node, key) for key, node in config_checks.nodes(section))
    classes = [cls for cls in targets if isinstance(cls, type) and issubclass(cls, Dataset)]
    return {str(getattr(cls, "data_kind", cls.__name__)): cls for cls in classes}


def _texts(section: Any) -> list[str]:
    """The strings among the arguments of a section's lazy nodes, as they stand there."""
    nodes = [OmegaConf.to_container(node, resolve=False) for _, node in config_checks.nodes(section)]
    return [value for node in nodes if isinstance(node, dict) for value in node.values() if isinstance(value, str)]


def _folders(section: Any) -> set[str]:
    """The data sets' folders, each by the two uppermost."""
    return {"/".join(text.split("/")[:2]) for text in _texts(section) if "/" in text and "$" not in text}


def _listed(kinds: dict[str, type]) -> str:
    return ", ".join(f"{kind} ({cls.__name__})" if kind != cls.__name__ else kind for kind, cls in kinds.items())


def _scheduler_problems(config: Config) -> Iterator[tuple[str, str]]:
    """A schedule takes no model: it is made to see whether it can be."""
    try:
        lazy_config.instantiate(config.scheduler)
    except UserError as error:
        yield "scheduler", str(error).rstrip(".")


def _by_key(key: str, problem: Any) -> tuple[str, str]:
    """A problem with the key of its node, or with the one below it that it names itself, more precisely."""
    text = problem if isinstance(problem, Note) else str(problem)
    if text.startswith(f"{key}."):
        named, _, rest = text.partition(": ")
        return named, Note(rest) if isinstance(text, Note) else rest
    return key, text


def _resume_problems(config: Config, datasets: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Why the run's newest checkpoint, which is about to be continued, is of another run: its data, or switches of the
    model."""
    checkpoint = config.checkpoint
    target = target_of(config.model, "model")
    exceptions = checkpoint.allow_missing or checkpoint.allow_unexpected  # whoever lists some decides by hand
    if exceptions or not checkpoint.strict_resume or "model" in checkpoint.keys_not_to_resume:
        return
    sets = checkpoint_layout.all_sets(storage.join(config.job.path_local, "checkpoints"))
    newest = next((saved for saved in sets if saved.has("model")), None)
    if newest is None:
        return
    own_folder = f"job.name={config.job.name}_2, say"
    if callable(of_resume := getattr(target, "preflight_resume", None)):
        found = [*of_resume(newest.path("model"), datasets, **_arguments(config.model))]
        if found:  # no switch would mend that
            yield from ((key, f"{problem} ({own_folder})") for key, problem in found)
            return
    if not callable(switches := getattr(target, "checkpoint_switches", None)):
        return
    for key, before in switches(newest.path("model")).items():
        now = OmegaConf.select(config.model, key)
        if now != before:
            yield (
                f"model.{key}",
                f"{now}, but {newest.path('model')} of this run was saved with {before}. Give the new run a folder of"
                f" its own ({own_folder}), or go on with model.{key}={before}",
            )


def _disk_problems(config: Config) -> Iterator[tuple[str, str]]:
    run_dir = config.job.path_local
    if _saves_nothing(config.checkpoint.type):
        return
    free = storage.free_bytes(run_dir)
    if free is None:
        return
    target = target_of(config.model, "model")
    if callable(size := getattr(target, "checkpoint_bytes", None)):
        needed = int(size(**_arguments(config.model)))
    else:
        sets = checkpoint_layout.all_sets(storage.join(run_dir, "checkpoints"))
        needed = max((s.bytes() for s in sets[:2]), default=0)
    if needed > free:
        yield (
            "checkpoint",
            f"the next checkpoint needs {needed / 1e9:.3g} GB, but {run_dir} has {free / 1e9:.3g} GB free. Free "
            "space, or set IMAGINAIRE_OUTPUT_ROOT to another disk or s3://",
        )


def _saves_nothing(node: Any) -> bool:
    """Whether this ``checkpoint.type``, a class, its name or a lazy call, writes no checkpoints."""
    found = locate(node, "checkpoint.type") if isinstance(node, str) else node
    kind = found if isinstance(found, type) else target_of(found, "checkpoint.type")
    return isinstance(kind, type) and issubclass(kind, DummyCheckpointer)


def _arguments(node: Any) -> dict[str, Any]:
    return {str(name): node[name] for name in node if not str(name).startswith("_")}
