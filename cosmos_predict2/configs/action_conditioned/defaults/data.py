# SPDX-License-Identifier: Apache-2.0
"""Groups ``dataloader_train`` and ``dataloader_val``: clips with actions, besides those of configs/base."""

from functools import partial
from typing import Any

from cosmos_predict2.actions.statistics import STATISTICS
from cosmos_predict2.configs.base.defaults.data import (
    LIBERO_SUITES,
    bridge,
    frames_of_model,
    from_files,
    libero,
    text_width_of_model,
)
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.info import EMBODIMENTS
from cosmos_predict2.data.lerobot.robots import ROBOTS
from cosmos_predict2.data.mixing import MixedLoader
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.data.toy.latents import ToyWorldLatents
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.toy_world.physics import SETTINGS
from imaginaire.config import L, register_group
from imaginaire.data.stream import ResumableLoader

ROBOT_SIZES = {"droid": [192, 320], "agibot_world": [240, 320], "so100": [240, 320]}  # of the cameras' shapes
ROBOT_STRIDE = 3  # of 15 and 30 frames per second; 12 actions then last 2.4 or 1.2 seconds
GR1_DIM = sum(EMBODIMENTS["gr1"].values())


def bridge_of(split: str, video_size: list[int]) -> Any:
    """The clips of ``bridge_train`` in another size."""
    node = bridge(split)
    node.dataset.video_size = video_size
    return node


def of_a_user(node: Any, **place: Any) -> Any:
    """The same layout for a user's own data: normalised by their statistics, not as released weights have them."""
    node.dataset.update(action_transform=STATISTICS, **place)
    return node


def bridge_json(split: str) -> Any:
    """A user's own recordings in Bridge's layout; give the folder that holds annotation/ and videos/ as video_path."""
    of_split = {f"{name}_annotation_path": f"${{.video_path}}/annotation/{name}" for name in ("train", "val", "test")}
    return of_a_user(bridge(split), video_path="???", **of_split)


def gr1(split: str, data_split: str = "") -> Any:
    """GR1 with the 29 numbers of arms, hands and waist. They are the joints' targets in radians, taken as they are."""
    dataset = L(LeRobotActionDataset)(
        root="datasets/gr1_lerobot",
        embodiment="gr1",
        num_frames=frames_of_model(4),
        video_size=[480, 832],
        data_split=data_split or split,
        text_width=text_width_of_model(),
        action_transform=dict(kind="controller", scale=[1.0] * GR1_DIM),
    )
    return from_files(dataset, split, num_workers=4)


def lerobot(split: str) -> Any:
    """A user's own LeRobot data set, or LIBERO's; give its root, and where it has several the camera."""
    dataset = L(LeRobotActionDataset)(
        root="???",
        num_frames=frames_of_model(4),
        video_size=[256, 320],
        data_split=split,
        text_width=text_width_of_model(),
    )
    return from_files(dataset, split, num_workers=4)


def robot(name: str, split: str) -> Any:
    """A public data set of a known robot (`data.lerobot.robots`); give its root, and the units of SO-100 and SO-101."""
    node = lerobot(split)
    skip_idle = all(form.commands for form in ROBOTS[name].forms.values())
    node.dataset.update(embodiment=name, video_size=ROBOT_SIZES[name], stride=ROBOT_STRIDE, skip_idle=skip_idle)
    return node


def toy(split: str, setting: str = "default") -> Any:
    """Whole episodes of the toy world with actions and without captions, made as they are needed: no files.

    For training they are encoded once, and mostly drawn with the ring where the driver did not see it, so that only the
    actions determine what happens. For validation it is where the driver saw it. An episode of the hard setting takes
    three chunks of a model's, so half of the later windows begin with a picture that has been through the decoder.
    """
    handed_over = 0.5 if setting == "hard" else 0.0
    world = dict(mix="mixed", setting=setting, size=SETTINGS[setting].size, captions=False, num_tokens=1)
    world |= dict(seed=0, split=split)
    if split == "train":
        dataset = L(ToyWorldLatents)(
            tokenizer=L(TinyTokenizer)(), num_episodes=6000, handed_over=handed_over, least_travel=1.0, **world
        )
    else:
        dataset = L(ToyWorldVideos)(num_episodes=64, ring_elsewhere=0.0, **world)
    return L(ResumableLoader)(dataset=dataset, batch_size=1, num_workers=0, shuffle=split == "train")


def toy_long(split: str, setting: str = "default") -> Any:
    """Episodes of 96 actions, eight chunks, of which training sees every frame; validation sees one chunk at a time."""
    world = dict(mix="mixed", setting=setting, size=SETTINGS[setting].size, captions=False, num_tokens=1, num_steps=96)
    own = dict(num_episodes=2000, num_frames=97) if split == "train" else dict(num_episodes=64, ring_elsewhere=0.0)
    dataset = L(ToyWorldVideos)(seed=0, split=split, **world, **own)
    return L(ResumableLoader)(dataset=dataset, batch_size=1, num_workers=0, shuffle=split == "train")


def libero_with_rollouts(suite: str) -> Any:
    """Demonstrations and as many attempts of a policy, of which half failed: who sees success only imagines it."""
    demonstrations, successes, failures = (libero(suite, "train").dataset for _ in range(3))
    for attempts, outcome in ((successes, "success"), (failures, "failure")):
        attempts.root, attempts.outcome = "datasets/libero_rollouts", outcome
    return L(MixedLoader)(
        datasets=dict(demonstrations=demonstrations, successes=successes, failures=failures),
        ratios=dict(demonstrations=2, successes=1, failures=1),
        by="sample",
        batch_size=1,
        num_workers=4,
        pin_memory=True,
    )


def mock() -> Any:
    """Noise with actions of a robot arm."""
    dataset = L(MockVideos)(num_frames=frames_of_model(4), video_size=[256, 320], fps=4.0, action_shape=[12, 7])
    return L(ResumableLoader)(dataset=dataset, batch_size=1, num_workers=0)


def entries(split: str) -> dict[str, Any]:
    """The entries of the group for training (``train``) or validation (``val``)."""
    is_train = split == "train"
    return {
        f"bridge_13frame_480_640_{split}": partial(bridge_of, split, [480, 640]),
        f"bridge_13frame_256_320_{split}": partial(bridge_of, split, [256, 320]),
        f"gr00t_customiezed_gr1_{split}": partial(gr1, split),  # the published spelling
        "gr00t_customiezed_gr1_full": partial(gr1, split, "full"),
        f"lerobot_{split}": partial(lerobot, split),
        **{f"{name}_{split}": partial(robot, name, split) for name in ROBOTS},
        f"bridge_json_{split}": partial(bridge_json, split),
        f"libero_hdf5_{split}": lambda: of_a_user(libero("spatial", split), root="???", suites=None),
        "mock_action": mock,
        "toy_action": partial(toy, split),
        "toy_action_hard": partial(toy, split, "hard"),
        "toy_action_long": partial(toy_long, split),
        "toy_action_long_hard": partial(toy_long, split, "hard"),
        **{f"libero_{suite}_rollouts": partial(libero_with_rollouts, suite) for suite in LIBERO_SUITES if is_train},
    }


def register() -> None:
    for group, split in (("dataloader_train", "train"), ("dataloader_val", "val")):
        register_group(group, entries(split))
