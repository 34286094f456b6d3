# SPDX-License-Identifier: Apache-2.0
"""The typed sections of a configuration: every field, its default, and the values that it may take.

A run is described by one :class:`Config`. Its lazy members (model, optimizer, scheduler, loaders, callbacks) are nodes
made by ``LazyCall``; everything else is one of the attrs classes below. After composition the whole is frozen. A field
that exists for compatibility only has ``no_effect`` in its metadata: composing rejects any value but its default.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf

from imaginaire.errors import ConfigError

T = TypeVar("T", bound=type)
Value = TypeVar("Value")
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

LAZY_MEMBERS = ("model", "optimizer", "scheduler", "dataloader_train", "dataloader_val")  # of Config
NEVER = 999_999_999  # "at no iteration", the customary value of this family of configs


# --- what a value may be --------------------------------------------------------------------------------------------


def is_text_to_come(value: Any) -> bool:
    """True for an interpolation or a missing mark: the value is checked once it is known."""
    return isinstance(value, str) and ("${" in value or value == "???")


def at_least(minimum: float, at_most: float = math.inf) -> Validator:
    """A validator: None where the field allows it, else a finite number of at least ``minimum``."""
    limit = "" if at_most == math.inf else f" and at most {at_most}"
    return _number(f"a number of at least {minimum}{limit}", lambda value: minimum <= value <= at_most)


def above(bound: float) -> Validator:
    """A validator: None where the field allows it, else a finite number above ``bound``."""
    return _number(f"a number above {bound}", lambda value: value > bound)


def _number(expected: str, is_allowed: Callable[[float], bool]) -> Validator:
    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is None or is_text_to_come(value):
            return
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) < math.inf or not is_allowed(value):
            raise ConfigError(f"{attribute.name}={value!r}, but it must be {expected}.")

    return check


def one_of(*choices: str | None) -> Validator:
    """A validator: one of these names."""

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value not in choices and not is_text_to_come(value):
            known = ", ".join("null" if choice is None else choice for choice in choices)
            raise ConfigError(f"{attribute.name}={value!r}, but it must be one of: {known}.")

    return check


def no_effect(reason: str) -> dict[str, str]:
    """Metadata of a field that is accepted at its default only; the reason names what to use in its place."""
    return {"no_effect": reason}


# --- freezing -------------------------------------------------------------------------------------------------------


def freeze(value: Value, key: str = "") -> Value:
    """The same value with its sections and nodes read-only; ``key`` is its place in the configuration."""
    if isinstance(value, (DictConfig, ListConfig)):
        OmegaConf.set_readonly(value, True)
    elif attrs.has(type(value)):
        for name, item in vars(value).items():
            freeze(item, f"{key}.{name}" if key else name)
        vars(value)["_frozen_as"] = key
        cls: Any = type(value)
        _guard(cls)
    return value


@functools.cache
def _guard(cls: Any) -> None:
    """Let frozen instances of a class refuse assignment; attrs.evolve gives an open copy."""
    assign, delete = cls.__setattr__, cls.__delattr__

    def refuse(self: Any, name: str, *value: Any) -> None:
        if "_frozen_as" in vars(self):
            key = f"{self._frozen_as}.{name}" if self._frozen_as else name
            raise AttributeError(f"The configuration is frozen. Set it before it is composed: {key}=VALUE.")
        (assign if value else delete)(self, name, *value)

    cls.__setattr__ = cls.__delattr__ = refuse


class Section:
    """Base of the sections: ``freeze()`` makes an instance and all below it read-only."""

    def freeze(self) -> None:
        freeze(self)


def make_freezable(cls: T) -> T:
    """Class decorator of published config files: what is derived from a section has ``freeze()`` already."""
    cls.freeze = Section.freeze  # type: ignore[attr-defined]
    return cls


# --- the sections ---------------------------------------------------------------------------------------------------


@attrs.define(kw_only=True, slots=False)
class JobConfig(Section):
    """The run's name, and so its folder: project/group/name."""

    project: str = ""
    group: str = ""
    name: str = ""
    wandb_mode: str | None = attrs.field(default=None, validator=one_of(None, "online", "offline", "disabled"))

    @property
    def path(self) -> str:
        return f"{self.project}/{self.group}/{self.name}"

    @property
    def path_local(self) -> str:
        """The run folder: ``path`` below $IMAGINAIRE_OUTPUT_ROOT (default "checkpoints"), which may be s3://..."""
        root = os.environ.get("IMAGINAIRE_OUTPUT_ROOT") or "checkpoints"
        return f"{root.rstrip('/')}/{self.path}"


