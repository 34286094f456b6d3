# SPDX-License-Identifier: Apache-2.0
"""Write the --batch_input_json of examples/video2world.py for a folder of pictures with a prompt beside each one."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.batch_json import batch_entries, write_batch
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
The prompt of NAME.jpg (.jpeg, .png, .webp) is NAME.txt or NAME..txt in the same folder. Its video is to be called
NAME.mp4. Pictures without a prompt are named and left out; relative paths count from where the commands run.

example:
  python -m scripts.prepare_batch_input_json --data pictures --save_path output/batch \\
      --out pictures/batch.json
  python examples/video2world.py --batch_input_json pictures/batch.json
"""


parser = command_line.parser(
    "scripts.prepare_batch_input_json", __doc__, _EPILOG, {"--dataset_path": "--data", "--output_path": "--out"}
)
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
    if not args.dry_run:
        write_batch(found.results, args.out)
    log.info("%s: %d entries%s", args.out, len(found.results), " (not written)" if args.dry_run else "")
    return code


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
