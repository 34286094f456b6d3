# SPDX-License-Identifier: Apache-2.0
"""A world model to imagine with, from its weights alone, or to refine, as its run trained it; environments name them in
their configuration."""

from functools import partial
from typing import Any

from omegaconf import ListConfig, OmegaConf

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
from cosmos_predict2.data.video.clips import Fit, stretch
from cosmos_predict2.pipelines.recorded_run import composed_run
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.world_model.assembly import device_of
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import ActionModel
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire.config import lazy_config
from imaginaire.config.compose import quoted
from imaginaire.data.facts import known
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

    Values that are not given come from the card of the weights. ``device`` is a GPU where there is one.
    """
    path = dit_path or TINY_ACTION
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
    world.load(choice.dit_path, "net_ema" if load_ema else "auto")
    return Imagination(world, choice.card.views, choice.card.action_keys)


def fit_of(dit_path: str) -> Fit | None:
    """A function that brings each view to the size of a run's training, as data sets with actions and recorded starts
    do; None where the weights record no size."""
    size = read_card(dit_path).video_size
    return None if size is None else partial(stretch, size=size)


def world_model_of(dit_path: str) -> Any:
    """The node of the training model of a run, with the weights that it trained, which go on without an average."""
    weights = f"model.config.model_manager_config.dit_path={quoted(dit_path)}"
    return composed_run(read_card(dit_path), [weights, "model.config.pipe_config.ema.enabled=false"]).model


def training_data_of(dit_path: str, root: str = "", **options: Any) -> Any:
    """The data set that the weights of a run were trained on, or other recordings read likewise, with some of its
    arguments changed."""
    own = {**options, "root": root} if root else options
    return lazy_config.instantiate(composed_run(read_card(dit_path), []).dataloader_train.dataset, **own)


def trained_on(dit_path: str, name: str) -> Any:
    """An argument of the data set that the weights of a run were trained on, such as its root; None where no run
    records it. In a configuration ``${trained_on:PATH,NAME}``, which is saved as its value."""

    def read() -> Any:
        loader = read_card(dit_path, fetch=False).run.get("dataloader_train") or {}
        value = (loader.get("dataset") or {}).get(name)
        return ListConfig(value) if isinstance(value, list) else value

    return known(read)


OmegaConf.register_new_resolver("trained_on", trained_on, replace=True)
OmegaConf.register_new_resolver("picture_size_of", lambda dit_path: trained_on(dit_path, "video_size"), replace=True)
