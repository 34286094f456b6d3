# SPDX-License-Identifier: Apache-2.0
"""The toy world written as a folder of videos, for everything that reads data sets from disk.

    OUT/dataset.json                          what it is: settings, counts, whether it is complete
    OUT/README.md                             the same for people, with the command
    OUT/{train,val}/videos/NAME.mp4           the clips
    OUT/{train,val}/metas/NAME.txt            their captions
    OUT/{train,val}/annotation/NAME.json      states, actions, rewards, success, driver, seed
    OUT/{train,val}/t5_xxl/NAME.pickle        embeddings of the captions, where a text encoder was asked for
    OUT/{train,val}/t5_xxl/embeddings.json    which encoder, and which captions

Of an episode the annotation is written last, so what was interrupted goes on where it stopped.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from tqdm import tqdm

from cosmos_predict2.data.media import check_writable, write_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embedding_folder import embed_captions
from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.scene import BOX_X, COLUMNS, HELD, PUCK_X
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError

FORMAT = "toy_world/1"
_AT_ONCE = 256  # episodes simulated together
_OURS = ("train", "val", "dataset.json", "README.md")


@attrs.define(kw_only=True, frozen=True)
class ToyFolder:
    """What to write; two folders of equal settings hold equal episodes."""

    episodes: int = attrs.field(default=200, validator=attrs.validators.ge(1))
    frames: int = attrs.field(default=25, validator=attrs.validators.ge(2))
    size: int = 48
    fps: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    mix: str = "mixed"
    setting: str = "default"
    tasks: tuple[str, ...] = ("push_puck",)
    action_dim: int = 4
    val_fraction: float = attrs.field(default=0.1, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    text_encoder: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "bytes")))
    num_tokens: int = 512
    text_width: int = 1024

    @property
    def num_val(self) -> int:
        """The last so many episodes are for validation; one at least if any are asked for."""
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

    def bytes_needed(self) -> int:
        """About how much the folder takes, rather too much than too little."""
        video = 6_000 + 0.15 * self.size**2 * self.frames
        annotation = 130 * self.frames + 1_000
        text = 2 * 64 * self.text_width + 300 if self.text_encoder else 0
        return int(self.episodes * (video + annotation + text + 3 * 4096))


def write_folder(out: str, settings: ToyFolder, *, overwrite: bool = False, command: str = "") -> dict[str, Any]:
    """Write the folder, or what is missing of it; gives the contents of its dataset.json."""
    if storage.is_remote(out):
        raise ConfigError(f"The toy world is written to a local folder; {out} is not one. Copy it there afterwards.")
    root = Path(out)
    settings.make(0, 1)  # wrong settings show before anything is touched
    _make_room(root, settings, overwrite)
    check_writable(root / "trial.mp4")
    free, needed = storage.free_bytes(root), settings.bytes_needed()
    if free is not None and free < needed:
        raise DataError(
            f"{settings.episodes} episodes need about {storage.readable_bytes(needed)}, but the disk of {out} has "
            f"{storage.readable_bytes(free)} free. Lower --episodes, --frames or --size, or give another --out."
        )
    record = {"format": FORMAT, "is_complete": False, "settings": _settings(settings), "columns": COLUMNS}
    _write_text(root / "dataset.json", _json(record))
    counts = {"train": 0, "val": 0, "success": 0}
    captions: dict[str, dict[str, str]] = {"train": {}, "val": {}}
    with tqdm(total=settings.episodes, desc="toy world", unit="episode", disable=None) as bar:
        for index, episodes, i in _each(settings):
            folder, name = root / settings.split(index), f"episode_{index:06d}"
            annotation = folder / "annotation" / f"{name}.json"
            if not annotation.exists():
                video = torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2)
                write_video(folder / "videos" / f"{name}.mp4", video, settings.fps)
                _write_text(folder / "metas" / f"{name}.txt", episodes.captions[i] + "\n")
                _write_text(annotation, _json(_annotation(episodes, i, index, name)))
            counts[settings.split(index)] += 1
            counts["success"] += int(episodes.success[i])
            captions[settings.split(index)][name] = episodes.captions[i]
            bar.update()
    if settings.text_encoder:
        encoder = BytesEncoder(settings.num_tokens, settings.text_width)
        for split, texts in captions.items():
            if texts:  # adopt: dataset.json says by which encoder the files are that have no record
                embed_captions(root / split / "t5_xxl", texts, encoder, adopt=True)
    distinct = {text for texts in captions.values() for text in texts.values()}
    record |= {"is_complete": True, "counts": {**counts, "distinct_captions": len(distinct)}, "command": command}
    _write_text(root / "README.md", _readme(settings, record))
    _write_text(root / "dataset.json", _json(record))
    return record


def _each(settings: ToyFolder) -> Iterator[tuple[int, Episodes, int]]:
    """Number, batch and place in the batch of every episode."""
    for first in range(0, settings.episodes, _AT_ONCE):
        episodes = settings.make(first, min(_AT_ONCE, settings.episodes - first))
        yield from ((first + i, episodes, i) for i in range(len(episodes)))


def _make_room(root: Path, settings: ToyFolder, overwrite: bool) -> None:
    """Raise unless the folder is new, one of ours with the same settings, or one of ours that may be replaced."""
    if root.exists() and not root.is_dir():
        raise DataError(f"{root} is a file; --out names a folder.")
    if not root.exists() or not any(root.iterdir()):
        return
    record = _record(root)
    if record is None:
        raise DataError(f"{root} holds other files. Give --out a new folder: even --overwrite keeps what is not ours.")
    if overwrite:
        for name in _OURS:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return
    wanted, found = _settings(settings), record["settings"]
    differing = [key for key in wanted if wanted[key] != found.get(key)]
    if differing:
        what = ", ".join(f"{key} {found.get(key)} (now {wanted[key]})" for key in differing)
        raise DataError(
            f"{root} already holds a toy world with {what}. Add --overwrite to replace it, give another --out, or the"
            " same settings, which finish what is unfinished."
        )


def _record(root: Path) -> dict[str, Any] | None:
    """What dataset.json says, if it is one of ours."""
    try:
        record = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def _settings(settings: ToyFolder) -> dict[str, Any]:
    return json.loads(json.dumps(attrs.asdict(settings)))


def _annotation(episodes: Episodes, i: int, index: int, name: str) -> dict[str, Any]:
    """Everything that is known of an episode. Objects that are not on the table are null."""
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


def _readme(settings: ToyFolder, record: dict[str, Any]) -> str:
    counts = record["counts"]
    return f"""# Toy world

{settings.episodes} episodes of {settings.frames} frames, {settings.size}x{settings.size} pixels at {settings.fps:g}
frames per second: {counts["train"]} in `train/`, {counts["val"]} in `val/`. {counts["success"]} of them end with the
task done; there are {counts["distinct_captions"]} different captions. Made by

    {record["command"] or "cosmos_predict2.data.toy_folder.write_folder"}

- `videos/NAME.mp4`: the clip
- `metas/NAME.txt`: its caption
- `annotation/NAME.json`: `actions` (row k leads from frame k to frame k + 1), `rewards`, `success`, who drove the
  gripper, and `states`, one row per frame with the columns
  {", ".join(COLUMNS)}

`dataset.json` has all settings; the same settings make the same episodes.
"""


def _json(value: dict[str, Any]) -> str:
    """Readable JSON with one row of numbers per line."""
    lines = []
    for key, item in value.items():
        if key in ("actions", "states"):
            rows = ",\n    ".join(json.dumps(row) for row in item)
            lines.append(f'  "{key}": [\n    {rows}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(item)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomically(path, lambda file: file.write(text.encode()))
