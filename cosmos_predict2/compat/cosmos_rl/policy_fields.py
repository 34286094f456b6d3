# SPDX-License-Identifier: Apache-2.0
"""Every field of Cosmos-RL's recipes of policies (VLA), with its default there and what becomes of it here."""

from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.fields import Given, Only, Read, Row, To, Unused, under

CONFIG, RL = "model.config", "model.config.rl"
LOSS, POLICY, ENV = f"{RL}.loss", f"{CONFIG}.policy", f"{CONFIG}.env"
VLA_TYPES = {"openvla-oft": "openvla_oft", "openvla": "openvla", "pi05": "pi05"}  # -> as experiments are called
TRAINERS = {"openvla-oft": "grpo_vla", "openvla": "grpo_vla", "pi05": "grpo_pi05"}
NO_SPLIT = "Policies are trained data-parallel: n_init_replicas, dp_shard_size and dp_replicate_size count GPUs"
TEXT = Unused("of language models that write text; a decision here has a fixed number of tokens")
NO_CONTROLLER = Unused("there is no controller: each process plays its own episodes")
ON_POLICY = Unused("every rollout is played with the newest weights, and trained on before the next")
REWARD = Unused("an episode earns 1 where it succeeds, else 0")
RECORDED = Unused("episodes are kept on the device, where they are played")
WHOLE = Unused("the policy's own precision and place count: weights are not sent where players train")

