# SPDX-License-Identifier: Apache-2.0
"""Write where episodes of a world model begin, out of recordings: first pictures, and keyframes near contact."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.action_conditioned.recorded_episodes import open_episodes
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.robots import ROBOTS
from cosmos_predict2.data.split import PARTS, split_of
from cosmos_predict2.data.views import views_of
from cosmos_predict2.rl.envs import recorded_starts
from cosmos_predict2.rl.envs.recorded_starts import FILE, GRIPPER, RecordedStarts
from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_EPILOG = f"""\
Recordings: a LeRobot data set, annotation/<split>/*.json (Bridge), <suite>/*_demo.hdf5 (LIBERO), or states of the toy
world. OUT/{FILE} is what cosmos_predict2.rl.envs.recorded_starts.RecordedStarts reads, of an environment's starts.

examples:
  python -m scripts.make_reset_states --dataset datasets/my_robot --split split.json --out datasets/my_starts
  python -m scripts.make_reset_states --dataset datasets/my_robot --camera front --keyframes gripper --out my_starts
  python -m scripts.make_reset_states --dataset datasets/my_robot --keyframes 0.5 --num 100 --out my_starts
"""


def _keyframes(text: str) -> float | str:
    """The ``type`` of --keyframes."""
    if text == GRIPPER:
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is neither '{GRIPPER}' nor a fraction of an episode, as in 0.5")
    return value


parser = command_line.parser("scripts.make_reset_states", __doc__, _EPILOG)
add = parser.add_argument
add("--dataset", required=True, metavar="DIR", help="the recordings")
add("--out", required=True, type=command_line.folder_to_write, metavar="DIR", help=f"where {FILE} goes")
add("--camera", metavar="NAME", help="whose pictures (default: the only one; LIBERO: agentview_rgb; Bridge: 0)")
add("--action_keys", nargs="+", metavar="COLUMN", help="what makes an action of a LeRobot data set (default: action)")
add("--embodiment", choices=ROBOTS, help="a LeRobot data set of this robot: what makes an action, and its units")
add("--units", metavar="UNIT", help="of the robot's joints, where --embodiment needs them: degrees or m100 of so100")
add("--gripper_dim", type=int, default=-1, metavar="N", help="which number of an action is the gripper's")
places = f"starts in mid-episode: '{GRIPPER}' where it opens or closes, or a fraction (default: none)"
add("--keyframes", type=_keyframes, metavar="WHERE", help=places)
before = recorded_starts.BEFORE
add("--before", type=command_line.at_least(0), default=before, metavar="N", help="frames from a keyframe to there")
add("--split", default="", metavar="FILE", help="of a LeRobot data set: training gets starts of its part train alone")
add("--overwrite", action="store_true", help="replace starts that are there")
add("--num", type=command_line.at_least(1), metavar="N", help="so many episodes, evenly taken (default: all)")


def run(args: argparse.Namespace) -> int:
    dataset, path = Path(args.dataset), Path(args.out) / FILE
    if path.exists() and not args.overwrite:  # a run that reads them would go on with others
        raise ConfigError(f"--out {args.out} holds starts: give another folder, or --overwrite.")
    of_robot: dict[str, Any] = dict(action_keys=args.action_keys, embodiment=args.embodiment, units=args.units)
    episodes = open_episodes(dataset, camera=args.camera, gripper_dim=args.gripper_dim, **of_robot)
    if any(Path(args.out).glob("*.npy")):
        raise ConfigError(f"--out {args.out} holds published reset states (*.npy), which are read in place of {FILE}.")
    num = min(args.num or len(episodes), len(episodes))
    chosen = [episodes[i * len(episodes) // num] for i in range(num)]
    digest, parts = "", {}
    if args.split:
        source = LeRobotSource.open(dataset)
        split = split_of(args.split, source)
        digest, parts = split.digest, {source.name(i): part for part in PARTS for i in split.of(part)}
    found = recorded_starts.starts_of(chosen, args.keyframes, args.before, parts)
    about: dict[str, Any] = dict(recorded=recorded_starts.facts_of(chosen), split=digest, views=views_of(args.camera))
    count = recorded_starts.write_starts(path, found, **about)
    starts = RecordedStarts(str(path))
    keyframes = count - len(RecordedStarts(str(path), keyframes=False))
    log.info("%s: %d starts of %d tasks, %d of them keyframes", path, count, starts.num_tasks, keyframes)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
