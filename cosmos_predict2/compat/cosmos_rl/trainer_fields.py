# SPDX-License-Identifier: Apache-2.0
"""Fields that recipes of policies (VLA) and of DiffusionNFT share: Cosmos-RL's trainer, its adapters and its log."""

from typing import Any

from cosmos_predict2.compat.fields import Fields, Row, given, only, reads, sets, unused

SIZES_OF_GPUS = ("n_init_replicas", "dp_shard_size", "dp_replicate_size")
LORA: dict[str, Row] = {
    **reads(dict(r=8), least=1),
    **only("lora_dropout", "Adapters have no dropout", 0.0, 0),
}
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


def logged(fields: Fields) -> dict[str, Any]:
    """The run's name, and whether Weights & Biases follows it."""
    name = fields["logging.experiment_name"]
    named = {} if name in (None, "None") else {"job.name": name}
    return {"job.wandb_mode": "online" if "wandb" in fields["logging.logger"] else "disabled", **named}


def checkpoint_type(fields: Fields) -> str:
    return f"ckpt_type={'standard' if fields['train.ckpt.enable_checkpoint'] else 'dummy'}"
