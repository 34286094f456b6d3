# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters at inference: read from our files, PEFT folders and diffusers' files, and added to the weights.

W + weight * (alpha / rank) * B A, in float32, rounded once to the dtype of W however many adapters there are.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_predict2.checkpoints.base_match import base_fingerprint, check_base
from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name
from cosmos_predict2.checkpoints.runs import clean_name, recorded_alpha, recorded_base, safetensors_metadata
from imaginaire import storage, weights
from imaginaire.errors import CheckpointError, ConfigError, near
from imaginaire.lora import FILE_FORMAT
from imaginaire.weight_files import TENSOR_SUFFIXES, LazyTensors, below, local_file, names_at, shape_of

_PREFIXES = ("base_model.model.", "transformer.", "net.", "net_ema.")
PEFT_CONFIG = "adapter_config.json"
PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_FACTOR = re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.weight")
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Factors:
    """B [out, rank] and A [rank, in] of one layer, read when they are asked for."""

    source: Mapping[str, Tensor]
    a: str
    b: str
    scaling: float  # alpha / rank

    @property
    def shape(self) -> tuple[int, int]:
        return shape_of(self.source, self.b)[0], shape_of(self.source, self.a)[1]

    @property
    def rank(self) -> int:
        return shape_of(self.source, self.a)[0]

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B as they are in the file."""
        return self.source[self.a], self.source[self.b]

    def update(self) -> Tensor:
        """(alpha / rank) B A in float32."""
        return self.scaling * (self.source[self.b].float() @ self.source[self.a].float())


@dataclass(frozen=True)
class Adapter:
    """Factors by the name of the layer that they belong to, in the names of our network."""

    path: str
    layers: Mapping[str, Factors]
    base: str = ""  # the weights that it was trained on, as far as that is recorded
    base_fingerprint: str = ""
    network: tuple[str, ...] = ()  # every layer of the network, where the file holds the network too


def parse_lora(text: str) -> tuple[str, float]:
    """Path and weight of ``path[:weight]``; colons of ``s3://`` and the like are part of the path."""
    path, colon, tail = text.rpartition(":")
    if not colon or "/" in tail or (not storage.is_remote(text) and storage.exists(text)):
        path, weight = text, 1.0
    else:
        try:
            weight = float(tail)
        except ValueError:
            raise ConfigError(
                f"--lora {text}: '{tail}' is not a number. Write --lora PATH:WEIGHT, such as --lora {path}:0.8."
            ) from None
    if not path or not math.isfinite(weight):
        raise ConfigError(f"--lora {text}: expected PATH or PATH:WEIGHT with a finite weight, such as lora.pt:0.8.")
    return path, weight


@torch.no_grad()
def apply_lora(
    net: nn.Module, adapters: str | Sequence[str], *, alpha: float | None = None, base: str = ""
) -> tuple[str, ...]:
    """Add adapters, each ``path[:weight]``, to a network's weights for good; the names of the layers that changed.

    Everything is checked before anything changes. ``alpha`` is for files that do not record it; ``base`` is what the
    network's weights are called, where an adapter turns out to be of others.
    """
    parts = [parse_lora(text) for text in ([adapters] if isinstance(adapters, str) else adapters)]
    opened = [(read_adapter(path, alpha=alpha), weight) for path, weight in parts]
    targets = _linear_weights(net)
    for adapter, _ in opened:
        _require_fit(adapter, targets)
        check_base(adapter.path, adapter.base, adapter.base_fingerprint, targets, adapter.layers, base)
    layers = tuple(name for name in targets if any(name in adapter.layers for adapter, _ in opened))
    for name in layers:
        updates = [weight * adapter.layers[name].update() for adapter, weight in opened if name in adapter.layers]
        target = targets[name]
        precise = torch.promote_types(target.dtype, torch.float32)
        target.copy_(target.to(precise) + sum(updates).to(target.device, precise))  # type: ignore[union-attr]
    return layers


def read_adapter(path: str, *, alpha: float | None = None, which: str = "auto") -> Adapter:
    """The adapter at a path: our file, a PEFT folder, a diffusers file or folder, or a checkpoint with adapters.

    Of a checkpoint with trained and averaged adapters, ``which`` chooses: ``net`` (auto) or ``net_ema``.
    """
    names = names_at(path)
    if PEFT_CONFIG in names:
        return _read_peft(path, names)
    files = [name for name in names if name.endswith(TENSOR_SUFFIXES)]
    file = next((below(path, name) for name in files if name == DIFFUSERS_FILE or len(files) == 1), path)
    source = weights.read(file)
    metadata = safetensors_metadata(file)
    if metadata.get("format") == FILE_FORMAT:
        found = _adapter(path, source, lambda layer, rank: float(metadata["alpha"]) / int(metadata["rank"]))
        return _with_base(found, metadata)
    if any(".lora_A.default." in name for name in source):
        return _of_a_network(path, source, alpha, which)
    return _with_base(_adapter(path, source, _diffusers_scaling(source, metadata)), metadata)


