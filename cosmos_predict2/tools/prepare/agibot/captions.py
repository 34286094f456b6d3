# SPDX-License-Identifier: Apache-2.0
"""AgiBotWorld-Alpha: a caption for each window, from a list that somebody made or from the task's own description.

A list is ``agibot_<camera>.jsonl`` beside the training folder, with lines {video_clip, caption, episode_id}. Windows
that it does not name get the opening scene of their episode and what is done in their frames, from ``task_info``.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_predict2.tools.prepare.agibot.episodes import Source
from cosmos_predict2.tools.prepare.agibot.windows import SPLITS, Clip
from cosmos_predict2.tools.prepare.records import some, write_text
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

LINE_KEYS = ("video_clip", "caption", "episode_id")
LABEL_KEYS = ("label_info", "lable_info")  # both spellings are published


@dataclass(frozen=True)
class Described:
    """An episode in the task's description: its opening scene, and actions by frame."""

    scene: str
    actions: tuple[tuple[int, int, str], ...]

    def caption(self, first: int, last: int) -> str:
        """The scene and every action that overlaps the frames ``first`` to ``last``."""
        done = [text for start, end, text in self.actions if start <= last and end > first]
        return " ".join(_sentence(text) for text in (self.scene, *done) if text.strip())


def write_captions(source: Source) -> list[str]:
    """Write ``metas/<window>.txt`` for the windows on disk; what was wrong, in sentences.

    Captions of the list replace others; those from ``task_info`` are only written where there is none, so that a text
    that was changed by hand stays.
    """
    faults: list[str] = []
    listed = _listed_captions(source, faults)
    described: dict[str, dict[str, Described]] = {}
    windows = [
        (split, clip)
        for split in SPLITS
        for path in sorted((source.output / split / "videos").glob("*.mp4"))
        if (clip := Clip.of(path.stem)) is not None
    ]
    if listed:
        _warn_of_unknown_windows(listed, {clip.stem for _, clip in windows})
    num_captions, without = 0, []
    for split in SPLITS:
        clips = [clip for where, clip in windows if where == split]
        lost = [c for c in clips if not _write_one(source, split, c, listed, described, faults)]
        num_captions += len(clips) - len(lost)
        without += lost
        names = f"; without one: {some([clip.stem for clip in lost])}" if lost else ""
        log.info("%s: %d videos, %d captions%s", source.output / split, len(clips), len(clips) - len(lost), names)
    if not num_captions:
        faults.append(f"No window has a caption. {_found_captions(source, listed, described)}")
    _log_captions_that_need_the_source(source, len(windows), without)
    return faults


