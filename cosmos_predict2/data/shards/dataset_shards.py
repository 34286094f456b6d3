# SPDX-License-Identifier: Apache-2.0
"""Training clips from tar shards in the form of WebDataset, on disks of the machine or in an object store.

    00000.tar    KEY.mp4, KEY.txt or KEY.json, KEY.safetensors or KEY.pickle, one sample after the other

The headers of a shard are read once, and where its members begin is kept in a file. So a sample is found by its number
and read as a part of its shard, in any order, and a run resumes at its place without reading what lies before.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from cosmos_predict2.data.clip_dataset import ClipDataset, Source, Text, clip_problems
from cosmos_predict2.data.samples import PackedStrings
from cosmos_predict2.data.video.clips import Clip, choose_decoder, open_clip
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import NO_ENCODER, exclude, in_threads
from cosmos_predict2.text.embeddings.folder import SUFFIXES, embedding_in, masked
from cosmos_predict2.text.embeddings.pickles import LARGEST_BYTES
from imaginaire import foreign_json, storage
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.findings import CheckContext, Finding, error, errors

log = logging.getLogger(__name__)

CURE = "Write the shard again"
CAPTION_SUFFIXES = (".txt", ".json")
FORMAT = "shard_index/1"
BLOCK = tarfile.BLOCKSIZE
HEADERS_AT_ONCE = 64 * 1024  # bytes of a remote shard that are read to find a header
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 1_000_000  # of a range: more is a slip of the finger
_FORM = "Shards are tar files without compression."


class ShardedVideos(ClipDataset):
    """One sample per clip of the shards: items as of a folder of clips, windows as in `ClipDataset`.

    ``shards`` is a list of paths or ``s3://`` addresses, with ``{000..127}`` and ``*``. A sample is a clip (KEY.mp4)
    with its text: with ``text_encoder`` "none" a caption (KEY.txt, or ``caption_key`` of KEY.json), which training
    encodes, else an embedding (KEY.safetensors or KEY.pickle), and the caption where all samples have one. A sample
    without is an error, or with ``skip_bad_samples`` excluded; a clip that cannot be read names its shard and member.
    ``index_dir`` keeps where samples lie in their shards; default: a folder of the user's.
    """

    def __init__(
        self,
        shards: Sequence[str],
        num_frames: int,
        video_size: Sequence[int],
        *,
        fps: float | None = None,
        stride: int = 1,
        sampling: str = "random",
        crop: str = "stretch",
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        decoder: str = "auto",
        num_threads: int = 1,
        num_tokens: int = 512,
        text_encoder: str | None = None,
        caption_key: str = "caption",
        index_dir: str | None = None,
    ) -> None:
        if problem := next(clip_problems(dict(video_size=video_size, crop=crop)), None):
            raise ConfigError(problem)
        source = ShardSource(
            shards,
            index_dir,
            text_encoder != NO_ENCODER,
            caption_key,
            num_tokens,
            skip_bad_samples,
            dict(decoder=choose_decoder(decoder), num_threads=num_threads),
        )
        super().__init__(
            source,
            num_frames,
            video_size,
            sampling=sampling,
            stride=stride,
            frame_rate=fps,
            crop=crop,
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
            cure=CURE,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings that need no shard opened."""
        yield from errors(context.key, clip_problems(arguments))
        try:
            shards = list_shards(arguments.get("shards") or [])
            if not storage.exists(shards[0]):
                yield error(context.key, f"{shards[0]} does not exist")
        except UserError as problem:
            yield error(context.key, str(problem))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        return DataFacts(kind="shards of clips", has_actions=False, read_rate=lambda: float(arguments["fps"]))


@dataclass(frozen=True)
class ShardSample:
    """One sample: its members by suffix, each with its first byte in the shard and its length."""

    shard: str
    key: str
    members: Mapping[str, tuple[int, int]]

    def read(self, suffix: str) -> bytes:
        """The content of a member; an error where the shard is not what it was when it was indexed."""
        start, length = self.members[suffix]
        content = storage.read_part(self.shard, start - BLOCK, BLOCK + length)
        try:
            found = tarfile.TarInfo.frombuf(content[:BLOCK], "utf-8", "surrogateescape").size
        except tarfile.HeaderError:
            found = -1
        if found != length or len(content) != BLOCK + length:
            raise DataError(
                f"{self.name(suffix)} is not where it was: the shard was changed or cut off while it was in use. Start"
                " again to have it indexed anew."
            )
        return content[BLOCK:]

    def name(self, suffix: str) -> str:
        """The shard and the member, for messages."""
        return f"{self.shard}: {self.key}{suffix}"


