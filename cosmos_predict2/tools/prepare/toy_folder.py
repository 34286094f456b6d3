# SPDX-License-Identifier: Apache-2.0
"""The toy world written to a folder: as clips, in the layouts of Bridge and LeRobot, or as bare states.

Of an episode the annotation is written last, so what was interrupted goes on where it stopped. Beside the episodes lie
dataset.json and, for people, README.md.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch

from cosmos_predict2.data.lerobot.writer import CHUNK, VIDEO_PATH, Recording, Writer
from cosmos_predict2.data.toy.videos import path_of, write_states
from cosmos_predict2.data.video.media import check_writable, write_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.pickles import trimmed
from cosmos_predict2.tools.prepare.records import RECORD, require_own, require_settings, write_text
from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.physics import BOX_X, CLOSED, COLUMNS, GRIPPER, HELD, PUCK_X, SETTINGS, STATE_SIZE
from imaginaire import storage
from imaginaire.errors import ConfigError
from imaginaire.log import Progress

FORM_NAMES = ("video", "bridge", "lerobot", "states")  # of FORMS
EPISODES_AT_ONCE = 256
FORMAT = "toy_world/1"
CAMERAS = "observation.images."
_TABLES = ("actions", "states", "state", "action", "toy_actions", "toy_states")  # one row a line

# Of the Bridge layout: a table of 48 pixels is half a metre, and a step of the gripper like that of a real arm.
METRES_PER_PIXEL = 0.01


def name_of(index: int) -> str:
    """The file name of an episode."""
    return f"episode_{index:06d}"


@attrs.define(kw_only=True, frozen=True)
class ToyFolder:
    """Settings of a folder; two folders of equal settings hold equal episodes."""

    episodes: int = attrs.field(default=200, validator=[attrs.validators.ge(1), attrs.validators.le(10**7)])
    frames: int = attrs.field(default=25, validator=[attrs.validators.ge(2), attrs.validators.le(10**5)])
    size: int = 48
    fps: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    seed: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.lt(2**63)])
    mix: str = "mixed"
    setting: str = "default"
    tasks: tuple[str, ...] = ("push_puck",)
    action_dim: int = 4
    val_fraction: float = attrs.field(default=0.1, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    form: str = attrs.field(default="video", validator=attrs.validators.in_(FORM_NAMES))
    text_encoder: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "bytes")))
    num_tokens: int = 512
    text_width: int = 1024

    def __attrs_post_init__(self) -> None:
        if self.text_encoder and self.form == "states":
            raise ConfigError("The form 'states' keeps no embeddings. Leave text_encoder out.")

    @property
    def num_val(self) -> int:
        """Number of episodes for validation, the last ones: at least one if val_fraction is above 0."""
        if self.val_fraction == 0:
            return 0
        return min(self.episodes, max(1, round(self.episodes * self.val_fraction)))

    def split(self, index: int) -> str:
        return "val" if index >= self.episodes - self.num_val else "train"

    def make(self, first: int, num: int) -> Episodes:
        try:
            return make_episodes(
                num,
                self.seed,
                mix=self.mix,
                length=self.frames - 1,
                size=self.size,
                setting=self.setting,
                tasks=self.tasks,
                action_dim=self.action_dim,
                first=first,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def batches(self) -> Iterator[Episodes]:
        """All episodes in order, simulated many at a time."""
        for first in range(0, self.episodes, EPISODES_AT_ONCE):
            yield self.make(first, min(EPISODES_AT_ONCE, self.episodes - first))

    def bytes_needed(self) -> int:
        """Bytes that the folder takes, estimated generously."""
        if self.form == "states":
            return int(self.episodes * self.frames * (8 * (STATE_SIZE + 1) + 4 * self.action_dim)) + 100_000
        video = 6_000 + 0.15 * self.size**2 * self.frames
        annotation = 130 * self.frames + 1_000
        text = 2 * 64 * self.text_width + 300 if self.text_encoder else 0
        return int(self.episodes * (video + annotation + text + 3 * 4096))


Write = Callable[[Path, ToyFolder, Episodes, Callable[[int], Any]], None]
Finish = Callable[[Path, ToyFolder, Mapping[str, Mapping[str, str]]], None]


@dataclass(frozen=True)
class ToyLayout:
    entries: tuple[str, ...]  # what lies at the top of the folder besides dataset.json and README.md
    layout: str  # of the files, for the README
    write: Write  # a batch of episodes, or what is missing of it; reports each one that is done
    embed: Finish | None = None  # the captions, by split and episode
    finish: Finish | None = None  # what needs all episodes, written last


# ---- clips -----------------------------------------------------------------------------------------------------------


def _write_clips(root: Path, settings: ToyFolder, episodes: Episodes, advance: Callable[[int], Any]) -> None:
    for i in range(len(episodes)):
        index = episodes.first + i
        folder, name = root / settings.split(index), name_of(index)
        annotation = folder / "annotation" / f"{name}.json"
        if not annotation.exists():
            write_video(folder / "videos" / f"{name}.mp4", _video(episodes, i), settings.fps)
            write_text(folder / "metas" / f"{name}.txt", episodes.captions[i] + "\n")
            write_text(annotation, readable_json(_annotation(episodes, i, index, name)))
        advance(1)


def _embed_clips(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    encoder = BytesEncoder(settings.num_tokens, settings.text_width)
    for split, texts in captions.items():
        if texts:  # adopt: dataset.json records the encoder of files without a record of their own
            embed_captions(root / split / "t5_xxl", texts, encoder, adopt=True)


def _annotation(episodes: Episodes, i: int, index: int, name: str) -> dict[str, Any]:
    """Everything about an episode. Objects that are not on the table are null."""
    states = episodes.states[i].round(5).tolist()
    for column in (PUCK_X, BOX_X):
        if states[0][column] < 0:
            for row in states:
                row[column : column + 2] = [None, None]
    for row in states:
        row[HELD] = int(row[HELD])
    return {
        "episode_id": name,
        "video": f"videos/{name}.mp4",
        "caption": episodes.captions[i],
        "task": episodes.tasks[i],
        "driver": episodes.drivers[i],
        "skill": round(float(episodes.skill[i]), 4),
        "seed": episodes.seed,
        "index": index,
        "success": bool(episodes.success[i]),
        "ever_success": bool(episodes.ever[i]),
        "rewards": episodes.rewards[i].round(5).tolist(),
        "actions": episodes.actions[i].astype(numpy.float64).round(6).tolist(),
        "states": states,
    }


# ---- the Bridge layout -----------------------------------------------------------------------------------------------


def _write_bridge(root: Path, settings: ToyFolder, episodes: Episodes, advance: Callable[[int], Any]) -> None:
    for i in range(len(episodes)):
        index = episodes.first + i
        split, name = settings.split(index), name_of(index)
        annotation = root / "annotation" / split / f"{name}.json"
        if not annotation.exists():
            video = f"videos/{split}/{name}/rgb.mp4"
            write_video(root / video, _video(episodes, i), settings.fps)
            content = _annotation(episodes, i, index, name)
            content |= {"video": video, "videos": [{"video_path": video}], "texts": [episodes.captions[i]]}
            content["toy_actions"], content["toy_states"] = content.pop("actions"), content.pop("states")
            write_text(annotation, readable_json(content | _robot(episodes, i)))
        advance(1)


def _robot(episodes: Episodes, i: int) -> dict[str, Any]:
    """The gripper as an arm that never turns: poses in metres, and how each differs from the one before."""
    states = episodes.states[i]
    poses = numpy.zeros((len(states), 6))
    poses[:, :2] = (states[:, GRIPPER] * METRES_PER_PIXEL).round(7)
    closed = states[:, CLOSED].round(5)
    actions = numpy.concatenate([numpy.diff(poses, axis=0).round(7), closed[1:, None]], axis=1)
    return {"state": poses.tolist(), "continuous_gripper_state": closed.tolist(), "action": actions.tolist()}


def _embed_bridge(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    encoder = BytesEncoder(settings.num_tokens, settings.text_width)
    for split, texts in captions.items():
        for name, text in texts.items():
            path = root / "annotation" / split / f"{name}.npy"
            if not path.exists():
                rows = trimmed(encoder.encode([text])[0]).to(torch.float16).numpy()
                storage.write_atomically(path, lambda file, rows=rows: numpy.save(file, rows))  # type: ignore[misc]


# ---- the layout of LeRobot 2.1, with the modality.json of GR00T ------------------------------------------------------


def _write_lerobot(root: Path, settings: ToyFolder, episodes: Episodes, advance: Callable[[int], Any]) -> None:
    """The videos alone: tables and index follow when all are there, and what is found again are the videos."""
    for i in range(len(episodes)):
        number = episodes.first + i
        for camera, video in _videos(episodes, i).items():
            name = VIDEO_PATH.format(episode_chunk=number // CHUNK, episode_index=number, video_key=camera)
            if not (root / name).exists():
                write_video(root / name, video, settings.fps)
        advance(1)


def _finish_lerobot(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    """Tables and index. A table has a row per frame; the action of the last leads nowhere and is zero."""
    writer = Writer(root, settings.fps, robot="toy_world")
    for episodes in settings.batches():
        for i in range(len(episodes)):
            writer.add(Recording(_columns(episodes, i), _videos(episodes, i), episodes.captions[i]))
    num_train = settings.episodes - settings.num_val
    splits = {"train": (0, num_train), "val": (num_train, settings.episodes)}
    writer.finish({name: places for name, places in splits.items() if places[0] < places[1]}, _modality(settings))


def _embed_lerobot(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    """The captions' embeddings, of all splits in one folder."""
    texts = {name: text for split in captions.values() for name, text in split.items()}
    embed_captions(root / "t5_xxl", texts, BytesEncoder(settings.num_tokens, settings.text_width))


