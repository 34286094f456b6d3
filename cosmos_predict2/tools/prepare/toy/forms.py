# SPDX-License-Identifier: Apache-2.0
"""Forms of the toy world on disk: as clips, in the layouts of Bridge and LeRobot, or as bare states."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.data.toy.states import path_of, write_states
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.pickles import trimmed
from cosmos_predict2.tools.prepare.records import write_text
from cosmos_predict2.tools.prepare.toy import lerobot
from cosmos_predict2.tools.prepare.toy.settings import ToyFolder, name_of
from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.scene import BOX_X, CLOSED, COLUMNS, GRIPPER, HELD, PUCK_X
from imaginaire import storage

_TABLES = ("actions", "states", "state", "action", "toy_actions", "toy_states")  # one row a line

# Of the Bridge layout: a table of 48 pixels is half a metre, and a step of the gripper like that of a real arm.
METRES_PER_PIXEL = 0.01

Write = Callable[[Path, ToyFolder, Episodes, Callable[[int], Any]], None]
Finish = Callable[[Path, ToyFolder, Mapping[str, Mapping[str, str]]], None]


@dataclass(frozen=True)
class Form:
    """One layout."""

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
            write_clip(folder / "videos" / f"{name}.mp4", episodes, i, settings.fps)
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
            write_clip(root / video, episodes, i, settings.fps)
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


def write_clip(path: Path, episodes: Episodes, i: int, fps: float) -> None:
    """Write the video of episode i of a batch."""
    write_video(path, torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2), fps)


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
    "video": Form(
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
    "bridge": Form(
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
    "lerobot": Form(
        entries=lerobot.ENTRIES,
        layout=lerobot.LAYOUT,
        write=lerobot.write_videos,
        embed=lerobot.embed,
        finish=lerobot.write_rest,
    ),
    "states": Form(
        entries=("train", "val"),
        layout="""\
- `{train,val}/states-FIRST.npz`: `states` [n, frames, 10], `actions` (row k leads from frame k to frame k + 1),
  `rewards`, `success`, `captions` of n episodes; frames are drawn from the states, whose columns are
  COLUMNS
""",
        write=_write_states,
    ),
}


def layout_of(form: str) -> str:
    """Contents of a folder of this form, in Markdown."""
    return FORMS[form].layout.replace("COLUMNS", ", ".join(COLUMNS))
