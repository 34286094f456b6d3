# SPDX-License-Identifier: Apache-2.0
"""AgiBotWorld-Alpha: a caption for each window, from a list that somebody made or from the task's own description.

A list is ``agibot_<camera>.jsonl`` beside the training folder, with lines {video_clip, caption, episode_id}. Windows
that it does not name get the opening scene of their episode and what is done in their frames, from ``task_info``.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from cosmos_predict2.tools.prepare.agibot.episodes import AgibotSource
from cosmos_predict2.tools.prepare.agibot.windows import SPLITS, WindowName
from cosmos_predict2.tools.prepare.records import write_text
from imaginaire import foreign_json
from imaginaire.errors import DataError, listed, raised_as

log = logging.getLogger(__name__)

LABEL_KEYS = ("label_info", "lable_info")  # both spellings are published


@dataclass(frozen=True)
class DescribedEpisode:
    """An episode in the task's description: its opening scene, and actions by frame."""

    scene: str
    actions: tuple[tuple[int, int, str], ...]

    def caption(self, first: int, last: int) -> str:
        """The scene and every action that overlaps the frames ``first`` to ``last``."""
        done = [text for start, end, text in self.actions if start <= last and end > first]
        texts = [text.strip() for text in (self.scene, *done) if text.strip()]
        return " ".join(text if text.endswith((".", "!", "?")) else f"{text}." for text in texts)


def write_captions(source: AgibotSource) -> list[str]:
    """Write ``metas/<window>.txt`` for the windows on disk; what was wrong, in sentences.

    Captions of the list replace others; those from ``task_info`` are only written where there is none, so that a text
    that was changed by hand stays.
    """
    faults: list[str] = []
    sheet = _listed_captions(source, faults)
    described = cache(partial(_of_task, source, faults))
    num_captions = 0
    for split in SPLITS:
        paths = sorted((source.output / split / "videos").glob("*.mp4"))
        clips = [clip for path in paths if (clip := WindowName.of(path.stem)) is not None]
        lost = [c.stem for c in clips if not _write_one(source.output / split / "metas", c, sheet, described)]
        num_captions += len(clips) - len(lost)
        names = f"; without one: {listed(lost)}" if lost else ""
        log.info("%s: %d videos, %d captions%s", source.output / split, len(clips), len(clips) - len(lost), names)
    if not num_captions:
        faults.append(
            f"No window has a caption: {_list_path(source)} and {source.task_info('TASK')} name none of them."
        )
    return faults


def read_task_info(path: Path) -> dict[str, DescribedEpisode]:
    """The episodes of a task's description by their number; another layout is an error with the keys found."""
    with raised_as(DataError, f"{path} cannot be read as JSON", OSError, ValueError):
        content = foreign_json.load(path)
    if not isinstance(content, list):
        raise DataError(f"{path}: a list of episodes was expected.")
    return dict(_described(entry, f"{path}: entry {i}") for i, entry in enumerate(content))


def _described(entry: Any, where: str) -> tuple[str, DescribedEpisode]:
    label = next((key for key in LABEL_KEYS if isinstance(entry, dict) and key in entry), "label_info")
    values = _values(entry, ("episode_id", "init_scene_text", label), where)
    (actions,) = _values(values[2], ("action_config",), f"{where}: {label}")
    if not isinstance(actions, list):
        raise DataError(f"{where}: {label}.action_config is no list of actions.")
    found = []
    for i, action in enumerate(actions):
        place = f"{where}: {label}.action_config {i}"
        start, end, text = _values(action, ("start_frame", "end_frame", "action_text"), place)
        if not (isinstance(start, int) and isinstance(end, int)):
            raise DataError(f"{place}: start_frame {start!r} and end_frame {end!r} are not frame numbers.")
        found.append((start, end, str(text or "")))
    return str(values[0]), DescribedEpisode(str(values[1] or ""), tuple(found))


def _values(entry: Any, keys: tuple[str, ...], where: str) -> list[Any]:
    if not isinstance(entry, dict) or any(key not in entry for key in keys):
        raise DataError(f"{where}: expected an object with the keys {', '.join(keys)}.")
    return [entry[key] for key in keys]


# One window -----------------------------------------------------------------------------------------------------------


def _write_one(
    folder: Path, clip: WindowName, sheet: Mapping[str, str], described: Callable[[str], Mapping[str, DescribedEpisode]]
) -> bool:
    """True if the window has a caption now; ``described`` gives the episodes of a task."""
    path = folder / f"{clip.stem}.txt"
    there = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    text = sheet.get(clip.stem, there)
    if not text and (episode := described(clip.task).get(clip.episode)):
        text = episode.caption(clip.first, clip.last)
    if text and text != there:
        write_text(path, text)
    return bool(text)


def _of_task(source: AgibotSource, faults: list[str], task: str) -> dict[str, DescribedEpisode]:
    path = source.task_info(task)
    if not path.is_file():
        log.warning("%s does not exist: windows get captions from %s only", path, _list_path(source))
        return {}
    try:
        return read_task_info(path)
    except DataError as error:
        faults.append(str(error))
        return {}


# The list -------------------------------------------------------------------------------------------------------------


def _list_path(source: AgibotSource) -> Path:
    return source.output.parent / f"agibot_{source.camera}.jsonl"


def _listed_captions(source: AgibotSource, faults: list[str]) -> dict[str, str]:
    """Captions by the window's name; a broken line is a fault and the others count."""
    path = _list_path(source)
    if not path.is_file():
        return {}
    with raised_as(DataError, f"{path} is not UTF-8 text", UnicodeDecodeError, cure="Save it as UTF-8."):
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # captions may hold what else splitlines() splits at
    captions: dict[str, str] = {}
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            stem, caption = _entry(line, f"{path}:{i}")
        except DataError as error:
            faults.append(str(error))
            continue
        captions[stem] = caption
    return captions


def _entry(line: str, where: str) -> tuple[str, str]:
    """The window and the caption of a line."""
    with raised_as(DataError, f"{where} is not JSON", ValueError):
        entry = foreign_json.loads(line)
    name, caption, episode = _values(entry, ("video_clip", "caption", "episode_id"), where)
    stem = str(name).removesuffix(".mp4")
    clip = WindowName.of(stem)
    if clip is not None and clip.episode != str(episode):  # a number in some lists, a string in others
        raise DataError(f"{where}: {stem} is not of the episode {episode!r} that the line names.")
    if not isinstance(caption, str) or not caption.strip():
        raise DataError(f"{where}: the caption of {stem} is empty or not text.")
    return stem, caption.strip()
