# SPDX-License-Identifier: Apache-2.0
"""Prompts as data."""

from pathlib import Path

from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT

DEFAULT_FILE = Path(__file__).parents[2] / "prompts" / "video2world" / "negative" / "default.txt"


def test_the_file_of_the_default_negative_prompt_is_what_the_code_uses() -> None:
    assert DEFAULT_FILE.read_text(encoding="utf-8") == DEFAULT_NEGATIVE_PROMPT + "\n"