def _of_a_network(path: str, source: Mapping[str, Tensor], alpha: float | None, which: str) -> Adapter:
    """The adapters of a checkpoint that holds the whole network, with what it records of their base."""
    known = alpha if alpha is not None else recorded_alpha(path)
    if known is None:
        raise CheckpointError(_no_alpha(path))
    try:
        chosen = weights.select(weights.renamed(source, clean_name), which)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    factors = weights.renamed(chosen, lambda name: name if ".lora_" in name else None)
    found = _adapter(path, factors, lambda layer, rank: known / rank)
    matrices = {f"{layer}.base_layer.weight": layer for layer in found.layers}
    base = weights.renamed(chosen, matrices.get)
    network = {name.replace(".base_layer.", ".").removesuffix(".weight") for name in chosen if name.endswith(".weight")}
    return replace(
        found,
        base=recorded_base(path),
        base_fingerprint=base_fingerprint(found.layers, base) if len(base) == len(matrices) else "",
        network=tuple(sorted(name for name in network if ".lora_" not in name)),
    )


def _with_base(adapter: Adapter, metadata: Mapping[str, str]) -> Adapter:
    return replace(adapter, base=metadata.get("base", ""), base_fingerprint=metadata.get("base_fingerprint", ""))


def merge_lora_state(
    source: Mapping[str, Tensor],
    alpha: float | None,
    rank: int | None = None,
    *,
    where: str = "this file",
    dtype: torch.dtype | None = None,
) -> Mapping[str, Tensor]:
    """A state with adapters as a plain one: each merged when it is asked for, in ``dtype`` or that of its base."""
    layers = [name.removesuffix(".lora_A.default.weight") for name in source if name.endswith(".lora_A.default.weight")]
    if not layers:
        return source
    if alpha is None:
        raise CheckpointError(_no_alpha(where))
    merging = _Merging(source, alpha, dtype)
    places: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        needed = [f"{layer}.base_layer.weight", f"{layer}.lora_B.default.weight"]
        if lost := [name for name in needed if name not in source]:
            raise CheckpointError(f"{where} has {layer}.lora_A, but not {', '.join(lost)}.")
        found = shape_of(source, f"{layer}.lora_A.default.weight")[0]
        if rank is not None and found != rank:
            raise CheckpointError(f"{where} has adapters of rank {found} ({layer}), not {rank}.")
        places[f"{layer}.weight"] = (merging, layer)
    for name in source:
        if ".lora_A." not in name and ".lora_B." not in name and not name.endswith(".base_layer.weight"):
            places[name.replace(".base_layer.", ".")] = (source, name)
    return LazyTensors(places)


