# SPDX-License-Identifier: Apache-2.0
"""Recipes of Cosmos-RL's diffusers trainer for DiffusionNFT: their fields, and the run that they become."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from cosmos_predict2.compat.cosmos_rl.world_model_fields import NET, PIPE, RL
from cosmos_predict2.compat.cosmos_rl.world_models import refuse_wan, remote_node
from cosmos_predict2.compat.fields import (
    OF_RL,
    Fields,
    Given,
    Only,
    Read,
    Row,
    To,
    Translation,
    Unused,
    fields_at,
    override,
    read_fields,
    shown_value,
    under,
)
from cosmos_predict2.configs.base.config_predict2p5 import RELEASES, get_predict2p5_dit_path
from imaginaire.errors import ConfigError, near

SIZES = {"nvidia/Cosmos-Predict2.5-2B": "2B", "nvidia/Cosmos-Predict2.5-14B": "14B"}
REVISIONS = {f"diffusers/base/{release}": release for release in RELEASES}
LAYERS = {  # of diffusers -> ours
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "output_proj",
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
}
PROMPTS = "datasets/diffusion_nft"
PROMPT_FILES = {  # named sets of prompts -> their file, by split
    "pickscore": "{split}.txt",
    "ocr": "{split}.txt",
    "geneval": "{split}_metadata.jsonl",
    "dance_grpo_t2v": "{split}.txt",
}
GPU_FIELDS = tuple(f"policy.parallelism.{name}" for name in ("dp_shard_size", "dp_replicate_size", "cp_size"))
NO_SPLIT = "Models are split by dp_shard_size and cp_size"

_PARALLEL: Mapping[str, Row] = {
    "n_init_replicas": Only((1,), "Copies of the model are dp_replicate_size"),
    "dp_shard_size": Read(1, "model.config.fsdp_shard_size, and a factor of the number of GPUs"),
    "dp_replicate_size": Read(1, "a factor of the number of GPUs"),
    "cp_size": Read(1, "model_parallel.context_parallel_size, and a factor of the number of GPUs"),
    "tp_size": Only((1,), NO_SPLIT),
    "ep_size": Only((1,), NO_SPLIT),
    "pp_size": Only((1,), NO_SPLIT),
}
_POLICY: Mapping[str, Row] = {
    **under("parallelism", _PARALLEL),
    "model_name_or_path": Read("", "the size: " + " or ".join(SIZES)),
    "model_revision": Read(None, "the start weights: " + " or ".join(REVISIONS)),
    "is_diffusers": Only((True,), "Only recipes of diffusers models are translated here"),
    "model_gradient_checkpointing": To(
        f"{NET}.sac_config.mode", True, lambda recomputes: "block_wise" if recomputes else "none"
    ),
    "lora.lora_names": Unused("the sampling policy is a copy of the adapters that lags behind"),
    "lora.r": Read(8, "model.config.lora_rank"),
    "lora.lora_alpha": To("model.config.lora_alpha", 8.0),
    "lora.lora_dropout": Only((0.0, 0), "Adapters have no dropout"),
    "lora.init_lora_weights": Unused("adapters begin by adding nothing, whatever their first factor"),
    "lora.target_modules": Read([], "model.config.lora_target_modules"),
    "lora.use_rslora": Only((False,), "Set lora_alpha to alpha * sqrt(r)"),
    "diffusers.dtype": Unused("train.param_dtype is the precision"),
    "diffusers.is_video": Only((True,), "Only videos are trained"),
    "diffusers.offload": Unused("the text encoder lives on the host between prompts"),
    "diffusers.max_prompt_length": Only((512, 300), "Prompts have 512 tokens, as the released weights read them"),
    "diffusers.inference_size": Read([1024, 1024], "dataset.video_size: height, width"),
    "diffusers.inference_frames": Unused("samples are as long as training's clips"),
    "diffusers.train_frames": Read(41, f"dataset.num_frames, and {PIPE}.state_t"),
    "diffusers.timesteps_fraction": Read(1.0, f"{RL}.num_timesteps: this share of sample.num_steps"),
    "diffusers.nft_beta": To(f"{RL}.nft_beta", 1.0),
    "diffusers.weight_copy_decay_type": To(f"{RL}.weight_copy_decay_type", 0),
    "diffusers.sample.num_steps": To(f"{RL}.sample_steps", 40),
    "diffusers.sample.eval_num_steps": Unused("evaluation is a program: scripts.evaluate_world_model"),
    "diffusers.sample.guidance_scale": To(f"{RL}.guidance", 4.5, lambda scale: scale - 1),
    "diffusers.sample.noise_level": Unused("sampling is deterministic"),
    "diffusers.sample.global_std": Unused("Cosmos-RL does not read it; advantages are of the group"),
    "diffusers.sample.deterministic_sampling": Only((True,), "Set it to true: NFT samples without noise here"),
    "diffusers.sample.solver": Unused("the rollout takes Euler steps"),
}
_ONE_TYPE = (
    "Only type = grpo with trainer_type = diffusion_nft is translated; recordings are cloned by python -m"
    " scripts.train_policy"
)
_POLICY_OF_TRAINING: Mapping[str, Row] = {
    "type": Only(("grpo",), _ONE_TYPE),
    "trainer_type": Only(("diffusion_nft",), _ONE_TYPE),
    "use_remote_reward": Only((True,), "Rewards come from the service; others are options of an experiment"),
    "uncentralized_training": Unused("there is no controller"),
    "dataset.name": Read("", f"dataset.path: a file of prompts, or {', '.join(PROMPT_FILES)} below {PROMPTS}"),
    "dataset.split": Read("train", "part of the file's name"),
    "kl_beta": To(f"{RL}.kl_beta", 0.0),
    "mini_batch": To(f"{RL}.rollout_batch", 2),
    "advantage_high": To(f"{RL}.advantage.adv_clip_max", 5.0),
    "advantage_low": Read(-5.0, "must be -advantage_high"),
    "remote_reward.scale": Read(1.0, f"{RL}.rewards.NAME.make.scale"),
    "remote_reward.reward_clip_min": Read(-5.0, f"{RL}.rewards.NAME.make.clip, where a reward has none of its own"),
    "remote_reward.reward_clip_max": Read(5.0, f"{RL}.rewards.NAME.make.clip, where a reward has none of its own"),
    "remote_reward.reward_fns": Read([], f"{RL}.rewards: name, weight, score_key, clip_min, clip_max"),
    "remote_reward.batch_size": Unused(f"{RL}.rollout_batch clips are a request"),
}
_TRAIN: Mapping[str, Row] = {
    **under("train_policy", _POLICY_OF_TRAINING),
    "non_text": Only((True,), "Only recipes of videos are translated here"),
    "resume": Unused("the same command goes on where it stopped"),
    "train_batch_per_replica": Read(8, "dataloader_train.batch_size, times n_generation and the model's instances"),
    "epoch": Unused("trainer.max_iter is the length of a run: max_num_steps, or after --"),
    "max_num_steps": Given("trainer.max_iter", "2001 iterations"),
    "output_dir": Unused("runs go to IMAGINAIRE_OUTPUT_ROOT/project/group/name"),
    "epsilon": To("optimizer.eps", 1e-6),
    "optm_name": Only(("AdamW",), "Others are options of an experiment: optimizer=NAME"),
    "optm_lr": To("optimizer.lr", 1e-6),
    "optm_impl": Unused("the fastest kernel that is found is taken"),
    "optm_weight_decay": To("optimizer.weight_decay", 0.01),
    "optm_betas": To("optimizer.betas", [0.9, 0.999]),
    "optm_grad_norm_clip": To("trainer.callbacks.grad_clip.clip_norm", 1.0),
    "optm_warmup_steps": To("scheduler.warm_up_steps", 20, lambda steps: [steps]),
    "ema_enable": To(f"{PIPE}.ema.enabled", False),
    "ema_decay": Unused(f"the average is a power function of the iteration ({PIPE}.ema.rate)"),
    "ema_update_step_interval": Unused("the average follows every update"),
    "async_tp_enabled": Only((False,), NO_SPLIT),
    "compile": To("model.config.torch_compile", True),
    "param_dtype": Read("bfloat16", f"model.config.precision and {PIPE}.precision"),
    "master_dtype": Only(("float32",), "Masters are float32"),
    "fsdp_reduce_dtype": Unused("gradients are averaged in the precision of the parameters"),
    "fsdp_offload": Only((False,), f"Trajectories can be kept on the host: {RL}.offload_trajectories=true after --"),
    "fsdp_reshard_after_forward": Unused("parameters are sharded again after each block"),
    "seed": Given("trainer.seed", "0"),
    "ckpt.enable_checkpoint": Read(False, "ckpt_type: dummy where it is false"),
    "ckpt.save_freq": To("checkpoint.save_iter", 20),
    "ckpt.save_mode": Unused("saving is synchronous; ckpt_type=dcp checkpoint.dcp_async_mode_enabled=true after --"),
    "ckpt.max_keep": Given("checkpoint.keep_last", "every set of weights stays"),
}
FIELDS: Mapping[str, Row] = {
    **under("policy", _POLICY),
    **under("train", _TRAIN),
    "rollout.backend": Only(("diffusion_nft_rollout",), "The rollout is the trainer's own"),
    "rollout.n_generation": To(f"{RL}.num_rollout", 16),
    "rollout.parallelism": Unused("the trainer rolls out on its own GPUs"),
    "logging.logger": Read([], "job.wandb_mode: online where wandb is among them"),
    "logging.project_name": To("job.project", "cosmos_rl"),
    "logging.group_name": Given("job.group", "reinforcement_learning"),
    "logging.experiment_name": Read(None, "job.name; None: that of the size"),
    "logging.log_interval": Given("trainer.logging_iter", "2"),
    "logging.multi_modal_log_interval": Unused("the callback draw_samples draws videos"),
    "logging.report_mfu": Unused("benchmarks measure it"),
    "validation.enable": Only((False,), "Set it to false; evaluation is a program: scripts.evaluate_world_model"),
    "validation.dataset": Unused("see validation.enable"),
    "redis": Unused("there is no controller"),
    "mode": Only(("colocated", "disaggregated"), "Rollout and training share their GPUs"),
}
# What fields without effect have in the published recipe (Cosmos-RL 89f2e5b); other values are reported.
PUBLISHED: Mapping[str, tuple[Any, ...]] = {
    "policy.lora.init_lora_weights": ("gaussian",),
    "policy.diffusers.offload": (False,),
    "policy.diffusers.sample.eval_num_steps": (40,),
    "policy.diffusers.sample.noise_level": (0.7,),
    "policy.diffusers.sample.solver": ("dpm2",),
    "train.epoch": (10,),
    "train.optm_impl": ("foreach",),
    "train.ema_decay": (0.9,),
    "train.ema_update_step_interval": (1,),
    "train.fsdp_reduce_dtype": ("float32",),
    "train.fsdp_reshard_after_forward": ("default",),
    "train.ckpt.save_mode": ("async",),
    "logging.multi_modal_log_interval": (10,),
}
# In the published file, and without effect there: the field of the schema is timesteps_fraction.
IGNORED = ("policy.diffusers.timestep_fraction",)


def translate_nft(content: Mapping[str, Any]) -> Translation:
    """The run of a recipe for DiffusionNFT."""
    fields_at(content, FIELDS, ["train.train_policy.trainer_type"])
    _size(fields_at(content, FIELDS, ["policy.model_name_or_path"]))
    fields, warnings = read_fields(content, FIELDS, IGNORED, PUBLISHED)
    size = _size(fields)
    settings = {
        **fields.settings(OF_RL),
        **_weights(fields, size),
        **_adapters(fields),
        **_parallel(fields),
        **_steps(fields),
        **_data(fields, warnings),
        **_rewards(fields),
        "job.wandb_mode": "online" if "wandb" in fields["logging.logger"] else "disabled",
    }
    if (name := fields["logging.experiment_name"]) not in (None, "None"):
        settings["job.name"] = name
    saves = "standard" if fields["train.ckpt.enable_checkpoint"] else "dummy"
    choices = [f"experiment=predict2p5_{size.lower()}_nft", f"ckpt_type={saves}"]
    choices += ["dataloader_train=prompts", "dataloader_val=null"]
    return Translation(
        choices + [override(key, value) for key, value in settings.items()],
        {path: fields[path] for path in GPU_FIELDS},
        {},
        warnings,
    )


def _size(fields: Fields) -> str:
    name = fields["policy.model_name_or_path"]
    refuse_wan("policy.model_name_or_path", name)
    if name not in SIZES:
        raise ConfigError(f'policy.model_name_or_path = "{name}" is not trained here.{near(name, SIZES)}')
    return SIZES[name]


def _weights(fields: Fields, size: str) -> dict[str, Any]:
    revision, precision = fields["policy.model_revision"], fields["train.param_dtype"]
    if revision not in REVISIONS:
        raise ConfigError(f"policy.model_revision = {shown_value(revision)}: expected {' or '.join(REVISIONS)}.")
    return {
        "model.config.model_manager_config.dit_path": get_predict2p5_dit_path(
            model_size=size, release=REVISIONS[revision]
        ),
        "model.config.precision": precision,
        f"{PIPE}.precision": precision,
    }


def _adapters(fields: Fields) -> dict[str, Any]:
    if not fields.has("policy.lora"):
        return {"model.config.train_architecture": "base"}
    names = fields["policy.lora.target_modules"]
    for name in names:
        if name not in LAYERS:
            raise ConfigError(f"policy.lora.target_modules: no layer is called '{name}'.{near(name, LAYERS)}")
    return {
        "model.config.train_architecture": "lora",
        "model.config.lora_rank": fields["policy.lora.r"],
        "model.config.lora_target_modules": ",".join(LAYERS[name] for name in names or LAYERS),
    }


def _parallel(fields: Fields) -> dict[str, Any]:
    shard = fields["policy.parallelism.dp_shard_size"]
    return {
        "model.config.fsdp_shard_size": 0 if shard == 1 else shard,
        "trainer.distributed_parallelism": "ddp" if shard == 1 else "fsdp",
        "model_parallel.context_parallel_size": fields["policy.parallelism.cp_size"],
    }


def _steps(fields: Fields) -> dict[str, Any]:
    """How many prompts a process has in an iteration, and the micro-batches of an update."""
    group, part = fields["rollout.n_generation"], fields["train.train_policy.mini_batch"]
    instances = fields["policy.parallelism.dp_shard_size"] * fields["policy.parallelism.dp_replicate_size"]
    samples, rest = divmod(fields["train.train_batch_per_replica"], instances)
    if rest or samples % group or samples % part:
        raise ConfigError(
            f"train.train_batch_per_replica = {fields['train.train_batch_per_replica']}: each of the {instances} model"
            f" instances needs a multiple of rollout.n_generation = {group} videos and of train.train_policy.mini_batch"
            f" = {part}."
        )
    levels = int(fields["policy.diffusers.sample.num_steps"] * fields["policy.diffusers.timesteps_fraction"])
    if fields["train.train_policy.advantage_low"] != -fields["train.train_policy.advantage_high"]:
        raise ConfigError("train.train_policy.advantage_low must be -advantage_high: advantages are clipped evenly.")
    return {
        "dataloader_train.batch_size": samples // group,
        f"{RL}.num_timesteps": levels,
        "trainer.grad_accum_iter": levels * (samples // part),
    }


def _data(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """Prompts without first frames."""
    path, frames = fields["train.train_policy.dataset.name"], fields["policy.diffusers.train_frames"]
    if path in PROMPT_FILES:
        split = fields["train.train_policy.dataset.split"]
        name, path = path, f"{PROMPTS}/{path}/{PROMPT_FILES[path].format(split=split)}"
        warnings.append(f'train.train_policy.dataset.name = "{name}": its prompts are read from {path}; put them there')
    elif PurePath(path).suffix not in (".txt", ".jsonl", ".json"):
        raise ConfigError(
            f'train.train_policy.dataset.name = "{path}": expected a file of prompts (.txt, .jsonl) or one of'
            f" {', '.join(PROMPT_FILES)}."
        )
    return {
        "dataloader_train.dataset.path": path,
        "dataloader_train.dataset.num_frames": frames,
        "dataloader_train.dataset.video_size": fields["policy.diffusers.inference_size"],
        f"{PIPE}.state_t": (frames - 1) // 4 + 1,
        f"{RL}.min_num_conditional_frames": 0,
        f"{RL}.max_num_conditional_frames": 0,
    }


def _rewards(fields: Fields) -> dict[str, Any]:
    section = "train.train_policy.remote_reward"
    known = ("name", "weight", "score_key", "clip_min", "clip_max")
    found: dict[str, Any] = {"dance_grpo": None}
    for row in fields[f"{section}.reward_fns"] or [{"name": "dance_grpo", "score_key": "overall_reward"}]:
        if unknown := set(row) - set(known):
            raise ConfigError(f"{section}.reward_fns.{min(unknown)}: no such field.{near(min(unknown), known)}")
        ends = [row.get(f"clip_{end}", fields[f"{section}.reward_clip_{end}"]) for end in ("min", "max")]
        node = remote_node(row["name"], row.get("score_key", row["name"]), fields[f"{section}.scale"], ends)
        found[row["name"]] = {"make": node, "weight": row.get("weight", 1.0)}
    return {f"+{RL}.rewards.{name}": reward for name, reward in found.items()}
