# SPDX-License-Identifier: Apache-2.0
"""Modules of this package that moved; ``imaginaire.renamed`` keeps their old names importable."""

RENAMED = {
    "cosmos_predict2.auxiliary.guardrail": "cosmos_predict2.guardrail",
    "cosmos_predict2.auxiliary.guardrail.blocklist": "cosmos_predict2.guardrail.blocklist",
    "cosmos_predict2.auxiliary.guardrail.runner": "cosmos_predict2.guardrail.runner",
    "cosmos_predict2.auxiliary.guardrail.words": "cosmos_predict2.guardrail.words",
    "cosmos_predict2.auxiliary.prompt_refiner": "cosmos_predict2.text.prompt_refiner",
    "cosmos_predict2.checkpoints.released": "cosmos_predict2.released",
    "cosmos_predict2.data.action_conditioned.actions": "cosmos_predict2.actions.transforms",
    "cosmos_predict2.data.action_conditioned.rotations": "cosmos_predict2.actions.rotations",
    "cosmos_predict2.data.action_conditioned.statistics": "cosmos_predict2.actions.statistics",
    "cosmos_predict2.data.clips": "cosmos_predict2.data.video.clips",
    "cosmos_predict2.data.media": "cosmos_predict2.data.video.media",
    "cosmos_predict2.data.toy_latents": "cosmos_predict2.data.toy.latents",
    "cosmos_predict2.data.toy_states": "cosmos_predict2.data.toy.states",
    "cosmos_predict2.models.network": "cosmos_predict2.world_model.network",
    "cosmos_predict2.parallelize": "cosmos_predict2.world_model.parallelize",
    "cosmos_predict2.pipelines.controllability": "cosmos_predict2.evaluation.metrics.controllability",
    "cosmos_predict2.pipelines.denoiser": "cosmos_predict2.world_model.denoiser",
    "cosmos_predict2.pipelines.flow": "cosmos_predict2.world_model.config",
    "cosmos_predict2.pipelines.inverse_dynamics": "cosmos_predict2.evaluation.metrics.inverse_dynamics",
    "cosmos_predict2.pipelines.sampling": "cosmos_predict2.world_model.sampling",
    "cosmos_predict2.pipelines.video_quality": "cosmos_predict2.evaluation.metrics.video_quality",
    "cosmos_predict2.text.embedding_cache": "cosmos_predict2.text.embeddings.cache",
    "cosmos_predict2.text.embedding_folder": "cosmos_predict2.text.embeddings.folder",
}
