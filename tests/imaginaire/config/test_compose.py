# SPDX-License-Identifier: Apache-2.0
"""Composition: groups, experiments, overrides; and every mistake that a user can make, as one message."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from imaginaire.config import files as config_files
from imaginaire.config import lazy_yaml, registry
from imaginaire.config.compose import compose, experiment_names, register_experiment, split_arguments, with_job_name
from imaginaire.config.lazy_config import instantiate, load_yaml, save_yaml, to_yaml
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError
from tests.programs import python

PARTS = """
import attrs
from typing import Any


class Net:
    def __init__(self, width: int = 8, depth: int = 2):
        self.width, self.depth = width, depth


@attrs.define(kw_only=True, slots=False)
class NetConfig:
    channels: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    name: str = "net"


@attrs.define(kw_only=True, slots=False)
class ModelConfig:
    rank: int = attrs.field(default=16)
    targets: str = "q,k"
    net: NetConfig = attrs.field(factory=NetConfig)
    part: Any = None
    extra: "NetConfig | None" = None

    def __attrs_post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be positive")


class Model:
    def __init__(self, config: Any):
        self.config = config


class OldModel:
    def __init__(self, width: int = 3, context_parallel_size: int = 1):
        self.width = width


class Loader:
    def __init__(self, dataset: Any = None, batch_size: int = 1, shuffle: bool = True):
        self.dataset, self.batch_size = dataset, batch_size


class Data:
    def __init__(self, root: str = "here", num_frames: int = 93):
        self.root, self.num_frames = root, num_frames


def optimizer(model, lr: float = 1e-4, betas=(0.9, 0.99), fused: "int | None" = None):
    return lr


class Derived(Net):
    def __init__(self, height: int = 1, **options):
        super().__init__(**options)
        self.height = height


def loose(model=None, **options):
    return options
"""

CONFIG = """
from typing import Any
import attrs
from hydra.core.config_store import ConfigStore
from imaginaire.compose import register_experiment
from imaginaire.config import Config, JobConfig, TrainerConfig
from imaginaire.lazy_config import PLACEHOLDER, LazyCall as L
from parts import Data, Derived, Loader, Model, ModelConfig, Net, OldModel, loose, optimizer


def make_config():
    cs = ConfigStore.instance()
    for name, frames in (("mock", 5), ("gr1", 93)):
        for group in ("dataloader_train", "dataloader_val"):
            loader = L(Loader)(dataset=L(Data)(root=name, num_frames=frames))
            cs.store(group=group, package=group, name=name, node=loader)
    cs.store(group="optimizer", package="optimizer", name="adamw", node=L(optimizer)(model=PLACEHOLDER))
    cs.store(group="optimizer", package="optimizer", name="loose", node=L(loose)(lr=1.0))
    cs.store(group="dataloader_train", package="dataloader_train", name="derived", node=L(Derived)())
    speed = L(Net)(width="${trainer.logging_iter}")
    cs.store(group="callbacks", package="trainer.callbacks", name="basic", node=dict(speed=speed))
    cs.store(group="callbacks", package="trainer.callbacks", name="long", node=dict(beat=L(Net)()))
    cs.store(group="model", package="_global_", name="small",
             node=dict(trainer=dict(distributed_parallelism="fsdp"),
                       model=L(Model)(config=ModelConfig(part=L(Net)()), _recursive_=False)))
    register_experiment("base_exp", dict(
        defaults=[{"override /model": "small"}, {"override /data_val": "mock"},
                  {"override /dataloader_train": "gr1"}, "_self_"],
        job=dict(name="base_exp"), optimizer=dict(lr=0.5), dataloader_train=dict(batch_size=4)))
    register_experiment("child_exp", dict(
        defaults=["/experiment/base_exp", {"override /dataloader_train": None}, "_self_"],
        job=dict(name="child"), dataloader_train=L(Loader)(batch_size=7)))
    register_experiment("inline_exp", dict(dataloader_train=L(Loader)(batch_size=9, dataset=L(Data)())))
    register_experiment("cleared_exp", dict(
        defaults=["/experiment/inline_exp", "/clear/dataloader_train", "_self_"], dataloader_train=L(Net)(depth=3)))
    register_experiment("parent_wins", dict(
        defaults=["_self_", "/experiment/base_exp"], job=dict(name="lost", group="kept")))
    register_experiment("missing_exp", dict(
        model=L(Model)(config="???"), dataloader_train=L(Loader)(dataset=dict(root="???"))))
    register_experiment("old_exp", dict(model=L(OldModel)(context_parallel_size=2)))
    register_experiment("older_exp", dict(model=dict(L(Net)(), context_parallel_size=2)))
    register_experiment("wrong_key_exp", dict(trainer=dict(max_itr=3)))
    register_experiment("wrong_type_exp", dict(trainer=dict(max_iter="abc")))
    register_experiment("wrong_argument_exp", dict(optimizer=dict(lrr=3)))
    register_experiment("wrong_group_exp", dict(defaults=[{"override /optimzer": "adamw"}, "_self_"]))
    register_experiment("wrong_entry_exp", dict(defaults=[{"override /optimizer": "adam"}, "_self_"]))
    register_experiment("wrong_parent_exp", dict(defaults=["/experiment/base_ex", "_self_"]))
    register_experiment("no_effect_exp", dict(checkpoint=dict(jit=dict(enabled=True))))
    cs.store(group="experiment", name="no_package_exp", node=dict(trainer=dict(max_iter=3)))
    register_experiment("class_exp", dict(trainer=dict(type=Net), optimizer=dict(lr="${add:1,2}")))
    return Config(
        defaults=["_self_", {"dataloader_train": None}, {"dataloader_val": None},
                  {"optimizer": "adamw"}, {"model": None},
                  {"callbacks": ["basic"]}, {"net": None}, {"ema": None}, {"experiment": None}],
        job=JobConfig(project="p", group="g", name="n_${now:%Y-%m-%d}"),
        trainer=TrainerConfig(max_iter=400, logging_iter=10),
    )
