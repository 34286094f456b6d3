# SPDX-License-Identifier: Apache-2.0
"""Comparisons of the card of weights with what is wanted of them: a request, a network's config, the data of a run."""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.card import OF_THE_MACHINE, TOKENIZER, TRANSFORM_KEY, ModelCard, known_class
from imaginaire.buildable import target_of
from imaginaire.config.lazy_config import signature, to_data
from imaginaire.errors import CheckpointError, ConfigError, near
from imaginaire.optim.lora import LoraSpec

log = logging.getLogger(__name__)

CONFIG_KEY = f"model.config.pipe_config.{TRANSFORM_KEY}"
FLAG = f"--{TRANSFORM_KEY}"
OTHER_TRANSFORM = (
    "Weights fit one transform only. Give the data the same (dataset.action_transform),"
    " or start a new run (job.name) from the weights alone, by model.config.model_manager_config.dit_path."
)
# Arguments that may differ from those of training: how a machine does it, where a file lies (its content is compared),
# and what networks of this family accept and do not read.
FILES = ("weights", "vae_pth")  # of a tokenizer
OF_THIS_MACHINE = {
    "net": (*OF_THE_MACHINE, "min_fps", "max_fps", "pos_emb_learnable", "pos_emb_interpolation"),
    TOKENIZER: (
        *("device", "temporal_window", "tile_size", "channels_last", "chunk_duration", "load_mean_std", "name"),
        "allow_random",  # what a file holds is compared
    ),
}
_TRANSFORMS = {"relative_pose": relative_pose, "controller": controller}


def unregistered(card: ModelCard, part: str = "net") -> str | None:
    """Reason why a part of the recorded pipeline is not built; None if it is, or if none is recorded."""
    node = card.pipeline.get(part) or {}
    if not (name := str(node.get("_target_", ""))) or known_class(node) is not None:
        return None
    return (
        f"{card.source}: model.config.pipe_config.{part} is {name}, which is not registered here. Decorate the class"
        f' with @buildable("part"), and import its module: --import {name.rpartition(".")[0]}.'
    )


def part_differences(trained: ModelCard, part: str, node: Mapping[str, Any] | None) -> Iterator[str]:
    """Differences between a part's lazy node and the recorded one that names and shapes of its weights do not show."""
    recorded, target = trained.pipeline.get(part), target_of(node)
    if not recorded:
        return
    if node is None or known_class(recorded) is not target:
        yield f"{str(recorded.get('_target_')).rpartition('.')[2]}, here {getattr(target, '__name__', target)}"
        return
    theirs, ours = to_data(recorded), to_data(node)
    defaults = {name: to_data(p.default) for name, p in signature(target).items() if p.default is not p.empty}
    for name in sorted({str(name) for name in (*recorded, *node)} - {*OF_THIS_MACHINE.get(part, ()), *FILES}):
        values = [tree[name] if tree.get(name) is not None else defaults.get(name) for tree in (theirs, ours)]
        if values[0] != values[1] and not name.startswith("_"):
            yield f"{name}={values[0]}, here {values[1]}"


def start_differences(trained: ModelCard, net: Mapping[str, Any], transform: ActionTransform | None) -> Iterator[str]:
    """Reasons why training from these weights must learn actions anew: their transform differs, or their network,
    though its shapes fit."""
    if not trained.has_action_embedders:
        return
    for difference in part_differences(trained, "net", net):
        yield f"the start weights {trained.path} were trained by a network with {difference} (pipe_config.net)"
    theirs = trained.action_transform
    if transform is not None and theirs is not None and not transform.yields_to(theirs):
        yield (
            f"the start weights {trained.path} were trained with actions {theirs}, the data have {transform}: what the"
            " weights know of actions must be learnt anew"
        )


