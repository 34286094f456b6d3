# SPDX-License-Identifier: Apache-2.0
"""AgiBotWorld-Alpha: cutting episodes into windows of a few seconds, a clip file each.

    <output>/{train,val}/videos/task_<task>_episode_<episode>_window_<i>_frame_<first>-<last>.mp4

An episode is decoded once, from its first frame to its last, and its windows are encoded on the way, with PyAV; no
other program is needed. A window that lies there is not cut again.
"""

import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cosmos_predict2.tools.jobs import Outcome, run_jobs
from cosmos_predict2.tools.prepare.agibot.episodes import AgibotSource, require_camera
from imaginaire import storage
from imaginaire.errors import CheckpointError, ConfigError, DataError, near

log = logging.getLogger(__name__)

SPLITS = ("train", "val")
WINDOW_SIZE = 5.0  # seconds
MIN_LAST_WINDOW = 7.5
NUM_FRAMES = 93  # of a clip, that the post-training experiments read

_CLIP = re.compile(r"task_(\d+)_episode_(.+)_window_(\d+)_frame_(\d+)-(\d+)")


@dataclass(frozen=True)
class Window:
    """A piece of an episode, in seconds from its start."""

    start: float
    end: float

    def frames(self, fps: float) -> tuple[int, int]:
        """The first and the last frame."""
        return int(self.start * fps), int(self.end * fps) - 1


@dataclass(frozen=True)
class WindowName:
    """The parts of the name of a window's file."""

    task: str
    episode: str
    window: int
    first: int
    last: int

    @property
    def stem(self) -> str:
        return f"task_{self.task}_episode_{self.episode}_window_{self.window}_frame_{self.first}-{self.last}"

    @staticmethod
    def of(stem: str) -> "WindowName | None":
        match = _CLIP.fullmatch(stem)
        return WindowName(match[1], match[2], int(match[3]), int(match[4]), int(match[5])) if match else None


def cut_windows(duration: float, window_size: float = WINDOW_SIZE, min_last: float = MIN_LAST_WINDOW) -> list[Window]:
    """Windows that cover an episode: all of ``window_size``, but the last, which is at most ``min_last`` long.

    Where no more than window_size + min_last is left, that rest is one window, or one of the standard size and one
    with the remainder, which may be shorter than both.
    """
    windows = []
    start = 0.0
    while start < duration:
        rest = duration - start
        if rest <= min_last:
            windows.append(Window(start, duration))
            break
        windows.append(Window(start, start + window_size))
        start += window_size
        if rest <= window_size + min_last:
            windows.append(Window(start, duration))
            break
    return windows


# Splitting ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Episode:
    source: AgibotSource
    folder: Path
    split: str
    window_size: float
    min_last: float
    dry_run: bool

    @property
    def task(self) -> str:
        return self.folder.parent.name

    def place(self, split: str, clip: WindowName) -> Path:
        return self.source.output / split / "videos" / f"{clip.stem}.mp4"


@dataclass(frozen=True)
class EpisodeCut:
    """Windows of an episode, and how many of them this run wrote."""

    split: str
    clips: list[WindowName]
    num_written: int


def split(
    source: AgibotSource,
    *,
    val_episode_ids: Sequence[str] = (),
    window_size: float = WINDOW_SIZE,
    min_last: float = MIN_LAST_WINDOW,
    workers: int | None = None,
    dry_run: bool = False,
) -> Outcome[EpisodeCut]:
    """Cut every episode; those in ``val_episode_ids`` go to val, all others to train."""
    if not 0 < window_size <= min_last:
        raise ConfigError(
            f"--window_size {window_size:g} and --min_last_window {min_last:g}: the first must be above zero and not"
            " above the second, or windows would reach beyond the end of an episode."
        )
    folders = source.episodes()
    splits = ["val" if folder.name in val_episode_ids else "train" for folder in folders]
    items = [_Episode(source, folder, name, window_size, min_last, dry_run) for folder, name in zip(folders, splits)]
    if not dry_run:
        sizes = [path.stat().st_size for f in folders if (path := f / "videos" / f"{source.camera}.mp4").is_file()]
        storage.require_space(source.output, 2 * sum(sizes), "Cutting the episodes")
        for name in SPLITS:
            (source.output / name / "videos").mkdir(parents=True, exist_ok=True)
            storage.remove_stale_temporaries(source.output / name / "videos")
    outcome = run_jobs(_cut, items, what="episodes", workers=workers)
    for episode in val_episode_ids:
        if episode not in (names := [folder.name for folder in folders]):
            outcome.faults.append(f"--val_episode_ids: there is no episode {episode}.{near(episode, names)}")
    for name in SPLITS:
        cuts = [cut for cut in outcome.results if cut.split == name]
        log.info(
            "%s: %d windows of %d episodes, %d %s",
            source.output / name,
            sum(len(cut.clips) for cut in cuts),
            len(cuts),
            sum(cut.num_written for cut in cuts),
            "to be cut" if dry_run else "cut by this run",
        )
        _warn_of_short_windows(source.output / name, [clip for cut in cuts for clip in cut.clips])
    return outcome


def _warn_of_short_windows(folder: Path, clips: Sequence[WindowName]) -> None:
    """Training refuses a clip with fewer frames than it reads; of a rest, the last window may be one."""
    short = [clip for clip in clips if clip.last + 1 - clip.first < NUM_FRAMES]
    if short:
        log.warning(
            "%s: %d of %d windows have fewer than the %d frames that post-training reads, such as %s.mp4. Training"
            " stops at them: remove them (videos/ and metas/), or set dataloader_train.dataset.skip_bad_samples=True.",
            *(folder, len(short), len(clips), NUM_FRAMES, short[0].stem),
        )


