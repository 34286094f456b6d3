# SPDX-License-Identifier: Apache-2.0
"""Modules that moved have their old names; overrides, saved configurations and experiments may have the old keys."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import cosmos_predict2  # noqa: F401  (adds its own)
from cosmos_predict2.renamed import KEYS
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import to_yaml
from imaginaire.config.nodes import move_keys
from imaginaire.errors import ConfigError
from imaginaire.renamed import RENAMED

BASE = "cosmos_predict2/configs/base/config.py"
EXPERIMENT = "experiment=tiny_vla_grpo_simulator"
OF_RL = {old: new for old, new in KEYS.items() if ".rl." in new}
VALUES = dict(zip(OF_RL, (0, 0.5, 0.4, 0.3, 2.5, 0.125), strict=True))


def of(config: Any) -> dict[str, Any]:
    return {key: OmegaConf.select(config.model, new.removeprefix("model.")) for key, new in OF_RL.items()}


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    """A config file with an experiment that has every old key."""
    path = tmp_path / "with_old_keys.py"
    path.write_text(f"""
from omegaconf import OmegaConf
from cosmos_predict2.configs.base.config import make_config as base_config
from imaginaire.config.compose import register_experiment

def make_config():
    config, tree = base_config(), OmegaConf.create({{"defaults": ["/experiment/tiny_vla_grpo_simulator", "_self_"]}})
    for key, value in {VALUES!r}.items():
        OmegaConf.update(tree, key, value, force_add=True)
    register_experiment("with_old_keys", OmegaConf.to_container(tree))
    return config
""")
    return str(path)


@pytest.mark.parametrize("sign", ["", "++"])
def test_overrides_may_have_the_old_keys(sign: str) -> None:
    assert of(compose(BASE, [EXPERIMENT, *(f"{sign}{key}={value}" for key, value in VALUES.items())])) == VALUES


def test_an_experiment_may_have_the_old_keys(experiment: str) -> None:
    assert of(compose(experiment, ["experiment=with_old_keys"])) == VALUES


def test_a_saved_configuration_may_have_the_old_keys(tmp_path: Path) -> None:
    tree = OmegaConf.create(to_yaml(compose(BASE, [EXPERIMENT])))
    for key, new in OF_RL.items():
        where, _, name = new.rpartition(".")
        del OmegaConf.select(tree, where)[name]
        OmegaConf.update(tree, key, VALUES[key], force_add=True)
    OmegaConf.save(tree, tmp_path / "config.yaml")
    assert of(compose(str(tmp_path / "config.yaml"))) == VALUES


def test_an_old_key_with_a_wrong_value_names_the_present_one() -> None:
    with pytest.raises(ConfigError, match="clip_ratio=-1"):
        compose(BASE, [EXPERIMENT, "model.config.rl.loss.clip_low=-1"])


def test_only_what_is_there_is_moved() -> None:
    for tree in ({"model": {"config": {"rl": None}}}, {"model": {"config": {"rl": {"loss": {"kl_kind": "k1"}}}}}, {}):
        one = DictConfig(tree)
        move_keys(one)
        assert one == tree
    both = DictConfig({"model": {"config": {"rl": {"kl_beta": 1, "loss": {"kl_beta": 2}}}}})
    move_keys(both)
    assert both == {"model": {"config": {"rl": {"kl_beta": 1, "loss": {}}}}}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_gives_the_very_same_module(old: str) -> None:
    assert import_module(old) is import_module(RENAMED[old])


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("cosmos_predict2.pipelines.context_parallel", "follow"),
        ("cosmos_predict2.pipelines.flags", "ActionModel"),
        ("cosmos_predict2.rl.policies.weights", "load_weights"),
        ("cosmos_predict2.text.prompts", "DEFAULT_NEGATIVE_PROMPT"),
    ],
)
def test_what_pages_and_examples_imported_is_still_there(old: str, name: str) -> None:
    assert hasattr(import_module(old), name)


def test_no_second_copy_is_loaded_below_a_package_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imaginaire.callbacks", "imaginaire.callbacks.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from imaginaire.callbacks.base import Callback
    from imaginaire.training.callbacks.base import Callback as same

    assert Callback is same


def test_conditioning_frames_per_view_are_those_of_one_view() -> None:
    keys = [f"model.config.pipe_config.{end}_num_conditional_frames_per_view" for end in ("min", "max")]
    config = compose(BASE, ["model=predict2_multiview_fsdp_tiny", f"{keys[0]}=1", f"{keys[1]}=2"])
    pipe = config.model.config.pipe_config
    assert (pipe.min_num_conditional_frames, pipe.max_num_conditional_frames) == (1, 2)
