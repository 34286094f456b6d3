# SPDX-License-Identifier: Apache-2.0
"""Every field of Cosmos-RL's recipes for world models ("WFM"), with its default there and what becomes of it here."""

import math
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.fields import OF_RL, SUPERVISED, Given, Only, Read, Row, To, Unused, under
from cosmos_predict2.diffusion.flow_time import NUM_TIMESTEPS

PIPE, RL, NET = "model.config.pipe_config", "model.config.rl", "model.config.pipe_config.net"
BATCH_KEYS = Unused("batches here have fixed keys, of the same names")
ANSWERED_BY_SPLIT = "Models are split by model.fsdp_shard_size and model_parallel.context_parallel_size"
MEGATRON = Unused("it tunes tensor, pipeline or expert parallelism, which world models do not use")

MODEL: Mapping[str, Row] = {
    "text_encoder_class": Read("T5", "T5 embeddings of the data; reason1...: captions encoded by Cosmos-Reason1"),
    "fsdp_shard_size": Read(8, f"model.config.fsdp_shard_size, and a factor of the number of GPUs; 1: {RL} unsharded"),
    "dp_replicate_size": Read(1, "a factor of the number of GPUs"),
    "sigma_data": To(f"{PIPE}.sigma_data", 1.0),
    "precision": Read("bfloat16", f"model.config.precision and {PIPE}.precision"),
    **dict.fromkeys(("input_data_key", "input_caption_key", "input_image_key"), BATCH_KEYS),
    "loss_reduce": To("model.config.loss_reduce", "mean", when=SUPERVISED),
    "loss_scale": Read(10.0, f"{RL}.loss_scale; model.config.loss_scale with rl.enabled=false"),
    "use_torch_compile": To("model.config.torch_compile", False),
    "adjust_video_noise": To("model.config.adjust_video_noise", True),
    "state_ch": To(f"{PIPE}.state_ch", 16),
    "state_t": To(f"{PIPE}.state_t", 24),
    "resolution": To(f"{PIPE}.resolution", "480"),
    "scaling": Only(("rectified_flow",), "Predict2.5 is a flow model; for the EDM form choose experiment=predict2_..."),
    "rectified_flow_t_scaling_factor": To(f"{PIPE}.flow.timestep_scale", 1.0, lambda factor: factor / NUM_TIMESTEPS),
    "rectified_flow_loss_weight_uniform": Unused("the losses of these runs do not use it"),
    "resize_online": To(f"{PIPE}.resize_online", True),
    "min_num_conditional_frames": To(f"{PIPE}.min_num_conditional_frames", 1, when=SUPERVISED),
    "max_num_conditional_frames": To(f"{PIPE}.max_num_conditional_frames", 2, when=SUPERVISED),
    "sigma_conditional": Read(1e-4, f"{PIPE}.flow.conditional_frame_timestep, where use_rf_ckpts is false"),
    "use_rf_ckpts": Read(False, f"{PIPE}.flow.conditional_frame_timestep: true is -1, that of the other frames"),
    "conditioning_strategy": Only(("frame_replace",), "Released weights condition by replaced frames"),
    "denoise_replace_gt_frames": To(f"{PIPE}.flow.replace_given_frames", True),
    "high_sigma_strategy": Unused(
        "Predict2.5 draws flow times here; the data term of these recipes shares the rollout's"
    ),
    "high_sigma_ratio": Unused("see high_sigma_strategy"),
    "low_sigma_ratio": Unused("see high_sigma_strategy"),
    "text_encoder_config.compute_online": Read(False, "whether captions are encoded in training"),
    "text_encoder_config.embedding_concat_strategy": Read("mean_pooling", "model.config.text.encoder.strategy"),
    "text_encoder_config.n_layers_per_group": Read(5, "model.config.text.encoder.n_layers_per_group"),
    "text_encoder_config.ckpt_path": Read("nvidia/Cosmos-Reason1-7B", "model.config.text.encoder.path"),
    "text_encoder_config.tokenizer_type": Unused("the tokenizer lies beside the encoder's weights"),
    "text_encoder_config.encoder_model_config": Unused("the encoder's sizes lie beside its weights"),
    "tokenizer.chunk_duration": Given(f"{PIPE}.tokenizer.chunk_duration", "81, as there"),
    "tokenizer.load_mean_std": Given(f"{PIPE}.tokenizer.load_mean_std", "false, as there"),
    "tokenizer.temporal_window": Given(f"{PIPE}.tokenizer.temporal_window", "16, as there"),
    "tokenizer.compile_encode": Only((False,), "The tokenizer is not compiled here; leave it out"),
}
_NET: dict[str, Any] = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop",
    "use_adaln_lora": True,
    "adaln_lora_dim": 256,
    "atten_backend": "minimal_a2a",
    "extra_per_block_abs_pos_emb": False,
    "rope_h_extrapolation_ratio": 3.0,
    "rope_w_extrapolation_ratio": 3.0,
    "rope_t_extrapolation_ratio": 1.0,
    "rope_enable_fps_modulation": False,
    "crossattn_emb_channels": 1024,
}
NETWORK: Mapping[str, Row] = {
    **{name: Given(f"{NET}.{name}", f"{default} in the released sizes") for name, default in _NET.items()},
    **{
        name: Read(default, "the size: 2B (2048, 28, 16), 14B (5120, 36, 40), or tiny (128, 4, 2)")
        for name, default in {"model_channels": 2048, "num_blocks": 28, "num_heads": 16}.items()
    },
    "sac_config.mode": To(f"{NET}.sac_config.mode", "block_wise"),
    "sac_config.every_n_blocks": To(f"{NET}.sac_config.every_n_blocks", 1),
    "use_crossattn_projection": Read(False, f"{NET}.crossattn_proj_in_channels; null where it is false"),
    "crossattn_proj_in_channels": Read(100352, f"{NET}.crossattn_proj_in_channels"),
}
NOISE: Mapping[str, Row] = {
    "ema.enabled": To(f"{PIPE}.ema.enabled", True),
    "ema.rate": To(f"{PIPE}.ema.rate", 0.1),
    "ema.iteration_shift": To(f"{PIPE}.ema.iteration_shift", 0),
    "sde.p_mean": Unused("Predict2.5 draws flow times here (model.config.train_time_distribution)"),
    "sde.p_std": Unused("see sde.p_mean"),
    "sde.sigma_max": To(f"{PIPE}.timestamps.t_max", 200.0),
    "sde.sigma_min": To(f"{PIPE}.timestamps.t_min", 0.01),
}
SAME_NAMES = {
    "update_ref_every_iter": 16,
    "num_rollout": 8,
    "sample_steps": 10,
    "train_on": [0, 1, 2, 3, 4, 5, 6, 7],
    "on_policy": True,
    "s_churn": 1.0,
    "s_noise": 1.0,
    "guidance": 0.0,
    "min_num_conditional_frames": 1,
    "max_num_conditional_frames": 1,
    "clip_ratio": 1e-4,
    "kl_beta": 0.01,
    "data_beta": 0.0,
    "use_rl_sigma_and_noise": True,
    "data_on_first_only": False,
    "use_same_seed": True,
    "exp_reward": False,
}
REWARD = "reward_config.remote_reward"
REINFORCEMENT: Mapping[str, Row] = {
    **{name: To(f"{RL}.{name}", default, when=OF_RL) for name, default in SAME_NAMES.items()},
    # Both may be texts, such as "inf".
    "s_t_max": To(f"{RL}.s_t_max", None, lambda limit: math.inf if limit is None else float(limit), when=OF_RL),
    "s_t_min": To(f"{RL}.s_t_min", None, lambda limit: float(limit or 0.0), when=OF_RL),
    "enabled": Read(True, "false: supervised post-training"),
    "solver_option": Only(("2ab",), "There it changes the gradient and not the rollout; after --: rl.solver_option"),
    "reward_config.ALL_REWARD_MODELS": Unused("the rewards are those that are enabled"),
    "reward_config.adv_clip_max": To(f"{RL}.advantage.adv_clip_max", 5.0, when=OF_RL),
    "reward_config.adv_clip_min": Read(-5.0, "must be -adv_clip_max"),
    "reward_config.aesthetic.enabled": Only((False,), "Serve a judge and choose it by remote_reward.reward_fn"),
    "reward_config.aesthetic.model_path": Unused("no aesthetic judge runs in the trainer"),
    "reward_config.image_reward.enabled": Only((False,), "Serve a judge and choose it by remote_reward.reward_fn"),
    "reward_config.image_reward.model_path": Unused("no ImageReward runs in the trainer"),
    "reward_config.fake_reward.enabled": Read(False, "an in-process reward for smooth videos; there it is 0"),
    "reward_config.fake_reward.reward_fn": Unused("there is one"),
    "reward_config.fake_reward.scale": Unused("advantages are normalised"),
    f"{REWARD}.enabled": Read(True, "a reward of the service"),
    f"{REWARD}.reward_fn": Read("dance_grpo", f"its name, also in {RL}.rewards"),
    **{
        f"{REWARD}.{name}": Read(default, f"{RL}.rewards.NAME.make.{ours}")
        for name, default, ours in (
            ("score_key", "overall_reward", "score_key"),
            ("scale", 1.0, "scale"),
            ("reward_clip_min", -5.0, "clip"),
            ("reward_clip_max", 5.0, "clip"),
            ("token", "", "token (WFM_REWARD_TOKEN counts more)"),
            ("enqueue_url", "", "enqueue_url (WFM_REWARD_ENQUEUE_URL counts more)"),
            ("fetch_url", "", "fetch_url (WFM_REWARD_FETCH_URL counts more)"),
        )
    },
}
OPTIMIZER: Mapping[str, Row] = {
    **{
        f"optimizer.{name}": To(f"optimizer.{name}", default)
        for name, default in {
            "optim_type": "fusedadam",
            "lr": 1e-5,
            "weight_decay": 1e-4,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "master_weights": True,
            "capturable": True,
        }.items()
    },
    "scheduler.scheduler_type": Only(("lambda_linear",), "Others: scheduler=lambdacosine or constant after --"),
    **{
        f"scheduler.{name}": To(f"scheduler.{name}", default)
        for name, default in {
            "verbosity_interval": 0,
            "warm_up_steps": [1000],
            "cycle_lengths": [10_000_000_000_000],
            "f_start": [1e-6],
            "f_max": [1.0],
            "f_min": [1.0],
        }.items()
    },
}
_PROFILING = ("enable_profiling", "enable_memory_snapshot", "profile_freq", "target_ranks", "record_shape")
TRAINER: Mapping[str, Row] = {
    "use_s3": Only((False,), "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX, which runs are written to"),
    "distributed_parallelism": Read("fsdp", "trainer.distributed_parallelism; ddp where fsdp_shard_size is 1"),
    "seed": To("trainer.seed", 0),
    "max_iter": To("trainer.max_iter", 25),
    "max_val_iter": Given("trainer.max_val_iter", "no limit"),
    "logging_iter": To("trainer.logging_iter", 2),
    "run_validation": To("trainer.run_validation", False),
    "validation_iter": To("trainer.validation_iter", 100),
    "timeout_period": Given("trainer.timeout_period", "1800 s without progress end a run"),
    "memory_format": To("trainer.memory_format", "preserve_format"),
    "grad_accum_iter": Only((1,), "A step here has all of a rollout; more prompts: the data loader's batch_size"),
    "grad_scaler_args.enabled": Only((False,), "bfloat16 needs no scaling of the loss"),
    "straggler_detection": Unused("slow ranks show in the callbacks iter_speed and device_monitor"),
    "ddp.find_unused_parameters": To("trainer.ddp.find_unused_parameters", False),
    "ddp.static_graph": To("trainer.ddp.static_graph", True),
    "ddp.broadcast_buffers": To("trainer.ddp.broadcast_buffers", True),
    "cudnn.deterministic": To("trainer.cudnn.deterministic", False),
    "cudnn.benchmark": To("trainer.cudnn.benchmark", True),
    **{
        f"profiling.{name}": Given(f"trainer.profiling.{name}", "no profiling")
        for name in (*_PROFILING, "profile_memory", "with_stack", "with_modules")
    },
    "profiling.save_s3": Unused("traces are written to the run folder"),
}
_ONE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_OFF = ("sequence_parallel", "moe_extended_tp", "fp16", "bf16", "enable_autocast", "cpu_offloading")
_MEGATRON = (
    "pipeline_model_parallel_comm_backend", "virtual_pipeline_model_parallel_size",
    "hierarchical_context_parallel_sizes", "perform_initialization", "use_cpu_initialization", "params_dtype",
    "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
    "autocast_dtype", "num_microbatches_with_partial_activation_checkpoints", "gradient_accumulation_fusion",
    "async_tensor_model_parallel_allreduce", "use_te_rng_tracker", "tp_comm_overlap", "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag",
    "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs", "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1",
    "tp_comm_bootstrap_backend", "pipeline_dtype", "variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm",
    "batch_p2p_sync", "use_ring_exchange_p2p", "deallocate_pipeline_outputs", "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit", "pipeline_model_parallel_split_rank", "overlap_p2p_comm_warmup_flush",
    "microbatch_group_size_per_vp_stage", "cpu_offloading_num_layers", "cpu_offloading_activations",
    "cpu_offloading_weights", "barrier_with_L1_time",
)  # fmt: skip
PARALLEL: Mapping[str, Row] = {
    "context_parallel_size": Read(1, "model_parallel.context_parallel_size, and a factor of the number of GPUs"),
    "deterministic_mode": Unused("see trainer.cudnn.deterministic"),
    "data_parallel_size": Unused("it follows from the number of GPUs"),
    **{name: Only((1,), ANSWERED_BY_SPLIT) for name in (*_ONE, "expert_tensor_parallel_size")},
    **{name: Only((False,), ANSWERED_BY_SPLIT) for name in _OFF},
    **dict.fromkeys(_MEGATRON, MEGATRON),
}
JOB: Mapping[str, Row] = {
    "project": To("job.project", "cosmos_wfm_v2"),
    "group": To("job.group", "official_runs_vid2vid_debug"),
    "name": Read("", "job.name; required"),
    "wandb_mode": To("job.wandb_mode", "online"),
    "timestamp": Unused("the same command goes on where it stopped, in the same folder"),
}
_STORE = "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX; the credentials are read from PROD_S3_CHECKPOINT_*"
_OBJECT_STORE: Mapping[str, Row] = {
    "enabled": Only((False,), _STORE),
    "credentials": Unused("credentials come from the environment"),
    "bucket": Unused("the address of a run or of weights has its bucket"),
}
CHECKPOINT: Mapping[str, Row] = {
    "type": Read(None, "ckpt_type: dcp for distributed, else standard"),
    "save_iter": To("checkpoint.save_iter", 1000),
    "load_path": Read("", "model.config.model_manager_config.dit_path, or checkpoint.load_path for a checkpoint"),
    "model_id": Read(None, "the file of the repository load_path; those of Predict2.5 by their place here"),
    "dcp_async_mode_enabled": To("checkpoint.dcp_async_mode_enabled", False),
    **{
        name: Given(f"checkpoint.{name}", reason)
        for name, reason in {
            "load_training_state": "false, as there",
            "only_load_scheduler_state": "false, as there",
            "strict_resume": "true: every weight is accounted for",
            "keys_not_to_resume": "none, as there",
            "load_ema_to_reg": "false, as there",
            "dcp_allow_mismatched_size": "false, as there",
        }.items()
    },
    "jit.enabled": Only((False,), "Checkpoints hold weights, not traced programs"),
    **{f"jit.{name}": Unused("see jit.enabled") for name in ("input_shape", "device", "dtype", "strict")},
    "verbose": Unused("loading always reports"),
    "broadcast_via_filesystem": Unused("every rank reads its own part of the files"),
    **under("save_to_object_store", _OBJECT_STORE),
    **under("load_from_object_store", _OBJECT_STORE),
}
_LOADER: Mapping[str, Row] = {
    "batch_size": Read(1, "dataloader.batch_size: prompts of a process"),
    "num_workers": Read(8, "dataloader.num_workers"),
    "pin_memory": Read(True, "dataloader.pin_memory"),
    "prefetch_factor": Read(4, "dataloader.prefetch_factor"),
    "shuffle": Unused("training shuffles, validation does not; there the sampler shuffles as well"),
    "drop_last": Unused("the stream of samples has no end, so that there is no last batch"),
    **dict.fromkeys(
        ("use_cache", "cache_size", "concat_size", "cache_augment_fn", "cache_replay_name"),
        Unused("each sample is read once for a whole group; cached latents: scripts.cache_latents"),
    ),
    "webdataset": Read(False, "false: mock data; true: tar shards"),
}
_SHARDS = (
    *("is_train", "augmentor_name", "detshuffle", "caption_type", "embedding_type", "dataset_resolution_type"),
    *("chunk_size", "min_fps_thres", "max_fps_thres", "long_caption_ratio", "medium_caption_ratio"),
    *("short_caption_ratio", "user_caption_ratio", "use_native_fps", "video_decoder_name"),
)
_WEB: Mapping[str, Row] = {
    **_LOADER,
    **under(
        "dataset",
        {
            "dataset_name": Read(None, "dataset.shards: an address with {000..127} or *, where webdataset is true"),
            "object_store": Unused("the address of shards says it; PROD_S3_CHECKPOINT_* are read"),
            "resolution": Read("480", "the size of mock videos"),
            "num_video_frames": Read(93, "dataset.num_frames"),
            "len_t5": Read(512, "dataset.num_tokens of mock data"),
            "t5_dim": Read(1024, "dataset.width of mock data"),
            **dict.fromkeys(_SHARDS, Unused("a setting of data sets that were not published")),
        },
    ),
}
_LOCAL: Mapping[str, Row] = {
    **_LOADER,
    "type": Unused("its section says it"),
    "dataset_dir": Read("", "dataset.dataset_dir"),
    "offline_text_embedding": Read(False, "dataset.text_encoder, where the model does not encode captions"),
    "text_encoder_type": Only(("t5_xxl",), "Embeddings lie in t5_xxl/ or text_embedding/ beside metas/ and videos/"),
}


