# SPDX-License-Identifier: Apache-2.0
"""Training clips from tar shards, on disks of the machine or in an object store."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.data.samples import BadSamples, PackedStrings, frame_item, text_item
from cosmos_predict2.data.shards.index import Sample, index_folder, index_shards, list_shards
from cosmos_predict2.data.video.clip_windows import Windows
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import NO_ENCODER, exclude
from cosmos_predict2.text.embeddings.folder import SUFFIXES, embedding_in, masked
from cosmos_predict2.text.embeddings.pickles import LARGEST_BYTES
from imaginaire import foreign_json, storage
from imaginaire.data.facts import DataFacts
from imaginaire.errors import DataError, UserError
from imaginaire.findings import CheckContext, Finding, error, errors

CURE = "Write the shard again"
CAPTION_SUFFIXES = (".txt", ".json")


class ShardedVideos(Dataset[dict[str, Any]]):
    """One sample per clip of the shards: items as of a folder of clips, windows as `Windows` reads them.

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
        how: dict[str, Any] = dict(fps=fps, stride=stride, sampling=sampling, crop=crop)
        self.windows = Windows(num_frames, video_size, **how, decoder=decoder, num_threads=num_threads)
        self._bad = BadSamples(skip_bad_samples, most_bad_samples, CURE)
        self._num_tokens = num_tokens
        self._caption_key = caption_key
        self._reads_embeddings = text_encoder != NO_ENCODER
        found = index_shards(list_shards(shards), Path(index_dir) if index_dir else index_folder())
        faults = {i: fault for i, sample in enumerate(found) if (fault := self._fault(sample)) is not None}
        exclude(list(faults.values()), len(found), skip_bad_samples, "samples")
        kept = [sample for i, sample in enumerate(found) if i not in faults]
        self._reads_captions = all(_suffix(sample, CAPTION_SUFFIXES) for sample in kept)
        self._samples = PackedStrings([json.dumps([one.shard, one.key, one.members]) for one in kept])

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """What can be known to be wrong without opening a shard."""
        yield from errors(context.key, Windows.problems(arguments))
        try:
            shards = list_shards(arguments.get("shards") or [])
            if not storage.exists(shards[0]):
                yield error(context.key, f"{shards[0]} does not exist")
        except UserError as problem:
            yield error(context.key, str(problem))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        return DataFacts(kind="shards of clips", has_actions=False, read_rate=lambda: float(arguments["fps"]))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._bad.read(index, len(self), self._item)

    def _item(self, index: int) -> dict[str, Any]:
        shard, key, members = json.loads(self._samples[index])
        sample = Sample(shard, key, members)
        video, fps = self._frames(sample)
        return {
            "video": video,
            "video_name": {"video_path": sample.name(_video_suffix(sample)), "t5_embedding_path": ""},
            **self._text(sample),
            "fps": fps,
            "num_frames": self.windows.rule.num_frames,
            **frame_item(self.windows.size),
        }

    def _frames(self, sample: Sample) -> tuple[Tensor, float]:
        suffix = _video_suffix(sample)
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:  # decoders want a file
            file.write(sample.read(suffix))
            file.flush()
            try:
                return self.windows.read(Path(file.name))
            except DataError as fault:
                raise DataError(str(fault).replace(file.name, sample.name(suffix))) from fault

    def _text(self, sample: Sample) -> dict[str, Any]:
        item: dict[str, Any] = {}
        if self._reads_embeddings:
            suffix = _suffix(sample, SUFFIXES)
            rows = embedding_in(sample.read(suffix), sample.name(suffix))
            item |= text_item(*masked(rows, self._num_tokens))
        if self._reads_captions:
            item["ai_caption"] = self._caption(sample)
        return item

    def _caption(self, sample: Sample) -> str:
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

    def _fault(self, sample: Sample) -> str | None:
        """Why a sample cannot be used, by the names of its members."""
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


def _suffix(sample: Sample, wanted: Sequence[str]) -> str:
    """The first of these suffixes that a member of the sample has; "" where none has."""
    return next((suffix for suffix in wanted if suffix in sample.members), "")


def _video_suffix(sample: Sample) -> str:
    return _suffix(sample, VIDEO_SUFFIXES)
