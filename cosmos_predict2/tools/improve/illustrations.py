# SPDX-License-Identifier: Apache-2.0
"""Clips of the page that no program of the way writes: recordings, and what a tokenizer makes of them.

RUN/page/NAME.mp4, and captions.json with the caption of each by step.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import read_split
from cosmos_predict2.data.video.media import resize_and_crop
from cosmos_predict2.evaluation.reports.evaluation_page import written
from cosmos_predict2.tokenizers.tiny import GROUP, TinyTokenizer
from cosmos_predict2.tools.improve.way import Options, Recorded
from cosmos_predict2.world_model.sampling import to_uint8
from imaginaire import foreign_json, storage

NUM_SHOWN = 2  # of either outcome


def illustrate(step: str, options: Options, recorded: Recorded) -> None:
    """Write the clips of a step that was done, if there are any to write."""
    if step == "split":
        clips = {f"{i}_recorded": (f"recording {i}, {word}", video) for i, word, video in _episodes(options, recorded)}
    elif step == "tokenizer":
        tokenizer = TinyTokenizer(str(options.out / "tokenizer.safetensors"))
        clips = {
            f"{i}_round_trip": (f"recording {i}: true, and back from latents", _beside(video, tokenizer))
            for i, _, video in _episodes(options, recorded)
        }
    else:
        return
    folder = options.out / "page"
    folder.mkdir(exist_ok=True)
    captions = {
        written(folder, name, caption, video, recorded.fps).file: caption for name, (caption, video) in clips.items()
    }
    path = folder / "captions.json"
    known = foreign_json.load_object(path) if path.exists() else {}
    storage.write_json(path, {**known, step: captions})


def _episodes(options: Options, recorded: Recorded) -> Iterator[tuple[int, str, Tensor]]:
    """Held-out episodes with their outcomes, in the size of the models: uint8 [3, F, H, W]."""
    source, split = LeRobotSource.open(options.data), read_split(options.out / "split.json")
    camera, fit = source.camera(options.camera or None), partial(resize_and_crop, size=recorded.size)
    for outcome, word in ((True, "succeeds"), (False, "fails")):
        for i in [i for i in split.held_out if split.outcomes[i] is outcome][:NUM_SHOWN]:
            yield i, word, source.frames(i, camera, range(split.lengths[i]), fit=fit)


@torch.no_grad()
def _beside(video_C_F_H_W: Tensor, tokenizer: TinyTokenizer) -> Tensor:
    """The whole groups of frames that a tokenizer takes, and to their right what comes back."""
    true = video_C_F_H_W[:, : (video_C_F_H_W.shape[1] - 1) // GROUP * GROUP + 1]
    back = to_uint8(tokenizer.decode(tokenizer.encode(true[None].float() / 127.5 - 1)))[0]
    return torch.cat([true, back], dim=-1)
