# SPDX-License-Identifier: Apache-2.0
"""Every mistake that a user can make in a configuration is one message: what was given, and the name that it gives."""

import sys
import time
from pathlib import Path

import pytest

from imaginaire.config.compose import compose, split_arguments
from imaginaire.config.overrides import unknown_flag
from imaginaire.errors import ConfigError

FOREIGN = ("hydra.cc", "To append to your config", "full_key", "object_type", "multirun", "Config search path")


def message(config_path: str, *overrides: str) -> str:
    """The one message of a composition that must fail: short, quick, and without Hydra's advice."""
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        compose(config_path, list(overrides))
    text = str(error.value)
    assert len(text.splitlines()) <= 30 and time.process_time() - start < 10
    assert not [words for words in FOREIGN if words in text]
    return text


MISTAKES = {  # overrides -> the key, name or cure that the message gives
    "experiment=base_exq": "mean base_exp",
    "experiment=": "is EXP set?",
    "experiment=''": "is EXP set?",
    "experiment=_arg": "wrong_argument_exp",
    "experiment=base_exp experiment=child_exp": "twice",
    "+experiment=base_exp": "experiment=NAME",
    "base_exp": "mean experiment=base_exp?",
    "optimizer=adamx": "mean adamw?",
    "model=2": "small",
    "model=nested": "mean adamw?",
    "ema=power": "ema",
    "checkpoint=local": "checkpoint.type=",
    "trainer=fast": "'trainer' is a section",
    "optimzer=adamw": "mean optimizer?",
    "trainer.max_itr=3": "mean max_iter,",
    "trainer.profiling.first_n=3": "mean first_n_rank",
    "max_iter=3": "mean trainer.max_iter?",
    "dataloader_train=gr1 batch_size=3": "mean dataloader_train.batch_size?",
    "dataloader_train=gr1 num_frames=3": "mean dataloader_train.dataset.num_frames?",
    "+trainer.foo=1": "trainer.foo",
    "++job.nam=1": "mean name?",
    "+foo.bar=1": "Unknown key foo",
    "optimizer.lrr=3": "mean lr?",
    "+optimizer.foo=1": "optimizer.foo",
    "+optimizer.lr=1": "optimizer.lr=VALUE",
    "optimizer=loose optimizer.eps=1": "+optimizer.eps=VALUE",
    "optimizer=loose optimizer.lrr=1": "mean lr?",
    "dataloader_train=derived dataloader_train.depht=1": "mean depth?",
    "dataloader_train=derived dataloader_train.depth=1": "parts.Derived",
    "~optimizer.foo": "optimizer.foo",
    "experiment=base_exp model.config.extra={channels:1}": "model.config.extra is null",
    "model.config.rank=1": "model=nested|small",
    "experiment=base_exp model.config.lora=1": "model.config.lora",
    "experiment=base_exp +model.config.lora=1": "model.config.lora",
    "experiment=base_exp model.config.net.chanels=1": "mean channels",
    "experiment=base_exp dataloader_train.dataset.num_frame=1": "mean num_frames",
    "optimizer.betas.2=1": "optimizer.betas=[...]",
    "optimizer.betas.x=1": "optimizer.betas=[...]",
    "optimizer.lr.x=1": "optimizer.lr is a value",
    "trainer.max_iter=abc": "trainer.max_iter='abc' (str)",
    "trainer.max_iter=1e3": "Write 1000",
    "trainer.run_validation=maybe": "trainer.run_validation='maybe'",
    "job.name=null": "job.name=null",
    "checkpoint.keys_not_to_resume=abc": "list[str]",
    "trainer.ddp=3": "static_graph",
    "trainer.ddp=[1]": "trainer.ddp=[1]",
    "experiment=base_exp model.config.rank=abc": "model.config.rank='abc'",
    "experiment=base_exp model.config.rank=0": "model.config.rank=0",
    "experiment=base_exp model.config.net.channels=0": "model.config.net.channels",
    "trainer.grad_accum_iter=0": "trainer.grad_accum_iter=0",
    "trainer.distributed_parallelism=fsdp2": "ddp, fsdp",
    "trainer.profiling.enable_profiling=true": "trainer.profiling.profile_freq=1",
    "optimizer.lr=2**-14.5": "optimizer.lr='2**-14.5'",
    "experiment=missing_exp": "dataloader_train.dataset.root=VALUE\n  model.config=VALUE",
    "optimizer.lr=???": "optimizer.lr=VALUE",
    "~trainer.seed": "trainer.seed=VALUE",
    "~trainer": "~trainer",
    "job.name=": "job.name=NAME",
    "job.name=../../x": "job.name='../../x'",
    "optimizer.betas=0.1,0.2": "'optimizer.betas=[0.1,0.2]'",
    "job.name=a=b": "'key=\"value\"'",
    "'job.name=x=y'": "cannot be read",
    "job.name=(x)": "job.name=(x)",
    "job.name=é": "ASCII",
    "optimizer.lr=choice(1,2)": "sweep",
    "trainer.max_iter": "key=value",
    "dryrun": "--dryrun",
    "hydra.run.dir=x": "hydra.run.dir=x",
    "hydra/launcher=x": "hydra/launcher=x",
    "optimizer@x=adamw": "'@'",
    "experiment=no_effect_exp": "checkpoint.jit.enabled=true",
    "checkpoint.broadcast_via_filesystem=true": "checkpoint.broadcast_via_filesystem=true",
    "checkpoint.save_to_object_store.enabled=true": "IMAGINAIRE_OUTPUT_ROOT=s3://",
    "trainer.straggler_detection.enabled=true": "trainer.straggler_detection.enabled=true",
    "upload_reproducible_setup=true": "upload_reproducible_setup=true",
    "experiment=wrong_key_exp": "experiment 'wrong_key_exp': Unknown key trainer.max_itr",
    "experiment=wrong_type_exp": "experiment 'wrong_type_exp': trainer.max_iter='abc'",
    "experiment=wrong_argument_exp": "optimizer.lrr",
    "experiment=wrong_group_exp": "mean override /optimizer",
    "experiment=wrong_twice_exp": "'override /optimizer'",
    "experiment=wrong_entry_exp": "mean adamw?",
    "experiment=wrong_parent_exp": "mean base_exp",
    "experiment=no_package_exp": 'package="_global_"',
    "optimizer.lr=${nothing.here}": "optimizer.lr=${nothing.here}",
    "optimizer._target_=parts.optimzer": "mean optimizer?",
    "model={a:1}": "model has values (a)",
    "trainer.callbacks.sped.width=1": "mean speed?",
    "+trainer.callbacks.sped.width=1": "trainer.callbacks.sped",
    "trainer.callbacks=[]": "trainer.callbacks.NAME=null",
    "trainer.callbacks=speed": "trainer.callbacks=speed",
    "trainer.type=parts.Nett": "mean Net?",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_message(config: str, overrides: str) -> None:
    assert MISTAKES[overrides] in message(config, *overrides.split())


def test_an_empty_override_is_one_message(config: str) -> None:
    assert "shell variable" in message(config, "")


# --- a saved configuration ---


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("experiment=base_exp", "Leave experiment= out"),
        ("optimizer=adamw", "optimizer.KEY=VALUE"),
        ("callbacks=[basic]", "no groups"),
        ("trainer.max_itr=3", "trainer.max_itr"),
        ("model.config.rank=abc", "model.config.rank='abc'"),
        ("model.config.rnk=3", "model.config.rnk"),
        ("model.config.rank=0", "model.config.rank=0"),
        ("+optimizer.foo=1", "optimizer.foo"),
    ],
)
def test_a_mistake_on_a_saved_configuration(saved: str, override: str, named: str) -> None:
    assert named in message(saved, override)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("max_iter: 400", "max_iter: abc", "trainer.max_iter='abc' (str)"),
        ("max_iter: 400", "max_itr: 400", "trainer.max_itr"),
        ("trainer:", "trainr:", "mean trainer?"),
        ("_target_: parts.Model", "_target_: parts.Modell", "mean Model,"),
        ("max_iter: 400", "max_iter: [", "YAML"),
        ("parts.ModelConfig", "partz.ModelConfig", "'partz'"),
    ],
)
def test_a_saved_file_that_was_edited_badly(saved: str, old: str, new: str, named: str) -> None:
    content = Path(saved).read_text()
    assert old in content
    Path(saved).write_text(content.replace(old, new))
    assert named in message(saved)


