# SPDX-License-Identifier: Apache-2.0
"""The run of a recipe for world models: its experiment, text, weights, rewards, data and callbacks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from cosmos_predict2.checkpoints.card import name_of
from cosmos_predict2.compat.cosmos_rl import world_model_fields
from cosmos_predict2.compat.cosmos_rl.world_model_fields import NET, PIPE, RL
from cosmos_predict2.compat.fields import (
    OF_RL,
    SUPERVISED,
    Fields,
    Translation,
    fields_at,
    overrides,
    read_fields,
    require_one_of,
    sharded,
    shown_value,
)
from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS
from cosmos_predict2.released import PREDICT25, get_cosmos_predict25_checkpoint
from cosmos_predict2.rl.rewards.remote import RemoteReward
from cosmos_predict2.rl.rewards.verifiable import Smoothness
from cosmos_predict2.tokenizers.sizes import TOY_RESOLUTION, size_of
from imaginaire.errors import ConfigError, near

_SIZE_FIELDS = tuple(f"model.net.{name}" for name in ("model_channels", "num_blocks", "num_heads"))
SIZES = {(2048, 28, 16): "2B", (5120, 36, 40): "14B", (128, 4, 2): "tiny"}  # channels, blocks, heads
POST_TRAINING = "predict2p5_video2world_training_2b_cosmos_nemo_assets"
GPU_FIELDS = ("model.fsdp_shard_size", "model.dp_replicate_size", "model_parallel.context_parallel_size")


def translate_wfm(content: Mapping[str, Any]) -> Translation:
    content, listed = _without_lists(content)
    deciding = fields_at(content, world_model_fields.FIELDS, ["checkpoint.load_path", "model.scaling", *_SIZE_FIELDS])
    refuse_wan("checkpoint.load_path", deciding["checkpoint.load_path"])
    size = _size(deciding)
    fields, warnings = read_fields(content, world_model_fields.FIELDS)
    is_rl, shards = fields["model.rl.enabled"], fields["model.fsdp_shard_size"]
    supervised = {
        "model.config.loss_scale": fields["model.loss_scale"],
        "model.config.conditional_frames_probs": None,
        "trainer.callbacks.draw_samples": None,
    }
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
        **(_rl_settings(fields, warnings) if is_rl else supervised),
        **_callback_settings(listed["callbacks"], warnings),
        "job.name": fields["job.name"],
    }
    if not fields["job.name"]:
        raise ConfigError("job.name is missing: every recipe has it.")
    reads_captions = settings.get("model.config.text.encoder", "") is not None
    choices, of_loaders = _loader_settings(fields, warnings, reads_captions=reads_captions)
    form = "dcp" if fields["checkpoint.type"] == "distributed" else "standard"
    token = fields["model.rl.reward_config.remote_reward.token"]
    experiment, model = POST_TRAINING, f"predict2p5_video2world_fsdp_{size.lower()}"
    if is_rl:
        kind = "ddrl" if fields["model.rl.data_beta"] else "flow_grpo"
        experiment, model = f"predict2p5_2b_{kind}", f"predict2p5_video2world_rl_{size.lower()}"
    return Translation(
        [f"experiment={experiment}", f"model={model}", "callbacks=[basic,long]", f"ckpt_type={form}", *choices]
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


def _size(fields: Fields) -> str:
    numbers = tuple(fields[path] for path in _SIZE_FIELDS)
    if numbers not in SIZES:
        known = "; ".join(f"{size}: {', '.join(map(str, row))}" for row, size in SIZES.items())
        raise ConfigError(
            f"{', '.join(_SIZE_FIELDS)} = {', '.join(map(str, numbers))} is no size of Predict2.5. Sizes: {known}."
        )
    return SIZES[numbers]


# --- parts of the run

CONDITIONER = {  # name -> type
    "fps": "remap_key",
    "padding_mask": "remap_key",
    "text": "text_attr",
    "use_video_condition": "boolean_flag",
}
CONDITIONER_FIELDS = ("name", "type", "output_key", "input_key", "dropout_rate")


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
    if fields[f"{section}.ckpt_path"] != world_model_fields.REASON1:
        settings["model.config.text.encoder.path"] = fields[f"{section}.ckpt_path"]
    return settings


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
        remote = f"{section}.remote_reward"
        options = {name: fields[f"{remote}.{name}"] for name in ("score_key", "scale", "enqueue_url", "fetch_url")}
        clip = [fields[f"{remote}.reward_clip_{end}"] for end in ("min", "max")]
        nodes[fields[f"{remote}.reward_fn"]] = remote_node(fields[f"{remote}.reward_fn"], clip=clip, **options)
    if fields[f"{section}.fake_reward.enabled"]:
        warnings.append(
            f"{section}.fake_reward: there it is 0 for every video; here it is higher for smoother ones, so that the"
            " advantages are not 0"
        )
        nodes["fake_reward"] = {"_target_": name_of(Smoothness)}
    if not nodes:
        raise ConfigError(f"{section}: no reward is enabled. Set {section}.remote_reward.enabled = true.")
    return {name: {"make": node, "weight": 1 / len(nodes)} for name, node in nodes.items()}


def remote_node(name: str, score_key: str, scale: float, clip: Sequence[float], **addresses: str) -> dict[str, Any]:
    """The lazy node of a reward of the service; its token comes from the environment."""
    options = {"score_key": score_key, "scale": scale, "clip": list(clip)}
    return {"_target_": name_of(RemoteReward), "reward": name, **options, **addresses}


# --- data


def _loader_settings(fields: Fields, warnings: list[str], *, reads_captions: bool) -> tuple[list[str], dict[str, Any]]:
    """The groups that are chosen and the keys that are set, of both loaders; validation's where the run validates."""
    choices: list[str] = []
    settings: dict[str, Any] = {}
    for loader in ("dataloader_train", "dataloader_val"):
        if loader == "dataloader_val" and not fields["trainer.run_validation"]:
            choices.append("dataloader_val=null")
            continue
        kind, section = fields[f"{loader}.type"], f"{loader}.video_dataloader"
        require_one_of(f"{loader}.type", kind, ("local", "web"))
        if fields[f"{loader}.image_dataloader.ratio"] or not fields[f"{section}.ratio"]:
            raise ConfigError(
                f"{loader}: the ratio of image_dataloader must be 0 and that of video_dataloader above 0, because"
                f" rewards are of videos. Set {loader}.image_dataloader.ratio = 0 and {section}.ratio = 1."
            )
        if kind == "local":
            group, dataset = "folder", _folder(fields, section, warnings, reads_captions)
        else:
            section = f"{section}.dataloader"
            group, dataset = _shards_or_mock(fields, section, reads_captions)
        choices.append(f"{loader}={group}")
        workers = fields[f"{section}.num_workers"]
        settings |= {
            f"{loader}.batch_size": fields[f"{section}.batch_size"],
            f"{loader}.num_workers": workers,
            f"{loader}.pin_memory": fields[f"{section}.pin_memory"],
            f"{loader}.prefetch_factor": fields[f"{section}.prefetch_factor"] if workers else None,
            **{f"{loader}.dataset.{name}": value for name, value in dataset.items()},
        }
    return choices, settings