"""


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds an empty store and leaves the modules of the process as they were."""
    state = ConfigStore.instance().repo
    ConfigStore.instance().repo = {k: v for k, v in state.items() if k in ("hydra", "_dummy_empty_config_.yaml")}
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(config_files, "broken_modules", {})
    monkeypatch.setattr(registry, "broken_modules", config_files.broken_modules)
    monkeypatch.setattr(lazy_yaml, "_import_folders", [])
    path, modules = list(sys.path), set(sys.modules)
    yield
    ConfigStore.instance().repo = state
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.py").write_text(CONFIG)
    return str(tmp_path / "config.py")


def message(config_path: str, *overrides: str) -> str:
    """The one message of a composition that must fail: short, quick, and never Hydra's advice."""
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        compose(config_path, list(overrides))
    text = str(error.value)
    assert len(text.splitlines()) <= 30 and time.process_time() - start < 10
    for foreign in (
        "hydra.cc",
        "To append to your config",
        "full_key",
        "object_type",
        "multirun",
        "Config search path",
    ):
        assert foreign not in text
    return text


# --- what composes ---


def test_groups_experiment_and_overrides_in_their_order(config: str) -> None:
    made = compose(
        config, ["experiment=base_exp", "optimizer.lr=2", "trainer.max_iter=10", "+dataloader_train.shuffle=false"][:3]
    )
    assert made.job.path == "p/g/base_exp"
    assert made.trainer.distributed_parallelism == "fsdp"
    assert made.trainer.max_iter == 10 and made.optimizer.lr == 2
    assert made.dataloader_train.batch_size == 4 and made.dataloader_train.dataset.root == "gr1"
    assert made.dataloader_val.dataset.root == "mock"
    assert made.trainer.callbacks.speed.width == 10
    assert made.defaults == []
    model = instantiate(made.model)
    assert isinstance(model.config, DictConfig) and model.config.net.channels == 8


def test_without_an_experiment_the_base_composes(config: str) -> None:
    made = compose(config)
    assert made.model is None and made.dataloader_train is None
    assert made.job.name.startswith("n_20")


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["experiment=child_exp"], (7, "child")),
        (["experiment=base_exp", "dataloader_train=mock"], (4, "base_exp")),
        (["dataloader_train=mock", "experiment=base_exp"], (4, "base_exp")),
        (["experiment=parent_wins"], (4, "base_exp")),
    ],
)
def test_inheritance_follows_the_defaults_list(config: str, overrides: list[str], found: tuple[int, str]) -> None:
    made = compose(config, overrides)
    assert (made.dataloader_train.batch_size, made.job.name) == found


def test_a_child_clears_what_its_parent_gave(config: str) -> None:
    assert compose(config, ["experiment=child_exp"]).dataloader_train.dataset is None
    made = compose(config, ["experiment=cleared_exp"])
    assert set(made.dataloader_train) == {"_target_", "width", "depth"} and made.dataloader_train.depth == 3


@pytest.mark.parametrize("off", ["~dataloader_val", "dataloader_val=null", "~data_val", "data_val=null"])
def test_a_loader_is_removed_however_it_is_written(config: str, off: str) -> None:
    assert compose(config, ["experiment=base_exp", off]).dataloader_val is None
    inline = compose(config, ["experiment=inline_exp", off.replace("val", "train")])
    assert inline.dataloader_train is None


