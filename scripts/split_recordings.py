# SPDX-License-Identifier: Apache-2.0
"""Split recordings into episodes to learn from and episodes that are held out, with both outcomes in every part.

The world model, the reward, the policy and its starts, and what judges them, all read this one file, so that nothing is
measured on what it learnt from.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data import split as splits
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import PARTS, SUCCESS_COLUMN, Split
from imaginaire import command_line
from imaginaire.errors import ConfigError
from imaginaire.log import tracked

FEW = 10  # held-out episodes of an outcome, below which figures have wide intervals
LAST = "last"

_EPILOG = """\
An episode succeeded if its column is above 0.5 on any frame. With --judge last the last frame decides, with
--classifier FILE a success classifier that sees the last picture. An episode without a number, or without a frame that
succeeded and with frames that have none, is unknown: it is learnt from, and counts neither as success nor as failure.

examples:
  python -m scripts.split_recordings my_data --out outputs/split.json
  python -m scripts.split_recordings my_data --success_column is_open --judge last --out outputs/split.json
  python -m scripts.split_recordings my_more_data --extend outputs/split.json --out outputs/more.json
  python -m scripts.split_recordings my_data --classifier reward_model.safetensors --camera front --out split.json
"""

parser = command_line.parser("scripts.split_recordings", __doc__, _EPILOG)
add = parser.add_argument
add("data", metavar="DATA", help="the folder of a LeRobot data set")
add("--out", required=True, type=command_line.file_to_write, metavar="FILE", help="the split, a .json file")
add("--success_column", default=SUCCESS_COLUMN, metavar="COLUMN", help="1 on frames that show success")
add("--judge", choices=("any", LAST), default="any", help="the frames of the column that decide")
add("--classifier", default="", metavar="FILE", help="judge the last pictures with this reward model instead")
add("--camera", metavar="NAME", help="of several, the one to look at")
add("--action_keys", nargs="+", metavar="COLUMN", help="what makes an action (default: action)")
add("--held_out", type=float, default=splits.HELD_OUT, metavar="SHARE", help="half of it calibrates, half measures")
add("--extend", default="", metavar="FILE", help="keep the parts of this split's episodes, which come first in DATA")
command_line.common(add, "seed", "overwrite")


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists() and not args.overwrite:  # what was trained with it would be measured on what it learnt from
        raise ConfigError(f"--out {out} exists: give another file, or --overwrite.")
    if not 0 < args.held_out < 1:
        raise ConfigError(f"--held_out {args.held_out}: a share above 0 and below 1.")
    source = LeRobotSource.open(args.data)
    splits.require_usable(source, args.camera, args.action_keys)
    outcomes: list[bool | None]
    if args.classifier:
        from cosmos_predict2.rl.rewards.resnet import ResnetReward

        reward, camera, outcomes = ResnetReward(args.classifier), source.camera(args.camera), []
        for i in tracked(range(len(source)), "last pictures", unit="episode"):
            last = source.frames(i, camera, [int(source.episodes.lengths[i]) - 1])
            outcomes.append(bool(reward.judge(last.permute(1, 2, 3, 0)[None], {}).success_E_F[0, 0]))
        judged_by = f"{Path(args.classifier).name}, last picture"
    else:
        judged = " Or let a reward model judge last pictures: --classifier FILE."
        splits.require_column(source, args.success_column, judged)
        outcomes = splits.recorded_outcomes(source, args.success_column, last=args.judge == LAST)
        judged_by = f"{args.success_column}, {args.judge} frame"
    own = dict(outcomes=outcomes, judged_by=judged_by, before=splits.read_split(args.extend) if args.extend else None)
    split = splits.make_split(args.data, **command_line.options_of(splits.make_split, args, **own))
    splits.write_split(out, split)
    print(_verdict(split))
    print(f"split: {out} ({split.digest})")


def _verdict(split: Split) -> str:
    """A table of the parts, and one sentence."""
    rows = [f"{'part':<10}{'episodes':>9}{'success':>9}{'failure':>9}{'unknown':>9}"]
    for part in PARTS:
        counts = (len(split.of(part)), *(split.count(part, outcome) for outcome in (True, False, None)))
        rows.append(f"{part:<10}" + "".join(f"{count:>9}" for count in counts))
    fewest = min(split.count("held_out", outcome) for outcome in (True, False))
    if fewest < FEW:
        held_out = len(split.held_out)
        rows.append(
            f"Only {fewest} of one outcome are among the {held_out} held-out episodes: figures of them will have wide"
            f" intervals. {FEW} at least are good; record more, or raise --held_out."
        )
    else:
        rows.append(f"Both outcomes are in every part, read from {split.judged_by}.")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
