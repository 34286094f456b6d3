# SPDX-License-Identifier: Apache-2.0
"""Requests for videos: read from a batch file, checked before anything heavy, carried out one by one, and recorded."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.data.video_folder import SAME_RATE
from cosmos_predict2.guardrail.runner import GuardrailRunner, require_safe
from cosmos_predict2.pipelines.inputs import brought_to_size, check_input
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.world_model.sampling import SamplingOptions, to_uint8
from imaginaire import storage
from imaginaire.checkpoint import weight_files
from imaginaire.config.lazy_yaml import to_yaml
from imaginaire.errors import ConfigError, DataError, UserError, near

log = logging.getLogger(__name__)

BATCH_KEYS = (
    "input_video",
    "prompt",
    "output_video",
    "negative_prompt",
    "seed",
    "num_conditional_frames",
    "compare_to",
    "start_frame_idx",
)
BATCH_NUMBERS = ("seed", "num_conditional_frames", "start_frame_idx")
RECORDS = (".txt", ".json", ".yaml")  # written beside a video


@dataclass(frozen=True)
class Request:
    """One video to make."""

    input_path: str
    prompt: str
    save_path: str
    negative_prompt: str = ""
    num_conditional_frames: int = 1  # pixel frames; 0: the input is not read
    seed: int = 0
    compare_to: str = ""  # a true clip to show beside the result, on a contact sheet
    start_frame_idx: int | None = None  # of an input clip the frame to begin with; None: its last ones

    def check(self, contact_sheet: bool = False) -> None:
        """Raise for what can be known to be wrong: input, number of frames, seed, output."""
        if not self.prompt.strip():
            raise ConfigError("The prompt is empty. Say with --prompt what should happen.")
        if self.num_conditional_frames not in (0, 1, 5):
            raise ConfigError(f"num_conditional_frames is {self.num_conditional_frames}; it can be 0, 1 or 5.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"The seed is {self.seed}; it must be from 0 to {2**32 - 1}.")
        if self.num_conditional_frames:
            check_input(self.input_path, self.num_conditional_frames, self.start_frame_idx)
        if self.compare_to:
            media.probe_video(self.compare_to)
        media.check_writable(self.save_path, media.WRITTEN_VIDEO_SUFFIXES, flag="--save_path")
        self.check_overwrites(contact_sheet=contact_sheet)

    def check_overwrites(self, *others: str, contact_sheet: bool = False) -> None:
        """Raise where the video or a file written beside it would replace an input, or one of ``others``."""
        stem, suffix = os.path.splitext(os.path.realpath(self.save_path))
        sheet = [".png"] if contact_sheet or self.compare_to else []
        endings = (suffix, *RECORDS, *sheet)
        for path in (self.input_path, self.compare_to, *others):
            if path and os.path.realpath(path) in [stem + ending for ending in endings]:
                raise ConfigError(
                    f"Output {self.save_path} would replace {path}, which is read: {', '.join(endings)} files of the"
                    " output's name are written. Choose another name."
                )


@dataclass(frozen=True)
class Settings:
    """What all requests of a run share; recorded beside every result."""

    aspect_ratio: str
    fps: float
    weights: str  # path and fingerprint of the network's weights
    sampling: SamplingOptions
    contact_sheet: bool = False

    def record(self) -> dict[str, Any]:
        """All of it as plain values, those of sampling among them."""
        return {key: value for key, value in asdict(self).items() if key != "sampling"} | self.sampling.record()


def read_batch(path: str, defaults: Request) -> list[Request]:
    """The requests of a batch file: a JSON list of {input_video, prompt, output_video}, or JSON lines of them.

    Relative paths count from the working directory. What an entry does not say is taken from ``defaults``; its
    ``output_video`` is ``output_<i>.mp4`` in the folder of the default.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The batch file {path} cannot be read: {error}.") from error
    try:
        entries = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if path.endswith(".jsonl")
            else json.loads(text)
        )
    except json.JSONDecodeError as error:
        raise DataError(f"The batch file {path} is not JSON: {error}.") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"The batch file {path} must hold a list of objects, each with {', '.join(BATCH_KEYS[:3])}.")
    if not entries:
        raise DataError(f"The batch file {path} holds no entries.")
    folder = os.path.dirname(defaults.save_path)
    requests, problems = [], []
    for i, entry in enumerate(entries):
        if unknown := [key for key in entry if key not in BATCH_KEYS]:
            problems.append(f"entry {i}: unknown key '{unknown[0]}'.{near(unknown[0], BATCH_KEYS)}")
            continue
        needed = ["input_video", "prompt"]
        if entry.get("num_conditional_frames", defaults.num_conditional_frames) == 0:
            needed.remove("input_video")  # it begins with the prompt alone
        if missing := [key for key in needed if not entry.get(key)]:
            problems.append(f"entry {i}: no {' and no '.join(missing)}")
            continue
        given = {key: value for key, value in entry.items() if value is not None}  # null: as if it were not there
        if wrong := [key for key, value in given.items() if not _is_of_kind(key, value)]:
            kinds = ", ".join(f"{key} must be {_kind(key)}, not {given[key]!r}" for key in wrong)
            problems.append(f"entry {i}: {kinds}")
            continue
        request = Request(
            input_path=given.get("input_video", ""),
            prompt=given["prompt"],
            save_path=given.get("output_video") or os.path.join(folder, f"output_{i}.mp4"),
            negative_prompt=given.get("negative_prompt", defaults.negative_prompt),
            num_conditional_frames=given.get("num_conditional_frames", defaults.num_conditional_frames),
            seed=given.get("seed", defaults.seed),
            compare_to=given.get("compare_to", ""),
            start_frame_idx=given.get("start_frame_idx", defaults.start_frame_idx),
        )
        try:
            request.check_overwrites(path)
        except ConfigError as error:
            problems.append(f"entry {i}: {error}")
        requests.append(request)
    outputs = [os.path.normpath(request.save_path) for request in requests]
    problems += [
        f"{name} is the output of several entries" for name in sorted({n for n in outputs if outputs.count(n) > 1})
    ]
    if problems:
        raise DataError(f"The batch file {path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems[:20]))
    return requests


def _kind(key: str) -> str:
    return "a whole number" if key in BATCH_NUMBERS else "text"


def _is_of_kind(key: str, value: Any) -> bool:
    return type(value) is (int if key in BATCH_NUMBERS else str)  # exactly: true and false are no numbers here


def run_all(
    make_pipeline: Callable[[], Video2WorldPipeline],
    requests: Sequence[Request],
    settings: Settings,
    *,
    embeddings: Mapping[str, Tensor] | None = None,
    skip_existing: bool = False,
    guardrail: GuardrailRunner | None = None,
) -> int:
    """Carry the requests out; how many failed. The pipeline is built when the first request needs it.

    With a guardrail, refused prompts fail before that.

    One request alone raises what is wrong with it; of several, each failure is logged and the others go on.
    """
    failed = skipped = made = 0
    todo: list[Request] = []
    for request in requests:
        if skip_existing and os.path.exists(request.save_path):
            skipped += 1
            log.info("skipped: %s exists", request.save_path)
            continue
        try:
            request.check(settings.contact_sheet)
            if guardrail is not None:
                require_safe(guardrail, request.prompt)
        except UserError as error:
            if len(requests) == 1:
                raise
            failed += 1
            log.error("%s: %s", request.save_path, error)
            continue
        todo.append(request)
    pipe = make_pipeline() if todo else None
    for i, request in enumerate(todo, start=1):
        assert pipe is not None
        try:
            seconds = generate_to_file(pipe, request, settings, embeddings)
        except (UserError, OSError, torch.OutOfMemoryError) as error:
            if len(requests) == 1:
                raise
            failed += 1
            log.error("%s: %s", request.save_path, error)
            continue
        made += 1
        log.info("saved %s (%d of %d, %.1f s)", request.save_path, i, len(todo), seconds)
    if len(requests) > 1:
        log.info("%d made, %d skipped, %d failed", made, skipped, failed)
    return failed


def generate_to_file(
    pipe: Video2WorldPipeline, request: Request, settings: Settings, embeddings: Mapping[str, Tensor] | None = None
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
    )
    if not torch.isfinite(video).all():
        raise DataError("The network gave values that are not finite. Are these the weights of this model?")
    frames = to_uint8(video[0]).cpu()
    seconds = time.monotonic() - start
    write_records(request, settings, refined, seconds, frames)
    _write_text(f"{os.path.splitext(request.save_path)[0]}.yaml", to_yaml(pipe.config))
    if settings.contact_sheet or request.compare_to:
        write_contact_sheet(request, frames, settings.fps, pipe.config.input_crop)
    media.write_video(request.save_path, frames, settings.fps)  # last: where it is, all the rest is
    return seconds


def write_records(request: Request, settings: Settings, refined: str, seconds: float, frames: Tensor) -> None:
    """``<stem>.txt`` with the prompts, ``<stem>.json`` with everything that repeats the video."""
    stem = os.path.splitext(request.save_path)[0]
    sections = [("Prompt", request.prompt), ("Negative Prompt", request.negative_prompt), ("Refined Prompt", refined)]
    _write_text(f"{stem}.txt", "".join(f"[{title}]\n{text}\n\n" for title, text in sections))
    _, num_frames, height, width = frames.shape
    record = {**asdict(request), **settings.record(), "refined_prompt": refined}
    record |= {"num_frames": num_frames, "height": height, "width": width, "seconds": round(seconds, 3)}
    record["frames_sha256"] = hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()  # before the encoder
    _write_text(f"{stem}.json", json.dumps(record, indent=2) + "\n")


def write_contact_sheet(request: Request, frames: Tensor, fps: float, crop: str = "center") -> str:
    """``<stem>.png``: frames of the result, under the true clip's of the same moments, where there is one."""
    rows, labels = [frames], ["generated"]
    if request.compare_to:
        true, rate = media.read_video(request.compare_to)
        first, step = _first_true(request, true.shape[1]), rate / fps
        if abs(step - 1) < SAME_RATE:
            step = 1
        else:
            told = "compare_to: %s has %g frames per second, the video %g: shown are the true frames nearest in time"
            log.info(told, request.compare_to, rate, fps)
        moments = [first + round(k * step) for k in range(frames.shape[1])]
        true = true[:, [moment for moment in moments if moment < true.shape[1]]]
        true = brought_to_size(true, (frames.shape[2], frames.shape[3]), crop, "compare_to")
        rows, labels = [true, frames], ["true", "generated"]
    path = f"{os.path.splitext(request.save_path)[0]}.png"
    media.write_image(path, media.contact_sheet(rows, labels, columns=min(8, frames.shape[1])))
    log.info("contact sheet: %s", path)
    return path


def _first_true(request: Request, num_frames: int) -> int:
    """The frame of the true clip that goes with the first one generated: where it is the input, the one that was taken,
    else its first."""
    given = request.num_conditional_frames
    if not given or os.path.realpath(request.compare_to) != os.path.realpath(request.input_path):
        return 0
    first = num_frames - given if request.start_frame_idx is None else request.start_frame_idx
    if first + given >= num_frames:
        log.warning(
            "compare_to: the video begins at the end of %s, behind which nothing is true: start_frame_idx 0 begins at"
            " its first frame",
            request.compare_to,
        )
    return first


def _write_text(path: str, text: str) -> None:
    storage.write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def fingerprint(path: str) -> str:
    """Which weights these are, for the records: name, size and time of what lies there; of a run, its newest file."""
    if not path:
        return "random"
    try:
        path = weight_files.latest(path)
        found: Any = os.stat(path)
    except OSError:
        return path
    return f"{path} ({found.st_size} bytes, {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(found.st_mtime))} UTC)"
