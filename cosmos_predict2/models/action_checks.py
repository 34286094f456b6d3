# SPDX-License-Identifier: Apache-2.0
"""Whether the actions of data, network and configuration fit each other, before anything is built."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.card import TRANSFORM_KEY as KEY
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.card_checks import CONFIG_KEY, resume_differences, start_differences
from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.mock import MockImages
from cosmos_predict2.data.sizes import pixel_frames
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire import storage
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.config.names import target_of
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error, errors, warning

RATIO = 4  # pixel frames, and so actions, that make a latent frame
CHUNK = attrs.fields(Video2WorldActionPipelineConfig).chunk_size.default  # stands where nobody set it
ONE_RUN = "All data of a run must have the same, for validation too (dataloader_train, dataloader_val)."
NO_IMAGES = (
    "they are pictures, which no action leads to: the embedders of actions would get no gradient, for which the"
    " processes of a run would wait. Leave them out (a loader of clips alone), or choose a model without actions"
)


def action_size(net: Mapping[str, Any], state_t: int) -> tuple[int | None, list[str]]:
    """How many numbers each action of a clip has for the network of a lazy node, and what is wrong with the node."""
    where = "model.config.pipe_config.net"
    target, count = target_of(net, where), pixel_frames(state_t) - 1
    if not (isinstance(target, type) and issubclass(target, ActionDiT)):
        return None, [f"it is {getattr(target, '__name__', target)}, which takes no actions: choose one that does"]
    if not isinstance(dim := net.get("action_dim"), int):
        return None, [f"action_dim={dim}; it must be the number of numbers of an action"]
    if issubclass(target, ChunkActionDiT):
        ratio = net.get("temporal_compression_ratio", RATIO)
        if ratio != RATIO:
            return dim, [f"temporal_compression_ratio={ratio}, but {RATIO} actions lead to each latent frame"]
        return dim, []
    chunk = net.get("num_action_per_chunk")
    total = dim * (chunk or 1)
    if total % count or (chunk or count) not in (1, count):
        read = f"{chunk} actions of {dim} numbers" if chunk else f"{dim} numbers"
        return None, [
            f"it reads {read}, but a clip of {count + 1} frames (state_t={state_t}) has {count} actions: set"
            f" num_action_per_chunk={count}, with action_dim the numbers of one action"
        ]
    return total // count, []


def chunk_problem(pipe: Mapping[str, Any]) -> str | None:
    """Why so many actions in a chunk are not those of a clip; None where they are, or where nobody set them: state_t
    is what training goes by, and what is sampled from a run's weights."""
    chunk, count = pipe.get("chunk_size", CHUNK), pixel_frames(pipe["state_t"]) - 1
    if chunk in (CHUNK, count):
        return None
    fitting = f", or set state_t={chunk // RATIO + 1}" if chunk > 0 and not chunk % RATIO else ""
    return (
        f"{chunk}, but a clip of {count + 1} frames (state_t={pipe['state_t']}) has {count}"
        f" actions. Leave chunk_size out{fitting} (a multiple of {RATIO} actions, and data with as many)"
    )


def declared_transform(data: Mapping[str, Any]) -> ActionTransform | None:
    """The transform that a data set with these arguments will have, where its class declares it."""
    found: ActionTransform | None = _declared(data, "declared_transform")
    return found


def declared_width(data: Mapping[str, Any]) -> int | None:
    """Numbers per action of a data set with these arguments, where its class declares them."""
    transform = declared_transform(data)
    width: int | None = _declared(data, "declared_width") if transform is None else transform.dim
    return width


def _declared(data: Mapping[str, Any], method: str) -> Any:
    """What a class method of a data set returns for these arguments; None without one, and where they are wrong, which
    the data set's own check reports."""
    declared = getattr(target_of(data), method, None)
    if not callable(declared):
        return None
    try:
        return declared(**{key: value for key, value in data.items() if key != "_target_"})
    except (ConfigError, DataError):
        return None


