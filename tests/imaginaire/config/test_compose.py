# SPDX-License-Identifier: Apache-2.0
"""Composition: groups, experiments, overrides; saved configurations; config files and command lines."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from imaginaire.config.compose import (
    compose,
    experiment_names,
    quoted,
    register_experiment,
    split_arguments,
    with_job_name,
)
from imaginaire.config.lazy_config import instantiate, load_yaml, save_yaml, to_yaml
from imaginaire.errors import ConfigError
from tests.imaginaire.config.conftest import CONFIG, PARTS

# --- what composes ---


def test_groups_experiment_and_overrides_in_their_order(config: str) -> None:
    made = compose(config, ["trainer.max_iter=3", "experiment=base_exp", "optimizer.lr=2", "trainer.max_iter=10"])
    assert made.job.path == "p/g/base_exp" and made.defaults == []
    assert made.trainer.distributed_parallelism == "fsdp"
    assert made.trainer.max_iter == 10 and made.optimizer.lr == 2
    assert made.dataloader_train.batch_size == 4 and made.dataloader_train.dataset.root == "gr1"
    assert made.dataloader_val.dataset.root == "mock" and made.trainer.callbacks.speed.width == 10
    model = instantiate(made.model)
    assert isinstance(model.config, DictConfig) and model.config.net.channels == 8
    alone = compose(config)
    assert alone.model is None and alone.dataloader_train is None and alone.job.name.startswith("n_20")


@pytest.mark.parametrize(
    "text",
    [
        "my_data",
        "/a b/c",
        "/a,b",
        "/x (1)/y",
        "a=b",
        "/été",
        "it's",
        "{a}",
        "[a]",
        r"a\b",
        r"a\'b",
        "end\\",
        'a"b',
        "# x",
    ]
    + ["12", "null", "true", "~/x", "C:/a:b", "", " a ", "x}", "x: y", "gym:ID?repeat=4&actions=native"],
)
def test_a_quoted_text_is_read_as_it_is(text: str, config: str) -> None:
    made = compose(config, ["experiment=base_exp", f"dataloader_train.dataset.root={quoted(text)}"])
    assert made.dataloader_train.dataset.root == text
    assert OverridesParser.create().parse_override(f"key={{of:{quoted(text)}}}").value() == {"of": text}


@pytest.mark.parametrize(
    ("overrides", "batch_size", "name"),
    [
        ("experiment=child_exp", 7, "child"),
        ("experiment=base_exp dataloader_train=mock", 4, "base_exp"),
        ("dataloader_train=mock experiment=base_exp", 4, "base_exp"),
        ("experiment=parent_wins", 4, "base_exp"),
    ],
)
def test_inheritance_follows_the_defaults_list(config: str, overrides: str, batch_size: int, name: str) -> None:
    made = compose(config, overrides.split())
    assert (made.dataloader_train.batch_size, made.job.name) == (batch_size, name)


def test_a_child_clears_what_its_parent_gave(config: str) -> None:
    assert compose(config, ["experiment=child_exp"]).dataloader_train.dataset is None
    made = compose(config, ["experiment=cleared_exp"])
    assert set(made.dataloader_train) == {"_target_", "width", "depth"} and made.dataloader_train.depth == 3


@pytest.mark.parametrize("off", ["~dataloader_val", "dataloader_val=null", "~data_val", "data_val=null"])
def test_a_loader_is_removed_however_it_is_written(config: str, off: str) -> None:
    assert compose(config, ["experiment=base_exp", off]).dataloader_val is None
    inline = compose(config, ["experiment=inline_exp", off.replace("val", "train")])
    assert inline.dataloader_train is None


def test_groups_can_be_cleared_and_chosen_in_number(config: str) -> None:
    assert set(compose(config, ["callbacks=[basic,long]"]).trainer.callbacks) == {"speed", "beat"}
    assert compose(config, ["callbacks=null"]).trainer.callbacks is None
    assert compose(config, ["~optimizer"]).optimizer is None
    assert "speed" not in compose(config, ["~trainer.callbacks.speed"]).trainer.callbacks
    assert compose(config, ["experiment=null"]).model is None


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("+trainer.grad_scaler_args.init_scale=8", "trainer.grad_scaler_args.init_scale", 8),
        ("+trainer.callbacks.mine={_target_: parts.Net, width: 3}", "trainer.callbacks.mine.width", 3),
        ("trainer.callbacks.speed=null", "trainer.callbacks.speed", None),
        ("optimizer.betas=[0.5,0.6]", "optimizer.betas", [0.5, 0.6]),
        ('job.name="a,b=c"', "job.name", "a,b=c"),
        ("job.name=480", "job.name", "480"),
        ("trainer.seed='5'", "trainer.seed", 5),
        ("checkpoint.load_path=s3://b/x y%:@", "checkpoint.load_path", "s3://b/x y%:@"),
        ("checkpoint.keys_not_to_resume=[a,b]", "checkpoint.keys_not_to_resume", ["a", "b"]),
        ("++optimizer.lr=3", "optimizer.lr", 3),
        ("+optimizer.lr=3", "optimizer.lr", 3),
        ("~optimizer.fused", "optimizer.fused", None),
        ("data_train=mock", "dataloader_train.dataset.root", "mock"),
        ("data_train.dataset.num_frames=17", "dataloader_train.dataset.num_frames", 17),
        ("dataloader_train.dataset.num_frames=17", "dataloader_train.dataset.num_frames", 17),
    ],
)
def test_overrides_arrive(config: str, override: str, key: str, value: Any) -> None:
    made: Any = compose(config, ["experiment=base_exp", override])
    for part in key.split("."):
        made = made.get(part) if isinstance(made, (DictConfig, dict)) else getattr(made, part)
    assert made == value


def test_the_result_is_frozen(config: str) -> None:
    made = compose(config, ["experiment=base_exp"])
    with pytest.raises(AttributeError, match=r"trainer\.max_iter=VALUE"):
        made.trainer.max_iter = 3
    nodes = [(made.optimizer, "lr"), (made.model.config.net, "channels"), (made.trainer.callbacks.speed, "width")]
    for node, name in nodes:
        with pytest.raises(Exception, match="read-only"):
            setattr(node, name, 3)
    renamed = with_job_name(made, "other")
    assert renamed.job.name == "other" and made.job.name == "base_exp"
    with pytest.raises(AttributeError):
        renamed.job.name = "third"


def test_classes_and_resolvers_in_an_experiment(config: str) -> None:
    made = compose(config, ["experiment=class_exp"])
    assert made.trainer.type.__name__ == "Net" and made.optimizer.lr == 3
    made = compose(config, ["experiment=lazy_dict_exp"])
    assert made.trainer.type.__name__ == "Loader" and made.job.name == "child"


def test_a_deprecated_key_is_copied_with_a_warning(config: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("old_exp", "older_exp"):
        caplog.clear()
        assert compose(config, [f"experiment={name}"]).model_parallel.context_parallel_size == 2
        assert "model.context_parallel_size is deprecated" in caplog.text
    with pytest.raises(ConfigError, match=r"model\.context_parallel_size=2"):
        compose(config, ["experiment=old_exp", "model_parallel.context_parallel_size=4"])


def test_composing_again_changes_nothing(config: str) -> None:
    def registered() -> str:
        entries = ConfigStore.instance().repo["experiment"]
        return "".join(OmegaConf.to_yaml(entries[name].node) for name in sorted(entries))

    first = to_yaml(compose(config, ["experiment=child_exp"]))
    before = registered()
    compose(config, ["experiment=child_exp", "dataloader_train.batch_size=9", "~dataloader_val", "+optimizer.fused=3"])
    assert registered() == before and to_yaml(compose(config, ["experiment=child_exp"])) == first


def test_other_content_under_a_taken_name_is_refused() -> None:
    register_experiment("one", dict(job=dict(name="a")))
    register_experiment("one", dict(job=dict(name="a")))
    with pytest.raises(ConfigError, match="Two experiments are called 'one'"):
        register_experiment("one", dict(job=dict(name="b")))
    with pytest.raises(ConfigError, match="cannot name an experiment"):
        register_experiment("a b", {})


# --- a saved configuration ---


def test_experiments_round_trip(config: str, tmp_path: Path) -> None:
    for name in experiment_names(config):
        if name in ("base_exp", "cleared_exp", "class_exp"):
            path = tmp_path / f"{name}.yaml"
            save_yaml(compose(config, [f"experiment={name}"]), path)
            again = compose(str(path))
            assert to_yaml(again) == path.read_text(), name
            assert to_yaml(load_yaml(path)) in path.read_text()


def test_a_saved_configuration_runs_with_overrides(saved: str) -> None:
    added = "+trainer.callbacks.x={_target_: parts.Net}"
    made = compose(saved, ["trainer.max_iter=7", "~data_val", added, "model.config.rank=3"])
    assert made.trainer.max_iter == 7 and made.dataloader_val is None and made.model.config.rank == 3
    assert instantiate(made.dataloader_train).dataset.root == "gr1" and made.job.name == "base_exp"


# --- config files and command lines ---


def test_a_config_file_below_the_working_directory_has_its_dotted_name(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "my.py_project"
    robot = project / "robot_xyz"
    robot.mkdir(parents=True)
    (robot / "parts_py.py").write_text(PARTS)
    (robot / "my_py_config.py").write_text(CONFIG.replace("from parts", "from robot_xyz.parts_py"))
    monkeypatch.chdir(project)
    here = "robot_xyz/my_py_config.py"
    for path in (here, str(robot / "my_py_config.py"), f"./robot_xyz/../{here}"):
        made = compose(path, ["experiment=inline_exp"])
        assert "robot_xyz.parts_py.Loader" in to_yaml(made)
        assert "robot_xyz.my_py_config" in sys.modules


def test_an_upstream_style_root_composes(config: str, tmp_path: Path) -> None:
    body = """
from typing import Any, List
import attrs
from imaginaire import config
from imaginaire.config import make_freezable
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
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


@pytest.mark.parametrize(
    ("arguments", "flags", "overrides"),
    [
        (["--config", "x.py", "--dryrun", "a=b"], ["--config", "x.py", "--dryrun"], ["a=b"]),
        (["--config", "x.py", "experiment=e"], ["--config", "x.py"], ["experiment=e"]),
        (["a=b", "--", "c=d"], [], ["a=b", "c=d"]),
        ([], [], []),
        (["--", "~a", "+b=1"], [], ["~a", "+b=1"]),
    ],
)
def test_arguments_are_cut(arguments: list[str], flags: list[str], overrides: list[str]) -> None:
    assert split_arguments(arguments) == (flags, overrides)
