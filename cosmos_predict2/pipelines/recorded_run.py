# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline made that of its weights, as their card records it.

apply_card(read_card("checkpoints/posttraining/video2world/NAME/checkpoints/model/iter_000001000.pt"), config)
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from cosmos_predict2.checkpoints.card import OF_THE_MACHINE, ModelCard, known_class, read_card
from cosmos_predict2.checkpoints.card_checks import unregistered
from cosmos_predict2.conditioner import ConditionerConfig, DropoutConfig
from cosmos_predict2.released import get_reason1_encoder_dir, get_t5_model_dir
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.text.trained_text import KINDS, NO_TEXT, EncoderName, TrainedText, parse_name
from cosmos_predict2.world_model.config import (
    FlowConfig,
    SolverConfig,
    Video2WorldActionPipelineConfig,
    Video2WorldPipelineConfig,
)
from imaginaire.config.lazy_config import LazyCall
from imaginaire.config.names import target_of
from imaginaire.errors import CheckpointError

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=Any)  # of a pipeline

# What makes latents and noise levels mean what they meant in training.
_SAME = (
    "state_t",
    "fps",
    "conditioning_strategy",
    "sigma_conditional",
    "sigma_data",
    "rectified_flow_t_scaling_factor",
)


def read_and_warn(path: str) -> ModelCard:
    """The card of weights, with a warning where their network is of code that is not known here."""
    card = read_card(path)
    if problem := unregistered(card):
        log.warning("%s Nothing of the record is used", problem)
    return card


def apply_card(card: ModelCard, config: Video2WorldPipelineConfig) -> None:
    """Give the config the network of the weights, its text, length and rate, noise levels, and actions."""
    takes_actions = isinstance(config, Video2WorldActionPipelineConfig)
    if card.takes_actions != takes_actions:
        program, which = ("video2world_action", "with") if card.takes_actions else ("video2world", "without")
        raise CheckpointError(f"{card.source} trained a network {which} actions: use examples/{program}.py for it.")
    machine = {key: config.net[key] for key in OF_THE_MACHINE if key in config.net}
    config.net = LazyCall(card.network_class)(**_arguments(card, "net"), **machine)
    for key in _SAME:
        if key in card.pipeline:
            setattr(config, key, card.pipeline[key])
    config.timestamps = SolverConfig(**_known(SolverConfig, card.pipeline.get("timestamps")))
    flow = card.pipeline.get("flow")
    config.flow = FlowConfig(**_known(FlowConfig, flow)) if flow else None
    for part in ("tokenizer", "objective"):
        if problem := unregistered(card, part):
            raise CheckpointError(problem)
        cls = known_class(card.pipeline.get(part) or {})
        if cls not in (None, target_of(getattr(config, part))):
            setattr(config, part, LazyCall(cls)(**_arguments(card, part)))
    if isinstance(config, Video2WorldActionPipelineConfig):
        if card.action_transform is not None and not card.is_known_by_name:
            config.action_transform = card.action_transform.to_dict()
        config.chunk_size = card.chunk_size
    else:  # with actions, clips have a label in place of their rate
        config.fps = card.fps
        config.input_crop = card.input_crop or config.input_crop
    rates = _known(ConditionerConfig, card.pipeline.get("conditioner"))
    config.conditioner = ConditionerConfig(**{key: DropoutConfig(**value) for key, value in rates.items()})
    if config.text_encoder is not None and "width" in config.text_encoder:
        config.text_encoder.width = config.net.get("crossattn_proj_in_channels") or config.net.crossattn_emb_channels
    if card.texts:
        apply_text(card, config)


def _arguments(card: ModelCard, part: str) -> dict[str, Any]:
    """The arguments of a recorded node; one that would be built too is an error."""
    arguments = {key: value for key, value in card.pipeline[part].items() if not key.startswith("_")}
    for name, value in arguments.items():
        if "_target_" in str(value):
            raise CheckpointError(f"{_record(card)}: pipe_config.{part}.{name} names something to build, {value}.")
    return arguments


def _record(card: ModelCard) -> str:
    return f"{card.run_folder}/config.yaml" if card.run_folder else card.path


def _known(cls: type, values: Mapping[str, Any] | None) -> dict[str, Any]:
    names = {field.name for field in attrs.fields(cls)}
    return {key: value for key, value in (values or {}).items() if key in names}


# Text -----------------------------------------------------------------------------------------------------------------


def with_trained_text(config: Config, sources: Sequence[str]) -> Config:
    """The pipeline's config with the text of the last of these weights that records one, unless it has one."""
    if config.num_text_tokens is None:
        for path in reversed(sources):
            if (card := read_card(path)).texts:
                config = attrs.evolve(config)
                apply_text(card, config)
                break
    return config


def apply_text(card: ModelCard, config: Any) -> None:
    """Make a pipeline's config give the network its text as in training."""
    if (count := len(card.texts)) > 1:
        kinds = "; ".join(map(str, card.texts))
        log.warning(
            "%s: trained with texts of %d kinds (%s): a prompt is encoded as the first", card.source, count, kinds
        )
    follow_text(config, card.texts[0], card.source)


def follow_text(config: Any, text: TrainedText, whose: str) -> None:
    """Make a pipeline's config give the network this text; ``whose`` names the weights for the log."""
    config.num_text_tokens, config.text_encoder_name = text.num_tokens, text.encoder
    log.info("text: %s, as %s was trained", text, whose)
    name = parse_name(text.encoder)
    if config.text_encoder is None or name.kind in ("", NO_TEXT):
        return
    if name.kind not in KINDS:
        config.text_encoder = None  # encoding a prompt is an error that names the encoder
    elif isinstance(config.text_encoder, Mapping):
        config.text_encoder = _encoder_node(config.text_encoder, name, text)


def _encoder_node(node: Any, name: EncoderName, text: TrainedText) -> Any:
    """The lazy node of the encoder, with the arguments that the config has for one of its class."""
    cls = KINDS[name.kind]
    known: dict[str, Any] = {}
    if target_of(node) is cls:
        known = {str(key): value for key, value in node.items() if not str(key).startswith("_")}
    if cls is BytesEncoder:
        return LazyCall(cls)(**{**known, "num_tokens": text.encoder_tokens, "width": text.width})
    known.setdefault("path", get_t5_model_dir() if cls is T5Encoder else get_reason1_encoder_dir())
    known["max_length"] = text.encoder_tokens
    if name.dtype and not known.get("dtype"):
        known["dtype"] = name.dtype
    return LazyCall(cls)(**known)
