# SPDX-License-Identifier: Apache-2.0
"""Words of a prompt and the forms that a list may have: case, spelling tricks, endings."""

import functools
import itertools
import re
import unicodedata

# Signs that stand for letters. A star may stand for any.
_DISGUISES = {
    "@": "ao", "4": "a", "3": "e", "1": "il", "!": "i", "|": "il", "0": "o", "$": "s", "5": "s", "7": "t", "+": "t",
}  # fmt: skip
_SIGNS = re.escape("".join(sign for sign in _DISGUISES if not sign.isalnum()) + "*")
_WORD = re.compile(rf"[a-z0-9{_SIGNS}]+(?:'[a-z]+)?")
_MOST_SPELLINGS = 64
_LONGEST_WORD = 60  # no list has a longer one
ANY = "*"
_STRIPPED = "".join(sign for sign in _DISGUISES if not sign.isalnum()) + ANY


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
    bare = word.strip(_STRIPPED)
    drawn_out = {re.sub(r"(.)\1{2,}", kept, each) for each in (word, bare) for kept in (r"\1", r"\1\1")}
    candidates = {each for each in {word, bare, *drawn_out} if 0 < len(each) <= _LONGEST_WORD}
    return frozenset(form for each in candidates for spelling in spellings(each) for form in base_forms(spelling))


def spellings(word: str) -> set[str]:
    """The words that one with signs in place of letters may stand for, and itself; stars stay."""
    if word.isalpha() or not any(sign.isalpha() for sign in word):
        return {word}
    choices = [_DISGUISES.get(sign, sign) for sign in word]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MOST_SPELLINGS:
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
