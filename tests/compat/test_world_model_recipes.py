# SPDX-License-Identifier: Apache-2.0
"""Recipes of Cosmos-RL: fields set what their table says, the recipes here compose, wrong ones are refused by name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.compat.cosmos_rl import diffusion_nft, policy_fields, world_model_fields
from cosmos_predict2.compat.cosmos_rl.diffusion_nft import translate_nft
from cosmos_predict2.compat.cosmos_rl.world_models import translate_wfm
from cosmos_predict2.compat.fields import Table, read_fields
from cosmos_predict2.compat.rlinf import fields as rlinf_fields
from imaginaire.config.compose import compose
from imaginaire.config.registry import load_toml
from imaginaire.errors import ConfigError
from scripts.cosmos_rl import translate
from tests.compat.recipes import BASE, ROOT, edited, value_of

TINY = load_toml(str(ROOT / "configs/wfm/tiny_grpo_mock_data.toml"))
WFM = sorted((ROOT / "configs/wfm").glob("*.toml"))


NFT_FILE = "configs/cosmos-predict2-5/cosmos-predict2-5-2b-720-nft.toml"
NFT = load_toml(str(ROOT / NFT_FILE))


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[] if "tiny" in path.stem else [pytest.mark.slow]) for path in WFM]
)
def test_the_published_recipes_translate_and_compose(path: Path) -> None:
    translation = translate(load_toml(str(path)))
    assert translation.overrides[0].startswith("experiment=predict2p5_")
    num_gpus = {"tiny": 1, "2b_480": 8, "2b_720": 256, "14b_720": 1024}
    assert translation.num_gpus == next(number for name, number in num_gpus.items() if name in path.stem)
    config = compose(BASE, translation.overrides)
    rl, recipe = config.model.config.rl, load_toml(str(path))
    assert rl.transition == "churn" and rl.ratio_normalisation == "cosmos_rl" and rl.advantage.norm == "cosmos_rl"
    assert rl.sample_steps == recipe["model"].get("rl", {}).get("sample_steps", 10)
    levels = config.model.config.pipe_config.timestamps
    assert (levels.t_min, levels.t_max, levels.order) == (0.01, 200.0, 7.0)
    assert rl.ranks_per_group == (1 if "tiny" in path.stem else 8)  # each has one video of a group
    assert config.trainer.grad_accum_iter == len(rl.train_on) * rl.num_rollout // rl.ranks_per_group


@pytest.mark.slow
def test_a_recipe_without_rewards_is_post_training() -> None:
    translation = translate_wfm(edited(TINY, model__rl__enabled=False, model__min_num_conditional_frames=1))
    config = compose(BASE, translation.overrides)
    assert "rl" not in config.model.config and config.trainer.grad_accum_iter == 1
    assert config.model.config.loss_scale == 10.0


CHANGES = [  # a field of a recipe, and what it sets here
    (dict(model__rl__kl_beta=0.5), "model.config.rl.kl_beta", "0.5"),
    (dict(model__rl__s_t_max="50.0"), "model.config.rl.s_t_max", "50.0"),
    (dict(model__rl__num_rollout=2), "model.config.rl.s_t_max", "inf"),
    (dict(model__rectified_flow_t_scaling_factor=500.0), "model.config.pipe_config.flow.timestep_scale", "0.5"),
    (dict(model__sigma_conditional=1.0), "model.config.pipe_config.flow.conditional_frame_timestep", "500.0"),
    (dict(dataloader_train__video_dataloader__dataloader__batch_size=3), "trainer.grad_accum_iter", "12"),
    (dict(model__use_rf_ckpts=True), "model.config.pipe_config.flow.conditional_frame_timestep", "-1.0"),
    (dict(model__loss_scale=3.0), "model.config.rl.loss_scale", "3.0"),
    (dict(model__fsdp_shard_size=4), "model.config.fsdp_shard_size", "4"),
    (dict(model__rl__data_beta=0.1), "experiment", "predict2p5_2b_ddrl"),
    (dict(checkpoint__type="distributed"), "ckpt_type", "dcp"),
    (dict(checkpoint__load_path="me/weights", checkpoint__model_id="a.pt"), "dit_path", '"hf://me/weights/a.pt"'),
    (dict(checkpoint__load_path="runs/iter_000000010"), "checkpoint.load_path", '"runs/iter_000000010"'),
    (dict(model__sde__sigma_max=80), "model.config.pipe_config.timestamps.t_max", "80"),
    (dict(trainer__callbacks=[{"name": "manual_gc"}]), "trainer.callbacks.grad_clip", "null"),
    (dict(model__conditioner=[{"name": "text", "type": "text_attr", "dropout_rate": 0.1}]), "text.dropout_rate", "0.1"),
]


@pytest.mark.parametrize(("changes", "key", "value"), CHANGES, ids=lambda case: str(case)[:40])
def test_a_field_sets_what_the_table_says(changes: dict[str, Any], key: str, value: str) -> None:
    overrides = translate_wfm(edited(TINY, **changes)).overrides
    assert any(item.partition("=")[0].endswith(key) and item.partition("=")[2] == value for item in overrides)


def test_a_reward_of_the_service_is_asked_as_the_recipe_says() -> None:
    remote = {"enabled": True, "reward_fn": "cosmos_reason1", "scale": 2.0, "token": "secret"}
    rewards = {"remote_reward": remote, "fake_reward": {"enabled": False}}
    translation = translate_wfm(edited(TINY, model__rl__reward_config=rewards))
    node = value_of(translation, "model.config.rl.rewards.cosmos_reason1")
    assert 'reward:"cosmos_reason1"' in node and "scale:2.0" in node and "clip:[-5.0,5.0]" in node
    assert value_of(translation, "model.config.rl.rewards.dance_grpo") == "null"
    assert translation.environment == {"WFM_REWARD_TOKEN": "secret"}
    assert "secret" not in " ".join(translation.overrides)  # which are saved and printed
    both = {"remote_reward": remote, "fake_reward": {"enabled": True}}
    found = translate_wfm(edited(TINY, model__rl__reward_config=both))
    for name in ("cosmos_reason1", "fake_reward"):
        assert value_of(found, f"model.config.rl.rewards.{name}").endswith("weight:0.5}"), "both count alike"


WRONG: list[tuple[dict[str, Any], str]] = [  # a change of the tiny recipe, and what the error names
    (dict(model__rl__num_rollouts=4), "model.rl.num_rollout"),
    (dict(model__max_iter=4), "Did you mean trainer.max_iter"),
    (dict(model__rl__s_t_max="much"), "model.rl.s_t_max"),
    (dict(rl__num_rollout=4), "rl"),
    (dict(model__fsdp_shard_size="8"), "model.fsdp_shard_size"),
    (dict(model__fsdp_shard_size=0), "model.fsdp_shard_size"),
    (dict(model__rl=4), "[model.rl]"),
    (dict(model__rl__solver_option="2mid"), "model.rl.solver_option"),
    (dict(model__scaling="edm"), "model.scaling"),
    (dict(model__net__model_channels=1024), "model.net.model_channels"),
    (dict(model__rl__reward_config__adv_clip_min=-2.0), "adv_clip_min"),
    (dict(model__rl__reward_config={"remote_reward": {"enabled": False}}), "remote_reward.enabled"),
    (dict(model__rl__reward_config__aesthetic={"enabled": True}), "aesthetic.enabled"),
    (dict(model__conditioner=[{"name": "actions"}]), "model.conditioner"),
    (dict(model__conditioner={"name": "text"}), "[[model.conditioner]]"),
    (dict(model__conditioner=[{"name": "text", "type": "remap_key"}]), "text_attr"),
    (dict(trainer__callbacks=[{"name": "grad_clipp"}]), "grad_clip"),
    (dict(trainer__callbacks=[{"name": "grad_clip", "args": {"clip_nrom": 1.0}}]), "clip_norm"),
    (dict(trainer__callbacks=[{"name": "grad_clip", "clip_norm": 1.0}]), "args.clip_norm"),
    (dict(trainer__grad_accum_iter=2), "trainer.grad_accum_iter"),
    (dict(trainer__use_s3=True), "IMAGINAIRE_OUTPUT_ROOT"),
    (dict(model_parallel__tensor_model_parallel_size=2), "model_parallel.tensor_model_parallel_size"),
    (dict(checkpoint__load_path="Wan-AI/Wan2.1-T2V-1.3B"), "not trained here yet"),
    (dict(checkpoint__model_id="a.pt"), "checkpoint.load_path"),
    (dict(checkpoint__save_to_object_store={"enabled": True}), "IMAGINAIRE_OUTPUT_ROOT"),
    (dict(dataloader_train__type="remote"), "dataloader_train.type"),
    (dict(dataloader_train__type="local"), "dataset_dir"),
    (dict(dataloader_train__image_dataloader={"ratio": 1}), "dataloader_train.image_dataloader.ratio"),
    (dict(dataloader_train__video_dataloader__dataloader={"webdataset": True}), "dataset_name"),
    (dict(job={"project": "p"}), "job.name"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=lambda case: str(case)[:40])
def test_a_wrong_recipe_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        translate_wfm(edited(TINY, **changes))


@pytest.mark.slow
def test_shards_are_read_where_a_recipe_names_them() -> None:
    shards = {"webdataset": True, "dataset": {"dataset_name": "s3://bucket/set/{00000..00127}.tar"}}
    config = compose(BASE, translate_wfm(edited(TINY, dataloader_train__video_dataloader__dataloader=shards)).overrides)
    assert config.dataloader_train.dataset.shards == ["s3://bucket/set/{00000..00127}.tar"]
    assert config.dataloader_train.dataset.video_size == [432, 768]


@pytest.mark.slow
def test_the_recipe_of_nft_composes() -> None:
    config = compose(BASE, translate(load_toml(NFT_FILE)).overrides)
    rl = config.model.config.rl
    assert (rl.objective, rl.num_rollout, rl.sample_steps, rl.num_timesteps) == ("nft", 12, 10, 10)
    assert (config.dataloader_train.batch_size, config.trainer.grad_accum_iter) == (6, 120)
    assert config.model.config.lora_rank == 32 and config.dataloader_train.dataset.video_size == [512, 512]


def test_a_field_of_nft_sets_what_the_table_says() -> None:
    rewards = [{"name": "a", "clip_min": -1.0, "weight": 2.0}]
    changes = dict(policy__diffusers__sample__guidance_scale=4.5, train__train_policy__mini_batch=12)
    changes |= dict(policy__diffusers__train_frames=41, policy__lora__target_modules=["to_v", "ff.net.2"])
    found = translate_nft(edited(NFT, **changes, train__train_policy__remote_reward__reward_fns=rewards))
    assert value_of(found, "rl.guidance") == "3.5", "cond + g (cond - uncond)"
    assert (value_of(found, "rl.rollout_batch"), value_of(found, "trainer.grad_accum_iter")) == ("12", "60")
    assert value_of(found, "pipe_config.state_t") == "11", "latent frames, of 41 pictures"
    assert value_of(found, "lora_target_modules") == '"v_proj,mlp.layer2"'
    node = value_of(found, "rl.rewards.a")
    assert "clip:[-1.0,5.0]" in node and node.endswith("weight:2.0}")


WRONG_NFT: list[tuple[dict[str, Any], str]] = [
    (dict(policy__model_name_or_path="Wan-AI/Wan2.1-T2V-1.3B"), "not trained here yet"),
    (dict(policy__model_name_or_path="nvidia/Cosmos-Predict2.5-7B"), "nvidia/Cosmos-Predict2.5-2B"),
    (dict(policy__model_revision="main"), "policy.model_revision"),
    (dict(policy__lora__target_modules=["to_v", "to_x"]), "to_x"),
    (dict(policy__diffusers__nft_betta=1.0), "nft_beta"),
    (dict(policy__parallelism__tp_size=2), "policy.parallelism.tp_size"),
    (dict(policy__parallelism__dp_shard_size=0), "policy.parallelism.dp_shard_size = 0"),
    (dict(train__train_policy__mini_batch=0), "train.train_policy.mini_batch = 0"),
    (dict(rollout__n_generation=0), "rollout.n_generation = 0"),
    (dict(train__train_batch_per_replica=100), "train.train_batch_per_replica"),
    (dict(train__train_policy__advantage_low=-1.0), "advantage_low"),
    (dict(train__train_policy__dataset={"name": "picscore"}), "picscore"),
    (dict(train__train_policy__trainer_type="grpo"), "trainer_type"),
    (dict(train__train_policy__remote_reward__reward_fns=[{"name": "a", "wieght": 1.0}]), "weight"),
    (dict(validation={"enable": True}), "validation.enable"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG_NFT, ids=lambda case: str(case)[:40])
def test_a_wrong_recipe_of_nft_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        translate_nft(edited(NFT, **changes))


def test_fields_of_published_files_without_effect_there_are_named_in_warnings() -> None:
    callbacks = [{"name": "heart_beat", "step_size": 1}, {"name": "grad_clip"}]
    changes = edited(TINY, model_parallel__pipeline_parallel_size=1, trainer__callbacks=callbacks)
    warnings = " ".join(translate_wfm(changes).warnings)
    assert "model_parallel.pipeline_parallel_size" in warnings and "heart_beat.step_size" in warnings


@pytest.mark.parametrize("schema", [world_model_fields, diffusion_nft, policy_fields, rlinf_fields])
def test_each_row_accepts_its_default_and_gives_its_reason(schema: Any) -> None:
    table: Table = schema.FIELDS
    for path, row in table.items():
        if (row.key and not row.is_set_if_given and row.above is None) or row.values:
            read_fields(edited({}, **{path.replace(".", "__"): row.default}), table)
        assert bool(row.values) == bool(row.cure) and (row.usual is None or row.unused)


def test_what_given_rows_set_composes() -> None:
    """To rows are in every composition of a recipe; these are in few."""
    rows = world_model_fields.FIELDS.values()
    given = [row.key for row in rows if row.is_set_if_given and ".tokenizer." not in row.key]
    config = compose(BASE, ["experiment=predict2p5_2b_flow_grpo"])
    for key in given:
        value: Any = config
        for name in key.split("."):
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
