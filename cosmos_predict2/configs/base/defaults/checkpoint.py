# SPDX-License-Identifier: Apache-2.0
"""Group ``ckpt_type``: how training state is written."""

from imaginaire.checkpoint.checkpointer import DistributedCheckpointer, DummyCheckpointer, StandardCheckpointer
from imaginaire.config import L, register_group

CKPT_TYPES = {
    "standard": L(StandardCheckpointer)(),  # four .pt files with full tensors
    "dcp": L(DistributedCheckpointer)(),  # torch.distributed.checkpoint folders, every rank its shards
    "dummy": L(DummyCheckpointer)(),  # nothing
}


def register() -> None:
    register_group("ckpt_type", CKPT_TYPES, package="checkpoint.type")
