# SPDX-License-Identifier: Apache-2.0
"""Every mistake that a user can make in a configuration is one message: what was given, and the name that it gives."""

import sys
import time
from pathlib import Path

import pytest

from imaginaire.config.compose import compose
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


MISTAKES = {  # overrides -> the key or name that the message gives
    "experiment=base_exq": "mean base_exp",
    "experiment=": "EXP",
    "experiment=_arg": "wrong_argument_exp",
    "experiment=base_exp experiment=child_exp": "experiment=child_exp",
    "base_exp": "mean experiment=base_exp?",
    "optimizer=adamx": "mean adamw?",
    "model=2": "small",
    "model=nested": "mean adamw?",
    "ema=power": "Unknown key ema",
    "trainer=fast": "trainer='fast'",
    "trainer.max_itr=3": "mean max_iter,",
    "trainer.{a,b}=3": "leave out the quotes",
    "max_iter=3": "mean trainer.max_iter?",
    "dataloader_train=gr1 num_frames=3": "mean dataloader_train.dataset.num_frames?",
    "+trainer.foo=1": "trainer.foo",
    "+foo.bar=1": "Unknown key foo",
    "optimizer.lrr=3": "mean lr?",
    "+optimizer.foo=1": "optimizer.foo",
    "+optimizer.foo=1 +optimizer.bar=2": "Unknown key optimizer.bar",  # all that a target does not take
    "experiment=cleared_exp dataloader_train=gr1": "/clear/dataloader_train",
    "experiment=chooses_cleared": "'override /dataloader_train'",
    "optimizer=loose optimizer.eps=1": "+optimizer.eps=VALUE",
    "~optimizer.foo": "optimizer.foo",
    "experiment=base_exp model.config.extra={channels:1}": "model.config.extra",
    "model.config.rank=1": "model=nested|small",
    "experiment=base_exp +model.config.lora=1": "model.config.lora",
    "optimizer.betas.2=1": "optimizer.betas is a list",
    "optimizer.lr.x=1": "optimizer.lr is a value",
    "trainer.max_iter=abc": "trainer.max_iter='abc'",
    "job.name=null": "job.name=null",
    "trainer.ddp=[1]": "trainer.ddp",
    "experiment=base_exp model.config.rank=0": "model.config.rank=0",
    "experiment=base_exp model.config.net.channels=0": "model.config.net: 'channels'",
    "trainer.profiling.enable_profiling=true": "trainer.profiling.profile_freq=1",
    "optimizer.lr=2**-14.5": "optimizer.lr='2**-14.5' is text",
    "dataloader_train=mock dataloader_train.batch_size=two": "dataloader_train.batch_size='two' is text",
    "dataloader_train=mock dataloader_train.shuffle=no": "dataloader_train.shuffle='no' is text",
    "experiment=missing_exp": "dataloader_train.dataset.root=VALUE\n  model.config=VALUE",
    "~trainer.seed": "trainer.seed=VALUE",
    "~trainer.max_iter": "a field of TrainerConfig cannot be removed. Set it: trainer.max_iter=VALUE, its default is",
    "~optimizer.lr=7": "~optimizer.lr alone",
    "job.name=": "job.name=''",
    "optimizer.betas=0.1,0.2": "'key=[a,b]'",
    "job.name=(x)": "job.name=(x)",
    "hydra.run.dir=x": "hydra.run.dir=x",
    "optimizer@x=adamw": "'@'",
    "experiment=no_effect_exp": "checkpoint.jit.enabled",
    "checkpoint.save_to_object_store.enabled=true": "IMAGINAIRE_OUTPUT_ROOT=s3://",
    "checkpoint.load_training_state=true": "checkpoint.load_training_state=True applies to load_path, which is empty",
    "checkpoint.load_ema_to_reg=true": "checkpoint.load_ema_to_reg=True applies to load_path",
    "checkpoint.load_training_state=true checkpoint.only_load_scheduler_state=true": "exclude each other",
    "experiment=wrong_key_exp": "experiment 'wrong_key_exp': Unknown key trainer.max_itr",
    "experiment=wrong_type_exp": "experiment 'wrong_type_exp': trainer.max_iter='abc'",
    "experiment=wrong_argument_exp": "optimizer.lrr",
    "experiment=wrong_group_exp": "'optimzer'",
    "experiment=wrong_twice_exp": "experiment 'wrong_twice_exp': optimizer",
    "experiment=wrong_parent_exp": "mean base_exp",
    "experiment=no_package_exp": "no_package_exp",
    "optimizer.lr=${nothing.here}": "optimizer.lr=${nothing.here}",
    "optimizer._target_=parts.optimzer": "mean optimizer?",
    "model={a:1}": "model is {'a': 1}",
    "trainer.callbacks.sped.width=1": "mean speed?",
    "trainer.callbacks=speed": "trainer.callbacks",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_message(config: str, overrides: str) -> None:
    assert MISTAKES[overrides] in message(config, *overrides.split())


OF_SAVED = [  # override, text of the file and what it becomes, what the message names
    ("experiment=base_exp", "", "", "experiment"),
    ("optimizer=adamw", "", "", "optimizer is 'adamw'"),
    ("callbacks=[basic]", "", "", "callbacks"),
    ("model.config.rnk=3", "", "", "model.config.rnk"),
    ("trainer.seed=1", "max_iter: 400", "max_iter: abc", "trainer.max_iter='abc'"),
    ("trainer.seed=1", "max_iter: 400", "max_itr: 400", "trainer.max_itr"),
    ("trainer.seed=1", "_target_: parts.Model", "_target_: parts.Modell", "mean Model,"),
    ("trainer.seed=1", "max_iter: 400", "max_iter: [", "YAML"),
    ("trainer.seed=1", "parts.ModelConfig", "partz.ModelConfig", "'partz'"),
]


@pytest.mark.parametrize(("override", "old", "new", "named"), OF_SAVED)
def test_a_mistake_on_a_saved_configuration(saved: str, override: str, old: str, new: str, named: str) -> None:
    content = Path(saved).read_text()
    assert old in content
    Path(saved).write_text(content.replace(old, new))
    assert named in message(saved, override)


FILES = [  # of a config, its text, what the message names
    ("config.py", "x = 1\nimport no_such_package\n", "config.py:2"),
    ("config.py", "from megatron.core import parallel_state\n", "pip install -e '.[compat]'"),
    ("config.py", "x = (1\n", "config.py, line 1"),
    ("config.py", "x = 1\n", "make_config()"),
    ("config.py", "def make_config():\n    return {}\n", "{}"),
    ("config.py", "def make_config():\n    y = {}\n    return y['a']\n", "KeyError: 'a'"),
    (
        "config.py",
        "from imaginaire.config import Config\ndef make_config(): Config().trainer.max_iter = -1\n",
        "max_iter",
    ),
    ("torch.py", "", "Rename the file"),
    ("other.yaml", "- 1\n- 2\n", "other.yaml"),
    ("other.yaml", "services: {a: 1}\n", "services"),
    ("config.txt", "", "config.txt"),
]


@pytest.mark.parametrize(("name", "text", "named"), FILES)
def test_a_config_file_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, named: str
) -> None:
    for module in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    (tmp_path / name).write_text(text)
    found = message(str(tmp_path / name))
    assert named in found and str(tmp_path / name) in found


def test_a_config_path_that_does_not_exist(config: str, tmp_path: Path) -> None:
    assert f"mean {config}" in message(str(tmp_path / "confg.py"))
    assert "no/config.py" in message("no/config.py") and "--config" in message("")