def _state_columns(setting: str) -> int:
    """How many of a state's columns are the robot's state; under a cover its own alone, as an environment shows it."""
    return STATE_SIZE if SETTINGS[setting].cover is None else CLOSED + 1


def _columns(episodes: Episodes, i: int) -> dict[str, numpy.ndarray]:
    nothing = numpy.zeros_like(episodes.actions[i, :1])
    done = numpy.zeros(len(episodes.states[i]), dtype=bool)
    done[-1] = True
    return {
        "observation.state": episodes.states[i, :, : _state_columns(episodes.setting)].astype(numpy.float32),
        "action": numpy.concatenate([episodes.actions[i], nothing]).astype(numpy.float32),
        "next.reward": numpy.append(episodes.rewards[i], episodes.rewards[i, -1]).astype(numpy.float32),
        "next.success": numpy.append(episodes.rewards[i], episodes.rewards[i, -1]) > 0,  # less is of what is left to do
        "next.done": done,
    }


def _modality(settings: ToyFolder) -> dict[str, Any]:
    """Each column of the state by its name, the whole action, the cameras and the task."""
    cameras, names = settings.make(0, 1).cameras(0), COLUMNS[: _state_columns(settings.setting)]
    return {
        "state": {name: {"start": k, "end": k + 1} for k, name in enumerate(names)},
        "action": {"gripper": {"start": 0, "end": settings.action_dim}},
        "video": {name: {"original_key": CAMERAS + name} for name in cameras},
        "annotation": {"human.action.task_description": {"original_key": "task_index"}},
    }


