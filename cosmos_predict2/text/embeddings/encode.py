# SPDX-License-Identifier: Apache-2.0
"""An encoder that remembers its embeddings; and the embeddings of a data set's captions, written into its folder: a run
that was stopped continues where it was.

A folder without a record was made by other software with an unknown encoder. Adding to it is refused unless ``adopt``
is set, which compares a few of its files with the encoder first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import prompt_list
from cosmos_predict2.text.embeddings.folder import (
    RECORD,
    EncoderRecord,
    caption_hash,
    embedding_files,
    is_encoder,
    next_revision,
    read_embedding,
    read_record,
    remove_parts,
    write_embedding,
    write_record,
)
from cosmos_predict2.text.embeddings.pickles import padded, trimmed
from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.log import Progress


class EmbeddingCache:
    """Gives what the encoder gives, and asks it only for prompts that it has not seen.

    Embeddings are kept in bfloat16 where it holds all their numbers as they are, those of an encoder in bfloat16 for
    one, and in float32 where not: up to ``memory_bytes`` of them, the longest unused leaving first.
    """

    def __init__(self, encoder: TextEncoder, memory_bytes: int = 256 * 2**20) -> None:
        self.name = encoder.name
        self.num_tokens = encoder.num_tokens
        self.width = encoder.width
        self._encoder = encoder
        self._memory_bytes = memory_bytes
        self._memory: OrderedDict[str, Tensor] = OrderedDict()  # by prompt, on the CPU, without zeros at the end
        self._used_bytes = 0
        self._device = torch.device("cpu")

    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width] float32, on the device that ``to`` named last (at first the CPU)."""
        batch = prompt_list(prompts)
        found = {prompt: self._memory[prompt] for prompt in dict.fromkeys(batch) if prompt in self._memory}
        for prompt in found:
            self._memory.move_to_end(prompt)
        if missing := [prompt for prompt in dict.fromkeys(batch) if prompt not in found]:
            for prompt, embedding in zip(missing, self._encoder.encode(missing)):
                found[prompt] = self._keep(prompt, embedding)
        rows = [padded(found[prompt], self.num_tokens) for prompt in batch]
        return torch.stack(rows).to(self._device, non_blocking=True)

    def to(self, device: torch.device | str) -> "EmbeddingCache":
        self._device = torch.device(device)
        self._encoder.to(device)
        return self

    def _keep(self, prompt: str, embedding: Tensor) -> Tensor:
        row = trimmed(embedding).detach()
        half = row.bfloat16()
        row = (half if torch.equal(half.to(row.dtype), row) else row).to("cpu", copy=True)  # bfloat16 if exact
        if row.nbytes <= self._memory_bytes:
            self._memory[prompt] = row
            self._used_bytes += row.nbytes
        while self._used_bytes > self._memory_bytes:
            _, oldest = self._memory.popitem(last=False)
            self._used_bytes -= oldest.nbytes
        return row


Item = TypeVar("Item")

_WRITERS = 8  # threads, as a file waits for its disk most of the time
_AT_ONCE = 256  # files between two looks at the clock
_FLUSH_SECONDS = 10.0  # so much work is done again after a kill
_NUM_COMPARED = 3
_SIMILAR = 0.98  # cosine: other dtypes of the same weights are above, other weights far below


@dataclass(frozen=True)
class Counts:
    """Numbers of embeddings that ``embed_captions`` wrote, or with ``dry_run`` would write."""

    written: int = 0  # files
    encoded: int = 0  # distinct captions among them
    unchanged: int = 0
    orphans: tuple[str, ...] = ()  # embeddings that no caption belongs to


def embed_captions(
    folder: Path | str,
    captions: Mapping[str, str],
    encoder: TextEncoder | Callable[[], TextEncoder],
    *,
    kind: str | None = None,
    form: str = "pickle",
    shard: tuple[int, int] = (0, 1),
    batch_size: int = 8,
    adopt: bool = False,
    dry_run: bool = False,
) -> Counts:
    """Write the embedding of every caption, by stem, that the folder does not have yet or has of another text.

    Equal captions are encoded once. ``encoder`` may be a function that makes it, called only when something is missing;
    ``kind`` ("t5", "bytes") is then compared with the record first. ``shard`` (i, n) does every n-th stem from the i-th
    on, for n processes at a time.
    """
    folder = Path(folder)
    plan = _plan(folder, captions, shard, adopt)
    for name in (kind, encoder.name if isinstance(encoder, TextEncoder) else None):
        _require_one_encoder(folder, plan, name, adopt)
    has_work = bool(plan.todo or (adopt and plan.unrecorded))
    if dry_run or not has_work:
        return plan.counts
    made = encoder if isinstance(encoder, TextEncoder) else encoder()
    _require_one_encoder(folder, plan, made.name, adopt)
    _compare(plan.files, plan.unrecorded, made)
    needed = sum(2 * made.width * min(made.num_tokens, len(text.encode()) + 1) + 4096 for text in plan.todo.values())
    storage.require_space(folder, needed, f"writing {len(plan.todo)} embeddings")
    if shard[1] == 1:
        storage.makedirs(folder)
        storage.remove_stale_temporaries(folder)
    done, revision = dict(plan.done), next_revision(folder)

    def flush() -> None:
        write_record(folder, EncoderRecord(made.name, made.width, made.num_tokens, done), shard, revision)

    flush()  # before any file: files without a record count as made by another encoder
    if shard[1] == 1:
        remove_parts(folder)
    next_flush = time.monotonic() + _FLUSH_SECONDS

    def write(item: tuple[str, Tensor]) -> str:
        write_embedding(folder, *item, form, plan.files.get(item[0], []))
        return item[0]

    try:
        with ThreadPoolExecutor(_WRITERS) as pool, Progress("embeddings", len(plan.todo), unit="file") as progress:
            for items in _encoded(made, plan.todo, batch_size):
                done |= {stem: caption_hash(captions[stem]) for stem in pool.map(write, items)}
                progress.update(len(items))
                if time.monotonic() > next_flush:
                    flush()
                    next_flush = time.monotonic() + _FLUSH_SECONDS
    finally:
        flush()
    return plan.counts


def _require_one_encoder(folder: Path, plan: "_Plan", name: str | None, adopt: bool) -> None:
    """Raise where the folder is of another encoder than this one, by name or kind, or of an unknown one."""
    record = plan.record
    if record is not None:
        if name is not None and not is_encoder(record.encoder, name):
            raise DataError(
                f"{folder} holds embeddings by {record.encoder}; those by {name} must not be mixed in. Delete the"
                " folder to encode all with the new one, or give the same encoder, weights, dtype and number of tokens."
            )
    elif plan.todo and plan.files and not adopt:
        raise DataError(
            f"{folder} holds {len(plan.files)} embeddings by an unknown encoder (it has no {RECORD}):"
            f" {len(plan.todo)} more must not be mixed in. With --adopt a few of them are compared with this"
            " encoder's, and the folder is taken over; or delete it and encode all."
        )


@dataclass(frozen=True)
class _Plan:
    """Embeddings of some captions that a folder has and lacks."""

    record: EncoderRecord | None
    files: dict[str, list[Path]]
    todo: dict[str, str]  # captions to encode
    unrecorded: dict[str, str]  # captions whose file no record confirms
    done: dict[str, str]  # the captions of the record before anything is written
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