@pytest.mark.parametrize("name", ["data_train", "dataloader_train"])
def test_both_names_of_the_data_groups_work(config: str, name: str) -> None:
    made = compose(config, ["experiment=base_exp", f"{name}=mock", f"{name}.dataset.num_frames=17"])
    assert made.dataloader_train.dataset == {
        "_target_": made.dataloader_train.dataset._target_,
        "root": "mock",
        "num_frames": 17,
    }


def test_groups_can_be_cleared_and_chosen_in_number(config: str) -> None:
    assert set(compose(config, ["callbacks=[basic,long]"]).trainer.callbacks) == {"speed", "beat"}
    assert compose(config, ["callbacks=null"]).trainer.callbacks is None
    assert compose(config, ["~optimizer"]).optimizer is None
    assert compose(config, ["trainer.callbacks.speed=null"]).trainer.callbacks.speed is None
    assert "speed" not in compose(config, ["~trainer.callbacks.speed"]).trainer.callbacks
    assert compose(config, ["experiment=null"]).model is None


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("+trainer.grad_scaler_args.init_scale=8", "trainer.grad_scaler_args.init_scale", 8),
        ("+trainer.callbacks.mine={_target_: parts.Net, width: 3}", "trainer.callbacks.mine.width", 3),
        ("optimizer.betas=[0.5,0.6]", "optimizer.betas", [0.5, 0.6]),
        ("'job.name=x=y'", None, None),
        ('job.name="a,b=c"', "job.name", "a,b=c"),
        ("job.name=480", "job.name", "480"),
        ("trainer.seed='5'", "trainer.seed", 5),
        ("checkpoint.load_path=s3://b/x y%:@", "checkpoint.load_path", "s3://b/x y%:@"),
        ("checkpoint.keys_not_to_resume=[a,b]", "checkpoint.keys_not_to_resume", ["a", "b"]),
        ("++optimizer.lr=3", "optimizer.lr", 3),
        ("~optimizer.fused", "optimizer.fused", None),
    ],
)
def test_overrides_arrive(config: str, override: str, key: str | None, value: Any) -> None:
    if key is None:
        assert "cannot be read" in message(config, override)
        return
    made: Any = compose(config, ["callbacks=[basic]", override])
    for part in key.split("."):
        made = made.get(part) if isinstance(made, (DictConfig, dict)) else getattr(made, part)
    assert made == value


def test_plus_adds_what_a_target_accepts(config: str) -> None:
    assert compose(config, ["optimizer=loose", "+optimizer.whatever=3"]).optimizer.whatever == 3


def test_the_result_is_frozen(config: str) -> None:
    made = compose(config, ["experiment=base_exp"])
    with pytest.raises(AttributeError, match=r"trainer\.max_iter=VALUE"):
        made.trainer.max_iter = 3
    with pytest.raises(AttributeError):
        made.optimizer = None
    for node, name in (
        (made.optimizer, "lr"),
        (made.model.config.net, "channels"),
        (made.trainer.callbacks.speed, "width"),
    ):
        with pytest.raises(Exception, match="read-only"):
            setattr(node, name, 3)
    renamed = with_job_name(made, "other")
    assert renamed.job.name == "other" and made.job.name == "base_exp"
    with pytest.raises(AttributeError):
        renamed.job.name = "third"


def test_classes_and_resolvers_in_an_experiment(config: str) -> None:
    made = compose(config, ["experiment=class_exp"])
    assert made.trainer.type.__name__ == "Net" and made.optimizer.lr == 3


