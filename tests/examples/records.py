# SPDX-License-Identifier: Apache-2.0
"""Records that programs write beside their videos."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def record_of(video: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(video.with_suffix(".json").read_text())
    return found


def frames_of(video: Path, main: Callable[[list[str]], int] | None = None, *flags: str) -> str:
    """The digest of a video's frames; with a program, which makes it first."""
    assert main is None or main([*flags, "--save_path", str(video)]) == 0
    return str(record_of(video)["frames_sha256"])
