# SPDX-License-Identifier: Apache-2.0
"""A blocklist of words and phrases for prompts: the released one where it was downloaded, else a small one of our own.

Words are compared without regard to case, accents, signs in place of letters and the endings of plurals and verbs.
Entries of the whitelist are never an objection, nor are words inside a whitelisted phrase.
"""

import importlib.resources
import re
from collections.abc import Iterable, Iterator, Sequence, Set

from cosmos_predict2.guardrail.words import ANY, ascii_text, forms_of, words_of
from cosmos_predict2.interfaces import Verdict
from cosmos_predict2.released import DEFAULT_DIR, get_guardrail_dir
from imaginaire import storage
from imaginaire.errors import CheckpointError


class Blocklist:
    """A guardrail that objects to prompts with blocked words or phrases, and to empty ones."""

    name = "blocklist"

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        """The lists below ``checkpoint_dir``/nvidia/Cosmos-Guardrail1/blocklist, else those of the package."""
        folder = storage.join(
            get_guardrail_dir(root=None if checkpoint_dir in (None, DEFAULT_DIR) else checkpoint_dir), "blocklist"
        )
        if storage.is_folder(folder):
            blocked, allowed, exact = (_entries(folder, name) for name in ("custom", "whitelist", "exact_match"))
            if not blocked:
                raise CheckpointError(
                    f"{folder} has no entries in 'custom': its download is incomplete. Repeat it:"
                    " python -m scripts.download_checkpoints --model_types video2world --no_text_encoder"
                )
            self.source = f"{folder}, {len(blocked) + len(exact)} entries"
        else:
            blocked, allowed, exact = _embedded("blocked.txt"), _embedded("allowed.txt"), []
            self.source = f"built-in list, {len(blocked)} entries"
        self._allowed = _trie(tuple(words_of(entry)) for entry in allowed)
        self._blocked = _trie(tuple(words_of(entry)) for entry in blocked)
        self._exact = _trie(_exact_words(entry) for entry in exact)

    def check_prompt(self, prompt: str) -> Verdict:
        if not prompt.strip():
            return Verdict(False, "the prompt is empty")
        words = words_of(prompt)
        if (found := self._first_blocked(words)) is not None:
            return Verdict(False, f"the prompt contains '{found}'")
        words = list(_exact_words(prompt))
        forms = [{word} for word in words]
        for start in range(len(words)):
            if (end := _longest(self._exact, forms, start)) > start:
                return Verdict(False, f"the prompt contains '{' '.join(words[start:end])}'")
        return Verdict(True)

    def _first_blocked(self, words: list[str]) -> str | None:
        """The first words that the list blocks, as the prompt has them."""
        forms = [forms_of(word) for word in words]
        allowed: set[int] = set()
        for start in range(len(words)):
            allowed.update(range(start, _longest(self._allowed, forms, start)))
        for start in range(len(words)):
            end = _longest(self._blocked, forms, start)
            if not all(i in allowed for i in range(start, end)):
                return " ".join(words[start:end])
        return None


class _Node:
    """Phrases that begin alike, by their next word."""

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        self.is_end = False

    def after(self, forms: Iterable[str]) -> Iterator["_Node"]:
        for form in forms:
            if ANY in form and form not in self.next:
                pattern = re.compile(".".join(map(re.escape, form.split(ANY))))
                yield from (node for word, node in self.next.items() if pattern.fullmatch(word))
            elif form in self.next:
                yield self.next[form]


def _trie(phrases: Iterable[tuple[str, ...]]) -> _Node:
    root = _Node()
    for phrase in phrases:
        node = root
        for word in phrase:
            node = node.next.setdefault(word, _Node())
        node.is_end = bool(phrase)
    root.is_end = False
    return root


def _longest(root: _Node, forms: Sequence[Set[str]], start: int) -> int:
    """The end of the longest phrase that begins at ``start``; ``start`` itself where none does."""
    nodes, end = [root], start
    for i in range(start, len(forms)):
        nodes = [after for node in nodes for after in node.after(forms[i])]
        if not nodes:
            break
        if any(node.is_end for node in nodes):
            end = i + 1
    return end


def _exact_words(text: str) -> tuple[str, ...]:
    """Words as they are, in lower case. A similarity of at least (n - 0.4) / n to an entry of n letters, which the
    released rule asks for, has only the entry itself."""
    return tuple(re.findall(r"[^\W_]+", ascii_text(text)))


def _entries(folder: str, name: str) -> list[str]:
    """The lines of a list, which is a file or a folder of files."""
    path = storage.join(folder, name)
    names = [name for name in storage.listdir(path) if not name.startswith(".")] if storage.is_folder(path) else []
    files = [storage.join(path, name) for name in names] or [path, f"{path}.txt"]
    return [line for file in files if storage.exists(file) for line in _lines(storage.read_text(file))]


def _embedded(name: str) -> list[str]:
    return _lines(importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
