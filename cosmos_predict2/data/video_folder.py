# SPDX-License-Identifier: Apache-2.0
"""A data set's folder of clips, pictures or latents: its files, their captions and embeddings, and its faults.

DIR/videos/NAME.mp4          the clips (or images/, latents/)
DIR/t5_xxl/NAME.pickle       an embedding per clip (or .safetensors, or in DIR/text_embedding)
DIR/metas/NAME.txt           its caption, ai_caption of the sample where every clip has one
DIR/captions/NAME.json       with caption_format "json": {"MODEL": {"long": "...", "medium": "...", "short": "..."}}

With text_encoder "none" training encodes the captions: there are no embeddings, and each clip needs its caption.
"""

import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cosmos_predict2.data.clip_dataset import Source, Text, embedded
from cosmos_predict2.data.samples import FrameRule, PackedStrings
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.text.embeddings.folder import FOLDER_NAMES, EmbeddingFolder, caption_hash, find_embedding_dir
from cosmos_predict2.text.trained_text import encode_commands
from imaginaire import foreign_json, storage
from imaginaire.errors import ConfigError, DataError, listed, near, raised_as
from imaginaire.storage.object_store import StrPath

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

SHOWN = 5  # names in a message
THREADS = 16  # that open files, which is mostly waiting for the disk
SAME_RATE = 0.01  # relative: 29.97 and 30 count as equal
SPLITS = ("train", "val", "test")
OF_FOLDER = "a folder of clips or pictures"  # kind of data sets, as DataFacts has it
NO_ENCODER = "none"  # captions are encoded in training
CAPTION_FORMATS = {"text": ("metas", ".txt"), "json": ("captions", ".json")}


@dataclass(frozen=True)
class CaptionedFiles:
    """The files of a folder that have their text."""

    folder: Path
    files: Mapping[str, Path]  # by stem, those without a text too
    stems: list[str]
    embeddings: EmbeddingFolder | None  # None: captions are encoded in training
    captions: "CaptionFiles | None"  # that training encodes, or of another format than metas/


def list_captioned(
    dataset_dir: StrPath,
    content: str = "videos",
    suffixes: Collection[str] = VIDEO_SUFFIXES,
    what: str = "clips",
    *,
    text_encoder: str | None = None,
    num_tokens: int | None = None,
    caption_format: str = "text",
    prompt_type: str = "long",
    is_logged: bool = False,
) -> CaptionedFiles:
    """The files in DIR/content with their text; an error where there are none. ``is_logged``: warn of the others."""
    root = existing_folder(dataset_dir, content)
    captions = embeddings = None
    if text_encoder == NO_ENCODER or caption_format != "text":
        captions = CaptionFiles(root, caption_format, prompt_type)
    files = require_files(root / content, suffixes, what)
    stems = list(files)
    if text_encoder != NO_ENCODER:
        embeddings = _open_embeddings(root, text_encoder, num_tokens)
        stems = _with_embedding(files, embeddings, what, is_logged=is_logged)
    if captions is not None:
        stems = captions.of(stems, is_logged=is_logged)
    return CaptionedFiles(root / content, files, stems, embeddings, captions)