def resume_differences(trained: ModelCard, transform: ActionTransform | None) -> Iterator[str]:
    """Reasons why training with this transform cannot go on from weights."""
    if transform is None:
        return
    if trained.problem:
        yield trained.problem.rstrip(".")
    elif (theirs := trained.action_transform) is not None and not transform.yields_to(theirs):
        cure = OTHER_TRANSFORM.rstrip(".")
        yield f"{trained.path} was trained with actions {theirs}, the data have {transform}. {cure}"


def require_transform(trained: ModelCard, given: Any = None, *, flag: str = FLAG) -> ActionTransform:
    """The transform of weights that are about to be used: the recorded one, else the ``given`` one, else that of the
    release. An error where there is none, and where the recorded and the given one differ."""
    requested = None if given is None or given == "" else parse_transform(given)
    found, path = trained.action_transform, trained.path
    if path:
        trained.opened()
    if requested is not None and found is not None and requested != found:
        if not trained.is_known_by_name:
            raise CheckpointError(
                f"{path} was trained with actions {found}, but {flag} (or {CONFIG_KEY}) is {requested}. Leave it out:"
                " the weights fit theirs alone."
            )
        log.warning("%s is known for actions %s; %s are used, as asked", path, found, requested)
    if requested is None and found is None:
        whose = f"{path} does not record the transform of the actions that it was trained with, and fits no other."
        raise CheckpointError(
            f"{whose if path else 'Random weights have no transform of actions.'} Give it with {flag}"
            " (relative_pose:20 for pose differences as in Bridge, controller:20x7 for a"
            f" controller's seven numbers times 20, or JSON with kind, scale, offset), or in a config as {CONFIG_KEY}."
        )
    return requested or found  # type: ignore[return-value]


def parse_transform(value: Any) -> ActionTransform:
    """A transform from itself, a mapping of its values, their JSON, or a name: relative_pose, controller:20x7.

    After the colon stands the scale, for a controller with how many numbers: 20x7 is seven times 20.
    """
    if isinstance(value, ActionTransform):
        return value
    if isinstance(value, Mapping):
        return ActionTransform.from_dict({str(key): value[key] for key in value})
    text = str(value).strip()
    if text.startswith("{"):
        return ActionTransform.from_json(text)
    name, _, numbers = text.partition(":")
    if name not in _TRANSFORMS:
        raise ConfigError(f"There is no action transform '{text}'.{near(name, _TRANSFORMS)} Or give JSON.")
    match = re.fullmatch(r"([-+.\deE]+)(?:x(\d+))?", numbers or "20")
    try:
        scale = float(match[1]) if match else 0.0
    except ValueError:
        match = None
    if match is None or (match[2] and name == "relative_pose"):
        example = "relative_pose:20" if name == "relative_pose" else "controller:20x7"
        raise ConfigError(f"The action transform '{text}' cannot be read; an example is {example}.")
    return controller(int(match[2] or 7), scale) if name == "controller" else relative_pose(scale)


def agreed_alpha(where: str, recorded: float | None, given: float | None) -> float | None:
    """The alpha of adapters: the recorded one, else the given one; an error where they differ."""
    if recorded is None:
        return given
    if given is not None and not math.isclose(given, recorded, rel_tol=1e-6):
        raise CheckpointError(
            f"{where} records alpha {recorded:g}, but --lora_alpha (lora_alpha in Python) is {given:g}. Leave it out:"
            " the recorded one is what the adapters were trained with. To make them weaker or stronger, give --lora"
            " PATH:WEIGHT at inference."
        )
    return recorded


def alpha_differences(trained: ModelCard, wanted: LoraSpec | None) -> Iterator[str]:
    """Reasons why a network's adapters cannot take over a checkpoint's: those were trained with another alpha."""
    recorded = trained.lora_alpha
    if wanted is not None and recorded is not None and wanted.alpha != recorded:
        yield (
            f"{trained.path} has adapters that were trained with alpha {recorded:g}, the network's have"
            f" {wanted.alpha:g}: their effect would change by a factor of {wanted.alpha / recorded:g}. Set"
            f" model.config.lora_alpha={recorded:g}."
        )
