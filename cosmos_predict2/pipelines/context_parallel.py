# SPDX-License-Identifier: Apache-2.0
"""One video by several processes. Rank 0 reads, encodes, decodes and writes (`lead`), and all sample a part each.

The others (`follow`) wait for what rank 0 sends: that there is work (`announce`), then the inputs of each sampling, at
last that it is over. examples/video2world.py shows the use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from cosmos_predict2.world_model.sampling import GUIDED, SamplingOptions
from cosmos_predict2.world_model.world_model import OnStep, WorldModel
from imaginaire import distributed
from imaginaire.distributed.parallel import divisors
from imaginaire.errors import ConfigError, UserError

Value = TypeVar("Value")
_OVER = None  # sent to followers in place of inputs


class SpreadError(RuntimeError):
    """Sampling failed on one process while the others are in the middle of it: nothing can go on."""


class LeadingWorld(WorldModel):
    """Rank 0's: whatever it samples, the followers sample with it."""

    def generate_latents(
        self,
        batch: Mapping[str, Tensor],
        given_B_C_T_H_W: Tensor,
        num_given: int,
        *,
        seed: int | Sequence[int] = 0,
        options: SamplingOptions = GUIDED,
        on_step: OnStep | None = None,
        is_without_text: bool = False,
    ) -> Tensor:
        sent = {"seed": seed, "options": replace(options, progress=False), "is_without_text": is_without_text}
        on_host = {name: value.cpu() for name, value in batch.items()}
        distributed.broadcast_object((on_host, given_B_C_T_H_W.cpu(), num_given, sent))
        try:
            return super().generate_latents(
                batch,
                given_B_C_T_H_W,
                num_given,
                seed=seed,
                options=options,
                on_step=on_step,
                is_without_text=is_without_text,
            )
        except (UserError, OSError, torch.OutOfMemoryError) as error:
            raise SpreadError(f"Rank 0 failed in sampling: {error}") from error


def lead(work: Callable[[], Value]) -> Value:
    """The result of ``work``; afterwards the followers are let go, but for an error in the middle of sampling."""
    try:
        value = work()
    except UserError:
        distributed.broadcast_object(_OVER)
        raise
    distributed.broadcast_object(_OVER)
    return value


def announce() -> None:
    """Let the followers build their pipelines; called by rank 0 before it builds its own."""
    distributed.broadcast_object(True)


def follow(make_world: Callable[[], WorldModel]) -> int:
    """Take part in the samplings of rank 0 until it is done, as another rank; gives their number."""
    count = 0
    if distributed.broadcast_object(None) is _OVER:
        return count
    world = make_world()
    while (inputs := distributed.broadcast_object(None)) is not _OVER:
        batch, given_B_C_T_H_W, num_given, settings = inputs
        world.generate_latents(batch, given_B_C_T_H_W.to(world.device), num_given, **settings)
        count += 1
    return count


def agreed(prepare: Callable[[], Value]) -> Value:
    """The result of ``prepare`` where it succeeds on all ranks; else its error on all of them."""
    error: UserError | None = None
    try:
        value = prepare()
    except UserError as found:
        error = found
    errors = distributed.all_gather_object(None if error is None else str(error))
    if error is not None:
        raise error
    if failed := [i for i, text in enumerate(errors) if text is not None]:
        raise ConfigError(f"rank {failed[0]}: {errors[failed[0]]}")
    return value


def check_num_gpus(num_gpus: int, num_heads: int, state_t: int) -> None:
    """Raise for a number of GPUs that the network's heads or the latent frames of a video cannot be divided by."""
    if num_heads % num_gpus or state_t % num_gpus:
        works = ", ".join(str(number) for number in divisors(num_heads) if state_t % number == 0)
        raise ConfigError(
            f"--num_gpus {num_gpus} must divide the {num_heads} attention heads of this network and the {state_t}"
            f" latent frames of its videos. These numbers do: {works}."
        )
