# SPDX-License-Identifier: Apache-2.0
"""Modules that moved to or in this package, keys of configurations, and names that published code imports:
``imaginaire.renamed`` makes them importable."""

_RL, _PIPE, _WATCH = "model.config.rl", "model.config.pipe_config", "trainer.callbacks.imagination_watch"
KEYS = {  # of policies, which have the names of world models; and of several views, which have those of one
    f"{_RL}.actions_alone.data": f"{_WATCH}.data",  # which took them from there
    f"{_RL}.actions_alone.split": f"{_WATCH}.split",
    f"{_RL}.advantage_correction": f"{_RL}.advantage.correction",
    f"{_RL}.advantage_epsilon": f"{_RL}.advantage.epsilon",
    f"{_RL}.loss.clip_high": f"{_RL}.clip_ratio_high",
    f"{_RL}.loss.clip_low": f"{_RL}.clip_ratio",
    f"{_RL}.loss.dual_clip": f"{_RL}.dual_clip",
    f"{_RL}.loss.kl_beta": f"{_RL}.kl_beta",
    f"{_PIPE}.max_num_conditional_frames_per_view": f"{_PIPE}.max_num_conditional_frames",
    f"{_PIPE}.min_num_conditional_frames_per_view": f"{_PIPE}.min_num_conditional_frames",
}

RENAMED = {
    "cosmos_predict2.checkpoints.tiny_base": "cosmos_predict2.released",  # what a page named
    "cosmos_predict2.configs.base.config_predict2p5": "cosmos_predict2.configs.base.config_video2world",  # as below
    "cosmos_predict2.configs.choice": "cosmos_predict2.configs.base.config_video2world",
    "cosmos_predict2.data.media": "cosmos_predict2.data.video.media",  # what pages imported, as video_quality below
    "cosmos_predict2.diffusion.step": "cosmos_predict2.diffusion.solvers",  # what pages imported
    "cosmos_predict2.models.video2world_action_model": "cosmos_predict2.models.video2world_model",
    "cosmos_predict2.nn.start_weights": "cosmos_predict2.nn.layers",  # what a page named, as sampling below
    "cosmos_predict2.pipelines.context_parallel": "cosmos_predict2.pipelines.video2world",  # what an example imported
    "cosmos_predict2.pipelines.flags": "cosmos_predict2.world_model.options",  # the same, as text.prompts below
    "cosmos_predict2.pipelines.video_quality": "cosmos_predict2.evaluation.metrics.video_quality",
    "cosmos_predict2.rl.envs.reference": "cosmos_predict2.compat.rlinf.environment",
    "cosmos_predict2.rl.episodes.policy_losses": "cosmos_predict2.rl.episodes.decisions",
    "cosmos_predict2.rl.flow_grpo": "cosmos_predict2.rl.clips.flow_grpo",
    "cosmos_predict2.rl.objective_table": "cosmos_predict2.rl.objectives",
    "cosmos_predict2.rl.policies.weights": "cosmos_predict2.rl.policies.files",  # what a page imported
    "cosmos_predict2.rl.quality_alarm": "cosmos_predict2.rl.clips.quality_alarm",
    "cosmos_predict2.rl.rewards.weighted": "cosmos_predict2.rl.rewards.frames",
    "cosmos_predict2.rl.vla": "cosmos_predict2.rl.episodes",
    "cosmos_predict2.rl.vla.config": "cosmos_predict2.rl.episodes.config",
    "cosmos_predict2.rl.vla.draw_episodes": "cosmos_predict2.rl.episodes.draw_episodes",
    "cosmos_predict2.rl.vla.episode_starts": "cosmos_predict2.rl.episodes.episode_starts",
    "cosmos_predict2.rl.vla.episodes": "cosmos_predict2.rl.episodes.episodes",
    "cosmos_predict2.rl.vla.grpo": "cosmos_predict2.rl.episodes.grpo",
    "cosmos_predict2.rl.vla.imagination_gap": "cosmos_predict2.rl.episodes.imagination_gap",
    "cosmos_predict2.rl.vla.policy_evaluation": "cosmos_predict2.rl.episodes.policy_evaluation",
    "cosmos_predict2.rl.vla.policy_losses": "cosmos_predict2.rl.episodes.decisions",
    "cosmos_predict2.rl.vla.ray_rollout": "cosmos_predict2.rl.episodes.ray_rollout",
    "cosmos_predict2.text.prompts": "cosmos_predict2.released",
    "cosmos_predict2.toy_world.detector": "cosmos_predict2.toy_world.rendering",  # what a page imported
    "cosmos_predict2.world_model.sampling": "cosmos_predict2.world_model.world_model",
}

