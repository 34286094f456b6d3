# SPDX-License-Identifier: Apache-2.0
"""Look over this machine: what is installed, what each missing package would bring, which attention runs, whether
there is room, and with --dist whether processes can talk and how fast."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.doctor import collectives, machine
from imaginaire import command_line, distributed
from imaginaire.findings import Finding, as_data, as_lines, worst

_EPILOG = """\
Every line is ok, a warning (something could be better, or is not there) or an ERROR, with what to do about it.
Exit code: 0 without errors, 1 with errors, 2 for wrong flags or settings.

examples:
  python -m scripts.doctor
  python -m scripts.doctor --brief                                   one line, as at the end of make setup
  python -m scripts.doctor --json
  python -m scripts.doctor --dist                                    starts its own processes: one per GPU, or two
  torchrun --nproc_per_node=2 -m scripts.doctor --dist               as many as the run will have
  torchrun --nproc_per_node=8 --nnodes=4 --rdzv_id 123 --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:1234 \\
      -m scripts.doctor --dist                                       on all machines of the run
"""

parser = command_line.parser("scripts.doctor", __doc__, _EPILOG)
add = parser.add_argument
add("--dist", action="store_true", help="look at processes and their collectives, and nothing else")
add("--limit", type=command_line.above_zero, default=60.0, metavar="S", help="seconds to wait for processes (--dist)")
add("--brief", action="store_true", help="print the errors, or one line where there are none")
add("--json", action="store_true", help="print what was found as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.dist:
        return brief(findings()) if args.brief else show(findings(), as_json=args.json)
    if "RANK" not in os.environ:
        return collectives.start_here([f"--limit={args.limit:g}", *(["--json"] if args.json else [])])
    found, rank = collectives.examine(args.limit), int(os.environ["RANK"])
    if rank == 0:
        return show(found, as_json=args.json)
    time.sleep(1)  # rank 0 speaks first
    found = [finding for finding in found if finding.level == "error" and finding.key.startswith("processes/")]
    for line in list(as_lines(found))[1:-1]:
        print(f"[rank {rank}]{line}", file=sys.stderr)
    return int(bool(found))


def findings() -> list[Finding]:
    """Everything about this machine but its collectives."""
    from cosmos_predict2.tools.doctor import released

    return [*machine.all_findings(), *released.all_findings(distributed.device())]


def show(found: Sequence[Finding], *, as_json: bool = False) -> int:
    """Print what was found; the exit code."""
    if as_json:
        print(json.dumps(as_data(found), indent=2))
    else:
        print("\n".join(as_lines(found)))
    return int(worst(found) == "error")


def brief(found: Sequence[Finding]) -> int:
    """Print the errors, or that there are none; the exit code."""
    if wrong := [finding for finding in found if finding.level == "error"]:
        print("\n".join([*as_lines(wrong)][:-1]))
        print(f"not ready: {len(wrong)} errors (all that was looked at: python -m scripts.doctor)")
        return 1
    import torch

    print(
        f"ready: Python {platform.python_version()}, torch {torch.__version__}, device {distributed.device()}; a small"
        " network ran forward and backward, a clip was written and read"
    )
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
