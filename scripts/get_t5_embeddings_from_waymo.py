# SPDX-License-Identifier: Apache-2.0
"""Write one caption, metas/CAMERA/NAME.txt, for every clip of each camera, and its embedding in t5_xxl/CAMERA/."""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.video_folder import existing_folder
from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_prompt
from imaginaire import command_line
from imaginaire.errors import DataError
from scripts.get_t5_embeddings import EPILOG, OLDER, add_flags, make_encoder, run_with

_EXAMPLES = """
A caption that is in metas/ already is kept, and it is what is encoded for its clip.

examples:
  python -m scripts.get_t5_embeddings_from_waymo --data datasets/waymo
"""

parser = command_line.parser("scripts.get_t5_embeddings_from_waymo", __doc__, EPILOG + _EXAMPLES, OLDER)
add = parser.add_argument
add("--data", default="datasets/waymo", metavar="DIR", help="the folder with videos/CAMERA/")
add("--prompt", default="A video of car driving on the road.", metavar="TEXT", help="the caption of all clips")
add_flags(parser)


def run(args: argparse.Namespace) -> int:
    root = existing_folder(args.data, "videos")
    if not (cameras := sorted(path.name for path in (root / "videos").iterdir() if path.is_dir())):
        raise DataError(f"{root}/videos has no folder of a camera: videos/CAMERA/NAME.mp4 is expected.")
    make = functools.cache(lambda: make_encoder(args))
    codes = []
    for camera in cameras:
        find = functools.partial(captions_of_prompt, prompt=args.prompt, camera=camera)
        codes.append(run_with(args, find, has_metas=False, make=make, camera=camera))
    return max(codes)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
