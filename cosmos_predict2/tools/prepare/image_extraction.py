# SPDX-License-Identifier: Apache-2.0
"""Pictures from clips: every ``stride``-th frame of ``videos/*`` as ``images/<stem>_<number of the picture>.jpg``.

A clip's first picture is written last, so where it is, the others are, and what was interrupted goes on there.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES, iterate_frames, probe_video, write_image
from cosmos_predict2.data.video_folder import require_files
from cosmos_predict2.tools.jobs import Outcome, run_jobs
from cosmos_predict2.tools.prepare.records import holds_nothing, read_record, require_settings, write_json
from imaginaire import storage
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

RECORD = "extraction.json"
_BYTES_PER_PIXEL = 0.6  # of a JPEG of quality 95, rather too much


@dataclass(frozen=True)
class ExtractionJob:
    """One clip to take pictures from; its caption goes to each of them where there is one."""

    path: Path
    out: Path
    source: Path
    stride: int
    caption: Path | None = None

    def picture(self, number: int) -> Path:
        return self.out / "images" / f"{self.path.stem}_{number:08d}.jpg"

    def meta(self, number: int) -> Path:
        return self.out / "metas" / f"{self.path.stem}_{number:08d}.txt"


def plan(source: Path, out: Path, stride: int, *, captions: bool = False) -> list[ExtractionJob]:
    """The clips that are not finished yet."""
    videos = require_files(source / "videos", VIDEO_SUFFIXES, "clips")
    if not holds_nothing(out) and (out / RECORD).exists():
        require_settings(out, read_record(out / RECORD) or {}, _record(source, stride))
    clips = []
    for stem, path in videos.items():
        caption = source / "metas" / f"{stem}.txt"
        if captions and not caption.is_file():
            raise DataError(f"{caption} is not there, so the pictures of {path.name} would have no caption.")
        clips.append(ExtractionJob(path, out, source, stride, caption if captions else None))
    todo = [clip for clip in clips if not clip.picture(0).is_file()]
    if done := len(clips) - len(todo):
        log.info("%d of %d clips are finished already", done, len(clips))
    return todo


def extract_images(clips: list[ExtractionJob], workers: int | None = None) -> Outcome[int]:
    """Write the pictures; how many each clip gave."""
    if not clips:
        return Outcome()
    out = clips[0].out
    storage.require_space(out, bytes_needed(clips), f"Pictures of {len(clips)} clips")
    (out / "images").mkdir(parents=True, exist_ok=True)
    storage.remove_stale_temporaries(out / "images")
    write_json(out / RECORD, _record(clips[0].source, clips[0].stride))
    return run_jobs(_extract, clips, what="clips", workers=workers)


def bytes_needed(clips: list[ExtractionJob]) -> int:
    """Estimated bytes of the pictures, from the first readable clip and the sizes of the others."""
    total = sum(clip.path.stat().st_size for clip in clips)
    for clip in clips:
        try:
            info = probe_video(clip.path)
        except DataError:
            continue
        pictures = -(-info.num_frames // clip.stride) * info.height * info.width * _BYTES_PER_PIXEL
        return int(pictures * max(1.0, total / max(1, clip.path.stat().st_size)))
    return 0


def _extract(clip: ExtractionJob) -> int:
    first, num_written = None, 0
    try:
        for number, picture in enumerate(iterate_frames(clip.path, clip.stride)):
            if clip.caption is not None:
                storage.write_bytes(clip.meta(number), clip.caption.read_bytes())
            if number == 0:
                first = picture
            else:
                write_image(clip.picture(number), picture)
            num_written = number + 1
        expected = -(-clips.probe(clip.path)[0] // clip.stride)
        if num_written < expected:
            raise DataError(f"{clip.path} is cut off: {num_written} of {expected} pictures could be taken from it.")
    except DataError:
        for number in range(num_written + 1):  # pictures of half a clip would pass for those of a whole one
            clip.picture(number).unlink(missing_ok=True)
            if clip.caption is not None:
                clip.meta(number).unlink(missing_ok=True)
        raise
    assert first is not None, "a clip without frames is an error of its reader"
    write_image(clip.picture(0), first)
    return num_written


def _record(source: Path, stride: int) -> dict[str, object]:
    return {"input": str(source.resolve()), "stride": stride}
