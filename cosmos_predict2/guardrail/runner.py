# SPDX-License-Identifier: Apache-2.0
"""The guardrails: of prompts, with the prompt refiner, before a generation, and of videos after it.

The refiner is that of refiner.py; any other `interfaces.PromptRefiner` can be plugged in. Of several guardrails the
first that objects decides, and one that fails counts as an objection.

Networks (Llama-Guard, video filter, face blur) are parts where their weights were downloaded; a part that a config
names must be there. The blocklist of words and phrases always is one: the released one where it was downloaded, else a
small one of our own. Words are compared without regard to case, accents, signs in place of letters and the endings of
plurals and verbs. Entries of the whitelist are never an objection, nor are words inside a whitelisted phrase.
"""

import functools
import importlib.resources
import itertools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import attrs
from torch import Tensor

from cosmos_predict2.interfaces import Guardrail, PromptRefiner, Verdict
from cosmos_predict2.released import DEFAULT_DIR, GUARDRAIL, LLAMA_GUARD, REASON1, REPOSITORIES, checkpoint_dir
from imaginaire import storage
from imaginaire.buildable import completed
from imaginaire.config.schema import Section
from imaginaire.errors import CheckpointError, ConfigError, UserError, near

log = logging.getLogger(__name__)

BLOCKLIST = "blocklist"
LICENCE_NOTICE = (
    "the licence of the released weights asks for a substantially similar guardrail where this one is switched off"
)
NETWORKS = {  # part -> its folder below that of the checkpoints
    "llama_guard": LLAMA_GUARD,
    "video_filter": f"{GUARDRAIL}/video_content_safety_filter",
    "face_blur": f"{GUARDRAIL}/face_blur_filter",
}
DOWNLOAD = "python -m scripts.download_checkpoints --model_types video2world --no_text_encoder"

# Signs that stand for letters. A star may stand for any.
_DISGUISES = {
    "@": "ao", "4": "a", "3": "e", "1": "il", "!": "i", "|": "il", "0": "o", "$": "s", "5": "s", "7": "t", "+": "t",
}  # fmt: skip
ANY = "*"
_SIGNS = "".join(sign for sign in _DISGUISES if not sign.isalnum()) + ANY
_WORD = re.compile(rf"[a-z0-9{re.escape(_SIGNS)}]+(?:'[a-z]+)?")
_MOST_SPELLINGS = 64
_LONGEST_WORD = 60  # no list has a longer one
_ENDINGS = (
    ("ies", ("y",)),
    ("es", ("", "e")),
    ("s", ("",)),
    ("ied", ("y",)),
    ("ed", ("", "e")),
    ("ing", ("", "e")),
    ("ings", ("", "e")),
    ("ly", ("",)),
)
_DOUBLING = ("ed", "ing", "ings")


class BlockedError(UserError):
    """A guardrail refused the prompt or the video; the message names the rule."""


@attrs.define(kw_only=True, slots=False)
class GuardrailConfig(Section):
    """Settings of the checks of prompts and videos: on or off, the parts that must be there, the place of their files.

    Parts are blocklist, llama_guard, video_filter, face_blur. One that was downloaded is used though it is not named.
    """

    checkpoint_dir: str = "checkpoints"
    offload_model_to_cpu: bool = True
    enabled: bool = True
    parts: list[str] = attrs.field(factory=lambda: [BLOCKLIST])


@attrs.define(kw_only=True, slots=False)
class PromptRefinerConfig(Section):
    """Rewriting of prompts before generation: on or off, and the folder of its weights."""

    checkpoint_dir: str = "checkpoints"
    offload_model_to_cpu: bool = True
    enabled: bool = True


def create_prompt_refiner(config: PromptRefinerConfig, *, is_explicit: bool = False) -> PromptRefiner | None:
    """The refiner of a config; None where it is off, or not downloaded. The latter is an error where one was asked for
    by name rather than by default."""
    folder = _place(config.checkpoint_dir, REASON1)
    if config.enabled and storage.is_folder(folder):
        from cosmos_predict2.guardrail.refiner import Reason1Refiner

        return Reason1Refiner(folder, config.offload_model_to_cpu)
    if config.enabled and is_explicit:
        raise CheckpointError(
            f"The prompt refiner has no weights: {folder} does not exist. Fetch them (16 GB): hf download {REASON1}"
            f" --revision {REPOSITORIES[REASON1].revision} --local-dir {folder}. Or leave it out:"
            " --disable_prompt_refiner, prompt_refiner_config.enabled=false."
        )
    return None


