# SPDX-License-Identifier: Apache-2.0
"""Embeddings for the captions of a data set: their sources, and warnings about what does not match.

DIR/metas/NAME.txt      any data set
DIR/metadata.csv        GR00T: a clip's file name, a comma, its prompt
one prompt for all      Cosmos-NeMo-Assets
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cosmos_predict2.data.video.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import files_by_stem, read_caption, require_files
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.embeddings.encode import Counts, embed_captions
from cosmos_predict2.text.embeddings.folder import FOLDER_NAMES, find_embedding_dir
from cosmos_predict2.tools.jobs import Outcome
from cosmos_predict2.tools.prepare.records import write_text
from imaginaire.errors import DataError, listed

log = logging.getLogger(__name__)

Captions = Outcome[tuple[str, str]]  # stem and text; a sentence for each that cannot be used


def captions_of_metas(dataset: Path) -> Captions:
    """The captions of ``metas/``. Raises where there is none at all."""
    captions = Captions()
    for stem, path in require_files(dataset / "metas", (".txt",), "captions").items():
        try:
            captions.results.append((stem, read_caption(path)))
        except DataError as error:
            captions.faults.append(str(error))
    return captions


def captions_of_csv(path: Path, prefix: str = "") -> Captions:
    """``prefix`` and prompt of each clip of a table: a header, then lines of file name, comma, prompt.

    Only the first comma separates, so a prompt may have others without being quoted.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # prompts may hold what else splitlines() splits at
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(
            f"There is no table of prompts {path} ({error.strerror or error}). Give it with --meta_csv, or fetch the"
            " data set: python -m scripts.prepare_groot_data"
        ) from error
    if lines and Path(_unquoted(lines[0].partition(",")[0])).suffix.lower() in VIDEO_SUFFIXES:
        raise DataError(
            f"{path} begins with a clip, '{lines[0][:60]}'; its first line is for the names of the columns."
        )
    if (columns := lines[0].split(","))[2:]:
        raise DataError(
            f"{path} has {len(columns)} columns, {lines[0][:80]}; expected two: a clip's file name, its prompt."
        )
    captions, texts = Captions(), dict[str, str]()
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, comma, prompt = line.partition(",")
        if prompt.lstrip().startswith('"') and prompt.count('"') % 2:
            captions.faults.append(f"{path}:{number} is '{line[:60]}'; its prompt has no closing quote in this line.")
            continue
        clip, prompt = Path(_unquoted(name)), _unquoted(prompt)
        stem = clip.stem if clip.suffix.lower() in VIDEO_SUFFIXES else clip.name  # without such an end it is a stem
        if not comma or not stem or not prompt:
            captions.faults.append(f"{path}:{number} is '{line[:60]}'; expected a file name, a comma and a prompt.")
            continue
        if Path(prompt).suffix.lower() in VIDEO_SUFFIXES:
            raise DataError(
                f"{path}:{number} has a clip, '{prompt[:60]}', in place of its prompt: the name comes first."
            )
        text = (prefix + prompt).strip()
        if texts.setdefault(stem, text) != text:
            captions.faults.append(f"{path}:{number} has a second, different prompt for '{stem}'.")
    captions.results.extend(texts.items())
    if not captions.results and not captions.faults:
        raise DataError(f"{path} has no clips below its header.")
    return captions


def captions_of_prompt(dataset: Path, prompt: str, is_image: bool = False, camera: str = "") -> Captions:
    """The same prompt for every clip (or picture), except where ``metas/`` has a text already.

    Of several cameras each has a folder below ``videos/``, ``metas/`` and ``t5_xxl/``.
    """
    folder, suffixes, what = _media(is_image)
    if not prompt.strip():
        raise DataError("--prompt is empty: describe what is to be seen.")
    captions, others = Captions(), []
    for stem in require_files(dataset / folder / camera, suffixes, what):
        path = dataset / "metas" / camera / f"{stem}.txt"
        try:
            text = read_caption(path) if path.exists() else prompt.strip()
        except DataError as error:
            captions.faults.append(str(error))
            continue
        captions.results.append((stem, text))
        if text != prompt.strip():
            others.append(stem)
    if others:
        log.warning(
            "%s: captions other than --prompt, which are kept: %d (%s). Delete them to have it there.",
            dataset / "metas",
            len(others),
            listed(others),
        )
    return captions


def write_metas(dataset: Path, captions: Captions, camera: str = "") -> None:
    """Write ``metas/NAME.txt`` wherever its text differs."""
    for stem, text in captions.results:
        path = dataset / "metas" / camera / f"{stem}.txt"
        if not path.exists() or path.read_bytes().strip() != text.encode():
            write_text(path, text + "\n")


def compare_with_clips(dataset: Path, captions: Captions, camera: str = "") -> None:
    """Warn of clips without a caption and of captions without a clip, with their counts and names."""
    for folder, suffixes, what in (_media(False), _media(True)):
        clips = files_by_stem(dataset / folder / camera, suffixes)
        if not clips:
            continue
        stems = {stem for stem, _ in captions.results}
        if missing := sorted(set(clips) - stems):
            log.warning(
                "%s: %s without a caption: %d of %d (%s)", dataset, what, len(missing), len(clips), listed(missing)
            )
        if extra := sorted(stems - set(clips)):
            log.warning("%s: captions without a file in %s/: %d (%s)", dataset, folder, len(extra), listed(extra))
        return
    log.warning("%s: captions, but no file in videos/ or images/: %d", dataset, len(captions.results))


def embed_dataset(
    dataset: Path,
    captions: Captions,
    encoder: TextEncoder | Callable[[], TextEncoder],
    *,
    camera: str = "",
    dry_run: bool = False,
    **options: Any,
) -> Counts:
    """Write what the data set's folder of embeddings lacks, and log it; ``options`` are those of `embed_captions`."""
    folder = (find_embedding_dir(dataset) or dataset / FOLDER_NAMES[0]) / camera
    counts = embed_captions(folder, dict(captions.results), encoder, dry_run=dry_run, **options)
    log.info(
        "%s: embeddings %s: %d, of %d different captions; kept as they are: %d",
        folder,
        "that would be written" if dry_run else "written",
        counts.written,
        counts.encoded,
        counts.unchanged,
    )
    if counts.orphans:
        log.warning("%s: embeddings of no caption: %d (%s)", folder, len(counts.orphans), listed(counts.orphans))
    return counts


def _media(is_image: bool) -> tuple[str, Sequence[str], str]:
    return ("images", IMAGE_SUFFIXES, "pictures") if is_image else ("videos", VIDEO_SUFFIXES, "clips")


def _unquoted(text: str) -> str:
    """The text without spaces and one pair of quotes around it; doubled quotes inside such a pair become single."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1].replace('""', '"').strip()
    return text
