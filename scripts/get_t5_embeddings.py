# SPDX-License-Identifier: Apache-2.0
"""Encode the captions of a data set, metas/NAME.txt, into t5_xxl/NAME.pickle, which training reads."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.dataset_forms import split_folders
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.released import get_t5_model_dir
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import FORMS
from cosmos_predict2.text.trained_text import ENCODERS, RELEASED
from cosmos_predict2.tools.prepare import caption_embeddings
from cosmos_predict2.tools.prepare.caption_embeddings import Captions, captions_of_metas
from imaginaire import command_line
from imaginaire.errors import CheckpointError, DataError
from scripts.encode_prompts import encoder_call

log = logging.getLogger(__name__)

EPILOG = """\
Equal captions are encoded once. What is there already is kept, unless its caption has changed since; a run that was
interrupted goes on when it is started again. t5_xxl/embeddings.json records the encoder, and another one is
refused. Several processes share the work with --shard 0/8 ... --shard 7/8, each with a device of its own.
"""
_EXAMPLES = """
examples:
  python -m scripts.get_t5_embeddings --data datasets/mine/train --dtype bfloat16
  python -m scripts.get_t5_embeddings --data datasets/mine/train --text_encoder bytes
  python -m scripts.get_t5_embeddings --data datasets/toy/train --text_encoder bytes --num_tokens 64 --text_width 64
"""


OLDER = {"--dataset_path": "--data", "--width": "--text_width", "--max_length": "--num_tokens"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that all scripts of embeddings share."""
    add = parser.add_argument
    num_tokens = "of a caption at most (default: the encoder's, 512)"
    add("--num_tokens", type=command_line.at_least(1), metavar="N", help=num_tokens)
    add("--cache_dir", metavar="DIR", help="the folder with the weights (default: checkpoints/google-t5/t5-11b of t5)")
    encoders = "t5: of released models; bytes: needs no weights, for tiny ones; none: captions alone (Predict2.5); or"
    add("--text_encoder", default="t5", metavar="NAME", help=f"{encoders} one of your own, by its name or module:Class")
    width = "numbers per token of an encoder without weights (default: the encoder's, 1024)"
    add("--text_width", type=command_line.at_least(1), metavar="N", help=width)
    add("--form", choices=tuple(FORMS), default="pickle", help="of the files that are written; all are read")
    add("--batch_size", type=command_line.at_least(1), default=8, metavar="N", help="captions at a time")
    of_dtype = "in which T5 computes (default: that of its weights); int8: its linear layers in 8 bits"
    add("--dtype", choices=("float32", "bfloat16", "int8"), help=of_dtype)
    add("--adopt", action="store_true", help="take over embeddings without a record, if a few equal this encoder's")
    command_line.common(add, "device", "shard", "dry_run")


def run_with(
    args: argparse.Namespace,
    find: Callable[[Path], Captions],
    *,
    has_metas: bool,
    make: Callable[[], TextEncoder] | None = None,
    camera: str = "",
) -> int:
    """Find the captions, write the ``metas/`` that are not there, encode; the exit code. ``make`` gives the encoder."""
    make = make or functools.partial(make_encoder, args)
    dataset = Path(args.data)
    if args.text_encoder != "none":
        encoder_call(args)
    try:
        captions = find(dataset)
    except DataError as error:
        log.error("nothing was written: %s", error)
        return 1
    caption_embeddings.compare_with_clips(dataset, captions, camera)
    if not captions.results:
        captions.report("captions")
        log.error("nothing was written: %s has no caption that can be used", dataset)
        return 1
    if not has_metas and not args.dry_run:
        caption_embeddings.write_metas(dataset, captions, camera)
    if args.text_encoder == "none":
        return captions.report("captions")
    kind = args.text_encoder if args.text_encoder in ENCODERS else None
    options = command_line.options_of(embed_captions, args, kind=kind)
    encoder = make() if args.text_encoder == "bytes" else make
    counts = caption_embeddings.embed_dataset(dataset, captions, encoder, camera=camera, **options)
    if args.dry_run and counts.written:
        check_weights(args)
    return captions.report("captions")


def check_weights(args: argparse.Namespace) -> None:
    """Raise where the encoder that the flags name has no weights here."""
    if args.text_encoder != "t5":
        return
    from cosmos_predict2.text.t5 import T5Encoder

    if problems := T5Encoder.problems(args.cache_dir or get_t5_model_dir()):
        other = "--text_encoder bytes, which needs no weights: for tiny models and trials, not for released models"
        raise CheckpointError(f"--cache_dir: {problems[0]} Or add {other}.")


def make_encoder(args: argparse.Namespace) -> TextEncoder:
    """The encoder that the flags name, on its device."""
    from cosmos_predict2.world_model.assembly import device_of

    args = argparse.Namespace(**vars(args) | {"device": device_of(args.device)})
    check_weights(args)
    released = RELEASED.get(args.text_encoder, lambda: None)
    return encoder_call(args, path=args.cache_dir or released(), batch_size=args.batch_size)()


parser = command_line.parser("scripts.get_t5_embeddings", __doc__, EPILOG + _EXAMPLES, OLDER)
add = parser.add_argument
add("--data", default="datasets/hdvila", metavar="DIR", help="the folder with metas/, or with train/ and val/")
add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Encode a folder with metas/, or each of the folders train/, val/ and test/ that has one; the worst exit code."""
    folder = Path(args.data)
    splits = [part for part in split_folders(folder) if (part / "metas").is_dir()]
    if (folder / "metas").is_dir():
        splits = []
    make = functools.cache(lambda: make_encoder(args))  # T5 takes minutes to load, and is the same for all splits
    codes = []
    for part in splits or [folder]:
        if splits:
            log.info("%s:", part)
        of_part = argparse.Namespace(**vars(args) | {"data": str(part)})
        codes.append(run_with(of_part, captions_of_metas, has_metas=True, make=make))
    return max(codes)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
