# SPDX-License-Identifier: Apache-2.0
"""The text that a network was trained with: recorded by its run, compared with the text of a request.

Every start of a run adds a line to its ``runs.jsonl``, whose "text" names the encoder of the embeddings, and how many
tokens of them the network read.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.pickles import trimmed
from cosmos_predict2.text.encoder_names import is_same_encoder, parse_name
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder

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
