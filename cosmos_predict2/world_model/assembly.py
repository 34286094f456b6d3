# SPDX-License-Identifier: Apache-2.0
"""The network of a world model, built without memory and filled with the weights that training starts from; the text
that weights were trained with; and checks that all parts can be built: weights that are there and fit, attention of the
device.

Of a sharded network no rank ever holds more than its part and one tensor of a file. What is drawn follows from the
seed, the parameter's name and the place in it, so that every layout of processes starts from the same numbers.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.card import TEXT_ENCODER, TOKENIZER, ModelCard, name_of, read_card
from cosmos_predict2.checkpoints.dit_loading import FILES, check_dit, load_dit, part_differences, unregistered
from cosmos_predict2.checkpoints.dit_weights import ACTION_EMBEDDERS, clean_name
from cosmos_predict2.nn.blocks import check_attention, choose_attention
from cosmos_predict2.nn.dit import COUNTERS, DiT
from cosmos_predict2.nn.layers import HasBuffers, Start, starts
from cosmos_predict2.text.tiny_reason1 import TINY
from cosmos_predict2.text.trained_text import ENCODERS, NO_TEXT, RELEASED, EncoderName, TrainedText, parse_name
from imaginaire import random, storage
from imaginaire.buildable import arguments_of, resolve, takes, target_of
from imaginaire.checkpoint import weights
from imaginaire.config import lazy_config
from imaginaire.config.lazy_config import LazyCall
from imaginaire.distributed import parallel
from imaginaire.errors import CheckpointError, ConfigError, raised_as
from imaginaire.findings import CheckContext, Checked
from imaginaire.optim import lora

log = logging.getLogger(__name__)

PipelineConfig = TypeVar("PipelineConfig", bound=Any)

NETWORK_KEY = "model.config.pipe_config.net"
NO_NETWORK = "not set: choose a model (model=NAME) or a network (net=NAME)"
DRAWN_NUMEL = 1 << 20  # numbers that one generator draws; a rank skips those of other ranks


def network_of(node: Any) -> DiT:
    """The network of a lazy node, on the meta device."""
    if node is None:
        raise ConfigError(f"{NETWORK_KEY}: {NO_NETWORK}.")
    with torch.device("meta"):
        net: DiT = lazy_config.instantiate(node)
    _require_written_buffers(net)
    return net


def _require_written_buffers(net: DiT) -> None:
    """Raise for a buffer that nothing writes once it has memory: it would hold what the memory held before."""
    writes = any(getattr(type(net), name, None) is not getattr(DiT, name) for name in ("reset_buffers", "init_weights"))
    for prefix, module in net.named_modules():
        if isinstance(module, HasBuffers) if module is not net else writes:
            continue
        for name, _ in module.named_buffers(recurse=False):
            if module is not net or name not in COUNTERS:
                raise ConfigError(
                    f"{NETWORK_KEY}: nothing writes the buffer {prefix + '.' if prefix else ''}{name} of"
                    f" {type(module).__name__}: networks are built without memory, so what __init__ writes is lost."
                    f" Give {type(module).__name__} a method reset_buffers() that writes it, after"
                    " super().reset_buffers() where the class is a network."
                )


def add_trained_adapters(net: DiT, config: Any) -> None:
    """Put adapters, float32 at least, into the network where a Predict2Video2WorldModelConfig trains those.

    Beside them, what begins anew is trained in full: parameters of the network's class, embedders of actions.
    """
    if config.train_architecture != "lora":
        return
    dtype = torch.promote_types(net.dtype, torch.float32)
    lora.inject(net, config.lora_rank, config.lora_alpha, config.lora_target_modules)
    for adapter in lora.adapters(net).values():
        adapter.lora_A.to(dtype)
        adapter.lora_B.to(dtype)
    patterns = absent_parts(net, config.model_manager_config.dit_path)
    for name, parameter in net.named_parameters():
        if ".lora_" not in name and any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(True)


def embedders(net: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a network that read actions, without those of adapters on them."""
    for name, parameter in net.named_parameters():
        if name.startswith(ACTION_EMBEDDERS.rstrip("*")) and ".lora_" not in name:
            yield name, parameter


