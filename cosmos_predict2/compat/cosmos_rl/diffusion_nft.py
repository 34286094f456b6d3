# SPDX-License-Identifier: Apache-2.0
"""Recipes of Cosmos-RL's diffusers trainer for DiffusionNFT: their fields, and the run that they become."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from cosmos_predict2.compat.cosmos_rl.policies import checkpoint_type, logged
from cosmos_predict2.compat.cosmos_rl.policy_fields import LOGGING, LORA, TRAIN
from cosmos_predict2.compat.cosmos_rl.world_model_fields import NET, PIPE, RL
from cosmos_predict2.compat.cosmos_rl.world_models import refuse_wan, remote_node
from cosmos_predict2.compat.fields import (
    Fields,
    Row,
    Translation,
    fields_at,
    given,
    only,
    overrides,
    read_fields,
    reads,
    sets,
    sharded,
    shown_value,
    under,
    unused,
)
from cosmos_predict2.configs.base.config_video2world import RELEASES, get_predict2p5_dit_path
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
NO_CONTROLLER = "there is no controller"

_DIFFUSERS: dict[str, Row] = {
    **reads({"inference_size": [1024, 1024], "train_frames": 41, "timesteps_fraction": 1.0}),
    **sets(
        {
            "nft_beta": (f"{RL}.nft_beta", 1.0),
            "weight_copy_decay_type": (f"{RL}.weight_copy_decay_type", 0),
            "sample.num_steps": (f"{RL}.sample_steps", 40),
            "sample.guidance_scale": (f"{RL}.guidance", 4.5, lambda scale: scale - 1),
        }
    ),
    **only("is_video", "Only videos are trained", True),
    **only("max_prompt_length", "Prompts have 512 tokens, as the released weights read them", 512, 300),
    **only("sample.deterministic_sampling", "Set it to true: NFT samples without noise here", True),
    **unused("dtype", "train.param_dtype is the precision"),
    **unused("offload", "the text encoder lives on the host between prompts", False),
    **unused("inference_frames", "samples are as long as training's clips"),
    **unused("sample.eval_num_steps", "evaluation is a program: scripts.evaluate_world_model", 40),
    **unused("sample.noise_level", "sampling is deterministic", 0.7),
    **unused("sample.global_std", "Cosmos-RL does not read it; advantages are of the group"),
    **unused("sample.solver", "the rollout takes Euler steps", "dpm2"),
    # In the published file; the field of the schema is timesteps_fraction.
    "timestep_fraction": Row(reported="Cosmos-RL ignores these fields, and so does this run"),
}
_POLICY: dict[str, Row] = {
    **under(
        "parallelism",
        reads({"dp_shard_size": 1, "dp_replicate_size": 1, "cp_size": 1}, least=1),
        only("n_init_replicas", "Copies of the model are dp_replicate_size", 1),
        only("tp_size ep_size pp_size", NO_SPLIT, 1),
    ),
    **reads({"model_name_or_path": "", "model_revision": None}),
    **only("is_diffusers", "Only recipes of diffusers models are translated here", True),
    **sets(
        {
            "model_gradient_checkpointing": (
                *(f"{NET}.sac_config.mode", True),
                lambda recomputes: "block_wise" if recomputes else "none",
            )
        }
    ),
    **under(
        "lora",
        LORA,
        reads({"target_modules": []}),
        sets({"lora_alpha": ("model.config.lora_alpha", 8.0)}),
        only("use_rslora", "Set lora_alpha to alpha * sqrt(r)", False),
        unused("lora_names", "the sampling policy is a copy of the adapters that lags behind"),
        unused("init_lora_weights", "adapters begin by adding nothing, whatever their first factor", "gaussian"),
    ),
    **under("diffusers", _DIFFUSERS),
}
_ONE_TYPE = (
    "Only type = grpo with trainer_type = diffusion_nft is translated; recordings are cloned by python -m"
    " scripts.train_policy"
)
_POLICY_OF_TRAINING: dict[str, Row] = {
    **only("type", _ONE_TYPE, "grpo"),
    **only("trainer_type", _ONE_TYPE, "diffusion_nft"),
    **only("use_remote_reward", "Rewards come from the service; others are options of an experiment", True),
    **reads({"dataset.name": "", "dataset.split": "train", "advantage_low": -5.0}),
    **sets(
        {
            "kl_beta": (f"{RL}.kl_beta", 0.0),
            "advantage_high": (f"{RL}.advantage.adv_clip_max", 5.0),
        }
    ),
    **sets(dict(mini_batch=(f"{RL}.rollout_batch", 2)), least=1),
    **under("remote_reward", reads(dict(scale=1.0, reward_clip_min=-5.0, reward_clip_max=5.0, reward_fns=[]))),
    **unused("remote_reward.batch_size", f"{RL}.rollout_batch clips are a request"),
    **unused("uncentralized_training", NO_CONTROLLER),
}
FIELDS: Mapping[str, Row] = {
    **under("policy", _POLICY),
    **under("train.train_policy", _POLICY_OF_TRAINING),
    **under(
        "train",
        TRAIN,
        sets({"ema_enable": (f"{PIPE}.ema.enabled", False), "compile": ("model.config.torch_compile", True)}),
        only("non_text", "Only recipes of videos are translated here", True),
        only("async_tp_enabled", NO_SPLIT, False),
        only("fsdp_offload", f"Trajectories can be kept on the host: {RL}.offload_trajectories=true after --", False),
        unused("resume", "the same command goes on where it stopped"),
        unused("epoch", "trainer.max_iter is the length of a run: max_num_steps, or after --", 10),
        unused("output_dir", "runs go to IMAGINAIRE_OUTPUT_ROOT/project/group/name"),
        unused("optm_impl", "the fastest kernel that is found is taken", "foreach"),
        unused("ema_decay", f"the average is a power function of the iteration ({PIPE}.ema.rate)", 0.9),
        unused("ema_update_step_interval", "the average follows every update", 1),
    ),
    **given({"train.max_num_steps": "trainer.max_iter", "train.ckpt.max_keep": "checkpoint.keep_last"}),
    **only("rollout.backend", "The rollout is the trainer's own", "diffusion_nft_rollout"),
    **sets({"rollout.n_generation": (f"{RL}.num_rollout", 16)}, least=1),
    **unused("rollout.parallelism", "the trainer rolls out on its own GPUs"),
    **under("logging", LOGGING, unused("multi_modal_log_interval", "the callback draw_samples draws videos", 10)),
    **given({"logging.log_interval": "trainer.logging_iter"}),
    **only("validation.enable", "Set it to false; evaluation is a program: scripts.evaluate_world_model", False),
    **unused("validation.dataset", "see validation.enable"),
    **unused("redis", NO_CONTROLLER),
    **only("mode", "Rollout and training share their GPUs", "colocated", "disaggregated"),
}


def translate_nft(content: Mapping[str, Any]) -> Translation:
    size = _size(fields_at(content, FIELDS, ["train.train_policy.trainer_type", "policy.model_name_or_path"]))
    fields, warnings = read_fields(content, FIELDS)
    settings = {
        **fields.settings(),
        **_weights(fields, size),
        **_adapters(fields),
        **sharded(fields["policy.parallelism.dp_shard_size"]),
        "model_parallel.context_parallel_size": fields["policy.parallelism.cp_size"],
        **_steps(fields),
        **_data(fields, warnings),
        **_rewards(fields),
        **logged(fields),
    }
    choices = [f"experiment=predict2p5_{size.lower()}_nft", checkpoint_type(fields)]
    choices += ["dataloader_train=prompts", "dataloader_val=null"]
    return Translation(choices + overrides(settings), {path: fields[path] for path in GPU_FIELDS}, {}, warnings)


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


def _steps(fields: Fields) -> dict[str, Any]:
    """The number of prompts of a process in an iteration, and the micro-batches of an update."""
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
