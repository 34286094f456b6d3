# SPDX-License-Identifier: Apache-2.0
"""Every field of Cosmos-RL's recipes for world models ("WFM"), with its default there and what becomes of it here."""

import math

from cosmos_predict2.compat.fields import OF_RL, SUPERVISED, Row, Table, given, only, reads, same, sets, under, unused
from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS

PIPE, RL, NET = "model.config.pipe_config", "model.config.rl", "model.config.pipe_config.net"
SPLIT = "Models are split by model.fsdp_shard_size and model_parallel.context_parallel_size"
MEGATRON = "it tunes tensor, pipeline or expert parallelism, which world models do not use"
REASON1 = "nvidia/Cosmos-Reason1-7B"


def _given(section: str, names: str) -> dict[str, Row]:
    """Rows of fields that set the key of their own name where a recipe has them."""
    return given({name: f"{section}.{name}" for name in names.split()})


MODEL: dict[str, Row] = {
    **reads(dict(text_encoder_class="T5", precision="bfloat16")),
    **reads(dict(fsdp_shard_size=8, dp_replicate_size=1), least=1),
    **reads(dict(loss_scale=10.0, sigma_conditional=1e-4, use_rf_ckpts=False)),
    **same(PIPE, dict(sigma_data=1.0, state_ch=16, state_t=24, resolution="480", resize_online=True)),
    **same(PIPE, dict(min_num_conditional_frames=1, max_num_conditional_frames=2), when=SUPERVISED),
    **same("model.config", dict(loss_reduce="mean"), when=SUPERVISED),
    **same("model.config", dict(adjust_video_noise=True)),
    **sets(
        {
            "use_torch_compile": ("model.config.torch_compile", False),
            "rectified_flow_t_scaling_factor": (
                *(f"{PIPE}.flow.timestep_scale", 1.0),
                lambda factor: factor / NUM_TIMESTEPS,
            ),
            "denoise_replace_gt_frames": (f"{PIPE}.flow.replace_given_frames", True),
        }
    ),
    **only("scaling", "Predict2.5 is a flow model; for the EDM form choose experiment=predict2_...", "rectified_flow"),
    **only("conditioning_strategy", "Released weights condition by replaced frames", "frame_replace"),
    **unused("input_data_key input_caption_key input_image_key", "batches here have fixed keys, of the same names"),
    **unused("rectified_flow_loss_weight_uniform", "the losses of these runs do not use it"),
    **unused(
        "high_sigma_strategy high_sigma_ratio low_sigma_ratio",
        "Predict2.5 draws flow times here; the data term of these recipes shares the rollout's",
    ),
    **under(
        "text_encoder_config",
        reads(dict(compute_online=False, embedding_concat_strategy="mean_pooling", n_layers_per_group=5)),
        reads(dict(ckpt_path=REASON1)),
        unused("tokenizer_type encoder_model_config", "tokenizer and sizes lie beside the encoder's weights"),
    ),
    **under(
        "tokenizer",
        _given(f"{PIPE}.tokenizer", "chunk_duration load_mean_std temporal_window"),
        only("compile_encode", "The tokenizer is not compiled here; leave it out", False),
    ),
    **under("ema", same(f"{PIPE}.ema", dict(enabled=True, rate=0.1, iteration_shift=0))),
    **under(
        "sde",
        sets(dict(sigma_max=(f"{PIPE}.timestamps.t_max", 200.0), sigma_min=(f"{PIPE}.timestamps.t_min", 0.01))),
        unused("p_mean p_std", "Predict2.5 draws flow times here (model.config.train_time_distribution)"),
    ),
}
NETWORK: dict[str, Row] = {
    **reads(dict(model_channels=2048, num_blocks=28, num_heads=16)),  # the size
    **reads(dict(use_crossattn_projection=False, crossattn_proj_in_channels=100352)),
    **under("sac_config", same(f"{NET}.sac_config", dict(mode="block_wise", every_n_blocks=1))),
    **_given(
        NET,
        "max_img_h max_img_w max_frames in_channels out_channels patch_spatial patch_temporal concat_padding_mask"
        " pos_emb_cls pos_emb_learnable pos_emb_interpolation use_adaln_lora adaln_lora_dim atten_backend"
        " extra_per_block_abs_pos_emb rope_h_extrapolation_ratio rope_w_extrapolation_ratio"
        " rope_t_extrapolation_ratio rope_enable_fps_modulation crossattn_emb_channels",
    ),
}
JUDGE = "Serve a judge and choose it by remote_reward.reward_fn"
REINFORCEMENT: dict[str, Row] = {
    **reads(dict(enabled=True)),
    **same(RL, dict(update_ref_every_iter=16, num_rollout=8, sample_steps=10, on_policy=True), when=OF_RL),
    **same(RL, dict(train_on=[0, 1, 2, 3, 4, 5, 6, 7], s_churn=1.0, s_noise=1.0, guidance=0.0), when=OF_RL),
    **same(RL, dict(min_num_conditional_frames=1, max_num_conditional_frames=1, clip_ratio=1e-4), when=OF_RL),
    **same(RL, dict(kl_beta=0.01, data_beta=0.0, use_rl_sigma_and_noise=True), when=OF_RL),
    **same(RL, dict(data_on_first_only=False, use_same_seed=True, exp_reward=False), when=OF_RL),
    **sets(
        {  # Both may be texts, such as "inf".
            "s_t_max": (f"{RL}.s_t_max", None, lambda limit: math.inf if limit is None else float(limit)),
            "s_t_min": (f"{RL}.s_t_min", None, lambda limit: float(limit or 0.0)),
            "reward_config.adv_clip_max": (f"{RL}.advantage.adv_clip_max", 5.0),
        },
        when=OF_RL,
    ),
    **only("solver_option", "There it changes the gradient and not the rollout; after --: rl.solver_option", "2ab"),
    **under(
        "reward_config",
        reads({"adv_clip_min": -5.0, "fake_reward.enabled": False}),
        only("aesthetic.enabled image_reward.enabled", JUDGE, False),
        unused("ALL_REWARD_MODELS", "the rewards are those that are enabled"),
        unused("aesthetic.model_path image_reward.model_path", "no such judge runs in the trainer"),
        unused("fake_reward.reward_fn", "there is one"),
        unused("fake_reward.scale", "advantages are normalised"),
    ),
    **under(
        "reward_config.remote_reward",
        reads(dict(enabled=True, reward_fn="dance_grpo", score_key="overall_reward", scale=1.0)),
        reads(dict(reward_clip_min=-5.0, reward_clip_max=5.0)),
        reads(dict(token="", enqueue_url="", fetch_url="")),  # WFM_REWARD_TOKEN and its like count more
    ),
}
OPTIMIZER: dict[str, Row] = {
    **under(
        "optimizer",
        same("optimizer", dict(optim_type="fusedadam", lr=1e-5, weight_decay=1e-4, betas=[0.9, 0.99], eps=1e-8)),
        same("optimizer", dict(master_weights=True, capturable=True)),
    ),
    **under(
        "scheduler",
        same("scheduler", dict(verbosity_interval=0, warm_up_steps=[1000], cycle_lengths=[10_000_000_000_000])),
        same("scheduler", dict(f_start=[1e-6], f_max=[1.0], f_min=[1.0])),
        only("scheduler_type", "Others: scheduler=lambdacosine or constant after --", "lambda_linear"),
    ),
}
TRAINER: dict[str, Row] = {
    **reads(dict(distributed_parallelism="fsdp")),
    **same("trainer", dict(seed=0, max_iter=25, logging_iter=2, run_validation=False, validation_iter=100)),
    **same("trainer", dict(memory_format="preserve_format")),
    **under("ddp", same("trainer.ddp", dict(find_unused_parameters=False, static_graph=True, broadcast_buffers=True))),
    **under("cudnn", same("trainer.cudnn", dict(deterministic=False, benchmark=True))),
    **_given("trainer", "max_val_iter timeout_period"),
    **under(
        "profiling",
        _given(
            "trainer.profiling",
            "enable_profiling enable_memory_snapshot profile_freq target_ranks record_shape profile_memory with_stack"
            " with_modules",
        ),
        unused("save_s3", "traces are written to the run folder"),
    ),
    **only("use_s3", "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX, which runs are written to", False),
    **only("grad_accum_iter", "A step here has all of a rollout; more prompts: the data loader's batch_size", 1),
    **only("grad_scaler_args.enabled", "bfloat16 needs no scaling of the loss", False),
    **unused("straggler_detection", "slow ranks show in the callbacks iter_speed and device_monitor"),
}
PARALLEL: dict[str, Row] = {
    **reads(dict(context_parallel_size=1), least=1),
    **only(
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size"
        " expert_tensor_parallel_size",
        SPLIT,
        1,
    ),
    **only("sequence_parallel moe_extended_tp fp16 bf16 enable_autocast cpu_offloading", SPLIT, False),
    # In published files.
    "pipeline_parallel_size": Row(reported="Cosmos-RL ignores these fields, and so does this run"),
    **unused("deterministic_mode", "see trainer.cudnn.deterministic"),
    **unused("data_parallel_size", "it follows from the number of GPUs"),
    **unused(
        """
        pipeline_model_parallel_comm_backend virtual_pipeline_model_parallel_size hierarchical_context_parallel_sizes
        perform_initialization use_cpu_initialization params_dtype timers finalize_model_grads_func grad_scale_func
        no_sync_func grad_sync_func param_sync_func autocast_dtype num_microbatches_with_partial_activation_checkpoints
        gradient_accumulation_fusion async_tensor_model_parallel_allreduce use_te_rng_tracker tp_comm_overlap
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs cross_entropy_loss_fusion
        cross_entropy_fusion_impl tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        pipeline_dtype variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p
        deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
        pipeline_model_parallel_split_rank overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
        cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights barrier_with_L1_time
        """,
        MEGATRON,
    ),
}
JOB: dict[str, Row] = {
    **reads(dict(name="")),  # required
    **same("job", dict(project="cosmos_wfm_v2", group="official_runs_vid2vid_debug", wandb_mode="online")),
    **unused("timestamp", "the same command goes on where it stopped, in the same folder"),
}
_STORE = "Set IMAGINAIRE_OUTPUT_ROOT=s3://BUCKET/PREFIX; the credentials are read from PROD_S3_CHECKPOINT_*"
_OBJECT_STORE: dict[str, Row] = {
    **only("enabled", _STORE, False),
    **unused("credentials", "credentials come from the environment"),
    **unused("bucket", "the address of a run or of weights has its bucket"),
}
CHECKPOINT: dict[str, Row] = {
    **reads(dict(type=None, load_path="", model_id=None)),
    **same("checkpoint", dict(save_iter=1000, dcp_async_mode_enabled=False)),
    **_given(
        "checkpoint",
        "load_training_state only_load_scheduler_state strict_resume keys_not_to_resume load_ema_to_reg"
        " dcp_allow_mismatched_size",
    ),
    **only("jit.enabled", "Checkpoints hold weights, not traced programs", False),
    **unused("jit.input_shape jit.device jit.dtype jit.strict", "see jit.enabled"),
    **unused("verbose", "loading always reports"),
    **unused("broadcast_via_filesystem", "every rank reads its own part of the files"),
    **under("save_to_object_store", _OBJECT_STORE),
    **under("load_from_object_store", _OBJECT_STORE),
}
_CACHED = "each sample is read once for a whole group; cached latents: scripts.cache_latents"
_LOADER: dict[str, Row] = {
    **reads(dict(batch_size=1, num_workers=8, pin_memory=True, prefetch_factor=4)),
    **reads(dict(webdataset=False)),  # false: mock data; true: tar shards
    **unused("shuffle", "training shuffles, validation does not; there the sampler shuffles as well"),
    **unused("drop_last", "the stream of samples has no end, so that there is no last batch"),
    **unused("use_cache cache_size concat_size cache_augment_fn cache_replay_name", _CACHED),
}
_NOT_PUBLISHED = "a setting of data sets that were not published"
_WEB: dict[str, Row] = {
    **_LOADER,
    **unused("use_cache", _CACHED, False),
    **unused("cache_size", _CACHED, 16, 32),
    **unused("concat_size", _CACHED, 1),
    **under(
        "dataset",
        reads(dict(dataset_name=None, resolution="480", num_video_frames=93, len_t5=512, t5_dim=1024)),
        unused("object_store", "the address of shards has it; PROD_S3_CHECKPOINT_* are read"),
        unused(dict(video_decoder_name="video_naive_bytes", caption_type="t2w_qwen2p5_7b"), _NOT_PUBLISHED),
        unused(dict(augmentor_name="video_basic_augmentor_v2", embedding_type="t5_xxl"), _NOT_PUBLISHED),
        unused(
            "is_train detshuffle dataset_resolution_type chunk_size min_fps_thres max_fps_thres long_caption_ratio"
            " medium_caption_ratio short_caption_ratio user_caption_ratio use_native_fps",
            _NOT_PUBLISHED,
        ),
    ),
}
_LOCAL: dict[str, Row] = {
    **_LOADER,
    **reads(dict(dataset_dir="", offline_text_embedding=False)),
    **only("text_encoder_type", "Embeddings lie in t5_xxl/ or text_embedding/ beside metas/ and videos/", "t5_xxl"),
    **unused("type", "its section shows it"),
}
_PICTURES = " ".join((*_LOCAL, "image_size", *(f"dataloader.{name}" for name in _WEB)))
_LOADERS: dict[str, Row] = {
    **reads({"type": "web", "video_dataloader.ratio": 1.0, "image_dataloader.ratio": 0.0}),
    **under("image_dataloader", unused(_PICTURES, "see its ratio: pictures are not read")),
    **under("video_dataloader", _LOCAL, reads(dict(num_frames=93, video_size=[432, 768]))),
    **under("video_dataloader.dataloader", _WEB),
}
FIELDS: Table = {
    **under("model", MODEL, under("net", NETWORK), under("rl", REINFORCEMENT)),
    **under("trainer", TRAINER),
    **under("model_parallel", PARALLEL),
    **under("job", JOB),
    **under("checkpoint", CHECKPOINT),
    **OPTIMIZER,
    **under("dataloader_train", _LOADERS),
    **under("dataloader_val", _LOADERS),
}
