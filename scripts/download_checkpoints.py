# SPDX-License-Identifier: Apache-2.0
"""Fetch released weights from the Hugging Face hub, at the revisions that this version was written for, or check those
that are here."""

import argparse
import sys

from cosmos_predict2.checkpoints.download import check, fetch
from cosmos_predict2.checkpoints.download_plan import MODEL_TYPES, Plan, Wishes, make_plan
from cosmos_predict2.released import EMBODIED, EMBODIED_DIR, FPS, PREDICT25, RESOLUTIONS, SIZES, checkpoint_dir
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
what = parser.add_argument_group("models")
what.add_argument("--model_sizes", nargs="+", choices=SIZES, help="sizes (default: 2B 14B)")
what.add_argument("--model_types", nargs="+", choices=tuple(MODEL_TYPES), help="kinds (default: all)")
what.add_argument("--fps", nargs="+", type=int, choices=FPS, default=[16], help="of video2world (default: 16)")
what.add_argument("--resolution", nargs="+", choices=RESOLUTIONS, default=["720"], help="of video2world (default: 720)")
what.add_argument("--natten", action="store_true", help="video2world's weights for sparse attention too (720)")
what.add_argument(
    "--predict2_5",
    nargs="+",
    choices=tuple(PREDICT25),
    default=[],
    metavar="NAME",
    help=f"Predict2.5 models: {', '.join(PREDICT25)}; alone, nothing else is fetched",
)
what.add_argument(
    "--embodied",
    nargs="+",
    choices=tuple(EMBODIED),
    default=[],
    metavar="NAME",
    help=f"a world model that policies learn in, and policies: {', '.join(EMBODIED)}; alone, into {EMBODIED_DIR}/",
)
beside = parser.add_argument_group("what comes with them")
beside.add_argument("--no_text_encoder", action="store_true", help="leave out T5-11B (45 GB) and Reason1")
beside.add_argument("--no_guardrail", action="store_true", help="leave out the blocklist")
beside.add_argument("--all_guardrails", action="store_true", help="Llama-Guard-3 and the video guardrails too")
beside.add_argument("--prompt_refiner", action="store_true", help="Cosmos-Reason1-7B for the refiner too")
beside.add_argument("--tokenizer_only", action="store_true", help="nothing but the video tokenizer")
how = parser.add_argument_group("how")
how.add_argument("--checkpoint_dir", metavar="DIR", help="where to put them (default: checkpoints, or models)")
how.add_argument("--dry_run", action="store_true", help="print the plan; asks nobody")
how.add_argument(
    "--check", action="store_true", help="look at what is here: presence, names and shapes of tensors; asks nobody"
)


def wishes_of(args: argparse.Namespace) -> Wishes:
    return Wishes(
        model_sizes=tuple(args.model_sizes) if args.model_sizes else None,
        model_types=tuple(args.model_types) if args.model_types else None,
        fps=tuple(args.fps),
        resolution=tuple(args.resolution),
        natten=args.natten,
        predict25=tuple(args.predict2_5),
        embodied=tuple(args.embodied),
        text_encoder=not args.no_text_encoder,
        guardrail=not args.no_guardrail,
        all_guardrails=args.all_guardrails,
        prompt_refiner=args.prompt_refiner,
        tokenizer_only=args.tokenizer_only,
    )


def show(plan: Plan, folder: str) -> None:
    print(f"plan, into {folder}:")
    for part in plan.parts:
        print(f"  {part}")
    print(f"  about {plan.gigabytes:.3g} GB in all")
    for note in plan.notes:
        print(f"  note: {note}")


def run_check(plan: Plan, folder: str) -> int:
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
    plan = make_plan(wishes_of(args))
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
