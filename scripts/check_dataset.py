# SPDX-License-Identifier: Apache-2.0
"""Look through a data set before training on it: counts, sizes, rates, and every file that is missing or broken."""

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file also runs as python scripts/check_dataset.py

from cosmos_predict2.data.checks.check_report import as_text, write_json
from cosmos_predict2.data.checks.dataset_checks import Wanted, check_dataset
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
Forms: folders of clips (videos/, metas/, t5_xxl/), of pictures (images/), of several cameras (videos/<camera>/), of
recordings (annotation/, videos/), of cached latents (latents/), and folders with these in train/ and val/. Every frame
of every clip is decoded, with --fast the first and the last one. Exit code: 0 without faults, 1 with faults, 2 where
nothing can be checked.

examples:
  python -m scripts.check_dataset datasets/NAME/train --num_frames 93 --video_size 432 768
  python -m scripts.check_dataset datasets/NAME --text_encoder t5 --json check.json
"""


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.check_dataset", __doc__, _EPILOG)
    add = parser.add_argument
    add("folder", metavar="DIR", help="the data set, or a folder of its train/ and val/")
    add("--num_frames", type=int, help="frames that training takes; a shorter clip is a fault")
    add("--video_size", type=int, nargs=2, metavar=("H", "W"), help="size that training takes; other shapes are noted")
    add("--fps", type=float, help="the rate that clips should have (default: the most frequent one)")
    add("--any_fps", action="store_true", help="clips may differ in rate, as training with dataset.fps=RATE allows")
    add("--text_encoder", metavar="NAME", help="the encoder that the embeddings should be of: t5, bytes, ...")
    add("--no_embeddings", action="store_true", help="embeddings may be missing")
    add(
        "--fast",
        action="store_true",
        help="decode only the first and the last frame of each clip: quicker for long ones",
    )
    add("--json", metavar="FILE", help="write all that was found to this file too")
    add("--workers", type=int, help="processes (default: one per core, or none where there is little to do)")
    return parser


def run(args: argparse.Namespace) -> int:
    wanted = Wanted(
        num_frames=args.num_frames,
        video_size=tuple(args.video_size) if args.video_size else None,
        fps=args.fps,
        any_fps=args.any_fps,
        text_encoder=args.text_encoder,
        needs_embeddings=not args.no_embeddings,
        is_fast=args.fast,
        workers=args.workers,
    )
    report = check_dataset(Path(args.folder), wanted)
    print(as_text(report))
    if args.json:
        write_json(report, Path(args.json))
    return int(bool(report.all_faults()))


def main() -> int:
    return command_line.main(_parser(), run)


if __name__ == "__main__":
    sys.exit(main())
