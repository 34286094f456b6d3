# SPDX-License-Identifier: Apache-2.0
"""Make a training folder of AgiBotWorld-Alpha: fetch, unpack and clean tasks; then cut the episodes into windows."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.agibot import captions, episodes, windows
from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_EPILOG = f"""\
examples:
  python scripts/prepare_agibot_fisheye_data.py                                        # fetch, unpack and clean
  python scripts/prepare_agibot_fisheye_data.py --delete_only                          # clean what lies there
  python scripts/prepare_agibot_fisheye_data.py --split_only --val_episode_ids 685393  # cut and caption
  python scripts/get_t5_embeddings.py --data datasets/agibot_head_center_fisheye_color/train

The repository is gated: accept the {episodes.LICENCE} on
https://huggingface.co/datasets/{episodes.REPOSITORY} and log in with 'hf auth login'.
A command that was stopped goes on where it was. Cutting needs no ffmpeg.
"""

parser = command_line.parser("scripts.prepare_agibot_fisheye_data", __doc__, _EPILOG, {"--data_dir": "--source"})
add = parser.add_argument
add("--task_ids", nargs="+", default=["327"], metavar="ID", help="tasks of the data set")
add("--source", type=Path, default=Path("datasets/agibot"), help="where the source lies")
add("--repo_id", default=episodes.REPOSITORY, help="repository on the hub")
add("--keep_tar", action="store_true", help="keep the archives after they are unpacked")
add("--camera", default=episodes.CAMERA, help="the camera that is kept")
mode = parser.add_mutually_exclusive_group()
mode.add_argument("--delete_only", action="store_true", help="delete all but the camera's video of each episode")
mode.add_argument("--split_only", action="store_true", help="cut the episodes here into windows, beside --source")
add("--val_episode_ids", nargs="+", default=[], metavar="ID", help="episodes for validation (with --split_only)")
add("--window_size", type=float, default=windows.WINDOW_SIZE, metavar="S", help="seconds in a window")
rest = "a rest of up to so many seconds is not divided"
add("--min_last_window", type=float, default=windows.MIN_LAST_WINDOW, metavar="S", help=rest)
command_line.common(add, "workers", "dry_run")


def run(args: argparse.Namespace) -> int:
    source = episodes.AgibotSource(args.source, tuple(args.task_ids), args.camera)
    how: dict[str, Any] = dict(workers=args.workers, dry_run=args.dry_run)
    if args.val_episode_ids and not args.split_only:
        raise ConfigError("--val_episode_ids belongs to the split: give it with --split_only.")
    if args.split_only:
        how |= dict(val_episode_ids=args.val_episode_ids, window_size=args.window_size, min_last=args.min_last_window)
        outcome = windows.split(source, **how)
        faults = outcome.faults
        if not args.dry_run:
            faults = faults + captions.write_captions(source)
    elif args.delete_only:
        faults = episodes.clean(source, **how)
    else:
        faults = episodes.fetch(source, repo_id=args.repo_id, keep_tar=args.keep_tar, **how)
        if not args.dry_run and not faults:
            faults = episodes.clean(source, **how)
    for fault in faults:
        log.error("%s", fault)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
