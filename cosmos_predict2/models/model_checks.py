# SPDX-License-Identifier: Apache-2.0
"""Checks of the configuration of a world model's training, before anything is built: `check`.

``config`` is ``model.config`` as a mapping; `CheckContext` has the rest of the run.
"""

from collections.abc import Iterator, Mapping
from inspect import signature
from itertools import starmap
from typing import Any

import attrs

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.card import TRANSFORM_KEY, read_card
from cosmos_predict2.checkpoints.dit_loading import CONFIG_KEY, resume_differences, start_differences
from cosmos_predict2.checkpoints.dit_weights import problem_with
from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.mock import MockImages
from cosmos_predict2.data.views import views_of_data
from cosmos_predict2.models.actions import NO_IMAGES, ONE_RUN, action_size
from cosmos_predict2.models.config import given_shares
from cosmos_predict2.models.text import PROJECTION, check_text, data_text_problems
from cosmos_predict2.nn.action_dit import ActionDiT
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.assembly import NETWORK_KEY, NO_NETWORK, attention_problem
from cosmos_predict2.world_model.config import PRECISIONS, Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.objectives import OBJECTIVE_KEY, objective_problem
from cosmos_predict2.world_model.parallelize import checked_policy, degree_problems
from imaginaire import distributed, storage
from imaginaire.buildable import target_of
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, UserError
from imaginaire.findings import CheckContext, Finding, error, errors, warning

PIPE = "model.config.pipe_config"
DIT_PATH_KEY = "model.config.model_manager_config.dit_path"
RELEASED_LATENT_SIDE = 240  # max_img_h and max_img_w of the released networks
UNSET_CHUNK = attrs.fields(Video2WorldActionPipelineConfig).chunk_size.default


