# SPDX-License-Identifier: Apache-2.0
"""Whether weights are where they are expected and fit, told before anything heavy is built."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from cosmos_predict2.checkpoints.dit_weights import fitted, open_dit
from imaginaire.checkpoint import weight_files, weights
from imaginaire.config import lazy_config
from imaginaire.errors import CheckpointError


def problem_with(path: str, which: str = "auto") -> str | None:
    """What keeps a network's weights at a path from being opened, with the command that fetches released ones."""
    try:
        with _unsaid():
            open_dit(path, which)
    except CheckpointError as error:
        return str(error)
    return None


def described_weights(path: str, which: str = "auto") -> str:
    """The file that weights are read from, and whether they are the averaged ones of it."""
    if not path:
        return "random weights"
    is_averaged = which == "net_ema" or (which == "auto" and problem_with(path, "net") is not None)
    return f"{weight_files.latest(path)} ({'averaged weights, net_ema.' if is_averaged else 'regular weights'})"


def holds(path: str, pattern: str) -> bool:
    """Whether the network's weights at a path have a name like this."""
    with _unsaid():
        return any(fnmatchcase(name, pattern) for name in open_dit(path))


def check_dit(node: Any, path: str, which: str = "auto", allow_missing: Iterable[str] = ()) -> None:
    """Raise where weights are not of the network of a lazy node: compares names and shapes, and takes no memory."""
    with _unsaid():
        source = open_dit(path, which)
    with torch.device("meta"):
        net: nn.Module = lazy_config.instantiate(node)
    targets, source, allow_missing = fitted(net, source, path, allow_missing)
    weights.account(targets, source).require(allow_missing=allow_missing, source=path)


@contextmanager
def _unsaid() -> Iterator[None]:
    """Which file and which of its networks is read is said once: by the loading that follows."""
    loggers = [logging.getLogger(module.__name__) for module in (weights, weight_files)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
