# SPDX-License-Identifier: Apache-2.0
"""A data set's folder of text embeddings: one file a clip, read cheaply, written so that it can go on after a stop.

    t5_xxl/NAME.pickle         a list with one float16 array [tokens, width], as public data sets have it (also .pkl)
    t5_xxl/NAME.safetensors    "embedding", the same numbers, where asked for
    t5_xxl/embeddings.json     which encoder made them and of which captions (see embedding_record)

A folder without a record, from elsewhere, is read; what is added to it must be of the same encoder, and nobody knows
which that was, so adding is refused unless the caller says so (``adopt``), and then a few files are compared.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cosmos_predict2.data.jobs import require_space
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.embeddings.cache import EmbeddingCache
from cosmos_predict2.text.embeddings.files import (
    FOLDER_NAMES,
    FORMS,
    SUFFIXES,
    embedding_files,
    find_embedding_dir,
    read_embedding,
    write_embedding,
)
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS, padded, trimmed
from cosmos_predict2.text.embeddings.record import (
    RECORD,
    EncoderRecord,
    caption_hash,
    next_revision,
    read_record,
    remove_parts,
    write_record,
)
from cosmos_predict2.text.encoder_names import encode_commands, parse_name
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.progress import Progress

log = logging.getLogger(__name__)

__all__ = [
    "FOLDER_NAMES", "FORMS", "Counts", "EmbeddingFolder", "embed_captions", "embedding_files", "find_embedding_dir",
    "is_encoder", "read_embedding",
]  # fmt: skip

Item = TypeVar("Item")

_WRITERS = 8
_AT_ONCE = 256  # files between two looks at the clock
_FLUSH_SECONDS = 5.0  # so much work is done again after a kill,
_FLUSH_SHARE = 0.05  # or more, where writing the record would take a larger share of the time
_NUM_COMPARED = 3
_SIMILAR = 0.98  # cosine: other dtypes of the same weights are above, other weights far below


@dataclass(frozen=True)
class Counts:
    """What ``embed_captions`` did, or with ``dry_run`` would do."""

    written: int = 0  # files
    encoded: int = 0  # distinct captions among them
    unchanged: int = 0
    orphans: tuple[str, ...] = ()  # embeddings that no caption belongs to


class EmbeddingFolder:
    """Embeddings by the stem of their clip."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(
                f"There is no folder {self.folder} with text embeddings. Write it:"
                f" {encode_commands(self.folder.parent)}"
            )
        self._record: EncoderRecord | None = None
        self._has_record: bool | None = None  # None: not looked at yet
        self._width: int | None = None
        self._has_warned = False

    def find(self, stem: str) -> Path | None:
        """The file of a clip's embedding, if it has one."""
        for suffix in SUFFIXES:
            path = os.path.join(self.folder, stem + suffix)
            if os.path.exists(path):
                return Path(path)
        return None

    def stems(self) -> list[str]:
        """All that have an embedding, sorted. Two files for one clip are an error: which one is meant?"""
        files = embedding_files(self.folder)
        if double := [paths for paths in files.values() if len(paths) > 1]:
            first, second = double[0][:2]
            more = f" ({len(double)} clips have several)" if len(double) > 1 else ""
            raise DataError(f"{first} and {second.name} are embeddings of one clip{more}. Remove one of them.")
        return sorted(files)

    def read(self, stem: str, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
        """float32 [num_tokens, width] with zeros behind the prompt, and int64 [num_tokens], 1 where the prompt is."""
        path = self.find(stem)
        if path is None:
            raise DataError(
                f"{self.folder} has no embedding of '{stem}' ({stem}.pickle, .pkl or .safetensors). Write it:"
                f" {self.command()}"
            )
        rows = read_embedding(path)
        if rows.shape[1] != self.width:
            whose = f"{RECORD} says" if self.record() else "the other files have"
            raise DataError(
                f"{path} has embeddings of width {rows.shape[1]}, but {whose} {self.width}: it is of another encoder."
                f" Delete it and encode its caption again: {self.command()}"
            )
        if len(rows) > num_tokens and not self._has_warned:
            self._has_warned = True
            log.warning("%s has %d tokens: cut to %d (said once)", path, len(rows), num_tokens)
        mask = torch.zeros(num_tokens, dtype=torch.int64)
        mask[: len(rows)] = 1
        return padded(rows, num_tokens), mask

    def record(self) -> EncoderRecord | None:
        """What embeddings.json says; None in a folder from elsewhere."""
        if self._has_record is None:
            self._record = read_record(self.folder)
            self._has_record = self._record is not None
            if not self._has_record:
                log.info("%s has no %s: taken as it is, whatever encoder it is of", self.folder, RECORD)
        return self._record

    @property
    def width(self) -> int:
        """Numbers per token, by the record, or else by the first file that can be read."""
        if self._width is None:
            record = self.record()
            self._width = record.width if record else self._width_of_files()
        return self._width

    def require_encoder(self, name: str, num_tokens: int | None = None) -> None:
        """Raise unless the embeddings are of the encoder ``name``: its whole name, or its kind ("t5", "bytes")."""
        record = self.record()
        if record is not None and not is_encoder(record.encoder, name):
            raise DataError(
                f"{self.folder} holds embeddings by {record.encoder}, but {name} was asked for. Ask for that one"
                f" (text_encoder={parse_name(record.encoder).kind}) if the model takes it, or delete the folder and"
                f" encode the captions again: {encode_commands(self.folder.parent, name, num_tokens)}"
            )

    def command(self) -> str:
        """The command that adds what is missing, with the encoder of the folder."""
        record = self.record()
        return encode_commands(self.folder.parent, record.encoder if record else "")

    def _width_of_files(self) -> int:
        fault: DataError | None = None
        for paths in embedding_files(self.folder).values():
            try:
                return int(read_embedding(paths[0]).shape[1])
            except DataError as error:
                fault = fault or error
        raise fault or DataError(f"{self.folder} holds no embeddings ({', '.join(SUFFIXES)}).")


def is_encoder(encoder: str, name: str) -> bool:
    """Whether the encoder ``name``, or encoders of that kind, are what is recorded as ``encoder``."""
    return encoder == name or encoder.startswith(f"{name}-")


def embed_captions(
    folder: Path | str,
    captions: Mapping[str, str],
    encoder: TextEncoder | Callable[[], TextEncoder],
    *,
    kind: str | None = None,
    form: str = "pickle",
    shard: tuple[int, int] = (0, 1),
    batch_size: int = 8,
    cache: Path | str | None = None,
    adopt: bool = False,
    dry_run: bool = False,
) -> Counts:
    """Write the embedding of every caption, by stem, that the folder does not have yet or has of another text.

    Equal captions are encoded once, and with ``cache``, a folder, once for all data sets. ``encoder`` may be a function
    that makes it: it is called only when something is missing; ``kind`` ("t5", "bytes") then says early that the
    folder is of another one. ``shard`` (i, n) does every n-th stem from the i-th on, for n processes at a time.
    """
    folder = Path(folder)
    _check(form, shard, batch_size)
    plan = _plan(folder, captions, shard, adopt)
    record = plan.record
    if record is not None and kind is not None and not is_encoder(record.encoder, kind):
        raise _mixed(folder, record, kind)
    if record is not None and isinstance(encoder, TextEncoder) and record.encoder != encoder.name:
        raise _mixed(folder, record, encoder.name)
    if record is None and plan.files and not adopt:
        if plan.todo:
            raise DataError(
                f"{folder} holds {len(plan.files)} embeddings from elsewhere: no {RECORD} says by which encoder, so"
                f" {len(plan.todo)} more must not be mixed in. With --adopt a few of them are compared with this"
                " encoder's, and the folder is taken over; or delete it and encode all."
            )
        log.info("%s has no %s: its %d embeddings are taken as they are", folder, RECORD, len(plan.files))
    has_work = bool(plan.todo or (adopt and plan.unrecorded))
    if dry_run or not has_work:
        return plan.counts

    made = encoder if isinstance(encoder, TextEncoder) else encoder()
    if record is not None and record.encoder != made.name:
        raise _mixed(folder, record, made.name)
    _compare(plan.files, plan.unrecorded, made)
    needed = sum(2 * made.width * min(made.num_tokens, len(text.encode()) + 1) + 4096 for text in plan.todo.values())
    require_space(folder, needed, f"writing {len(plan.todo)} embeddings")
    if shard[1] == 1:
        storage.makedirs(folder)
        storage.remove_stale_temporaries(folder)
    done = dict(plan.done)
    revision = next_revision(folder)

    def flush() -> None:
        write_record(folder, EncoderRecord(made.name, made.width, made.num_tokens, done), shard, revision)

    flush()  # before any file: files without a record are from elsewhere
    if shard[1] == 1:
        remove_parts(folder)
    source = EmbeddingCache(made, cache, memory_bytes=0) if cache is not None else made
    next_flush = time.monotonic() + _FLUSH_SECONDS

    def write(item: tuple[str, Tensor]) -> str:
        write_embedding(folder, *item, form, plan.files.get(item[0], []))
        return item[0]

    try:
        with (
            ThreadPoolExecutor(_WRITERS) as pool,  # a file waits for its disk most of the time
            Progress("embeddings", len(plan.todo), unit="file") as progress,
        ):
            for items in _encoded(source, plan.todo, batch_size):
                for stem in pool.map(write, items):
                    done[stem] = caption_hash(captions[stem])
                progress.update(len(items))
                if (now := time.monotonic()) > next_flush:
                    flush()
                    done_at = time.monotonic()
                    next_flush = done_at + max(_FLUSH_SECONDS, (done_at - now) / _FLUSH_SHARE)
    finally:
        flush()
    return plan.counts


@dataclass(frozen=True)
class _Plan:
    """What a folder has and lacks of some captions."""

    record: EncoderRecord | None
    files: dict[str, list[Path]]
    todo: dict[str, str]  # captions to encode
    unrecorded: dict[str, str]  # captions whose file may be of them: nothing says so
    done: dict[str, str]  # what the record will say before anything is written
    counts: Counts


def _plan(folder: Path, captions: Mapping[str, str], shard: tuple[int, int], adopt: bool) -> _Plan:
    files = embedding_files(folder)  # before the record: where files are ours, there is one
    record = read_record(folder)
    known = record.captions if record is not None else {}
    todo, unrecorded, done = {}, {}, {}
    for stem in sorted(captions)[shard[0] :: shard[1]]:
        digest = caption_hash(captions[stem])
        if stem in files and known.get(stem) == digest:
            done[stem] = digest
        elif stem in files and stem not in known and (adopt or record is None):
            unrecorded[stem] = captions[stem]
            done[stem] = digest
        else:  # without a file, of another text, or left by a process that was killed
            todo[stem] = captions[stem]
    counts = Counts(
        written=len(todo),
        encoded=len(set(todo.values())),
        unchanged=len(done),
        orphans=tuple(sorted(set(files) - set(captions))),
    )
    if shard[1] == 1:  # the record of the whole folder keeps what has no caption any more
        done = {stem: digest for stem, digest in known.items() if stem in files and stem not in captions} | done
    return _Plan(record, files, todo, unrecorded, done, counts)


def _encoded(
    encoder: TextEncoder, captions: Mapping[str, str], batch_size: int
) -> Iterator[Sequence[tuple[str, Tensor]]]:
    """Stems with their float16 rows, some at a time; captions of like length are encoded together."""
    stems_of: dict[str, list[str]] = {}
    for stem, caption in captions.items():
        stems_of.setdefault(caption, []).append(stem)
    for batch in _batches(sorted(stems_of, key=lambda caption: (len(caption), caption)), batch_size):
        items: list[tuple[str, Tensor]] = []
        for caption, embedding in zip(batch, encoder.encode(batch)):
            rows = trimmed(embedding).to("cpu", torch.float16)
            if not torch.isfinite(rows).all():
                raise DataError(
                    f"The embedding of {caption[:60]!r} by {encoder.name} does not fit float16 (NaN, infinity, or above"
                    " 65504): the weights or the dtype are wrong. T5 is run in bfloat16 or float32."
                )
            items += [(stem, rows) for stem in stems_of[caption]]
        yield from _batches(items, _AT_ONCE)


def _batches(items: Sequence[Item], size: int) -> Iterable[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _compare(files: Mapping[str, Sequence[Path]], captions: Mapping[str, str], encoder: TextEncoder) -> None:
    """Raise unless a few of the files look like this encoder's embeddings of these captions."""
    for stem in sorted(captions)[:: max(len(captions) // _NUM_COMPARED, 1)][:_NUM_COMPARED]:
        path = files[stem][0]
        found = trimmed(read_embedding(path))  # some are padded
        expected = trimmed(encoder.encode([captions[stem]])[0]).to("cpu", torch.float32)
        is_like = found.shape == expected.shape and (
            torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item() > _SIMILAR
        )
        if not is_like:
            raise DataError(
                f"{path} is not what {encoder.name} makes of {captions[stem][:60]!r} (file {list(found.shape)}, encoder"
                f" {list(expected.shape)}): the folder is of another encoder or other captions. Delete it."
            )


def _mixed(folder: Path, record: EncoderRecord, name: str) -> DataError:
    return DataError(
        f"{folder} holds embeddings by {record.encoder}; those by {name} must not be mixed in. Delete the folder to"
        " encode all with the new one, or give the same encoder, weights, dtype and number of tokens."
    )


def _check(form: str, shard: tuple[int, int], batch_size: int) -> None:
    if form not in FORMS:
        raise ConfigError(f"Embeddings have no form '{form}'.{near(form, FORMS)}")
    if not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard {shard[0]}/{shard[1]}: it is i/n with i from 0 to n - 1.")
    if batch_size < 1:
        raise ConfigError(f"batch_size is 1 or more, not {batch_size}.")
