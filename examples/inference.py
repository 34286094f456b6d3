# SPDX-License-Identifier: Apache-2.0
"""Videos by files of samples, in the form that Predict2.5 has them: .json (one sample, or a list), .jsonl, .yaml.

python examples/inference.py -i samples.json -o output/base --model 2B/post-trained
python examples/inference.py -i samples.jsonl -o output/base --model_size tiny --seed 3

    {"name": "pouring", "inference_type": "image2world", "prompt": "...", "input_path": "pouring.jpg", "seed": 1}

Paths in a file count from its folder. Flags of the same meaning, such as --seed, count more than what samples say.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.world_model.options import Settings, VideoForm, VideoRequest
from examples import video2world
from examples.video2world import INFERENCE_TYPES, Jobs, Program
from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, UserError, near, raised_as

GUIDANCE = 3.0  # the published default, of samples; the tiny model has none
FIELDS: dict[str, type] = {
    "name": str,
    "inference_type": str,
    "prompt": str,
    "prompt_path": str,
    "negative_prompt": str,
    "input_path": str,
    "seed": int,
    "guidance": float,
    "num_steps": int,
    "resolution": str,  # "height,width", or "none": the model's
    "num_output_frames": int,  # by default, the model's
    "enable_autoregressive": bool,
    "chunk_size": int,  # of frames; by default, the model's
    "chunk_overlap": int,
}
OVERRIDES = ("inference_type", "prompt", "negative_prompt", "input_path", "seed", "guidance", "num_steps")  # flags


def add_flags(add: Callable[..., Any]) -> None:
    add("-i", "--input_files", nargs="+", required=True, metavar="FILE", help="files of samples")
    add("-o", "--output_dir", required=True, metavar="DIR", help="where NAME.mp4 of each sample goes")
    keep = "go on with the other samples where one fails; then the exit code is 1"
    add("--keep_going", action=argparse.BooleanOptionalAction, default=True, help=keep)
    add("--skip_existing_output", dest="skip_existing", action="store_true", help="leave out samples that have a video")
    add("--experiment", default=None, help="no effect: weights record their configuration")


def settle(args: argparse.Namespace) -> None:
    if not (args.model or args.dit_path or args.model_size or args.random_weights):
        args.model = "2B/post-trained"
    if args.batch_input_json:
        raise ConfigError("--batch_input_json: requests are in the files of -i here.")


def plan(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    """Requests and settings of all samples; an error with every fault of every file."""
    (default,), settings = jobs
    assert isinstance(settings, Settings)
    default = replace(default, seed=0, prompt="")
    guidance = 0.0 if choice.model_size == "tiny" else GUIDANCE
    settings = replace(settings, sampling=replace(settings.sampling, guidance=guidance, num_steps=35))
    overrides = {name: value for name in OVERRIDES if (value := getattr(args, name)) is not None}
    made: list[tuple[VideoRequest, Settings]] = []
    problems: list[str] = []
    for place, path, sample in samples_in(args.input_files):
        try:
            made.append(job_of({**sample, **overrides}, path.parent, args, choice, (default, settings)))
        except (UserError, OSError, UnicodeDecodeError) as error:
            problems.append(f"{place}: {error}")
    names = [os.path.relpath(request.save_path, args.output_dir)[: -len(".mp4")] for request, _ in made]
    problems += [f"the name {name} stands twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if problems:
        raise DataError("The samples cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems[:20]))
    return [request for request, _ in made], [of_request for _, of_request in made]


def samples_in(paths: Sequence[str]) -> Iterator[tuple[str, Path, Mapping[str, Any]]]:
    """Place, file and values of each sample."""
    import yaml

    for path in map(Path, paths):
        with raised_as(DataError, f"-i {path} cannot be read as samples", OSError, ValueError, yaml.YAMLError):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".jsonl":
                found = [foreign_json.loads(line) for line in text.splitlines() if line.strip()]
            else:
                found = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else foreign_json.loads(text)
        samples = found if isinstance(found, list) else [found]
        if not samples or not all(isinstance(sample, dict) for sample in samples):
            raise DataError(f"-i {path} must hold a sample, {{name, inference_type, prompt, ...}}, or a list of them.")
        yield from ((f"{path}, sample {i}", path, sample) for i, sample in enumerate(samples))


def job_of(
    sample: Mapping[str, Any],
    folder: Path,
    args: argparse.Namespace,
    choice: Any,
    defaults: tuple[VideoRequest, Settings],
) -> tuple[VideoRequest, Settings]:
    """A sample as a request and its settings; raises for a field that is unknown, of another type, or missing."""
    request, settings = defaults
    for name, value in sample.items():
        if name not in FIELDS:
            raise ConfigError(f"unknown field '{name}'.{near(str(name), FIELDS)}")
        kinds = (int, float) if FIELDS[name] is float else (FIELDS[name],)
        if value is not None and type(value) not in kinds:  # exactly: true is no number
            raise ConfigError(f"{name} is {value!r}; {FIELDS[name].__name__} is expected")
    given = {name: value for name, value in sample.items() if value is not None}
    name, kind = given.get("name", ""), given.get("inference_type", "")
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"name is {name!r}; a file name below --output_dir is expected")
    if kind not in INFERENCE_TYPES:
        raise ConfigError(f"inference_type is {kind!r}; {', '.join(INFERENCE_TYPES)} are known")
    if "prompt" in given and "prompt_path" in given:
        raise ConfigError("it has prompt and prompt_path: leave one out")
    if "prompt_path" in given:
        given["prompt"] = (folder / given["prompt_path"]).read_text(encoding="utf-8").strip()
    if "prompt" not in given:
        raise ConfigError("it has neither prompt nor prompt_path")
    count = INFERENCE_TYPES[kind]
    choice.config.require_conditioning(count)
    if count and "input_path" not in given:
        raise ConfigError(f"{kind} needs an input_path")
    source = args.input_path or str(folder / given.get("input_path", ""))
    own = {key: given[key] for key in ("prompt", "negative_prompt", "seed") if key in given}
    request = replace(
        request,
        input_path=source if count else "",
        save_path=os.path.join(args.output_dir, f"{name}.mp4"),
        num_conditional_frames=count,
        form=form_of(given, args.num_gpus, choice.config),
        **own,
    )
    if not 1 <= (num_steps := given.get("num_steps", settings.sampling.num_steps)) <= 10_000:
        raise ConfigError(f"num_steps is {num_steps}; a number from 1 to 10000 is expected")
    guidance = float(given.get("guidance", settings.sampling.guidance))
    return request, replace(settings, sampling=replace(settings.sampling, guidance=guidance, num_steps=num_steps))


def form_of(given: Mapping[str, Any], num_gpus: int, config: Any) -> VideoForm:
    """Size, length and chunks of a sample. Lengths that no model makes at once, 1 + 4k frames, are cut from longer."""
    from cosmos_predict2.pipelines.video2world import check_num_gpus
    from cosmos_predict2.tokenizers.sizes import latent_frames, pixel_frames, size_problem

    size: Any = None
    if (resolution := given.get("resolution", "none")) != "none":
        size = tuple(int(side) if side.strip().isdigit() else 0 for side in resolution.split(","))
        if problem := size_problem("resolution", size):
            raise ConfigError(problem)
    is_long = given.get("enable_autoregressive", False)
    chunk, overlap = given.get("chunk_size" if is_long else "num_output_frames"), given.get("chunk_overlap", 1)
    chunk = pixel_frames(config.state_t) if chunk is None else chunk if is_long else 4 * -(-(chunk - 1) // 4) + 1
    num_frames = given.get("num_output_frames", chunk)
    if chunk < 5 or chunk % 4 != 1 or num_frames < 1 or (is_long and not (0 < overlap < chunk and overlap % 4 == 1)):
        raise ConfigError(
            f"num_output_frames {num_frames}, chunk_size {chunk}, chunk_overlap {overlap}: chunks and overlaps have 1 +"
            " 4k frames, a chunk 5 at least, and an overlap fewer than a chunk"
        )
    check_num_gpus(num_gpus, config.net.num_heads, latent_frames(chunk))
    return VideoForm(size, num_frames, chunk, overlap if is_long else None)


main = partial(
    video2world.main,
    program=Program(
        "Make videos by files of samples, in the form of Predict2.5.",
        add_flags,
        defaults={**dict.fromkeys(OVERRIDES), "num_gpus": int(os.environ.get("WORLD_SIZE", "1"))},
        older={
            "--checkpoint_path": "--dit_path",
            "--context_parallel_size": "--num_gpus",
            "--disable_guardrails": "--disable_guardrail",
            "--no_keep_going": "--no-keep_going",
            "--offload_guardrail_models": "--offload_guardrail",
        },
        settle=settle,
        plan=plan,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