class CaptionedFolder(Source):
    """The files of a folder that can be trained on, in alphabetical order, each with its text.

    A file without an embedding (or caption, where those are encoded in training) is excluded with a warning. A clip
    that is broken or shorter than ``rule`` needs is an error, or with ``skip_bad`` excluded with a warning; only
    headers are read for this.
    """

    def __init__(
        self,
        dataset_dir: StrPath,
        content: str = "videos",
        suffixes: Collection[str] = VIDEO_SUFFIXES,
        what: str = "clips",
        *,
        rule: FrameRule | None = None,
        skip_bad: bool = False,
        text_encoder: str | None = None,
        num_tokens: int = 512,
        caption_format: str = "text",
        prompt_type: str = "long",
        decoder: str = "auto",
        num_threads: int = 1,
    ) -> None:
        text: dict[str, Any] = dict(text_encoder=text_encoder, num_tokens=num_tokens)
        text |= dict(caption_format=caption_format, prompt_type=prompt_type)
        found = list_captioned(dataset_dir, content, suffixes, what, **text, is_logged=True)
        self._folder, self.embeddings = found.folder, found.embeddings
        self.dataset_dir = self._folder.parent
        self._num_tokens = num_tokens
        self._decoder, self._num_threads = decoder, num_threads
        stems = found.stems
        if rule is not None:
            stems = _long_enough([found.files[stem] for stem in stems], stems, rule, skip_bad)
        self.stems = PackedStrings(stems)
        self._files = PackedStrings(found.files[stem].name for stem in stems)
        self._captions = found.captions or _captions_of(self.dataset_dir, stems)
        if self.embeddings is not None and found.captions is None:
            _warn_of_changed_captions(self.embeddings, self._captions, stems, skip_bad)
        log.info("%s: %d %s", self.dataset_dir, len(stems), what)

    def __len__(self) -> int:
        return len(self.stems)

    def path(self, index: int) -> Path:
        return self._folder / self._files[index]

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[clips.Clip]:
        return clips.open_clip(self.path(i), decoder=self._decoder, num_threads=self._num_threads)

    def names(self, i: int, camera: int = 0) -> dict[str, str]:
        return {"video_path": str(self.path(i))}

    def text(self, i: int, frame: int = 0) -> Text:
        """The embedding where there are some, and the caption where every file has one."""
        stem = self.stems[i]
        caption = None if self._captions is None else self._captions.read(stem)
        return embedded(caption, self.embeddings, stem, self._num_tokens)


def existing_folder(dataset_dir: StrPath, content: str) -> Path:
    """The folder, which has a folder ``content`` in it; the error without one lists what is there."""
    if storage.is_remote(dataset_dir):
        raise DataError(
            f"{dataset_dir} is remote; clips are read from a local folder. Copy it to a disk of this machine."
        )
    folder = Path(os.fspath(dataset_dir).removeprefix("file://"))
    if (folder / content).is_dir():
        return folder
    if not folder.is_dir():
        above = next(parent for parent in folder.absolute().parents if parent.is_dir())
        raise DataError(f"There is no folder {folder}. {above} has: {listed(sorted(os.listdir(above))) or 'nothing'}.")
    if splits := [name for name in SPLITS if (folder / name / content).is_dir()]:
        raise DataError(
            f"{folder} has no folder {content}, but {' and '.join(f'{name}/{content}' for name in splits)}."
            f" Give {folder / splits[0]}."
        )
    raise DataError(f"{folder} has no folder {content}. It has: {listed(sorted(os.listdir(folder))) or 'nothing'}.")


def _open_embeddings(dataset_dir: Path, text_encoder: str | None, num_tokens: int | None = None) -> EmbeddingFolder:
    """The embeddings of a data set, which are by ``text_encoder`` where that is given."""
    folder = find_embedding_dir(dataset_dir)
    if folder is None:
        raise DataError(
            f"{dataset_dir} has no text embeddings ({' or '.join(FOLDER_NAMES)}). Write them:"
            f" {encode_commands(dataset_dir, text_encoder or '', num_tokens)}"
        )
    embeddings = EmbeddingFolder(folder)
    if text_encoder is not None:
        embeddings.require_encoder(text_encoder, num_tokens)
    _ = embeddings.record  # read here, once: it has an entry per clip, which each worker process would hold a copy of
    with suppress(DataError):  # a file that cannot be read is reported when it is needed
        _ = embeddings.width
    return embeddings


def files_by_stem(folder: Path, suffixes: Collection[str]) -> dict[str, Path]:
    """The files with one of the suffixes (in any case) in the order of their stems; empty where there is no folder.

    Two files of one stem are an error: their caption, embedding and result would be the same file.
    """
    found: dict[str, Path] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        stem, suffix = os.path.splitext(name)
        if name.startswith(".") or suffix.lower() not in suffixes or not (folder / name).is_file():
            continue
        if other := found.get(stem):
            raise DataError(f"{other} and {name} have the same stem, so they would share a caption. Rename one.")
        found[stem] = folder / name
    return dict(sorted(found.items()))


