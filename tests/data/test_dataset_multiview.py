# SPDX-License-Identifier: Apache-2.0
"""Clips of several cameras: views below each other, a text for each, and every fault of the folders by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.data.dataset_multiview import MultiviewDataset
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.data.views import views_of_data
from cosmos_predict2.models.text import data_text
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError
from scripts.get_t5_embeddings_from_waymo import parser, run
from tests.findings import problems

CAMERAS = ["left", "front", "right"]
BRIGHTNESS = {"left": 40, "front": 120, "right": 200}


@pytest.fixture(scope="module")
def waymo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips whose brightness is that of their camera, and one more for each frame."""
    root = tmp_path_factory.mktemp("waymo")
    for camera, value in BRIGHTNESS.items():
        for stem in ("a", "b", "c"):
            frames = value + torch.arange(12).view(1, 12, 1, 1).expand(3, 12, 32, 48)
            write_video(root / "videos" / camera / f"{stem}.mp4", frames.to(torch.uint8), 10)
    (root / "metas" / "left").mkdir(parents=True)
    (root / "metas" / "left" / "a.txt").write_text("a wall")
    flags = ["--data", str(root), "--text_encoder", "bytes", "--num_tokens", "8", "--text_width", "16"]
    assert run(parser.parse_args(flags)) == 0
    return root


def dataset(folder: Path, **options: Any) -> MultiviewDataset:
    return MultiviewDataset(
        **dict(dataset_dir=str(folder), sequence_interval=1, num_frames=9, camera_keys=CAMERAS, video_size=(16, 32))
        | dict(num_tokens=8)
        | options
    )


def test_views_lie_below_each_other_with_a_text_of_each(waymo: Path) -> None:
    found = dataset(waymo)
    assert len(found) == 2 * 4 and len(dataset(waymo, is_train=False)) == 4  # one clip is kept back
    item = found[1]
    assert item["video"].shape == (3, 9, 48, 32) and item["padding_mask"].shape == (1, 48, 32)
    of_views = [float(view.float().mean()) for view in item["video"].chunk(3, dim=2)]
    assert of_views == pytest.approx([BRIGHTNESS[camera] + 1 + 4 for camera in CAMERAS], abs=3)
    assert item["t5_text_embeddings"].shape == (24, 16) and item["fps"] == 10
    left, front, right = item["t5_text_embeddings"].chunk(3)
    assert not torch.equal(left, front) and torch.equal(front, right)  # it has a caption of its own
    assert item["video_name"]["video_path"] == str(waymo / "videos/left/a.mp4")
    strided = dataset(waymo, sequence_interval=2, num_frames=5, start_frame_interval=3)
    assert len(strided) == 2 * 2 and strided[0]["fps"] == 5


def test_the_front_view_alone_may_have_the_text(waymo: Path) -> None:
    item = dataset(waymo, front_camera_key="front", front_view_caption_only=True)[0]
    texts, masks = item["t5_text_embeddings"].chunk(3), item["t5_text_mask"].chunk(3)
    assert [bool(text.any()) for text in texts] == [bool(mask.any()) for mask in masks] == [False, True, False]


def test_what_is_known_before_it_is_built(waymo: Path) -> None:
    node = dict(_target_=MultiviewDataset, dataset_dir=str(waymo), num_frames=9, camera_keys=CAMERAS, num_tokens=8)
    assert facts_of({**node, "sequence_interval": 2}).rate == 5
    assert views_of_data(node) == tuple(CAMERAS)
    text = data_text({**node, "front_camera_key": "front"})
    assert text is not None and (text.num_tokens, text.width) == (8, 16) and text.encoder.startswith("bytes")


def _without(name: str) -> Callable[[Path], None]:
    return lambda root: shutil.rmtree(root / name)


@pytest.mark.parametrize(
    ("damage", "options", "error", "named"),
    [
        (_without("videos/front"), {}, DataError, "videos/front"),
        (_without("t5_xxl/front"), {}, DataError, "get_t5_embeddings_from_waymo --data"),
        (lambda root: (root / "videos/right/b.mp4").unlink(), {}, DataError, "b: there is none of right"),
        (lambda _: None, dict(front_camera_key="rear"), ConfigError, "front_camera_key=rear"),
        (lambda _: None, dict(camera_keys=["left", "left"]), ConfigError, "different cameras"),
        (lambda _: None, dict(video_size=(20, 32)), ConfigError, "video_size"),
        (lambda _: None, dict(text_encoder="t5"), DataError, "t5 was asked for"),
        (lambda _: None, dict(num_frames=40), DataError, "num_frames=40"),
    ],
)
def test_faults_are_named(
    waymo: Path, tmp_path: Path, damage: Callable[[Path], Any], options: dict[str, Any], error: Any, named: str
) -> None:
    own = Path(shutil.copytree(waymo, tmp_path, dirs_exist_ok=True))
    damage(own)
    with pytest.raises(error, match=named):
        dataset(own, **options)


def test_clips_that_do_not_go_together_are_named_or_skipped(waymo: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(waymo, tmp_path, dirs_exist_ok=True))
    write_video(own / "videos/right/b.mp4", torch.zeros(3, 9, 32, 48, dtype=torch.uint8), 10)
    with pytest.raises(DataError, match=r"b: its cameras have frames that do not go together: 12 at 10 a second"):
        dataset(own)[4]
    assert dataset(own, skip_bad_samples=True)[4]["video_name"]["video_path"].endswith("a.mp4")


def test_checks_need_no_clip_opened(waymo: Path) -> None:
    node = dict(sequence_interval=1, num_frames=9, camera_keys=["left", "frnt"], video_size=(16, 30))
    found = problems(MultiviewDataset, dataset_dir=str(waymo), **node)
    assert any("video_size" in one for one in found) and any("Did you mean front" in one for one in found)


def test_cameras_of_the_toy_world_are_quarter_turns_or_those_of_a_covered_table() -> None:
    numpy.random.seed(0)
    item = ToyWorldVideos(num_episodes=2, num_frames=5, views=3, start=0)[0]
    first, second, third = item["video"].chunk(3, dim=2)
    assert torch.equal(first.rot90(1, (2, 3)), second) and torch.equal(first.rot90(2, (2, 3)), third)
    texts = item["t5_text_embeddings"].chunk(3)
    assert texts[0].shape == (64, 64) and [bool(text.any()) for text in texts] == [True, False, False]
    covered = ToyWorldVideos(2, num_frames=5, setting="covered", tasks=["reach_ring"], views=2, start=2)
    films = [film[2:7] for film in covered.episodes.cameras(0).values()]
    for view, film in zip(covered[0]["video"].chunk(2, dim=2), films, strict=True):
        assert torch.equal(view, torch.from_numpy(film).permute(3, 0, 1, 2))
    with pytest.raises(ConfigError, match="views=0"):
        ToyWorldVideos(num_episodes=2, views=0)
