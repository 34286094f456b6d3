# SPDX-License-Identifier: Apache-2.0
"""Captions for clips by any captioner: a command that is given a clip and prints what is to be seen in it.

``metas/<stem>.txt`` is written when the command is done with a clip, so what was interrupted goes on there.
"""

import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cosmos_predict2.data.video.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import files_by_stem, require_files
from cosmos_predict2.tools.jobs import Outcome, run_jobs
from cosmos_predict2.tools.prepare.records import write_text
from imaginaire.errors import ConfigError, DataError, raised_as

log = logging.getLogger(__name__)

PLACE = "{video}"
_TAIL = 300  # characters of a failed command's last words
_LONGEST = 100_000  # characters of a caption; beyond that a captioner prints something else


@dataclass(frozen=True)
class CaptionJob:
    clip: Path
    target: Path
    command: tuple[str, ...]
    timeout: float
    retries: int


def parse_command(command: str) -> tuple[str, ...]:
    """The words of the command; no shell will read them."""
    with raised_as(ConfigError, f"--command {command!r} cannot be split into words", ValueError):
        words = tuple(shlex.split(command))
    if not words or not any(PLACE in word for word in words):
        raise ConfigError(
            f"--command {command!r} has no {PLACE}: write it where the clip goes, as in 'python captioner.py {PLACE}'."
        )
    if PLACE not in words[0] and shutil.which(words[0]) is None:
        raise ConfigError(
            f"--command names the program '{words[0]}', which is not found. There is no shell between; for pipes and"
            f""" variables write sh -c '... "$1" ...' sh {PLACE}."""
        )
    return words


def plan(
    dataset: Path, command: tuple[str, ...], *, timeout: float, retries: int, overwrite: bool = False
) -> list[CaptionJob]:
    """The clips of ``videos/`` (or, where there are none, pictures of ``images/``) that have no caption yet."""
    clips = files_by_stem(dataset / "videos", VIDEO_SUFFIXES) or files_by_stem(dataset / "images", IMAGE_SUFFIXES)
    if not clips:
        clips = require_files(dataset / "videos", VIDEO_SUFFIXES, "clips")
    jobs = [
        CaptionJob(clip, dataset / "metas" / f"{stem}.txt", command, timeout, retries) for stem, clip in clips.items()
    ]
    todo = [job for job in jobs if overwrite or not _has_text(job.target)]
    if kept := len(jobs) - len(todo):
        log.info("%d of %d have a caption already", kept, len(jobs))
    return todo


def caption_clips(jobs: list[CaptionJob], workers: int = 1) -> Outcome[str]:
    """Run the command for each clip and write its caption."""
    return run_jobs(_caption, jobs, what="captions", workers=workers, in_threads=True)


def _has_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().strip())
    except FileNotFoundError:
        return False


def _caption(job: CaptionJob) -> str:
    for tries_left in range(job.retries, -1, -1):
        try:
            caption = _ask(job)
            break
        except DataError as error:
            if tries_left == 0:
                raise
            log.warning("%s Trying again.", error)
    write_text(job.target, f"{caption}\n")
    return caption


def _ask(job: CaptionJob) -> str:
    """The command's output about a clip, without the spaces around it."""
    words = [word.replace(PLACE, str(job.clip)) for word in job.command]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it starts itself ends with it
        )
    except OSError as error:
        raise DataError(f"{job.clip}: '{words[0]}' cannot be started: {error.strerror or error}.") from error
    try:
        output, messages = process.communicate(timeout=None if job.timeout == math.inf else job.timeout)
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{job.clip}: the captioner was not done after {job.timeout:g} s (--timeout), so it was ended."
        ) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last_words = messages.decode("utf-8", "replace").strip()[-_TAIL:]
    if process.returncode != 0:
        raise DataError(
            f"{job.clip}: the captioner ended with exit code {process.returncode}"
            f"{': ' + last_words if last_words else ' and no message'}."
        )
    with raised_as(DataError, f"{job.clip}: what the captioner printed is not UTF-8", UnicodeDecodeError):
        caption = output.decode("utf-8").strip()
    if not caption:
        raise DataError(
            f"{job.clip}: the captioner printed nothing{'; its messages end: ' + last_words if last_words else ''}."
        )
    if len(caption) > _LONGEST or "\0" in caption:
        raise DataError(f"{job.clip}: the captioner printed {len(caption)} characters, which are no caption.")
    return caption