def require_files(folder: Path, suffixes: Collection[str], what: str) -> dict[str, Path]:
    """`files_by_stem`; without any, an error that lists what is there."""
    if found := files_by_stem(folder, suffixes):
        return found
    wanted = f"{what} ({', '.join('*' + suffix for suffix in suffixes)})"
    if not folder.is_dir():
        beside = os.listdir(folder.parent) if folder.parent.is_dir() else []
        raise DataError(f"There is no folder {folder}; {wanted} were expected there.{near(folder.name, beside)}")
    others = sorted({path.suffix or path.name for path in folder.iterdir()})
    raise DataError(f"{folder} holds no {wanted}; it has {', '.join(others[:8]) or 'nothing'}.")


def _with_embedding(files: Collection[str], embeddings: EmbeddingFolder, what: str, *, is_logged: bool) -> list[str]:
    """The stems among ``files`` that have an embedding, one at least."""
    known, folder = embeddings.stems(), embeddings.folder
    embedded = set(known)
    found = [stem for stem in files if stem in embedded]
    if not found:
        names = f" {folder.name} has {listed(known)}, the {what} are {listed(list(files))}." if known else ""
        raise DataError(
            f"None of the {len(files)} {what} has an embedding in {folder}.{names} Write them: {embeddings.command()}"
        )
    if is_logged and (missing := sorted(set(files) - embedded)):
        counts = f"{len(missing)} of {len(files)} {what}"
        log.warning("%s have no embedding in %s and are excluded: %s", counts, folder, listed(missing))
    return found


def _captions_of(dataset_dir: Path, stems: Sequence[str]) -> "CaptionFiles | None":
    """The captions in metas/, if every clip has one there."""
    metas = dataset_dir / "metas"
    if not metas.is_dir():
        return None
    names = set(os.listdir(metas))
    missing = [stem for stem in stems if f"{stem}.txt" not in names]
    if missing:
        level = logging.INFO if len(missing) == len(stems) else logging.WARNING  # some: a name may be mistyped
        text = "%d of %d have no caption in %s: samples go without ai_caption: %s"
        log.log(level, text, len(missing), len(stems), metas, listed(missing))
        return None
    return CaptionFiles(dataset_dir)


def _warn_of_changed_captions(
    embeddings: EmbeddingFolder, captions: "CaptionFiles | None", stems: Sequence[str], skip_bad: bool
) -> None:
    """Warn of captions that are not those that were encoded; raise for one that is empty by now."""
    record = embeddings.record
    if record is None or captions is None:
        return

    def is_changed(stem: str) -> bool:
        encoded = record.captions.get(stem)
        try:
            return encoded is not None and encoded != caption_hash(captions.read(stem))
        except DataError:
            if skip_bad:  # it is excluded with a warning when it is read
                return False
            raise

    if changed := list(itertools.compress(stems, in_threads(is_changed, stems))):
        log.warning(
            "%d captions in %s changed since they were encoded (%s): training uses the old ones. Encode them again: %s",
            *(len(changed), captions.folder, listed(changed), embeddings.command()),
        )


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The function of every item, in order; for opening files."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def exclude(faults: Sequence[str], total: int, skip_bad: bool, what: str) -> None:
    """Raise for the faults, or with ``skip_bad`` warn of what is excluded."""
    if not faults:
        return
    shown = "".join(f"\n  {fault}" for fault in faults[:SHOWN])
    more = f"\n  ... and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    found = f"{len(faults)} of {total} {what} cannot be used:{shown}{more}"
    if not skip_bad or len(faults) == total:
        cure = "\nRemove them, or exclude them: dataset.skip_bad_samples=True of dataloader_train or dataloader_val."
        raise DataError(found if len(faults) == total else f"{found}{cure}")
    log.warning("%s\nThey are excluded (skip_bad_samples=True).", found)


def _long_enough(paths: Sequence[Path], stems: Sequence[str], rule: FrameRule, skip_bad: bool) -> list[str]:
    good, faults = [], []
    rates: dict[float, str] = {}  # of clips that are good, each with the first of them

    def probed(path: Path) -> tuple[int, float] | DataError:
        try:
            return clips.probe(path)
        except DataError as fault:
            return fault

    for stem, path, found in zip(stems, paths, in_threads(probed, paths), strict=True):
        if isinstance(found, DataError):
            faults.append(str(found))
            continue
        num_frames, fps = found
        if num_frames < rule.frames_needed(fps):
            faults.append(f"{path} has {num_frames} frames, but {rule.in_words(fps)}.")
        else:
            good.append(stem)
            rates.setdefault(fps, str(path))
    exclude(faults, len(stems), skip_bad, "clips")
    if note := _rate_note(rates, rule):
        log.warning("%s", note)
    return good


