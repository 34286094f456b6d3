# SPDX-License-Identifier: Apache-2.0
"""Group ``ckpt_type``: how training state is written."""

from hydra.core.config_store import ConfigStore

from imaginaire.checkpoint.checkpointer import DistributedCheckpointer, DummyCheckpointer, StandardCheckpointer
from imaginaire.config.lazy_config import LazyCall as L

CKPT_TYPES = {
    "standard": L(StandardCheckpointer)(),  # four .pt files with full tensors
    "dcp": L(DistributedCheckpointer)(),  # torch.distributed.checkpoint folders, every rank its shards
    "dummy": L(DummyCheckpointer)(),  # nothing
}


def register() -> None:
    for name, node in CKPT_TYPES.items():
        ConfigStore.instance().store(group="ckpt_type", package="checkpoint.type", name=name, node=node)