@attrs.define(kw_only=True, slots=False)
class DDPConfig(Section):
    find_unused_parameters: bool = False
    static_graph: bool = True
    broadcast_buffers: bool = True


@attrs.define(kw_only=True, slots=False)
class CuDNNConfig(Section):
    deterministic: bool = False
    benchmark: bool = True


@attrs.define(kw_only=True, slots=False)
class Profiling(Section):
    """Traces and memory snapshots of some ranks, every ``profile_freq`` iterations."""

    enable_profiling: bool = False
    enable_memory_snapshot: bool = False
    profile_freq: int = attrs.field(default=1, validator=at_least(1))
    first_n_rank: int = attrs.field(default=8, validator=at_least(-1))  # -1: every rank
    target_ranks: list[int] | None = None  # given: these ranks in place of the first n
    record_shape: bool = True
    profile_memory: bool = True
    with_stack: bool = True
    with_modules: bool = True
    save_s3: bool = attrs.field(
        default=False, metadata=no_effect("traces are written to the run folder; set IMAGINAIRE_OUTPUT_ROOT=s3://...")
    )

    def __attrs_post_init__(self) -> None:
        if self.enable_profiling and isinstance(self.profile_freq, int) and self.profile_freq < 4:
            raise ConfigError(
                f"profile_freq={self.profile_freq}, but with enable_profiling it must be at least 4"
                " (three iterations of warm-up, one that is recorded)."
            )


_NO_CHECK = no_effect("slow ranks show in the iter_speed and device_monitor callbacks")


@attrs.define(kw_only=True, slots=False)
class StragglerDetectionConfig(Section):
    enabled: bool = False
    report_freq: int = 100
    profile_freq: int = 1
    max_diff: float = 2.0
    raise_error: bool = True
    analyze_forward: bool = True
    analyze_backward: bool = True
    analyze_optimizer: bool = True
    analyze_dataloading: bool = True


@attrs.define(kw_only=True, slots=False)
class TrainerConfig(Section):
    # A class, its dotted name, or a lazy node.
    type: Any = "imaginaire.training.trainer.ImaginaireTrainer"
    callbacks: Any = None
    distributed_parallelism: str = attrs.field(default="ddp", validator=one_of("ddp", "fsdp"))  # ddp: replicate only
    ddp: DDPConfig = attrs.field(factory=DDPConfig)
    cudnn: CuDNNConfig = attrs.field(factory=CuDNNConfig)
    seed: int = attrs.field(default=0, validator=at_least(0, at_most=2**63 - 1))
    grad_scaler_args: dict[str, Any] = attrs.field(factory=lambda: {"enabled": False})
    max_iter: int = attrs.field(default=NEVER, validator=at_least(0))
    max_val_iter: int | None = attrs.field(default=None, validator=at_least(1))
    logging_iter: int = attrs.field(default=100, validator=at_least(1))
    run_validation: bool = True
    validate_at_start: bool = True  # before the first iteration, too
    validation_iter: int = attrs.field(default=NEVER, validator=at_least(1))
    # Seconds for one step, then stacks and exit; four times as many, two hours at least, for what takes long (a start,
    # the first step, a save). 999999999: no limit.
    timeout_period: int = attrs.field(default=1800, validator=at_least(1))
    memory_format: str = attrs.field(
        default="preserve_format",
        validator=one_of("preserve_format", "contiguous_format", "channels_last", "channels_last_3d"),
    )
    grad_accum_iter: int = attrs.field(default=1, validator=at_least(1))
    profiling: Profiling = attrs.field(factory=Profiling)
    straggler_detection: StragglerDetectionConfig = attrs.field(factory=StragglerDetectionConfig, metadata=_NO_CHECK)
    # what a non-finite loss or norm does
    non_finite: str = attrs.field(default="stop", validator=one_of("stop", "skip"))
    max_non_finite: int = attrs.field(default=10, validator=at_least(1))  # skips in a row before the run stops


@attrs.define(kw_only=True, slots=False)
class JITConfig(Section):
    enabled: bool = False
    input_shape: list[int] | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    strict: bool = True