def _rate_note(rates: Mapping[float, str], rule: FrameRule) -> str | None:
    """A warning where frames repeat or rates differ; ``rates`` maps each rate to one of its clips."""
    if not rates or rule.sampling == "uniform":
        return None
    slowest, fastest = min(rates), max(rates)
    if rule.fps is not None:
        if rule.fps <= slowest * (1 + SAME_RATE):
            return None
        return (
            f"fps={rule.fps:g}, but {rates[slowest]} has {slowest:g} frames per second: its frames repeat, and"
            f" the model learns motion that halts. Set fps={slowest:g} at most, or exclude slower clips."
        )
    if fastest <= slowest * (1 + SAME_RATE):
        return None
    return (
        f"the clips have different rates, from {slowest:g} ({rates[slowest]}) to {fastest:g} frames per second"
        f" ({rates[fastest]}), and fps is not set: equal motion looks slower or faster. Bring all to one rate:"
        f" dataloader_train.dataset.fps={slowest:g}, and the same for dataloader_val."
    )


# ---- captions --------------------------------------------------------------------------------------------------------


class CaptionFiles:
    """Captions by the stem of their clip, for training that encodes them.

    From a JSON file: the caption ``prompt_type`` of the first model that has one.
    """

    def __init__(self, dataset_dir: Path, form: str = "text", prompt_type: str = "long") -> None:
        if form not in CAPTION_FORMATS:
            raise ConfigError(f"There is no caption_format '{form}'.{near(form, CAPTION_FORMATS)}")
        name, self._suffix = CAPTION_FORMATS[form]
        self.folder = dataset_dir / name
        self._prompt_type = prompt_type
        if not self.folder.is_dir():
            raise DataError(
                f"{dataset_dir} has no folder {name} with captions to encode in training ({name}/NAME{self._suffix} for"
                " each clip)."
            )

    def of(self, files: Collection[str], *, is_logged: bool) -> list[str]:
        """The stems among ``files`` that have a caption, one at least."""
        known = {stem for stem, suffix in map(os.path.splitext, os.listdir(self.folder)) if suffix == self._suffix}
        found = [stem for stem in files if stem in known]
        if not found:
            raise DataError(f"None of the {len(files)} clips has a caption in {self.folder} (NAME{self._suffix}).")
        if is_logged and (missing := [stem for stem in files if stem not in known]):
            text = "%d of %d clips have no caption in %s and are excluded: %s"
            log.warning(text, len(missing), len(files), self.folder, listed(missing))
        return found

    def read(self, stem: str) -> str:
        path = self.folder / f"{stem}{self._suffix}"
        if self._suffix == ".txt":
            return read_caption(path)
        with raised_as(DataError, f"{path} cannot be read as JSON", OSError, ValueError):
            content = foreign_json.load(path)
        found = dict(_texts(content))
        if self._prompt_type not in found:
            raise DataError(
                f"{path} has no caption called '{self._prompt_type}' (prompt_type); expected is"
                f' {{"MODEL": {{"{self._prompt_type}": "..."}}}}.{near(self._prompt_type, found)}'
            )
        return found[self._prompt_type]


def _texts(content: object) -> Iterator[tuple[str, str]]:
    """(prompt type, text) of each text that is not empty; the first model comes last and so prevails."""
    by_model = list(content.values()) if isinstance(content, dict) else []
    for texts in reversed(by_model):
        for name, text in texts.items() if isinstance(texts, dict) else ():
            if isinstance(text, str) and text.strip():
                yield str(name), text.strip()


def read_caption(path: Path) -> str:
    """The text of a ``metas/NAME.txt``, without the spaces around it; empty and non-UTF-8 files are errors."""
    try:
        text = path.read_text(encoding="utf-8-sig").strip()  # some editors begin every file with a mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not text:
        raise DataError(f"{path} is empty. Write the clip's caption into it.")
    return text
