# SPDX-License-Identifier: Apache-2.0
"""Every field of Cosmos-RL's recipes of policies (VLA), with its default there and what becomes of it here."""

from cosmos_predict2.compat.fields import Row, given, only, reads, sets, under, unused

CONFIG, RL = "model.config", "model.config.rl"
LOSS, POLICY, ENV = f"{RL}.loss", f"{CONFIG}.policy", f"{CONFIG}.env"
VLA_TYPES = {"openvla-oft": "openvla_oft", "openvla": "openvla", "pi05": "pi05"}  # -> as experiments are called
TRAINERS = {"openvla-oft": "grpo_vla", "openvla": "grpo_vla", "pi05": "grpo_pi05"}
NO_SPLIT = "Policies are trained data-parallel: n_init_replicas, dp_shard_size and dp_replicate_size count GPUs"
TEXT = "of language models that write text; a decision here has a fixed number of tokens"
NO_CONTROLLER = "there is no controller: each process plays its own episodes"
ON_POLICY = "every rollout is played with the newest weights, and trained on before the next"
NEWEST = "Every rollout is played with the newest weights"
REWARD = "an episode earns 1 where it succeeds, else 0"
NO_DECAY = "Schedules with a decay are options of an experiment: scheduler=NAME"
# Of [custom.pi05] or [custom], and of our policy.
PI05_SIZES = ("num_steps", "max_token_len", "action_chunk", "action_env_dim", "action_horizon", "action_dim")
PI05_OPTIONS = (
    *("noise_method", "noise_level", "noise_anneal", "noise_params", "noise_logvar_range", "joint_logprob"),
    *("safe_get_logprob", "ignore_last", "train_expert_only", "discrete_state_input"),
)

