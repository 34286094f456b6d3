# SPDX-License-Identifier: Apache-2.0
"""A world model to imagine with, from its weights alone; environments name it in their configuration."""

from cosmos_predict2.checkpoints.tiny_base import tiny_action_path
from cosmos_predict2.configs.choice import choose_action_model
from cosmos_predict2.pipelines.flags import ActionModel
from cosmos_predict2.world_model.assembly import device_of
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire.errors import ConfigError, near


def imagination_of(
    dit_path: str = "",
    *,
    action_transform: str = "",
    chunk_size: int | None = None,
    tokenizer_path: str = "",
    load_ema: bool = False,
    device: str | None = None,
    precision: str | None = None,
) -> Imagination:
    """The action-conditioned world model of some weights, a run or a file; without a path the tiny one that ships.

    What is not given is as the card of the weights says. ``device`` is a GPU where there is one.
    """
    path = dit_path or tiny_action_path()
    flags = ActionModel(
        dit_path=path,
        action_transform=action_transform,
        chunk_size=chunk_size,
        tokenizer_path=tokenizer_path,
        load_ema=load_ema,
    )
    choice = choose_action_model(flags)
    device = device_of(device)
    precision = precision or ("float32" if device == "cpu" else choice.config.precision)
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is '{precision}'.{near(precision, PRECISIONS)}")
    world = build_world_model(choice.config, dtype=PRECISIONS[precision], device=device)
    return Imagination(world.load(choice.dit_path, "net_ema" if load_ema else "auto"))
