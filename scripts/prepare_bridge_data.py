# SPDX-License-Identifier: Apache-2.0
"""Make the Bridge data set for action-conditioned training: fetch the archive, check and unpack it, look it through."""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.prepare import bridge
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
The archive's folder opensource_robotdata/bridge becomes --out, with annotation/{train,val,test}/NAME.json and
videos/{train,val,test}/NAME/rgb.mp4. A command that was stopped goes on where it was.

examples:
  python -m scripts.prepare_bridge_data
  python -m scripts.prepare_bridge_data --source ~/downloads/bridge_train_data.tar.gz --out datasets/bridge
"""

parser = command_line.parser("scripts.prepare_bridge_data", __doc__, _EPILOG)
add = parser.add_argument
add("--source", default=bridge.URL, metavar="URL|FILE", help="the archive: an address, or a file that is here")
add("--out", type=command_line.local_folder, default=Path("datasets/bridge"), metavar="FOLDER", help="the data set")
add("--keep_archive", action="store_true", help="keep the archive that was fetched, beside --out")
command_line.common(add, "workers", "dry_run")


def run(args: argparse.Namespace) -> int:
    contents = bridge.prepare(args.source, args.out, **command_line.options_of(bridge.prepare, args))
    if args.dry_run:
        return 0
    counts = ", ".join(f"{count} {split}" for split, count in contents.recordings.items())
    log.info("%s: recordings: %s; %d frames in all", args.out, counts, contents.frames)
    for fault in contents.faults[:10]:
        log.error("%s", fault)
    if contents.faults:
        log.error("%d recordings have faults; skip_bad_samples=True of training passes them over", len(contents.faults))
    return int(bool(contents.faults))


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
