# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any


def records(run_dir: Path | str) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
