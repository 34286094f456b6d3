# SPDX-License-Identifier: Apache-2.0
"""Groups ``dataloader_train`` and ``dataloader_val`` (also spelt data_train, data_val).

Clips are as long as the model that is chosen beside them, unless their ``num_frames`` is set. An entry names the
data and how many workers read them. How many clips make a batch is a number of the run: here it is 1, and an
experiment that needs another sets it.
"""

from functools import partial
from typing import Any

from omegaconf import ListConfig, OmegaConf

from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import LiberoDataset
from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.dataset_latents import LatentDataset
from cosmos_predict2.data.dataset_multiview import MultiviewDataset
from cosmos_predict2.data.dataset_prompts import PromptDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.mixing import MixedLoader
from cosmos_predict2.data.mock import MockImages, MockVideos
from cosmos_predict2.data.shards.dataset_shards import ShardedVideos
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.models.text import RELEASED_WIDTH
from cosmos_predict2.tokenizers.sizes import TOY_RESOLUTION, pixel_frames, size_of
from imaginaire.config import L, register_group
from imaginaire.data.stream import ResumableLoader

LIBERO_SUITES = ("spatial", "object", "goal", "10")
BRIDGE = "datasets/bridge"
AGIBOT = "datasets/agibot_head_center_fisheye_color"
GR1, NEMO = "datasets/benchmark_train/gr1", "datasets/cosmos_nemo_assets"
WAYMO = "datasets/waymo"
WAYMO_CAMERAS = {  # from left to right, with the camera of the released network that each is
    "pinhole_side_left": 4, "pinhole_front_left": 5, "pinhole_front": 0, "pinhole_front_right": 1,
    "pinhole_side_right": 2,
}  # fmt: skip
SIZE_480, SIZE_704 = [432, 768], [704, 1280]  # height, width

for _name, _resolve in (
    ("pixel_frames", pixel_frames),
    ("zero_text_width", lambda width, projected: min(projected or width, RELEASED_WIDTH)),
    ("video_size", lambda name: ListConfig(list(size_of(str(name), "1:1" if str(name) == TOY_RESOLUTION else "16:9")))),
):
    OmegaConf.register_new_resolver(_name, _resolve, replace=True)


def frames_of_model(otherwise: int) -> str:
    """The pixel frames of the configuration's model; those of ``otherwise`` latent frames where there is none."""
    return f"${{pixel_frames:${{oc.select:model.config.pipe_config.state_t,{otherwise}}}}}"


def text_width_of_model() -> str:
    """The width of a text of zeros: what the configuration's model reads, and what T5 gives where there is none. Wide
    ones, as of Predict2.5, come with its weights, not with the data."""
    net = "oc.select:model.config.pipe_config.net"
    widths = f"${{{net}.crossattn_emb_channels,{RELEASED_WIDTH}}},${{{net}.crossattn_proj_in_channels,null}}"
    return f"${{zero_text_width:{widths}}}"


def toy(split: str, *, num_episodes: int = 16384, num_steps: int | None = 16, **world: Any) -> Any:
    """Clips of the toy world, made as they are needed: no files.

    Of the first 16 steps of each episode: later on, many experts have finished and nothing moves.
    """
    is_train = split == "train"
    return L(ResumableLoader)(
        dataset=L(ToyWorldVideos)(
            split=split, num_episodes=num_episodes if is_train else 64, num_steps=num_steps, **world
        ),
        batch_size=1,
        num_workers=0,
        shuffle=is_train,
    )


# What the tiny twin of each family learns from, as arguments of `toy`.
TOYS: dict[str, dict[str, Any]] = {
    "toy": dict(mix="full_skill"),  # pushes the puck
    # the box only stands beside the puck at times
    "toy_base": dict(mix="varied", tasks=["push_puck", "push_puck", "choose_puck", "carry_puck", "touch_puck"]),
    "toy_agibot": dict(tasks=["carry_puck", "carry_box"]),
    "toy_nemo": dict(tasks=["touch_puck", "touch_box"], num_episodes=64),  # few clips, as in its family
    "toy_nemo_lora": dict(tasks=["push_box"]),  # which the tiny base never saw move
    "toy_waymo": dict(mix="full_skill", views=2),
    "toy_nemo_images": dict(mix="full_skill", num_frames=1),
    "toy_video2world_data": dict(tasks=["push_puck", "push_box", "carry_puck", "carry_box", "touch_puck", "touch_box"]),
}


def from_files(dataset: Any, split: str, *, num_workers: int = 8) -> Any:
    """Samples that are decoded from files, one a batch."""
    return L(ResumableLoader)(
        dataset=dataset, batch_size=1, num_workers=num_workers, pin_memory=True, shuffle=split == "train"
    )


def size_of_model() -> str:
    """The model's resolution at 16:9 (of the tiny ones square), as (height, width); that of 720 where there is none."""
    return "${video_size:${oc.select:model.config.pipe_config.resolution,720}}"


def folder(
    dataset_dir: str, split: str, *, video_size: Any = None, num_frames: int | None = None, num_workers: int = 8
) -> Any:
    """A folder of clips with embeddings by T5, for a Video2World model; of its size and length if none is given."""
    dataset = L(Dataset)(
        dataset_dir=dataset_dir,
        num_frames=num_frames or frames_of_model(24),
        video_size=video_size or size_of_model(),
        text_encoder="t5",
    )
    return from_files(dataset, split, num_workers=num_workers)


def captioned(dataset_dir: str, split: str, *, video_size: Any, **captions: str) -> Any:
    """A folder of clips with captions, for a model that encodes them itself."""
    dataset = L(Dataset)(
        dataset_dir=dataset_dir, num_frames=frames_of_model(24), video_size=video_size, text_encoder="none", **captions
    )
    return from_files(dataset, split, num_workers=4)