@dataclass(frozen=True)
class _Merging:
    """``merging[layer]``: the layer's weight with its adapter added."""

    source: Mapping[str, Tensor]
    alpha: float
    dtype: torch.dtype | None

    def __getitem__(self, layer: str) -> Tensor:
        base = self.source[f"{layer}.base_layer.weight"]
        a, b = (self.source[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
        precise = torch.promote_types(base.dtype, torch.float32)
        merged = base.to(precise) + (self.alpha / a.shape[0] * (b @ a)).to(precise)
        return merged.to(self.dtype or base.dtype)

    def shape(self, layer: str) -> tuple[int, ...]:
        return shape_of(self.source, f"{layer}.base_layer.weight")


# Reading --------------------------------------------------------------------------------------------------------------


def _read_peft(path: str, names: Iterable[str]) -> Adapter:
    file = next((name for name in PEFT_FILES if name in names), None)
    if file is None:
        raise CheckpointError(f"{path} has {PEFT_CONFIG}, but none of {', '.join(PEFT_FILES)}.")
    try:
        config = json.loads(local_file(below(path, PEFT_CONFIG)).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/{PEFT_CONFIG} is not a PEFT configuration with r and lora_alpha.") from error
    for switch in ("use_dora", "use_bdlora", "fan_in_fan_out"):
        if config.get(switch):
            raise CheckpointError(f"{path}/{PEFT_CONFIG} says {switch}; only plain LoRA can be added to the weights.")
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path} is a {config['peft_type']} adapter; only LORA is known.")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}

    def scaling(layer: str, found: int) -> float:
        own_rank, own_alpha = _pattern(ranks, layer, rank), _pattern(alphas, layer, alpha)
        if found != own_rank:
            raise CheckpointError(f"{path}: {layer} has rank {found}, {PEFT_CONFIG} says {own_rank}.")
        return float(own_alpha / (math.sqrt(found) if config.get("use_rslora") else found))

    found = _with_base(
        _adapter(path, weights.read(below(path, file)), scaling), safetensors_metadata(below(path, file))
    )
    return replace(found, base=found.base or config.get("base_model_name_or_path") or "")


def _pattern(table: Mapping[str, Any], layer: str, default: float) -> float:
    return next((value for key, value in table.items() if layer == key or layer.endswith(f".{key}")), default)


def _adapter(path: str, source: Mapping[str, Tensor], scaling: Callable[[str, int], float]) -> Adapter:
    """Pairs A with B; ``scaling`` of a layer's name in the file and its rank."""
    pairs: dict[str, dict[str, str]] = {}
    others = []
    for name in source:
        if match := _FACTOR.fullmatch(name):
            pairs.setdefault(match[1], {})[match[2]] = name
        elif not name.endswith(".alpha"):
            others.append(name)
    if not pairs:
        raise CheckpointError(f"{path} holds no LoRA adapter. Its names: {', '.join(list(source)[:4])}.")
    if others:
        raise CheckpointError(f"{path} holds more than LoRA factors: {', '.join(others[:5])} ({len(others)} in all).")
    layers = {}
    for layer, pair in pairs.items():
        if len(pair) != 2:
            raise CheckpointError(f"{path} has only lora_{next(iter(pair))} of {layer}.")
        rank, other = shape_of(source, pair["A"])[0], shape_of(source, pair["B"])[1]
        if rank != other:
            raise CheckpointError(f"{path}: lora_A of {layer} has rank {rank}, its lora_B {other}.")
        layers[_our_layer(layer, path)] = Factors(source, pair["A"], pair["B"], scaling(layer, rank))
    return Adapter(path, layers)


def _our_layer(layer: str, path: str) -> str:
    for prefix in _PREFIXES:
        layer = layer.removeprefix(prefix)
    ours = from_diffusers_name(f"{layer}.weight")
    if ours is None and not layer.startswith("transformer_blocks."):
        return layer
    if ours is None:
        raise CheckpointError(f"{path} has an adapter for {layer}, which this network does not have.")
    return ours.removesuffix(".weight")


def _diffusers_scaling(source: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Callable[[str, int], float]:
    """alpha / rank from the file's ``.alpha`` entries or its metadata; without either alpha is the rank, as there."""
    recorded = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    alpha = recorded.get("transformer.lora_alpha", recorded.get("lora_alpha"))

    def scaling(layer: str, rank: int) -> float:
        if f"{layer}.alpha" in source:
            return float(source[f"{layer}.alpha"]) / rank
        return float(alpha) / rank if alpha is not None else 1.0

    return scaling


# Fitting --------------------------------------------------------------------------------------------------------------


def _linear_weights(net: nn.Module) -> dict[str, Tensor]:
    """Matrices by the name of their layer, without what wrappers put into names; below adapters, the frozen ones."""
    found = {}
    for name, tensor in net.state_dict().items():
        if name.endswith(".weight") and ".lora_" not in name and tensor.ndim == 2:
            found[clean_name(name).removesuffix(".weight").removesuffix(".base_layer")] = tensor
    return found


def _require_fit(adapter: Adapter, targets: Mapping[str, Tensor]) -> None:
    unknown = [layer for layer in adapter.layers if layer not in targets]
    if unknown:
        raise CheckpointError(
            f"{adapter.path} has adapters for {len(unknown)} layers that this network does not have: "
            f"{', '.join(unknown[:3])}.{near(unknown[0], targets, limit=4)}"
        )
    for layer, factors in adapter.layers.items():
        target = targets[layer]
        if isinstance(target, DTensor):
            raise ConfigError("A sharded network cannot take adapters; add them before it is sharded.")
        if factors.shape != tuple(target.shape):
            raise CheckpointError(
                f"{adapter.path}: the adapter of {layer} is for a matrix of {list(factors.shape)}, "
                f"the network's is {list(target.shape)}. It was trained on another size of model."
            )


def _no_alpha(where: str) -> str:
    return (
        f"{where} has LoRA adapters beside its weights and does not record their alpha, and no config.yaml of its run"
        " lies above it. Merge them once, with the model.config.lora_alpha of the training: python -m scripts.convert"
        f" {where} merged.pt --merge-lora --lora_alpha NUMBER"
    )
