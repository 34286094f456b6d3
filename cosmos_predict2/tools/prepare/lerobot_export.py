# SPDX-License-Identifier: Apache-2.0
"""A LeRobot data set fetched from the hub, and its episodes written as clips with captions.

    OUT/dataset.json                            what it is, written first, and again when all is there
    OUT/{train,val}/videos/episode_000000.mp4   one camera's pictures
    OUT/{train,val}/metas/episode_000000.txt    the episode's task, written when its clip is there

Videos are copied as they are, or cut out as they are where several episodes share a file; what cannot be is encoded.
"""

import io
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.data.lerobot.info import VAL_FRACTION, choose_episodes, read_info, read_json
from cosmos_predict2.data.lerobot.reader import LeRobotSource, choose_camera
from cosmos_predict2.data.lerobot.writer import CHUNK, COUNTERS, VIDEO_PATH, Recording, Writer, is_own_layout
from cosmos_predict2.data.video.clips import packet_table, probe
from cosmos_predict2.data.video.media import check_writable, opened_video, write_video
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.tools.jobs import Outcome, run_jobs
from cosmos_predict2.tools.prepare.records import RECORD, require_own, require_settings, write_json, write_text
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError
from imaginaire.storage import repositories

log = logging.getLogger(__name__)

FORMAT = "lerobot_clips/1"
SPLITS = ("train", "val")
_PER_PIXEL = 0.15  # bytes that an encoded pixel takes, rather too many


@dataclass(frozen=True)
class ExportJob:
    root: Path
    index: int
    camera: str
    folder: Path
    annotation: str | None
    caption: str | None


def fetch_source(
    repo_id: str, target: Path, *, camera: str | None = None, revision: str | None = None, dry_run: bool = False
) -> bool:
    """Fetch a data set, of its videos those of one camera where one is named; False where a dry run cannot look on."""
    listing = repositories.list_files(repo_id, patterns=["*"], revision=revision)
    if "meta/info.json" not in listing.sizes:
        raise DataError(f"{repo_id} is not a LeRobot data set: it has no meta/info.json.")
    index = [name for name in listing.absent(target) if name.startswith("meta/")]
    if index and dry_run:
        repositories.fetch_absent(listing, target, dry_run=True)  # which videos are needed follows from the index
        return False
    repositories.fetch(listing, target, index, progress=False)
    info = read_info(target)
    chosen = choose_camera(info, camera) if camera is not None or len(info.cameras) == 1 else None
    repositories.fetch_absent(listing, target, [n for n in listing.sizes if _is_needed(n, chosen)], dry_run=dry_run)
    return True