def waymo(split: str, video_size: list[int]) -> Any:
    """Clips of five cameras of a car, in the layout of the guide; the front one has the text."""
    dataset = L(MultiviewDataset)(
        dataset_dir=WAYMO,
        sequence_interval=1,
        num_frames=29,
        camera_keys=list(WAYMO_CAMERAS),
        video_size=video_size,
        front_camera_key="pinhole_front",
        camera_to_view_id=dict(WAYMO_CAMERAS),
        front_view_caption_only=True,
        is_train=split == "train",
        text_encoder="t5",
    )
    return from_files(dataset, split, num_workers=6)


def agibot(split: str, video_size: list[int]) -> Any:
    """Clips of the fisheye camera. Models of 10 frames per second cut theirs, which are shorter, out of the 93."""
    return folder(f"{AGIBOT}/{split}", split, video_size=video_size, num_frames=93, num_workers=4)


def latents(dataset_dir: str, split: str) -> Any:
    """The same folder, its clips encoded by scripts.cache_latents."""
    dataset = L(LatentDataset)(dataset_dir=dataset_dir, num_frames=frames_of_model(24), text_encoder="t5")
    return from_files(dataset, split)


def shards(split: str) -> Any:
    """Clips in tar shards: ``dataset.shards`` is a list of paths or s3:// addresses, with {000..127} and *."""
    dataset = L(ShardedVideos)(
        shards="???", num_frames=frames_of_model(24), video_size=size_of_model(), text_encoder="t5"
    )
    return from_files(dataset, split)


def prompts() -> Any:
    """Prompts, or first frames with prompts, for rewards that need no true clip."""
    return L(ResumableLoader)(
        dataset=L(PromptDataset)(path="???", num_frames=frames_of_model(24), video_size=size_of_model()), batch_size=1
    )


def bridge(split: str) -> Any:
    """Clips of 13 frames with the 12 actions between them."""
    dataset = L(ActionConditionedDataset)(
        **{f"{name}_annotation_path": f"{BRIDGE}/annotation/{name}" for name in ("train", "val", "test")},
        video_path=BRIDGE,
        sequence_interval=1,
        num_frames=frames_of_model(4),
        cam_ids=[0],
        accumulate_action=False,
        video_size=[480, 640],
        val_start_frame_interval=1,
        mode=split,
        text_width=text_width_of_model(),
    )
    return from_files(dataset, split, num_workers=4)


def libero(suite: str, split: str) -> Any:
    """The demonstrations of one suite of LIBERO; the last of every ten is for validation."""
    dataset = L(LiberoDataset)(
        root="datasets/libero",
        suites=[f"libero_{suite}"],
        num_frames=frames_of_model(4),
        video_size=[256, 320],
        mode=split,
        text_width=text_width_of_model(),
    )
    return from_files(dataset, split, num_workers=4)


def mock_video() -> Any:
    return L(ResumableLoader)(dataset=L(MockVideos)(num_frames=frames_of_model(24)), batch_size=1, num_workers=0)


def mock_image() -> Any:
    return L(ResumableLoader)(dataset=L(MockImages)(), batch_size=2, num_workers=0)


def mock() -> Any:
    """Batches of images and of videos in turn."""
    return L(MixedLoader)(
        datasets=dict(image_data=L(MockImages)(), video_data=L(MockVideos)(num_frames=frames_of_model(24))),
        ratios=dict(image_data=1, video_data=1),
        batch_size=dict(image_data=2, video_data=1),
        by="batch",
        num_workers=0,
    )


def entries(split: str) -> dict[str, Any]:
    """The entries of the group for training (``train``) or validation (``val``)."""
    found = {
        **{name: partial(toy, split, **world) for name, world in TOYS.items()},
        "mock": mock,
        "mock_image": mock_image,
        "mock_video": mock_video,
        f"bridge_{split}": partial(bridge, split),
        **{f"libero_{suite}_{split}": partial(libero, suite, split) for suite in LIBERO_SUITES},
        "latents": partial(latents, "???", split),
        "folder": partial(folder, "???", split),
        "shards": partial(shards, split),
        "agibot_head_center_fisheye_color": partial(agibot, split, SIZE_704),
        "agibot_head_center_fisheye_color_480": partial(agibot, split, SIZE_480),
        "waymo5views_720p": partial(waymo, split, SIZE_704),
        "waymo5views_480p": partial(waymo, split, [480, 848]),
        # Published data without embeddings; but for the last, validation sees the clips of training.
        "gr1_captions": partial(captioned, GR1, split, video_size=SIZE_480),
        "cosmos_nemo_assets_captions": partial(captioned, NEMO, split, video_size=SIZE_704),
        "cosmos_nemo_assets_json": partial(
            captioned,
            f"{NEMO}_json/{'train' if split == 'train' else 'validation'}",
            split,
            video_size=SIZE_704,
            caption_format="json",
            prompt_type="long",
        ),
    }
    if split == "train":
        found["prompts"] = prompts
        # Published data that keep nothing back for validation.
        user = "datasets/cosmos_predict2_video2world_dataset"
        found["gr1"] = partial(folder, GR1, "train", video_size=SIZE_480)
        found["cosmos_nemo_assets"] = partial(folder, NEMO, "train", video_size=SIZE_704)
        found["cosmos_nemo_assets_images"] = lambda: from_files(
            L(ImageDataset)(dataset_dir=f"{NEMO}_images", image_size=[768, 1360], text_encoder="t5"), "train"
        )
        found["video2world_data"] = partial(folder, user, "train", video_size=SIZE_704)
    return found


def register() -> None:
    for group, split in (("dataloader_train", "train"), ("dataloader_val", "val")):
        register_group(group, entries(split))
