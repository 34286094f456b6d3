# SPDX-License-Identifier: Apache-2.0
"""Every field of RLinf's configurations of a policy in a world model, with its default and what becomes of it here."""

from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.fields import (
    Given,
    Leftover,
    Moved,
    Only,
    Read,
    Row,
    To,
    Unused,
    under,
)

CONFIG, RL, POLICY = "model.config", "model.config.rl", "model.config.policy"
LOSS = f"{RL}.loss"
RAY_NAME = Unused("a name of Ray's actors there")
NO_CRITIC = Unused("GRPO compares episodes of a group; there is no critic")
VLM = Unused("actions have a fixed number of tokens")
KL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
FSDP = Unused("PyTorch's FSDP2 needs no such setting: its blocks are gathered and freed one by one")

RUN: Mapping[str, Row] = {
    "cluster.num_nodes": Only((1,), "Machines are joined by ray_utils/start_ray.sh, or by torchrun (multi_node.md)"),
    "cluster.component_placement": Read(None, "which GPUs train and play; apart: rollouts on workers of Ray"),
    "runner.task_type": Only(("embodied",), "Leave it out"),
    "runner.logger.log_path": Read("../results", "where the run's folder lies"),
    "runner.logger.project_name": To("job.project", "rlinf"),
    "runner.logger.experiment_name": To("job.name", "embodied"),
    "runner.logger.logger_backends": Read([], "wandb: job.wandb_mode=online; TensorBoard's files are always written"),
    "runner.max_epochs": Read(1000, "trainer.max_iter: epochs times the optimizer steps of one"),
    "runner.max_steps": Read(-1, "epochs, too, where it is smaller than max_epochs; -1: no limit"),
    "runner.only_eval": Only((False,), "python -m scripts.evaluate_policy evaluates a policy"),
    "runner.val_check_interval": Read(-1, "trainer.validation_iter, in epochs; -1: never"),
    "runner.save_interval": Read(-1, "checkpoint.save_iter, in epochs; -1: at the end"),
    "runner.resume_dir": Read(None, "checkpoint.load_path with checkpoint.load_training_state"),
    "runner.ckpt_path": Read(None, "checkpoint.load_path: weights to begin with"),
    "reward.use_reward_model": Only((False,), "The world model's own reward model is world_model_cfg.reward_model"),
    "critic.use_critic_model": Only((False,), "GRPO has no critic"),
}
ALGORITHM: Mapping[str, Row] = {
    "normalize_advantages": Only((True,), "GRPO's advantages are those of a group, divided by its deviation"),
    "kl_penalty": Read("kl", f"{LOSS}.kl_kind: {', '.join(f'{name} is {kind}' for name, kind in KL_KINDS.items())}"),
    "group_size": To(f"{RL}.group_size", 1),
    "rollout_epoch": Read(1, "a factor of the episodes of an epoch"),
    "eval_rollout_epoch": Read(1, "a factor of the episodes of an evaluation"),
    "update_epoch": To(f"{RL}.updates", 1),
    "reward_type": Only(("action_level", "chunk_level"), "Either way an episode's return is the sum of its rewards"),
    "logprob_type": Read("action_level", f"{LOSS}.ratio_level, under the same names"),
    "entropy_type": Only(("token_level", "action_level", "chunk_level"), "The entropy's mean is over all entries"),
    "adv_type": Only(("grpo",), "This is the experiment of GRPO"),
    "loss_type": Only(("actor",), "GRPO has no critic"),
    "loss_agg_func": Read("token-mean", f"{LOSS}.aggregation, under the same names"),
    "kl_beta": To(f"{LOSS}.kl_beta", 0.0),
    "entropy_bonus": To(f"{LOSS}.entropy_bonus", 0.0),
    "clip_ratio_low": To(f"{LOSS}.clip_low", 0.2),
    "clip_ratio_high": To(f"{LOSS}.clip_high", 0.2),
    "clip_ratio_c": To(f"{LOSS}.dual_clip", None),
    "reward_coef": Unused("the environment's own counts, which refers to it"),
    "filter_rewards": Read(False, f"true: {RL}.lower_bound and {RL}.upper_bound are as given, else null"),
    "rewards_lower_bound": Read(None, f"{RL}.lower_bound, a group's mean return"),
    "rewards_upper_bound": Read(None, f"{RL}.upper_bound"),
    **dict.fromkeys(("value_clip", "huber_delta", "gamma", "gae_lambda"), NO_CRITIC),
    "sampling_params.do_sample": Only((True,), "A rollout draws; evaluations are greedy"),
    "sampling_params.temperature_train": Read(1.0, f"{POLICY}.temperature of OpenVLA, which draws tokens"),
    "sampling_params.temperature_eval": Unused("evaluations are greedy"),
    "sampling_params.top_k": Read(-1, "must be -1, of OpenVLA: tokens are drawn from the whole distribution"),
    "sampling_params.top_p": Only((1.0,), "Probabilities are those of the whole distribution"),
    "sampling_params.repetition_penalty": Only((1.0,), "Actions may repeat"),
    "sampling_params.add_BOS": Unused("the policy's prompt is built as it was trained"),
    **dict.fromkeys((f"length_params.{name}" for name in ("max_new_token", "max_length", "min_length")), VLM),
}
OPENSORA, WAN = Leftover("OpenSora"), Leftover("Wan")
ENVIRONMENT: Mapping[str, Row] = {
    "env_type": Read("cosmos_wm", "cosmos_wm: a world model; libero, toy: a simulator"),
    "simulator_type": Only((None,), "It is an older name of env_type"),
    "wm_env_type": Read("libero", "what the world model imagines: libero, toy"),
    "task_suite_name": Read("libero_spatial", "the tasks"),
    "total_num_envs": Read(None, "environments of all processes, and a factor of the episodes of an epoch"),
    "group_size": Read(1, "must be algorithm.group_size, in training"),
    "auto_reset": Unused("an environment waits for the others, and finished ones leave the batch"),
    "ignore_terminations": Read(False, "whether an episode goes on after success"),
    "max_episode_steps": Read(240, "steps of an episode"),
    "max_steps_per_rollout_epoch": Read(240, "must be max_episode_steps: a rollout has whole episodes"),
    "use_step_penalty": Only((False,), "Steps cost nothing here: an episode's return is that of its pictures"),
    "use_rel_reward": Read(True, "a picture earns what its reward is above that of the one before"),
    "reward_coef": Read(1.0, "the factor of rewards"),
    "success_reward_threshold": Read(0.9, "the reward that counts as success"),
    "reset_gripper_open": Unused("recorded first states have the gripper as it was"),
    "is_eval": Unused("the section says so"),
    "seed": Unused("the order of starts follows from actor.seed"),
    "use_fixed_reset_state_ids": Only((True,), "Episodes of a group have one start"),
    "use_ordered_reset_state_ids": Unused("every start is used before one comes again"),
    "specific_reset_id": Only((None,), "Every start is used; for one, give a folder that has no other"),
    "fps": Unused("of videos, which DrawSamples writes at their own"),
    **dict.fromkeys(("video_cfg.save_video", "video_cfg.info_on_video"), Unused("callbacks write videos")),
    "video_cfg.video_base_dir": Unused("videos lie in the run's folder"),
    "init_params.camera_heights": Read(256, "height of a simulator's pictures"),
    "init_params.camera_widths": Read(256, "width of a simulator's pictures"),
    "cosmos_model_dir": Read(None, "the world model's folder; tiny: the one that is shipped"),
    "initial_image_path": Read(None, "the folder of the recorded starts"),
    "cosmos_ckpt_path": Read(None, "the world model's weights, whose folder is cosmos_model_dir where that is missing"),
    "opensora_wm_hf_ckpt_path": OPENSORA,
    **dict.fromkeys(
        (
            *(
                "wan_wm_hf_ckpt_path",
                "initial_image_dir",
                "VAE_path",
                "model_path",
                "num_inference_steps",
                "num_frames",
            ),
            *("chunk", "condition_frame_length", "image_size", "reward_model"),
        ),
        WAN,
    ),
    "enable_kir": Read(False, "whether episodes begin at keyframes, too, where there are some"),
}
WORLD_MODEL: Mapping[str, Row] = {
    "stats_path": Unused("not read there either: actions are scaled by action_scaler"),
    "dtype": Unused("the world model has the precision of its weights"),
    "reward_model.type": Only(("ResnetRM", "toy"), "Others are an override of scripts.train: model.config.env.reward"),
    "reward_model.from_pretrained": Read(None, "the reward model's weights"),
    "cosmos.ckpt_path": Read(None, "the world model's weights"),
    "cosmos.tokenizer_path": Read(None, "its tokenizer"),
    "cosmos.guidance": Read(7, "its guidance"),
    "cosmos.num_steps": Read(35, "its denoising steps"),
    "cosmos.action_scaler": Read(20.0, "the factor of its actions"),
    "cosmos.chunk_size": Read(12, "frames that it predicts at once"),
    "cosmos.batch_size": Read(16, "environments that pass through it together"),
    "chunk": Read(8, "actions of a decision that are executed; must be actor.model.num_action_chunks"),
    "condition_frame_length": Unused("one frame conditions the model, there too"),
    **dict.fromkeys(("model", "vae", "scheduler"), OPENSORA),
    "image_size": Read([256, 320], "height and width that starts are stretched to"),
}
ROLLOUT: Mapping[str, Row] = {
    "group_name": RAY_NAME,
    "generation_backend": Only(("huggingface",), "The policy that is trained decides"),
    "enable_offload": Unused("the policy that decides is the one that is trained"),
    "recompute_logprobs": Unused("probabilities before an update are those of the trained weights"),
    "unnorm_key": Unused("actor.model.unnorm_key counts"),
    "pipeline_stage_num": Unused("environments of a process are stepped together"),
    "model.model_path": Read(None, "must be actor.model.model_path"),
    "model.precision": Read(None, "must be actor.model.precision"),
}
_OPENPI: Mapping[str, Row] = {
    "config_name": Read("pi05_libero", f"{POLICY}.action_horizon and discrete_state_input, as published"),
    "num_images_in_input": Read(None, f"{POLICY}.num_images: cameras"),
    "action_chunk": Read(None, "must be actor.model.num_action_chunks"),
    "action_env_dim": Read(None, "must be actor.model.action_dim"),
    "num_steps": Read(None, "must be actor.model.num_steps"),
    **{
        name: Read(None, f"{POLICY}.{name}; that of the checkpoint's config.json where it is missing")
        for name in (
            *("noise_method", "noise_level", "noise_anneal", "noise_params", "noise_logvar_range", "joint_logprob"),
            *("safe_get_logprob", "ignore_last", "train_expert_only"),
        )
    },
    "double_layer": Only((False,), "There is one action expert"),
    "use_dsrl": Only((False,), "DSRL, which learns the noise that a policy begins with, is not here"),
    **dict.fromkeys(
        (
            *("dsrl_state_dim", "dsrl_action_noise_dim", "dsrl_num_q_heads", "dsrl_agg_q", "dsrl_image_latent_dim"),
            *("dsrl_state_latent_dim", "dsrl_hidden_dims"),
        ),
        Unused("see use_dsrl"),
    ),
    "add_value_head": Only((False,), "GRPO has no critic"),
    **dict.fromkeys(("value_after_vlm", "value_vlm_mode", "detach_critic_input", "chunk_critic_input"), NO_CRITIC),
}
_POLICY: Mapping[str, Row] = {
    "model_type": Read("openvla_oft", "the policy: openvla_oft, openvla, openpi (PI0.5), toy"),
    "model_path": Read(None, f"{POLICY}.path, its weights: a folder, a repository of the hub"),
    "precision": Read(None, "model.config.precision"),
    "action_dim": Read(7, f"{POLICY}.action_dim, of PI0.5 action_env_dim; in the toy world the clone's own"),
    "num_action_chunks": Read(8, f"actions of a decision: {POLICY}.action_chunk; in the toy world the clone's own"),
    "unnorm_key": Read("", f"{POLICY}.unnorm_key: whose statistics scale the actions back"),
    "num_images_in_input": Read(1, f"{POLICY}.num_images_in_input of OpenVLA: cameras"),
    "image_size": Unused("the checkpoint's config.json has it"),
    "center_crop": Read(True, f"{POLICY}.center_crop of OpenVLA"),
    "use_proprio": Read(False, f"{POLICY}.use_proprio of OpenVLA; what PI0.5 reads follows from openpi.config_name"),
    "use_film": Only((False,), "FiLM is not here"),
    "max_prompt_length": Read(50, f"{POLICY}.max_tokens of OpenVLA"),
    "num_steps": Read(5, f"{POLICY}.num_steps of PI0.5: its denoising steps"),
    "is_lora": Read(False, "whether adapters are trained in place of all weights"),
    "lora_rank": Read(32, f"{POLICY}.lora_rank: their rank, which is their alpha, too"),
    "lora_path": Read(None, f"{POLICY}.lora_path: adapters that are added first, before new ones are trained"),
    "add_value_head": Only((False,), "GRPO has no critic"),
    "value_type": NO_CRITIC,
    "vocab_size": Unused("the checkpoint has its sizes"),
    "hidden_size": Unused("the checkpoint has its sizes"),
    "implement_version": Only(("rlinf",), "Policies of the official repository are not here"),
    "attn_implementation": Unused("PyTorch's fused attention is used"),
    "low_cpu_mem_usage": Unused("weights are read where they go"),
    "trust_remote_code": Unused("no code of a checkpoint is run"),
    "policy_setup": Unused("it belongs to ManiSkill"),
    **under("openpi", _OPENPI),
    "noise": Given(f"{POLICY}.noise", "the toy policy's own"),
}
OPTIMIZER: Mapping[str, Row] = {
    "lr": To("optimizer.lr", 1e-4),
    "adam_beta1": Read(0.9, "optimizer.betas"),
    "adam_beta2": Read(0.999, "optimizer.betas"),
    "adam_eps": To("optimizer.eps", 1e-8),
    "weight_decay": To("optimizer.weight_decay", 0.01),
    "clip_grad": To("trainer.callbacks.grad_clip.clip_norm", 1.0),
    "value_lr": NO_CRITIC,
    "critic_warmup_steps": NO_CRITIC,
}
ACTOR: Mapping[str, Row] = {
    "group_name": RAY_NAME,
    "training_backend": Only(("fsdp",), "There is one way to train"),
    "micro_batch_size": Read(
        1, f"decisions that pass the policy together: {RL}.micro_batches, trainer.grad_accum_iter"
    ),
    "global_batch_size": Read(1, f"decisions of an optimizer step, of all processes: {RL}.minibatches"),
    "seed": To("trainer.seed", 1234),
    "enable_offload": Unused("see env.enable_offload"),
    **under("model", _POLICY),
    **under("optim", OPTIMIZER),
    "fsdp_config.gradient_checkpointing": Read(False, f"{CONFIG}.recompute: activations are computed twice"),
    "fsdp_config.sharding_strategy": Read("full_shard", f"{CONFIG}.fsdp_shard_size: full_shard over all, no_shard"),
    "fsdp_config.cpu_offload": Only((False,), "Weights stay on the GPU; gradient_checkpointing takes less memory"),
    **{
        f"fsdp_config.mixed_precision.{name}_dtype": Read(None, "must be actor.model.precision")
        for name in ("param", "reduce", "buffer")
    },
    **{
        f"fsdp_config.{name}": FSDP
        for name in (
            *("strategy", "offload_pin_memory", "reshard_after_forward"),
            *("forward_prefetch", "limit_all_gathers", "backward_prefetch", "use_orig_params", "fsdp_size"),
            *("enable_gradient_accumulation", "use_liger_kernel"),
        )
    },
    **dict.fromkeys(("fsdp_config.amp", "fsdp_config.amp_autocast"), Unused("the precision is actor.model.precision")),
    "fsdp_config.grad_scaler": Unused("float16 is not trained here"),
}
_ENV: Mapping[str, Row] = {**ENVIRONMENT, **under("world_model_cfg", WORLD_MODEL)}
FIELDS: dict[str, Row] = {
    **RUN,
    **under("algorithm", ALGORITHM),
    "env.group_name": RAY_NAME,
    "env.enable_offload": Read(False, "whether the world model leaves the GPU while the policy is trained"),
    **under("env.train", _ENV),
    **under("env.eval", _ENV),
    "env.train.rollout_epoch": Moved("algorithm.rollout_epoch"),
    "env.eval.rollout_epoch": Moved("algorithm.eval_rollout_epoch"),
    "env.train.enable_offload": Moved("env.enable_offload"),
    "env.eval.enable_offload": Unused("a simulator's processes have nothing on the GPU between episodes"),
    **under("rollout", ROLLOUT),
    **{
        path.replace("algorithm", "rollout", 1): Moved(path)
        for path in under("algorithm", ALGORITHM)
        if path.startswith("algorithm.sampling_params.")
    },
    "weight_syncer": Unused("the policy that is trained decides; workers of Ray get what was trained"),
    **under("actor", ACTOR),
}
# What fields without effect have in published files, wm_vla_rl's (9004814) and RLinf's (a3816b5); other values are
# reported. Names and paths are not listed: everybody has others.
PUBLISHED: Mapping[str, tuple[Any, ...]] = {
    "algorithm.value_clip": (0.2,),
    "algorithm.huber_delta": (10.0,),
    "algorithm.gamma": (0.99,),
    "algorithm.gae_lambda": (0.95,),
    "algorithm.sampling_params.temperature_eval": (1.6, 0.6),
    "algorithm.sampling_params.add_BOS": (False,),
    "algorithm.length_params.max_new_token": (None,),
    "algorithm.length_params.max_length": (1024,),
    "algorithm.length_params.min_length": (1,),
    "env.train.auto_reset": (False,),
    "env.eval.auto_reset": (True, False),
    "env.train.is_eval": (False,),
    "env.eval.is_eval": (True, False),
    **dict.fromkeys(("env.train.seed", "env.eval.seed"), (0,)),
    **dict.fromkeys(("env.train.fps", "env.eval.fps"), ()),
    **dict.fromkeys(("env.train.video_cfg.save_video", "env.train.video_cfg.info_on_video"), (True,)),
    "env.train.world_model_cfg.dtype": ("bf16",),
    "env.train.world_model_cfg.condition_frame_length": (4,),
    "rollout.recompute_logprobs": (False,),
    "rollout.unnorm_key": ("libero_10",),
    "rollout.pipeline_stage_num": (1,),
    "actor.model.image_size": ([224, 224],),
    "actor.model.value_type": ("action_level",),
    "actor.model.vocab_size": (32000,),
    "actor.model.hidden_size": (4096,),
    "actor.model.openpi.value_after_vlm": (False,),
    "actor.model.openpi.value_vlm_mode": ("mean_token",),
    "actor.model.openpi.detach_critic_input": (None,),
    "actor.model.openpi.chunk_critic_input": (),
    "actor.optim.value_lr": (3e-3, 1e-4),
    "actor.optim.critic_warmup_steps": (),
    "actor.fsdp_config.strategy": ("fsdp",),
    "actor.fsdp_config.offload_pin_memory": (False,),
    "actor.fsdp_config.reshard_after_forward": (True,),
    "actor.fsdp_config.forward_prefetch": (False,),
    "actor.fsdp_config.limit_all_gathers": (False,),
    "actor.fsdp_config.backward_prefetch": (None,),
    "actor.fsdp_config.use_orig_params": (False,),
    "actor.fsdp_config.fsdp_size": (-1,),
    "actor.fsdp_config.enable_gradient_accumulation": (True,),
    "actor.fsdp_config.use_liger_kernel": (False,),
    "actor.fsdp_config.amp": (dict(enabled=False, precision="bf16", use_grad_scaler=False),),
    "actor.fsdp_config.amp_autocast": (dict(enabled=False, precision="bf16"),),
    "actor.fsdp_config.grad_scaler": (dict(enabled=False),),
}
