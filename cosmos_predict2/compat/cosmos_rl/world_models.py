# SPDX-License-Identifier: Apache-2.0
"""The run of a recipe for world models: its experiment, text, weights, data and rewards."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_predict2.compat.cosmos_rl.callbacks import callback_settings
from cosmos_predict2.compat.cosmos_rl.loaders import loader_settings
from cosmos_predict2.compat.cosmos_rl.world_model_fields import (
    CONDITIONER,
    CONDITIONER_FIELDS,
    FIELDS,
    NET,
    PIPE,
    REASON1,
    RL,
)
from cosmos_predict2.compat.fields import (
    OF_RL,
    SUPERVISED,
    Fields,
    Translation,
    fields_at,
    overrides,
    read_fields,
    sharded,
    shown_value,
)
from cosmos_predict2.diffusion.flow_time import NUM_TIMESTEPS
from cosmos_predict2.released import PREDICT25, get_cosmos_predict25_checkpoint
from cosmos_predict2.rl.rewards.remote import RemoteReward
from cosmos_predict2.rl.rewards.verifiable import Smoothness
from imaginaire.errors import ConfigError, near

_SIZE_FIELDS = tuple(f"model.net.{name}" for name in ("model_channels", "num_blocks", "num_heads"))
SIZES = {(2048, 28, 16): "2B", (5120, 36, 40): "14B", (128, 4, 2): "tiny"}  # channels, blocks, heads
POST_TRAINING = "predict2p5_video2world_training_2b_cosmos_nemo_assets"
GPU_FIELDS = ("model.fsdp_shard_size", "model.dp_replicate_size", "model_parallel.context_parallel_size")


def translate_wfm(content: Mapping[str, Any]) -> Translation:
    """The run of a recipe for world models."""
    content, listed = _without_lists(content)
    kind = fields_at(content, FIELDS, ["checkpoint.load_path", "model.scaling", *_SIZE_FIELDS])
    refuse_wan("checkpoint.load_path", kind["checkpoint.load_path"])
    _size(kind)
    fields, warnings = read_fields(content, FIELDS)
    is_rl, size = fields["model.rl.enabled"], _size(fields)
    shards = fields["model.fsdp_shard_size"]
    settings = {
        **fields.settings(OF_RL if is_rl else SUPERVISED),
        **_conditioner_settings(listed["conditioner"]),
        **sharded(shards),
        **({} if shards == 1 else {"trainer.distributed_parallelism": fields["trainer.distributed_parallelism"]}),
        "model_parallel.context_parallel_size": fields["model_parallel.context_parallel_size"],
        "model.config.precision": fields["model.precision"],
        f"{PIPE}.precision": fields["model.precision"],
        **_start_settings(fields),
        **_text_settings(fields, warnings),
        **(_rl_settings(fields, warnings) if is_rl else _supervised_settings(fields)),
        **callback_settings(listed["callbacks"], warnings),
        "job.name": fields["job.name"],
    }
    if not fields["job.name"]:
        raise ConfigError("job.name is missing: every recipe has it.")
    reads_captions = settings.get("model.config.text.encoder", "") is not None
    choices, of_loaders = loader_settings(fields, warnings, reads_captions=reads_captions)
    for path in GPU_FIELDS:
        if fields[path] < 1:
            raise ConfigError(f"{path} = {fields[path]}, but it is at least 1.")
    form = "dcp" if fields["checkpoint.type"] == "distributed" else "standard"
    token = fields["model.rl.reward_config.remote_reward.token"]
    return Translation(
        [*_experiment(fields, size), "callbacks=[basic,long]", f"ckpt_type={form}", *choices]
        + overrides({**settings, **of_loaders}),
        {path: fields[path] for path in GPU_FIELDS},
        {"WFM_REWARD_TOKEN": token} if token else {},  # where it is not set: no configuration that is saved has it
        warnings,
    )


def _without_lists(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The content without [[model.conditioner]] and [[trainer.callbacks]], which are lists of tables; and these."""
    rest: dict[str, Any] = dict(content)
    listed: dict[str, list[Any]] = {}
    for section, name in (("model", "conditioner"), ("trainer", "callbacks")):
        inside = rest.get(section)
        listed[name] = []
        if isinstance(inside, Mapping) and name in inside:
            rest[section] = {key: value for key, value in inside.items() if key != name}
            listed[name] = inside[name]
            if not isinstance(listed[name], list) or not all(isinstance(one, Mapping) for one in listed[name]):
                raise ConfigError(f"{section}.{name}: it is a list of tables, [[{section}.{name}]].")
    return rest, listed


