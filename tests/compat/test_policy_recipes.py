# SPDX-License-Identifier: Apache-2.0
"""Recipes of Cosmos-RL for policies: what they set here, published files, and what is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.compat.cosmos_rl import policies, policy_fields
from cosmos_predict2.compat.cosmos_rl.policies import translate_vla
from cosmos_predict2.compat.fields import Translation
from cosmos_predict2.configs.rl.experiment import policy_simulators
from imaginaire.config import registry
from imaginaire.config.compose import compose, experiment_names
from imaginaire.config.registry import load_toml
from imaginaire.errors import ConfigError
from scripts import evaluate_policy
from scripts.cosmos_rl import translate
from tests.compat.recipes import BASE, ROOT, edited, value_of

OFT, PI05 = "configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r", "configs/pi05/pi05-{}-grpo-colocate"
COLOCATED, LIBERO, B1K = f"{OFT}-colocate.toml", f"{PI05.format('libero10')}.toml", f"{PI05.format('b1k')}.toml"
TINY = {
    "openvla": load_toml(str(ROOT / "configs/openvla-oft/tiny-openvla-oft-grpo.toml")),
    "pi05": load_toml(str(ROOT / "configs/pi05/tiny-pi05-grpo.toml")),
}


def changed(tiny: str = "openvla", **changes: Any) -> Translation:
    return translate_vla(edited(TINY[tiny], **changes))


@pytest.mark.parametrize(
    ("path", "experiment", "gpus", "groups", "parts", "steps"),
    [
        (COLOCATED, "vla_dapo_openvla_oft_libero_10", 8, 2, 16 * 64 // 16, 1024 * 500 * 8 // 128),
        (f"{OFT}.toml", "vla_dapo_openvla_oft_libero_10", 8, 2, 16 * 64 // 16, 1024 * 500 * 8 // 128),
        (LIBERO, "vla_dapo_pi05_libero_10", 8, 32, 256 * 52 // 16, 400 * 500 * 8 // (256 * 8)),
        (B1K, "vla_dapo_pi05_b1k", 4, 32, 256 * 200 // 16, 400 * 500 * 8 // (256 * 4)),
    ],
)
def test_the_published_numbers(path: str, experiment: str, gpus: int, groups: int, parts: int, steps: int) -> None:
    found = translate(load_toml(path))
    assert found.overrides[0] == f"experiment={experiment}"
    assert found.num_gpus == gpus
    assert value_of(found, "dataloader_train.batch_size") == str(groups)
    assert value_of(found, "rl.micro_batches") == value_of(found, "trainer.grad_accum_iter") == str(parts)
    assert value_of(found, "trainer.max_iter") == str(steps)
    assert value_of(found, "trainer.validate_at_start") == "true"
    apart = [item for item in found.overrides if item.startswith("model.config.rollout=")]
    assert all(f"num_workers:{gpus}," in item for item in apart) and len(apart) == (path == f"{OFT}.toml")


# Fields of the published files that ours leave out, since they do nothing there or here.
PUBLISHED: dict[str, Any] = dict(
    redis="12800",
    train__resume=False,
    train__optm_impl="fused",
    train__async_tp_enabled=False,
    train__compile=True,
    train__fsdp_reduce_dtype="float32",
    train__transfer_dtype="float32",
    train__fsdp_reshard_after_forward="default",
    train__sync_weight_interval=4,
    train__ckpt__save_mode="async",
    train__ckpt__export_safetensors=True,
    policy__model_max_length=4096,
    policy__parallelism__tp_size=1,
    policy__parallelism__cp_size=1,
    policy__parallelism__pp_size=1,
    policy__parallelism__dp_replicate_size=1,
    policy__parallelism__cp_rotate_method="allgather",
    train__train_policy__dataset__split="train",
    train__train_policy__dataset__test_size=496,
    train__train_policy__enable_dataset_cache=False,
    train__train_policy__dataloader_num_workers=4,
    train__train_policy__dataloader_prefetch_factor=4,
    train__train_policy__conversation_column_name="messages",
    train__train_policy__lower_bound_ratio=10.0,
    train__train_policy__mini_batch=16,
    train__train_policy__min_filter_prefix_tokens=1,
    train__train_policy__allowed_outdated_steps=3,
    rollout__gpu_memory_utilization=0.7,
    rollout__enable_chunked_prefill=True,
    rollout__quantization="none",
    rollout__max_response_length=1024,
    rollout__enforce_eager=False,
    rollout__batch_size=4,
    rollout__sampling_config__top_p=1.0,
    rollout__sampling_config__top_k=0,
    validation__dataset__split="val",
    vla__proprio_dim=7,
    vla__continuous=False,
)


@pytest.mark.parametrize("path", [COLOCATED, LIBERO, B1K])
def test_published_files_become_the_same_run(path: str) -> None:
    assert translate_vla(edited(load_toml(path), **PUBLISHED)) == translate(load_toml(path))


@pytest.mark.parametrize("tiny", TINY)
def test_the_tiny_recipes_compose(tiny: str) -> None:
    config = compose(BASE, changed(tiny).overrides)
    model, rl = config.model.config, config.model.config.rl
    assert (rl.loss.ratio_level, rl.loss.aggregation, rl.advantage.correction) == ("element", "episode-mean", 0)
    assert (rl.group_size, rl.max_rollouts, rl.minibatches) == (4, 2, 1)
    assert (config.dataloader_train.batch_size, model.env.num_envs, model.eval_env.num_envs) == (4, 8, 8)
    options = dict(openvla=("temperature", 1.6), pi05=("noise_method", "flow_sde"))
    name, value = options[tiny]
    assert (
        model.policy[name] == value
        and model.policy.path == f"checkpoints/policies/tiny_{tiny.replace('vla', 'vla_oft')}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", [COLOCATED, LIBERO])
def test_the_published_recipes_compose(path: str) -> None:
    config = compose(BASE, translate(load_toml(path)).overrides)
    model, recipe = config.model.config, load_toml(path)
    for env in (model.env, model.eval_env):
        task = (env.make.suite, env.make.max_steps, env.make.num_steps_wait)
        assert task == ("libero_10", 512, 15) and env.num_envs == recipe["vla"]["num_envs"]
        assert env.chunk == (8 if path != LIBERO else 10)
    assert model.precision == "bfloat16" and model.policy.path == recipe["policy"]["model_name_or_path"]
    for loader in (config.dataloader_train, config.dataloader_val):
        assert (loader.dataset.num, loader.dataset.num_tasks) == (500, 10)
    rl = model.rl
    assert (rl.group_size, rl.max_rollouts, rl.clip_ratio, rl.clip_ratio_high) == (8, 2**20, 0.2, 0.28)
    assert (config.optimizer.lr, config.checkpoint.save_iter) == (5e-6, 80)


def test_episodes_of_behavior_end_where_micro_batches_are_sized_for() -> None:
    """And a step is what 10 starts of each of 50 tasks are cut into."""
    recipe = load_toml(B1K)
    found = translate_vla(recipe)
    assert policies.STEPS["b1k"] == policy_simulators.BEHAVIOR_STEPS == 2000
    for env in ("env", "eval_env"):
        assert value_of(found, f"config.{env}.max_steps") == "2000"
    assert [warning for warning in found.warnings if "vla.max_steps is missing" in warning]
    longer = translate_vla(edited(recipe, vla__max_steps=26_000, train__train_batch_per_replica=16))
    assert value_of(longer, "config.env.max_steps") == "26000" and not longer.warnings
    assert value_of(longer, "rl.micro_batches") == str(16 * 2600 // 16)
    evaluation = translate_vla(edited(recipe, rollout__n_generation=1)).evaluation
    assert evaluation is not None and evaluation[evaluation.index("--episodes") + 1] == "500"


@pytest.mark.slow
def test_the_recipe_of_behavior_composes() -> None:
    changes = dict(vla__max_steps=300, vla__height=128, vla__width=96)
    config = compose(BASE, translate_vla(edited(load_toml(B1K), **changes)).overrides)
    model = config.model.config
    for env in (model.env, model.eval_env):
        assert (env.num_envs, env.chunk, env.max_steps, env.height, env.width) == (1, 10, 300, 128, 96)
    assert (model.policy.action_env_dim, model.policy.num_images) == (23, 3)
    assert config.dataloader_train.dataset.num_tasks == config.dataloader_val.dataset.num_tasks == 50


@pytest.mark.slow
def test_validation_may_have_another_suite_and_episodes_their_own_length_and_size() -> None:
    changes = dict(validation__dataset__subset="libero_goal", vla__max_steps=300, vla__height=128, vla__width=96)
    config = compose(BASE, translate_vla(edited(load_toml(COLOCATED), **changes)).overrides)
    train, val = config.model.config.env.make, config.model.config.eval_env.make
    assert (train.suite, val.suite) == ("libero_10", "libero_goal")
    assert config.dataloader_val.dataset.num == 50 * config.dataloader_val.dataset.num_tasks == 500
    assert {(one.max_steps, one.height, one.width) for one in (train, val)} == {(300, 128, 96)}


@pytest.mark.parametrize(
    ("name", "suite", "chunk"),
    [("vla_grpo_openvla_oft_libero_10", "libero_10", 8), ("vla_dapo_pi05_libero_goal", "libero_goal", 10)],
)
def test_policies_learn_in_published_episodes_and_are_judged_in_those_of_evaluations(
    name: str, suite: str, chunk: int
) -> None:
    experiment_names(BASE)
    config = registry.node_of("experiment", name).model.config
    for env, max_steps, num_steps_wait in ((config.env, 512, 15), (config.eval_env, None, 10)):
        assert (env.make.suite, env.make.max_steps, env.make.num_steps_wait) == (suite, max_steps, num_steps_wait)
        assert (env.chunk, env.render) == (chunk, "auto")


CHANGES: list[tuple[dict[str, Any], str, str]] = [  # a field of the tiny recipe, and what it sets here
    (dict(train__train_policy__clip_ratio_c=3.0), "rl.dual_clip", "3.0"),
    (dict(train__train_policy__kl_beta=0.5), "rl.kl_beta", "0.5"),
    (dict(train__train_policy__mu_iterations=2), "trainer.max_iter", "4"),
    (dict(train__train_policy__mu_iterations=2), "trainer.validation_iter", "4"),
    (dict(train__train_policy__mu_iterations=2), "checkpoint.save_iter", "40"),
    (dict(train__train_policy__max_retry_for_on_policy=-1), "rl.max_rollouts", str(2**20)),
    (dict(train__train_policy__max_retry_for_on_policy=0), "rl.max_rollouts", "1"),
    (dict(train__train_policy__variant="grpo"), "rl.max_rollouts", "1"),
    (dict(train__param_dtype="bfloat16"), "rl.ratio_tolerance", "0.1"),
    (dict(train__optm_warmup_steps=7), "scheduler.warm_up_steps", "[7]"),
    (dict(train__ckpt__max_keep=-1), "checkpoint.keep_last", "null"),
    (dict(train__ckpt__enable_checkpoint=False), "ckpt_type", "dummy"),
    (dict(vla__filter_lower_bound=0.1), "rl.lower_bound", "0.1"),
    (dict(vla__filter_upper_bound=0.8), "rl.upper_bound", "0.8"),
    (dict(train__train_policy__epsilon_low=0.1), "rl.clip_ratio", "0.1"),
    (dict(train__train_policy__epsilon_high=0.3), "rl.clip_ratio_high", "0.3"),
    (dict(train__train_policy__entropy_coeff=0.01), "loss.entropy_bonus", "0.01"),
    (dict(train__optm_lr=3e-6), "optimizer.lr", "3e-06"),
    (dict(train__optm_weight_decay=0.02), "optimizer.weight_decay", "0.02"),
    (dict(train__optm_grad_norm_clip=2.0), "grad_clip.clip_norm", "2.0"),
    (dict(train__max_num_steps=1), "trainer.max_iter", "1"),
    (dict(vla__use_proprio=True), "policy.use_proprio", "true"),
    (dict(vla__unnorm_key="libero_90"), "policy.unnorm_key", '"libero_90"'),
    (dict(vla__training_chunk_size=8), "trainer.grad_accum_iter", "4"),
    (dict(vla__training_chunk_size=5), "trainer.grad_accum_iter", "7"),  # 32 decisions: no part is larger
    (dict(vla__training_chunk_size=8), "loss.slice_decisions", "8"),
    (dict(validation={"enable": False}), "trainer.run_validation", "false"),
    (dict(validation__batch_size=3), "dataloader_val.batch_size", "3"),
    (dict(logging__logger=["wandb"]), "job.wandb_mode", '"online"'),
    (dict(policy__parallelism__dp_shard_size=2), "dataloader_train.batch_size", "2"),
    (dict(policy__parallelism__dp_shard_size=2), "config.fsdp_shard_size", "2"),
    (dict(policy__parallelism__dp_shard_size=2), "trainer.distributed_parallelism", '"fsdp"'),
    (dict(policy__parallelism__dp_replicate_size=2), "dataloader_train.batch_size", "2"),
    (dict(policy__parallelism__dp_replicate_size=2), "config.fsdp_shard_size", "0"),
    (dict(policy__model_gradient_checkpointing=False), "config.recompute", "false"),
    (dict(policy__lora={"r": 32, "lora_alpha": 32}), "policy.lora_rank", "32"),
    (dict(policy__parallelism__n_init_replicas=2), "dataloader_train.batch_size", "4"),
    (dict(policy__parallelism=dict(n_init_replicas=2, dp_shard_size=2, dp_replicate_size=2)),
     "dataloader_train.batch_size", "1"),
    (dict(train__train_policy__dataset={}), "experiment", "tiny_vla_grpo_openvla_oft_simulator"),
    (dict(mode="disaggregated", rollout__parallelism__dp_shard_size=2), "config.rollout",
     '{_target_:"cosmos_predict2.rl.episodes.ray_rollout.RayRollout",num_workers:2,num_gpus:0.0}'),
    (dict(mode="disaggregated", policy__parallelism__n_init_replicas=2, rollout__parallelism__dp_shard_size=3),
     "config.rollout", '{_target_:"cosmos_predict2.rl.episodes.ray_rollout.RayRollout",num_workers:3,num_gpus:0.0}'),
    (dict(mode="disaggregated", policy__parallelism__dp_shard_size=2, rollout__parallelism__dp_shard_size=4),
     "config.rollout", '{_target_:"cosmos_predict2.rl.episodes.ray_rollout.RayRollout",num_workers:4,num_gpus:0.0}'),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "key", "value"), CHANGES, ids=lambda case: str(case)[:40])
def test_a_field_sets_what_the_table_says(changes: dict[str, Any], key: str, value: str) -> None:
    assert value_of(changed(**changes), key) == value


@pytest.mark.parametrize(("gpus_here", "num_gpus"), [(0, 0.0), (8, 1.0)])
def test_what_plays_apart_has_a_worker_for_each_of_its_gpus(gpus_here: int, num_gpus: float) -> None:
    changes = dict(policy__parallelism__n_init_replicas=2, rollout__parallelism__n_init_replicas=4)
    found = translate_vla(edited(TINY["openvla"], mode="disaggregated", **changes), gpus_here)
    assert f"num_workers:4,num_gpus:{num_gpus}" in value_of(found, "config.rollout")  # of both ranks together


@pytest.mark.parametrize("section", ["custom", "custom__pi05"])  # Cosmos-RL drops the second, which the guide prints
def test_settings_of_pi05_take_effect_in_either_section(section: str) -> None:
    found = changed("pi05", custom={}, **{f"{section}__noise_method": "flow_noise", f"{section}__replan_steps": 5})
    assert value_of(found, "policy.noise_method") == '"flow_noise"'
    assert not any("replan_steps" in item for item in found.overrides)
    shorter = translate_vla(edited(load_toml(LIBERO), **{"custom": {}, f"{section}__action_chunk": 5}))
    assert value_of(shorter, "config.env.chunk") == value_of(shorter, "config.eval_env.chunk") == "5"


WRONG: list[tuple[str, dict[str, Any], str]] = [  # a change of a tiny recipe, and what the error names
    ("openvla", dict(vla__training_chunksize=8), "Did you mean training_chunk_size?"),
    ("openvla", dict(vla__temperature=1.0), "train.train_policy.temperature"),
    ("openvla", dict(vla__vla_type="openvla_oft"), "Did you mean openvla-oft"),
    ("openvla", dict(vla__vla_type="cosmos-policy"), 'vla.vla_type = "cosmos-policy"'),
    ("openvla", dict(vla__num_envs="8"), "vla.num_envs"),
    ("openvla", dict(train__optm_weight_decay=True), "train.optm_weight_decay"),
    ("pi05", dict(train__train_policy__trainer_type="grpo_vla"), '"grpo_pi05"'),
    ("openvla", dict(train__train_policy__type="sft"), "scripts.train_policy"),
    ("openvla", dict(train__train_policy__variant="gspo"), "train.train_policy.variant"),
    ("openvla", dict(train__train_policy__unbiased_advantage=True), "train.train_policy.unbiased_advantage"),
    ("openvla", dict(train__train_policy__loss_type="seq-mean-token-sum"), "train.train_policy.loss_type"),
    ("openvla", dict(train__train_policy__temperature=1.0), "rollout.sampling_config.temperature = 1.6"),
    ("openvla", dict(train__train_policy__dataset__name="maniskill"), "maniskill"),
    ("openvla", dict(validation={}, train__train_policy__dataset=dict(name="libero", subset="libero_11")), "libero_10"),
    ("openvla", dict(vla__max_steps=9), "vla.max_steps"),
    ("openvla", dict(train__train_policy__dataset=dict(name="b1k", subset="b1k")), "validation.dataset.name"),
    ("openvla", dict(validation={}, train__train_policy__dataset=dict(name="b1k", subset="b1k")), "pi05"),
    ("openvla", dict(train__train_batch_per_replica=10), "train.train_batch_per_replica = 10"),
    ("openvla", dict(train__fsdp_ofload=True), "fsdp_offload"),
    ("openvla", dict(train__fp8={"enable_fp8": True}), "train.fp8"),
    ("openvla", dict(train__non_text=False), "train.non_text"),
    ("openvla", dict(rollout__backend="vllm"), "rollout.backend"),
    ("openvla", dict(rollout__n_generation=1, validation={}), "validation.enable = true"),
    ("openvla", dict(policy__parallelism__dp_shard_size=2, mode="disaggregated"), "rollout.parallelism"),
    ("openvla", dict(policy__lora={"r": 16}), "policy.lora.lora_alpha = 8.0 must be policy.lora.r = 16"),
    ("openvla", dict(policy__lora={"target_modules": ["q_proj"]}), "policy.lora.target_modules"),
    ("openvla", dict(policy__parallelism__tp_size=2), "policy.parallelism.tp_size"),
    ("openvla", dict(policy={}), "policy.model_name_or_path"),
    ("openvla", dict(validation__n_generation=4), "validation.n_generation"),
    ("openvla", dict(custom__pi05={"num_steps": 5}), "custom.num_steps"),
    ("pi05", dict(custom__pi05__noise_metod="flow_cps"), "noise_method"),
    ("openvla", dict(mode="colocated_separated"), "colocated_separated"),
    ("openvla", dict(validation={}, train__train_policy__dataset={}), "train.train_policy.dataset.name is missing"),
    ("openvla", dict(validation__dataset__name="tooy", train__train_policy__dataset={}),
     'validation.dataset.name = "tooy": no simulator is called so. Did you mean toy'),
    ("openvla", dict(vla__num_envs=0), "vla.num_envs = 0, but it is a whole number, 1 at least"),
    ("openvla", dict(policy__parallelism__dp_shard_size=-1), "policy.parallelism.dp_shard_size = -1"),
    ("openvla", dict(train__max_num_steps="x"), 'train.max_num_steps = "x"'),
    ("openvla", dict(validation__batch_size="64"), 'validation.batch_size = "64"'),
    ("openvla", dict(train__ckpt__save_freq=0), "train.ckpt.save_freq = 0"),
    ("openvla", dict(train__optm_lr=-1.0), "train.optm_lr = -1.0, but it is a number above 0"),
    ("openvla", dict(train__train_policy__clip_ratio_c=1.0), "clip_ratio_c = 1.0, but it is a number above 1"),
    ("openvla", dict(train__optm_betas=[0.9]), "train.optm_betas = [0.9]"),
    ("openvla", dict(train__param_dtype="bf16"), "Did you mean bfloat16"),
    ("openvla", dict(vla__filter_lower_bound=10), "vla.filter_lower_bound = 10, but it is a share"),
    ("openvla", dict(vla__filter_lower_bound=0.9, vla__filter_upper_bound=0.1), "no group is left"),
    ("pi05", dict(custom__pi05__noise_method="flow_sdx"), "Did you mean flow_sde"),
    ("pi05", dict(custom__pi05__action_chunk="10"), 'custom.pi05.action_chunk = "10"'),
]  # fmt: skip


@pytest.mark.parametrize(("tiny", "changes", "named"), WRONG, ids=lambda case: str(case)[:40])
def test_a_wrong_recipe_is_refused_by_name(tiny: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        changed(tiny, **changes)


FOREIGN: list[tuple[dict[str, Any], str]] = [  # what published recipes of other things say of themselves
    (dict(policy=dict(model_name_or_path="Qwen/Qwen2.5-3B-Instruct"), train=dict(sync_weight_interval=1)), "Qwen"),
    (dict(policy={}, train=dict(train_policy=dict(type="sft", trainer_type="pi_sft"), epoch="x")), "pi_sft"),
    (dict(vla=dict(vla_type="cosmos-policy", no_such=1), custom=dict(task_suite_name="libero_10")), "cosmos-policy"),
    (dict(policy=dict(model_name_or_path="a"), vla={}, rollout=dict(no=1),
          train=dict(train_policy=dict(dataset=dict(name="robotwin")))), "robotwin"),
    (dict(checkpoint=dict(load_path="Wan-AI/Wan2.1-T2V-1.3B"), trainer=dict(no_such=1)), "Wan2.1"),
    (dict(model=dict(net=dict(num_blocks=30), no_such=1)), "model.net.num_blocks"),
    (dict(model=dict(scaling="edm", no_such=1)), "model.scaling"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "named"), FOREIGN)
def test_type_and_model_are_judged_before_other_fields(recipe: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(recipe)
    assert named in str(refused.value) and "no such field" not in str(refused.value)


def test_a_recipe_with_groups_of_one_is_an_evaluation() -> None:
    found = translate(load_toml("configs/openvla-oft/openvla-oft-libero10-eval.toml"))
    assert found.evaluation is not None and not found.overrides
    words = " ".join(found.evaluation)
    assert "--suite libero_10 --num_steps_wait 15 --max_steps 520" in words
    assert "--policy Haozhan72/Openvla-oft-SFT-libero10-trajall --episodes 500 --draws 1 --batch_size 8" in words
    assert "--videos 500 --options" in words and 'unnorm_key="libero_10_no_noops"' in words
    evaluate_policy.parser.parse_args(found.evaluation)


UNUSUAL: list[tuple[str, dict[str, Any], str]] = [  # a field without effect at another value than published
    (COLOCATED, dict(train__sync_weight_interval=9), "train.sync_weight_interval = 9: every rollout is played"),
    (LIBERO, dict(custom__pi05__replan_steps=3), "custom.pi05.replan_steps = 3: "),
    ("configs/cosmos-predict2-5/cosmos-predict2-5-2b-720-nft.toml", dict(train__epoch=3), "train.epoch = 3: "),
    ("configs/cosmos-predict2-5/cosmos-predict2-5-2b-480-grpo-mock-data.toml",
     dict(dataloader_train__video_dataloader__dataloader__use_cache=True), "dataloader.use_cache = true: "),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes", "told"), UNUSUAL)
def test_a_field_without_effect_is_reported_where_it_is_not_as_published(
    path: str, changes: dict[str, Any], told: str
) -> None:
    def reported(content: Any) -> list[str]:
        return [one for one in translate(content).warnings if one.startswith("not the published value")]

    assert not reported(load_toml(path))
    (one,) = reported(edited(load_toml(path), **changes))
    assert told in one


def test_every_field_that_is_read_is_used() -> None:
    text = Path(str(policies.__file__)).read_text()
    for path, row in policy_fields.FIELDS.items():
        is_read = not (row.key or row.values or row.unused)
        if is_read and not path.startswith("custom."):
            assert path in text or path.rpartition(".")[2] in text, path
