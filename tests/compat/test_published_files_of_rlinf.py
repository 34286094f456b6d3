# SPDX-License-Identifier: Apache-2.0
"""Configurations as wm_vla_rl and RLinf publish them: none of these files is ours, and none is edited."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from cosmos_predict2.compat.fields import Translation
from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.files import load_embodiment, require_known
from cosmos_predict2.configs.rl.experiment import policy_simulators
from imaginaire.errors import ConfigError
from tests.compat.recipes import value_of
from tests.guides import write_published

OFT, PI05 = "cosmos_libero_spatial_grpo_openvlaoft", "cosmos_libero_spatial_grpo_openpi05"
WAN, SIMULATED = "wan_libero_spatial_grpo_openvlaoft", "libero_10_grpo_openpi_pi05"
MODEL_DIR = "models/Cosmos-Predict2.5-LIBERO-Spatial"
GUIDANCE = "guidance = 7 changes nothing"


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    return write_published(tmp_path / "wm_vla_rl/config", "wm_vla_rl")


@pytest.fixture
def today(tmp_path: Path) -> Path:
    """RLinf's, with the world model of the guide among its environments."""
    folder = write_published(tmp_path / "rlinf/config", "RLinf")
    guide = write_published(tmp_path / "guide", "wm_vla_rl")
    shutil.copy(guide / "env/cosmos_libero_spatial.yaml", folder / "env")
    return folder


def translated(folder: Path, name: str, *overrides: str) -> Translation:
    return translate_embodiment(load_embodiment(str(folder), name, overrides), 4)


@pytest.mark.parametrize("name", [OFT, PI05])
def test_the_files_of_the_guide_translate_as_they_are(name: str, guide: Path) -> None:
    found = translated(guide, name)
    assert f"{MODEL_DIR}/libero-spatial-2b-19k.pt" in value_of(found, "env.imagination")
    assert f"{MODEL_DIR}/tokenizer/tokenizer.pth" in value_of(found, "env.imagination")
    assert f"{MODEL_DIR}/resnet_rm.pth" in value_of(found, "env.reward")
    assert f"{MODEL_DIR}/dataset/" in value_of(found, "env.starts")
    assert value_of(found, "env.offload") == '"phase"'
    leftover = "belong to another environment, OpenSora: env.train.opensora_wm_hf_ckpt_path"
    expected = [GUIDANCE] if name == OFT else [leftover, GUIDANCE]
    assert len(found.warnings) == len(expected)
    assert all(part in warning for part, warning in zip(expected, found.warnings, strict=True))


def test_weights_that_are_named_twice_must_be_the_same(guide: Path) -> None:
    found = translated(guide, PI05, f"env.train.cosmos_model_dir={MODEL_DIR}")  # as our page advised
    assert f"{MODEL_DIR}/libero-spatial-2b-19k.pt" in value_of(found, "env.imagination")
    with pytest.raises(ConfigError, match=r"env.train.cosmos_ckpt_path = .*: leave one of them out"):
        translated(guide, PI05, "env.train.cosmos_model_dir=models/other")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (WAN, ('"wan_wm": there is no Wan environment here', "experiment=vla_grpo_openvla_oft_libero_spatial ")),
        (SIMULATED, ('env.train.env_type = "libero": ', "experiment=vla_grpo_pi05_libero_10 ")),
    ],
)
def test_what_is_not_here_is_said_before_any_field(name: str, told: tuple[str, str], today: Path) -> None:
    for more in ((), ("+env.train.no_such_field=1",), ("algorithm.adv_type=gae", "actor.model.model_type=gr00t")):
        with pytest.raises(ConfigError) as refused:
            translated(today, name, *more)
        for text in told:
            here = text.replace("pi05", "openvla_oft") if "model_type" in str(more) else text
            assert here in str(refused.value) and "no such field" not in str(refused.value)
        assert ('no policy "gr00t"' in str(refused.value)) == ("model_type" in str(more))


def test_the_experiments_that_are_named_instead_exist() -> None:
    known = policy_simulators.EXPERIMENTS
    suites = (*(f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90", "130")), "push_puck", None)
    policies = ("openvla", "openvla_oft", "openpi", "toy", "gr00t", None)
    for kind, suite, policy in product(("libero", "behavior", "opensora_wm", "wan_wm"), suites, policies):
        fields = {"env.train.env_type": kind, "env.train.task_suite_name": suite, "actor.model.model_type": policy}
        with pytest.raises(ConfigError) as refused:
            require_known(fields.get)
        assert str(refused.value).partition("experiment=")[2].partition(" ")[0] in known


def test_algorithm_and_policy_come_before_other_fields(guide: Path) -> None:
    for change, told in (
        ("algorithm.adv_type=gae", "algorithm.adv_type"),
        ("algorithm.loss_type=actor_critic", "algorithm.loss_type"),
        ("actor.model.model_type=gr00t", "no policy is called so"),
    ):
        with pytest.raises(ConfigError, match=told):
            translated(guide, OFT, "+runner.no_such_field=1", change)


def test_fields_are_read_where_rlinf_has_them_today(today: Path) -> None:
    for name, experiment, episodes in ((WAN, "openvla_oft", 16 * 64), (SIMULATED, "pi05", 8 * 64)):
        lines = (today / f"{name}.yaml").read_text().splitlines()
        own = [line if "@env.train" not in line else "- env/cosmos_libero_spatial@env.train" for line in lines]
        (today / "mine.yaml").write_text("\n".join(own))
        steps = ("env.train.max_episode_steps=256", "env.train.max_steps_per_rollout_epoch=256")
        words = (f"env.train.cosmos_model_dir={MODEL_DIR}", "actor.model.num_action_chunks=8", *steps)
        found = translated(today, "mine", *words)
        assert value_of(found, "experiment") == f"tiny_vla_grpo_{experiment}_world_model"
        assert value_of(found, "dataloader_train.batch_size") == str(episodes // 8 // 4)  # groups of each of 4 GPUs
        offload = "phase" if name == WAN else "never"
        assert value_of(found, "env.offload") == f'"{offload}"'
        leftovers = [warning for warning in found.warnings if "belong to another environment" in warning]
        assert len(leftovers) == (name == WAN)
        assert all(
            ", Wan: " in one and "wan_wm_hf_ckpt_path" in one and "num_inference_steps" in one for one in leftovers
        )
        if name == WAN:
            assert value_of(found, "policy.temperature") == "1.6"  # of rollout.sampling_params


def test_two_places_of_a_field_must_agree(guide: Path) -> None:
    assert translated(guide, OFT, "+env.train.rollout_epoch=16") == translated(guide, OFT)
    with pytest.raises(ConfigError, match=r"env.train.rollout_epoch = 8 must be algorithm.rollout_epoch = 16"):
        translated(guide, OFT, "+env.train.rollout_epoch=8")
    with pytest.raises(ConfigError, match=r'env.train.rollout_epoch = "many", but it is a whole number'):
        translated(guide, OFT, "+env.train.rollout_epoch=many")


def test_a_field_without_effect_is_reported_once_where_it_is_not_as_published(guide: Path) -> None:
    changes = ("env.train.world_model_cfg.condition_frame_length=8", "algorithm.gamma=0.9")
    (told, _) = translated(guide, OFT, *changes, "actor.fsdp_config.amp.enabled=true").warnings
    assert told.startswith("not the published value, and without effect here: ")
    assert "condition_frame_length = 8: one frame conditions the model" in told and "algorithm.gamma = 0.9" in told
    assert "actor.fsdp_config.amp = " in told and "value_clip" not in told
