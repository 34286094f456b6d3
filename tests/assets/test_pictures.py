# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import torch

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.media import read_image, read_video

ASSETS = Path(__file__).parents[2] / "assets"


def test_the_toy_worlds_files_are_of_one_held_out_episode() -> None:
    folder = ASSETS / "toy_world"
    first = read_image(folder / "first_frame.png")
    clip, fps = read_video(folder / "clip.mp4")
    assert fps == 10 and clip.shape == (3, 25, 48, 48)
    held_out = ToyWorldVideos(num_episodes=200, num_frames=25, split="val", start=0)
    same = [i for i in range(200) if torch.equal(held_out[i]["video"][:, 0], first)]
    assert len(same) == 1
    item = held_out[same[0]]
    assert (clip.float() - item["video"].float()).abs().mean() < 4
    assert (folder / "prompt.txt").read_text().strip() == item["ai_caption"] == "push the red puck to the green ring"


def test_every_file_is_accounted_for() -> None:
    readme = (ASSETS / "README.md").read_text()
    for path in ASSETS.rglob("*"):
        if path.suffix in (".jpg", ".png", ".mp4", ".txt", ".webp"):
            assert f"{path.parent.name}/{path.name}" in readme, path
