# SPDX-License-Identifier: Apache-2.0
"""The toy world as a LeRobot data set of version 2.1, with the modality.json of GR00T.

Videos come first, one by one, and are what is found again when an interrupted run goes on; tables and index follow when
all are there. A table has a row per frame: the last one's action leads nowhere and is zero.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.data.lerobot.writer import CHUNK, VIDEO_PATH, Recording, Writer
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.tools.prepare.toy.settings import ToyFolder
from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.scene import COLUMNS

ENTRIES = ("data", "meta", "videos", "t5_xxl")
CAMERA = "observation.images.front"
LAYOUT = """\
A LeRobot data set of version 2.1:

- `meta/`: settings, episodes, tasks (the captions), statistics, and modality.json with names for parts of the columns
- `data/chunk-000/NAME.parquet`: a row per frame with `action` (row k leads from frame k to frame k + 1; the last is
  zero), `next.reward`, `next.done` and `observation.state` with the columns
  COLUMNS
- `videos/chunk-000/observation.images.front/NAME.mp4`: the clip
- `t5_xxl/NAME.pickle`: the caption's embedding, with a text encoder
"""


def write_videos(root: Path, settings: ToyFolder, episodes: Episodes, advance: Callable[[int], Any]) -> None:
    """The videos of a batch of episodes, or those that are missing."""
    for i in range(len(episodes)):
        number = episodes.first + i
        name = VIDEO_PATH.format(episode_chunk=number // CHUNK, episode_index=number, video_key=CAMERA)
        if not (root / name).exists():
            write_video(root / name, _video(episodes, i), settings.fps)
        advance(1)


def write_rest(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    """Tables and index of all episodes."""
    writer = Writer(root, settings.fps, robot="toy_world")
    for episodes in settings.batches():
        for i in range(len(episodes)):
            writer.add(Recording(_columns(episodes, i), {CAMERA: _video(episodes, i)}, episodes.captions[i]))
    num_train = settings.episodes - settings.num_val
    splits = {"train": (0, num_train), "val": (num_train, settings.episodes)}
    writer.finish({name: places for name, places in splits.items() if places[0] < places[1]}, _modality(settings))


def embed(root: Path, settings: ToyFolder, captions: Mapping[str, Mapping[str, str]]) -> None:
    """The captions' embeddings, of all splits in one folder."""
    texts = {name: text for split in captions.values() for name, text in split.items()}
    embed_captions(root / "t5_xxl", texts, BytesEncoder(settings.num_tokens, settings.text_width))


def _video(episodes: Episodes, i: int) -> torch.Tensor:
    return torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2)


def _columns(episodes: Episodes, i: int) -> dict[str, numpy.ndarray]:
    nothing = numpy.zeros_like(episodes.actions[i, :1])
    done = numpy.zeros(len(episodes.states[i]), dtype=bool)
    done[-1] = True
    return {
        "observation.state": episodes.states[i].astype(numpy.float32),
        "action": numpy.concatenate([episodes.actions[i], nothing]).astype(numpy.float32),
        "next.reward": numpy.append(episodes.rewards[i], episodes.rewards[i, -1]).astype(numpy.float32),
        "next.done": done,
    }


def _modality(settings: ToyFolder) -> dict[str, Any]:
    """Each column of the state by its name, the whole action, the camera and the task."""
    return {
        "state": {name: {"start": k, "end": k + 1} for k, name in enumerate(COLUMNS)},
        "action": {"gripper": {"start": 0, "end": settings.action_dim}},
        "video": {"front": {"original_key": CAMERA}},
        "annotation": {"human.action.task_description": {"original_key": "task_index"}},
    }
