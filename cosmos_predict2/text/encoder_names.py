# SPDX-License-Identifier: Apache-2.0
"""The parts of a text encoder's name, as records of embeddings keep it, and the command that encodes with it again.

bytes-v1-512x64    t5-1a2b3c4d-512x1024-bfloat16    reason1-1a2b3c4d-512x100352-full_concat-bfloat16
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FORM = re.compile(r"(?P<kind>\w+)-(?P<weights>\w+)-(?P<num_tokens>\d+)x(?P<width>\d+)(?:-(?P<rest>.+))?")
_DEFAULT_TOKENS = 512
TINY_WIDTH = 64  # of the texts that the tiny models take, by the bytes encoder


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
        if self.kind not in ("bytes", "t5", "reason1"):
            return ""
        found = [f"--text_encoder {self.kind}"]
        if self.num_tokens and (self.kind == "bytes" or self.num_tokens != _DEFAULT_TOKENS):
            found.append(f"--num_tokens {self.num_tokens}")
        if self.kind == "bytes" and self.width:
            found.append(f"--text_width {self.width}")
        if self.dtype == "bfloat16":
            found.append("--dtype bfloat16")
        return " ".join(found)


def parse_name(name: str) -> EncoderName:
    """The parts of an encoder's name; what has another form is a kind alone."""
    if (match := _FORM.fullmatch(name)) is None:
        return EncoderName(name)
    dtype = (match["rest"] or "").rpartition("-")[2]
    return EncoderName(match["kind"], match["weights"], int(match["num_tokens"]), int(match["width"]), dtype)


def is_same_encoder(first: str, second: str) -> bool:
    """Whether two names can be of one encoder, whatever its number of tokens.

    The fingerprint of weights depends on their dtype, so that it counts between equal ones only: rounding changes
    embeddings too little to matter.
    """
    a, b = parse_name(first), parse_name(second)
    if a.kind != b.kind or (a.width and b.width and a.width != b.width):
        return False
    return not a.weights or not b.weights or a.dtype != b.dtype or a.weights == b.weights


def encode_command(dataset_dir: Path | str, encoder: str = "") -> str:
    """The command that encodes the captions of a data set, with the encoder of this name or kind where one is given."""
    flags = parse_name(encoder).flags()
    command = f"python -m scripts.get_t5_embeddings --data {shlex.quote(str(dataset_dir))}"
    return f"{command} {flags}" if flags else command


def encode_commands(dataset_dir: Path | str, encoder: str = "", num_tokens: int | None = None) -> str:
    """The same where the model, which decides the width, is not known: a command for each kind of model.

    Of the bytes encoder only the tiny models take texts, so that this kind alone means theirs, with as many tokens as
    the data set reads.
    """
    name = parse_name(encoder)
    tiny = encode_command(dataset_dir, f"bytes-v1-{num_tokens or _DEFAULT_TOKENS}x{TINY_WIDTH}")
    if name.width or name.kind not in ("", "t5", "bytes"):
        return encode_command(dataset_dir, encoder)
    return (
        tiny if name.kind == "bytes" else f"{encode_command(dataset_dir, encoder or 't5')} (for a tiny model: {tiny})"
    )
