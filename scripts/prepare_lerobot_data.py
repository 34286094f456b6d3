# SPDX-License-Identifier: Apache-2.0
"""Fetch a data set in the LeRobot format (2.0, 2.1 or 3.0, GR00T's too), and write its episodes as captioned clips."""

import argparse
import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.lerobot.info import VAL_FRACTION
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.text.trained_text import encode_commands
from cosmos_predict2.tools.prepare.lerobot_export import SPLITS, export, fetch_source
from imaginaire import command_line
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_EPILOG = """\
Training with actions reads the data set as it is: without --out it is only fetched and looked at. With --out,
OUT/{train,val}/videos/episode_000000.mp4 and metas/episode_000000.txt (the task) are written. Videos are not encoded
again where they can be copied. A run that was interrupted goes on when it is started again. Data sets of the hub have
terms of their own; HF_ENDPOINT names a mirror.

examples:
  python -m scripts.prepare_lerobot_data --repo_id lerobot/libero_spatial_image
  python -m scripts.prepare_lerobot_data --source datasets/my_robot --camera front --out datasets/my_robot_clips
  python -m scripts.get_t5_embeddings --data datasets/my_robot_clips/train
"""

parser = command_line.parser("scripts.prepare_lerobot_data", __doc__, _EPILOG)
add = parser.add_argument
add("--source", metavar="DIR", help="the data set, or where it is fetched to (default: datasets/lerobot/NAME)")
add("--repo_id", metavar="NAME", help="fetch this data set of the hub (default: none, it is in --source)")
add("--revision", metavar="COMMIT", help="a branch or commit of it (default: the newest)")
add("--out", type=command_line.folder_to_write, metavar="DIR", help="where the clips go (default: nowhere)")
add("--camera", metavar="KEY", help="whose pictures; only its videos are fetched (default: the only one)")
add("--splits", nargs="+", choices=(*SPLITS, "test", "full"), default=list(SPLITS), help="a folder for each")
add("--val_fraction", type=float, default=VAL_FRACTION, help="of episodes, where the data set has no split of its own")
add("--annotation", metavar="NAME", help="take captions from this text of modality.json (default: the tasks)")
add("--caption", metavar="TEXT", help="for episodes without a task (default: they are an error)")
command_line.common(add, "workers", "dry_run")


def run(args: argparse.Namespace) -> int:
    if not args.source and args.repo_id is None:
        raise ConfigError("Give --source DIR, --repo_id NAME, or both.")
    if args.repo_id is not None and not re.fullmatch(r"([\w.-]+/)?\w[\w.-]*", args.repo_id):
        raise ConfigError(f"--repo_id {args.repo_id}: the name of a data set of the hub, such as lerobot/pusht.")
    root = Path(args.source or Path("datasets") / "lerobot" / args.repo_id.rpartition("/")[2])
    options = command_line.options_of(fetch_source, args)
    if args.repo_id is not None and not fetch_source(args.repo_id, root, **options):
        return 0
    if args.out is None:
        return _look_at(root, args.camera)
    outcome = export(root, Path(args.out), **command_line.options_of(export, args, command=parser.command()))
    if not args.dry_run and not outcome.faults:
        try:
            _show_actions(LeRobotSource.open(root))
        except DataError as error:  # the clips are good without
            log.warning("%s", error)
        has_both = set(args.splits) == set(SPLITS)
        log.info("next: %s", encode_commands(args.out if has_both else Path(args.out) / args.splits[0]))
    return outcome.report("clips")


def _look_at(root: Path, camera: str | None) -> int:
    """Log what the data set has; 1 if files of its index are missing."""
    source = LeRobotSource.open(root)
    info, lengths = source.info, source.episodes.lengths
    frames = f"{lengths.min()} to {lengths.max()} frames at {info.fps:g} frames per second"
    num_tasks = len(source.tasks) or len(source.episodes.texts)
    log.info("%s: version %s, %d episodes of %s, %d tasks", root, info.version, len(source), frames, num_tasks)
    for note in filter(None, (source.rate_note(), source.episodes.several_tasks())):
        log.warning("%s", note)
    log.info("cameras: %s", ", ".join(info.cameras) or "none")
    if info.modality.action:
        log.info("parts of the action: %s", ", ".join(info.modality.action))
    _show_actions(source)
    cameras = info.cameras if camera is None else [source.camera(camera)]
    missing = sorted({path for key in cameras for path in source.missing_files(key)})
    for path in missing[:10]:
        log.error("%s does not exist; the index names it", path)
    if missing:
        log.error("%d files are missing", len(missing))
    return int(bool(missing))


def _show_actions(source: LeRobotSource) -> None:
    """Log name, range and statistics of each number of the action."""
    from cosmos_predict2.tools.check.recordings import lerobot_tables

    for table in lerobot_tables(source):
        title, *rows = table.lines()
        for line in (f"actions: {title}", *rows):
            log.info("%s", line)
        for note in table.notes():
            log.warning("%s", note)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
