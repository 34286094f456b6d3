# SPDX-License-Identifier: Apache-2.0
"""Write metas/NAME.txt for the clips of a data set with any captioner: a command that prints a caption."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.text.trained_text import encode_commands
from cosmos_predict2.tools.prepare.captioning import PLACE, caption_clips, parse_command, plan
from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_EPILOG = f"""\
The command runs once for each clip of DIR/videos (or picture of DIR/images), with the clip's path in place of {PLACE}.
What it prints to standard output is the caption. Captions that are there are kept, so a run that was interrupted goes
on when it is started again, and captions written by hand are safe. There is no shell: quote as in a shell, but for
pipes write a script, or sh -c '... "$1" ...' sh {PLACE}.

examples:
  python -m scripts.caption_videos --data datasets/mine --command 'python my_captioner.py {PLACE}'
  python -m scripts.caption_videos --data datasets/mine --command './caption.sh --long {PLACE}' --workers 4
"""

parser = command_line.parser("scripts.caption_videos", __doc__, _EPILOG, {"--dataset_path": "--data"})
add = parser.add_argument
add("--data", required=True, metavar="DIR", help="data set with videos/ or images/")
add("--command", required=True, metavar="CMD", help=f"what to run for each clip; {PLACE} stands for its path")
add("--workers", type=command_line.at_least(0), default=1, help="commands that run at the same time")
add("--timeout", type=float, default=600.0, metavar="SECONDS", help="the longest that one clip may take")
add("--retries", type=command_line.at_least(0), default=1, help="how often a clip that failed is tried again")
command_line.common(add, "overwrite", "dry_run")


def run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:  # nan is not
        raise ConfigError(f"--timeout is {args.timeout:g}; it must be more than 0 seconds.")
    dataset, command = Path(args.data), parse_command(args.command)
    jobs = plan(dataset, command, **command_line.options_of(plan, args))
    if args.dry_run:
        for job in jobs[:10]:
            log.info("%s <- %s", job.target, " ".join(word.replace(PLACE, str(job.clip)) for word in job.command))
        log.info("%d captions would be written to %s", len(jobs), dataset / "metas")
        return 0
    outcome = caption_clips(jobs, args.workers)
    log.info("%s: %d captions written", dataset / "metas", len(outcome.results))
    if not outcome.faults:
        log.info("next: %s", encode_commands(dataset))
    return outcome.report("clips")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
