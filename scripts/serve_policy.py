# SPDX-License-Identifier: Apache-2.0
"""Serve a policy to a robot or to somebody else's simulator, by the protocol of openpi or of GR00T."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line

_EPILOG = """\
--layout says how clients call what the policy sees and does: the name of a layout (openpi: libero, droid, aloha; gr00t:
libero, so100), and fields that differ from it. gr00t is N1.6 and N1.7.

examples:
  python -m scripts.serve_policy --policy RUN --protocol openpi
  python -m scripts.serve_policy --policy RUN --protocol gr00t --layout name=so100
  python -m scripts.serve_policy --policy RUN --protocol openpi --layout "pictures=[front, wrist]" "actions={a: 4}"
  WFM_POLICY_TOKEN=... python -m scripts.serve_policy --policy RUN --protocol openpi --host 0.0.0.0
"""

parser = command_line.parser("scripts.serve_policy", __doc__, _EPILOG)
add = parser.add_argument
add("--policy", required=True, metavar="P", help="a policy's file or folder, a run, or MODULE:CLASS")
add("--protocol", required=True, choices=["openpi", "gr00t", "gr00t_n1.5"], help="what the clients speak")
add("--layout", nargs="+", default=[], metavar="KEY=VALUE", help="name, pictures, state, text, actions, size")
add("--mode", choices=["greedy", "sample"], default="greedy", help="the likeliest action, or one that is drawn")
add("--host", default="127.0.0.1", help="address to listen on; one that other machines reach needs WFM_POLICY_TOKEN")
add("--port", type=command_line.at_least(0, 65535), default=None, help="to listen on (default: 8000, of GR00T 5555)")
command_line.common(add, "options", "load_ema", "seed", "device")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.rl.policies.files import find_policy
    from cosmos_predict2.rl.policies.remote.layouts import layout_of
    from cosmos_predict2.rl.policies.remote.policy import PROTOCOLS
    from cosmos_predict2.rl.remote.wire import TOKEN
    from cosmos_predict2.tools.serve.server import ServedPolicy, serve
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire.listening import token_of

    token, protocol = token_of(TOKEN, args.host), args.protocol.partition("_")[0]
    fields = command_line.key_values(args.layout, "--layout")
    layout = layout_of(protocol, fields.pop("name", None), fields)
    options = command_line.key_values(args.options, "--options")
    policy, card = find_policy(args.policy, "net_ema" if args.load_ema else "auto", options)
    policy.to(device_of(args.device))
    served = ServedPolicy(policy, card.about, layout, args.mode, args.seed)
    port = PROTOCOLS[protocol].port if args.port is None else args.port
    serve(served, args.protocol, args.host, port, token)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