def test_a_deprecated_key_is_copied_with_a_warning(config: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("old_exp", "older_exp"):
        caplog.clear()
        assert compose(config, [f"experiment={name}"]).model_parallel.context_parallel_size == 2
        assert "model.context_parallel_size is deprecated" in caplog.text
    both = message(config, "experiment=old_exp", "model_parallel.context_parallel_size=4")
    assert "are both set" in both and "model.context_parallel_size=2" in both


def test_a_second_composition_is_harmless(config: str) -> None:
    first = to_yaml(compose(config, ["experiment=child_exp"]))
    assert to_yaml(compose(config, ["experiment=child_exp"])) == first
    assert "child_exp" in experiment_names(config)


def test_a_composition_leaves_what_is_registered_as_it_was(config: str) -> None:
    def registered() -> str:
        entries = ConfigStore.instance().repo["experiment"]
        return "".join(OmegaConf.to_yaml(entries[name].node) for name in sorted(entries))

    compose(config, ["experiment=child_exp"])
    before = registered()
    compose(config, ["experiment=child_exp", "dataloader_train.batch_size=9", "~dataloader_val", "+optimizer.fused=3"])
    assert registered() == before


def test_other_content_under_a_taken_name_is_refused() -> None:
    register_experiment("one", dict(job=dict(name="a")))
    register_experiment("one", dict(job=dict(name="a")))
    with pytest.raises(ConfigError, match="Two experiments are called 'one'"):
        register_experiment("one", dict(job=dict(name="b")))
    with pytest.raises(ConfigError, match="cannot name an experiment"):
        register_experiment("a b", {})


# --- a saved configuration ---


@pytest.fixture
def saved(config: str, tmp_path: Path) -> str:
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    save_yaml(compose(config, ["experiment=base_exp", "callbacks=[basic,long]"]), path)
    return str(path)


def test_every_experiment_round_trips(config: str, tmp_path: Path) -> None:
    for name in experiment_names(config):
        if not name.startswith(("wrong", "missing", "no_")):
            path = tmp_path / f"{name}.yaml"
            save_yaml(compose(config, [f"experiment={name}"]), path)
            again = compose(str(path))
            assert to_yaml(again) == path.read_text(), name
            assert to_yaml(load_yaml(path)) in path.read_text()


def test_a_saved_configuration_runs_with_overrides(saved: str) -> None:
    made = compose(
        saved, ["trainer.max_iter=7", "~data_val", "+trainer.callbacks.x={_target_: parts.Net}", "model.config.rank=3"]
    )
    assert made.trainer.max_iter == 7 and made.dataloader_val is None and made.model.config.rank == 3
    assert instantiate(made.dataloader_train).dataset.root == "gr1"
    assert made.job.name == "base_exp"


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("experiment=base_exp", ["saved configuration", "Leave experiment= out"]),
        ("optimizer=adamw", ["saved configuration and has no groups"]),
        ("callbacks=[basic]", ["saved configuration and has no groups"]),
        ("trainer.max_itr=3", ["Unknown key trainer.max_itr", "Did you mean max_iter"]),
        ("model.config.rank=abc", ["model.config.rank='abc'", "int is expected"]),
        ("model.config.rnk=3", ["Unknown key model.config.rnk", "rank"]),
        ("model.config.rank=0", ["model.config.rank=0 must be positive"]),
        ("+optimizer.foo=1", ["Unknown key optimizer.foo", "takes no argument 'foo'"]),
    ],
)
def test_a_mistake_on_a_saved_configuration(saved: str, override: str, texts: list[str]) -> None:
    found = message(saved, override)
    for text in texts:
        assert text in found


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("max_iter: 400", "max_iter: abc", "trainer.max_iter='abc' (str) has the wrong type: int is expected"),
        ("max_iter: 400", "max_itr: 400", "Unknown key trainer.max_itr: TrainerConfig has no such field"),
        ("trainer:", "trainr:", "Unknown key trainr: Config has no such field. Did you mean trainer"),
        ("_target_: parts.Model", "_target_: parts.Modell", "parts has no 'Modell'. Did you mean Model"),
        ("max_iter: 400", "max_iter: [", "is not valid YAML"),
        ("parts.ModelConfig", "partz.ModelConfig", "no module 'partz'"),
    ],
)
def test_a_saved_file_that_was_edited_badly(saved: str, old: str, new: str, text: str) -> None:
    content = Path(saved).read_text()
    assert old in content
    Path(saved).write_text(content.replace(old, new))
    assert text in message(saved)


def test_a_yaml_that_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("- 1\n- 2\n")
    assert "not a saved configuration" in message(str(tmp_path / "other.yaml"))
    (tmp_path / "other.yaml").write_text("services: {a: 1}\n")
    assert "Unknown key services" in message(str(tmp_path / "other.yaml"))


# --- mistakes ---

