# SPDX-License-Identifier: Apache-2.0
"""Write a data set of the toy world: videos of a gripper that pushes things about a table, with captions, actions,
states, rewards and success. No download; the same arguments make the same episodes on every machine."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare.toy_folder import FORMS, ToyFolder, write_folder
from cosmos_predict2.toy_world.episodes import MIXES
from cosmos_predict2.toy_world.physics import ALL_TASKS, SETTINGS
from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_EPILOG = """\
forms:
  video    {train,val}/ with videos/NAME.mp4, metas/NAME.txt (the caption) and annotation/NAME.json, and with
           --text_encoder also t5_xxl/NAME.pickle
  bridge   annotation/{train,val}/NAME.json with poses and videos/{train,val}/NAME/rgb.mp4, as action-conditioned
           training reads them, and with --text_encoder also annotation/{train,val}/NAME.npy
  lerobot  a LeRobot data set of version 2.1: data/, meta/ and videos/, and with --text_encoder also t5_xxl/NAME.pickle
  states   {train,val}/states-FIRST.npz, from which frames are drawn while training reads them: a few kB an episode

A run that was interrupted goes on when it is started again.

examples:
  python -m scripts.make_toy_world --out datasets/toy_world --episodes 200
  python -m scripts.make_toy_world --out datasets/toy_expert --mix expert --text_encoder bytes
  python -m scripts.make_toy_world --out datasets/toy_bridge --form bridge
  python -m scripts.make_toy_world --out datasets/toy_many --tasks push_puck push_box carry_puck --action_dim 7
"""

default = ToyFolder()
parser = command_line.parser("scripts.make_toy_world", __doc__, _EPILOG)
add = parser.add_argument
add("--out", required=True, type=command_line.folder_to_write, metavar="FOLDER", help="a new one, or an unfinished one")
add("--episodes", type=int, default=default.episodes, help="how many, in all")
add("--frames", type=int, default=default.frames, help="frames per video; one action less")
add("--size", type=int, help="side of the pictures (default: 48, or 64 for the hard setting)")
add("--fps", type=float, default=default.fps, help="frames per second of the videos")
add("--seed", type=int, default=default.seed, help="another seed, other episodes")
drivers = "who drives: experts, or those of all skills with the ring elsewhere, so that only actions decide"
add("--mix", choices=tuple(MIXES), default=default.mix, help=drivers)
of_tasks = f"of which episodes are; one or several of {', '.join(ALL_TASKS)} (default: the setting's own)"
add("--tasks", nargs="+", choices=tuple(ALL_TASKS), metavar="TASK", help=of_tasks)
add("--setting", choices=tuple(SETTINGS), default=default.setting, help="difficulty")
add("--action_dim", type=int, choices=(4, 7), default=default.action_dim, help="numbers per action (default: 4)")
add("--val_fraction", type=float, default=default.val_fraction, help="share of the episodes that goes to val/")
add("--text_encoder", choices=("bytes",), help="also write embeddings of the captions by this encoder")
add("--num_tokens", type=int, default=default.num_tokens, help="tokens of an embedding")
add("--text_width", type=int, default=default.text_width, help="width of an embedding")
add("--form", choices=tuple(FORMS), default=default.form, help="layout of the folder")
add("--overwrite", action="store_true", help="replace a toy world that is in the folder already")


def run(args: argparse.Namespace) -> None:
    import attrs

    values = {field.name: getattr(args, field.name) for field in attrs.fields(ToyFolder)}
    setting = SETTINGS[args.setting]
    size = setting.size if args.size is None else args.size
    try:
        settings = ToyFolder(**values | {"tasks": tuple(args.tasks or [setting.task]), "size": size})
    except ConfigError:
        raise
    except ValueError as error:  # a number out of its range
        raise ConfigError(f"--{error.args[0] if error.args else error}".replace("'", "")) from error
    counts = write_folder(args.out, settings, overwrite=args.overwrite, command=parser.command())["counts"]
    numbers = [counts[part] for part in ("train", "val", "success")]
    log.info("wrote to %s: %d for training, %d for validation; %d end with the task done", args.out, *numbers)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