# ---- states ----------------------------------------------------------------------------------------------------------


def _write_states(root: Path, settings: ToyFolder, episodes: Episodes, advance: Callable[[int], Any]) -> None:
    first_val = min(max(settings.episodes - settings.num_val - episodes.first, 0), len(episodes))
    for split, rows in (("train", slice(0, first_val)), ("val", slice(first_val, len(episodes)))):
        if rows.start < rows.stop:
            path = path_of(root / split, episodes.first + rows.start)
            if not path.exists():
                write_states(path, episodes, rows, settings.fps)
    advance(len(episodes))


# ---- what all share --------------------------------------------------------------------------------------------------


def _video(episodes: Episodes, i: int) -> torch.Tensor:
    """uint8 [3, F, H, W] of episode i of a batch."""
    return torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2)


def _videos(episodes: Episodes, i: int) -> dict[str, torch.Tensor]:
    """The same of each camera, by its name in LeRobot data."""
    cameras = episodes.cameras(i).items()
    return {CAMERAS + name: torch.from_numpy(frames).permute(3, 0, 1, 2) for name, frames in cameras}


def readable_json(value: dict[str, Any]) -> str:
    """Readable JSON with one row of numbers per line."""
    lines = []
    for key, item in value.items():
        if key in _TABLES:
            rows = ",\n    ".join(json.dumps(row) for row in item)
            lines.append(f'  "{key}": [\n    {rows}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(item)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


FORMS = {
    "video": ToyLayout(
        entries=("train", "val"),
        layout="""\
- `{train,val}/videos/NAME.mp4`: the clip
- `{train,val}/metas/NAME.txt`: its caption
- `{train,val}/annotation/NAME.json`: `actions` (row k leads from frame k to frame k + 1), `rewards`, `success`, who
  drove the gripper, and `states`, one row per frame with the columns
  COLUMNS
""",
        write=_write_clips,
        embed=_embed_clips,
    ),
    "bridge": ToyLayout(
        entries=("annotation", "videos"),
        layout=f"""\
- `videos/{{train,val}}/NAME/rgb.mp4`: the clip
- `annotation/{{train,val}}/NAME.json`: `state` (the gripper's pose for each frame: x, y in metres at
  {METRES_PER_PIXEL:g} a pixel, all else 0), `continuous_gripper_state`, `action` (the differences), `texts` (the
  caption), and the simulator's own `toy_actions`, `rewards`, `success` and `toy_states`, one row per frame with the
  columns COLUMNS
- `annotation/{{train,val}}/NAME.npy`: the caption's embedding, with a text encoder
""",
        write=_write_bridge,
        embed=_embed_bridge,
    ),
    "lerobot": ToyLayout(
        entries=("data", "meta", "videos", "t5_xxl"),
        layout="""\
A LeRobot data set of version 2.1:

- `meta/`: settings, episodes, tasks (the captions), statistics, and modality.json with names for parts of the columns
- `data/chunk-000/NAME.parquet`: a row per frame with `action` (row k leads from frame k to frame k + 1; the last is
  zero), `next.reward`, `next.success`, `next.done` and `observation.state` with the columns
  COLUMNS
- `videos/chunk-000/observation.images.front/NAME.mp4`: the clip; beside it that of the wrist, if there is one
- `t5_xxl/NAME.pickle`: the caption's embedding, with a text encoder
""",
        write=_write_lerobot,
        embed=_embed_lerobot,
        finish=_finish_lerobot,
    ),
    "states": ToyLayout(
        entries=("train", "val"),
        layout="""\
- `{train,val}/states-FIRST.npz`: `states` [n, frames, 10], `actions` (row k leads from frame k to frame k + 1),
  `rewards`, `success`, `captions` of n episodes; frames are drawn from the states, whose columns are
  COLUMNS
""",
        write=_write_states,
    ),
}


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

    {record["command"] or "cosmos_predict2.tools.prepare.toy_folder.write_folder"}

{FORMS[settings.form].layout.replace("COLUMNS", ", ".join(COLUMNS))}
`dataset.json` has all settings; the same settings make the same episodes.
"""
