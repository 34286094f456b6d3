# SPDX-License-Identifier: Apache-2.0
from itertools import zip_longest
from typing import Any

import pytest
import torch

from cosmos_predict2.configs.base.defaults import data
from imaginaire.buildable import locate, name_of
from imaginaire.config import lazy_config
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import to_yaml
from imaginaire.data.stream import DataStream, ResumableLoader
from imaginaire.distributed.parallel import ParallelDims

BASE = "cosmos_predict2/configs/base/config.py"
OF_A_USER = {"folder": "dataset_dir", "latents": "dataset_dir", "shards": "shards", "prompts": "path"}  # must be given
SMALL = ["num_tokens=4", "width=8"]


def place(split: str, name: str) -> list[str]:
    return [f"dataloader_{split}.dataset.{OF_A_USER[name]}=datasets/mine"] if name in OF_A_USER else []


def composed(split: str, name: str, *more: str) -> Any:
    return compose(BASE, [f"dataloader_{split}={name}", *place(split, name), *more])


ENTRIES = data.entries("train")
# The first that each function makes; the others differ in values that have tests, or an experiment, of their own.
FIRST = {getattr(build, "func", build): name for name, build in reversed(ENTRIES.items())}.values()
PAIRS = [
    pytest.param(train, val, marks=() if train in FIRST else pytest.mark.long)
    for train, val in zip_longest(ENTRIES, data.entries("val"), fillvalue="toy")
]


@pytest.mark.parametrize(("train", "val"), PAIRS)
def test_every_loader_composes_without_the_rest(train: str, val: str) -> None:
    config = composed("train", train, f"dataloader_val={val}", *place("val", val))
    for node in (config.dataloader_train, config.dataloader_val):
        assert issubclass(locate(name_of(node["_target_"])), ResumableLoader)
        assert "${" not in to_yaml(node), "the saved configuration can be run without this one"


@pytest.mark.parametrize(
    ("experiment", "other", "size"),
    [
        ("predict2_video2world_tiny_action_conditioned_training", "lerobot", 8),
        ("predict2_video2world_training_tiny_groot_gr1_480", "folder", 16),
        ("predict2_video2world_2b_action_conditioned_training", "lerobot", 2),
        ("predict2_video2world_training_2b_groot_gr1_480", "toy", 1),
    ],
)
def test_other_data_leave_the_batch_size_of_the_experiment(experiment: str, other: str, size: int) -> None:
    places = {"lerobot": "root", "folder": "dataset_dir"}
    options = [f"experiment={experiment}"]
    for split in ("train", "val"):
        options.append(f"dataloader_{split}={other}{f'_{split}' if other == 'lerobot' else ''}")
        if other in places:
            options.append(f"dataloader_{split}.dataset.{places[other]}=datasets/mine")
    config = compose(BASE, options)
    assert config.dataloader_train.batch_size == size
    if "tiny" in experiment:
        assert config.dataloader_val.batch_size == size


@pytest.mark.parametrize(
    ("model", "size", "frames"),
    [
        ("2b_480p_10fps", [432, 768], 61),
        ("14b_720p_16fps", [704, 1280], 93),
        ("tiny", [48, 48], 13),
        (None, [704, 1280], 93),
    ],
)
def test_clips_of_a_user_are_as_large_and_as_long_as_the_model(model: str | None, size: list[int], frames: int) -> None:
    chosen = [f"model=predict2_video2world_fsdp_{model}"] if model else []
    config = composed("train", "folder", "dataloader_val=mock", *chosen)
    assert list(config.dataloader_train.dataset.video_size) == size
    assert config.dataloader_train.dataset.num_frames == frames
    assert config.dataloader_val.datasets.video_data.num_frames == frames


def test_the_length_of_clips_may_be_given() -> None:
    longer = composed("train", "gr1", "model=predict2_video2world_fsdp_tiny", "dataloader_train.dataset.num_frames=21")
    assert longer.dataloader_train.dataset.num_frames == 21


def test_the_published_loaders_have_their_published_values() -> None:
    config = composed("train", "gr1", "dataloader_val=bridge_val")
    gr1, bridge = config.dataloader_train, config.dataloader_val
    assert (gr1.batch_size, gr1.num_workers, gr1.pin_memory, gr1.shuffle) == (1, 8, True, True)
    assert gr1.dataset.dataset_dir == "datasets/benchmark_train/gr1" and list(gr1.dataset.video_size) == [432, 768]
    assert gr1.dataset.num_frames == 93 and bridge.dataset.num_frames == 13
    assert bridge.dataset.val_annotation_path == "datasets/bridge/annotation/val" and bridge.dataset.mode == "val"
    assert list(bridge.dataset.video_size) == [480, 640] and not bridge.shuffle
    spatial = composed("train", "libero_spatial_train").dataloader_train.dataset
    assert list(spatial.suites) == ["libero_spatial"] and list(spatial.video_size) == [256, 320]


def test_mock_batches_are_images_and_videos_in_turn() -> None:
    small = [f"dataloader_train.datasets.{name}.{option}" for name in ("image_data", "video_data") for option in SMALL]
    small += ["dataloader_train.datasets.image_data.image_size=[16,16]"]
    small += ["dataloader_train.datasets.video_data.video_size=[16,16]"]
    loader = lazy_config.instantiate(
        composed("train", "mock", "model=predict2_video2world_fsdp_tiny", *small).dataloader_train
    )
    stream = iter(DataStream(loader, seed=0, dims=ParallelDims(world_size=1, rank=0, context_parallel_size=1)))
    batches = [next(stream) for _ in range(4)]
    assert ["images" in batch for batch in batches] == [True, False, True, False]
    assert batches[0]["images"].shape == (2, 3, 16, 16) and batches[1]["video"].shape == (1, 3, 13, 16, 16)
    assert batches[0]["dataset_name"] == ["image_data"] * 2 and batches[1]["dataset_name"] == ["video_data"]


@pytest.mark.parametrize(("name", "key"), [("mock_video", "video"), ("mock_image", "images"), ("toy", "video")])
def test_loaders_without_files_give_batches(name: str, key: str) -> None:
    sizes = {
        "mock_video": [*SMALL, "video_size=[16,16]"],
        "mock_image": [*SMALL, "image_size=[16,16]"],
        "toy": ["num_episodes=32"],
    }
    more = [f"dataloader_train.dataset.{option}" for option in sizes[name]]
    config = compose(BASE, ["model=predict2_video2world_fsdp_tiny", f"dataloader_train={name}", *more])
    batch = next(iter(lazy_config.instantiate(config.dataloader_train)))
    assert torch.is_tensor(batch[key]) and len(batch[key]) == config.dataloader_train.batch_size