def read_task_info(path: Path) -> dict[str, Described]:
    """The episodes of a task's description by their number; another layout is an error with the keys found."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, list):
        raise DataError(f"{path} holds {_kind(content)}; a list of episodes was expected.")
    return dict(_described(entry, f"{path}: entry {i}") for i, entry in enumerate(content))


def _described(entry: Any, where: str) -> tuple[str, Described]:
    label = next((key for key in LABEL_KEYS if isinstance(entry, dict) and key in entry), "label_info")
    values = _values(entry, ("episode_id", "init_scene_text", label), where)
    (actions,) = _values(values[2], ("action_config",), f"{where}: {label}")
    if not isinstance(actions, list):
        raise DataError(f"{where}: {label}.action_config holds {_kind(actions)}; a list of actions was expected.")
    found = []
    for i, action in enumerate(actions):
        place = f"{where}: {label}.action_config {i}"
        start, end, text = _values(action, ("start_frame", "end_frame", "action_text"), place)
        if not (isinstance(start, int) and isinstance(end, int)):
            raise DataError(f"{place}: start_frame {start!r} and end_frame {end!r} are not frame numbers.")
        found.append((start, end, str(text or "")))
    return str(values[0]), Described(str(values[1] or ""), tuple(found))


def _values(entry: Any, keys: tuple[str, ...], where: str) -> list[Any]:
    if not isinstance(entry, dict) or any(key not in entry for key in keys):
        raise DataError(f"{where} holds {_kind(entry)}; expected the keys {', '.join(keys)}.")
    return [entry[key] for key in keys]


def _kind(content: Any) -> str:
    if isinstance(content, dict):
        return f"the keys {', '.join(map(str, content)) or '(none)'}"
    return f"a value of type {type(content).__name__}"


# One window -----------------------------------------------------------------------------------------------------------


def _write_one(
    source: Source,
    split: str,
    clip: Clip,
    listed: Mapping[str, str],
    described: dict[str, dict[str, Described]],
    faults: list[str],
) -> bool:
    """Whether the window has a caption now."""
    path = source.output / split / "metas" / f"{clip.stem}.txt"
    there = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    text = listed.get(clip.stem, there)
    if not text:
        if clip.task not in described:
            described[clip.task] = _of_task(source, clip.task, faults)
        episode = described[clip.task].get(clip.episode)
        text = episode.caption(clip.first, clip.last) if episode else ""
    if text and text != there:
        write_text(path, text)
    return bool(text)


def _of_task(source: Source, task: str, faults: list[str]) -> dict[str, Described]:
    path = source.task_info(task)
    if not path.is_file():
        log.warning("%s does not exist: windows get captions from %s only", path, _list_path(source))
        return {}
    try:
        return read_task_info(path)
    except DataError as error:
        faults.append(str(error))
        return {}


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


# The list -------------------------------------------------------------------------------------------------------------


def _list_path(source: Source) -> Path:
    return source.output.parent / f"agibot_{source.camera}.jsonl"


def _listed_captions(source: Source, faults: list[str]) -> dict[str, str]:
    """Captions by the window's name; a broken line is a fault and the others count."""
    path = _list_path(source)
    if not path.is_file():
        return {}
    captions: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # captions may hold what else splitlines() splits at
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    for stem, caption in _entries(path, lines, faults):
        captions[stem] = caption
    return captions


def _entries(path: Path, lines: list[str], faults: list[str]) -> Iterator[tuple[str, str]]:
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            name, caption, episode = _values(json.loads(line), LINE_KEYS, f"{path}:{i}")
        except (DataError, json.JSONDecodeError) as error:
            faults.append(str(error) if isinstance(error, DataError) else f"{path}:{i} is not JSON: {error}.")
            continue
        stem = str(name).removesuffix(".mp4")
        clip = Clip.of(stem)
        if not isinstance(caption, str):
            faults.append(f"{path}:{i}: the caption of {stem} is of type {type(caption).__name__}, not text.")
        elif clip is not None and clip.episode != str(episode):  # a number in some lists, a string in others
            faults.append(f"{path}:{i}: {stem} is not of the episode {episode!r} that the line names.")
        elif not caption.strip():
            faults.append(f"{path}:{i}: the caption of {stem} is empty.")
        else:
            yield stem, caption.strip()


# Reports --------------------------------------------------------------------------------------------------------------


def _warn_of_unknown_windows(listed: Mapping[str, str], stems: set[str]) -> None:
    if unknown := sorted(listed.keys() - stems):
        log.warning("captions of the list that are of no window here: %d (%s)", len(unknown), some(unknown))


def _log_captions_that_need_the_source(source: Source, num_windows: int, without: list[Clip]) -> None:
    if num_windows and not without:
        log.info("all %d windows have their captions: deleting %s loses nothing", num_windows, source.data_dir)
        return
    log.warning(
        "without a caption: %d of %d windows. Keep %s: its task_info and pictures are what they can be made from",
        len(without), num_windows, source.data_dir,
    )  # fmt: skip


def _found_captions(source: Source, listed: Mapping[str, str], described: Mapping[str, Mapping[str, Described]]) -> str:
    """Where captions were looked for, and what was found there."""
    found = [f"{_list_path(source)} names {some(sorted(listed))}" if listed else f"{_list_path(source)} gives none"]
    for task in sorted(described):
        path, episodes = source.task_info(task), sorted(described[task])
        found.append(f"{path} describes {f'the episodes {some(episodes)}' if episodes else 'none'}")
    return "; ".join(found) + "."
