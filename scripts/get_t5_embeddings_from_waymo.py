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

parser = command_line.parser("scripts.get_t5_embeddings_from_waymo", __doc__, EPILOG, OLDER)
parser.add_argument("--data", default="datasets/waymo", metavar="DIR", help="the folder with videos/CAMERA/")
prompt = "the caption of the clips that have none in metas/"
parser.add_argument("--prompt", default="A video of car driving on the road.", metavar="TEXT", help=prompt)
add_flags(parser)


def run(args: argparse.Namespace) -> int:
    videos, make = existing_folder(args.data, "videos") / "videos", functools.cache(lambda: make_encoder(args))
    codes = []
    for camera in sorted(path.name for path in videos.iterdir() if path.is_dir()):
        find = functools.partial(captions_of_prompt, prompt=args.prompt, camera=camera)
        codes.append(run_with(args, find, has_metas=False, make=make, camera=camera))
    if not codes:
        raise DataError(f"{videos} has no folder of a camera: videos/CAMERA/NAME.mp4 is expected.")
    return max(codes)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