def check(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Everything but `check_family`, in the order in which a user would mend it."""
    path, pipe = config["model_manager_config"]["dit_path"], config["pipe_config"]
    if path and not storage.is_remote(path):
        yield from errors(DIT_PATH_KEY, [problem_with(path)])
    if pipe["net"] is None:
        yield error(NETWORK_KEY, NO_NETWORK)
        return
    yield from check_degrees(config, context)
    yield from check_settings(config)
    yield from check_frozen(config, context)
    for key, data in {**context.training, **context.validation}.items():
        yield from check_data(key, data, config)
    target = target_of(pipe["net"])
    if TRANSFORM_KEY in pipe or (isinstance(target, type) and issubclass(target, ActionDiT)):
        yield from check_actions(config, context)


def check_settings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Values that do not fit each other."""
    pipe = config["pipe_config"]
    problem = attention_problem(pipe["net"], distributed.device(), PRECISIONS[config["precision"]])
    yield from errors(f"{PIPE}.net.atten_backend", [problem])
    if sac_config := pipe["net"].get("sac_config"):
        try:
            checked_policy(**sac_config)
        except ConfigError as refused:
            yield error(f"{PIPE}.net.sac_config", str(refused).rstrip("."))
    low, high = pipe["min_num_conditional_frames"], pipe["max_num_conditional_frames"]
    if not 0 <= low <= high < pipe["state_t"]:
        yield error(
            f"{PIPE}.max_num_conditional_frames",
            f"min_num_conditional_frames={low} and max_num_conditional_frames={high} must be in order and below"
            f" state_t={pipe['state_t']}",
        )
    shares = given_shares(config.get("conditional_frames_probs") or {})
    if (most := max((number for number, share in shares.items() if share > 0), default=0)) >= pipe["state_t"]:
        text = f"{most} conditioning frames, but a clip has {pipe['state_t']} (state_t)"
        yield error("model.config.conditional_frames_probs", text)
    yield from check_text(config["text"], pipe["net"])


def check_frozen(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Frozen weights in fewer bytes or on the host, where there are none, or where that would not save memory."""
    kept = {"frozen_weights": "full", "swap_blocks": 0}
    kept = {key: config[key] for key, default in kept.items() if config[key] != default}
    recompute = {"mode": "none", "every_n_blocks": 1, **(config["pipe_config"]["net"].get("sac_config") or {})}
    shards = context.config is not None and context.config.trainer.distributed_parallelism != "ddp"
    for key, value in kept.items():
        at = f"model.config.{key}"
        if config["train_architecture"] != "lora":
            yield error(at, f"{value}, but all weights are trained", "Set model.config.train_architecture=lora")
        if recompute["mode"] == "none" or recompute["every_n_blocks"] != 1:
            mode = f"{PIPE}.net.sac_config.mode=block_wise and every_n_blocks=1"
            yield error(at, f"{value}, but blocks that recompute nothing hold their opened weights", f"Set {mode}")
        if config["torch_compile"]:
            yield error(at, f"{value}, but model.config.torch_compile=True does not trace such weights", "Unset one")
        if shards and config["fsdp_shard_size"] not in (0, 1) and (context.world_size or 1) > 1:
            yield error(at, f"{value}, but weights are sharded", "Set model.config.fsdp_shard_size=0, or leave it out")
    blocks = config["pipe_config"]["net"].get("num_blocks")
    if isinstance(blocks, int) and config["swap_blocks"] > blocks:
        yield error("model.config.swap_blocks", f"{config['swap_blocks']}, but the network has {blocks} blocks")


def check_family(config: Any) -> Iterator[Finding]:
    """Noise and objective that are not of one model family. An objective that the config names may go with any noise.
    ``config`` may be an object, too."""
    config = config if isinstance(config, Mapping) else vars(config)
    pipe = config["pipe_config"] if isinstance(config["pipe_config"], Mapping) else vars(config["pipe_config"])
    is_flow = "train_time_shift" in config
    if (own := pipe.get("objective")) is not None:
        yield from errors(OBJECTIVE_KEY, [objective_problem(own)])
        return
    if is_flow and pipe["flow"] is None:
        cure = "Set flow=dict(shift=5.0) in the experiment, or choose a model of Predict2.5 (model=predict2p5_...)"
        yield error(f"{PIPE}.flow", "null, but a Predict2.5 network is trained by it", cure)
    elif not is_flow and pipe["flow"] is not None:
        yield error(
            f"{PIPE}.flow",
            "it is set, as for Predict2.5, but the noise of this model's config is that of Predict2",
            "Set flow=null, or choose a model of Predict2.5 (model=predict2p5_...)",
        )
    elif not is_flow and (projected := (pipe["net"] or {}).get(PROJECTION)) is not None:
        yield warning(
            f"{PIPE}.net.{PROJECTION}",
            f"{projected}, as networks of Predict2.5 have it, but the noise and the loss are those of Predict2",
            "Train released weights of Predict2.5 with a model of theirs (model=predict2p5_...)",
        )


def check_degrees(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Degrees of parallelism that the processes, the heads or the latent frames cannot be divided by."""
    net, run = config["pipe_config"]["net"], context.config
    if run is None or net.get("num_heads") is None:
        return  # a network with a number of its own
    if not isinstance(net["num_heads"], int) or net["num_heads"] < 1:
        yield error(f"{NETWORK_KEY}.num_heads", f"{net['num_heads']}, but it is a whole number of at least 1")
        return
    shards = run.trainer.distributed_parallelism != "ddp"
    problems = degree_problems(
        world_size=context.world_size,
        context_parallel_size=run.model_parallel.context_parallel_size,
        num_heads=net["num_heads"],
        state_t=config["pipe_config"]["state_t"],
        patch_temporal=net.get("patch_temporal", 1),
        fsdp_shard_size=config["fsdp_shard_size"] if shards else 0,
    )
    yield from starmap(error, problems)


def check_data(key: str, data: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Clips that are too short or too large (longer ones are cut in time), and texts that the network does not take."""
    pipe = config["pipe_config"]
    have, wanted = data.get("num_frames"), pixel_frames(pipe["state_t"])
    if isinstance(have, int) and "state_t" not in data and have < wanted:
        text = f"num_frames={have}, but the model takes {wanted} (state_t={pipe['state_t']})"
        yield error(key, text, f"Set it to {wanted}")
    sides = [8 * (pipe["net"].get(name) or RELEASED_LATENT_SIDE) for name in ("max_img_h", "max_img_w")]
    size = list(data.get("video_size") or ())
    target, views = target_of(pipe["net"]), views_of_data(data)
    if isinstance(target, type) and issubclass(target, MultiViewDiT):
        yield from errors(key, [views_problem(pipe["net"], data)])
    elif len(views) > 1 and size:  # below each other
        size[0] *= len(views)
    if any(isinstance(side, int) and side > most for side, most in zip(size, sides)):
        text = f"video_size={size} is beyond the positions of the network, at most {sides}"
        yield error(key, text, "Set a smaller one, [48,48] for a tiny model")
    if config["text"]["encoder"] is None and not config["text"]["constant_path"]:
        for problem in data_text_problems(data, pipe["net"]):
            yield error(key, problem, "Or set model.config.text.encoder or constant_path, whose texts replace these")
        if data.get("text_encoder") == "none":
            text = "text_encoder=none reads captions without embeddings, but nothing is set to encode them"
            yield error(key, text, "Set model.config.text.encoder")


def views_problem(net: Mapping[str, Any], data: Mapping[str, Any]) -> str | None:
    """The reason why data of several cameras are not those of a multi-view network; None where they may be."""
    ids, keys = list(net.get("view_ids") or range(net.get("n_cameras_emb", 7))), data.get("camera_keys") or ()
    if (count := data.get("views") or len(keys)) and count != len(ids):
        return f"it has {count} views, but the network {len(ids)}: set {NETWORK_KEY}.view_ids to the camera of each"
    own = data.get("camera_to_view_id") or {}
    if own and keys and (found := [own.get(key) for key in keys]) != ids:
        return (
            f"its views are the cameras {found} (camera_to_view_id), but {NETWORK_KEY}.view_ids={ids}: make them equal"
        )
    return None


def check_true_clips(data_sets: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Data without true clips, such as prompts alone, where a loss compares with them."""
    for key, data in data_sets.items():
        if facts_of(data).num_true_frames is not None:
            text = "its samples have no true clips, but a supervised loss compares with them"
            yield error(key, text, "Choose data of clips; prompts serve reinforcement learning without a data term")


# ---- actions


def check_actions(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Actions of network, data, configuration and start weights that do not fit each other."""
    pipe = config["pipe_config"]
    size, problems = action_size(pipe["net"], pipe["state_t"])
    yield from errors(f"{PIPE}.net", problems)
    chunk, count = pipe.get("chunk_size", UNSET_CHUNK), pixel_frames(pipe["state_t"]) - 1
    if chunk not in (UNSET_CHUNK, count):
        text = f"{chunk}, but a clip of {count + 1} frames (state_t={pipe['state_t']}) has {count} actions"
        yield error(f"{PIPE}.chunk_size", text, "Leave chunk_size out, or set state_t=1 + chunk_size / 4")
    if (state := pipe.get("state")) and not pipe["net"].get("state_range"):  # the network would have no head
        yield from errors(f"{PIPE}.state", [state_problem(state, context.training)])
    transform = None
    if pipe.get(TRANSFORM_KEY) is not None:
        try:
            transform = ActionTransform.from_dict(pipe[TRANSFORM_KEY])
        except (ConfigError, TypeError, ValueError) as refused:
            yield error(CONFIG_KEY, str(refused).rstrip("."))
        else:
            if size not in (None, transform.dim):
                text = f"it is of {transform.dim} numbers, but the network reads {size} (net.action_dim)"
                yield error(CONFIG_KEY, text)
    where = CONFIG_KEY
    for key, data in {**context.training, **context.validation}.items():
        yield from check_data_actions(key, data, pipe, size, transform, where)
        if transform is None and (transform := facts_of(data).transform) is not None:
            where = key
    yield from check_start(config, context, transform)


def state_problem(state: str, training: Mapping[str, Mapping[str, Any]]) -> str:
    """The reason why a network that is to predict the robot's state does not know its range."""
    try:
        for read in (facts_of(data).read_state_range for data in training.values()):
            _ = read and read()
    except UserError as refused:
        return str(refused).rstrip(".")
    return (
        f"{state} is to be predicted, but the network's state_range is empty. Set"
        f" +{PIPE}.net.state_range='${{recorded_state_range:}}' and dataloader_train.dataset.state={state}, or leave"
        " state empty"
    )


def check_data_actions(
    key: str,
    data: Mapping[str, Any],
    pipe: Mapping[str, Any],
    size: int | None,
    transform: ActionTransform | None,
    where: str,
) -> Iterator[Finding]:
    """Pictures, a state that is not read, and actions of another size than the network's or with another transform
    than ``where`` has."""
    target = target_of(data)
    if isinstance(target, type) and issubclass(target, (ImageDataset, MockImages)):
        yield error(key, NO_IMAGES)
    facts = facts_of(data)
    reads_states = callable(target) and "state" in signature(target).parameters
    if (state := pipe.get("state")) and reads_states and not facts.read_state_range:
        yield error(f"{key}.state", f"empty, but the model predicts {state}", f"Set {key}.state={state}")
    own: ActionTransform | None = facts.transform
    width = facts.action_dim if own is None else own.dim
    if width is not None and size not in (None, width):
        fitting = pipe["net"]["action_dim"] // size * width  # of some networks it counts all actions of a clip
        text = f"its actions have {width} numbers, but the network reads {size}"
        yield error(key, text, f"Set {PIPE}.net.action_dim={fitting}, or choose other data")
    elif own is not None and transform is not None and not (own.yields_to(transform) or transform.yields_to(own)):
        yield error(key, f"its actions are {own}, but those of {where} {transform}", ONE_RUN.rstrip("."))


def check_start(
    config: Mapping[str, Any], context: CheckContext, transform: ActionTransform | None
) -> Iterator[Finding]:
    """Weights that training would start from or resume, but that were trained with other actions: those of
    ``checkpoint.load_path`` go on with their own alone, others may learn them anew."""
    path = config["model_manager_config"]["dit_path"]
    if context.start_path:  # whose weights replace those of dit_path
        if not (storage.is_remote(context.start_path) or is_hub(context.start_path)):
            yield from errors("checkpoint.load_path", resume_differences(read_card(context.start_path), transform))
    elif context.start_path is not None and not (card := read_card(path, fetch=False)).problem:
        for note in start_differences(card, config["pipe_config"]["net"], transform):
            yield warning(DIT_PATH_KEY, note)
    if context.resume_path and not storage.is_remote(context.resume_path):
        name = "RUN" if context.config is None else context.config.job.name
        cure = f"Give the new run a folder of its own (job.name={name}_2, say)"
        for problem in resume_differences(read_card(context.resume_path), transform):
            yield error("dataloader_train", problem, cure)