class ShardSource(Source):
    """The samples of shards that can be used: a clip and its text each."""

    def __init__(
        self,
        shards: Sequence[str],
        index_dir: str | None,
        reads_embeddings: bool,
        caption_key: str,
        num_tokens: int,
        skip_bad: bool,
        decoding: Mapping[str, Any],
    ) -> None:
        self._caption_key = caption_key
        self._num_tokens = num_tokens
        self._decoding = decoding
        self._reads_embeddings = reads_embeddings
        of_user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosmos_predict2" / "shards"
        found = index_shards(list_shards(shards), Path(index_dir) if index_dir else of_user)
        faults = {i: fault for i, sample in enumerate(found) if (fault := self._fault(sample)) is not None}
        exclude(list(faults.values()), len(found), skip_bad, "samples")
        kept = [sample for i, sample in enumerate(found) if i not in faults]
        self._reads_captions = all(_suffix(sample, CAPTION_SUFFIXES) for sample in kept)
        self._samples = PackedStrings([json.dumps([one.shard, one.key, one.members]) for one in kept])

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, i: int) -> ShardSample:
        return ShardSample(*json.loads(self._samples[i]))

    def names(self, i: int, camera: int) -> dict[str, str]:
        sample = self.sample(i)
        return {"video_path": sample.name(_suffix(sample, VIDEO_SUFFIXES))}

    @contextmanager
    def open(self, i: int, camera: int = 0) -> Iterator[Clip]:
        sample = self.sample(i)
        suffix = _suffix(sample, VIDEO_SUFFIXES)
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:  # decoders want a file
            file.write(sample.read(suffix))
            file.flush()
            try:
                with open_clip(file.name, **self._decoding) as clip:
                    yield clip
            except DataError as fault:
                raise DataError(str(fault).replace(file.name, sample.name(suffix))) from fault

    def text(self, i: int, frame: int) -> Text:
        sample = self.sample(i)
        embedding = None
        if self._reads_embeddings:
            suffix = _suffix(sample, SUFFIXES)
            rows = embedding_in(sample.read(suffix), sample.name(suffix))
            embedding = masked(rows, self._num_tokens)
        return Text(self._caption(sample) if self._reads_captions else None, embedding)

    def _caption(self, sample: ShardSample) -> str:
        suffix = _suffix(sample, CAPTION_SUFFIXES)
        try:
            text: Any = sample.read(suffix).decode("utf-8-sig")
            if suffix == ".json":
                text = foreign_json.loads(text)[self._caption_key]
        except (ValueError, LookupError, TypeError) as fault:
            expected = "text in UTF-8" if suffix == ".txt" else f'JSON with "{self._caption_key}" (caption_key)'
            raise DataError(
                f"{sample.name(suffix)} is no caption: {expected} was expected, found {fault!r}."
            ) from fault
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{sample.name(suffix)} is no caption: it is empty, or no text.")
        return text.strip()

    def _fault(self, sample: ShardSample) -> str | None:
        """Reason why a sample cannot be used, by the names of its members."""
        videos = [suffix for suffix in sample.members if suffix in VIDEO_SUFFIXES]
        if len(videos) != 1:
            return f"{sample.shard}: {sample.key} has {len(videos)} clips, one is needed ({', '.join(VIDEO_SUFFIXES)})."
        wanted = SUFFIXES if self._reads_embeddings else CAPTION_SUFFIXES
        suffix = _suffix(sample, wanted)
        if not suffix:
            what = "an embedding" if self._reads_embeddings else "a caption"
            return f"{sample.shard}: {sample.key} has no {' or '.join(wanted)}, {what}."
        if sample.members[suffix][1] > LARGEST_BYTES:
            return f"{sample.name(suffix)} is too large for the text of one clip."
        return None


def _suffix(sample: ShardSample, wanted: Sequence[str]) -> str:
    """The first of these suffixes that a member of the sample has; "" where none has."""
    return next((suffix for suffix in wanted if suffix in sample.members), "")


# ---- where samples lie in the shards ---------------------------------------------------------------------------------