class GuardrailRunner:
    """Several guardrails as one."""

    def __init__(self, guardrails: Sequence[Guardrail]) -> None:
        self.guardrails = tuple(completed(part, Guardrail) for part in guardrails)
        for part in self.guardrails:
            if not (part.check_prompt or part.check_video or part.postprocess):
                found = f"{type(part).__name__} guards nothing"
                raise ConfigError(f"{found}: give it check_prompt, check_video or postprocess.")

    def run_safety_check(self, prompt: str) -> Verdict:
        """Safe where no guardrail objects; else the first objection, "name: reason"."""
        checks = [(part.name, part.check_prompt) for part in self.guardrails if part.check_prompt]
        if not checks:
            log.warning("no guardrail is set up: every prompt counts as safe")
        return _first_objection(checks, prompt)


def _first_objection(checks: Sequence[tuple[str, Callable[[Any], Verdict]]], what: Any) -> Verdict:
    for name, check in checks:
        try:
            verdict = check(what)
        except Exception as error:  # a guardrail is foreign code, and one that fails has cleared nothing
            log.exception("guardrail %s failed", name)
            return Verdict(False, f"{name}: the check failed ({type(error).__name__}: {error})")
        if not verdict.is_safe:
            return Verdict(False, f"{name}: {verdict.message}")
    return Verdict(True)


def create_text_guardrail_runner(
    checkpoint_dir: str | None = None, offload_model_to_cpu: bool = False, parts: Sequence[str] = (BLOCKLIST,)
) -> GuardrailRunner:
    """The guardrails of prompts alone."""
    return _created(checkpoint_dir, offload_model_to_cpu, parts, "llama_guard")


def create_video_guardrail_runner(
    checkpoint_dir: str | None = None, offload_model_to_cpu: bool = False
) -> GuardrailRunner:
    """The guardrails of videos alone, both of which must be there."""
    return _created(checkpoint_dir, offload_model_to_cpu, ("video_filter", "face_blur"))


def create_guardrail(config: GuardrailConfig, *, with_networks: bool = True) -> GuardrailRunner | None:
    """The guardrails of a config; None where they are switched off. Without networks, those in the config are checked
    to be there."""
    if not config.enabled:
        return None
    more = NETWORKS if with_networks else ()
    return _created(
        config.checkpoint_dir, config.offload_model_to_cpu, config.parts, *more, with_networks=with_networks
    )


def _created(
    folder: str | None, offload: bool, parts: Sequence[str], *where_downloaded: str, with_networks: bool = True
) -> GuardrailRunner:
    """The runner of these parts, and of those others whose folder is there."""
    found: list[Guardrail] = []
    named = [part.lower().replace("-", "_") for part in parts]
    for i, part in enumerate(named):
        if part not in (known := (BLOCKLIST, *NETWORKS)):
            raise ConfigError(f"There is no guardrail '{parts[i]}' (guardrail_config.parts).{near(parts[i], known)}")
        if part in NETWORKS and not storage.is_folder(place := _place(folder, NETWORKS[part])):
            raise CheckpointError(
                f"The guardrail '{parts[i]}' (guardrail_config.parts) has no weights: {place} does not exist. Fetch"
                f" them: {DOWNLOAD} --all_guardrails"
            )
    named += [part for part in where_downloaded if storage.is_folder(_place(folder, NETWORKS[part]))]
    for part in dict.fromkeys(named):
        if part == BLOCKLIST:
            found.append(Blocklist(folder))
        elif with_networks:
            from cosmos_predict2.guardrail import face_blur, judges

            classes: list[Any] = [judges.LlamaGuard, judges.VideoFilter, face_blur.FaceBlur]
            found += [cls(_place(folder, NETWORKS[part]), offload) for cls in classes if cls.name == part]
    return GuardrailRunner(found)


def _place(folder: str | None, name: str) -> str:
    return storage.join(checkpoint_dir(None if folder == DEFAULT_DIR else folder), name)


