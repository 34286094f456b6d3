# SPDX-License-Identifier: Apache-2.0
"""What can be found wrong with the training of a world model before anything is built: `check` of its configuration.

``config`` is ``model.config`` as a mapping; `CheckContext` has the rest of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

from cosmos_predict2.checkpoints.dit_weights import problem_with
from cosmos_predict2.data.sizes import pixel_frames
from cosmos_predict2.models import action_checks
from cosmos_predict2.models.config import given_shares
from cosmos_predict2.models.text_widths import PROJECTION, data_text_problems, text_problems
from cosmos_predict2.models.training_text import TrainingText
from cosmos_predict2.world_model.assembly import attention_problem
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.network import NETWORK_KEY, NO_NETWORK
from cosmos_predict2.world_model.parallelize import degree_problems
from cosmos_predict2.world_model.recompute import checked_keys, checked_policy
from imaginaire import distributed, storage
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, error, errors, warning

PIPE = "model.config.pipe_config"
DIT_PATH_KEY = "model.config.model_manager_config.dit_path"
RELEASED_LATENT_SIDE = 240  # max_img_h and max_img_w of the released networks


def check(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Everything, in the order in which a user would mend it."""
    path = config["model_manager_config"]["dit_path"]
    if path and not storage.is_remote(path):
        yield from errors(DIT_PATH_KEY, [problem_with(path)])
    if config["pipe_config"]["net"] is None:
        yield error(NETWORK_KEY, NO_NETWORK)
        return
    yield from check_degrees(config, context)
    yield from check_settings(config)
    for key, data in context.training.items():
        yield from check_data(key, data, config)
    for key, data in context.validation.items():
        yield from check_data(key, data, config, [*context.training.values()])
    if action_checks.takes_actions(config["pipe_config"]):
        yield from action_checks.check_start(config, context)


def check_settings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Values that do not fit each other."""
    pipe = config["pipe_config"]
    problem = attention_problem(pipe["net"], distributed.device(), PRECISIONS[config["precision"]])
    yield from errors(f"{PIPE}.net.atten_backend", [problem])
    if sac_config := pipe["net"].get("sac_config"):
        try:
            checked_policy(**checked_keys(sac_config))
        except ConfigError as refused:
            yield error(f"{PIPE}.net.sac_config", str(refused).rstrip("."))
    low, high = pipe["min_num_conditional_frames"], pipe["max_num_conditional_frames"]
    if not 0 <= low <= high < pipe["state_t"]:
        yield error(
            f"{PIPE}.max_num_conditional_frames",
            f"min_num_conditional_frames={low} and max_num_conditional_frames={high} must be in order and below"
            f" state_t={pipe['state_t']}",
        )
    yield from TrainingText.check(config["text"])
    yield from starmap(error, text_problems(config["text"], pipe["net"]))
    if is_flow(config):
        yield from _check_flow_settings(config)
    if action_checks.takes_actions(pipe):
        yield from action_checks.check_settings(pipe)


def is_flow(config: Any) -> bool:
    """Whether a ``model.config``, as a mapping or an object, has the noise of Predict2.5."""
    return "train_time_shift" in config if isinstance(config, Mapping) else hasattr(config, "train_time_shift")


def check_family(config: Any) -> Iterator[Finding]:
    """Whether the noise that is drawn and the objective of the pipeline are of one model family; one that the config
    names may go with any noise."""
    pipe = config["pipe_config"] if isinstance(config, Mapping) else vars(config.pipe_config)
    if pipe.get("objective") is not None:
        return
    if is_flow(config) and pipe["flow"] is None:
        yield error(
            f"{PIPE}.flow",
            "null, but a Predict2.5 network is trained by it",
            "Set flow=dict(shift=5.0) in the experiment, or take the pipeline of"
            " get_cosmos_predict2p5_video2world_pipeline",
        )
    elif not is_flow(config) and pipe["flow"] is not None:
        yield error(
            f"{PIPE}.flow",
            "it is set, as for Predict2.5, but the noise of this model's config is that of Predict2",
            "Set flow=null, or choose a model of Predict2.5 (model=predict2p5_...)",
        )
    elif not is_flow(config) and (projected := (pipe["net"] or {}).get(PROJECTION)) is not None:
        yield warning(
            f"{PIPE}.net.{PROJECTION}",
            f"{projected}, as networks of Predict2.5 have it, whose text comes through a projection; the noise and the"
            " loss are those of Predict2",
            "Train released weights of Predict2.5 with a model of theirs (model=predict2p5_...)",
        )


def _check_flow_settings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings of Predict2 that the flow does not read, and more conditioning frames than a clip has."""
    pipe = config["pipe_config"]
    unread = {
        "adjust_video_noise": (config.get("adjust_video_noise", True), True),
        "pipe_config.adjust_video_noise": (pipe.get("adjust_video_noise", True), True),
        "pipe_config.video_noise_factor": (pipe.get("video_noise_factor"), None),
        "pipe_config.rectified_flow_loss_weight_uniform": (pipe.get("rectified_flow_loss_weight_uniform", True), True),
    }
    for key, (value, default) in unread.items():
        if value != default:
            yield warning(
                f"model.config.{key}",
                f"{value} has no effect: the loss of Predict2 reads it, that of Predict2.5 does not",
                "The noise of Predict2.5 is set by train_time_shift and train_time_distribution",
            )
    shares = given_shares(config["conditional_frames_probs"] or {})
    most = max((number for number, share in shares.items() if share > 0), default=0)
    if most >= pipe["state_t"]:
        text = f"{most} conditioning frames, but a clip has {pipe['state_t']} (state_t)"
        yield error("model.config.conditional_frames_probs", text)


def check_degrees(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Degrees of parallelism that the processes, the heads or the latent frames cannot be divided by."""
    net, run = config["pipe_config"]["net"], context.config
    if run is None or net.get("num_heads") is None:
        return  # a network with a number of its own
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


def check_data(
    key: str, data: Mapping[str, Any], config: Mapping[str, Any], training: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Finding]:
    """Clips that are too short or too large (longer ones are cut in time), and texts that the network does not take.

    ``training`` has the data sets of training where this one is for validation.
    """
    pipe = config["pipe_config"]
    have, wanted = data.get("num_frames"), pixel_frames(pipe["state_t"])
    if isinstance(have, int) and "state_t" not in data and have < wanted:
        text = f"num_frames={have}, but the model takes {wanted} (state_t={pipe['state_t']})"
        yield error(key, text, f"Set it to {wanted}")
    sides = [8 * (pipe["net"].get(name) or RELEASED_LATENT_SIDE) for name in ("max_img_h", "max_img_w")]
    size = list(data.get("video_size") or ())
    if any(isinstance(side, int) and side > most for side, most in zip(size, sides)):
        usual = ", [48,48] for one of the tiny models" if str(pipe["resolution"]) == "48" else ""
        text = f"video_size={size} is beyond the positions of the network, at most {sides}"
        yield error(key, text, f"Set a smaller one{usual}")
    replaces_texts = config["text"]["encoder"] is not None or bool(config["text"]["constant_path"])
    if not replaces_texts:
        for problem in data_text_problems(data, pipe["net"]):
            yield error(key, problem, "Or set model.config.text.encoder or constant_path, whose texts replace these")
        if data.get("text_encoder") == "none":
            text = "text_encoder=none reads captions without embeddings, but nothing is set to encode them"
            yield error(key, text, "Set model.config.text.encoder")
    if action_checks.takes_actions(pipe):
        yield from action_checks.check_data(key, data, pipe, training)