def test_a_yaml_that_is_no_configuration(tmp_path: Path) -> None:
    for text, named in (("- 1\n- 2\n", "other.yaml"), ("services: {a: 1}\n", "services")):
        (tmp_path / "other.yaml").write_text(text)
        assert named in message(str(tmp_path / "other.yaml"))


# --- config files ---


BODIES = [  # of a config file, what the message names
    ("x = 1\nimport no_such_package\n", "config.py:2"),
    ("from megatron.core import parallel_state\n", "pip install -e '.[compat]'"),
    ("x = (1\n", "config.py:1"),
    ("\n\nx = 1 / 0\n", "config.py:3"),
    ("x = 1\n", "make_config()"),
    ("def mak_config():\n    pass\n", "mean mak_config"),
    ("def make_config():\n    pass\n", "returned nothing"),
    ("def make_config():\n    return {}\n", "a dict"),
    ("def make_config():\n    y = {}\n    return y['a']\n", "KeyError: 'a'"),
    ("from imaginaire.config import Config\ndef make_config():\n    Config().trainer.max_iter = -1\n", "max_iter=-1"),
]


@pytest.mark.parametrize(("body", "named"), BODIES)
def test_a_config_file_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, named: str
) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    (tmp_path / "config.py").write_text(body)
    found = message(str(tmp_path / "config.py"))
    assert named in found and str(tmp_path / "config.py") in found


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("confg.py", "mean {}/config.py?"),  # confgs.py is no configuration
        ("nope.py", " {}/config.py."),
        ("no/config.py", "{}/no does not exist"),
        ("", "{}/config.py"),
        ("config.txt", "config.txt"),
        ("torch.py", "Rename the file"),
    ],
)
def test_a_config_path_that_does_not_work(config: str, tmp_path: Path, path: str, named: str) -> None:
    for name, text in (("confgs.py", "lr = 1\n"), ("config.txt", ""), ("torch.py", "")):
        (tmp_path / name).write_text(text)
    found = message(str(tmp_path / path))
    assert named.format(tmp_path) in found and "confgs.py" not in found


