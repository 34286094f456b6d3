# SPDX-License-Identifier: Apache-2.0
"""Files of a training run beside its checkpoints: config.yaml, and runs.jsonl with a line for each start."""

import logging
from typing import Any

from imaginaire import foreign_json, storage
from imaginaire.config.lazy_config import plain_data
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

STARTS = "runs.jsonl"
RATE_KEY = "frame_rate"  # in runs.jsonl: frames per second of the clips


def run_folder(path: str) -> str:
    """The folder of the run that weights lie in, itself or up to three above; empty where none has a config.yaml."""
    folder = path.rstrip("/")
    for _ in range(4):
        if not folder or folder.endswith(":/"):
            return ""
        is_place = not folder.startswith("hf://") and storage.is_folder(folder)
        if is_place and storage.exists(storage.join(folder, "config.yaml")):
            return folder
        folder = folder.rpartition("/")[0]
    return ""


def run_tree(folder: str) -> dict[str, Any]:
    """The config.yaml of a run as plain data; empty, with a warning, where it cannot be read."""
    file = storage.join(folder, "config.yaml")
    try:
        tree: Any = plain_data(storage.read_text(file), file)
        foreign_json.refuse_interpolations(tree, file)
    except (ConfigError, CheckpointError) as error:
        log.warning("the run's configuration is not read: %s", error)
        return {}
    return tree if isinstance(tree, dict) else {}


def start_facts(folder: str) -> dict[str, Any]:
    """Facts that the starts of a run recorded in runs.jsonl, each key's newest; empty if unreadable, with a warning."""
    file = storage.join(folder, STARTS)
    if not storage.exists(file):
        return {}
    facts: dict[str, Any] = {}
    try:
        for line in storage.read_text(file).splitlines():
            if line.strip():
                facts.update(foreign_json.loads(line))
        foreign_json.refuse_interpolations(facts, file)
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be read: %s", file, error)
        return {}
    return facts
