# SPDX-License-Identifier: Apache-2.0
"""Groups ``dataloader_train`` and ``dataloader_val`` (also spelt data_train, data_val)."""

from typing import Any

from hydra.core.config_store import ConfigStore

from cosmos_predict2.data.toy import ToyWorldVideos
from imaginaire.data import ResumableLoader
from imaginaire.lazy_config import LazyCall as L


def toy(split: str) -> Any:
    """Clips of the toy world, made as they are needed: no files.

    Of the first 16 steps of each episode: later on, many experts have finished and nothing moves.
    """
    is_train = split == "train"
    return L(ResumableLoader)(
        dataset=L(ToyWorldVideos)(split=split, num_episodes=16384 if is_train else 64, num_steps=16),
        batch_size=16,
        num_workers=0,
        shuffle=is_train,
    )


def register() -> None:
    for group, split in (("dataloader_train", "train"), ("dataloader_val", "val")):
        ConfigStore.instance().store(group=group, package=group, name="toy", node=toy(split))
