# SPDX-License-Identifier: Apache-2.0
"""Configurations of RLinf: the files here translate, fields set what their table says, others are refused by name."""

import copy
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from cosmos_predict2.compat.fields import Translation, read_fields
from cosmos_predict2.compat.rlinf import configurations, policies
from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.fields import FIELDS, OPENVLA_OPTIONS, PI05_OPTIONS, PLACE
from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError
from tests.compat.recipes import BASE, ROOT, value_of

CONFIGS = str(ROOT / "examples/embodiment/config")
OFT, PI05 = "cosmos_libero_spatial_grpo_openvlaoft", "cosmos_libero_spatial_grpo_openpi05"
FOLDER = ("libero-spatial-2b-19k.pt", "resnet_rm.pth", "tokenizer/tokenizer.pth", "dataset/seed_0_traj_0.npy")


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A folder with the files of a world model, which nothing opens."""
    for name in FOLDER:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return str(tmp_path)


def translated(name: str, *overrides: str, gpus: int = 0) -> Translation:
    return translate_embodiment(load_embodiment(CONFIGS, name, overrides), gpus)


def weights(folder: str) -> list[str]:
    """Overrides: the policy's weights."""
    return [f"actor.model.model_path={folder}", f"rollout.model.model_path={folder}"]


@pytest.mark.parametrize(("name", "episodes", "steps"), [(OFT, 1024, 4), (PI05, 512, 8)])
def test_the_published_numbers_of_an_epoch(name: str, episodes: int, steps: int) -> None:
    """An episode has 32 decisions, and each of 4 GPUs trains on parts of 32 or 128 of them."""
    found = translated(name, gpus=4)
    assert found.num_gpus == 4 and not read_fields(load_embodiment(CONFIGS, name), FIELDS)[1]
    assert value_of(found, "dataloader_train.batch_size") == str(episodes // 8 // 4)
    assert value_of(found, "rl.minibatches") == value_of(found, "trainer.logging_iter") == str(steps)
    assert value_of(found, "rl.micro_batches") == str(episodes * 32 // steps // 4 // (32 if name == OFT else 128))
    halved = translated(name, "env.train.world_model_cfg.cosmos.action_scaler=10", gpus=4)
    assert 'action_transform:"controller:10x7"' in value_of(halved, "env.imagination")
    judged = translated(name, "runner.val_check_interval=1", "env.eval.init_params.camera_widths=320", gpus=4)
    assert "height:256,width:320" in " ".join(judged.overrides)


@pytest.mark.slow
def test_the_published_openvla_oft_composes(model_dir: str) -> None:
    translation = translated(OFT, *weights(model_dir), f"env.train.cosmos_model_dir={model_dir}", gpus=4)
    assert translation.num_gpus == 4 and any("guidance = 7" in warning for warning in translation.warnings)
    config = compose(BASE, translation.overrides)
    policy, env, rl = config.model.config.policy, config.model.config.env, config.model.config.rl
    assert (policy.variant, policy.temperature, policy.action_chunk, policy.action_dim) == ("oft", 1.6, 8, 7)
    assert (policy.unnorm_key, policy.max_tokens) == ("libero_130_no_noops_trajall", 128)
    assert policy.center_crop and not policy.use_proprio and policy.path == model_dir and policy.lora_rank == 0
    assert config.model.config.precision == "bfloat16" and config.model.config.recompute
    assert config.model.config.fsdp_shard_size == -1 and config.trainer.distributed_parallelism == "fsdp"
    assert config.model.config.refinement is None
    assert (env.num_envs, env.max_steps, env.batch_size, env.offload) == (16, 256, 16, "phase")
    assert env.imagination.dit_path == f"{model_dir}/libero-spatial-2b-19k.pt"
    assert env.imagination.action_transform == "controller:20x7" and env.imagination.chunk_size == 12
    assert env.starts.path == f"{model_dir}/dataset/" and list(env.starts.size) == [256, 320]
    assert env.reward.path == f"{model_dir}/resnet_rm.pth" and env.reward.rounded
    assert env.scoring.use_rel_reward and env.scoring.reward_coef == 5.0 and env.scoring.terminate_on_success
    assert env.sampling.num_steps == 10 and "final_evaluation" not in env.sampling
    assert (rl.group_size, rl.execute, rl.minibatches, rl.updates) == (8, 8, 4, 1)
    assert (rl.lower_bound, rl.upper_bound) == (0.5, 4.5)
    assert (rl.clip_ratio, rl.clip_ratio_high, rl.dual_clip) == (0.2, 0.28, 3.0)
    assert (rl.loss.ratio_level, rl.loss.aggregation) == ("token_level", "token-mean")
    assert config.dataloader_train.batch_size == 32 and config.trainer.grad_accum_iter == 8192 // 4 // 32
    assert config.trainer.max_iter == 4000 and config.checkpoint.save_iter == 8 and not config.trainer.run_validation
    assert config.optimizer.lr == 2e-5 and config.trainer.callbacks.grad_clip.clip_norm == 1.0


@pytest.mark.slow
def test_the_published_pi05_composes_with_an_evaluation_in_libero(model_dir: str) -> None:
    overrides = [*weights(model_dir), f"env.train.cosmos_model_dir={model_dir}", "runner.val_check_interval=10"]
    config = compose(BASE, translated(PI05, *overrides, gpus=4).overrides)
    policy, eval_env = config.model.config.policy, config.model.config.eval_env
    assert (policy.action_chunk, policy.action_env_dim, policy.action_horizon, policy.num_steps) == (8, 7, 10, 3)
    assert (policy.noise_method, policy.noise_level, policy.num_images) == ("flow_sde", 0.5, 2)
    assert policy.train_expert_only and not policy.discrete_state_input
    assert config.model.config.fsdp_shard_size == 0 and config.model.config.precision == "float32"
    assert (eval_env.num_envs, eval_env.chunk, eval_env.make.suite, eval_env.make.max_steps) == (
        *(25, 8, "libero_spatial"),  # of 100, on each of four GPUs
        512,
    )
    assert (config.dataloader_val.batch_size, config.dataloader_val.dataset.num) == (25, 100)
    assert "split" not in eval_env and config.dataloader_val.dataset.num_tasks == 10


@pytest.mark.slow
def test_the_tiny_twin_composes() -> None:
    config = compose(BASE, translated("tiny_toy_grpo").overrides)
    assert config.job.path == "rlinf/embodied/tiny_toy_grpo" and config.model.config.refinement is None
    assert config.dataloader_train.batch_size == 12 and config.model.config.env.starts.tasks == ["push_puck"]


_CLASSIFIER = '{_target_:"cosmos_predict2.rl.rewards.resnet.ResnetReward",path:"setup.py",rounded:true}'
CHANGES = [  # an override of the tiny twin, and what it sets here
    ("+algorithm.kl_beta=0.5", "kl_beta", "0.5"),
    ("+algorithm.kl_penalty=low_var_kl", "loss.kl_kind", '"k3"'),
    ("+algorithm.kl_penalty=mse", "loss.kl_kind", '"k2"'),
    ("runner.max_epochs=2", "loss.kl_kind", '"k1"'),
    ("+algorithm.rewards_lower_bound=0.1", "rl.lower_bound", "null"),  # nothing is filtered
    ("algorithm.logprob_type=action_level", "loss.ratio_level", '"action_level"'),
    ("env.train.total_num_envs=96", "dataloader_train.batch_size", "24"),
    ("runner.max_epochs=5", "trainer.max_iter", "80"),
    ("+runner.max_steps=1", "trainer.max_iter", "16"),
    ("runner.val_check_interval=-1", "trainer.run_validation", "false"),
    ("runner.val_check_interval=2", "trainer.validation_iter", "32"),
    ("runner.save_interval=3", "checkpoint.save_iter", "48"),
    ("+actor.optim.adam_beta1=0.5", "optimizer.betas", "[0.5,0.999]"),
    ("+runner.resume_dir=runs/a", "checkpoint.load_training_state", "true"),
    ("+runner.ckpt_path=runs/a", "checkpoint.load_path", '"runs/a"'),
    ("runner.logger.logger_backends=[wandb]", "job.wandb_mode", '"online"'),
    ("actor.micro_batch_size=16", "rl.micro_batches", "3"),
    ("actor.model.model_path=clones/mine", "policy.path", '"clones/mine"'),
    ("+actor.model.noise=0.1", "policy.noise", "0.1"),
    ("env.train.env_type=toy", "experiment", "tiny_vla_grpo_simulator"),
    (
        "env.train.world_model_cfg.cosmos.num_steps=4",
        "env.sampling",
        '{_target_:"cosmos_predict2.world_model.options.SamplingOptions",num_steps:4}',
    ),
    (
        "env.train.world_model_cfg.cosmos.num_steps=1",
        "env.sampling",
        '{_target_:"cosmos_predict2.world_model.options.SamplingOptions",num_steps:1,final_evaluation:false}',
    ),
    (
        "+env.train.success_reward_threshold=0.5",
        "env.scoring",
        '{judge:"all",reward_on:"each",use_rel_reward:true,reward_coef:1.0,terminate_on_success:false,'
        "success_threshold:0.5}",
    ),
    ("+algorithm.eval_rollout_epoch=2", "dataloader_val.dataset.num", "100"),
    ("env.train.world_model_cfg.reward_model={type:ResnetRM,from_pretrained:setup.py}", "env.reward", _CLASSIFIER),
    ("env.enable_offload=false", "env.offload", '"never"'),
]
OF_POLICIES = [  # overrides of the tiny twin with a policy of these, and what they set here
    ("openvla_oft", "", "experiment", "tiny_vla_grpo_openvla_oft_world_model"),
    ("openvla_oft", "env.train.env_type=toy", "experiment", "tiny_vla_grpo_openvla_oft_simulator"),
    ("openvla_oft", "", "policy.variant", '"oft"'),
    ("openvla", "actor.model.num_action_chunks=1 env.train.world_model_cfg.chunk=1", "variant", '"autoregressive"'),
    ("openvla_oft", "", "fsdp_shard_size", "0"),  # one process has nothing to share
    ("openvla_oft", "+actor.fsdp_config.gradient_checkpointing=false", "recompute", "false"),
    ("openvla_oft", "+actor.fsdp_config.gradient_checkpointing=true", "recompute", "true"),
    ("openvla_oft", "+actor.model.is_lora=true", "policy.lora_rank", "32"),
    ("openvla_oft", "+actor.model.is_lora=true +actor.model.lora_rank=8", "policy.lora_rank", "8"),
    ("openvla_oft", "+actor.model.is_lora=true +actor.model.lora_path=adapters", "policy.lora_path", '"adapters"'),
    ("openvla_oft", "+algorithm.sampling_params.temperature_train=1.6", "policy.temperature", "1.6"),
    ("openvla_oft", "actor.model.precision=bf16", "rl.ratio_tolerance", "0.1"),
    ("openpi", "", "experiment", "tiny_vla_grpo_pi05_world_model"),
    ("openpi", "+actor.model.num_steps=3", "policy.num_steps", "3"),
    ("openpi", "+actor.model.openpi.noise_method=flow_noise", "policy.noise_method", '"flow_noise"'),
    ("openpi", "+actor.model.openpi.num_images_in_input=1", "policy.num_images", "1"),
]


_composed = functools.cache(hydra.compose)


def _changed(name: str, overrides: Sequence[str]) -> DictConfig:
    """As by `hydra.compose`, with files that are read once: overrides of values, not of groups."""
    tree = copy.deepcopy(_composed(name))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([*overrides]), tree)
    return tree


def with_policy(policy: str, changes: str) -> Translation:
    """The tiny twin with these overrides and, if one is named, a policy of this type."""
    own = [f"actor.model.model_type={policy}", "actor.model.model_path=tests"] if policy else []
    with mock.patch.object(hydra, "compose", _changed):
        return translated("tiny_toy_grpo", *own, *changes.split())


@pytest.mark.parametrize(
    ("policy", "changes", "key", "value"), [*(("", *row) for row in CHANGES), *OF_POLICIES], ids=lambda case: case[:40]
)
def test_a_field_sets_what_the_table_says(policy: str, changes: str, key: str, value: str) -> None:
    assert value_of(with_policy(policy, changes), key) == value


WRONG_OF_POLICIES = [  # overrides of the tiny twin with a policy of these, and what the error names
    ("openvla_oft", "actor.model.model_path=null", "actor.model.model_path = None"),
    ("openvla_oft", "+algorithm.sampling_params.top_k=50", "top_k = 50"),
    ("openvla_oft", "+actor.model.lora_path=adapters", "actor.model.is_lora"),
    ("openvla_oft", "+actor.model.openpi.noise_level=0.5", "actor.model.openpi.noise_level"),
    ("openvla_oft", "+actor.model.noise=0.5", "actor.model.noise"),
    ("openvla_oft", "+actor.model.use_film=true", "FiLM"),
    ("openvla_oft", "+actor.fsdp_config.sharding_strategy=no_shrad", "Did you mean no_shard"),
    ("openvla_oft", "+actor.fsdp_config.cpu_offload=true", "actor.fsdp_config.cpu_offload"),
    ("openvla", "", "decides on 1 action at once"),
    ("openpi", "+actor.model.openpi.config_name=pi0_libero", "Did you mean pi05_libero"),
    ("openpi", "+actor.model.openpi.action_chunk=5", "actor.model.openpi.action_chunk = 5"),
    ("openpi", "+actor.model.center_crop=true", "actor.model.center_crop"),
]


WRONG = [  # an override of the tiny twin, and what the error names
    ("algorithm.gruop_size=4", "Did you mean group_size?"),
    ("+algorithm.max_epochs=4", "Did you mean runner.max_epochs?"),
    ("+actor.optim.critic_lr=1", "actor.optim.critic_lr"),
    ("algorithm.group_size=1", "algorithm.group_size = 1"),
    ("algorithm.group_size=5", "no multiple of algorithm.group_size = 5"),
    ("env.train.group_size=4", "env.train.group_size = 4 must be algorithm.group_size"),
    ("env.train.total_num_envs=null", "env.train.total_num_envs"),
    ("env.train.max_steps_per_rollout_epoch=48", "env.train.max_steps_per_rollout_epoch"),
    ("env.train.world_model_cfg.chunk=8", "env.train.world_model_cfg.chunk = 8"),
    ("env.train.world_model_cfg.cosmos.chunk_size=8", "cosmos.chunk_size"),
    ("env.train.env_type=libero", "vla_grpo_openvla_oft_libero_spatial"),
    ("env.train.env_type=robotwin", "there is no such environment here"),
    ("env.train.env_type=cosmos", "Did you mean cosmos_wm?"),
    ("env.train.wm_env_type=libero", "env.train.cosmos_model_dir"),
    ("env.train.world_model_cfg.reward_model.type=ResnetRM", "reward_model.from_pretrained"),
    ("env.train.task_suite_name=push_pcuk", "Did you mean push_puck?"),
    ("env.train.cosmos_model_dir=models/mine", "the model that is shipped: tiny"),
    ("env.eval.env_type=robotwin", "runner.val_check_interval = -1"),
    ("env.eval.env_type=libero", "LIBERO"),
    ("+env.train.cosmos_ckpt_path=a.pt", "env.train.cosmos_ckpt_path"),
    ("+env.train.use_step_penalty=true", "env.train.use_step_penalty"),
    ("+env.train.use_fixed_reset_state_ids=false", "use_fixed_reset_state_ids"),
    ("actor.global_batch_size=50", "actor.global_batch_size = 50 does not divide the 192 decisions"),
    ("actor.micro_batch_size=32", "actor.micro_batch_size = 32"),
    ("actor.model.model_type=openvla_otf", "Did you mean openvla_oft"),
    ("actor.model.precision=bf8", "actor.model.precision"),
    ("+actor.fsdp_config.mixed_precision.buffer_dtype=bf16", "buffer_dtype = bf16 must be actor.model.precision"),
    ("+actor.model.is_lora=true", "actor.model.is_lora"),
    ("+actor.training_backend=megatron", "actor.training_backend"),
    ("+rollout.model.model_path=other", "rollout.model.model_path = other"),
    ("+runner.only_eval=true", "scripts.evaluate_policy"),
    ("runner.max_epochs=-1", "the run has no end"),
    ("runner.logger.logger_backends=[swanlab]", "swanlab"),
    ("+algorithm.adv_type=gae", "algorithm.adv_type"),
    ("+algorithm.kl_penalty=kll", "algorithm.kl_penalty"),
    ("cluster.num_nodes=2", "ray_utils/start_ray.sh"),
    ("+critic.use_critic_model=true", "critic.use_critic_model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "changes", "named"), [*(("", *row) for row in WRONG), *WRONG_OF_POLICIES], ids=lambda case: case[:40]
)
def test_a_wrong_field_is_refused_by_name(policy: str, changes: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        with_policy(policy, changes)


def test_a_file_that_is_missing_is_named_with_its_download(model_dir: str) -> None:
    overrides = ["actor.model.model_type=toy", "actor.fsdp_config.gradient_checkpointing=false"]
    (Path(model_dir) / "tokenizer/tokenizer.pth").unlink()
    (missing,) = translated(OFT, *overrides, f"env.train.cosmos_model_dir={model_dir}").missing
    assert f"tokenizer_path: {model_dir}/tokenizer/tokenizer.pth does not exist" in missing
    policy, *parts = translated(OFT).missing
    assert "download_checkpoints --embodied openvla_oft" in policy and len(parts) == 4
    assert all("download_checkpoints --embodied cosmos_libero_spatial" in part for part in parts)
    (policy,) = translated(OFT, *weights("no/such/folder"), f"env.train.cosmos_model_dir={model_dir}").missing[:1]
    assert "actor.model.model_path: no/such/folder does not exist" in policy
    with pytest.raises(ConfigError, match=r"cosmos_model_dir = None.*models/Cosmos-Predict2\.5-LIBERO-Spatial"):
        translated(OFT, *overrides, "env.train.cosmos_model_dir=null")


def test_a_repository_of_the_hub_is_fetched_first() -> None:
    overrides = ["actor.model.model_type=toy", "actor.fsdp_config.gradient_checkpointing=false"]
    with pytest.raises(ConfigError, match="download_checkpoints --embodied cosmos_libero_spatial"):
        translated(OFT, *overrides, "env.train.cosmos_model_dir=tayalmanan/cosmos-robotics")


def placed(gpus: int = 0, **places: Any) -> Translation:
    """The tiny twin with these places; the names of parts joined by underscores."""
    content = load_embodiment(CONFIGS, "tiny_toy_grpo")
    content["actor"]["micro_batch_size"] = 12
    content["cluster"]["component_placement"] = {name.replace("_", ","): value for name, value in places.items()}
    return translate_embodiment(content, gpus)


def test_places_apart_are_workers_of_ray() -> None:
    together = placed(4, actor_env_rollout="all")
    assert together.num_gpus == 4 and value_of(together, "env.num_envs") == "12"
    assert not any("model.config.rollout=" in item for item in together.overrides)
    apart = placed(4, actor=0, env_rollout="1-3")
    assert apart.num_gpus == 1 and "num_workers:3,num_gpus:1.0" in value_of(apart, "model.config.rollout")
    assert "num_workers:2,num_gpus:0.0" in value_of(placed(0, actor=0, env_rollout="1,2"), "model.config.rollout")
    several = placed(0, actor="0-1", env_rollout="2-5")  # workers of all ranks, which divide them
    assert "num_workers:4,num_gpus:0.0" in value_of(several, "model.config.rollout")


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (dict(actor=0), "does not place env, rollout"),
        (dict(actor=0, env=1, rollout=2), "env and rollout have one place"),
        (dict(actor="0-1", env_rollout="1-2"), "share all GPUs with actor"),
        (dict(actor="0-1", env_rollout="2-4"), "a multiple of actor's 2"),
        (dict(actor_env_rollout="half"), "'half'"),
        (dict(actor_envs_rollout="all"), "Did you mean env?"),
    ],
)
def test_places_that_do_not_fit_are_refused(places: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        placed(4, **places)


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("cosmos_libero_spatial_grpo_openvla", (), f"Did you mean {OFT}"),
        ("tiny_toy_grpo", ("actor.model.model_path=${a.b}",), "actor.model.model_path"),
        ("tiny_toy_grpo", ("runner.max_epochs=[",), "tiny_toy_grpo"),
        ("tiny_toy_grpo", ("actor.group_name=a",), "To add it write +actor.group_name=a"),
    ],
)
def test_files_and_overrides_that_cannot_be_read_are_explained(
    name: str, overrides: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_embodiment(CONFIGS, name, overrides)
    with pytest.raises(ConfigError, match="no such folder"):
        load_embodiment("/none/such", name)


def test_every_field_that_is_read_is_used() -> None:
    text = "".join(Path(str(module.__file__)).read_text() for module in (configurations, policies))
    elsewhere = (PLACE, "env.eval.", "env.train.init_params.", "actor.fsdp_config.mixed_precision.")
    for path, row in FIELDS.items():
        is_read = not (row.key or row.values or row.unused or row.place or row.reported)
        name = path.rpartition(".")[2]
        if is_read and not path.startswith(elsewhere) and name not in (*PI05_OPTIONS, *OPENVLA_OPTIONS):
            assert name in text, path
