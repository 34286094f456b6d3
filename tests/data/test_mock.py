# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from cosmos_predict2.data.mock import NUM_ITEMS, MockImages, MockVideos
from imaginaire.errors import ConfigError

SMALL: dict[str, Any] = dict(num_tokens=4, width=6)


def test_a_mock_video_has_the_keys_and_the_shape_asked_for() -> None:
    item = MockVideos(num_frames=5, video_size=[16, 24], action_shape=[4, 7], **SMALL)[3]
    assert item["video"].shape == (3, 5, 16, 24) and item["video"].dtype == torch.uint8
    assert item["video"].max() <= 254 and item["video"].float().std() > 60
    assert item["t5_text_embeddings"].shape == (4, 6) and item["t5_text_mask"].dtype == torch.int64
    assert item["image_size"].tolist() == [16, 24, 16, 24] and item["padding_mask"].shape == (1, 16, 24)
    assert item["fps"] == 24.0 and item["num_frames"] == 5 and item["action"].shape == (4, 7)
    assert item["dataset_name"] == "video_data" and item["ai_caption"] == "placeholder"


def test_a_mock_image_has_pixels_in_range() -> None:
    item = MockImages(image_size=[16, 24], **SMALL)[0]
    assert item["images"].shape == (3, 16, 24) and item["images"].abs().max() <= 1
    assert item["fps"] == 1.0 and item["num_frames"] == 1 and item["dataset_name"] == "image_data"


@pytest.mark.parametrize("kind", [MockVideos, MockImages])
def test_items_differ_by_seed_and_index(kind: Any) -> None:
    key = "video" if kind is MockVideos else "images"
    size = {"video_size" if kind is MockVideos else "image_size": (8, 8)}
    small = dict(num_items=10, **size, **SMALL)
    one, other = kind(**small), kind(**small, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert not torch.equal(one[2][key], one[3][key]) and not torch.equal(one[2][key], other[2][key])
    assert torch.equal(one[2][key], one[2][key]) and torch.equal(one[-8][key], one[2][key])
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert len(kind()) == NUM_ITEMS and len(one) == 10


def test_impossible_sizes_are_errors() -> None:
    with pytest.raises(ConfigError, match="num_frames=0"):
        MockVideos(num_frames=0)
    with pytest.raises(ConfigError, match=r"video_size=\[0"):
        MockVideos(video_size=(0, 8))
    with pytest.raises(ConfigError, match=r"image_size=\[8\]"):
        MockImages(image_size=[8])
