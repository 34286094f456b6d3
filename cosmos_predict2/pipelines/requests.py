# SPDX-License-Identifier: Apache-2.0
"""Requests for videos: read from a batch file, checked before anything heavy, carried out one by one, and recorded."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.data.video_folder import SAME_RATE
from cosmos_predict2.guardrail.runner import GuardrailRunner, require_safe
from cosmos_predict2.pipelines.video2world import AND, Video2WorldPipeline, brought_to_size, check_input, input_files
from cosmos_predict2.world_model.options import Settings, VideoRequest
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weight_files
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import ConfigError, DataError, UserError, near, raised_as

log = logging.getLogger(__name__)

BATCH_KEYS: dict[str, type] = {
    "input_video": str,
    "prompt": str,
    "output_video": str,
    "output_image": str,
    "negative_prompt": str,
    "seed": int,
    "num_conditional_frames": int,
    "compare_to": str,
    "start_frame_idx": int,
}
FIELDS = {
    "input_video": "input_path",
    "output_video": "save_path",
    "output_image": "save_path",
}  # of a request, where a key has another name
RECORDS = (".txt", ".json", ".yaml")  # written beside a video


def check_request(request: VideoRequest, contact_sheet: bool = False) -> None:
    """Raise for what can be known to be wrong: input, number of frames, seed, output."""
    if not request.prompt.strip():
        raise ConfigError("The prompt is empty. Describe with --prompt what should happen.")
    for name in ("prompt", "negative_prompt"):
        if re.search("[\ud800-\udfff]", getattr(request, name) or ""):  # bytes that are no characters
            raise ConfigError(f"--{name} is not UTF-8 text: {getattr(request, name)[:80]!r}.")
    if request.num_conditional_frames not in (0, 1, 5):
        raise ConfigError(f"num_conditional_frames is {request.num_conditional_frames}; it can be 0, 1 or 5.")
    if not 0 <= request.seed < 2**32:
        raise ConfigError(f"The seed is {request.seed}; it must be from 0 to {2**32 - 1}.")
    for path in input_files(request.input_path, request.form.num_views) if request.num_conditional_frames else ():
        check_input(path, request.num_conditional_frames, request.start_frame_idx)
    if request.compare_to:
        media.probe_video(request.compare_to)
    for path in input_files(request.edited_path, request.form.num_views) if request.edited_path else ():
        check_input(path, request.form.chunk_frames or 1, request.edited_start)
    suffixes = media.IMAGE_SUFFIXES if request.form.chunk_frames == 1 else media.WRITTEN_VIDEO_SUFFIXES
    media.check_writable(request.save_path, suffixes, flag="--save_path")
    check_overwrites(request, contact_sheet=contact_sheet)


def check_overwrites(request: VideoRequest, *others: str, contact_sheet: bool = False) -> None:
    """Raise where the video or a file written beside it would replace an input, or one of ``others``."""
    endings = (*RECORDS, ".png") if contact_sheet or request.compare_to else RECORDS
    stem = os.path.splitext(request.save_path)[0]
    outputs = [request.save_path, *(stem + ending for ending in endings)]
    inputs = [request.input_path, *request.input_path.split(AND), request.compare_to, request.edited_path]
    check_outputs(outputs, [*inputs, *others])


def check_outputs(outputs: Sequence[str], inputs: Iterable[str]) -> None:
    """Raise where one of the files that are written is one that is read."""
    written = [os.path.realpath(path) for path in outputs]
    for path in inputs:
        if path and os.path.realpath(path) in written:
            raise ConfigError(f"Output {outputs[0]} would replace {path}, which is read. Choose another name.")


def read_batch(path: str, defaults: VideoRequest, *, shares_input: bool = False) -> list[VideoRequest]:
    """The requests of a batch file: a JSON list of {input_video, prompt, output_video}, or JSON lines of them.

    Relative paths count from the working directory. What an entry does not name is taken from ``defaults``, its input
    where ``shares_input``; its ``output_video`` is ``output_<i>.mp4`` in the folder of the default.
    """
    with raised_as(DataError, f"The batch file {path} cannot be read as JSON", OSError, ValueError):
        text = Path(path).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()]
        entries = [foreign_json.loads(line) for line in lines] if path.endswith(".jsonl") else foreign_json.loads(text)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"The batch file {path} must hold a list of objects with input_video, prompt, output_video.")
    requests, problems = [], []
    for i, entry in enumerate(entries):
        try:
            requests.append(_request_of(entry, i, defaults, shares_input))
            check_overwrites(requests[-1], path)
        except ConfigError as error:
            problems.append(f"entry {i}: {error}")
    outputs = [os.path.normpath(request.save_path) for request in requests]
    repeated = sorted({name for name in outputs if outputs.count(name) > 1})
    problems += [f"{name} is the output of several entries" for name in repeated]
    if problems:
        raise DataError(f"The batch file {path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems[:20]))
    return requests


def _request_of(entry: Mapping[str, Any], number: int, defaults: VideoRequest, shares_input: bool) -> VideoRequest:
    """The request of a batch file's entry; null is as if the key were not there."""
    given: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in BATCH_KEYS:
            raise ConfigError(f"unknown key '{key}'.{near(key, BATCH_KEYS)}")
        if value is not None and type(value) is not BATCH_KEYS[key]:  # exactly: true and false are no numbers here
            raise ConfigError(f"{key} is {value!r}; {'a whole number' if BATCH_KEYS[key] is int else 'text'} is needed")
        if value is not None:
            given[FIELDS.get(key, key)] = value
    folder, ending = os.path.dirname(defaults.save_path), os.path.splitext(defaults.save_path)[1]
    output = os.path.join(folder, f"output_{number}{ending}")
    given["save_path"] = given.get("save_path") or output
    input_path = defaults.input_path if shares_input else ""
    request = replace(defaults, **{"input_path": input_path, "prompt": "", "compare_to": "", **given})
    if not request.prompt or not (request.input_path or request.num_conditional_frames == 0):
        raise ConfigError(f"no {'input_video' if request.prompt else 'prompt'}")
    return request


