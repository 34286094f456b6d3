# SPDX-License-Identifier: Apache-2.0
"""Fetch the GR00T GR1 clips with their metadata.csv, and put them where training reads them."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_csv, compare_with_clips
from cosmos_predict2.tools.prepare.hub_videos import GROOT, add_flags, prepare
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
DIR/videos/NAME.mp4 and DIR/metadata.csv are written; the prompts are in the csv. The data has its own terms: see
https://huggingface.co/datasets/nvidia/GR1-100. HF_ENDPOINT names a mirror of the hub. A run that was interrupted goes
on when it is started again.

example:
  python -m scripts.prepare_groot_data
  python -m scripts.get_t5_embeddings_from_groot_dataset --data datasets/benchmark_train/gr1
"""

parser = command_line.parser("scripts.prepare_groot_data", __doc__, _EPILOG, {"--dataset_path": "--out"})
add_flags(parser, GROOT, "datasets/benchmark_train/gr1", "datasets/benchmark_train/hf_gr1")


def run(args: argparse.Namespace) -> int:
    videos, table = prepare(GROOT, args), args.out / "metadata.csv"
    if args.dry_run:
        return 0
    captions = captions_of_csv(table)
    log.info("%s: %d clips, %d prompts", args.out, len(videos), len(captions.results))
    compare_with_clips(args.out, captions)
    if not {path.stem for path in videos} & {stem for stem, _ in captions.results}:
        log.error("no clip of %s has a prompt in %s", args.out, table)
        return 1
    command = "python -m scripts.get_t5_embeddings_from_groot_dataset"
    log.info("next: %s --data %s --meta_csv %s", command, args.out, table)
    return captions.report("rows")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
