# SPDX-License-Identifier: Apache-2.0
"""One clip or picture with its caption and its embedding: what they hold, and everything that is wrong with them.

Nothing here raises for bad data: what is found goes into a `ClipFacts`, which travels between processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cosmos_predict2.data import dataset_latents
from cosmos_predict2.data.video import clips, media
from cosmos_predict2.data.video_folder import read_caption
from cosmos_predict2.text.embeddings.folder import caption_hash, read_embedding
from cosmos_predict2.text.trained_text import encode_commands
from cosmos_predict2.tools.jobs import run_jobs
from imaginaire.errors import DataError, UserError
from imaginaire.findings import Finding, error

Job = TypeVar("Job")
Facts = TypeVar("Facts")


def fault(file: Path | str, kind: str, text: str) -> Finding:
    """Something wrong with a file: an error whose key is KIND/FILE."""
    return error(f"{kind}/{file}", text)


def kind_of(found: Finding) -> str:
    return found.key.partition("/")[0]


def file_of(found: Finding) -> str:
    return found.key.partition("/")[2]


@dataclass(frozen=True)
class ClipJob:
    """A clip to check; ``is_fast`` decodes the first and the last frame only."""

    stem: str
    path: Path
    caption: Path | None = None
    embedding: Path | None = None
    num_frames: int | None = None
    is_fast: bool = False
    encoder: str | None = None  # that the embedding should be of, as far as known
    num_tokens: int = 512
    width: int | None = None
    encoded: str | None = None  # hash of the encoded caption, by the record


@dataclass(frozen=True)
class ClipFacts:
    """Facts about a clip; a side of 0 is a clip that cannot be read."""

    stem: str
    path: str
    num_frames: int = 0
    fps: float = 0.0
    height: int = 0
    width: int = 0
    embedding: str = ""
    num_tokens: int = 0
    text_width: int = 0
    faults: list[Finding] = field(default_factory=list)


def check_all(check: Callable[[Job], Facts], jobs: list[Job], place: Path, workers: int | None) -> list[Facts]:
    """The findings of each job, in order; a check reports every problem, so none of them raises."""
    found = run_jobs(check, jobs, what=f"checking {place}", workers=workers)
    assert not found.faults, "a check raised in place of reporting"
    return found.results


def check_clip(job: ClipJob) -> ClipFacts:
    faults: list[Finding] = []
    info = _look(job, faults) or media.VideoInfo(0, 0.0, 0, 0)
    if info.height and job.num_frames is not None and info.num_frames < job.num_frames:
        message = f"{job.path} has {info.num_frames} frames, but training takes {job.num_frames}: take it out."
        faults.append(fault(job.path, "too_short", message))
    text = _caption(job, faults)
    rows = _embedding(job, text, faults)
    return ClipFacts(
        stem=job.stem,
        path=str(job.path),
        num_frames=info.num_frames,
        fps=info.fps,
        height=info.height,
        width=info.width,
        embedding=str(job.embedding) if rows is not None else "",
        num_tokens=len(rows) if rows is not None else 0,
        text_width=rows.shape[1] if rows is not None else 0,
        faults=faults,
    )


def _look(job: ClipJob, faults: list[Finding]) -> media.VideoInfo | None:
    """The clip after decoding it; a picture is a clip of one frame, and latents are those of their window."""
    try:
        if job.path.stat().st_size == 0:
            raise DataError(f"{job.path} is an empty file.")
        if job.path.suffix == dataset_latents.SUFFIX:
            return _look_at_latents(job.path)
        if job.path.suffix.lower() in media.IMAGE_SUFFIXES:
            _, height, width = media.read_image(job.path).shape
            return media.VideoInfo(1, 0.0, height, width)
        if not job.is_fast:
            return media.scan_video(job.path)
        info = media.probe_video(job.path)
        clips.read_frames(job.path, sorted({0, info.num_frames - 1}))
        return info
    except (UserError, OSError) as error:
        faults.append(fault(job.path, "unreadable", str(error)))
        return None


def _look_at_latents(path: Path) -> media.VideoInfo:
    record = dataset_latents.read_record(path.parent)
    if record is None:
        raise DataError(f"{path.parent} has no record of its tokenizer. Delete it and write the latents again.")
    with dataset_latents.open_latents(path) as latents:
        latents.require_video(path.parent.parent / "videos")
        for i in range(latents.num_windows):
            if not torch.isfinite(latents.window(i)[0]).all():
                raise DataError(f"{path} holds NaN or infinity. Delete it and encode the clip again.")
        return media.VideoInfo(record.num_frames, latents.fps, *record.size)


def _caption(job: ClipJob, faults: list[Finding]) -> str | None:
    if job.caption is None:
        return None
    try:
        return read_caption(job.caption)
    except DataError as error:
        faults.append(fault(job.caption, "caption", str(error)))
        return None


def _embedding(job: ClipJob, text: str | None, faults: list[Finding]) -> Tensor | None:
    """The rows of the embedding, if it can be read."""
    if job.embedding is None:
        return None

    def found(kind: str, message: str) -> None:
        faults.append(fault(job.embedding or "", kind, f"{job.embedding} {message}"))

    try:
        rows = read_embedding(job.embedding)
    except (UserError, OSError) as error:
        faults.append(fault(job.embedding, "embedding", str(error)))
        return None
    command = encode_commands(job.embedding.parent.parent, job.encoder or "", job.num_tokens)
    again = f"Delete it and encode its caption again: {command}"
    if not rows.any():
        found("embedding", f"holds nothing but zeros. {again}")
        return rows
    # The numbers of the bytes encoder are 0, +-1 and +-2; those of a network are anything.
    is_bytes = bool(((rows[0] == rows[0].round()) & (rows[0].abs() <= 2)).all())
    if job.width is not None and rows.shape[1] != job.width:
        message = f"has embeddings of width {rows.shape[1]}, the folder's encoder gives {job.width}. {again}"
        found("wrong_encoder", message)
    elif job.encoder is not None and is_bytes != job.encoder.startswith("bytes"):
        is_not = "" if is_bytes else "not "
        found("wrong_encoder", f"is {is_not}of the bytes encoder; the folder's is {job.encoder}. {again}")
    elif text is not None and job.encoded is not None and job.encoded != caption_hash(text):
        message = f"{job.caption} has changed since it was encoded to {job.embedding}. Encode it again: {command}"
        faults.append(fault(job.embedding, "caption_changed", message))
    return rows