def _cut(item: _Episode) -> EpisodeCut:
    from cosmos_predict2.data.video.media import frame_rate, opened_video  # brings torch, which fetching does without

    source = require_camera(item.folder, item.source.camera)
    with opened_video(source) as container:
        stream = container.streams.video[0]
        fps = frame_rate(stream, source)
        duration = _duration(container, stream, fps)
        num_frames = stream.frames or None
    windows = cut_windows(duration, item.window_size, item.min_last)
    clips = []
    for i, window in enumerate(windows):
        first, last = window.frames(fps)
        # A container may claim a little more than it has.
        last = last if num_frames is None else min(last, num_frames - 1)
        if last >= first:
            clips.append(WindowName(item.task, item.folder.name, i, first, last))
    if not clips:
        raise DataError(f"{source} holds no frame that can be cut ({duration:g} s, {fps:g} frames per second).")
    _require_same_windows(item, clips)
    if item.dry_run:
        absent = [clip for clip in clips if not any(item.place(s, clip).exists() for s in SPLITS)]
        return EpisodeCut(item.split, clips, len(absent))
    for clip in clips:
        _bring_from_other_split(item, clip)
    return EpisodeCut(item.split, clips, _write_clips(item, source, clips))


def _duration(container: Any, stream: Any, fps: float) -> float:
    if container.duration:
        return float(container.duration / 1_000_000)
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return float(stream.frames / fps)


def _require_same_windows(item: _Episode, clips: Sequence[WindowName]) -> None:
    """Windows of other lengths beside these would show the same frames twice."""
    wanted = {clip.stem for clip in clips}
    for name in SPLITS:
        start = glob.escape(f"task_{item.task}_episode_{item.folder.name}_window_")
        there = (item.source.output / name / "videos").glob(f"{start}*.mp4")
        if other := sorted(path for path in there if path.stem not in wanted):
            raise DataError(
                f"{other[0]} was cut with other settings than --window_size {item.window_size:g} --min_last_window"
                f" {item.min_last:g}. Use those settings, or remove {item.source.output} first."
            )


def _bring_from_other_split(item: _Episode, clip: WindowName) -> None:
    """An episode belongs to one split: move a window that an earlier run put into the other one."""
    other = next(name for name in SPLITS if name != item.split)
    if not item.place(other, clip).exists():
        return
    for folder, suffix in (("metas", ".txt"), ("videos", ".mp4")):
        there, here = (item.source.output / name / folder / f"{clip.stem}{suffix}" for name in (other, item.split))
        if there.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            os.replace(there, here)
    for embedding in (item.source.output / other / "t5_xxl").glob(f"{glob.escape(clip.stem)}.*"):
        embedding.unlink()  # is written anew where the clip is now
    log.info("moved %s from %s to %s", clip.stem, other, item.split)


# Cutting --------------------------------------------------------------------------------------------------------------


def _write_clips(item: _Episode, source: Path, clips: Sequence[WindowName]) -> int:
    """Number of windows written; decoding ends with the last one that is missing."""
    from cosmos_predict2.data.video.media import decoded_frames, opened_video

    missing = [clip for clip in clips if not item.place(item.split, clip).exists()]
    if not missing:
        return 0
    with opened_video(source) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1  # the cores have an episode each
        frames = decoded_frames(container, source)
        position = 0
        for clip in clips[: clips.index(missing[-1]) + 1]:
            _skip(frames, clip.first - position)
            piece = islice(frames, clip.last + 1 - clip.first)
            position = clip.last + 1
            if clip not in missing:
                _skip(piece, clip.last + 1 - clip.first)
                continue
            target = item.place(item.split, clip)
            try:
                storage.write_atomically(target, partial(_encode, frames=piece, clip=clip, like=stream, source=source))
            except CheckpointError as error:  # written for checkpoints; its cause is the disk's own error
                raise DataError(f"{target} cannot be written: {error.__cause__ or error}") from error
    return len(missing)


def _skip(frames: Iterator[Any], count: int) -> None:
    for _ in islice(frames, count):
        pass


def _encode(file: BinaryIO, *, frames: Iterator[Any], clip: WindowName, like: Any, source: Path) -> None:
    """An mp4 of the frames as they are: the same size, rate and colours, compressed once more."""
    import av

    from cosmos_predict2.data.video.media import mp4_stream

    rate = Fraction(like.average_rate or like.guessed_rate or like.base_rate)
    wanted = clip.last + 1 - clip.first
    count = 0
    with av.open(file, "w", format="mp4") as container:
        stream: Any = None
        for frame in frames:
            if stream is None:
                stream = mp4_stream(container, rate, frame.height, frame.width)
                stream.codec_context.thread_count = 1
                if frame.format.name == "yuv420p":
                    for tag in ("color_range", "colorspace", "color_primaries", "color_trc"):
                        setattr(stream.codec_context, tag, getattr(like.codec_context, tag))
            if frame.format.name != "yuv420p":
                frame = frame.reformat(format="yuv420p")
            frame.pict_type = 0  # the encoder chooses its own key frames
            frame.pts, frame.time_base = count, 1 / rate
            container.mux(stream.encode(frame))
            count += 1
        if stream is not None:
            container.mux(stream.encode())
    if count < wanted:
        raise DataError(f"{source} ends at frame {clip.first + count}, before frame {clip.last} of {clip.stem}.")
