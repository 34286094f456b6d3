# SPDX-License-Identifier: Apache-2.0
"""Write one caption, metas/NAME.txt, for every clip of Cosmos-NeMo-Assets, and its embedding, t5_xxl/NAME.pickle."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_prompt
from imaginaire import command_line
from scripts.get_t5_embeddings import EPILOG, OLDER, add_flags, run_with

_EXAMPLES = """
A caption that is in metas/ already is kept, and it is what is encoded for its clip.

examples:
  python -m scripts.get_t5_embeddings_from_cosmos_nemo_assets --data datasets/cosmos_nemo_assets
  python -m scripts.get_t5_embeddings_from_cosmos_nemo_assets --data datasets/nemo_images --is_image
"""

parser = command_line.parser("scripts.get_t5_embeddings_from_cosmos_nemo_assets", __doc__, EPILOG + _EXAMPLES, OLDER)
add = parser.add_argument
add("--data", default="datasets/cosmos_nemo_assets", metavar="DIR", help="the folder with videos/")
add("--prompt", default="A video of sks teal robot.", metavar="TEXT", help="the caption of all clips")
add("--is_image", action="store_true", help="the data set has images/, not videos/")
add_flags(parser)


def run(args: argparse.Namespace) -> int:
    return run_with(args, lambda dataset: captions_of_prompt(dataset, args.prompt, args.is_image), has_metas=False)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
