# SPDX-License-Identifier: Apache-2.0
"""Every field of RLinf's configurations of a policy in a world model, with its default and what becomes of it here."""

from dataclasses import replace

from cosmos_predict2.compat.cosmos_rl import policy_fields
from cosmos_predict2.compat.fields import Row, given, only, reads, sets, under, unused

CONFIG, RL, POLICY = "model.config", "model.config.rl", "model.config.policy"
LOSS = f"{RL}.loss"
RAY_NAME = "a name of Ray's actors there"
NO_CRITIC = "GRPO compares episodes of a group; there is no critic"
VLM = "actions have a fixed number of tokens"
KL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
FSDP = "PyTorch's FSDP2 needs no such setting: its blocks are gathered and freed one by one"
PLACE = "cluster.component_placement"
# Options of OpenVLA -> ours, and of PI0.5, whose names are ours.
OPENVLA_OPTIONS = {
    "unnorm_key": "unnorm_key",
    "num_images_in_input": "num_images_in_input",
    "center_crop": "center_crop",
    "use_proprio": "use_proprio",
    "max_prompt_length": "max_tokens",
}
PI05_OPTIONS = tuple(name for name in policy_fields.PI05_OPTIONS if name != "discrete_state_input")

_RUN: dict[str, Row] = {
    **only("cluster.num_nodes", "Machines are joined by ray_utils/start_ray.sh, or by torchrun (multi_node.md)", 1),
    **reads({PLACE: None}),
    **under(
        "runner",
        only("task_type", "Leave it out", "embodied"),
        only("only_eval", "python -m scripts.evaluate_policy evaluates a policy", False),
        reads(dict(max_epochs=1000, max_steps=-1, val_check_interval=-1, save_interval=-1)),
        reads(dict(resume_dir=None, ckpt_path=None)),
        reads({"logger.log_path": "../results", "logger.logger_backends": []}),
        sets({"logger.project_name": ("job.project", "rlinf"), "logger.experiment_name": ("job.name", "embodied")}),
    ),
    **only("reward.use_reward_model", "The world model's own reward model is world_model_cfg.reward_model", False),
    **only("critic.use_critic_model", "GRPO has no critic", False),
}
_SAMPLING: dict[str, Row] = {
    **reads(dict(temperature_train=1.0, top_k=-1)),
    **only("do_sample", "A rollout draws; evaluations are greedy", True),
    **only("top_p", "Probabilities are those of the whole distribution", 1.0),
    **only("repetition_penalty", "Actions may repeat", 1.0),
    **unused("temperature_eval", "evaluations are greedy", 1.6, 0.6),
    **unused("add_BOS", "the policy's prompt is built as it was trained", False),
}
_ALGORITHM: dict[str, Row] = {
    **reads(dict(kl_penalty="kl", rollout_epoch=1, eval_rollout_epoch=1)),
    **reads(dict(logprob_type="action_level", loss_agg_func="token-mean")),
    **reads(dict(filter_rewards=False, rewards_lower_bound=None, rewards_upper_bound=None)),
    **sets(
        {
            "group_size": (f"{RL}.group_size", 1),
            "update_epoch": (f"{RL}.updates", 1),
            "kl_beta": (f"{RL}.kl_beta", 0.0),
            "entropy_bonus": (f"{LOSS}.entropy_bonus", 0.0),
            "clip_ratio_low": (f"{RL}.clip_ratio", 0.2),
            "clip_ratio_high": (f"{RL}.clip_ratio_high", 0.2),
            "clip_ratio_c": (f"{RL}.dual_clip", None),
        }
    ),
    **only("normalize_advantages", "GRPO's advantages are those of a group, divided by its deviation", True),
    **only("reward_type", "Either way an episode's return is the sum of its rewards", *("action_level", "chunk_level")),
    **only("entropy_type", "The entropy's mean is over all entries", "token_level", "action_level", "chunk_level"),
    **only("adv_type", "This is the experiment of GRPO", "grpo"),
    **only("loss_type", "GRPO has no critic", "actor"),
    **unused("reward_coef", "the environment's own counts, which refers to it"),
    **unused(dict(value_clip=0.2, huber_delta=10.0, gamma=0.99, gae_lambda=0.95), NO_CRITIC),
    **under("length_params", unused(dict(max_new_token=None, max_length=1024, min_length=1), VLM)),
    **under("sampling_params", _SAMPLING),
}


def _ignored_fields(environment: str, names: str) -> dict[str, Row]:
    reason = f"ignored, since these fields belong to another environment, {environment}"
    return dict.fromkeys(names.split(), Row(reported=reason))