def run_all(
    make_pipeline: Callable[[], Video2WorldPipeline],
    requests: Sequence[VideoRequest],
    settings: Settings | Sequence[Settings],
    *,
    embeddings: Mapping[str, Tensor] | None = None,
    skip_existing: bool = False,
    guardrail: GuardrailRunner | None = None,
    keep_going: bool | None = None,
) -> int:
    """Carry the requests out; how many failed. The pipeline is built when all are checked, and only if it is needed.

    One request alone raises what is wrong with it; of several, each failure is logged and the others go on, or none
    where ``keep_going`` is off. Settings are for all, or one for each.
    """
    failed = skipped = 0

    @contextmanager
    def counted(request: VideoRequest, *kinds: type[Exception]) -> Iterator[None]:
        nonlocal failed
        try:
            yield
        except kinds as error:
            if not (len(requests) > 1 if keep_going is None else keep_going):
                raise
            failed += 1
            log.error("%s: %s", request.save_path, error)

    todo: list[tuple[VideoRequest, Settings]] = []
    for request, of_request in zip(requests, repeat(settings) if isinstance(settings, Settings) else settings):
        if skip_existing and os.path.exists(request.save_path):
            skipped += 1
            log.info("skipped: %s exists", request.save_path)
            continue
        with counted(request, UserError):
            check_request(request, of_request.contact_sheet)
            if guardrail is not None:
                require_safe(guardrail, request.prompt)
            todo.append((request, of_request))
    pipe: Any = make_pipeline() if todo else None
    for i, (request, of_request) in enumerate(todo, start=1):
        with counted(request, UserError, OSError, torch.OutOfMemoryError):
            seconds = generate_to_file(pipe, request, of_request, embeddings)
            log.info("saved %s (%d of %d, %.1f s)", request.save_path, i, len(todo), seconds)
    if len(requests) > 1:
        log.info("%d made, %d skipped, %d failed", len(requests) - skipped - failed, skipped, failed)
    return failed