MISTAKES = [
    (["experiment=base_exq"], ["No experiment is called 'base_exq'", "Did you mean base_exp"]),
    (["experiment="], ["experiment= is empty; is EXP set?"]),
    (["experiment=''"], ["experiment= is empty; is EXP set?"]),
    (["experiment=base_exp", "experiment=child_exp"], ["'experiment' is chosen twice"]),
    (["+experiment=base_exp"], ["has a '+'", "experiment=NAME"]),
    (["optimizer=adamx"], ["The group 'optimizer' has no entry 'adamx'", "Did you mean adamw"]),
    (["ema=power"], ["ema"]),
    (["checkpoint=local"], ["'checkpoint' is a section", "checkpoint.type="]),
    (["trainer=fast"], ["'trainer' is a section"]),
    (["optimzer=adamw"], ["Unknown key optimzer", "Did you mean optimizer"]),
    (["trainer.max_itr=3"], ["Unknown key trainer.max_itr", "TrainerConfig has no such", "Did you mean max_iter"]),
    (["trainer.profiling.first_n=3"], ["Unknown key trainer.profiling.first_n", "Did you mean first_n_rank"]),
    (["max_iter=3"], ["Unknown key max_iter", "Did you mean trainer.max_iter"]),
    (["+trainer.foo=1"], ["Unknown key trainer.foo: TrainerConfig has no such field"]),
    (["++job.nam=1"], ["Unknown key job.nam: JobConfig has no such field. Did you mean name"]),
    (["+foo.bar=1"], ["Unknown key foo: Config has no such field"]),
    (["optimizer.lrr=3"], ["Unknown key optimizer.lrr", "takes no argument 'lrr'", "Did you mean lr"]),
    (["+optimizer.foo=1"], ["Unknown key optimizer.foo", "takes no argument 'foo'", "lr"]),
    (["+optimizer.lr=1"], ["exists already", "optimizer.lr=VALUE"]),
    (["optimizer=loose", "optimizer.eps=1"], ["optimizer.eps is not set yet", "+optimizer.eps=VALUE"]),
    (["optimizer=loose", "optimizer.lrr=1"], ["names no 'lrr'. Did you mean lr?", "+optimizer.lrr=VALUE"]),
    (["dataloader_train=derived", "dataloader_train.depht=1"], ["takes no argument 'depht'. Did you mean depth?"]),
    (["dataloader_train=derived", "dataloader_train.depth=1"], ["depth is not set yet, though parts.Derived takes it"]),
    (["experiment=_arg"], ["No experiment is called '_arg'. Known: wrong_argument_exp"]),
    (["~optimizer.foo"], ["optimizer.foo", "takes no argument 'foo'"]),
    (["experiment=base_exp", "model.config.extra={channels: 1}"], ["model.config.extra is null here", "dict(...)"]),
    (["model.config.rank=1"], ["Unknown key model.config.rank: model is null here", "model=small"]),
    (["experiment=base_exp", "model.config.lora=1"], ["Unknown key model.config.lora: ModelConfig has no such field"]),
    (["experiment=base_exp", "+model.config.lora=1"], ["Unknown key model.config.lora: ModelConfig has no such field"]),
    (["experiment=base_exp", "model.config.net.chanels=1"], ["model.config.net.chanels", "Did you mean channels"]),
    (["experiment=base_exp", "dataloader_train.dataset.num_frame=1"], ["dataset.num_frame:", "mean num_frames"]),
    (["optimizer.betas.2=1"], ["optimizer.betas is a list", "optimizer.betas=[...]"]),
    (["optimizer.betas.x=1"], ["optimizer.betas is a list", "optimizer.betas=[...]"]),
    (["optimizer.lr.x=1"], ["optimizer.lr is a value"]),
    (["trainer.max_iter=abc"], ["trainer.max_iter='abc' (str) has the wrong type: int is expected"]),
    (["trainer.max_iter=1e3"], ["trainer.max_iter=1000.0 (float)", "int is expected. Write 1000"]),
    (["trainer.run_validation=maybe"], ["trainer.run_validation='maybe'", "bool is expected"]),
    (["job.name=null"], ["job.name=null has the wrong type: str is expected"]),
    (["checkpoint.keys_not_to_resume=abc"], ["checkpoint.keys_not_to_resume='abc'", "list[str] is expected"]),
    (["trainer.ddp=3"], ["trainer.ddp=3 (int)", "section (DDPConfig)", "static_graph"]),
    (["experiment=base_exp", "model.config.rank=abc"], ["model.config.rank='abc'", "int is expected"]),
    (["experiment=base_exp", "model.config.rank=0"], ["model.config.rank=0 must be positive"]),
    (["experiment=base_exp", "model.config.net.channels=0"], ["model.config.net.channels: 'channels' must be >= 1: 0"]),
    (["trainer.grad_accum_iter=0"], ["trainer.grad_accum_iter=0, but it must be a number of at least 1"]),
    (["trainer.distributed_parallelism=fsdp2"], ["trainer.distributed_parallelism='fsdp2'", "one of: ddp, fsdp"]),
    (["trainer.profiling.enable_profiling=true"], ["trainer.profiling.profile_freq=1", "at least 4"]),
    (["optimizer.lr=2**-14.5"], ["optimizer.lr='2**-14.5' is text", "expects float"]),
    (["experiment=missing_exp"], ["2 values are missing", "model.config=VALUE", "dataloader_train.dataset.root=VALUE"]),
    (["optimizer.lr=???"], ["A value is missing", "optimizer.lr=VALUE"]),
    (["~trainer.seed"], ["~trainer.seed", "cannot be removed"]),
    (["~trainer"], ["~trainer", "cannot be removed"]),
    (["job.name="], ["job.name is empty"]),
    (["job.name=../../x"], ["job.name='../../x' cannot be a part of the run folder"]),
    (["optimizer.betas=0.1,0.2"], ["a comma or a sweep", "'optimizer.betas=[0.1,0.2]'"]),
    (["job.name=a=b"], ["job.name=a=b cannot be read", "'key=\"value\"'"]),
    (["job.name=(x)"], ["job.name=(x) cannot be read"]),
    (["job.name=é"], ["cannot be read", "ASCII"]),
    (["optimizer.lr=choice(1,2)"], ["a comma or a sweep"]),
    (["trainer.max_iter"], ["'trainer.max_iter' is not an override"]),
    (["dryrun"], ["The flag is --dryrun"]),
    ([""], ["An override is empty"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x has no effect"]),
    (["hydra/launcher=x"], ["has no effect"]),
    (["optimizer@x=adamw"], ["not supported"]),
    (["experiment=no_effect_exp"], ["checkpoint.jit.enabled=true has no effect here", "default, false"]),
    (["checkpoint.broadcast_via_filesystem=true"], ["checkpoint.broadcast_via_filesystem=true has no effect here"]),
    (["checkpoint.save_to_object_store.enabled=true"], ["checkpoint.save_to_object_store.enabled", "IMAGINAIRE_OUTPUT_ROOT=s3://"]),
    (["checkpoint.load_from_object_store.bucket=x"], ["checkpoint.load_from_object_store.bucket='x'"]),
    (["trainer.straggler_detection.enabled=true"], ["trainer.straggler_detection.enabled=true has no effect"]),
    (["trainer.profiling.save_s3=true"], ["trainer.profiling.save_s3=true has no effect"]),
    (["upload_reproducible_setup=true"], ["upload_reproducible_setup=true has no effect"]),
    (["model_parallel.tensor_model_parallel_size=2"], ["model_parallel.tensor_model_parallel_size=2 has no effect"]),
    (["experiment=wrong_key_exp"], ["experiment 'wrong_key_exp': Unknown key trainer.max_itr", "mean max_iter"]),
    (["experiment=wrong_type_exp"], ["experiment 'wrong_type_exp': trainer.max_iter='abc'", "int is expected"]),
    (["experiment=wrong_argument_exp"], ["Unknown key optimizer.lrr", "Did you mean lr"]),
    (["experiment=wrong_group_exp"], ["experiment 'wrong_group_exp'", "override /optimzer", "override /optimizer"]),
    (["experiment=wrong_entry_exp"], ["The group 'optimizer' has no entry 'adam'", "Did you mean adamw"]),
    (["experiment=wrong_parent_exp"], ["experiment 'wrong_parent_exp'", "is called 'base_ex'", "base_exp"]),
    (["optimizer.lr=${nothing.here}"], ["optimizer.lr", "nothing.here"]),
    (["optimizer._target_=parts.optimzer"], ["optimizer._target_ names 'parts.optimzer'", "Did you mean optimizer"]),
    (["model={a:1}"], ["model has values (a) but no _target_"]),
    (["model=2"], ["The group 'model' has no entry '2'. Known: small"]),
    (["trainer.callbacks.sped.width=1"], ["trainer.callbacks has no 'sped'", "Did you mean speed"]),
    (["+trainer.callbacks.sped.width=1"], ["trainer.callbacks.sped has values (width) but no _target_"]),
    (["trainer.callbacks=[]"], ["trainer.callbacks=[] does not", "trainer.callbacks.NAME=null", "callbacks=[basic,"]),
    (["trainer.callbacks=speed"], ["trainer.callbacks=speed does not", "callbacks=[] none"]),
    (["trainer.ddp=[1]"], ["trainer.ddp=[1] gives a list, but trainer.ddp is a section"]),
    (["trainer.type=parts.Nett"], ["trainer.type names 'parts.Nett'", "Did you mean Net"]),
    (["experiment=no_package_exp"], ['package="_global_"']),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "texts"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_a_mistake_is_one_message(config: str, overrides: list[str], texts: list[str]) -> None:
    found = message(config, *overrides)
    for text in texts:
        assert text in found, found


# --- config files ---


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("x = 1\nimport no_such_package\n", ["does not import", "config.py:2", "Run from the folder it lies in"]),
        ("from megatron.core import parallel_state\n", ["megatron", "pip install -e '.[compat]'"]),
        ("x = (1\n", ["does not import", "SyntaxError", "config.py:1"]),
        ("\n\nx = 1 / 0\n", ["does not import", "ZeroDivisionError", "config.py:3"]),
        ("x = 1\n", ["has no function make_config()"]),
        ("def mak_config():\n    pass\n", ["has no function make_config()", "Did you mean mak_config"]),
        ("def make_config():\n    pass\n", ["returned nothing", "imaginaire.config.schema.Config"]),
        ("def make_config():\n    return {}\n", ["returned a dict"]),
        ("def make_config():\n    y = {}\n    return y['a']\n", ["make_config()", "KeyError: 'a'", "config.py:3"]),
        ("from imaginaire.config.schema import Config\ndef make_config():\n    Config().trainer.max_iter = -1\n",
         ["make_config()", "max_iter=-1, but it must be a number of at least 0"]),
    ],
)  # fmt: skip
def test_a_config_file_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, texts: list[str]
) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    (tmp_path / "config.py").write_text(body)
    found = message(str(tmp_path / "config.py"))
    for text in [*texts, str(tmp_path / "config.py")]:
        assert text in found


