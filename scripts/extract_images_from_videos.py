# SPDX-License-Identifier: Apache-2.0
"""Write every N-th frame of the clips of a data set as pictures, for training on images."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.text.trained_text import encode_commands
from cosmos_predict2.tools.prepare.image_extraction import extract_images, plan
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
IN/videos/NAME.mp4 becomes OUT/images/NAME_00000000.jpg, NAME_00000001.jpg, ...: the number counts the pictures, so
picture k is frame k * stride. Started again, it goes on with the clips that are not finished.

example:
  python -m scripts.extract_images_from_videos --data datasets/cosmos_nemo_assets \\
      --out datasets/cosmos_nemo_assets_images --stride 30
  python -m scripts.get_t5_embeddings_from_cosmos_nemo_assets --is_image \\
      --data datasets/cosmos_nemo_assets_images
"""

_OLDER = {"--input_dataset_dir": "--data", "--output_dataset_dir": "--out"}
parser = command_line.parser("scripts.extract_images_from_videos", __doc__, _EPILOG, _OLDER)
add = parser.add_argument
add("--data", required=True, metavar="IN", help="data set with videos/")
add("--out", required=True, type=command_line.folder_to_write, metavar="OUT", help="data set that gets images/")
add("--stride", type=command_line.at_least(1), default=30, help="frames from one picture to the next")
add("--copy_captions", action="store_true", help="give each picture its clip's IN/metas/NAME.txt as its caption")
command_line.common(add, "workers", "dry_run")


def run(args: argparse.Namespace) -> int:
    source, out = Path(args.data), Path(args.out)
    clips = plan(source, out, args.stride, captions=args.copy_captions)
    if args.dry_run:
        log.info("%d clips would give pictures in %s", len(clips), out / "images")
        return 0
    outcome = extract_images(clips, args.workers)
    log.info("%s: %d pictures of %d clips", out / "images", sum(outcome.results), len(outcome.results))
    if args.copy_captions:
        log.info("next: %s", encode_commands(out))
    elif (source / "metas").is_dir() and not (out / "metas").is_dir():
        log.info("the pictures have no captions: delete %s, and give --copy_captions for those of their clips", out)
    return outcome.report("clips")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
