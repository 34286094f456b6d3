# SPDX-License-Identifier: Apache-2.0
"""Weights from wherever they are into a network, every name accounted for; and the card of weights compared with what
is wanted of them: a request, a network's config, the data of a run."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.adapters import agreed_alpha, merge_lora_state
from cosmos_predict2.checkpoints.card import OF_THE_MACHINE, TOKENIZER, TRANSFORM_KEY, ModelCard, known_class, read_card
from cosmos_predict2.checkpoints.dit_weights import (
    ACTION_EMBEDDERS,
    clean_name,
    describe,
    open_dit,
    quiet,
    require_family,
)
from imaginaire.buildable import signature, target_of
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weights import LoadReport
from imaginaire.config.lazy_config import to_data
from imaginaire.errors import CheckpointError, ConfigError, listed, near
from imaginaire.optim import lora
from imaginaire.optim.lora import LoraSpec

log = logging.getLogger(__name__)

CURE = (
    "Choose other weights, or a network like theirs (model.config.pipe_config.net). Parameters that your own network"
    " has besides begin anew in training where its class lists them: begins_anew = (PATTERN, ...)."
)


def load_dit(
    net: nn.Module,
    path_or_id: str,
    which: str = "auto",
    allow_missing: Iterable[str] = (),
    *,
    lora_alpha: float | None = None,
) -> LoadReport:
    """Load a network's weights, every name accounted for; the report of what matched.

    ``allow_missing`` are patterns of the network's own names that the file may lack. ``action_embedder_*`` among them
    lets a network with actions take weights of one without; never a part of the embedders.
    Adapters in the file are merged into its weights, unless the network has adapters itself.
    """
    path = str(path_or_id)
    opened = open_dit(path, which)
    targets, source, allow_missing = fitted(net, opened, path, allow_missing, lora_alpha)
    report = weights.load_into(targets, source)
    report.require(allow_missing=allow_missing, source=path, cure=CURE)
    adapted = sum(name.endswith(".lora_A.default.weight") and name not in targets for name in opened)
    if adapted:
        alpha = agreed_alpha(path, read_card(path).lora_alpha, lora_alpha)
        log.info("weights: the adapters of %d layers in %s are merged, with alpha %g", adapted, path, alpha)
    return report


def check_dit(net: nn.Module, path: str, which: str = "auto", *, lora_alpha: float | None = None) -> None:
    """Raise where weights are not of a network, which may be on the meta device: compares names and shapes."""
    with quiet():
        source = open_dit(path, which)
    targets, source, allow_missing = fitted(net, source, path, lora_alpha=lora_alpha)
    weights.account(targets, source).require(allow_missing=allow_missing, source=path, cure=CURE)


def fitted(
    net: nn.Module,
    source: Mapping[str, Tensor],
    path: str,
    allow_missing: Iterable[str] = (),
    lora_alpha: float | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, Tensor], tuple[str, ...]]:
    """The network's tensors, the source in its form (adapters merged or kept), and what may be missing.

    Raises where the two are of different members of the family altogether.
    """
    allow_missing = tuple(allow_missing)
    targets = {clean_name(name): tensor for name, tensor in net.state_dict().items() if not weights.is_extra(name)}
    found, wanted = describe(source), describe(targets)
    if wanted is not None:
        require_family(found, wanted, path, source, actions_may_begin=ACTION_EMBEDDERS in allow_missing)
    _require_whole_embedders(targets, source, path)
    has_adapters = any(".lora_A." in name for name in targets)
    if any(".lora_A." in name for name in source) and not has_adapters:
        alpha = agreed_alpha(path, read_card(path).lora_alpha, lora_alpha)
        return targets, merge_lora_state(source, alpha, where=path), allow_missing
    if has_adapters and not any(".base_layer." in name for name in source):
        allow_missing += ("*.lora_A.*", "*.lora_B.*")
        inside = {name.replace(".base_layer.", "."): name for name in targets}
        return targets, weights.renamed(source, lambda name: inside.get(name, name)), allow_missing
    if has_adapters:
        require_alpha(read_card(path), lora.lora_spec(net))
    return targets, source, allow_missing


def _require_whole_embedders(targets: Mapping[str, Tensor], source: Mapping[str, Tensor], path: str) -> None:
    """Raise where a file has some of a network's embedders of actions and not the others."""
    wanted = [name for name in targets if fnmatchcase(name, ACTION_EMBEDDERS) and ".lora_" not in name]
    held = {name.replace(".base_layer.", ".") for name in source}
    absent = [name for name in wanted if name.replace(".base_layer.", ".") not in held]
    if 0 < len(absent) < len(wanted):
        raise CheckpointError(
            f"{path} has {len(wanted) - len(absent)} of the {len(wanted)} tensors of the network's action embedders,"
            f" and lacks {listed(absent, 4)}: it is damaged, or of another network."
        )


# The card of weights, compared with what is wanted --------------------------------------------------------------------


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


def require_alpha(trained: ModelCard, wanted: LoraSpec | None) -> None:
    """Raise where a network's adapters would take over a checkpoint's that were trained with another alpha."""
    recorded = trained.lora_alpha
    if wanted is not None and recorded is not None and wanted.alpha != recorded:
        raise CheckpointError(
            f"{trained.path} has adapters that were trained with alpha {recorded:g}, the network's have"
            f" {wanted.alpha:g}: their effect would change by a factor of {wanted.alpha / recorded:g}. Set"
            f" model.config.lora_alpha={recorded:g}."
        )
