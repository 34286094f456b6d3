# SPDX-License-Identifier: Apache-2.0
"""Look through a data set before training on it: counts, sizes, rates, and every file that is missing or broken."""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.check.dataset import Requirements, as_json, as_text, check_dataset
from imaginaire import command_line, storage
from imaginaire.errors import ConfigError

CONFIG = "cosmos_predict2/configs/base/config.py"

_EPILOG = """\
Forms: folders of clips (videos/, metas/, t5_xxl/), of pictures (images/), of several cameras (videos/<camera>/), of
recordings (annotation/, videos/), of cached latents (latents/), LeRobot data sets (meta/info.json), and folders with
these in train/ and val/. Every frame of every clip is decoded, with --fast the first and the last one. Of actions a
table shows name, range and statistics of each number; what they change is looked for in states and pictures (classic
faults of recordings: documentations/your_data.md). Exit code: 0 without faults, 1 with faults, 2 where nothing can
be checked.

examples:
  python -m scripts.check_dataset datasets/NAME/train --num_frames 93 --size 432 768
  python -m scripts.check_dataset datasets/NAME --experiment predict2_video2world_training_2b_video2world_data
  python -m scripts.check_dataset datasets/NAME --text_encoder t5 --json check.json
"""

parser = command_line.parser("scripts.check_dataset", __doc__, _EPILOG, {"--video_size": "--size"})
add = parser.add_argument
add("folder", metavar="DIR", help="the data set, or a folder of its train/ and val/")
add("--experiment", metavar="NAME", help="check for it: frames, size, and the text of its model")
add("--config", metavar="FILE", default=CONFIG, help="where the experiment is")
add("--num_frames", type=int, help="frames that training takes; a shorter clip is a fault")
add("--size", dest="video_size", type=int, nargs=2, metavar=("H", "W"), help="of training; other shapes are noted")
add("--fps", type=float, help="the rate that clips should have (default: the most frequent one)")
add("--any_fps", action="store_true", help="clips may differ in rate, as training with dataset.fps=RATE allows")
add("--text_encoder", metavar="NAME", help="the encoder that the embeddings should be of: t5, bytes, ...")
add("--text_width", type=int, metavar="N", help="numbers per token that the model takes (2B, 14B: 1024; tiny: 64)")
add("--num_tokens", type=int, metavar="N", help="tokens of a text that training reads (default: the experiment's)")
add("--no_embeddings", dest="needs_embeddings", action="store_const", const=False, help="embeddings may be missing")
add("--fast", dest="is_fast", action="store_true", help="decode only the first and the last frame of each clip")
add("--json", type=command_line.file_to_write, metavar="FILE", help="write all that was found to this file too")
add("--workers", type=command_line.at_least(0), help="processes (default: one per core, or none for little work)")


def run(args: argparse.Namespace) -> int:
    import attrs

    flags = {field.name: getattr(args, field.name) for field in attrs.fields(Requirements)}
    found = of_experiment(args.config, args.experiment) if args.experiment else {}
    requirements = Requirements(**found | {name: value for name, value in flags.items() if value is not None})
    report = check_dataset(Path(args.folder), requirements)
    print(as_text(report))
    if args.json:
        storage.write_json(args.json, as_json(report))
    return int(bool(report.all_faults()))


def of_experiment(config_path: str, name: str) -> dict[str, Any]:
    """The demands of an experiment's model and data set on a folder of clips, as arguments of `Requirements`."""
    from cosmos_predict2.models.text import encoder_for, network_text_width
    from cosmos_predict2.text.trained_text import parse_name
    from cosmos_predict2.tokenizers.sizes import pixel_frames
    from imaginaire.config.compose import compose
    from imaginaire.training.preflight import data_sets

    config = compose(config_path, [f"experiment={name}"])
    model = config.model["config"] if config.model is not None and "config" in config.model else {}
    if "pipe_config" not in model or model["pipe_config"]["net"] is None:
        raise ConfigError(f"--experiment {name} has no model of videos: there is nothing to check a data set for.")
    data = next((one for one in data_sets(config.dataloader_train) if "num_frames" in one), {})
    size = data.get("video_size") or ([data["size"]] * 2 if "size" in data else None)
    found: dict[str, Any] = {
        "num_frames": pixel_frames(model["pipe_config"]["state_t"]),
        "video_size": None if size is None else (int(size[0]), int(size[1])),
    }
    text = model.get("text") or {}
    if text.get("encoder") is not None or text.get("constant_path"):
        return {**found, "needs_embeddings": False}  # captions are encoded in training
    width = network_text_width(model["pipe_config"]["net"])
    found |= {"text_width": width, "text_encoder": parse_name(encoder_for(width)).kind}
    if "dataset_dir" in data:  # a folder of clips as this one
        found["num_tokens"] = int(data["num_tokens"])
        found["text_encoder"] = data.get("text_encoder") or found["text_encoder"]
    return found


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
