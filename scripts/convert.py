# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint of one layout into the other: four .pt files (standard) or torch.distributed.checkpoint folders
(dcp)."""

import argparse
import logging
import sys

from imaginaire import checkpoint_layout, storage
from imaginaire import log as logs
from imaginaire.checkpoint_layout import KINDS, CheckpointSet
from imaginaire.errors import CheckpointError, UserError

log = logging.getLogger(__name__)

_EPILOG = """\
SOURCE is a run's folder, its checkpoints folder, or one iteration in it (checkpoints/model/iter_000000500.pt or
checkpoints/iter_000000500). DESTINATION is a run's folder; the iteration is written below its checkpoints/, and its
latest_checkpoint.txt names it, so that a run there resumes from it.

example:
  python -m scripts.convert checkpoints/examples/minimal/minimal checkpoints/examples/minimal/as_dcp --to dcp
"""


def convert(source: str, destination: str, to: str) -> CheckpointSet:
    """Read a set and write it in the other layout; the written set."""
    found = checkpoint_layout.find_set(source)
    if faults := found.faults():
        raise CheckpointError(" ".join(faults))
    folder = storage.join(destination, "checkpoints")
    written = CheckpointSet(folder, checkpoint_layout.set_name(found.iteration, dcp=to == "dcp"))
    if any(written.has(kind) for kind in KINDS):
        raise CheckpointError(f"{folder} already has {written.name}. Choose another destination.")
    log.info("reading iteration %d (%.3g MB) from %s", found.iteration, found.bytes() / 1e6, found.folder)
    trees = {kind: found.read(kind) for kind in KINDS}
    write = checkpoint_layout.write_dcp if to == "dcp" else checkpoint_layout.write_standard
    write(written, trees)
    checkpoint_layout.write_pointer(written)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="what to read (a path or s3:// address)")
    parser.add_argument("destination", help="the run folder to write to")
    parser.add_argument("--to", choices=("standard", "dcp"), required=True, help="layout to write")
    args = parser.parse_args()
    logs.setup()
    try:
        written = convert(args.source, args.destination, args.to)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    log.info("wrote %s in %s", written.name, written.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