_PICTURES = dict.fromkeys(
    (*_LOCAL, "image_size", *(f"dataloader.{name}" for name in _WEB)), Unused("see its ratio: pictures are not read")
)


def _data(loader: str) -> dict[str, Row]:
    return under(
        loader,
        {
            "type": Read("web", "local: a folder; web: mock data or shards"),
            "video_dataloader.ratio": Read(1.0, "must be above 0"),
            **under("image_dataloader", {**_PICTURES, "ratio": Read(0.0, "must be 0: rewards are of videos")}),
            **under("video_dataloader", _LOCAL),
            **under("video_dataloader", {"num_frames": Read(93, "dataset.num_frames")}),
            **under("video_dataloader", {"video_size": Read([432, 768], "dataset.video_size: height, width")}),
            **under("video_dataloader.dataloader", _WEB),
        },
    )


CONDITIONER = {  # name -> type
    "fps": "remap_key",
    "padding_mask": "remap_key",
    "text": "text_attr",
    "use_video_condition": "boolean_flag",
}
CONDITIONER_FIELDS = ("name", "type", "output_key", "input_key", "dropout_rate")
# In published files, and without effect there.
IGNORED = ("model_parallel.pipeline_parallel_size",)


def _table(**sections: Any) -> dict[str, Row]:
    return {path: row for section, rows in sections.items() for path, row in under(section, rows).items()}


FIELDS: Mapping[str, Row] = {
    **_table(
        model={**MODEL, **under("net", NETWORK), **NOISE, **under("rl", REINFORCEMENT)},
        trainer=TRAINER,
        model_parallel=PARALLEL,
        job=JOB,
        checkpoint=CHECKPOINT,
    ),
    **OPTIMIZER,
    **_data("dataloader_train"),
    **_data("dataloader_val"),
}
# What fields without effect have in the published recipes (Cosmos-RL 89f2e5b); other values are reported.
PUBLISHED: Mapping[str, tuple[Any, ...]] = {
    f"{loader}.video_dataloader.dataloader.{name}": values
    for loader in ("dataloader_train", "dataloader_val")
    for name, values in {
        "use_cache": (False,),
        "cache_size": (16, 32),
        "concat_size": (1,),
        "dataset.video_decoder_name": ("video_naive_bytes",),
        "dataset.augmentor_name": ("video_basic_augmentor_v2",),
        "dataset.caption_type": ("t2w_qwen2p5_7b",),
        "dataset.embedding_type": ("t5_xxl",),
    }.items()
}