def generate_to_file(
    pipe: Video2WorldPipeline, request: VideoRequest, settings: Settings, embeddings: Mapping[str, Tensor] | None = None
) -> float:
    """Make one video and write it with its records; the seconds that it took."""
    start = time.monotonic()
    video, refined = pipe(
        input_path=request.input_path,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        aspect_ratio=settings.aspect_ratio,
        num_conditional_frames=request.num_conditional_frames,
        seed=request.seed,
        return_prompt=True,
        options=settings.sampling,
        embeddings=embeddings,
        start_frame_idx=request.start_frame_idx,
        form=request.form,
        edited_path=request.edited_path,
        edited_start=request.edited_start,
    )
    if not torch.isfinite(video).all():
        raise DataError("The network gave values that are not finite. Are these the weights of this model?")
    frames = to_uint8(video[0]).cpu()
    seconds = time.monotonic() - start
    write_records(request, settings, refined, seconds, frames)
    storage.write_text(f"{os.path.splitext(request.save_path)[0]}.yaml", to_yaml(pipe.config))
    if settings.contact_sheet or request.compare_to:
        write_contact_sheet(request, frames, settings.fps, pipe.config.input_crop)
    if request.form.chunk_frames == 1:
        media.write_image(request.save_path, frames[:, 0])
        return seconds
    media.write_video(request.save_path, frames, settings.fps)  # last: where it is, all the rest is
    return seconds


def write_records(
    request: VideoRequest, settings: Settings, refined: str | list[str], seconds: float, frames: Tensor
) -> None:
    """``<stem>.txt`` with the prompts, ``<stem>.json`` with everything that repeats the video."""
    stem = os.path.splitext(request.save_path)[0]
    sections = [("Prompt", request.prompt), ("Negative Prompt", request.negative_prompt)]
    if isinstance(refined, str):
        sections += [("Refined Prompt", refined)]
    else:
        sections += [(f"Refined Prompt for chunk {i}", text) for i, text in enumerate(refined)]
    storage.write_text(f"{stem}.txt", "".join(f"[{title}]\n{text}\n\n" for title, text in sections))
    _, num_frames, height, width = frames.shape
    record = {**asdict(request), **settings.record(), "refined_prompt": refined}
    record |= {"num_frames": num_frames, "height": height, "width": width, "seconds": round(seconds, 3)}
    record["frames_sha256"] = hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()  # before the encoder
    storage.write_text(f"{stem}.json", json.dumps(record, indent=2) + "\n")


def write_contact_sheet(request: VideoRequest, frames: Tensor, fps: float, crop: str = "center") -> str:
    """``<stem>.png``: frames of the result, under the true clip's of the same moments, where there is one."""
    rows, labels = [frames], ["generated"]
    if request.compare_to:
        true, rate = media.read_video(request.compare_to)
        first, step = _first_true(request, true.shape[1]), rate / fps
        step = 1 if abs(step - 1) < SAME_RATE else step  # else the true frames nearest in time
        moments = [first + round(k * step) for k in range(frames.shape[1])]
        true = true[:, [moment for moment in moments if moment < true.shape[1]]]
        true = brought_to_size(true, (frames.shape[2], frames.shape[3]), crop, "compare_to")
        rows, labels = [true, frames], ["true", "generated"]
    path = f"{os.path.splitext(request.save_path)[0]}.png"
    media.write_image(path, media.contact_sheet(rows, labels, columns=min(8, frames.shape[1])))
    log.info("contact sheet: %s", path)
    return path


def _first_true(request: VideoRequest, num_frames: int) -> int:
    """The true frame beside the first one generated: where the true clip is the input, the one that was taken of it."""
    given = request.num_conditional_frames
    if not given or os.path.realpath(request.compare_to) != os.path.realpath(request.input_path):
        return 0
    first = num_frames - given if request.start_frame_idx is None else request.start_frame_idx
    if first + given >= num_frames:
        log.warning("compare_to: %s ends where the video begins: try --start_frame_idx 0", request.compare_to)
    return first


def fingerprint(path: str) -> str:
    """Name, size and time of a file of weights, for the records; of a run, those of its newest file."""
    if not path:
        return "random"
    try:
        path = weight_files.latest(path)
        found: Any = os.stat(path)
    except OSError:
        return path
    return f"{path} ({found.st_size} bytes, {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(found.st_mtime))} UTC)"
