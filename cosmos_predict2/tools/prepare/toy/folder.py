# SPDX-License-Identifier: Apache-2.0
"""The toy world written to a folder in one of the layouts of `forms`, with dataset.json and, for people, README.md.

Of an episode the annotation is written last, so what was interrupted goes on where it stopped.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.data.video.media import check_writable
from cosmos_predict2.tools.prepare.records import RECORD, require_own, require_settings, write_text
from cosmos_predict2.tools.prepare.toy.forms import FORMS, layout_of, readable_json
from cosmos_predict2.tools.prepare.toy.settings import ToyFolder, name_of
from cosmos_predict2.toy_world.scene import COLUMNS
from imaginaire import storage
from imaginaire.errors import ConfigError
from imaginaire.progress import Progress

FORMAT = "toy_world/1"
_OURS = {RECORD, "README.md"}.union(*(form.entries for form in FORMS.values()))


def write_folder(out: str, settings: ToyFolder, *, overwrite: bool = False, command: str = "") -> dict[str, Any]:
    """Write the folder, or what is missing of it; gives the contents of its dataset.json."""
    if storage.is_remote(out):
        raise ConfigError(f"The toy world is written to a local folder; {out} is not one. Copy it there afterwards.")
    root = Path(out)
    settings.make(0, 1)  # wrong settings show before anything is touched
    _make_room(root, settings, overwrite)
    check_writable(root / "trial.mp4", flag="--out")
    storage.require_space(root, settings.bytes_needed(), f"A toy world of {settings.episodes} episodes")
    record = {"format": FORMAT, "is_complete": False, "settings": attrs.asdict(settings), "columns": COLUMNS}
    write_text(root / RECORD, readable_json(record))
    counts = {"train": 0, "val": 0, "success": 0}
    captions: dict[str, dict[str, str]] = {"train": {}, "val": {}}
    form = FORMS[settings.form]
    for place, _, _ in os.walk(root):
        storage.remove_stale_temporaries(place)
    with Progress("toy world", settings.episodes, unit="episode") as bar:
        for episodes in settings.batches():
            form.write(root, settings, episodes, bar.update)
            counts["success"] += int(episodes.success.sum())
            for i, caption in enumerate(episodes.captions):
                index = episodes.first + i
                counts[settings.split(index)] += 1
                captions[settings.split(index)][name_of(index)] = caption
    if settings.text_encoder and form.embed is not None:
        form.embed(root, settings, captions)
    if form.finish is not None:
        form.finish(root, settings, captions)
    distinct = {text for texts in captions.values() for text in texts.values()}
    record |= {"is_complete": True, "counts": {**counts, "distinct_captions": len(distinct)}, "command": command}
    write_text(root / "README.md", _readme(settings, record))
    write_text(root / RECORD, readable_json(record))
    return record


def _make_room(root: Path, settings: ToyFolder, overwrite: bool) -> None:
    """Raise unless the folder is new, one of ours with the same settings, or one of ours that may be replaced."""
    record = require_own(root, FORMAT, "Give --out a new folder: even --overwrite keeps files of others.")
    if record is not None and overwrite:
        for name in _OURS:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    elif record is not None:
        found = {"form": "video", **record["settings"]}  # older ones have no form
        cure = (
            "Add --overwrite to replace it, give another --out, or the same settings, which finish what is unfinished."
        )
        require_settings(root, found, attrs.asdict(settings), cure)


def _readme(settings: ToyFolder, record: dict[str, Any]) -> str:
    counts = record["counts"]
    return f"""# Toy world

{settings.episodes} episodes of {settings.frames} frames, {settings.size}x{settings.size} pixels at {settings.fps:g}
frames per second: {counts["train"]} for training, {counts["val"]} for validation. {counts["success"]} of them end with
the task done; there are {counts["distinct_captions"]} different captions. Made by

    {record["command"] or "cosmos_predict2.tools.prepare.toy.folder.write_folder"}

{layout_of(settings.form)}
`dataset.json` has all settings; the same settings make the same episodes.
"""