def test_config_paths_that_do_not_exist(config: str, tmp_path: Path) -> None:
    assert f"Did you mean {tmp_path / 'config.py'}?" in message(str(tmp_path / "confg.py"))
    (tmp_path / "confgs.py").write_text("lr = 1\n")  # no configuration, for all its name
    found = message(str(tmp_path / "confg.py"))
    assert "confgs.py" not in found and message(str(tmp_path / "nope.py")).endswith(f" {tmp_path / 'config.py'}.")
    assert "does not exist either." in message(str(tmp_path / "no" / "config.py"))
    assert "Run from the checkout, or give --config." in message("no/config.py")
    assert "is a folder" in message(str(tmp_path)) and "config.py" in message(str(tmp_path))
    assert "--config is empty" in message("")
    (tmp_path / "config.txt").write_text("")
    assert "neither a Python file" in message(str(tmp_path / "config.txt"))
    (tmp_path / "torch.py").write_text("")
    import torch  # noqa: F401

    assert "Rename the file" in message(str(tmp_path / "torch.py"))


def test_a_config_file_below_the_working_directory_has_its_dotted_name(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "my.py_project"
    robot = project / "robot_xyz"
    robot.mkdir(parents=True)
    (robot / "parts_py.py").write_text(PARTS)
    (robot / "my_py_config.py").write_text(CONFIG.replace("from parts", "from robot_xyz.parts_py"))
    monkeypatch.chdir(project)
    for path in (
        "robot_xyz/my_py_config.py",
        str(robot / "my_py_config.py"),
        "./robot_xyz/../robot_xyz/my_py_config.py",
    ):
        made = compose(path, ["experiment=inline_exp"])
        assert "robot_xyz.parts_py.Loader" in to_yaml(made)
        assert "robot_xyz.my_py_config" in sys.modules


def test_two_config_files_of_one_name_in_one_process(config: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.py").write_text(
        "from imaginaire.config.schema import *\n"
        "def make_config(): return Config(job=JobConfig(project='o', group='g', name='n'))\n"
    )
    assert compose(config).job.project == "p"
    assert compose(str(other / "config.py")).job.project == "o"
    assert compose(config).job.project == "p"


UPSTREAM = """
from hydra.core.config_store import ConfigStore
from imaginaire.lazy_config import LazyCall as L, LazyDict
from parts import Data, Loader, Net
import torch

cs = ConfigStore.instance()

example_dataset = L(Data)(root="datasets/x", num_frames=93)
dataloader_x = L(Loader)(dataset=example_dataset, batch_size=1)

up_training_2b = dict(
    defaults=[
        {"override /model": "small"},
        {"override /optimizer": "adamw"},
        {"override /callbacks": ["basic"]},
        {"override /data_val": "mock"},
        "_self_",
    ],
    job=dict(project="posttraining", group="video2world", name="2b"),
    model=dict(config=dict(rank=3, part=L(Net)(width=2))),
    dataloader_train=dataloader_x,
    optimizer=dict(lr=2 ** (-14.5)),
    model_parallel=dict(context_parallel_size=2),
)
up_training_14b = LazyDict(
    dict(
        defaults=["/experiment/up_training_2b", "_self_"],
        job=dict(name="14b"),
        optimizer=L(__import__("parts").optimizer)(model=None, lr=1.0),
        trainer=dict(type=Loader),
    ),
    flags={"allow_objects": True},
)

for _item in [up_training_2b, up_training_14b]:
    experiment_name = [name.lower() for name, value in globals().items() if value is _item][0]
    cs.store(group="experiment", package="_global_", name=experiment_name, node=_item)
"""


def test_upstream_experiment_files_work_unchanged(
    config: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    folder = tmp_path / "upstream_pkg" / "experiment"
    (folder / "deep").mkdir(parents=True)
    for package in (tmp_path / "upstream_pkg", folder, folder / "deep"):
        (package / "__init__.py").write_text("")
    (folder / "deep" / "groot.py").write_text(UPSTREAM)
    (folder / "broken.py").write_text("\nfrom megatron.core import parallel_state\n")
    (folder / "_private.py").write_text("raise RuntimeError('never imported')\n")
    text = Path(config).read_text()
    text = text.replace(
        "    return Config(",
        "    import_all_modules_from_package('upstream_pkg.experiment', reload=True)\n    return Config(",
    )
    Path(config).write_text(
        text.replace("import register_experiment", "import import_all_modules_from_package, register_experiment")
    )
    assert {"up_training_2b", "up_training_14b"} <= set(experiment_names(config))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "upstream_pkg.experiment.broken did not import" in warnings[0]
    assert "broken.py:2" in warnings[0] and "[compat]" in warnings[0]
    made = compose(config, ["experiment=up_training_14b", "trainer.max_iter=5"])
    assert made.job.path == "posttraining/video2world/14b"
    assert made.dataloader_train.dataset.root == "datasets/x" and made.dataloader_val.dataset.root == "mock"
    assert made.model.config.part.width == 2 and made.optimizer.lr == 1.0
    assert made.model_parallel.context_parallel_size == 2
    text_14b = to_yaml(made)
    (tmp_path / "run.yaml").write_text(text_14b)
    assert to_yaml(compose(str(tmp_path / "run.yaml"))) == text_14b
    unknown = message(config, "experiment=up_trainin_7b")
    assert "up_training_2b" in unknown and "upstream_pkg.experiment.broken: ModuleNotFoundError" in unknown


def test_an_upstream_style_root_composes(config: str, tmp_path: Path) -> None:
    body = """
from typing import Any, List
import attrs
from imaginaire import config
from imaginaire.config import make_freezable
from hydra.core.config_store import ConfigStore
from imaginaire.lazy_config import LazyCall as L
from parts import Data


@make_freezable
@attrs.define(slots=False)
class Config(config.Config):
    defaults: List[Any] = attrs.field(
        factory=lambda: ["_self_", {"data_train": None}, {"data_val": "mock"}, {"net": None}, {"experiment": None}])
    extra: int = 3


def make_config():
    cs = ConfigStore.instance()
    cs.store(group="data_val", package="dataloader_val", name="mock", node=L(Data)())
    c = Config(model=None, optimizer=None, scheduler=None, dataloader_train=None, dataloader_val=None)
    c.job.project, c.job.group, c.job.name = "a", "b", "c"
    c.trainer.callbacks = None
    c.checkpoint.save_iter = 10
    return c
"""
    (tmp_path / "up_root.py").write_text(body)
    made = compose(str(tmp_path / "up_root.py"), ["extra=4"])
    assert made.dataloader_val.root == "here" and made.extra == 4  # type: ignore[attr-defined]
    save_yaml(made, tmp_path / "run.yaml")
    again = compose(str(tmp_path / "run.yaml"), ["trainer.seed=2"])
    assert type(again).__qualname__ == "Config" and again.extra == 4  # type: ignore[attr-defined]
    assert "_type_: up_root.Config" in (tmp_path / "run.yaml").read_text()


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "flags", "overrides"),
    [
        (["--config=x", "--", "a=b", "c=d"], ["--config=x"], ["a=b", "c=d"]),
        (["--config", "x.py", "--dryrun", "a=b"], ["--config", "x.py", "--dryrun"], ["a=b"]),
        (["--config", "x.py", "experiment=e"], ["--config", "x.py"], ["experiment=e"]),
        (["a=b", "--", "c=d"], [], ["a=b", "c=d"]),
        (["--list"], ["--list"], []),
        (["--"], [], []),
        ([], [], []),
        (["--", "~a", "+b=1"], [], ["~a", "+b=1"]),
    ],
)
def test_arguments_are_cut(arguments: list[str], flags: list[str], overrides: list[str]) -> None:
    assert split_arguments(arguments) == (flags, overrides)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--", "a=b", "--dryrun"], "--dryrun stands among the overrides"),
        (["a=b", "--list"], "python -m scripts.train --list -- "),
        (["a=b", "--config=x.py"], "python -m scripts.train --config=x.py -- "),
        (["a=b", "--dryrun", "--", "c=d"], "--dryrun stands among the overrides"),
        (["--", "a=b", "--drurun"], "Did you mean --dryrun"),
        (["--", "a=b", "--", "c=d"], "A second '--'"),
    ],
)
def test_flags_in_the_wrong_place_say_where_they_belong(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_arguments(arguments)
    assert text in str(error.value)


def test_every_field_of_the_root_can_be_written_and_read(config: str) -> None:
    made = compose(config)
    assert isinstance(made, Config)
    assert OmegaConf.is_config(made.optimizer)


def test_an_experiment_of_a_config_without_any_is_unknown_by_name(tmp_path: Path) -> None:
    """Also when the one module that would register it did not import: the message then names the module."""
    config = tmp_path / "empty_config.py"
    config.write_text(
        "from imaginaire.config.schema import Config\n"
        "def make_config():\n"
        "    return Config(defaults=['_self_', {'experiment': None}])\n"
    )
    script = (
        "import sys; from imaginaire.config.compose import compose\n"
        "try: compose(sys.argv[1], ['experiment=NAME'])\n"
        "except ValueError as error: print(error)"
    )
    result = subprocess.run([python(), "-c", script, str(config)], capture_output=True, text=True)
    assert result.stdout.strip() == "No experiment is called 'NAME'. None is registered.", result.stderr