# What examples, scripts, configurations and pages written for the published code import and this code has elsewhere.
_HERE = "cosmos_predict2.compat.predict2"
_RELEASED = "cosmos_predict2.released"
_TRAINING = "cosmos_predict2.configs.base.defaults.training"
_MODEL = "cosmos_predict2.models.video2world_model:"
_IMAGES = (
    "use cosmos_predict2.pipelines.video2world: Video2WorldPipeline, of get_cosmos_predict2_text2image_pipeline(),"
    " called with num_conditional_frames=0; or examples.text2image: main([FLAGS])."
)
_MIXED = "use cosmos_predict2.data.mixing: MixedLoader, as the data group 'mock' does."

NAMES = {
    "cosmos_predict2.auxiliary.cosmos_reason1": {
        "CosmosReason1": "use cosmos_predict2.guardrail.refiner: Reason1Refiner; to judge videos"
        " cosmos_predict2.rl.rewards.judges.reason1_reward: Reason1Reward.",
    },
    "cosmos_predict2.auxiliary.guardrail.common": {"presets": "cosmos_predict2.guardrail.runner:"},
    "cosmos_predict2.callbacks.device_monitor": {"DeviceMonitor": "imaginaire.training.callbacks.monitor"},
    "cosmos_predict2.callbacks.every_n_draw_sample_multiviewvideo": {
        "EveryNDrawSampleMultiviewVideo": "use cosmos_predict2.callbacks.draw_samples: DrawSamples."
    },
    "cosmos_predict2.callbacks.grad_clip": {"GradClip": "imaginaire.training.callbacks.train"},
    "cosmos_predict2.callbacks.iter_speed": {"IterSpeed": "imaginaire.training.callbacks.report"},
    "cosmos_predict2.callbacks.loss_log": {"LossLog": "imaginaire.training.callbacks.report"},
    "cosmos_predict2.checkpointer": {"Checkpointer": "imaginaire.checkpoint.checkpointer"},
    "cosmos_predict2.conditioner": {
        "ActionConditioner TextConditioner VideoConditioner": f"{_HERE}:conditioner",
        "BooleanFlag ReMapkey TextAttr": f"{_HERE}:embedder",
        "ConditionLocation": "use the words first_random_n, ref_cam, any_cam and no_cam.",
        "MultiViewConditioner": f"{_HERE}:conditioner",
    },
    "cosmos_predict2.configs.action_conditioned.defaults.data": {
        "register_training_and_val_data_action_conditioned": "cosmos_predict2.configs.action_conditioned.defaults.data"
        ":register",
    },
    "cosmos_predict2.configs.action_conditioned.defaults.model": {
        "register_model_action_conditioned": "cosmos_predict2.configs.action_conditioned.defaults.model:register",
    },
    "cosmos_predict2.configs.base.config_natten": {
        "PREDICT2_VIDEO2WORLD_NET_2B_NATTEN_PARAMETERS PREDICT2_VIDEO2WORLD_NET_14B_NATTEN_PARAMETERS": "the natten"
        " weights run with dense attention; use get_cosmos_predict2_video2world_pipeline(natten=True).",
    },
    "cosmos_predict2.configs.base.config_text2image": {
        "CosmosGuardrailConfig": "cosmos_predict2.guardrail.runner:GuardrailConfig",
        "SolverTimestampConfig": "cosmos_predict2.world_model.config:SolverConfig",
    },
    "cosmos_predict2.configs.base.config_video2world": {
        "ConditioningStrategy": _HERE,
        "CosmosGuardrailConfig": "cosmos_predict2.guardrail.runner:GuardrailConfig",
        "CosmosReason1Config": "cosmos_predict2.guardrail.runner:PromptRefinerConfig",
        "EMAConfig": "cosmos_predict2.world_model.config",
        "SolverTimestampConfig": "cosmos_predict2.world_model.config:SolverConfig",
        "TokenizerInterface": "cosmos_predict2.tokenizers.wan_vae:WanTokenizer",
    },
    "cosmos_predict2.configs.base.defaults.callbacks": {"register_callbacks": f"{_TRAINING}:register"},
    "cosmos_predict2.configs.base.defaults.checkpoint": {"register_checkpoint": f"{_TRAINING}:register"},
    "cosmos_predict2.configs.base.defaults.data": {
        "register_training_and_val_data": "cosmos_predict2.configs.base.defaults.data:register",
    },
    "cosmos_predict2.configs.base.defaults.ema": {
        "EMAConfig": "cosmos_predict2.world_model.config",
        "register_ema": f"{_TRAINING}:register",
    },
    "cosmos_predict2.configs.base.defaults.model": {
        "register_model": "cosmos_predict2.configs.base.defaults.model:register",
    },
    "cosmos_predict2.configs.base.defaults.optimizer": {"register_optimizer": f"{_TRAINING}:register"},
    "cosmos_predict2.configs.base.defaults.scheduler": {"register_scheduler": f"{_TRAINING}:register"},
    "cosmos_predict2.data.action_conditioned.action_conditioned_dataset": {
        "ActionConditionedDataset": "cosmos_predict2.data.action_conditioned.dataset_bridge",
    },
    "cosmos_predict2.datasets.cached_replay_dataloader": {"get_cached_replay_dataloader": _MIXED},
    "cosmos_predict2.datasets.data_sources.mock_data": {
        "get_image_dataset": "cosmos_predict2.data.mock:MockImages",
        "get_video_dataset": "cosmos_predict2.data.mock:MockVideos",
    },
    "cosmos_predict2.datasets.joint_dataloader": {"IterativeJointDataLoader": _MIXED},
    "cosmos_predict2.functional.lr_scheduler": {"LambdaLinearScheduler": "imaginaire.optim.schedules:lambda_linear"},
    "cosmos_predict2.models.multiview_dit": {"MultiViewDiT": "cosmos_predict2.nn.multiview_dit"},
    "cosmos_predict2.models.multiview_model": {
        "Predict2MultiviewModel": f"{_MODEL}Video2WorldModel",
        "Predict2MultiviewModelConfig": f"{_MODEL}Predict2Video2WorldModelConfig",
    },
    "cosmos_predict2.models.text2image_dit": {
        "MiniTrainDIT": "cosmos_predict2.nn.dit:DiT",
        "SACConfig": "builtins:dict",
    },
    "cosmos_predict2.models.text2image_model": {
        "Predict2Text2ImageModel": f"{_MODEL}Video2WorldModel",
        "Predict2Text2ImageModelConfig": f"{_MODEL}Predict2Video2WorldModelConfig",
    },
    "cosmos_predict2.models.utils": {
        "init_weights_on_device": _HERE,
        "load_state_dict": "imaginaire.checkpoint.weights:read",
    },
    "cosmos_predict2.models.video2world_action_dit": {
        "ActionConditionedMinimalV1LVGDiT": "cosmos_predict2.nn.action_dit:FlatActionDiT",
    },
    "cosmos_predict2.models.video2world_dit": {"MinimalV1LVGDiT": "cosmos_predict2.nn.dit:Video2WorldDiT"},
    "cosmos_predict2.module.denoiser_scaling": {"RectifiedFlowScaling": _HERE},
    "cosmos_predict2.pipelines.text2image": {"Text2ImagePipeline": _IMAGES},
    "cosmos_predict2.pipelines.video2video_sdedit": {
        "Text2ImageSDEditPipeline": _IMAGES,
        "Video2WorldSDEditPipeline": "use cosmos_predict2.pipelines.video2world: Video2WorldPipeline, called with"
        " edited_path=CLIP and options=SamplingOptions(strength=0.8).",
    },
    "cosmos_predict2.pipelines.video2world": {
        "_IMAGE_EXTENSIONS": "cosmos_predict2.data.video.media:IMAGE_SUFFIXES",
        "_VIDEO_EXTENSIONS": "cosmos_predict2.data.video.media:VIDEO_SUFFIXES",
    },
    "cosmos_predict2.schedulers.rectified_flow_scheduler": {
        "RectifiedFlowAB2Scheduler": "use cosmos_predict2.diffusion: solvers.sample(denoise, noise,"
        ' rectified_flow.karras_sigmas(35), "2ab").',
    },
    "cosmos_predict2.tokenizers.tokenizer": {
        "CosmosImageTokenizer": "the image tokenizer of the fast 0.6B model is not here; use TokenizerInterface.",
        "TokenizerInterface": "cosmos_predict2.tokenizers.wan_vae:WanTokenizer",
    },
    "cosmos_predict2.utils.fused_adam_dtensor": {"FusedAdam": "imaginaire.optim.adamw:FusedAdamW"},
    "cosmos_predict2.utils.optim_instantiate_dtensor": {"get_base_optimizer": "imaginaire.optim.adamw:fused_adamw"},
    "examples.text2image": {"process_single_generation setup_pipeline": _IMAGES},
    "examples.video2world": {
        "_DEFAULT_NEGATIVE_PROMPT": "cosmos_predict2.released:DEFAULT_NEGATIVE_PROMPT",
        "cleanup_distributed": "imaginaire.distributed:shutdown",
        "process_single_generation setup_pipeline validate_input_file": _HERE,
    },
    "examples.video2world_gr00t": {"process_single_generation setup_pipeline": _HERE},
    "imaginaire.auxiliary.text_encoder": {
        "CosmosT5TextEncoder CosmosT5TextEncoderConfig CosmosTextEncoderConfig get_cosmos_text_encoder": _HERE,
        "CosmosTextEncoder": f"{_HERE}:CosmosT5TextEncoder",
    },
    "imaginaire.callbacks.manual_gc": {"ManualGarbageCollection": "imaginaire.training.callbacks.train"},
    "imaginaire.config": {
        "pretty_print_overrides": "use python -m scripts.train --dryrun, which prints the composed configuration.",
    },
    "imaginaire.constants": {
        "CHECKPOINTS_DIR": f"{_RELEASED}:checkpoint_dir()",
        "COSMOS_REASON1_MODEL_DIR": f"{_RELEASED}:get_cosmos_reason1_model_dir()",
        "T5_MODEL_DIR": f"{_RELEASED}:get_t5_model_dir()",
        "CosmosPredict2ActionConditionedFPS CosmosPredict2ActionConditionedModelSize"
        " CosmosPredict2ActionConditionedResolution CosmosPredict2Gr00tModelSize CosmosPredict2MultiviewFPS"
        " CosmosPredict2MultiviewFrames CosmosPredict2MultiviewModelSize CosmosPredict2MultiviewResolution"
        " CosmosPredict2MultiviewViews CosmosPredict2Text2ImageModelSize CosmosPredict2Video2WorldAspectRatio"
        " CosmosPredict2Video2WorldFPS CosmosPredict2Video2WorldModelSize CosmosPredict2Video2WorldResolution"
        " get_cosmos_predict2_video2world_checkpoint print_environment_info": _HERE,
        "get_cosmos_predict2_action_conditioned_checkpoint get_cosmos_predict2_gr00t_checkpoint"
        " get_cosmos_predict2_multiview_checkpoint get_cosmos_predict2_text2image_checkpoint": _RELEASED,
        "get_cosmos_predict2_text2image_tokenizer get_cosmos_predict2_video2world_tokenizer": f"{_RELEASED}"
        ":get_tokenizer_checkpoint",
    },
    "imaginaire.lazy_config.lazy": {"LazyConfig": _HERE},
    "imaginaire.utils.callback": {"LowPrecisionCallback": "imaginaire.training.callbacks.train:LowPrecision"},
    "imaginaire.utils.config_helper": {
        "get_config_module": _HERE,
        "import_all_modules_from_package": "imaginaire.config.compose",
        "override": "use imaginaire.config.compose: compose(config_path, overrides).",
    },
    "imaginaire.utils.distributed": {
        "barrier broadcast_object_list rank0_only": _HERE,
        "destroy_process_group": "imaginaire.distributed:shutdown",
        "get_rank": "imaginaire.distributed:rank",
        "get_world_size": "imaginaire.distributed:world_size",
        "init is_initialized is_rank0": "imaginaire.distributed",
    },
    "imaginaire.utils.easy_io": {"easy_io": "use imaginaire.storage: read_text and the like take any address."},
    "imaginaire.utils.ema": {"FastEmaModelUpdater": "use imaginaire.training.model: PowerEMA."},
    "imaginaire.utils.io": {
        "save_image_or_video save_text_prompts": _HERE,
        "save_image_or_video_multiview": "use save_image_or_video, which takes what MultiviewPipeline gives.",
    },
    "imaginaire.utils.log": {"critical debug error exception info success warning": _HERE},
    "imaginaire.utils.misc": {"set_random_seed": _HERE},
}