_PARALLEL: Mapping[str, Row] = {
    "n_init_replicas": Read(1, "a factor of the number of GPUs"),
    "dp_shard_size": Read(1, f"{CONFIG}.fsdp_shard_size, and a factor of the number of GPUs"),
    "dp_replicate_size": Read(1, "a factor of the number of GPUs"),
    "tp_size": Only((1,), NO_SPLIT),
    "cp_size": Only((1,), NO_SPLIT),
    "ep_size": Only((1,), NO_SPLIT),
    "pp_size": Only((1,), NO_SPLIT),
    **dict.fromkeys(
        ("pp_dynamic_shape", "pp_micro_batch_size", "pp_schedule", "pp_layers_per_stage"), Unused("see pp_size")
    ),
    "cp_rotate_method": Unused("see cp_size"),
}
_POLICY: Mapping[str, Row] = {
    **under("parallelism", _PARALLEL),
    "model_name_or_path": Read("", f"{POLICY}.path: a folder, or a repository of the hub"),
    "model_safetensor_path": Only((None,), "Weights lie beside config.json: model_name_or_path"),
    "model_revision": Only((None, ""), "Fetch the revision first, then give its folder in model_name_or_path"),
    "model_max_length": TEXT,
    "model_gradient_checkpointing": To(f"{CONFIG}.recompute", True),
    "lora.r": Read(8, f"{POLICY}.lora_rank, where there is [policy.lora]"),
    "lora.lora_path": Read(None, f"{POLICY}.lora_path: adapters that are added first"),
    "lora.lora_alpha": Read(8.0, "must be r"),
    "lora.lora_dropout": Only((0.0, 0), "Adapters have no dropout"),
    "lora.target_modules": Only(("all-linear", ["all-linear"]), "Adapters stand beside every Linear layer"),
    "lora.use_rslora": Only((False,), "Adapters count alpha / r, which is 1"),
    "lora.init_lora_weights": Unused("adapters begin by adding nothing, whatever their first factor"),
    **dict.fromkeys(
        (f"lora.{name}" for name in ("lora_names", "primary_adapter", "modules_to_save", "alpha_pattern", "r_pattern")),
        Only((None, []), "There is one set of adapters, of one rank"),
    ),
    **dict.fromkeys(
        ("trainable_map", "freeze_pattern", "trainable_pattern"),
        Only((None,), "What is trained is custom.pi05.train_expert_only, [policy.lora], or everything"),
    ),
    "is_diffusers": Only((False,), "It belongs to recipes of world models"),
    "aux_loss_coeff": TEXT,
    **dict.fromkeys((f"enable_liger_{name}" for name in ("kernel", "cross_entropy", "fused_cross_entropy")), TEXT),
}
_ALGORITHM: Mapping[str, Row] = {
    "type": Only(("grpo",), "Demonstrations are cloned by python -m scripts.train_policy"),
    "trainer_type": Read("grpo", "must be grpo_vla for OpenVLA, grpo_pi05 for PI0.5"),
    "variant": Read("grpo", f"dapo: {RL}.max_rollouts, further starts until enough groups have spread; else grpo"),
    "max_retry_for_on_policy": Read(-1, f"{RL}.max_rollouts of dapo, less one; -1: as many as it takes"),
    "temperature": Read(1.0, f"{POLICY}.temperature of OpenVLA; must be rollout.sampling_config.temperature"),
    "epsilon_low": To(f"{LOSS}.clip_low", 0.2),
    "epsilon_high": To(f"{LOSS}.clip_high", 0.2),
    "clip_ratio_c": To(f"{LOSS}.dual_clip", None),
    "lower_bound_ratio": Unused("of language models there; a bound of this trainer is clip_ratio_c"),
    "kl_beta": To(f"{LOSS}.kl_beta", 0.0),
    "entropy_coeff": To(f"{LOSS}.entropy_bonus", 0.0),
    "mu_iterations": To(f"{RL}.updates", 1),
    "batch_size_per_optimize": Only((None,), f"An experiment's {RL}.minibatches are the steps of a batch"),
    "mini_batch": Unused("vla.training_chunk_size decisions pass the policy together, there too"),
    "max_token_len_per_mini_batch": TEXT,
    "loss_type": Only(("token-mean",), "Each episode counts alike, and within it each number of an action"),
    "unbiased_loss_max_tokens": TEXT,
    "unbiased_advantage": Only((False,), "Advantages are divided by the group's deviation"),
    "unbiased_kl_estimate": Only((False,), "The distance to the reference is estimated by k3"),
    "off_policy_masking_delta": Only((None,), "Every rollout is played with the newest weights"),
    "aipo_rho": Only((None,), "Every rollout is played with the newest weights"),
    "use_decoupled_loss": Only((False,), "Every rollout is played with the newest weights"),
    "behav_imp_weight_cap": Unused("see use_decoupled_loss"),
    "positive_nll_coef": Only((None,), "The objective is GRPO's alone"),
    "reference_reset_interval": Only((None, 0), "The reference is the policy that the run began with"),
    "reset_optimizer_with_reference": Unused("see reference_reset_interval"),
    "advantage_low": Unused("grpo_vla and grpo_pi05 clip no advantages"),
    "advantage_high": Unused("grpo_vla and grpo_pi05 clip no advantages"),
    "algo": Only(("grpo",), "Advantages are those of a group"),
    "bypass_reward": Only((False,), "Rewards are the simulator's"),
    "use_remote_reward": Only((False,), "Rewards are the simulator's"),
    **dict.fromkeys(
        ("reward_function", "remote_reward", "overlong_reward", "group_reward_calculation", "filter_reward_metric"),
        REWARD,
    ),
    **dict.fromkeys(("on_policy", "allowed_outdated_steps", "max_inflight_steps"), ON_POLICY),
    "outdated_rollout_fetch_batch_size": ON_POLICY,
    "uncentralized_training": NO_CONTROLLER,
    **dict.fromkeys(
        ("min_filter_prefix_tokens", "balance_dp_token", "prompt_column_name", "response_column_name"), TEXT
    ),
    **dict.fromkeys(
        ("conversation_column_name", "rollout_as_token_ids", "collect_rollout_logprobs"),
        TEXT,
    ),
    "use_rollout_logprobs_for_loss": Unused("probabilities before an update are computed as those after it"),
    "dataloader_shuffle": To("dataloader_train.shuffle", True),
    "dataloader_seed": Unused("the order of starts follows from train.seed"),
    "data_dispatch_as_rank_in_mesh": NO_CONTROLLER,
    **dict.fromkeys(
        ("enable_dataset_cache", "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_batch_size"),
        Unused("a start is two numbers, task and trial"),
    ),
}
DATASET: Mapping[str, Row] = {
    "name": Read("", "the simulator: libero, b1k (BEHAVIOR-1K) or toy"),
    "subset": Read("", "of libero the suite: libero_spatial, libero_object, libero_goal, libero_10, _90, _all"),
    "split": Unused("training and validation begin at the same recorded starts, there too"),
    "test_size": Unused("no starts are kept back, there neither"),
    "revision": Unused("simulators have their starts"),
    "local_dir": Unused("simulators have their starts"),
}
_CHECKPOINT: Mapping[str, Row] = {
    "enable_checkpoint": Read(False, "ckpt_type: dummy where it is false"),
    "save_freq": To("checkpoint.save_iter", 20),
    "save_freq_in_epoch": Only((0,), "Give save_freq, in iterations"),
    "save_mode": Unused("saving is synchronous; ckpt_type=dcp checkpoint.dcp_async_mode_enabled=true after --"),
    "max_keep": To("checkpoint.keep_last", 5, lambda number: None if number < 0 else number),
    "export_safetensors": Unused("python -m scripts.convert writes a policy in its public layout"),
    "upload_hf": Only((False,), "Upload what scripts.convert wrote: hf upload"),
    "hf_repo_name": Unused("see upload_hf"),
    "upload_s3": Only((False,), "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX"),
    "s3_bucket": Unused("see upload_s3"),
    "s3_prefix": Unused("see upload_s3"),
}
_TRAIN: Mapping[str, Row] = {
    **under("train_policy", {**_ALGORITHM, **under("dataset", DATASET)}),
    **under("ckpt", _CHECKPOINT),
    "resume": Only((False, True), "For the run of another folder: checkpoint.load_path=RUN after --"),
    "epoch": Read(1, "trainer.max_iter: passes over the starts"),
    "max_num_steps": Read(None, "trainer.max_iter, where it is the smaller one"),
    "train_batch_per_replica": Read(8, "episodes of a step, for each of n_init_replicas: dataloader_train.batch_size"),
    "non_text": Only((True,), "Only recipes of policies are translated here"),
    "output_dir": Read("./outputs", "--out of an evaluation; runs go to IMAGINAIRE_OUTPUT_ROOT/project/group/name"),
    "timestamp": Unused("the same command goes on where it stopped, in the same folder"),
    "epsilon": To("optimizer.eps", 1e-6),
    "optm_name": Only(("AdamW",), "Others are options of an experiment: optimizer=NAME"),
    "optm_lr": To("optimizer.lr", 1e-6),
    "optm_impl": Unused("the fastest kernel that is found is taken"),
    "optm_weight_decay": To("optimizer.weight_decay", 0.01),
    "optm_betas": To("optimizer.betas", [0.9, 0.999]),
    "optm_warmup_steps": To("scheduler.warm_up_steps", 20, lambda steps: [steps]),
    "optm_warmup_start_factor": To("scheduler.f_start", 0.0, lambda factor: [factor]),
    "optm_decay_ratio": Only((None, 0.0), "Schedules with a decay are options of an experiment: scheduler=NAME"),
    "optm_decay_type": Only((None, "none"), "Schedules with a decay are options of an experiment: scheduler=NAME"),
    "optm_min_lr_factor": Unused("see optm_decay_type"),
    "optm_grad_norm_clip": To("trainer.callbacks.grad_clip.clip_norm", 1.0),
    "ema_enable": Only((False,), "Policies have no averaged weights"),
    "ema_decay": Unused("see ema_enable"),
    "ema_update_step_interval": Unused("see ema_enable"),
    "param_dtype": Read("bfloat16", f"{CONFIG}.precision"),
    "master_dtype": Only(("float32",), "Masters are float32"),
    "transfer_dtype": WHOLE,
    "logprob_dtype": Only(("float32",), "Probabilities are computed in float32"),
    "fsdp_reduce_dtype": Unused("gradients are averaged in the precision of the parameters"),
    "fsdp_offload": Unused("weights stay on the GPU: scripts.plan --recipe says how much of it they take"),
    "fsdp_reshard_after_forward": Unused("parameters are sharded again after each block"),
    "activation_offload": Only((False,), "A smaller vla.training_chunk_size takes less memory"),
    "compile": Unused("policies run as they are; the results are the same"),
    "async_tp_enabled": Only((False,), NO_SPLIT),
    "sync_weight_interval": ON_POLICY,
    "coalesce_weight_sync": ON_POLICY,
    "deterministic": To("trainer.cudnn.deterministic", False),
    "seed": Given("trainer.seed", "0"),
    **dict.fromkeys(("fp8", "fp4"), Only((None,), "Policies are trained in bfloat16 or float32: param_dtype")),
    "fa_version": Unused("PyTorch's fused attention is used"),
    "local_dataset": NO_CONTROLLER,
    "force_use_hf": Unused("policies are built from transformers' modules"),
    "sequence_packing": TEXT,
    "save_ckpt_at_exit": Unused("a run that is asked to stop saves first"),
    "signal_to_handle": Unused("a run that is asked to stop (SIGTERM, SIGINT) saves first"),
}
_ROLLOUT: Mapping[str, Row] = {
    "backend": Only(("vla",), "Policies decide by themselves"),
    "n_generation": Read(16, f"{RL}.group_size; 1: the recipe is an evaluation"),
    "batch_size": Unused("vla.num_envs episodes are played at once, whatever groups they belong to"),
    "sampling_config.temperature": Read(1.0, "must be train.train_policy.temperature, of OpenVLA"),
    **dict.fromkeys(
        (f"sampling_config.{name}" for name in ("top_p", "top_k", "repetition_penalty", "use_flashinfer")),
        Unused("policies draw from the whole distribution, there too"),
    ),
    **under("parallelism", _PARALLEL),
    **dict.fromkeys(
        (
            *("enforce_eager", "include_stop_str_in_output", "gpu_memory_utilization", "enable_chunked_prefill"),
            *("max_response_length", "n_generation_to_batch", "n_generation_mini_batch", "vllm_use_flashinfer"),
            *("multi_turn_config", "mode", "async_config", "async_r2r_sync", "prefetch_rollout"),
            *("prefetch_queue_maxsize", "broadcast_all_params"),
        ),
        TEXT,
    ),
    "quantization": Only(("none",), "The policy that is trained decides"),
    "seed": Unused("what is drawn follows from train.seed and the episode's number"),
}
_VALIDATION: Mapping[str, Row] = {
    "enable": Read(False, "trainer.run_validation"),
    "freq": To("trainer.validation_iter", 20),
    "val_before_train": To("trainer.validate_at_start", False),
    "batch_size": Read(None, "dataloader_val.batch_size of a process; vla.num_envs where it is missing"),
    **under("dataset", DATASET),
    "temperature": Unused("validation is greedy"),
    "n_generation": Only((1,), "Each start is played once"),
    **dict.fromkeys(("top_p", "top_k", "repetition_penalty"), Unused("validation is greedy")),
    "max_response_length": TEXT,
    **dict.fromkeys(("reward_function", "use_remote_reward", "remote_reward"), REWARD),
}
_OF_OPENVLA = "of OpenVLA; PI0.5's is in custom.pi05"
_VLA: Mapping[str, Row] = {
    "vla_type": Read("openvla-oft", "the policy: " + ", ".join(VLA_TYPES)),
    "num_envs": Read(1, f"{ENV}.num_envs and {CONFIG}.eval_env.num_envs: of a process, at once"),
    "use_proprio": Read(False, f"{POLICY}.use_proprio {_OF_OPENVLA}"),
    "proprio_dim": Unused("the checkpoint's statistics have it"),
    "num_images_in_input": Read(1, f"{POLICY}.num_images_in_input, or num_images"),
    "training_chunk_size": Read(
        16, f"decisions that pass the policy together: {RL}.micro_batches, loss.slice_decisions"
    ),
    "unnorm_key": Read("libero_10_no_noops", f"{POLICY}.unnorm_key of OpenVLA"),
    "max_steps": Read(None, "steps of an episode: 512 of LIBERO, 2,000 of BEHAVIOR-1K"),
    "height": Read(256, "of the simulator's pictures"),
    "width": Read(256, "of the simulator's pictures"),
    "filter_lower_bound": Given(f"{RL}.lower_bound", "no bound of a group's share of successes"),
    "filter_upper_bound": Given(f"{RL}.upper_bound", "no bound of a group's share of successes"),
    "continuous": Unused("always on: an idle environment takes the next episode; what happens in each is the same"),
    "save_video": Read(False, "of an evaluation; of a run: scripts.evaluate_policy --videos"),
    "trace_verbosity": Unused("timer/* of the metrics"),
    "use_subprocess": Unused("LIBERO runs in processes of its own, BEHAVIOR in the main one"),
}
_PI05: Mapping[str, Row] = {
    **{
        name: Read(None, f"{POLICY}.{name}; that of the checkpoint's config.json where it is missing")
        for name in (
            *("num_steps", "action_chunk", "action_env_dim", "noise_method", "noise_level", "noise_anneal"),
            *("noise_params", "noise_logvar_range", "joint_logprob", "safe_get_logprob", "ignore_last"),
            *("train_expert_only", "discrete_state_input", "max_token_len", "action_horizon", "action_dim"),
        )
    },
    "replan_steps": Unused(f"Cosmos-RL executes all of action_chunk; {POLICY}.execute_steps=N after --"),
}
FIELDS: Mapping[str, Row] = {
    **under("policy", _POLICY),
    **under("train", _TRAIN),
    **under("rollout", _ROLLOUT),
    **under("validation", _VALIDATION),
    **under("vla", _VLA),
    **under("custom.pi05", _PI05),
    **under("custom", _PI05),
    "custom.trials_per_task": Read(None, "starts of each task, of an evaluation: 50, of BEHAVIOR-1K 10"),
    "logging.logger": Read([], "job.wandb_mode: online where wandb is among them"),
    "logging.project_name": To("job.project", "cosmos_rl"),
    "logging.group_name": Given("job.group", "reinforcement_learning"),
    "logging.experiment_name": Read(None, "job.name; None: that of the experiment"),
    "logging.log_interval": Unused("every iteration is logged: it is a whole rollout"),
    "logging.multi_modal_log_interval": Unused("scripts.evaluate_policy --videos"),
    "logging.report_mfu": Unused("benchmarks measure it"),
    "redis": NO_CONTROLLER,
    "eth_ips": NO_CONTROLLER,
    "mode": Read("disaggregated", "colocated: GPUs play and train in turn; disaggregated: others play, by Ray"),
    "profiler": Unused("trainer.profiling, of scripts.train"),
    "distillation": Only((None,), "Policies learn from rewards here"),
}
# What fields without effect have in Cosmos-RL's published recipes (89f2e5b); other values are reported.
PUBLISHED: Mapping[str, tuple[Any, ...]] = {
    "train.optm_impl": ("fused",),
    "train.compile": (True, False),
    "train.fsdp_reduce_dtype": ("float32",),
    "train.transfer_dtype": ("float32",),
    "train.fsdp_offload": (True, False),
    "train.fsdp_reshard_after_forward": ("default",),
    "train.sync_weight_interval": (1, 4),
    "train.train_policy.dataset.split": ("train",),
    "train.train_policy.dataset.test_size": (496,),
    "train.train_policy.enable_dataset_cache": (False,),
    "train.train_policy.dataloader_num_workers": (4,),
    "train.train_policy.dataloader_prefetch_factor": (4,),
    "train.train_policy.lower_bound_ratio": (10.0,),
    "train.train_policy.mini_batch": (2, 16, 256),
    "train.train_policy.min_filter_prefix_tokens": (1,),
    "train.train_policy.allowed_outdated_steps": (3, 4),
    "train.ckpt.save_mode": ("async",),
    "policy.model_max_length": (4096,),
    "rollout.batch_size": (1, 4),
    "rollout.max_response_length": (1024,),
    "rollout.enforce_eager": (False,),
    "rollout.sampling_config.top_p": (1.0,),
    "rollout.sampling_config.top_k": (0, 50),
    "validation.dataset.split": ("val",),
    "vla.proprio_dim": (7,),
    "custom.replan_steps": (5,),
    "custom.pi05.replan_steps": (5,),
}
# What numbers must be: whole and at least, or above; those that a recipe leaves out have their default.
AT_LEAST: Mapping[str, int] = {
    **{f"{part}.parallelism.{name}": 1 for part in ("policy", "rollout")
       for name in ("n_init_replicas", "dp_shard_size", "dp_replicate_size")},
    **dict.fromkeys(("vla.num_envs", "vla.training_chunk_size", "vla.num_images_in_input", "vla.max_steps"), 1),
    **dict.fromkeys(("vla.height", "vla.width", "custom.trials_per_task", "policy.lora.r"), 1),
    **dict.fromkeys(("train.epoch", "train.max_num_steps", "train.train_batch_per_replica"), 1),
    **dict.fromkeys(("train.train_policy.mu_iterations", "train.ckpt.save_freq", "validation.freq"), 1),
    **dict.fromkeys(("validation.batch_size", "rollout.n_generation"), 1),
    **{f"{section}.{name}": 1 for section in ("custom", "custom.pi05") for name in ("num_steps", "max_token_len")},
    **{f"{section}.{name}": 1 for section in ("custom", "custom.pi05")
       for name in ("action_chunk", "action_env_dim", "action_horizon", "action_dim")},
    "train.optm_warmup_steps": 0,
    "train.train_policy.max_retry_for_on_policy": -1,
}  # fmt: skip
ABOVE: Mapping[str, float] = {
    **dict.fromkeys(("train.optm_lr", "train.epsilon", "train.optm_grad_norm_clip"), 0.0),
    **dict.fromkeys((f"train.train_policy.{name}" for name in ("temperature", "epsilon_low", "epsilon_high")), 0.0),
    "train.train_policy.clip_ratio_c": 1.0,
}
