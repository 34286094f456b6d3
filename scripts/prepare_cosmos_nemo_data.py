# SPDX-License-Identifier: Apache-2.0
"""Fetch the Cosmos NeMo example clips, and put them where training reads them."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.hub_videos import NEMO, add_flags, prepare
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
DIR/videos/NAME.mp4 is written: a few long clips of one thing, so one prompt serves all. The data has its own terms: see
https://huggingface.co/datasets/nvidia/Cosmos-NeMo-Assets. HF_ENDPOINT names a mirror of the hub. A run that was
interrupted goes on when it is started again.

examples:
  python -m scripts.prepare_cosmos_nemo_data
  python -m scripts.get_t5_embeddings_from_cosmos_nemo_assets --data datasets/cosmos_nemo_assets

for training on images, after the first of them:
  python -m scripts.extract_images_from_videos --data datasets/cosmos_nemo_assets \\
      --out datasets/cosmos_nemo_assets_images --stride 30
"""

parser = command_line.parser("scripts.prepare_cosmos_nemo_data", __doc__, _EPILOG, {"--dataset_path": "--out"})
add_flags(parser, NEMO, "datasets/cosmos_nemo_assets")


def run(args: argparse.Namespace) -> int:
    videos = prepare(NEMO, args)
    if not args.dry_run:
        log.info("%s: %d clips", args.out, len(videos))
        log.info("next: python -m scripts.get_t5_embeddings_from_cosmos_nemo_assets --data %s", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