@attrs.define(kw_only=True, slots=False)
class ObjectStoreConfig(Section):
    enabled: bool = False
    credentials: str = ""
    bucket: str = ""


_STORE_BY_PATH = no_effect(
    "checkpoints go where the run folder is: set IMAGINAIRE_OUTPUT_ROOT=s3://bucket/prefix, or load_path=s3://...;"
    " credentials come from the environment"
)


@attrs.define(kw_only=True, slots=False)
class CheckpointConfig(Section):
    type: Any = None  # a checkpointer class or lazy node; the group ckpt_type fills it
    dcp_async_mode_enabled: bool = False
    save_iter: int = attrs.field(default=NEVER, validator=at_least(1))
    load_path: str = ""
    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    strict_resume: bool = True
    jit: JITConfig = attrs.field(factory=JITConfig, metadata=no_effect("checkpoints hold weights, not traced programs"))
    verbose: bool = True
    keys_not_to_resume: list[str] = attrs.field(factory=list)
    broadcast_via_filesystem: bool = attrs.field(default=False, metadata=no_effect("each rank reads its own files"))
    load_ema_to_reg: bool = False
    dcp_allow_mismatched_size: bool = False
    save_to_object_store: ObjectStoreConfig = attrs.field(factory=ObjectStoreConfig, metadata=_STORE_BY_PATH)
    load_from_object_store: ObjectStoreConfig = attrs.field(factory=ObjectStoreConfig, metadata=_STORE_BY_PATH)
    keep_last: int | None = attrs.field(default=None, validator=at_least(1))  # None: every set of weights stays
    keep_every: int | None = attrs.field(default=None, validator=at_least(1))  # multiples of this iteration always stay
    allow_missing: list[str] = attrs.field(factory=list)  # patterns of names that the file may lack
    allow_unexpected: list[str] = attrs.field(factory=list)  # patterns of names that only the file has
    fallback: bool = False  # resume from the newest complete set when the latest is damaged

    def __attrs_post_init__(self) -> None:
        if self.load_training_state is True and self.only_load_scheduler_state is True:
            raise ConfigError("load_training_state and only_load_scheduler_state exclude each other. Choose one.")
        for key in ("load_training_state", "only_load_scheduler_state", "load_ema_to_reg"):
            if getattr(self, key) is True and self.load_path == "":
                raise ConfigError(f"{key}=True applies to load_path, which is empty. Set load_path, too.")


_ONLY_CP = no_effect("the models split over context_parallel_size and over fsdp_shard_size only")


@attrs.define(kw_only=True, slots=False)
class ModelParallelConfig(Section):
    context_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    tensor_model_parallel_size: int = attrs.field(default=1, metadata=_ONLY_CP)
    pipeline_model_parallel_size: int = attrs.field(default=1, metadata=_ONLY_CP)
    sequence_parallel: bool = attrs.field(default=False, metadata=_ONLY_CP)


@attrs.define(kw_only=True, slots=False)
class EMAConfig(Section):
    enabled: bool = False
    beta: float = 0.9999
    torch_compile_buffer_renaming: bool = False


@attrs.define(kw_only=True, slots=False)
class PowerEMAConfig(Section):
    enabled: bool = False
    s: float = 0.1
    torch_compile_buffer_renaming: bool = False


@attrs.define(kw_only=True, slots=False)
class NVTXConfig(Section):
    enabled: bool = attrs.field(default=False, metadata=no_effect("use trainer.profiling"))
    cuda_synchronize: bool = attrs.field(default=False, metadata=no_effect("use trainer.profiling"))


@attrs.define(kw_only=True, slots=False)
class Config(Section):
    """One run. Lazy members are DictConfig nodes; ``defaults`` is Hydra's list of groups and empty once composed."""

    defaults: list[Any] = attrs.field(factory=lambda: ["_self_"])
    job: JobConfig = attrs.field(factory=JobConfig)
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    dataloader_train: Any = None
    dataloader_val: Any = None
    trainer: TrainerConfig = attrs.field(factory=TrainerConfig)
    model_parallel: ModelParallelConfig = attrs.field(factory=ModelParallelConfig)
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    upload_reproducible_setup: bool = attrs.field(
        default=False, metadata=no_effect("config.yaml, environment, commit and command are saved with every run")
    )
