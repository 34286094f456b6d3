# SPDX-License-Identifier: Apache-2.0
"""Record what a policy does in an environment, as a LeRobot data set that every program here reads.

Each row has the picture, the action that was executed then with its next.reward, next.done on the last row, and
next.success, 1 on pictures that show success. An episode goes on after a success, as long as the environment lets it,
so that it is seen whether the success lasts.
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line, storage
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

RECORD = "collection.json"
FIRST = 10_000  # scripts.evaluate_policy begins at 0

_EPILOG = """\
A policy is a file or folder of scripts.train_policy, a run that trained one, or a driver of yours, MODULE:CLASS, with
act(observation, ...) as cosmos_predict2.rl.interfaces.Policy has it, action_dim and chunk. Starts are numbered: those
from 0 on are what scripts.evaluate_policy measures.

examples:
  python -m scripts.collect --suite gym:gym_pusht:gym_pusht/PushT-v0 --policy runs/pusht --episodes 100 --out my_data
  python -m scripts.collect --suite gym:MT1-reach --import metaworld_setup --policy drivers:Expert --episodes 50 \\
    --out my_data
  python -m scripts.collect --suite gym:MT1-reach --import metaworld_setup --policy drivers:Clumsy --episodes 50 \\
    --first 20000 --out my_data --append
"""

parser = command_line.parser("scripts.collect", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
of_suite = "toy, lift, libero_{spatial,object,goal,10,90,all}, b1k, gym:ID, MODULE:CLASS, wfm://"
add("--suite", required=True, help=of_suite)
add("--policy", required=True, metavar="PATH", help="a policy, a run that trained one, or MODULE:CLASS")
add("--episodes", required=True, type=count, metavar="N", help="starts, each played once")
add("--out", required=True, type=command_line.folder_to_write, metavar="DIR", help="the data set")
add("--append", action="store_true", help="add the episodes to the data set that is at --out")
add("--base", default="", metavar="DATA", help="begin --out with a copy of this data set, which stays as it is")
add("--camera", default=None, metavar="NAME", help="of the pictures (default: observation.images.front), or A+B")
add("--mode", choices=["sample", "greedy"], default="sample", help="an action that is drawn, or the likeliest one")
add("--first", type=command_line.at_least(0), default=FIRST, metavar="N", help="number of the first start")
add("--execute", type=count, default=None, help="so many actions of each decision (default: all, or as its run had it)")
add("--until_success", action="store_true", help="end an episode at its first success")
add("--tasks", nargs="+", default=[], metavar="TASK", help="of a suite with several (default: all)")
add("--max_steps", type=count, default=None, help="of an episode in a simulator (default: as published)")
add("--image_size", type=count, default=None, help="of a simulator's pictures (default: 256, of lift 128)")
add("--render", default=None, help="how a simulator draws: auto, egl, osmesa, glx (default: auto)")
add("--batch_size", type=count, default=None, help="episodes that are played together (default: 8)")
add("--fps", type=command_line.above_zero, default=None, help="of the videos (default: the environment's)")
command_line.common(add, "options", "seed", "device")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.data.lerobot.info import read_info
    from cosmos_predict2.data.lerobot.reader import choose_camera
    from cosmos_predict2.data.lerobot.writer import Writer
    from cosmos_predict2.rl.envs import suites
    from cosmos_predict2.rl.envs.world_model import require_inputs
    from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
    from cosmos_predict2.rl.episodes.recording import (
        CAMERA,
        DONE_COLUMN,
        REWARD_COLUMN,
        recorded_episodes,
        require_columns,
    )
    from cosmos_predict2.rl.interfaces import EnvDefaults, completed
    from cosmos_predict2.rl.policies.files import find_policy
    from cosmos_predict2.tools.prepare.lerobot_export import copy_to_extend
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire import foreign_json
    from imaginaire.log import Progress
    from imaginaire.training.provenance import run_record

    out, device = Path(args.out), device_of(args.device)
    if not args.append and out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} holds files: give another folder, or --append to add to its data set.")
    if args.append and args.base:
        raise ConfigError(f"--base {args.base} begins a new data set: leave it out, or --append.")
    given = {name: getattr(args, name) for name in ("max_steps", "image_size", "render")}
    suite = suites.find(args.suite, args.tasks, **given, **({"split": "train"} if args.suite in suites.TOYS else {}))
    policy, card = find_policy(args.policy, options=command_line.key_values(args.options, "--options"))
    policy.to(device)
    execute = args.execute or card.about.get("execute")
    starts = held_out_starts(args.episodes, len(suite.tasks), args.seed, args.first, in_blocks=suite.in_blocks)
    env = completed(suite.env(min(args.batch_size or suite.at_once, args.episodes), policy), EnvDefaults)
    require_inputs(env, policy)
    is_last = not env.terminate_on_success  # what counts is an episode's last picture, but where success would end it
    if env.terminate_on_success is not None:
        env.terminate_on_success = args.until_success
    elif args.until_success:
        raise ConfigError(f"--until_success: {type(env).__name__} ends its episodes by itself. Leave it out.")
    fps = args.fps or float(env.metadata.get("control_hz", suite.fps))
    place = out if args.append else out.with_name(f"{out.name}.unfinished")  # until its index is written
    if not args.append:
        shutil.rmtree(place, ignore_errors=True)
    camera = args.camera or CAMERA
    if extended := args.base or (args.append and args.out):
        info = read_info(Path(extended))
        camera = choose_camera(info, args.camera) if args.camera else CAMERA
        require_columns(info.features, env.reset()[0], camera, extended)
    if args.base:
        copy_to_extend(Path(args.base), place)
    robot = str(env.metadata.get("suite", args.suite))
    writer = Writer.after(place) if args.append or args.base else Writer(place, fps, robot=robot)
    before = len(writer)
    if abs(writer.fps - fps) > 1e-6:
        where = args.base or out
        raise DataError(f"{where} has {writer.fps:g} frames per second, these episodes {fps:g}: give --fps.")
    # an older data set has no rewards; that it lacks others is an error, but for a copy of recordings
    late = {REWARD_COLUMN, DONE_COLUMN}.difference(writer.names) if extended else set[str]()
    successes = lost = 0
    with Progress("recording", args.episodes, unit="episode") as progress:
        for recording, is_success in recorded_episodes(
            policy, env, starts, args.mode, execute, camera, is_last=is_last
        ):
            successes, lost = successes + is_success, lost + (recording is None)
            if recording is not None:
                names = writer.names if args.base else {*recording.columns, *recording.videos} - late
                writer.add(recording.with_only(names))
            progress.update()
    env.close()
    if len(writer) == before:
        raise DataError(f"None of {args.episodes} episodes was played to its end: the log has the simulators' errors.")
    writer.finish()
    record = place / RECORD
    names = ("suite", "policy", "mode", "first", "seed")
    played, earlier = len(writer) - before, foreign_json.load_object(record)["collections"] if record.is_file() else []
    figures: dict[str, Any] = {name: getattr(args, name) for name in names}
    figures |= dict(execute=execute, episodes=played, from_episode=before, successes=successes, lost=lost)
    figures |= dict(command=parser.command(), **suite.conditions(), versions=run_record())
    storage.write_json(record, {"collections": [*earlier, figures]})
    if not args.append:
        place.replace(out)
    if lost:
        log.warning("%d of %d episodes were lost with their simulators and are not recorded", lost, args.episodes)
    print(f"{played} episodes, {successes} with success ({successes / played:.3f}); {len(writer)} in {out}")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
