# SPDX-License-Identifier: Apache-2.0
"""Checks that the parts of a world model can be built: weights that are there and fit, attention of the device."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cosmos_predict2.checkpoints.card import TOKENIZER, ModelCard, read_card
from cosmos_predict2.checkpoints.card_checks import FILES, part_differences, unregistered
from cosmos_predict2.checkpoints.dit_loading import check_dit
from cosmos_predict2.nn.attention import check_attention, choose_attention
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.world_model.network import network_of
from imaginaire.checkpoint import weights
from imaginaire.config.names import target_of
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext

log = logging.getLogger(__name__)


def check_parts(net: Any, dit_path: str, others: Sequence[Any], which: str = "auto") -> None:
    """Raise for weights that are not there or not of these lazy nodes, before one of them is built.

    The other parts are checked by their ``check``, where their class has one; None is passed over.
    """
    if dit_path:
        try:
            check_dit(network_of(net), dit_path, which)
        except CheckpointError as error:
            if problem := unregistered(read_card(dit_path)):
                raise CheckpointError(problem) from error
            raise
    for node in others:
        if (check := getattr(target_of(node), "check", None)) is not None:
            arguments = {str(key): node[key] for key in node if not str(key).startswith("_")}
            for finding in check(arguments, CheckContext()):
                raise CheckpointError(finding.text)


def part_digest(part: Any) -> str:
    """The digest of a part's weights, wherever it keeps its modules; empty for one without weights."""
    modules = {"": part} if isinstance(part, nn.Module) else vars(part)
    found = {
        f"{name}.{key}": value
        for name, module in modules.items()
        if isinstance(module, nn.Module)
        for key, value in module.state_dict().items()
    }
    return weights.digest(found) if found else ""


def other_parts(trained: ModelCard, config: Any, tokenizer: Any) -> Iterator[str]:
    """Sentences on parts of a world model that are not those that its network was trained with.

    Weights of another tokenizer are found by their digest; a record without one gives a warning.
    """
    nodes = {"net": config.net, "objective": config.objective} | (
        {} if tokenizer is None else {TOKENIZER: config.tokenizer}
    )
    for part, node in nodes.items():
        if differences := [*part_differences(trained, part, node)]:
            yield (
                f"{trained.source} was trained with pipe_config.{part} {'; '.join(differences)}. Build it so"
                " (apply_card(read_card(dit_path), config))."
            )
            return
    recorded = trained.pipeline.get(TOKENIZER)
    if tokenizer is None or not recorded or not (actual := part_digest(tokenizer)):
        return
    used, theirs = (next((node[key] for key in FILES if node.get(key)), "") for node in (config.tokenizer, recorded))
    used, theirs = (f"those of {file}" if file else "the shipped ones" for file in (used, theirs))
    if not (digest := trained.digests.get(TOKENIZER)):
        log.warning(
            "%s records no digest of its tokenizer's weights, %s: %s are taken as these", trained.source, theirs, used
        )
    elif digest != actual:
        yield (
            f"{trained.source} was trained with other weights of its tokenizer ({digest}, {theirs}) than {used}"
            f" ({actual}). Give their file with --tokenizer_path FILE, in a configuration as"
            f" {' or '.join(f'pipe_config.tokenizer.{key}' for key in FILES)}."
        )


def device_of(name: str | None) -> str:
    """The device that ``--device`` names, checked; without a name a GPU where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    return name


def check_device(device: str) -> None:
    """Raise for a device that torch does not know or this machine does not have."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: use cpu, cuda, or cuda:1.")
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"--device {device} (or --use_cuda_graphs): torch sees {count} GPUs here. Use --device cpu.")


def attention_problem(net: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why a device cannot run the attention of a lazy node's network; None where it can."""
    width, heads = net.get("model_channels"), net.get("num_heads")
    if not width or not heads:
        return None  # a network of another kind
    try:
        choose_attention(str(net.get("atten_backend", "auto")), device, dtype, width // heads)
    except (ImportError, ValueError) as error:
        return str(error).rstrip(".")
    return None


def settle_attention(net: DiT, device: torch.device, dtype: torch.dtype) -> None:
    """Choose the attention operator, hold it against torch's on the real head size, and say which it is."""
    try:
        choice = net.choose_attention(device=device, dtype=dtype)
        check_attention(choice.op, net.head_dim, device, dtype)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"net.atten_backend={net.atten_backend}: {error}") from error
    why = f"; {choice.reason}" if choice.reason else ""
    log.info("attention: %s (asked: %s%s)", choice.name, net.atten_backend, why)
