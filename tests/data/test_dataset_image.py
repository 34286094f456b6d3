# SPDX-License-Identifier: Apache-2.0
"""A folder of pictures as training samples."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.video.media import read_image, write_image
from imaginaire.errors import DataError
from tests.data.video_files import moving_pictures, write_embeddings
from tests.findings import problems

SIZE = (16, 32)
FILES = ("a.jpg", "b.png", "c.webp", "d.JPEG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "metas").mkdir()
    for name, picture in zip(FILES, moving_pictures(len(FILES)), strict=True):
        write_image(tmp_path / "images" / name, torch.from_numpy(picture).permute(2, 0, 1))
        (tmp_path / "metas" / f"{name[0]}.txt").write_text(f"picture {name[0]}")
    write_embeddings(tmp_path / "t5_xxl", "abcd")
    return tmp_path


def test_a_sample_has_the_published_form(folder: Path) -> None:
    dataset = ImageDataset(str(folder), SIZE)
    assert len(dataset) == 4
    for i, name in enumerate(FILES):
        item = dataset[i]
        picture = read_image(folder / "images" / name).float() / 255
        scaled = F.interpolate(picture[None], size=SIZE, mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(item["images"], scaled * 2 - 1, rtol=0, atol=1e-6)
        assert item["images"].dtype == torch.float32
        assert item["t5_text_embeddings"].shape == (512, 24) and item["t5_text_mask"].sum() == 7
        assert torch.equal(item["fps"], torch.tensor([16.0])) and torch.equal(item["num_frames"], torch.tensor([1.0]))
        assert item["image_size"].tolist() == [16, 32, 16, 32] and item["padding_mask"].shape == (1, *SIZE)
        assert item["image_name"]["image_path"] == str(folder / "images" / name)
        assert item["ai_caption"] == f"picture {name[0]}"


def test_the_range_is_minus_one_to_one(folder: Path) -> None:
    stripes = (torch.arange(48) % 2 * 255).expand(3, 32, 48).to(torch.uint8)
    write_image(folder / "images/b.png", stripes)
    images = ImageDataset(str(folder), (32, 48))[1]["images"]
    assert images.min() == -1 and images.max() == 1


def test_pictures_without_embeddings_are_reported_early(folder: Path) -> None:
    for path in (folder / "t5_xxl").iterdir():
        path.unlink()
    (found,) = problems(ImageDataset, dataset_dir=str(folder), image_size=SIZE)
    assert "None of the 4 pictures" in found
    with pytest.raises(DataError, match="None of the 4 pictures"):
        ImageDataset(str(folder), SIZE)
