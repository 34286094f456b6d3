# SPDX-License-Identifier: Apache-2.0
"""From recordings to a better policy: every step as a program of its own, and one page with a verdict.

Started again, it goes on where it was. A changed input or option redoes what depends on it.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

_EPILOG = """\
RUN/index.html is the page, RUN/verdict.json its first sentences, RUN/policy the policy; RUN/logs has what each program
printed. The exit code is 0 where the way ended in a verdict, a gate's no among them, 2 where a step could not be done,
75 where it was interrupted: the same command goes on. The steps one by one: documentations/your_robot_steps.md

examples:
  python -m scripts.improve_policy my_data --out runs/mine
  python -m scripts.improve_policy my_data --suite gym:metaworld_setup:MT1-reach --out runs/reach --phases 2
  python -m scripts.improve_policy my_data --suite my_robot:MyTask --policy my_robot:MyPolicy --out runs/mine --dryrun
"""

parser = command_line.parser("scripts.improve_policy", __doc__, _EPILOG)
add = parser.add_argument
add("data", metavar="DATA", type=Path, help="the folder of a LeRobot data set")
add("--out", required=True, type=command_line.local_folder, metavar="RUN", help="the folder of all that is made")
add("--suite", default="", help="where policies can truly act: gym:ID, gym:MODULE:ID, MODULE:CLASS, libero_10, ...")
kinds = "cloned (default: conv); others: pi05, openvla_oft, MODULE:CLASS; may be repeated"
played = "20 or more episodes (LeRobot) that the robot played by the clone that learns; without --suite"
add("--played", type=Path, metavar="FOLDER", help=played)
own = "one of yours, a run or weights, in place of a tiny one of these recordings"
add("--world_model", type=Path, metavar="W", help=own)
add("--policy", dest="policies", action="append", metavar="POLICY", help=kinds)
add("--clones", type=command_line.at_least(1), default=2, help="of each kind, of which one learns")
add("--success_column", default="next.success", metavar="COLUMN", help="1 on frames that show success")
add("--camera", default="", metavar="NAME", help="of several, the one to look at, or more with + between them")
add("--action_keys", nargs="+", default=(), metavar="COLUMN", help="what makes an action (default: action)")
add("--state", action="store_true", help="policies read the robot's state, and the world model predicts it")
add("--episodes", type=command_line.at_least(1), default=200, help="of the truth with --suite, half of a trial before")
add("--picture_size", type=command_line.at_least(16), default=64, help="of their longer side, for the models")
phases = "more of them, with --suite: 100 true episodes of the policy, and the way again with all recordings"
add("--phases", type=command_line.at_least(0, 20), default=0, help=phases)
add("--seed", type=command_line.at_least(0), default=0, help="of all that is drawn")
add("--allow_faults", action="store_true", help="go on also where faults of the recordings are found")
add("--allow_unchecked", action="store_true", help="learn also where the gate says no")
add("--dryrun", action="store_true", help="look at what is given, and print the commands")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
    from cosmos_predict2.data.split import SUCCESS_COLUMN
    from cosmos_predict2.tools.improve.improve import commands, improve, require_world_model
    from cosmos_predict2.tools.improve.phases import Options
    from cosmos_predict2.world_model.options import ActionModel

    if args.out.resolve() == args.data.resolve():
        raise ConfigError(f"--out {args.out} is the folder of the recordings: name another, of what is made of them.")
    if args.played and args.suite:
        raise ConfigError(f"--played {args.played}: with --suite the gate plays the clone itself; leave one out.")
    if args.phases and not args.suite:
        raise ConfigError(f"--phases {args.phases}: true episodes need --suite, where the policy can play them.")
    if args.phases and args.success_column != SUCCESS_COLUMN:
        cure = f"are recorded with {SUCCESS_COLUMN}. Rename it in the recordings, or leave --phases out"
        raise ConfigError(f"--success_column {args.success_column}: true episodes {cure}.")
    if args.phases and args.action_keys:
        cure = "Record all numbers of an action as one column, action, or leave --phases out"
        raise ConfigError(f"--action_keys with --phases: true episodes have one column for an action. {cure}.")
    given = {field.name: getattr(args, field.name) for field in fields(Options) if field.name != "imports"}
    given["action_keys"] = tuple(args.action_keys)
    given["policies"] = tuple(dict.fromkeys(args.policies or Options.policies))
    options = Options(**given, imports=tuple(getattr(args, "import")))
    if args.world_model:
        world = choose_action_model(ActionModel(dit_path=str(args.world_model)))
        require_world_model(options, world.config, world.card.views)
    if args.dryrun:
        print("\n".join(commands(options)))
    else:
        improve(options)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