def width_problem(
    data: Mapping[str, Any], pipe: Mapping[str, Any], training: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why actions of a data set have another size than the network reads; None where they have not, or it is unknown.

    ``training``: the data sets of training, where this is one of validation. If those fit, the network stays.
    """
    width = declared_width(data)
    size, _ = action_size(pipe["net"], pipe["state_t"])
    if width is None or size is None or width == size:
        return None
    found = f"its actions have {width} numbers, but the network reads {size}"
    if any(declared_width(one) == size for one in training):
        return (
            f"{found}, as many as those of training have: choose validation data like these (the dataloader_val that"
            " belongs to them, such as dataloader_val=lerobot_val with its dataset.root), or"
            " trainer.run_validation=False"
        )
    fitting = pipe["net"]["action_dim"] // size * width  # of some networks it counts all actions of a clip
    return f"{found}: set model.config.pipe_config.net.action_dim={fitting}, or choose other data"


def other_transform_problem(
    data: Mapping[str, Any], pipe: Mapping[str, Any], training: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why a data set for validation has other actions than those of training; None where it has not, or it is unknown.
    A transform in the config is compared with all data by itself."""
    if pipe.get(KEY) is not None:
        return None
    own, trained = declared_transform(data), known_transform(training, pipe)
    if own is None or trained is None or own.dim != trained.dim:
        return None
    if own.yields_to(trained) or trained.yields_to(own):
        return None
    return f"its actions are {own}, but those of dataloader_train {trained}. {ONE_RUN.rstrip('.')}"


def transform_problems(pipe: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the transform that a pipeline's section names, by itself and for its network."""
    try:
        transform = ActionTransform.from_dict(pipe[KEY])
    except (ConfigError, TypeError, ValueError) as refused:
        yield str(refused).rstrip(".")
        return
    size, _ = action_size(pipe["net"], pipe["state_t"])
    if size is not None and size != transform.dim:
        yield f"it is of {transform.dim} numbers, but the network reads {size} (net.action_dim)"


def gives_images(data: Mapping[str, Any]) -> bool:
    """Whether the batches of a data set are known to be pictures, not clips."""
    target = target_of(data)
    return isinstance(target, type) and issubclass(target, (ImageDataset, MockImages))


def known_transform(data: Sequence[Mapping[str, Any]], pipe: Mapping[str, Any]) -> ActionTransform | None:
    """The transform that training will have, as the config has it, or the first of the data sets that declares one."""
    if pipe.get(KEY) is not None:
        return None if [*transform_problems(pipe)] else ActionTransform.from_dict(pipe[KEY])
    return next((found for node in data if (found := declared_transform(node)) is not None), None)


# ---- findings


def takes_actions(pipe: Mapping[str, Any]) -> bool:
    """Whether a pipeline's section is that of an action-conditioned model."""
    target = target_of(pipe["net"])
    return "action_transform" in pipe or (isinstance(target, type) and issubclass(target, ActionDiT))


def check_settings(pipe: Mapping[str, Any]) -> Iterator[Finding]:
    """The network's actions, the chunk and the transform of a pipeline's section."""
    _, problems = action_size(pipe["net"], pipe["state_t"])
    yield from errors("model.config.pipe_config.net", problems)
    yield from errors("model.config.pipe_config.chunk_size", [chunk_problem(pipe)])
    if not problems and pipe.get(KEY) is not None:
        yield from errors(CONFIG_KEY, transform_problems(pipe))


def check_data(
    key: str, data: Mapping[str, Any], pipe: Mapping[str, Any], training: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Pictures, and actions of another size than the network's or with another transform than the config's or those of
    training."""
    if gives_images(data):
        yield error(key, NO_IMAGES)
    transform = declared_transform(data)
    if (problem := width_problem(data, pipe, training)) is not None:
        yield error(key, problem)
    elif transform is not None and pipe.get(KEY) is not None and not [*transform_problems(pipe)]:
        own = ActionTransform.from_dict(pipe[KEY])
        if not transform.yields_to(own):
            yield error(key, f"its actions are {transform}, but {CONFIG_KEY} is {own}")
    yield from errors(key, [other_transform_problem(data, pipe, training)])


def check_start(config: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
    """Weights that training would start from or resume, but that were trained with other actions: those of
    ``checkpoint.load_path`` go on with their own alone, others may learn them anew."""
    pipe, path = config["pipe_config"], config["model_manager_config"]["dit_path"]
    transform = known_transform([*context.training.values(), *context.validation.values()], pipe)
    if context.start_path:  # whose weights replace those of dit_path
        if not (storage.is_remote(context.start_path) or is_hub(context.start_path)):
            yield from errors("checkpoint.load_path", resume_differences(read_card(context.start_path), transform))
    elif context.start_path is not None and not (card := read_card(path, fetch=False)).problem:
        for note in start_differences(card, pipe["net"], transform):  # of weights with a problem another check reports
            yield warning("model.config.model_manager_config.dit_path", note)
    if context.resume_path and not storage.is_remote(context.resume_path):
        name = "RUN" if context.config is None else context.config.job.name
        cure = f"Give the new run a folder of its own (job.name={name}_2, say)"
        for problem in resume_differences(read_card(context.resume_path), transform):
            yield error("dataloader_train", problem, cure)