def export(
    root: Path,
    out: Path,
    *,
    camera: str | None = None,
    splits: Sequence[str] = SPLITS,
    val_fraction: float = VAL_FRACTION,
    annotation: str | None = None,
    caption: str | None = None,
    workers: int | None = None,
    dry_run: bool = False,
    command: str = "",
) -> Outcome[str]:
    """Write the missing clips of these splits; how each came about. ``caption`` is for episodes without a task."""
    source = LeRobotSource.open(root)
    key = source.camera(camera)
    if len(cameras_in(key)) > 1:
        raise ConfigError(f"camera={camera}: clips without actions are of one camera. Name one.")
    chosen = {split: choose_episodes(source.info.splits, len(source), split, val_fraction) for split in splits}
    jobs = [
        ExportJob(root, int(i), key, out / split, annotation, caption)
        for split in splits
        for i in chosen[split].tolist()
    ]
    if not jobs:
        raise DataError(f"{root} has no episode for {' and '.join(splits)} with val_fraction={val_fraction}.")
    if annotation is not None:
        source.caption(jobs[0].index, annotation=annotation)  # an unknown one is an error before anything is written
    if annotation is None and (note := source.episodes.several_tasks()) is not None:
        log.warning("%s: %s. A clip is a whole episode and gets the task of its first frame as its caption", root, note)
    settings = {"camera": key, "splits": list(splits), "val_fraction": val_fraction, "annotation": annotation}
    record: dict[str, Any] = {
        "format": FORMAT,
        "is_complete": False,
        "source": str(root),
        "version": source.info.version,
        "fps": source.info.fps,
        "settings": {**settings, "caption": caption},
        "command": command,
    }
    found = require_own(out, FORMAT)
    if found is not None:
        require_settings(out, {**found, **found.get("settings", {})}, {"source": str(root), **record["settings"]})
    todo = [job for job in jobs if not _is_done(job, source.name(job.index))]
    if missing := source.missing_files(key, [job.index for job in todo]):
        log.warning("%d files that the index names are not there, the first: %s", len(missing), missing[0])
    needed = _bytes_needed(source, key, todo)
    counts = {split: len(chosen[split]) for split in splits}
    text = f"{len(todo)} of {len(jobs)} clips to {out}, about {storage.readable_bytes(needed)}"
    if dry_run:
        log.info("would write %s (%s)", text, ", ".join(f"{count} {split}" for split, count in counts.items()))
        return Outcome()
    check_writable(out / "trial.mp4", flag="--out")
    storage.require_space(out, needed, f"{len(todo)} clips")
    if not todo and found is not None and found.get("is_complete"):
        log.info("%s: all %d clips are there", out, len(jobs))
        return Outcome()
    write_json(out / RECORD, record)
    log.info("writing %s", text)
    outcome = run_jobs(write_clip, todo, what="clips", workers=workers)
    if not outcome.faults:
        write_json(out / RECORD, {**record, "is_complete": True, "counts": counts})
    log.info("%s: %s", out, ", ".join(f"{n} {how}" for how, n in Counter(outcome.results).items()) or "nothing new")
    return outcome


