# SPDX-License-Identifier: Apache-2.0
"""Write the --batch_input_json of examples/video2world.py for a folder of pictures with a prompt beside each one."""

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.video.media import IMAGE_SUFFIXES
from cosmos_predict2.data.video_folder import read_caption, require_files
from cosmos_predict2.tools.jobs import Outcome
from cosmos_predict2.tools.prepare.records import write_json
from imaginaire import command_line
from imaginaire.errors import DataError, listed

log = logging.getLogger(__name__)

_EPILOG = """\
The prompt of NAME.jpg (.jpeg, .png, .webp) is NAME.txt or NAME..txt in the same folder. Its video is to be called
NAME.mp4. Pictures without a prompt are named and left out; relative paths count from where the commands run.

example:
  python -m scripts.prepare_batch_input_json --data pictures --save_path output/batch \\
      --out pictures/batch.json
  python examples/video2world.py --batch_input_json pictures/batch.json
"""

_OLDER = {"--dataset_path": "--data", "--output_path": "--out"}
parser = command_line.parser("scripts.prepare_batch_input_json", __doc__, _EPILOG, _OLDER)
add = parser.add_argument
add("--data", required=True, metavar="DIR", help="folder of the pictures and their prompts")
add("--save_path", required=True, metavar="DIR", help="folder that the videos will be written to")
add("--out", required=True, type=command_line.local_output, metavar="FILE", help="the JSON file to write")
add("--dry_run", action="store_true", help="log what would be written, and write nothing")


def run(args: argparse.Namespace) -> int:
    found = batch_entries(args.data, args.save_path)
    code = found.report("prompts")
    if not found.results:
        log.error("no picture of %s has a prompt: nothing was written", args.data)
        return 1
    target = Path(args.out)
    if not args.dry_run:
        if target.is_dir() or target.suffix == ".jsonl":
            raise DataError(f"{args.out}: --out is the JSON file to write, a list that ends in .json.")
        write_json(target, found.results)
    log.info("%s: %d entries%s", args.out, len(found.results), " (not written)" if args.dry_run else "")
    return code


def batch_entries(pictures_dir: str, save_dir: str) -> Outcome[dict[str, str]]:
    """One entry a picture that has a prompt: ``NAME.txt`` or ``NAME..txt`` beside it, without the spaces around it."""
    pictures = require_files(Path(pictures_dir), IMAGE_SUFFIXES, "pictures")
    if os.path.realpath(pictures_dir) == os.path.realpath(save_dir):
        why = "where the pictures lie: NAME.txt beside each video would replace the prompt"
        raise DataError(f"The videos may not go to {save_dir}, {why}. Give another --save_path.")
    outcome, without_prompt = Outcome[dict[str, str]](), []
    for stem, path in pictures.items():
        texts = [path.with_name(stem + ending) for ending in (".txt", "..txt")]
        text = next((text for text in texts if text.is_file()), None)
        if text is None:
            without_prompt.append(path.name)
            continue
        try:
            prompt = read_caption(text)
        except DataError as error:
            outcome.faults.append(str(error))
            continue
        output = os.path.join(save_dir, f"{stem}.mp4")
        picture = os.path.join(pictures_dir, path.name)
        outcome.results.append({"input_video": picture, "prompt": prompt, "output_video": output})
    if without_prompt:
        names = listed(without_prompt)
        log.warning("%d pictures have no NAME.txt beside them and are left out: %s", len(without_prompt), names)
    return outcome


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