def test_a_relative_config_path_that_does_not_exist() -> None:
    assert "give --config" in message("no/config.py") and "--config" in message("")


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--", "a=b", "--dryrun"], "--dryrun"),
        (["a=b", "--list"], "python -m scripts.train --list -- "),
        (["a=b", "--config=x.py"], "python -m scripts.train --config=x.py -- "),
        (["a=b", "--dryrun", "--", "c=d"], "--dryrun"),
        (["--", "a=b", "--drurun"], "mean --dryrun"),
        (["--", "a=b", "--", "c=d"], "second '--'"),
    ],
)
def test_a_flag_in_the_wrong_place(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_arguments(arguments)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--experiment", "x"], "-- experiment=x"),
        (["--experiment=x"], "-- experiment=x"),
        (["--experiment"], "-- experiment=NAME"),
        (["--optimizer.lr=1"], "-- optimizer.lr=1"),
        (["--dry-run"], "mean --dryrun?"),
    ],
)
def test_an_unknown_flag_proposes_what_was_meant(arguments: list[str], named: str) -> None:
    flags, overrides = split_arguments(arguments)
    assert named in str(unknown_flag(flags[0], overrides))


def test_an_experiment_of_a_config_without_any_is_unknown_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text(
        "from imaginaire.config import Config\n"
        "def make_config():\n"
        "    return Config(defaults=['_self_', {'experiment': None}])\n"
    )
    assert message(str(tmp_path / "empty.py"), "experiment=NAME").endswith("'NAME'. None is registered.")