def copy_to_extend(root: Path, out: Path) -> None:
    """Copy a data set so that `Writer.after` can add episodes: as it is, or of another layout written anew, its videos
    as they are where they can be cut."""
    source = LeRobotSource.open(root)
    if is_own_layout(info := source.info):
        shutil.copytree(root, out)
        return
    described = {name: one for name, one in info.features.items() if one.get("dtype") != "image"}  # they become videos
    writer = Writer(out, info.fps, info.robot, described)
    for i in range(len(source)):
        videos = {}
        for camera in info.cameras:
            place = VIDEO_PATH.format(episode_chunk=i // CHUNK, episode_index=i, video_key=camera)
            _write_video(source, ExportJob(root, i, camera, out, None, None), out / place)
            videos[camera] = source.frames(i, camera, range(int(source.episodes.lengths[i])))
        columns = {name: values for name, values in source.episode(i).items() if name not in COUNTERS}
        writer.add(Recording(columns, videos, source.caption(i)))
    writer.finish(modality=read_json(path) if (path := root / "meta" / "modality.json").is_file() else None)
    log.info("%s: %d episodes of version %s were written anew in %s", root, len(source), info.version, out)


def write_clip(job: ExportJob) -> str:
    """Write an episode's clip and caption; gives how the clip came about: "copied", "cut" or "encoded"."""
    source = _source(job.root)
    name = source.name(job.index)
    text = " ".join((source.caption(job.index, annotation=job.annotation) or job.caption or "").split())
    if not text:
        raise DataError(f"{job.root}: {name} has no task. Give --caption TEXT for such episodes.")
    target = job.folder / "videos" / f"{name}.mp4"
    check_writable(target)
    how = _write_video(source, job, target)
    write_text(job.folder / "metas" / f"{name}.txt", f"{text}\n")
    return how


def _write_video(source: LeRobotSource, job: ExportJob, target: Path) -> str:
    info, length = source.info, int(source.episodes.lengths[job.index])
    if info.is_video(job.camera) and info.video_fps(job.camera) == info.fps:
        clip = source.clip(job.index, job.camera)
        num_frames, fps = probe(clip.path)
        source.check_rate(job.camera, clip.path, num_frames, fps)
        first = round(clip.start * info.fps)
        if first + length > num_frames:
            raise DataError(
                f"{clip.path} has {num_frames} frames, but {source.name(job.index)} is frames {first} to"
                f" {first + length - 1} of it."
            )
        if num_frames == length and clip.path.suffix == ".mp4":
            with clip.path.open("rb") as content:
                storage.write_atomically(target, lambda file: shutil.copyfileobj(content, file))
            return "copied"
        if copy_cut(clip.path, target, first, length):
            return "cut"
    write_video(target, source.frames(job.index, job.camera, range(length)), info.fps)
    return "encoded"


@lru_cache(maxsize=1)
def _source(root: Path) -> LeRobotSource:
    """Read once by each process."""
    return LeRobotSource.open(root)


def _is_done(job: ExportJob, name: str) -> bool:
    return (job.folder / "metas" / f"{name}.txt").exists() and (job.folder / "videos" / f"{name}.mp4").exists()


def _is_needed(name: str, camera: str | None) -> bool:
    if not name.startswith("videos/"):
        return name.startswith(("meta/", "data/", "images/"))
    return camera is None or camera in name.split("/")


def _bytes_needed(source: LeRobotSource, camera: str, jobs: Sequence[ExportJob]) -> int:
    if not jobs:
        return 0
    if source.info.is_video(camera):
        paths = {source.file_of(job.index, camera) for job in jobs}
        return sum(path.stat().st_size for path in paths if path.is_file()) + 8192 * len(jobs)
    shape = [side for side in source.info.features[camera].get("shape", []) if isinstance(side, int)]
    pixels = max(shape, default=256) ** 2  # the order of height, width and colours differs
    frames = sum(int(source.episodes.lengths[job.index]) for job in jobs)
    return int(frames * pixels * _PER_PIXEL) + 16_384 * len(jobs)


# ---- a piece of a video as a file of its own, without encoding it again where its frames stand alone -----------------


def copy_cut(source: Path, target: Path, first: int, count: int) -> bool:
    """Write frames ``first`` ... ``first + count - 1`` of ``source`` as they are; False where that cannot be done.

    It can where the first of them is a keyframe and their packets are together in the file, as in videos that were put
    together from shorter ones. A target in the way is replaced, and appears complete or not at all.
    """
    with opened_video(source) as container:
        table = packet_table(source, container)
        if not table.is_exact or not 0 <= first < first + count <= table.num_frames:
            return False
        times = table.times[first : first + count]
        if times[0] not in table.keys:
            return False
        packets = _packets(container, times)
        if packets is None:
            return False
        content = _written(container.streams.video[0], packets, int(times[0]))
    if content is None:
        return False
    storage.write_bytes(target, content)
    return True


def _packets(container: Any, times: numpy.ndarray) -> list[Any] | None:
    """The packets of frames shown at these times, in the order of the file; None where others are among them."""
    stream = container.streams.video[0]
    wanted = {int(time) for time in times}
    container.seek(int(times[0]), stream=stream, backward=True)
    packets: list[Any] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if not packets and packet.pts != times[0]:
            continue  # a seek may end before its keyframe
        if packet.pts not in wanted:
            return None
        packets.append(packet)
        wanted.remove(packet.pts)
        if not wanted:
            return packets
    return None


def _written(stream: Any, packets: list[Any], start: int) -> memoryview | None:
    """An mp4 with these packets, the first of which is shown at once; None for codecs that an mp4 cannot hold."""
    import av

    content = io.BytesIO()
    try:
        with av.open(content, "w", format="mp4") as container:
            # opaque: without an encoder for it, which there need not be
            copy = container.add_stream_from_template(stream, opaque=True)
            for packet in packets:
                packet.pts -= start
                packet.dts = packet.dts - start if packet.dts is not None else None
                packet.stream = copy
                container.mux(packet)
    except (av.FFmpegError, ValueError):
        return None
    return content.getbuffer()
