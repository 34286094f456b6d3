# SPDX-License-Identifier: Apache-2.0
"""Drive a robot by keyboard or gamepad in what a world model imagines, on a page of this machine."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import missing_package

_EPILOG = """\
examples:
  python -m scripts.drive --suite toy --max_steps 1000
  python -m scripts.drive --world_model RUN --policy outputs/my_policy --reward outputs/my_reward --out outputs/driven
"""

parser = command_line.parser("scripts.drive", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--world_model", default="", metavar="W", help="a run or weights (default: the tiny one that ships)")
add("--data", default="", metavar="FOLDER", help="LeRobot recordings (default: those that the run was trained on)")
add("--camera", default=None, metavar="NAME", help="of several, the one that the world model sees (default: the run's)")
add("--starts", default="", metavar="FOLDER", help="of scripts.make_reset_states (default: --suite's, or --data's)")
add("--policy", default="", metavar="P", help="of the autopilot: a file, folder or run, or MODULE:CLASS")
add("--reward", default="", metavar="R", help="a file or folder of scripts.train_reward_model, or MODULE:CLASS")
add("--suite", default="", metavar="E", help="a simulator beside it: toy, gym:ID, or yours, MODULE:CLASS")
add("--max_steps", type=count, default=None, help="of an episode in the simulator (default: as published)")
add("--actions", type=count, default=4, help="of one look at the keys: fewer follow them faster, more imagine better")
add("--num_steps", type=count, default=1, help="evaluations of the network for a chunk")
add("--stream", action="store_true", help="of a causal student: go on where it stopped, so that no frame is made twice")
add("--fps", type=command_line.above_zero, default=None, help="pictures per second (default: the recordings')")
add("--out", type=command_line.folder_to_write, default=None, metavar="DIR", help="the data set to add episodes to")
add("--host", default="127.0.0.1", help="address to listen on; one that other machines reach needs WFM_DRIVE_TOKEN")
add("--port", type=command_line.at_least(0, 65535), default=8000, help="port to listen on")
command_line.common(add, "load_ema", "device")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.checkpoints.card import read_card
    from cosmos_predict2.configs.rl.imagination import imagination_of, trained_on
    from cosmos_predict2.released import TINY_ACTION
    from cosmos_predict2.tools.drive.session import drive_of
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire.listening import token_of

    try:
        from cosmos_predict2.tools.drive.server import TOKEN, serve
    except ImportError as error:
        raise missing_package(str(error.name), "drive") from error
    token, path = token_of(TOKEN, args.host), args.world_model or TINY_ACTION
    imagination = imagination_of(path, load_ema=args.load_ema, device=device_of(args.device))
    root = Path(trained_on(path, "root") or "")
    args.camera = args.camera or trained_on(path, "camera")
    args.data = args.data or (str(root) if (root / "meta/info.json").is_file() else "")
    with drive_of(args, imagination, read_card(path).video_size) as drive:
        serve(drive, args.host, args.port, token)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