def checked_frames(guardrail: GuardrailRunner | None, frames_C_F_H_W: Tensor) -> Tensor:
    """The uint8 frames of a video as they may be shown; raise BlockedError where the guardrail refuses them."""
    guardrails = () if guardrail is None else guardrail.guardrails
    checks = [(part.name, part.check_video) for part in guardrails if part.check_video]
    editors = [(part.name, part.postprocess) for part in guardrails if part.postprocess]
    if not checks and not editors:
        return frames_C_F_H_W
    frames_F_H_W_C = frames_C_F_H_W.permute(1, 2, 3, 0).cpu()
    if not (verdict := _first_objection(checks, frames_F_H_W_C)).is_safe:
        raise BlockedError(f"The video was refused: {verdict.message}.")
    for name, edit in editors:
        try:
            frames_F_H_W_C = edit(frames_F_H_W_C)
        except Exception as error:  # as of a check that fails
            log.exception("guardrail %s failed", name)
            raise BlockedError(f"The video was withheld: {name} failed ({error}).") from error
    return frames_F_H_W_C.permute(3, 0, 1, 2)


def require_safe(guardrail: GuardrailRunner, prompt: str, stage: str = "prompt") -> None:
    """Raise BlockedError where the guardrail refuses a prompt."""
    if not (verdict := guardrail.run_safety_check(prompt)).is_safe:
        raise BlockedError(f"The {stage} was refused: {verdict.message}.")


def run_text_guardrail(prompt: str, runner: GuardrailRunner) -> bool:
    """True for a prompt that may be used; the reason against another goes to the log."""
    verdict = runner.run_safety_check(prompt)
    if not verdict.is_safe:
        log.warning("prompt refused: %s", verdict.message)
    return verdict.is_safe


def status_line(
    guardrail_config: GuardrailConfig,
    refiner_config: PromptRefinerConfig,
    guardrail: GuardrailRunner | None,
    refiner: PromptRefiner | None = None,
    *,
    is_released: bool = True,
) -> str:
    """``guardrail: blocklist (...), asked: on (not downloaded: ...); prompt refiner: off, asked: on (...)``."""
    if guardrail is None:
        first = f"guardrail: off, asked: {_asked(guardrail_config)}"
        first += f" ({LICENCE_NOTICE})" if is_released and not guardrail_config.enabled else ""
    else:
        sources = {part.name: part.source for part in guardrail.guardrails}
        parts = ", ".join(f"{name} ({source})" if source else name for name, source in sources.items()) or "nothing"
        first = f"guardrail: {parts}, asked: {_asked(guardrail_config)}"
        if absent := [name for name in NETWORKS if name not in sources]:
            first += f" (not downloaded: {', '.join(absent)})"
    second = f"prompt refiner: {'off' if refiner is None else 'on'}, asked: {_asked(refiner_config)}"
    if refiner is None and refiner_config.enabled:
        is_there = storage.is_folder(_place(refiner_config.checkpoint_dir, REASON1))
        second += " (not loaded)" if is_there else " (not downloaded)"
    return f"{first}; {second}"


def _asked(config: GuardrailConfig | PromptRefinerConfig) -> str:
    return "on" if config.enabled else "off"


class Blocklist(Guardrail):
    """A guardrail that objects to prompts with blocked words or phrases, and to empty ones."""

    name = "blocklist"

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        """The lists below ``checkpoint_dir``/nvidia/Cosmos-Guardrail1/blocklist, else those of the package."""
        folder = _place(checkpoint_dir, f"{GUARDRAIL}/blocklist")
        if storage.is_folder(folder):
            blocked, allowed, exact = (_entries(folder, name) for name in ("custom", "whitelist", "exact_match"))
            if not blocked:
                raise CheckpointError(
                    f"{folder} has no entries in 'custom': its download is incomplete. Repeat it: {DOWNLOAD}"
                )
            self.source = f"{folder}, {len(blocked) + len(exact)} entries"
        else:
            blocked, allowed, exact = _embedded("blocked.txt"), _embedded("allowed.txt"), []
            self.source = f"built-in list, {len(blocked)} entries"
        self._allowed = _by_first_word(tuple(words_of(entry)) for entry in allowed)
        self._blocked = _by_first_word(tuple(words_of(entry)) for entry in blocked)
        self._exact = _by_first_word(_exact_words(entry) for entry in exact)

    def check_prompt(self, prompt: str) -> Verdict:
        if not prompt.strip():
            return Verdict(False, "the prompt is empty")
        words, plain = words_of(prompt), list(_exact_words(prompt))
        forms = [forms_of(word) for word in words]
        allowed = {i for phrase in _phrases(self._allowed, forms) for i in phrase}
        found = [words[p.start : p.stop] for p in _phrases(self._blocked, forms) if not allowed.issuperset(p)]
        found += [plain[p.start : p.stop] for p in _phrases(self._exact, [{word} for word in plain])]
        return Verdict(False, f"the prompt contains '{' '.join(found[0])}'") if found else Verdict(True)