def embedders_begin_anew(path: str, *, may_fetch: bool = True) -> bool:
    """True where a network that starts from the weights at a path (empty: none) learns to read actions from nothing.

    Without ``may_fetch`` weights that are elsewhere, or that cannot be read, are judged by their name.
    """
    if not path:
        return True
    card = read_card(path, fetch=may_fetch)
    if may_fetch:
        card.opened()
    return not card.has_action_embedders if not card.problem else card.action_transform is None


@torch.no_grad()
def fill_network(net: DiT, config: Any, device: torch.device | str, seed: int) -> bool:
    """Give a network on the meta device, which has its adapters, memory and every parameter its start: that of the file
    of ``dit_path``, which must have all but the adapters, else a draw from ``seed``. Gives whether the file has trained
    adapters.
    """
    net.to_empty(device=device)
    net.reset_buffers()
    path = config.model_manager_config.dit_path
    absent = absent_parts(net, path)
    found = set(load_dit(net, path, allow_missing=absent).matched) if path else set()
    by_name = starts(net)
    base = {name: p for name, p in net.named_parameters() if ".lora_" not in name}
    for name, parameter in base.items():
        if clean_name(name) not in found:
            # As a run without adapters names it, which so starts from the same numbers.
            _draw_(parameter, by_name[name], seed, clean_name(name).replace(".base_layer.", "."))
    has_adapters = any(".lora_A." in name for name in found)
    if not has_adapters:
        lora.init_adapters(net, seed, config.init_lora_weights)
    adapters = lora.adapters(net)
    if adapters:
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        log.info("lora: %s, %s trained parameters", lora.lora_spec(net), f"{trained:,}")
    if not path:
        level, what = (logging.WARNING, ", and adapters on them learn little") if adapters else (logging.INFO, "")
        log.log(level, "start weights: random%s (model.config.model_manager_config.dit_path is not set)", what)
        return False
    matched = sum(clean_name(name) in found for name in base)
    anew = "; adapters begin anew" if adapters and not has_adapters else ""
    if own := [name for name in base if any(fnmatchcase(clean_name(name), pattern) for pattern in own_patterns(net))]:
        anew += f"; {sum(clean_name(name) not in found for name in own)} of the network's own begin anew"
    anew += "; it knows no actions: their embedders begin anew" if ACTION_EMBEDDERS in absent else ""
    log.info("start weights: %s (%d of %d weights of the network matched%s)", path, matched, len(base), anew)
    return has_adapters


def absent_parts(net: DiT, path: str) -> tuple[str, ...]:
    """Patterns of the parameters that may begin anew though the others come from a file: those that the class of the
    network lists, and the embedders of actions."""
    has_new_embedders = net.takes_actions and embedders_begin_anew(path)
    return (*own_patterns(net), *([ACTION_EMBEDDERS] if has_new_embedders else []))


def own_patterns(net: DiT) -> tuple[str, ...]:
    """The patterns that the class of a network lists in ``begins_anew``."""
    patterns: Any = net.begins_anew
    if isinstance(patterns, str):  # each of its characters would be a pattern, "*" among them
        raise ConfigError(
            f"begins_anew of {type(net).__qualname__} is the text {patterns!r}, not a tuple of patterns:"
            f" write ({patterns!r},), with a comma."
        )
    return tuple(patterns)


