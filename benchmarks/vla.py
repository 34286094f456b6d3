# SPDX-License-Identifier: Apache-2.0
"""A whole experience of the published policies in the published world model: the flags of `benchmarks.experience`.

python -m benchmarks.vla --released [--policies openvla pi05] [--adapters] [--size tiny]
"""

from benchmarks import experience, machine


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--released", action="store_true", help="accepted: nothing else is measured")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--groups_of", type=int, default=8)
    parser.add_argument("--policies", nargs="*", default=["openvla", "pi05"], choices=("openvla", "pi05"))
    parser.add_argument("--size", default="2B", choices=("tiny", "2B"), help="of policies and world model")
    parser.add_argument("--adapters", action="store_true", help="train adapters of rank 32 in place of the weights")
    parser.add_argument("--experiences", type=int, help="rollouts with updates; default: 2 of openvla, 1 of pi05")
    parser.add_argument("--decisions", type=int, help="of an episode; default: 2 of openvla, 8 of pi05")
    parser.add_argument("--folder", help="where policies are written for a while; default: the temporary folder")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the configuration")
    raise SystemExit(experience.run(machine.parse(parser)))


if __name__ == "__main__":
    main()
