# SPDX-License-Identifier: Apache-2.0
"""Modules that moved to or in this package, and keys of configurations; ``imaginaire.renamed`` keeps the old ones."""

_RL = "model.config.rl"
KEYS = {  # of policies, which have the names of world models
    f"{_RL}.advantage_correction": f"{_RL}.advantage.correction",
    f"{_RL}.advantage_epsilon": f"{_RL}.advantage.epsilon",
    f"{_RL}.loss.clip_high": f"{_RL}.clip_ratio_high",
    f"{_RL}.loss.clip_low": f"{_RL}.clip_ratio",
    f"{_RL}.loss.dual_clip": f"{_RL}.dual_clip",
    f"{_RL}.loss.kl_beta": f"{_RL}.kl_beta",
}

RENAMED = {
    "cosmos_predict2.checkpoints.tiny_base": "cosmos_predict2.released",  # what a page named
    "cosmos_predict2.configs.base.config_predict2p5": "cosmos_predict2.configs.base.config_video2world",  # as below
    "cosmos_predict2.configs.choice": "cosmos_predict2.configs.base.config_video2world",
    "cosmos_predict2.data.dataset_multiview": "cosmos_predict2.data.dataset_video",
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