def _draw_(parameter: Tensor, start: Start, seed: int, name: str) -> None:
    """Write this rank's part of a parameter. Groups of rows are drawn by their place, in float32 and on the CPU."""
    local, (rows, *others) = parallel.local_part(parameter)
    if not start.std:
        local.fill_(start.value)
        return
    width = math.prod(parameter.shape[1:])
    step = max(1, DRAWN_NUMEL // width)
    for first in range(rows.start // step * step, rows.stop, step):
        end = min(first + step, parameter.shape[0])
        drawn = torch.empty(end - first, *parameter.shape[1:], dtype=torch.float32)
        start.draw_(drawn, random.generator(seed, first, f"init/{name}"))
        low, high = max(first, rows.start), min(end, rows.stop)
        part = (slice(low - first, high - first), *others)
        local[low - rows.start : high - rows.start].copy_(drawn[part])


# Text -----------------------------------------------------------------------------------------------------------------


def with_trained_text(config: PipelineConfig, sources: Sequence[str]) -> PipelineConfig:
    """The pipeline's config with the text of the last of these weights that records one, unless it has one."""
    if config.num_text_tokens is None:
        for path in reversed(sources):
            if (card := read_card(path)).texts:
                config = attrs.evolve(config)
                apply_text(card, config)
                break
    return config


def apply_text(card: ModelCard, config: Any) -> None:
    """Make a pipeline's config give the network its text as in training."""
    if (count := len(card.texts)) > 1:
        kinds = "; ".join(map(str, card.texts))
        text = "%s: trained with texts of %d kinds (%s): a prompt is encoded as the first"
        log.warning(text, card.source, count, kinds)
    follow_text(config, card.texts[0], card.source, card.pipeline.get(TEXT_ENCODER))


def follow_text(config: Any, text: TrainedText, whose: str, recorded: Mapping[str, Any] | None = None) -> None:
    """Make a pipeline's config give the network this text; ``whose`` names the weights for the log, ``recorded`` is the
    node of the encoder that they were trained with."""
    config.num_text_tokens, config.text_encoder_name = text.num_tokens, text.encoder
    log.info("text: %s, as %s was trained", text, whose)
    name = parse_name(text.encoder)
    if config.text_encoder is None or name.kind in ("", NO_TEXT):
        return
    if name.kind not in ENCODERS:
        config.text_encoder = None  # encoding a prompt is an error that names the encoder
    elif isinstance(config.text_encoder, Mapping):
        config.text_encoder = _encoder_node(config.text_encoder, name, text, recorded or {})


def _encoder_node(node: Any, name: EncoderName, text: TrainedText, recorded: Mapping[str, Any]) -> Any:
    """The lazy node of the encoder, with the arguments that the config has for one of its class, and more than these
    those of training; its folder is that of training where it is here, whose content the encoder's name is held to."""
    cls = resolve(name.kind, "encoder")
    known = {str(key): value for key, value in node.items() if not str(key).startswith("_")}
    if target_of(node) is not cls:
        known = {}
    if recorded.get("_target_") == name_of(cls):
        trained = {key: value for key, value in recorded.items() if not key.startswith("_") and value is not None}
        path = str(trained.get("path", ""))
        is_here = path == TINY or storage.is_folder(path)
        known |= {key: value for key, value in trained.items() if key != "device" and (is_here or key != "path")}
    sizes = {"num_tokens": text.encoder_tokens, "max_length": text.encoder_tokens, "width": text.width}
    taken, _ = takes(cls)
    known |= {key: value for key, value in sizes.items() if key in taken}
    if name.kind in RELEASED:
        known.setdefault("path", RELEASED[name.kind]())
    if "dtype" in taken and name.dtype and not known.get("dtype"):
        known["dtype"] = name.dtype
    return LazyCall(cls)(**known)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_parts(
    net: Any, dit_path: str, others: Sequence[Any], which: str = "auto", lora_alpha: float | None = None
) -> None:
    """Raise for weights that are not there or not of these lazy nodes, before one of them is built.

    The other parts are checked by their ``check``, where their class has one; None is passed over.
    """
    if dit_path:
        try:
            check_dit(network_of(net), dit_path, which, lora_alpha=lora_alpha)
        except CheckpointError as error:
            if problem := unregistered(read_card(dit_path)):
                raise CheckpointError(problem) from error
            raise
    for node in others:
        if isinstance(target := target_of(node), Checked) and callable(target.check):
            for finding in target.check(arguments_of(node), CheckContext()):
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
    nodes = {"net": config.net, "objective": config.objective}
    nodes |= {} if tokenizer is None else {TOKENIZER: config.tokenizer}
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
        text = "%s records no digest of its tokenizer's weights, %s: %s are taken as these"
        log.warning(text, trained.source, theirs, used)
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
    with raised_as(ConfigError, f"net.atten_backend={net.atten_backend}", ImportError, ValueError):
        choice = net.choose_attention(device=device, dtype=dtype)
        check_attention(choice.op, net.head_dim, device, dtype)
    why = f"; {choice.reason}" if choice.reason else ""
    log.info("attention: %s (asked: %s%s)", choice.name, net.atten_backend, why)
