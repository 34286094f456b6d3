# SPDX-License-Identifier: Apache-2.0
"""Encode the clips of a data set once, into latents/NAME.safetensors, which training can read in place of them."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.tools.prepare.latent_cache import DTYPES, cache_latents
from imaginaire import command_line

log = logging.getLogger(__name__)

EPILOG = """\
A clip gets --windows_per_clip windows of --num_frames frames, evenly apart; training draws among them. Take as many
frames as the model has (93 for 16 fps, 61 for 10 fps, 13 for the tiny model); models of fewer can use them too.
Clips that have latents are left alone, so an interrupted run goes on when it is started again; a clip that was changed
is encoded anew. Several processes share the work with --shard 0/8 ... --shard 7/8, each with a device of its own.

Then train with dataloader_train=latents dataloader_train.dataset.dataset_dir=DIR.

examples:
  python -m scripts.cache_latents --data datasets/mine/train --num_frames 93 --size 432 768
  python -m scripts.cache_latents --data datasets/toy/train --tokenizer tiny --num_frames 13 --size 48 48
"""

parser = command_line.parser("scripts.cache_latents", __doc__, EPILOG, {"--dataset_path": "--data"})
add = parser.add_argument
add("--data", required=True, metavar="DIR", help="the folder with videos/")
add("--tokenizer", choices=("wan", "tiny"), default="wan", help="wan: of the released models; tiny: of the tiny ones")
add("--tokenizer_path", metavar="FILE", help="its weights (default: where the downloads put them)")
add("--num_frames", type=int, default=93, metavar="N", help="pixel frames of a window, 1 + 4k")
add("--size", type=int, nargs=2, default=(432, 768), metavar=("H", "W"), help="what clips are scaled to")
add("--windows_per_clip", type=int, default=4, metavar="N", help="fewer in clips that are too short for as many")
add("--fps", type=float, help="take the frames nearest to this rate (default: the clip's own)")
add("--stride", type=int, default=1, metavar="N", help="take every N-th frame")
add("--crop", choices=tuple(CROPS), default="stretch", help="scale to the size straight, or keep the shape and cut")
add("--dtype", choices=tuple(DTYPES), default="float16", help="of the stored numbers")
add("--decoder", default="auto", help="pyav, decord or torchcodec (default: pyav)")
add("--workers", type=command_line.at_least(0), default=2, metavar="N", help="processes that decode ahead")
command_line.common(add, "device", "shard", "dry_run")


def run(args: argparse.Namespace) -> int:
    import torch

    from cosmos_predict2.world_model.assembly import device_of

    device = torch.device(device_of(args.device))
    options = command_line.options_of(cache_latents, args, size=tuple(args.size), device=device)
    outcome = cache_latents(args.data, make_tokenizer(args.tokenizer, args.tokenizer_path), **options)
    if outcome.results:
        log.info("wrote the latents of %d clips to %s", len(outcome.results), Path(args.data) / "latents")
    return outcome.report("clips")


def make_tokenizer(name: str, path: str | None) -> Any:
    """The tokenizer as training has it."""
    from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline
    from cosmos_predict2.world_model.world_model import tokenizer_of

    node = get_cosmos_predict2_video2world_pipeline(model_size="tiny" if name == "tiny" else "2B").tokenizer
    if name == "tiny":
        node.weights = path
    else:
        node.tile_size = None  # tiles change latents a little
        node.vae_pth = path or node.vae_pth
    return tokenizer_of(node)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