def list_shards(shards: str | Sequence[str]) -> list[str]:
    """Paths and addresses of patterns such as ``s3://bucket/set/{00000..00127}.tar`` or ``data/*.tar``, in order."""
    patterns = [shards] if isinstance(shards, str) else list(shards)
    if not patterns:
        raise ConfigError("shards is empty; expected paths or addresses, such as s3://bucket/set/{00000..00127}.tar.")
    found: dict[str, None] = {}
    for pattern in (expanded for one in patterns for expanded in expand_braces(str(one))):
        if not any(mark in pattern for mark in "*?["):
            found[pattern] = None
            continue
        names = storage.matching(pattern)
        if not names:
            raise DataError(f"No shard fits {pattern}. Give paths or addresses that exist, or patterns of such.")
        found |= dict.fromkeys(names)
    return list(found)


def expand_braces(pattern: str) -> Iterator[str]:
    """``{000..127}`` becomes each number with as many digits, ``{a,b}`` each text."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    texts = match[1].split(",")
    if limits := _RANGE.fullmatch(match[1]):
        first, last = int(limits[1]), int(limits[2])
        if not 0 <= last - first < _MOST_SHARDS:
            raise ConfigError(f"{match[0]} of {pattern} is no range of shards: the first number, two dots, the last.")
        texts = [str(number).zfill(len(limits[1])) for number in range(first, last + 1)]
    for text in texts:
        yield from expand_braces(f"{pattern[: match.start()]}{text}{pattern[match.end() :]}")


def index_shards(shards: Sequence[str], folder: Path) -> list[ShardSample]:
    """The samples of all shards in order. What ``folder`` has no index of is indexed, by one process of a machine."""
    storage.makedirs(folder)
    with open(folder / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel, even when the holder is killed
        return [sample for samples in in_threads(lambda shard: _indexed(shard, folder), shards) for sample in samples]


def _indexed(shard: str, folder: Path) -> list[ShardSample]:
    version = storage.version(shard)
    place = folder / f"{hashlib.sha256(f'{shard} {version}'.encode()).hexdigest()[:32]}.json"
    if (found := _read_index(place)) is None:
        found = read_members(shard)
        log.info("%s: %d samples", shard, len(found))
        storage.write_text(place, json.dumps({"format": FORMAT, "shard": shard, "samples": found}))
    return [ShardSample(shard, key, members) for key, members in found.items()]


def _read_index(path: Path) -> dict[str, dict[str, tuple[int, int]]] | None:
    """None where there is no index, or none that can be read."""
    try:
        content = foreign_json.load(path)
        if content["format"] != FORMAT:
            return None
        samples: dict[str, dict[str, Any]] = content["samples"]
        return {
            key: {suffix: (int(start), int(length)) for suffix, (start, length) in members.items()}
            for key, members in samples.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_members(shard: str) -> dict[str, dict[str, tuple[int, int]]]:
    """First byte and length of every member, by key and suffix (``.mp4``), from the headers alone.

    The key of a member is its path up to the first dot of its name. What is cut off or damaged is an error: the
    standard reader takes a broken header for the end.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    last = "its beginning"
    try:
        file = _Headers(shard)
        with tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as archive:
            for member in archive:
                last = member.name
                if member.isreg():
                    _add(samples, member, shard)
            file.seek(archive.offset)
            is_whole = file.read(BLOCK) == bytes(BLOCK)
    except tarfile.TarError as error:
        raise DataError(f"{shard} is broken after {last}: {error}. Fetch or write it again. {_FORM}") from error
    if not is_whole:
        raise DataError(f"{shard} is cut off or broken after {last}. Fetch or write it again.")
    if not samples:
        raise DataError(f"{shard} holds no file.")
    return samples


def _add(samples: dict[str, dict[str, tuple[int, int]]], member: tarfile.TarInfo, shard: str) -> None:
    folder, name = os.path.split(member.name)
    if name.startswith("."):
        return
    stem, dot, suffix = name.partition(".")
    members = samples.setdefault(os.path.join(folder, stem), {})
    if (suffix := f"{dot}{suffix.lower()}") in members:
        raise DataError(f"{shard} has two members {member.name}: one name, one file. Write it again.")
    members[suffix] = (member.offset_data, member.size)


class _Headers:
    """A file of which little is read here and there; of a remote one only the neighbourhood of what is asked for."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = storage.size(path)
        self._place = self._start = 0
        self._held = b""
        self._least = HEADERS_AT_ONCE if storage.is_remote(path) else BLOCK

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._place)
        length = min(left, size) if size >= 0 else left
        if not self._start <= self._place <= self._place + length <= self._start + len(self._held):
            self._start = self._place
            self._held = storage.read_part(self._path, self._place, min(left, max(length, self._least)))
        first = self._place - self._start
        content = self._held[first : first + length]
        self._place += len(content)
        return content
