# SPDX-License-Identifier: Apache-2.0
"""The text that a network was trained with, as its run records it, so that inference gives it the same.

Every start of a run adds a line to its ``runs.jsonl``; "text" there says which encoder made the embeddings, and how
many tokens of them the network read. For released weights, and for runs that recorded nothing, inference takes the
encoder of the pipeline's config as it is.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.runs import recorded_fact, run_folder
from cosmos_predict2.released import get_reason1_encoder_dir, get_t5_model_dir
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.pickles import trimmed
from cosmos_predict2.text.encoder_names import EncoderName, is_same_encoder, parse_name
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder
from imaginaire.config.lazy_config import LazyCall
from imaginaire.config.names import target_of

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=Any)  # of a pipeline

KEY = "text"  # in the run's record of its starts
NO_TEXT = "none"  # in place of an encoder's name: every sample had the same text, as a rule zeros
KINDS: dict[str, type] = {"bytes": BytesEncoder, "t5": T5Encoder, "reason1": Reason1Encoder}


@dataclass(frozen=True)
class TrainedText:
    """What a network read in training."""

    encoder: str  # its name or kind; NO_TEXT; empty: unknown
    encoder_tokens: int  # that it makes of a prompt at most
    num_tokens: int  # that the network read: longer texts were cut, shorter ones padded with zeros
    width: int
    constant_path: str = ""  # the file of the one embedding that every sample had

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            wanted = str if name in ("encoder", "constant_path") else int
            if type(value) is not wanted:
                raise TypeError(f"{name}={value!r}, expected {wanted.__name__}")

    def __str__(self) -> str:
        if self.constant_path:
            return f"the embedding of {self.constant_path} for every clip"
        if self.encoder == NO_TEXT:
            return f"a text of zeros, {self.num_tokens} tokens of width {self.width}"
        return f"{self.num_tokens} tokens of width {self.width} by {self.encoder or 'an unknown encoder'}"


def text_facts(texts: Iterable[TrainedText]) -> dict[str, Any]:
    """What a run records of the texts of its data sets."""
    distinct = list(dict.fromkeys(texts))
    return {KEY: [asdict(text) for text in distinct]} if distinct else {}


def trained_text(path: str) -> TrainedText | None:
    """The text of the run that a checkpoint lies in; None where nothing says it."""
    try:
        found = [TrainedText(**text) for text in recorded_fact(path, KEY) or ()]
    except TypeError as error:
        log.warning("%s: its '%s' cannot be read (%s): the text of training is unknown", path, KEY, error)
        return None
    if len(found) > 1:
        log.warning(
            "%s: trained with texts of %d kinds (%s): a prompt is encoded as the first",
            run_folder(path),
            len(found),
            "; ".join(map(str, found)),
        )
    return found[0] if found else None


def follow_text(config: Any, text: TrainedText, whose: str) -> None:
    """Make a pipeline's config give the network its text as in training; ``whose`` names the run for the log."""
    config.num_text_tokens, config.text_encoder_name = text.num_tokens, text.encoder
    log.info("text: %s, as %s was trained", text, whose)
    name = parse_name(text.encoder)
    if config.text_encoder is None or name.kind in ("", NO_TEXT):
        return
    if name.kind not in KINDS:
        config.text_encoder = None  # asking for a prompt says which encoder there was
    elif isinstance(config.text_encoder, Mapping):
        config.text_encoder = _encoder_node(config.text_encoder, name, text)


def with_trained_text(config: Config, sources: Sequence[str]) -> Config:
    """The pipeline's config with the text of the run that weights lie in, the last that says it; as it is where it has
    one already."""
    if config.num_text_tokens is None:
        for path in reversed(sources):
            if (text := trained_text(path)) is not None:
                config = attrs.evolve(config)
                follow_text(config, text, path)
                break
    return config


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


def other_text(trained: str, given: str, rows: Iterable[Tensor] | None = None) -> str | None:
    """Why texts by the encoder ``given`` are not those of training, by ``trained``, with the cure; None where they are.

    Embeddings ``rows`` of prompts may have another number of tokens, as long as none of them was cut.
    """
    if trained in ("", NO_TEXT):
        return None
    wanted, found = parse_name(trained), parse_name(given)
    flags = wanted.flags()
    cure = f"Encode with {flags}" if flags else f"Encode with {trained}"
    if not is_same_encoder(trained, given):
        return f"is by {given}, but the network was trained with texts by {trained}. {cure}."
    if not wanted.num_tokens or not found.num_tokens or wanted.num_tokens == found.num_tokens:
        return None
    fewest = min(wanted.num_tokens, found.num_tokens)
    if rows is not None and all(len(trimmed(row)) < fewest for row in rows):
        return None
    return (
        f"has {found.num_tokens} tokens of a prompt at most ({given}), but the network was trained with"
        f" {wanted.num_tokens} ({trained}). {cure}."
    )


def with_tokens(text_B_S_E: Tensor, num_tokens: int | None) -> Tensor:
    """Texts of exactly so many tokens, cut or padded with zeros as in training; None: as they are."""
    have = text_B_S_E.shape[1]
    if num_tokens is None or have == num_tokens:
        return text_B_S_E
    if have > num_tokens:
        return text_B_S_E[:, :num_tokens]
    size, _, width = text_B_S_E.shape
    return torch.cat([text_B_S_E, text_B_S_E.new_zeros(size, num_tokens - have, width)], dim=1)