# Of DiffusionNFT's recipes too: the trainer, its adapters and its log.
SIZES_OF_GPUS = ("n_init_replicas", "dp_shard_size", "dp_replicate_size")
LORA: dict[str, Row] = {**reads(dict(r=8), least=1), **only("lora_dropout", "Adapters have no dropout", 0.0, 0)}
TRAIN: dict[str, Row] = {
    **reads({"param_dtype": "bfloat16", "ckpt.enable_checkpoint": False}),
    **reads(dict(train_batch_per_replica=8), least=1),
    **sets(dict(epsilon=("optimizer.eps", 1e-6), optm_lr=("optimizer.lr", 1e-6)), above=0.0),
    **sets(dict(optm_grad_norm_clip=("trainer.callbacks.grad_clip.clip_norm", 1.0)), above=0.0),
    **sets(dict(optm_betas=("optimizer.betas", [0.9, 0.999]), optm_weight_decay=("optimizer.weight_decay", 0.01))),
    **sets(dict(optm_warmup_steps=("scheduler.warm_up_steps", 20, lambda steps: [steps])), least=0),
    **sets({"ckpt.save_freq": ("checkpoint.save_iter", 20)}, least=1),
    **given(dict(seed="trainer.seed")),
    **only("optm_name", "Others are options of an experiment: optimizer=NAME", "AdamW"),
    **only("master_dtype", "Masters are float32", "float32"),
    **unused("fsdp_reduce_dtype", "gradients are averaged in the precision of the parameters", "float32"),
    **unused("fsdp_reshard_after_forward", "parameters are sharded again after each block", "default"),
    **unused(
        "ckpt.save_mode",
        "saving is synchronous; ckpt_type=dcp checkpoint.dcp_async_mode_enabled=true after --",
        "async",
    ),
}
LOGGING: dict[str, Row] = {
    **reads({"logger": [], "experiment_name": None}),
    **sets({"project_name": ("job.project", "cosmos_rl")}),
    **given(dict(group_name="job.group")),
    **unused("report_mfu", "benchmarks measure it"),
}
_PARALLEL: dict[str, Row] = {
    **reads(dict.fromkeys(SIZES_OF_GPUS, 1), least=1),
    **only("tp_size cp_size ep_size pp_size", NO_SPLIT, 1),
    **unused("pp_dynamic_shape pp_micro_batch_size pp_schedule pp_layers_per_stage", "see pp_size"),
    **unused("cp_rotate_method", "see cp_size"),
}
_LORA: dict[str, Row] = {
    **LORA,
    **reads(dict(lora_path=None, lora_alpha=8.0)),
    **only("target_modules", "Adapters stand beside every Linear layer", "all-linear", ["all-linear"]),
    **only("use_rslora", "Adapters count alpha / r, which is 1", False),
    **only(
        "lora_names primary_adapter modules_to_save alpha_pattern r_pattern",
        "There is one set of adapters, of one rank",
        *(None, []),
    ),
    **unused("init_lora_weights", "adapters begin by adding nothing, whatever their first factor"),
}
_POLICY: dict[str, Row] = {
    **under("parallelism", _PARALLEL),
    **under("lora", _LORA),
    **reads(dict(model_name_or_path="")),
    **sets(dict(model_gradient_checkpointing=(f"{CONFIG}.recompute", True))),
    **only("model_safetensor_path", "Weights lie beside config.json: model_name_or_path", None),
    **only("model_revision", "Fetch the revision first, then give its folder in model_name_or_path", None, ""),
    **only(
        "trainable_map freeze_pattern trainable_pattern",
        "What is trained is custom.pi05.train_expert_only, [policy.lora], or everything",
        None,
    ),
    **only("is_diffusers", "It belongs to recipes of world models", False),
    **unused("model_max_length", TEXT, 4096),
    **unused("aux_loss_coeff enable_liger_kernel enable_liger_cross_entropy", TEXT),
    **unused("enable_liger_fused_cross_entropy", TEXT),
}
DATASET: dict[str, Row] = {
    **reads(dict(name="", subset="")),
    **unused("revision local_dir", "simulators have their starts"),
}
_SPLIT = "training and validation begin at the same recorded starts, there too"
_NOT_KEPT_BACK = "no starts are kept back, there neither"
_ALGORITHM: dict[str, Row] = {
    **reads(dict(trainer_type="grpo", variant="grpo")),
    **reads(dict(temperature=1.0), above=0.0),
    **reads(dict(max_retry_for_on_policy=-1), least=-1),
    **sets(dict(epsilon_low=(f"{RL}.clip_ratio", 0.2), epsilon_high=(f"{RL}.clip_ratio_high", 0.2)), above=0.0),
    **sets(dict(clip_ratio_c=(f"{RL}.dual_clip", None)), above=1.0),
    **sets(dict(kl_beta=(f"{RL}.kl_beta", 0.0), entropy_coeff=(f"{LOSS}.entropy_bonus", 0.0))),
    **sets(dict(mu_iterations=(f"{RL}.updates", 1)), least=1),
    **sets(dict(dataloader_shuffle=("dataloader_train.shuffle", True))),
    **only("type", "Demonstrations are cloned by python -m scripts.train_policy", "grpo"),
    **only("algo", "Advantages are those of a group", "grpo"),
    **only("batch_size_per_optimize", f"An experiment's {RL}.minibatches are the steps of a batch", None),
    **only("loss_type", "Each episode counts alike, and within it each number of an action", "token-mean"),
    **only("unbiased_advantage", "Advantages are divided by the group's deviation", False),
    **only("unbiased_kl_estimate", "The distance to the reference is estimated by k3", False),
    **only("off_policy_masking_delta aipo_rho", NEWEST, None),
    **only("use_decoupled_loss", NEWEST, False),
    **only("positive_nll_coef", "The objective is GRPO's alone", None),
    **only("reference_reset_interval", "The reference is the policy that the run began with", None, 0),
    **only("bypass_reward use_remote_reward", "Rewards are the simulator's", False),
    **unused("lower_bound_ratio", "of language models there; a bound of this trainer is clip_ratio_c", 10.0),
    **unused("mini_batch", "vla.training_chunk_size decisions pass the policy together, there too", 2, 16, 256),
    **unused("behav_imp_weight_cap", "see use_decoupled_loss"),
    **unused("reset_optimizer_with_reference", "see reference_reset_interval"),
    **unused("advantage_low advantage_high", "grpo_vla and grpo_pi05 clip no advantages"),
    **unused("reward_function remote_reward overlong_reward", REWARD),
    **unused("group_reward_calculation filter_reward_metric", REWARD),
    **unused("on_policy max_inflight_steps outdated_rollout_fetch_batch_size", ON_POLICY),
    **unused("allowed_outdated_steps", ON_POLICY, 3, 4),
    **unused("uncentralized_training data_dispatch_as_rank_in_mesh", NO_CONTROLLER),
    **unused("min_filter_prefix_tokens", TEXT, 1),
    **unused("max_token_len_per_mini_batch unbiased_loss_max_tokens balance_dp_token prompt_column_name", TEXT),
    **unused("response_column_name conversation_column_name rollout_as_token_ids collect_rollout_logprobs", TEXT),
    **unused("use_rollout_logprobs_for_loss", "probabilities before an update are computed as those after it"),
    **unused("dataloader_seed", "the order of starts follows from train.seed"),
    **unused("enable_dataset_cache", "a start is two numbers, task and trial", False),
    **unused("dataloader_num_workers dataloader_prefetch_factor", "a start is two numbers, task and trial", 4),
    **unused("dataloader_batch_size", "a start is two numbers, task and trial"),
    **under("dataset", DATASET, unused("split", _SPLIT, "train"), unused("test_size", _NOT_KEPT_BACK, 496)),
}
_TRAIN: dict[str, Row] = {
    **under("train_policy", _ALGORITHM),
    **TRAIN,
    **reads(dict(epoch=1, max_num_steps=None), least=1),
    **reads(dict(output_dir="./outputs")),
    **sets(
        {
            "optm_warmup_start_factor": ("scheduler.f_start", 0.0, lambda factor: [factor]),
            "deterministic": ("trainer.cudnn.deterministic", False),
            "ckpt.max_keep": ("checkpoint.keep_last", 5, lambda number: None if number < 0 else number),
        }
    ),
    **only("resume", "For the run of another folder: checkpoint.load_path=RUN after --", False, True),
    **only("non_text", "Only recipes of policies are translated here", True),
    **only("optm_decay_ratio", NO_DECAY, None, 0.0),
    **only("optm_decay_type", NO_DECAY, None, "none"),
    **only("ema_enable", "Policies have no averaged weights", False),
    **only("logprob_dtype", "Probabilities are computed in float32", "float32"),
    **only("activation_offload", "A smaller vla.training_chunk_size takes less memory", False),
    **only("async_tp_enabled", NO_SPLIT, False),
    **only("fp8 fp4", "Policies are trained in bfloat16 or float32: param_dtype", None),
    **only("ckpt.save_freq_in_epoch", "Give save_freq, in iterations", 0),
    **only("ckpt.upload_hf", "Upload what scripts.convert wrote: hf upload", False),
    **only("ckpt.upload_s3", "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX", False),
    **unused("ckpt.export_safetensors", "python -m scripts.convert writes a policy in its public layout"),
    **unused("ckpt.hf_repo_name", "see upload_hf"),
    **unused("ckpt.s3_bucket ckpt.s3_prefix", "see upload_s3"),
    **unused("timestamp", "the same command goes on where it stopped, in the same folder"),
    **unused("optm_impl", "the fastest kernel that is found is taken", "fused"),
    **unused("optm_min_lr_factor", "see optm_decay_type"),
    **unused("ema_decay ema_update_step_interval", "see ema_enable"),
    **unused(
        "transfer_dtype",
        "the policy's own precision and place count: weights are not sent where players train",
        "float32",
    ),
    **unused(
        "fsdp_offload", "weights stay on the GPU: scripts.plan --recipe shows how much of it they take", *(True, False)
    ),
    **unused("compile", "policies run as they are; the results are the same", True, False),
    **unused("sync_weight_interval", ON_POLICY, 1, 4),
    **unused("coalesce_weight_sync", ON_POLICY),
    **unused("fa_version", "PyTorch's fused attention is used"),
    **unused("local_dataset", NO_CONTROLLER),
    **unused("force_use_hf", "policies are built from transformers' modules"),
    **unused("sequence_packing", TEXT),
    **unused("save_ckpt_at_exit signal_to_handle", "a run that is asked to stop (SIGTERM, SIGINT) saves first"),
}
_WHOLE = "policies draw from the whole distribution, there too"
_ROLLOUT: dict[str, Row] = {
    **under("parallelism", _PARALLEL),
    **reads({"n_generation": 16}, least=1),
    **reads({"sampling_config.temperature": 1.0}),
    **only("backend", "Policies decide by themselves", "vla"),
    **only("quantization", "The policy that is trained decides", "none"),
    **unused("seed", "what is drawn follows from train.seed and the episode's number"),
    **unused("batch_size", "vla.num_envs episodes are played at once, whatever groups they belong to", 1, 4),
    **under(
        "sampling_config",
        unused("top_p", _WHOLE, 1.0),
        unused("top_k", _WHOLE, 0, 50),
        unused("repetition_penalty use_flashinfer", _WHOLE),
    ),
    **unused(dict(enforce_eager=False, max_response_length=1024), TEXT),
    **unused("include_stop_str_in_output gpu_memory_utilization enable_chunked_prefill n_generation_to_batch", TEXT),
    **unused("n_generation_mini_batch vllm_use_flashinfer multi_turn_config mode async_config async_r2r_sync", TEXT),
    **unused("prefetch_rollout prefetch_queue_maxsize broadcast_all_params", TEXT),
}
_VALIDATION: dict[str, Row] = {
    **reads(dict(enable=False)),
    **reads(dict(batch_size=None), least=1),
    **sets(dict(freq=("trainer.validation_iter", 20)), least=1),
    **sets(dict(val_before_train=("trainer.validate_at_start", False))),
    **only("n_generation", "Each start is played once", 1),
    **under("dataset", DATASET, unused("split", _SPLIT, "val"), unused("test_size", _NOT_KEPT_BACK)),
    **unused("temperature top_p top_k repetition_penalty", "validation is greedy"),
    **unused("max_response_length", TEXT),
    **unused("reward_function use_remote_reward remote_reward", REWARD),
}
_VLA: dict[str, Row] = {
    **reads(dict(vla_type="openvla-oft", save_video=False, use_proprio=False, unnorm_key="libero_10_no_noops")),
    **reads(dict(num_envs=1, training_chunk_size=16, num_images_in_input=1), least=1),
    **reads(dict(max_steps=None, height=256, width=256), least=1),
    **given(dict(filter_lower_bound=f"{RL}.lower_bound", filter_upper_bound=f"{RL}.upper_bound")),
    **unused("proprio_dim", "the checkpoint's statistics have it", 7),
    **unused("continuous", "always on: an idle environment takes the next episode; each goes as it would anyway"),
    **unused("trace_verbosity", "timer/* of the metrics"),
    **unused("use_subprocess", "LIBERO runs in processes of its own, BEHAVIOR in the main one"),
}
_PI05: dict[str, Row] = {
    **reads(dict.fromkeys(PI05_OPTIONS)),
    **reads(dict.fromkeys(PI05_SIZES), least=1),
    **unused("replan_steps", f"Cosmos-RL executes all of action_chunk; {POLICY}.execute_steps=N after --", 5),
}
FIELDS: dict[str, Row] = {
    **under("policy", _POLICY),
    **under("train", _TRAIN),
    **under("rollout", _ROLLOUT),
    **under("validation", _VALIDATION),
    **under("vla", _VLA),
    **under("custom.pi05", _PI05),
    **under("custom", _PI05, reads(dict(trials_per_task=None), least=1)),
    **under("logging", LOGGING, unused("log_interval", "every iteration is logged: it is a whole rollout")),
    **unused("logging.multi_modal_log_interval", "scripts.evaluate_policy --videos"),
    **reads(dict(mode="disaggregated")),
    **only("distillation", "Policies learn from rewards here", None),
    **unused("redis eth_ips", NO_CONTROLLER),
    **unused("profiler", "trainer.profiling, of scripts.train"),
}