def _by_first_word(phrases: Iterable[tuple[str, ...]]) -> Mapping[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for phrase in filter(None, phrases):
        found.setdefault(phrase[0], []).append(phrase)
    return found


def _meant(forms: Set[str], words: Collection[str]) -> set[str]:
    """Those of the words that have one of the forms."""
    found = {form for form in forms if form in words}
    for form in (form for form in forms - found if ANY in form):
        pattern = re.compile(".".join(map(re.escape, form.split(ANY))))
        found |= {word for word in words if pattern.fullmatch(word)}
    return found


def _phrases(known: Mapping[str, list[tuple[str, ...]]], forms: Sequence[Set[str]]) -> Iterator[range]:
    """The places of the longest phrase that begins at each word, where one does."""
    for start, first in enumerate(forms):
        begun = [phrase for word in _meant(first, known) for phrase in known[word] if start + len(phrase) <= len(forms)]
        lengths = [len(p) for p in begun if all(_meant(forms[start + i], {p[i]}) for i in range(1, len(p)))]
        if lengths:
            yield range(start, start + max(lengths))


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


def ascii_text(text: str) -> str:
    """The text in lower case and plain letters: accents and wide forms folded, other non-ASCII runs made a space."""
    folded = unicodedata.normalize("NFKD", text)
    folded = "".join(sign for sign in folded if not unicodedata.combining(sign))
    return re.sub(r"[^\x00-\x7f]+", " ", folded).lower()


def words_of(text: str) -> list[str]:
    """The words in order; letters that stand alone in a row, as in "k i l l", also as one word in their place."""
    found = (word.rstrip("!|+") for word in _WORD.findall(ascii_text(text)))  # signs that are punctuation at the end
    words = [word for word in found if any(sign.isalnum() for sign in word)]
    joined: list[str] = []
    for is_single, run in itertools.groupby(words, key=lambda word: len(word) == 1 and word.isalpha()):
        letters = list(run)
        joined += ["".join(letters)] if is_single and len(letters) > 2 else letters
    return joined


@functools.lru_cache(maxsize=4096)
def forms_of(word: str) -> frozenset[str]:
    """Every form under which a list may have the word; a star in one stands for any letter."""
    bare = word.strip(_SIGNS)
    drawn_out = {re.sub(r"(.)\1{2,}", kept, each) for each in (word, bare) for kept in (r"\1", r"\1\1")}
    candidates = {each for each in {word, bare, *drawn_out} if 0 < len(each) <= _LONGEST_WORD}
    return frozenset(form for each in candidates for spelling in spellings(each) for form in base_forms(spelling))


def spellings(word: str) -> set[str]:
    """The words that one with signs in place of letters may stand for, and itself; stars stay."""
    if word.isalpha() or not any(sign.isalpha() for sign in word):
        return {word}
    choices = [_DISGUISES.get(sign, sign) for sign in word]
    if math.prod(map(len, choices)) > _MOST_SPELLINGS:
        choices = [choice[0] for choice in choices]
    return {"".join(letters) for letters in itertools.product(*choices)} | {word}


def base_forms(word: str) -> set[str]:
    """The word and what is left without the endings of plurals and verbs."""
    word = word.removesuffix("'s")
    forms = {word}
    for ending, replacements in _ENDINGS:
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < 3:
            continue
        forms |= {stem + replacement for replacement in replacements}
        if ending in _DOUBLING and stem[-1] == stem[-2]:
            forms.add(stem[:-1])
    return forms
