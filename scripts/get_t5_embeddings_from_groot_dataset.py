# SPDX-License-Identifier: Apache-2.0
"""Write captions, metas/NAME.txt, and their embeddings, t5_xxl/NAME.pickle, for GR00T videos with a metadata.csv."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_csv
from imaginaire import command_line
from scripts.get_t5_embeddings import EPILOG, OLDER, add_flags, run_with

_EXAMPLES = """
A caption is --prompt_prefix with the prompt of the clip's line in --meta_csv (file name, comma, prompt; the first line
is a header). Captions are written anew each time; with another prefix the embeddings follow.

examples:
  python -m scripts.get_t5_embeddings_from_groot_dataset --data datasets/benchmark_train/gr1
  python -m scripts.get_t5_embeddings_from_groot_dataset --text_encoder bytes
"""

parser = command_line.parser("scripts.get_t5_embeddings_from_groot_dataset", __doc__, EPILOG + _EXAMPLES, OLDER)
add = parser.add_argument
add("--data", default="datasets/benchmark_train/gr1", metavar="DIR", help="the folder with videos/")
add("--prompt_prefix", default="The robot arm is performing a task. ", metavar="TEXT", help="begins each caption")
add("--meta_csv", type=Path, metavar="FILE", help="file names and prompts (default: metadata.csv in --data)")
add_flags(parser)


def run(args: argparse.Namespace) -> int:
    def find(dataset: Path):
        return captions_of_csv(args.meta_csv or dataset / "metadata.csv", args.prompt_prefix)

    return run_with(args, find, has_metas=False)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
