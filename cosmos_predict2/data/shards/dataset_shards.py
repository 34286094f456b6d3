# SPDX-License-Identifier: Apache-2.0
"""Training clips from tar shards, on disks of the machine or in an object store."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_predict2.data.clip_dataset import ClipDataset, Source, Text, clip_problems
from cosmos_predict2.data.samples import PackedStrings
from cosmos_predict2.data.shards.index import ShardSample, index_folder, index_shards, list_shards
from cosmos_predict2.data.video.clips import Clip, choose_decoder, open_clip
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import NO_ENCODER, exclude
from cosmos_predict2.text.embeddings.folder import SUFFIXES, embedding_in, masked
from cosmos_predict2.text.embeddings.pickles import LARGEST_BYTES
from imaginaire import foreign_json, storage
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.findings import CheckContext, Finding, error, errors

CURE = "Write the shard again"
CAPTION_SUFFIXES = (".txt", ".json")


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
        found = index_shards(list_shards(shards), Path(index_dir) if index_dir else index_folder())
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
