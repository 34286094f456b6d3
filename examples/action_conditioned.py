# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a folder of recordings by a file of settings, in the form that Predict2.5 has them.

python examples/action_conditioned.py -i settings.json -o results/action2world --dit_path FILE

    {"name": "bridge", "input_root": "datasets/bridge", "input_json_sub_folder": "annotation/test", "chunk_size": 12,
     "guidance": 0, "resolution": "256,320", "start": 0, "end": 2, "fps_downsample_ratio": 1, "save_fps": 20, ...}

Every key but ``name`` is a flag of examples/video2world_action.py, which does the work; further flags may follow. A
list is written as its numbers with commas, [256, 320] as "256,320". A file may come from anywhere: code that it names
as ``action_load_fn`` is run with --trust_action_load_fn only.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from examples import video2world_action
from examples.video2world_action import parse
from imaginaire import foreign_json
from imaginaire.command_line import Help, Parser
from imaginaire.errors import ConfigError, UserError, near, raised_as

MODEL = "robot/action-cond"  # the published name, after a size
UNUSED = {"name", "inference_type", "reverse", "model", "output_dir"}  # say nothing that changes a video here
DEFAULT_LOADERS = ("cosmos_predict2.action_conditioned.load_default_action_fn",)  # what is done anyway
DEFAULTS = {"save_fps": 20, "action_source": "state"}  # where they differ from those of video2world_action.py


def flags_of(settings: dict[str, Any], source: str, *, is_trusted: bool = False) -> list[str]:
    """The flags of video2world_action.py for the keys of a file of settings; of a trusted one, its code too."""
    known = {key: value for key, value in vars(parse([])).items() if key != "import"}  # code, of the command line alone
    flags: list[str] = []
    if not str(settings.get("model") or MODEL).endswith(MODEL):
        raise ConfigError(f"{source} has the model {settings['model']}, which is not here; only {MODEL} is.")
    for key, value in {**DEFAULTS, **settings}.items():
        if key in UNUSED or value is None or (key == "action_load_fn" and value in DEFAULT_LOADERS):
            continue
        if key not in known:
            raise ConfigError(f"{source} has the key '{key}'.{near(key, known)}")
        if key == "action_load_fn" and value and not is_trusted:
            raise ConfigError(
                f"{source} has action_load_fn {value}, code that would be run. Where you know it, add"
                " --trust_action_load_fn."
            )
        if isinstance(known[key], bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{source}: '{key}' is {json.dumps(value)}; true or false is expected.")
            flags += [f"--{key}"] * value
        else:
            items = value if isinstance(value, list) and isinstance(known[key], list) else [value]
            flags += [f"--{key}={text_of(item)}" for item in items]
    return flags


def text_of(value: Any) -> str:
    """A value as a flag has it: a list with commas, an object as JSON."""
    if isinstance(value, list):
        return ",".join(map(text_of, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def read_settings(path: str) -> dict[str, Any]:
    with raised_as(ConfigError, f"-i {path} cannot be read as settings", OSError, ValueError):
        return foreign_json.load_object(Path(path))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=Help, allow_abbrev=False)
    parser.add_argument("-i", "--input-files", nargs="+", required=True, metavar="FILE", help="files of settings")
    parser.add_argument("-o", "--output-dir", default=None, metavar="DIR", help="where the videos go (save_root)")
    parser.add_argument(
        "--trust_action_load_fn", action="store_true", help="run the code that settings name as action_load_fn"
    )
    args, others = parser.parse_known_args(arguments)
    try:
        jobs = [flags_of(read_settings(path), path, is_trusted=args.trust_action_load_fn) for path in args.input_files]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = [] if args.output_dir is None else ["--save_root", args.output_dir]
    return max([video2world_action.main([*flags, *output, *others]) for flags in jobs])


if __name__ == "__main__":
    sys.exit(main())
