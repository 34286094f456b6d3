# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank of a sharded run, added up over the tensors that it really makes.

The model of an experiment is built by its own class, sharded by its own wrappers for a process group that does not
exist (backend "fake"), stepped by its own optimizer, and averaged by its own EMA, all without memory (device "meta").
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_predict2.models import video2world_model
from imaginaire.config import lazy_config
from imaginaire.config.compose import compose
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import to_local
from imaginaire.optim.adamw import FusedAdamW

CONFIG = "cosmos_predict2/configs/base/config.py"


def measured_rank_bytes(experiment: str, world_size: int, overrides: tuple[str, ...] = ()) -> dict[str, int]:
    """Bytes of rank 0 by kind: parameters, gradients, optimizer (moments and masters), ema, buffers.

    ``experiment`` is a registered name, or an entry of the group ``model`` as ``model=NAME``; gradients have the dtype
    and the layout of their parameters. Counted are storages, so that views of one memory count once.
    """
    choice = experiment if "=" in experiment else f"experiment={experiment}"
    nothing = ["model.config.model_manager_config.dit_path=''", "model.config.pipe_config.tokenizer=null"]
    config = compose(CONFIG, [choice, *nothing, "job.name=measured", *overrides])  # no file of weights is here
    with pretended_world(world_size), mock.patch.object(video2world_model, "fill_network"):
        parallel.init_dims(config.model_parallel.context_parallel_size)
        model = lazy_config.instantiate(config.model)
        model.parallelize(parallel.current_dims())
        optimizer, _ = model.init_optimizer_scheduler(config.optimizer, config.scheduler)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        if isinstance(optimizer, FusedAdamW):
            optimizer._kernel = lambda rows, group: None  # the state is there; it would ask numbers of such tensors
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        return {
            "parameters": _bytes(model.parameters()),
            "gradients": _bytes(p.grad for p in trained if p.grad is not None),
            "optimizer": _bytes(value for value in state if isinstance(value, Tensor)),
            "ema": _bytes(model.ema.shadows.values() if model.ema is not None else ()),
            "buffers": _bytes(model.buffers()),
        }


@contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one of many, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = parallel.current_dims()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(parallel, "_init_megatron"):  # imported by another test, it would make gloo groups
            yield
    finally:
        dist.destroy_process_group()
        parallel._current = before


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors on this rank."""
    locals_ = {id(tensor): to_local(tensor) for tensor in tensors}
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in locals_.values())
