# SPDX-License-Identifier: Apache-2.0
"""Fetch the GR00T GR1 clips with their metadata.csv, and put them where training reads them."""

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file also runs as python scripts/prepare_groot_data.py

from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_csv
from cosmos_predict2.tools.prepare.hub_videos import GROOT, prepare
from imaginaire import command_line

log = logging.getLogger(__name__)

_EPILOG = """\
DIR/videos/NAME.mp4 and DIR/metadata.csv are written; the prompts are in the csv. The data has its own terms: see
https://huggingface.co/datasets/nvidia/GR1-100. HF_ENDPOINT names a mirror of the hub. A run that was interrupted goes
on when it is started again.

example:
  python -m scripts.prepare_groot_data
  python -m scripts.get_t5_embeddings_from_groot_dataset --data datasets/benchmark_train/gr1
"""


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.prepare_groot_data", __doc__, _EPILOG, {"--dataset_path": "--out"})
    add = parser.add_argument
    add("--out", default="datasets/benchmark_train/gr1", metavar="DIR", help="where the data set goes")
    add("--download_dir", default="datasets/benchmark_train/hf_gr1", metavar="DIR", help="where files arrive first")
    add("--repo_id", default=GROOT.repo_id, metavar="NAME", help="the data repository")
    add("--revision", metavar="COMMIT", help="a branch or commit of it (default: the newest)")
    add("--dry_run", action="store_true", help="log what would be fetched, and fetch nothing")
    return parser


def run(args: argparse.Namespace) -> int:
    dataset = Path(args.out)
    videos = prepare(
        GROOT,
        dataset,
        Path(args.download_dir),
        repo_id=args.repo_id,
        revision=args.revision,
        dry_run=args.dry_run,
    )
    if args.dry_run:
        return 0
    captions = captions_of_csv(dataset / "metadata.csv")
    prompts = dict(captions.results)
    log.info("%s: %d clips, %d prompts", dataset, len(videos), len(prompts))
    stems = {path.stem for path in videos}
    for what, names in (("clips have no prompt", stems - set(prompts)), ("prompts have no clip", set(prompts) - stems)):
        if names:
            log.warning("%d %s: %s", len(names), what, ", ".join(sorted(names)[:5]))
    if not stems & set(prompts):
        log.error("no clip of %s has a prompt in %s", dataset, dataset / "metadata.csv")
        return 1
    log.info(
        "next: python -m scripts.get_t5_embeddings_from_groot_dataset --data %s --meta_csv %s",
        dataset,
        dataset / "metadata.csv",
    )
    return captions.report("rows")


def main() -> int:
    return command_line.main(_parser(), run)


if __name__ == "__main__":
    sys.exit(main())