def _folder(fields: Fields, section: str, warnings: list[str], reads_captions: bool) -> dict[str, Any]:
    folder, size = fields[f"{section}.dataset_dir"], fields[f"{section}.video_size"]
    if len(size) != 2 or not all(isinstance(side, int) for side in size):
        raise ConfigError(f"{section}.video_size = {size}, but it is two whole numbers: [height, width].")
    height, width = size
    if not folder:
        raise ConfigError(f"{section}.dataset_dir is missing: name the folder that has metas/ and videos/.")
    if not reads_captions and not fields[f"{section}.offline_text_embedding"]:
        raise ConfigError(
            f"{section}.offline_text_embedding = false, but the model does not encode captions: set it to true and"
            ' encode them by scripts.get_t5_embeddings, or set model.text_encoder_class = "reason1_7B" and'
            " model.text_encoder_config.compute_online = true."
        )
    if height > width:
        warnings.append(
            f"{section}.video_size = [{height}, {width}] is height and width, so that clips are stretched to portrait,"
            f" as they are there; for landscape write [{width}, {height}]"
        )
    return {
        "dataset_dir": folder,
        "num_frames": fields[f"{section}.num_frames"],
        "video_size": [height, width],
        "text_encoder": "none" if reads_captions else None,
    }


def _shards_or_mock(fields: Fields, section: str, reads_captions: bool) -> tuple[str, dict[str, Any]]:
    """The group of shards, or of mock videos, and its data set."""
    resolution = str(fields[f"{section}.dataset.resolution"])
    size = size_of(resolution, "1:1" if resolution == TOY_RESOLUTION else "16:9")
    clips = {"num_frames": fields[f"{section}.dataset.num_video_frames"], "video_size": list(size)}
    if not fields[f"{section}.webdataset"]:
        text = {"num_tokens": fields[f"{section}.dataset.len_t5"], "width": fields[f"{section}.dataset.t5_dim"]}
        return "mock_video", {**clips, **text}
    shards = fields[f"{section}.dataset.dataset_name"]
    if not str(shards).endswith(".tar"):
        raise ConfigError(
            f"{section}.dataset.dataset_name = {shown_value(shards)}: the data sets of such names were not published."
            ' Name shards, such as "s3://BUCKET/FOLDER/{00000..00127}.tar" or "/data/*.tar".'
        )
    return "shards", {**clips, "shards": [shards], "text_encoder": "none" if reads_captions else None}


