# SPDX-License-Identifier: Apache-2.0
"""Fetch released weights from the Hugging Face hub, at the revisions that this version was written for, or check those
that are here."""

import argparse
import sys

from cosmos_predict2.checkpoints.download import DownloadFlags, DownloadPlan, check, fetch, make_plan
from cosmos_predict2.released import EMBODIED_DIR, checkpoint_dir
from imaginaire import command_line

_EPILOG = """\
examples:
  python -m scripts.download_checkpoints --model_types video2world --model_sizes 2B
  python -m scripts.download_checkpoints --model_types video2world --model_sizes 2B --no_text_encoder --dry_run
  python -m scripts.download_checkpoints --model_types video2world --model_sizes 2B --check
  python -m scripts.download_checkpoints --embodied cosmos_libero_spatial openvla_oft

The NVIDIA models are under the NVIDIA Open Model License; Llama-Guard-3 is gated under the Llama 3.1 licence. A gated
repository needs its terms accepted on its page, and 'hf auth login' or HF_TOKEN.
"""

parser = command_line.parser("scripts.download_checkpoints", __doc__, _EPILOG)
command_line.add_flags(parser.add_argument_group("models, and what comes with them").add_argument, DownloadFlags)
add = parser.add_argument_group("how").add_argument
add("--checkpoint_dir", metavar="DIR", help="where to put them (default: checkpoints, or models)")
add("--dry_run", action="store_true", help="print the plan; asks nobody")
add("--check", action="store_true", help="look at what is here: presence, names and shapes of tensors; asks nobody")


def show(plan: DownloadPlan, folder: str) -> None:
    print(f"plan, into {folder}:")
    for part in plan.parts:
        print(f"  {part}")
    print(f"  about {plan.gigabytes:.3g} GB in all")
    for note in plan.notes:
        print(f"  note: {note}")


def run_check(plan: DownloadPlan, folder: str) -> int:
    faults: list[str] = []
    for path, found, note in check(plan, folder):
        print(f"{'FAULT' if found else 'ok   '} {path}" + (f" ({note})" if note else ""))
        faults += found
    if not faults:
        return 0
    print(f"\n{len(faults)} faults:", file=sys.stderr)
    for fault in faults:
        print(f"- {fault}", file=sys.stderr)
    print("Run the same command without --check to fetch what is missing.", file=sys.stderr)
    return 1


def run(args: argparse.Namespace) -> int:
    folder = checkpoint_dir(args.checkpoint_dir or (EMBODIED_DIR if args.embodied else None))
    plan = make_plan(command_line.values_of(DownloadFlags, args))
    if args.check:
        return run_check(plan, folder)
    show(plan, folder)
    if args.dry_run:
        return 0
    if faults := fetch(plan, folder):
        for fault in faults:
            print(f"error: {fault}", file=sys.stderr)
        return 1
    print(f"done: everything is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