_WORLD_MODEL: dict[str, Row] = {
    **reads(dict(chunk=8, image_size=[256, 320])),
    **reads({"cosmos.ckpt_path": None, "cosmos.tokenizer_path": None, "reward_model.from_pretrained": None}),
    **reads({"cosmos.guidance": 7, "cosmos.num_steps": 35, "cosmos.action_scaler": 20.0}),
    **reads({"cosmos.chunk_size": 12, "cosmos.batch_size": 16}),
    **only(
        "reward_model.type", "Others are an override of scripts.train: model.config.env.reward", *("ResnetRM", "toy")
    ),
    **unused("stats_path", "not read there either: actions are scaled by action_scaler"),
    **unused("dtype", "the world model has the precision of its weights"),
    **unused("condition_frame_length", "one frame conditions the model, there too"),
    **_ignored_fields("OpenSora", "model vae scheduler"),
}
_ENVIRONMENT: dict[str, Row] = {
    **under("world_model_cfg", _WORLD_MODEL),
    **reads(dict(env_type="cosmos_wm", wm_env_type="libero", task_suite_name="libero_spatial")),
    **reads(dict(total_num_envs=None, group_size=1, ignore_terminations=False)),
    **reads(dict(max_episode_steps=240, max_steps_per_rollout_epoch=240)),
    **reads(dict(use_rel_reward=True, reward_coef=1.0, success_reward_threshold=0.9)),
    **reads(dict(cosmos_model_dir=None, initial_image_path=None, cosmos_ckpt_path=None, enable_kir=False)),
    **reads({"init_params.camera_heights": 256, "init_params.camera_widths": 256}),
    **only("simulator_type", "It is an older name of env_type", None),
    **only("use_step_penalty", "Steps cost nothing here: an episode's return is that of its pictures", False),
    **only("use_fixed_reset_state_ids", "Episodes of a group have one start", True),
    **only("specific_reset_id", "Every start is used; for one, give a folder that has no other", None),
    **unused("auto_reset", "an environment waits for the others, and finished ones leave the batch"),
    **unused("reset_gripper_open", "recorded first states have the gripper as it was"),
    **unused("is_eval", "its section shows it"),
    **unused("seed", "the order of starts follows from actor.seed", 0),
    **unused("use_ordered_reset_state_ids", "every start is used before one comes again"),
    **unused("fps", "of videos, which DrawSamples writes at their own"),
    **unused("video_cfg.save_video video_cfg.info_on_video", "callbacks write videos"),
    **unused("video_cfg.video_base_dir", "videos lie in the run's folder"),
    **_ignored_fields("OpenSora", "opensora_wm_hf_ckpt_path"),
    **_ignored_fields("Wan", "wan_wm_hf_ckpt_path initial_image_dir VAE_path model_path num_inference_steps"),
    **_ignored_fields("Wan", "num_frames chunk condition_frame_length image_size reward_model"),
}
_ROLLOUT: dict[str, Row] = {
    **reads({"model.model_path": None, "model.precision": None}),
    **only("generation_backend", "The policy that is trained decides", "huggingface"),
    **unused("group_name", RAY_NAME),
    **unused("enable_offload", "the policy that decides is the one that is trained"),
    **unused("recompute_logprobs", "probabilities before an update are those of the trained weights", False),
    **unused("unnorm_key", "actor.model.unnorm_key counts", "libero_10"),
    **unused("pipeline_stage_num", "environments of a process are stepped together", 1),
    **{f"sampling_params.{name}": Row(place=f"algorithm.sampling_params.{name}") for name in _SAMPLING},
}
_OPENPI: dict[str, Row] = {
    **reads(dict(config_name="pi05_libero", num_images_in_input=None, num_steps=None)),
    **reads(dict(action_chunk=None, action_env_dim=None)),
    **reads(dict.fromkeys(PI05_OPTIONS)),
    **only("double_layer", "There is one action expert", False),
    **only("use_dsrl", "DSRL, which learns the noise that a policy begins with, is not here", False),
    **only("add_value_head", "GRPO has no critic", False),
    **unused("dsrl_state_dim dsrl_action_noise_dim dsrl_num_q_heads dsrl_agg_q", "see use_dsrl"),
    **unused("dsrl_image_latent_dim dsrl_state_latent_dim dsrl_hidden_dims", "see use_dsrl"),
    **unused(dict(value_after_vlm=False, value_vlm_mode="mean_token", detach_critic_input=None), NO_CRITIC),
    "chunk_critic_input": Row(unused=NO_CRITIC, usual=()),
}
_POLICY: dict[str, Row] = {
    **under("openpi", _OPENPI),
    **reads(dict(model_type="openvla_oft", model_path=None, precision=None, action_dim=7, num_action_chunks=8)),
    **reads(dict(unnorm_key="", num_images_in_input=1, center_crop=True, use_proprio=False, max_prompt_length=50)),
    **reads(dict(num_steps=5, is_lora=False, lora_rank=32, lora_path=None)),
    **given(dict(noise=f"{POLICY}.noise")),
    **only("use_film", "FiLM is not here", False),
    **only("add_value_head", "GRPO has no critic", False),
    **only("implement_version", "Policies of the official repository are not here", "rlinf"),
    **unused("image_size", "the checkpoint's config.json has it", [224, 224]),
    **unused("value_type", NO_CRITIC, "action_level"),
    **unused(dict(vocab_size=32000, hidden_size=4096), "the checkpoint has its sizes"),
    **unused("attn_implementation", "PyTorch's fused attention is used"),
    **unused("low_cpu_mem_usage", "weights are read where they go"),
    **unused("trust_remote_code", "no code of a checkpoint is run"),
    **unused("policy_setup", "it belongs to ManiSkill"),
}
_PRECISION = "the precision is actor.model.precision"
_SHARDING: dict[str, Row] = {
    **reads(dict(gradient_checkpointing=False, sharding_strategy="full_shard")),
    **reads({f"mixed_precision.{name}_dtype": None for name in ("param", "reduce", "buffer")}),
    **only("cpu_offload", "Weights stay on the GPU; gradient_checkpointing takes less memory", False),
    **unused(dict(strategy="fsdp", backward_prefetch=None, fsdp_size=-1), FSDP),
    **unused("offload_pin_memory forward_prefetch limit_all_gathers use_orig_params use_liger_kernel", FSDP, False),
    **unused("reshard_after_forward enable_gradient_accumulation", FSDP, True),
    **unused("amp", _PRECISION, dict(enabled=False, precision="bf16", use_grad_scaler=False)),
    **unused("amp_autocast", _PRECISION, dict(enabled=False, precision="bf16")),
    **unused("grad_scaler", "float16 is not trained here", dict(enabled=False)),
}
_ACTOR: dict[str, Row] = {
    **under("model", _POLICY),
    **under(
        "optim",
        reads(dict(adam_beta1=0.9, adam_beta2=0.999)),
        sets(
            {
                "lr": ("optimizer.lr", 1e-4),
                "adam_eps": ("optimizer.eps", 1e-8),
                "weight_decay": ("optimizer.weight_decay", 0.01),
                "clip_grad": ("trainer.callbacks.grad_clip.clip_norm", 1.0),
            }
        ),
        unused("value_lr", NO_CRITIC, 3e-3, 1e-4),
    ),
    "optim.critic_warmup_steps": Row(unused=NO_CRITIC, usual=()),
    **under("fsdp_config", _SHARDING),
    **reads(dict(micro_batch_size=1, global_batch_size=1)),
    **sets(dict(seed=("trainer.seed", 1234))),
    **only("training_backend", "There is one way to train", "fsdp"),
    **unused("group_name", RAY_NAME),
    **unused("enable_offload", "see env.enable_offload"),
}
FIELDS: dict[str, Row] = {
    **_RUN,
    **under("algorithm", _ALGORITHM),
    **reads({"env.enable_offload": False}),
    **unused("env.group_name", RAY_NAME),
    **under("env.train", _ENVIRONMENT),
    **under("env.eval", _ENVIRONMENT),
    "env.train.rollout_epoch": Row(place="algorithm.rollout_epoch"),
    "env.eval.rollout_epoch": Row(place="algorithm.eval_rollout_epoch"),
    "env.train.enable_offload": Row(place="env.enable_offload"),
    **unused("env.eval.enable_offload", "a simulator's processes have nothing on the GPU between episodes"),
    **under("rollout", _ROLLOUT),
    **unused("weight_syncer", "the policy that is trained decides; workers of Ray get what was trained"),
    **under("actor", _ACTOR),
}
# What fields without effect have in published files, where it is not alike for training and evaluation.
_USUAL = {
    "train.auto_reset": (False,),
    "eval.auto_reset": (True, False),
    "train.is_eval": (False,),
    "eval.is_eval": (True, False),
    "train.fps": (),
    "eval.fps": (),
    "train.video_cfg.save_video": (True,),
    "train.video_cfg.info_on_video": (True,),
    "train.world_model_cfg.dtype": ("bf16",),
    "train.world_model_cfg.condition_frame_length": (4,),
}
FIELDS |= {f"env.{path}": replace(FIELDS[f"env.{path}"], usual=usual) for path, usual in _USUAL.items()}
