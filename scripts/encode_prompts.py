# SPDX-License-Identifier: Apache-2.0
"""Encode prompts once and keep their embeddings in a file, so that a machine without the text encoder can use them."""

import argparse
import logging
import sys
from typing import Any

from cosmos_predict2.data.video.media import check_writable
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT, get_reason1_encoder_dir, get_t5_model_dir
from cosmos_predict2.text.prompt_embeddings import write_prompt_embeddings
from imaginaire import command_line, storage
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
add("--text_encoder", choices=("t5", "reason1", "bytes"), default="t5", help="which encoder (default: t5)")
add("--encoder_path", metavar="DIR", help="the encoder's folder, in place of the released one's")
add("--checkpoint_dir", metavar="DIR", help="where the released weights lie (default: checkpoints)")
add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
of_dtype = "in which the encoder computes and the file keeps (default: as in the checkpoint; float32 in the file)"
add("--dtype", choices=("float32", "bfloat16", "int8"), help=f"{of_dtype}; int8: linear layers in 8 bits")
add("--num_tokens", type=int, help="tokens of each prompt (default: 512; bytes: 64)")
add("--text_width", type=int, help="of the bytes encoder (default: 64)")
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


def encoder_of(args: argparse.Namespace, path: str, *, num_tokens: int, width: int, **options: Any) -> TextEncoder:
    """The encoder that the flags name; ``path`` is that of its weights, ``width`` of the one that has none."""
    from cosmos_predict2.world_model.assembly import check_device

    check_device(args.device)
    num_tokens = num_tokens if args.num_tokens is None else args.num_tokens
    if args.text_encoder == "bytes":
        from cosmos_predict2.text.bytes_encoder import BytesEncoder

        return BytesEncoder(num_tokens, width if args.text_width is None else args.text_width, device=args.device)
    if args.text_width is not None:
        raise ConfigError(f"--text_width is of --text_encoder bytes; {args.text_encoder} has that of its weights.")
    options |= dict(max_length=num_tokens, dtype=args.dtype, device=args.device)
    if args.text_encoder == "t5":
        from cosmos_predict2.text.t5 import T5Encoder

        return T5Encoder(path, **options)
    from cosmos_predict2.text.reason1 import Reason1Encoder

    return Reason1Encoder(path, **options)


def make_encoder(args: argparse.Namespace) -> TextEncoder:
    """The encoder that the flags name, on its device."""
    if args.text_encoder == "bytes":
        if args.encoder_path is not None:
            raise ConfigError("--encoder_path has no meaning for --text_encoder bytes, which has no weights.")
        return encoder_of(args, "", num_tokens=64, width=64)
    released = get_t5_model_dir if args.text_encoder == "t5" else get_reason1_encoder_dir
    return encoder_of(args, args.encoder_path or released(root=args.checkpoint_dir), num_tokens=512, width=0)


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
