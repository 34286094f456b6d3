# SPDX-License-Identifier: Apache-2.0
"""The captions of a folder of clips, for training that encodes them itself.

DIR/metas/NAME.txt         form "text"
DIR/captions/NAME.json     form "json": {"MODEL": {"long": "...", "medium": "...", "short": "..."}}, by who wrote them
"""

import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from cosmos_predict2.data.jobs import read_caption
from imaginaire.errors import ConfigError, DataError, near

log = logging.getLogger(__name__)

FORMS = {"text": ("metas", ".txt"), "json": ("captions", ".json")}
SHOWN = 5  # names in a message


class CaptionFiles:
    """Captions by the stem of their clip; of a JSON file that of the first model that wrote one of ``prompt_type``."""

    def __init__(self, dataset_dir: Path, form: str = "text", prompt_type: str = "long") -> None:
        if problem := form_problem(form):
            raise ConfigError(problem)
        name, self._suffix = FORMS[form]
        self.folder = dataset_dir / name
        self._prompt_type = prompt_type
        if not self.folder.is_dir():
            raise DataError(
                f"{dataset_dir} has no folder {name} with captions ({name}/NAME{self._suffix} of each clip), which are"
                " to be encoded in training."
            )

    def stems(self) -> set[str]:
        """All that have a caption."""
        return {stem for stem, suffix in map(os.path.splitext, os.listdir(self.folder)) if suffix == self._suffix}

    def of(self, files: Collection[str]) -> list[str]:
        """The stems among ``files`` that have a caption, at least one; the others are told."""
        known = self.stems()
        found = [stem for stem in files if stem in known]
        missing = [stem for stem in files if stem not in known]
        if not found:
            raise DataError(f"None of the {len(files)} clips has a caption in {self.folder} (NAME{self._suffix}).")
        if missing:
            shown = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
            log.warning(
                "%d of %d clips have no caption in %s and are left out: %s",
                *(len(missing), len(files), self.folder, shown),
            )
        return found

    def read(self, stem: str) -> str:
        """The caption of a clip."""
        path = self.folder / f"{stem}{self._suffix}"
        if self._suffix == ".txt":
            return read_caption(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as JSON: {error}.") from error
        found = dict(_texts(content))
        if self._prompt_type not in found:
            raise DataError(
                f"{path} has no caption called '{self._prompt_type}' (prompt_type); expected is"
                f' {{"MODEL": {{"{self._prompt_type}": "..."}}}}.{near(self._prompt_type, found)}'
            )
        return found[self._prompt_type]


def form_problem(form: str) -> str | None:
    """What is wrong with the name of a form, if anything."""
    return None if form in FORMS else f"There is no caption_format '{form}'.{near(form, FORMS)}"


def _texts(content: object) -> Iterator[tuple[str, str]]:
    """(length, text) of each text that is not empty; of several models the first one comes last, and so counts."""
    by_model = list(content.values()) if isinstance(content, dict) else []
    for texts in reversed(by_model):
        for name, text in texts.items() if isinstance(texts, dict) else ():
            if isinstance(text, str) and text.strip():
                yield str(name), text.strip()
