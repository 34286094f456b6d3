# SPDX-License-Identifier: Apache-2.0
"""The text that a network was trained with: recorded by its run, compared with the text of a request.

Every start of a run adds a line to its ``runs.jsonl``, whose "text" names the encoder of the embeddings, and how many
tokens of them the network read. Names of encoders have parts:

bytes-v1-512x64    t5-1a2b3c4d-512x1024-bfloat16    reason1-1a2b3c4d-512x100352-full_concat-bfloat16
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

from cosmos_predict2.released import get_reason1_encoder_dir, get_t5_model_dir, get_umt5_model_dir
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS, trimmed
from cosmos_predict2.text.pretrained import DTYPES, EIGHT_BIT
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder, UMT5Encoder
from imaginaire.buildable import shipped, signature

KEY = "text"  # in the run's record of its starts
NO_TEXT = "none"  # in place of an encoder's name: every sample had the same text, as a rule zeros
# The name of one of yours begins like this, too: @buildable("encoder", "mine") with name = "mine-v1-64x64".
ENCODERS = shipped("encoder", {"bytes": BytesEncoder, "t5": T5Encoder, "umt5": UMT5Encoder, "reason1": Reason1Encoder})
# folders of the released weights
RELEASED = {"t5": get_t5_model_dir, "umt5": get_umt5_model_dir, "reason1": get_reason1_encoder_dir}
TINY_WIDTH = 64  # of the texts that the tiny models take, by the bytes encoder
_FORM = re.compile(r"(?P<kind>\w+)-(?P<weights>\w+)-(?P<num_tokens>\d+)x(?P<width>\d+)(?:-(?P<rest>.+))?")


@dataclass(frozen=True)
class TrainedText:
    """The text input of a network in training."""

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
    """A run's record of the texts of its data sets."""
    distinct = list(dict.fromkeys(texts))
    return {KEY: [asdict(text) for text in distinct]} if distinct else {}


def with_tokens(text_B_S_E: Tensor, num_tokens: int | None) -> Tensor:
    """Texts of exactly so many tokens, cut or padded with zeros as in training; None: as they are."""
    if num_tokens is None:
        return text_B_S_E
    return functional.pad(text_B_S_E[:, :num_tokens], (0, 0, 0, max(0, num_tokens - text_B_S_E.shape[1])))


# ---- names of encoders


@dataclass(frozen=True)
class EncoderName:
    """The parts of a name; of one that is a kind alone, the rest is empty."""

    kind: str
    weights: str = ""  # version or fingerprint
    num_tokens: int = 0
    width: int = 0
    dtype: str = ""  # that the weights were in

    def flags(self) -> str:
        """The flags of scripts.get_t5_embeddings and scripts.encode_prompts for this encoder; empty for an unknown
        one. T5 of 512 tokens is their default."""
        if self.kind not in ENCODERS:
            return ""
        found, taken = [f"--text_encoder {self.kind}"], signature(ENCODERS[self.kind])
        tokens = taken.get("num_tokens", taken.get("max_length"))
        if self.num_tokens and tokens and (self.kind == "bytes" or self.num_tokens != tokens.default):
            found.append(f"--num_tokens {self.num_tokens}")
        if self.width and "width" in taken:
            found.append(f"--text_width {self.width}")
        if self.dtype in ("bfloat16", "int8"):
            found.append(f"--dtype {self.dtype}")
        return " ".join(found)


def parse_name(name: str) -> EncoderName:
    """The parts of an encoder's name; what has another form is a kind alone."""
    if (match := _FORM.fullmatch(name)) is None:
        return EncoderName(name)
    dtype = (match["rest"] or "").rpartition("-")[2]
    dtype = dtype if dtype in (*DTYPES, EIGHT_BIT) else ""  # the last word of a name of one's own may be any
    return EncoderName(match["kind"], match["weights"], int(match["num_tokens"]), int(match["width"]), dtype)


def is_same_encoder(first: str, second: str) -> bool:
    """True if two names can be of one encoder, whatever its number of tokens.

    The fingerprint of weights depends on their dtype, so that it counts between equal ones only: rounding changes
    embeddings too little to matter.
    """
    a, b = parse_name(first), parse_name(second)
    if a.kind != b.kind or (a.width and b.width and a.width != b.width):
        return False
    return not a.weights or not b.weights or a.dtype != b.dtype or a.weights == b.weights


def other_text(trained: str, given: str, rows: Iterable[Tensor] | None = None) -> str | None:
    """Reason why texts by ``given`` differ from those of training, by ``trained``, with the cure; None if they do not.

    Embeddings ``rows`` of prompts may have another number of tokens, as long as none of them was cut.
    """
    if trained in ("", NO_TEXT):
        return None
    wanted, found = parse_name(trained), parse_name(given)
    cure = f"Encode with {wanted.flags() or trained}"
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


def encode_command(dataset_dir: Path | str, encoder: str = "") -> str:
    """The command that encodes the captions of a data set, with the encoder of this name or kind where one is given."""
    flags = parse_name(encoder).flags()
    return f"python -m scripts.get_t5_embeddings --data {shlex.quote(str(dataset_dir))} {flags}".rstrip()


def encode_commands(dataset_dir: Path | str, encoder: str = "", num_tokens: int | None = None) -> str:
    """The commands where the model, which decides the width, is not known: one for each kind of model.

    Of the bytes encoder only the tiny models take texts, so that this kind alone means theirs, with as many tokens as
    the data set reads.
    """
    name = parse_name(encoder)
    if name.width or name.kind not in ("", "t5", "bytes"):
        return encode_command(dataset_dir, encoder)
    tiny = encode_command(dataset_dir, f"bytes-v1-{num_tokens or NUM_TOKENS}x{TINY_WIDTH}")
    if name.kind == "bytes":
        return tiny
    return f"{encode_command(dataset_dir, encoder or 't5')} (for a tiny model: {tiny})"
