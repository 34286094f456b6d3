# SPDX-License-Identifier: Apache-2.0
"""Weights of the video network from wherever they are, under the network's own names.

Every argument that takes weights goes through ``open_dit``: released ``.pt`` files, training checkpoints and run
folders, DCP folders, safetensors, hub ids, and diffusers' pipeline or transformer folders.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name
from cosmos_predict2.released import describe_missing, download_command
from imaginaire import storage
from imaginaire.checkpoint import weight_files, weights
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, below, names_at
from imaginaire.errors import CheckpointError

log = logging.getLogger(__name__)

WHICH = ("auto", "net", "net_ema")
WORLD_MODEL = "world_model."  # of a run whose ``net.`` is a policy
# The first layer of a network, in our names or diffusers', and what other programs put before it.
_FIRST_LAYER = re.compile(
    r"(?P<prefix>((model|diffusion_model|module)\.)*)((net|net_ema)\.)?(x_embedder\.proj\.1|patch_embed\.proj)\."
)
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of recomputation, compile, FSDP1


def open_dit(path_or_id: str, which: str = "auto") -> Mapping[str, Tensor]:
    """Tensors of the network by its own names, lazy; LoRA factors stay beside their ``base_layer``.

    ``which`` is ``net``, ``net_ema`` or ``auto``: ``net``, or the averaged copy where that is all there is.
    """
    path = str(path_or_id)
    return network_of(open_weights(path), path, which)


def open_weights(path: str) -> Mapping[str, Tensor]:
    """All tensors at a path by the names in the file, lazy; a missing released file is an error with its command."""
    address = inside_a_pipeline(path)
    if download_command(address) and not storage.is_remote(address) and not storage.exists(address):
        raise CheckpointError(describe_missing(address))
    source = weights.read(address)
    if any(name.startswith(WORLD_MODEL) for name in source):  # of a run in which a policy is trained beside it
        source = weights.renamed(
            source, lambda name: name[len(WORLD_MODEL) :] if name.startswith(WORLD_MODEL) else None
        )
    return without_foreign_prefix(source, address)


def without_foreign_prefix(source: Mapping[str, Tensor], path: str) -> Mapping[str, Tensor]:
    """The network's tensors without what other programs put before all of its names: ``model.diffusion_model.`` and
    parts of it, ``module.``. What they keep beside the network (its tokenizer, say) is left out."""
    names = {name: clean_name(name) for name in source}
    prefixes = {match["prefix"] for name in names.values() if (match := _FIRST_LAYER.match(name))}
    if not prefixes or "" in prefixes:
        return source
    prefix = min(prefixes)
    others = {name for name, clean in names.items() if not clean.startswith(prefix) and not weights.is_extra(name)}
    if others:
        log.info("%s: %d tensors that are not below '%s' are left out", path, len(others), prefix)
    return weights.renamed(source, lambda name: None if name in others else names[name].removeprefix(prefix))


def network_of(source: Mapping[str, Tensor], path: str, which: str = "auto") -> Mapping[str, Tensor]:
    """The tensors of one network in a file, by its own names; ``path`` is for messages."""
    if which not in WHICH:
        raise CheckpointError(f"which={which!r}: expected one of {', '.join(WHICH)}.")
    source = weights.renamed(source, clean_name)
    if is_diffusers(source):
        return _from_diffusers(source, path, which)
    try:
        return weights.select(source, which)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def clean_name(name: str) -> str:
    """The name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def problem_with(path: str, which: str = "auto") -> str | None:
    """Reason why weights at a path cannot be opened, with the command that fetches released ones; else None."""
    try:
        with quiet():
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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log about the file and the network that is read: the loading that follows logs it."""
    loggers = [logging.getLogger(module.__name__) for module in (weights, weight_files)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def inside_a_pipeline(address: str) -> str:
    """The transformer's folder of a diffusers pipeline; any other address as it is."""
    names = names_at(address)
    if "transformer" in names and "model_index.json" in names and not any(n.endswith(TENSOR_SUFFIXES) for n in names):
        return below(address, "transformer")
    return address


def is_diffusers(names: Iterable[str]) -> bool:
    """True if the names are those of diffusers' transformer."""
    names = set(names)
    return "patch_embed.proj.weight" in names and any(name.startswith("transformer_blocks.") for name in names)


def _from_diffusers(source: Mapping[str, Tensor], address: str, which: str) -> Mapping[str, Tensor]:
    if which == "net_ema":
        raise CheckpointError(
            f"{address} is in diffusers' layout, which holds no averaged copy: leave --load_ema out (in Python: ask for"
            " 'net')."
        )
    if unknown := [name for name in source if from_diffusers_name(name) is None]:
        raise CheckpointError(
            f"{address} is a diffusers transformer with {len(unknown)} names that this network does not have:"
            f" {', '.join(unknown[:5])}."
        )
    return weights.renamed(source, from_diffusers_name)