# --- callbacks

KEY = "trainer.callbacks"
DRAWN = ("every_n_sample_reg", "every_n_sample_ema")  # become draw_samples, under the recipe's name
_SAMPLES = "every_n step_size n_viz_sample num_sampling_step guidance is_sample is_x0 n_x0_level is_ema fps"
_LOGS = ("", "logging_iter_multipler")
CALLBACKS = {  # of recipes -> the arguments that ours of this name has, and those without effect
    "grad_clip": ("clip_norm force_finite", ""),
    "low_prec": ("update_iter", ""),
    "iter_speed": ("hit_thres every_n step_size", ""),
    "heart_beat": ("update_interval_in_minute every_n step_size", ""),
    "device_monitor": ("every_n step_size log_memory_detail", ""),
    "manual_gc": ("warm_up every_n step_size", ""),
    # All clips that are drawn are saved, whole.
    **dict.fromkeys(DRAWN, (_SAMPLES, "n_sample_to_save use_negative_prompt show_all_frames")),
    "param_count": ("", ""),  # every run logs its parameters
    "compile_tokenizer": ("", "enabled compile_after_iterations dynamic"),  # it is not compiled here
    "frame_loss_log": _LOGS,  # metrics.jsonl has the losses
    "wandb": _LOGS,  # job.wandb_mode switches it on; trainer.logging_iter is how often
    "wandb_10x": _LOGS,
    "dataloader_speed": ("", "every_n step_size"),  # iter_speed has the time for data
    "reward_callback": _LOGS,  # metrics.jsonl has every reward
    "verify_data_batch_keys": ("", "check_first_n"),  # the model checks each batch
}
STORED = ("save_s3", "save_s3_every_log_n", "upload_every_n_mul", "save_logging_iter_multipler")  # unused anywhere


def _callback_settings(listed: Sequence[Mapping[str, Any]], warnings: list[str]) -> dict[str, Any]:
    """The settings of ours that the callbacks of a recipe become, by key."""
    settings: dict[str, Any] = {}
    for entry in listed:
        name = str(entry.get("name", ""))
        if name not in CALLBACKS:
            raise ConfigError(f"{KEY}: no callback is called '{name}'.{near(name, CALLBACKS)}")
        place, arguments = f"{KEY}.{name}", dict(entry.get("args", {}))
        same, unused = (names.split() for names in CALLBACKS[name])
        for other in sorted(set(entry) - {"name", "args"}):
            if other != "step_size":  # in published files, beside args
                raise ConfigError(f"{place}.{other}: a callback has a name and args. Did you mean args.{other}?")
            warnings.append(f"{place}.{other}: Cosmos-RL ignores this field, and so does this run; args.{other} counts")
        known = (*same, *unused, *STORED)
        for argument in arguments:
            if argument not in known:
                raise ConfigError(f"{place}.args.{argument}: '{name}' has no such argument.{near(argument, known)}")
        if name not in DRAWN:
            settings |= {f"{place}.{key}": arguments[key] for key in same if key in arguments}
        elif node := _samples(arguments):
            settings[f"+{place}"] = node
    if listed and not any(entry.get("name") == "grad_clip" for entry in listed):
        settings[f"{KEY}.grad_clip"] = None
        warnings.append(f"{KEY}: without grad_clip, gradients are not clipped")
    return settings


def _samples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The node of `DrawSamples`; nothing where it would draw nothing."""
    if arguments.get("use_negative_prompt"):
        raise ConfigError(f"{KEY}: use_negative_prompt = true, but samples are drawn against no text. Leave it out.")
    is_sample = bool(arguments.get("is_sample", True) and arguments.get("guidance", [0.0]))
    if not is_sample and not arguments.get("is_x0", True):
        return {}
    given = {name: arguments[name] for name in _SAMPLES.split() if name in arguments and name != "guidance"}
    guidance = {"guidance": arguments.get("guidance", [0.0])} if is_sample else {}
    return {"_target_": name_of(DrawSamples), **given, **guidance, "is_sample": is_sample}
