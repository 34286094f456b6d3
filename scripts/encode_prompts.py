# SPDX-License-Identifier: Apache-2.0
"""Encode prompts once and keep their embeddings in a file, so that a machine without the text encoder can use them."""

import argparse
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cosmos_predict2.data.video.media import check_writable
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT
from cosmos_predict2.text.prompt_embeddings import write_prompt_embeddings
from cosmos_predict2.text.trained_text import RELEASED
from imaginaire import command_line, storage
from imaginaire.buildable import made, resolve, takes
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_EPILOG = """\
The file holds the prompts, the negative prompt and the encoder's name; give it to inference with
--prompt_embeddings FILE and the same prompt.

  t5       T5-11B, 512 tokens of 1024: the Predict2 models
  reason1  Cosmos-Reason1-7B, 512 tokens of 100352 (0.2 GB each in float32, half in bfloat16): the Predict2.5 models
  bytes    needs no weights: the tiny models, which take 64 tokens of 64

examples:
  python -m scripts.encode_prompts --prompt "A robot arm picks up a cup." --out cup.safetensors
  python -m scripts.encode_prompts --prompts_file prompts.txt --device cuda --dtype bfloat16 --out all.safetensors
  python -m scripts.encode_prompts --prompt "push the red puck" --text_encoder bytes --out tiny.safetensors
"""

_OLDER = {"--output": "--out", "--width": "--text_width"}
parser = command_line.parser("scripts.encode_prompts", __doc__, _EPILOG, _OLDER)
add = parser.add_argument
add("--prompt", action="append", default=[], help="a prompt; may be given several times")
add("--prompts_file", metavar="FILE", help="a text file, one prompt a line; '-' is stdin")
add("--negative_prompt", help="what the video should not be (default: the released models' text; bytes: empty)")
add("--no_negative_prompt", action="store_true", help="write no negative prompt")
encoders = "t5, reason1, bytes, umt5 (Wan2.1), or yours by name or module:Class (default: t5)"
add("--text_encoder", default="t5", metavar="NAME", help=encoders)
add("--encoder_path", metavar="DIR", help="the encoder's folder, in place of the released one's")
add("--checkpoint_dir", metavar="DIR", help="where the released weights lie (default: checkpoints)")
add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
of_dtype = "in which the encoder computes and the file keeps (default: as in the checkpoint; float32 in the file)"
add("--dtype", choices=("float32", "bfloat16", "int8"), help=f"{of_dtype}; int8: linear layers in 8 bits")
add("--num_tokens", type=int, help="tokens of each prompt (default: the encoder's, 512; bytes: 64)")
add("--text_width", type=int, help="of an encoder without weights (default: the encoder's; bytes: 64)")
add("--out", required=True, metavar="FILE", help="the .safetensors file to write")


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, then those of the file; empty lines of a file are passed over."""
    prompts = list(args.prompt)
    if args.prompts_file == "-":
        prompts += _lines(sys.stdin.read())
    elif args.prompts_file is not None:
        if not storage.exists(args.prompts_file):
            raise DataError(f"--prompts_file {args.prompts_file} does not exist.")
        prompts += _lines(storage.read_text(args.prompts_file))
    if not prompts:
        raise ConfigError("There is nothing to encode: give --prompt TEXT, or --prompts_file FILE with a line or more.")
    return prompts


def encoder_call(args: argparse.Namespace, encoder_path: str | None = None, **offered: Any) -> Callable[[], Any]:
    """A call that makes the encoder of the flags. A flag that means nothing to it is an error at once; of what is
    ``offered`` it gets what it takes."""
    make: Any = resolve(args.text_encoder, "encoder")
    taken, _ = takes(make)
    tokens = "num_tokens" if "num_tokens" in taken else "max_length"
    flags = {
        "--encoder_path": ("path", encoder_path),
        "--num_tokens": (tokens, args.num_tokens),
        "--text_width": ("width", args.text_width),
    }
    for flag, (name, value) in flags.items():
        if value is not None and name not in taken:
            raise ConfigError(f"{flag} has no meaning for --text_encoder {args.text_encoder}: leave it out.")
    given = {name: value for name, value in flags.values() if value is not None}
    offered |= dict(dtype=args.dtype, device=args.device)
    offered = {name: value for name, value in offered.items() if value is not None}
    return partial(made, make, given, f"--text_encoder {args.text_encoder}: ", **offered)


def make_encoder(args: argparse.Namespace) -> TextEncoder:
    """The encoder that the flags name, on its device."""
    from cosmos_predict2.world_model.assembly import check_device

    check_device(args.device)
    usual = dict(num_tokens=64, width=64) if args.text_encoder == "bytes" else {}  # the tiny models'
    folder = RELEASED.get(args.text_encoder)
    released = None if folder is None else folder(root=args.checkpoint_dir)
    return encoder_call(args, args.encoder_path, path=released, **usual)()


def run(args: argparse.Namespace) -> None:
    import torch

    if not args.out.endswith(".safetensors"):
        raise ConfigError(f"--out {args.out}: the file is a safetensors file, so its name ends in .safetensors.")
    check_writable(args.out, (".safetensors",), flag="--out")
    prompts = prompts_of(args)
    default = "" if args.text_encoder == "bytes" else DEFAULT_NEGATIVE_PROMPT
    given = default if args.negative_prompt is None else args.negative_prompt
    negative = None if args.no_negative_prompt else given
    encoder = make_encoder(args)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    written = write_prompt_embeddings(args.out, encoder, prompts, negative, dtype)
    size, more = f"{written.num_tokens} x {written.width}", "" if negative is None else " and the negative prompt"
    log.info("wrote prompts: %d%s by %s, %s, to %s", len(written.prompts), more, written.name, size, args.out)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