# --- which experiment


def _size(fields: Fields) -> str:
    numbers = tuple(fields[path] for path in _SIZE_FIELDS)
    if numbers not in SIZES:
        known = "; ".join(f"{size}: {', '.join(map(str, row))}" for row, size in SIZES.items())
        raise ConfigError(
            f"{', '.join(_SIZE_FIELDS)} = {', '.join(map(str, numbers))} is no size of Predict2.5. Sizes: {known}."
        )
    return SIZES[numbers]


def _experiment(fields: Fields, size: str) -> list[str]:
    """The choice of an experiment, and of the model of another size."""
    if not fields["model.rl.enabled"]:
        return [f"experiment={POST_TRAINING}", f"model=predict2p5_video2world_fsdp_{size.lower()}"]
    kind = "ddrl" if fields["model.rl.data_beta"] else "flow_grpo"
    return [f"experiment=predict2p5_2b_{kind}", f"model=predict2p5_video2world_rl_{size.lower()}"]


# --- parts of the run


def _conditioner_settings(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of samples from which training withholds each input."""
    settings = {}
    for entry in entries:
        name, place = str(entry.get("name", "")), "model.conditioner"
        if name not in CONDITIONER:
            raise ConfigError(f"{place}: no input is called '{name}'.{near(name, CONDITIONER)}")
        for field in set(entry) - set(CONDITIONER_FIELDS):
            raise ConfigError(f"{place}.{name}.{field}: no such field.{near(field, CONDITIONER_FIELDS)}")
        kind = entry.get("type", "remap_key")
        if kind != CONDITIONER[name]:
            raise ConfigError(f'{place}.{name}.type = {shown_value(kind)}, but it is "{CONDITIONER[name]}".')
        settings[f"{PIPE}.conditioner.{name}.dropout_rate"] = entry.get("dropout_rate", 0.0)
    return settings


def _released_weights(fields: Fields) -> str:
    """The name of Predict2.5's released weights that a recipe starts from; empty: it starts from others, or none."""
    pair = (fields["checkpoint.load_path"], fields["checkpoint.model_id"])
    return next((name for name, file in PREDICT25.items() if file == pair), "")


def _start_settings(fields: Fields) -> dict[str, Any]:
    path, file = fields["checkpoint.load_path"], fields["checkpoint.model_id"]
    if file is not None and not path:
        raise ConfigError(f'checkpoint.model_id = "{file}", but checkpoint.load_path, its repository, is missing.')
    dit_path, load_path = "", ""
    if name := _released_weights(fields):
        dit_path = get_cosmos_predict25_checkpoint(name)
    elif file is not None:
        dit_path = f"hf://{path}/{file}"
    elif path.endswith((".pt", ".safetensors")):
        dit_path = path
    else:
        load_path = path
    factor = fields["model.sigma_conditional"]
    own_time = NUM_TIMESTEPS * factor / (1 + factor)
    return {
        "model.config.model_manager_config.dit_path": dit_path,
        "checkpoint.load_path": load_path,
        f"{PIPE}.flow.conditional_frame_timestep": -1.0 if fields["model.use_rf_ckpts"] else own_time,
    }


def refuse_wan(path: str, value: str) -> None:
    """Raise for Wan2.1, whose recipes the guide announces."""
    if "wan" in str(value).lower():
        raise ConfigError(
            f'{path} = "{value}": Wan2.1 is not trained here yet. Predict2.5 is: "nvidia/Cosmos-Predict2.5-2B".'
        )


def _text_settings(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """The encoder of captions, and the width of text that the network reads."""
    encoder, projected = fields["model.text_encoder_class"], fields["model.net.use_crossattn_projection"]
    if _released_weights(fields) and not projected:
        warnings.append(
            f"model.net.use_crossattn_projection = false with {fields['checkpoint.load_path']}: these weights read"
            " Cosmos-Reason1's text through a projection, so that captions (metas/) are encoded by it in training, and"
            " T5 embeddings are not read"
        )
        return {}
    channels = fields["model.net.crossattn_proj_in_channels"] if projected else None
    settings: dict[str, Any] = {f"{NET}.crossattn_proj_in_channels": channels}
    if not (encoder.startswith("reason1") and fields["model.text_encoder_config.compute_online"]):
        return {**settings, "model.config.text.encoder": None}
    if _size(fields) == "tiny":  # has an encoder of its own
        return settings
    section = "model.text_encoder_config"
    settings["model.config.text.encoder.strategy"] = fields[f"{section}.embedding_concat_strategy"]
    settings["model.config.text.encoder.n_layers_per_group"] = fields[f"{section}.n_layers_per_group"]
    if fields[f"{section}.ckpt_path"] != REASON1:
        settings["model.config.text.encoder.path"] = fields[f"{section}.ckpt_path"]
    return settings


def _supervised_settings(fields: Fields) -> dict[str, Any]:
    return {
        "model.config.loss_scale": fields["model.loss_scale"],
        "model.config.conditional_frames_probs": None,
        "trainer.callbacks.draw_samples": None,
    }


# --- reinforcement learning


def _rl_settings(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    highest, lowest = (fields[f"model.rl.reward_config.adv_clip_{end}"] for end in ("max", "min"))
    if lowest != -highest:
        raise ConfigError(
            f"model.rl.reward_config.adv_clip_min = {lowest}, but advantages are clipped evenly: set it to {-highest}."
        )
    kind = "dataloader." if fields["dataloader_train.type"] == "web" else ""
    prompts = fields[f"dataloader_train.video_dataloader.{kind}batch_size"]
    members = fields["model.rl.num_rollout"]
    ranks = math.gcd(fields["model.fsdp_shard_size"] * fields["model.dp_replicate_size"], members)
    rewards = _rewards(fields, warnings)
    return {
        f"{RL}.loss_scale": fields["model.loss_scale"],
        f"{RL}.rollout_batch": 1,
        f"{RL}.ranks_per_group": ranks,  # there a group is as many model instances as it has videos
        "trainer.grad_accum_iter": len(fields["model.rl.train_on"]) * members // ranks * prompts,
        **{f"+{RL}.rewards.{name}": rewards.get(name) for name in {"dance_grpo": None, **rewards}},
    }


def _rewards(fields: Fields, warnings: list[str]) -> dict[str, Any]:
    """The lazy nodes of the rewards that are switched on; several count alike."""
    section, nodes = "model.rl.reward_config", {}
    if fields[f"{section}.remote_reward.enabled"]:
        options = {name: fields[f"{section}.remote_reward.{name}"] for name in _REMOTE_FIELDS}
        clip = (options.pop("reward_clip_min"), options.pop("reward_clip_max"))
        name = options.pop("reward_fn")
        nodes[name] = remote_node(name, clip=clip, **options)
    if fields[f"{section}.fake_reward.enabled"]:
        warnings.append(
            f"{section}.fake_reward: there it is 0 for every video; here it is higher for smoother ones, so that the"
            " advantages are not 0"
        )
        nodes["fake_reward"] = {"_target_": _target(Smoothness)}
    if not nodes:
        raise ConfigError(f"{section}: no reward is enabled. Set {section}.remote_reward.enabled = true.")
    return {name: {"make": node, "weight": 1 / len(nodes)} for name, node in nodes.items()}


_REMOTE_FIELDS = (
    *("reward_fn", "score_key", "scale", "reward_clip_min", "reward_clip_max"),
    *("enqueue_url", "fetch_url"),
)


def remote_node(name: str, score_key: str, scale: float, clip: Sequence[float], **addresses: str) -> dict[str, Any]:
    """The lazy node of a reward of the service; its token comes from the environment."""
    options = {"score_key": score_key, "scale": scale, "clip": list(clip)}
    return {"_target_": _target(RemoteReward), "reward": name, **options, **addresses}


def _target(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
