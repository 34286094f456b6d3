# SPDX-License-Identifier: Apache-2.0
"""Make LIBERO's demonstrations (HDF5 files, by suite) ready for training, fetching them first where asked."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare import libero
from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_EPILOG = f"""\
forms:
  bridge   clips and annotations with poses in --out, for ActionConditionedDataset: actions are pose differences
  keep     the HDF5 files as they are, for LiberoDataset: actions are the controller's. Writes the captions
           (--source/metas/<task>.txt), from which get_t5_embeddings makes embeddings

Both write dataset_statistics.json (of the controller's actions) and dataset.json. A command that was stopped goes on
where it was.

examples:
  python -m scripts.prepare_libero_data --repo_id --suites libero_spatial    # from {libero.REPOSITORY}
  python -m scripts.prepare_libero_data --source LIBERO/datasets --out datasets/libero_bridge
  python -m scripts.prepare_libero_data --source LIBERO/datasets --form keep
"""

default = libero.LiberoSettings()
parser = command_line.parser("scripts.prepare_libero_data", __doc__, _EPILOG)
add = parser.add_argument
add("--source", type=Path, default=Path("datasets/libero"), metavar="FOLDER", help="where the suites lie, or go")
fetched = f"fetch the suites from this repository of the hub first (without a name: {libero.REPOSITORY})"
add("--repo_id", nargs="?", const=libero.REPOSITORY, metavar="REPO", help=fetched)
add("--suites", nargs="+", metavar="SUITE", help="which suites (default: all that lie in --source)")
add("--form", choices=libero.FORMS, default=default.form, help="what to make")
add("--out", type=command_line.local_folder, default=Path("datasets/libero_bridge"), help="of the form bridge")
add("--cameras", nargs="+", default=list(default.cameras), metavar="CAMERA", help="which cameras (bridge)")
add("--no_rotate", action="store_true", help="leave the pictures upside down, as they are stored (bridge)")
of_val = "of each task one demonstration in so many is for validation; 0: none"
add("--val_every", type=int, default=default.val_every, metavar="N", help=of_val)
command_line.common(add, "workers", "dry_run")


def run(args: argparse.Namespace) -> int:
    suites = tuple(args.suites) if args.suites else None
    if args.form == "keep" and args.no_rotate:
        raise ConfigError("--no_rotate belongs to --form bridge: LiberoDataset has rotate=False instead.")
    settings = libero.LiberoSettings(args.form, suites, tuple(args.cameras), not args.no_rotate, args.val_every)
    if args.repo_id:
        libero.download(args.repo_id, args.source, suites, dry_run=args.dry_run)
        if args.dry_run:
            return 0
    outcome = libero.prepare(args.source, args.out, settings, workers=args.workers, dry_run=args.dry_run)
    what = "tasks" if args.form == "keep" else "demonstrations"
    if outcome.results and not args.dry_run:
        log.info("%s: %d %s are ready", args.source if args.form == "keep" else args.out, len(outcome.results), what)
    return outcome.report(what)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
