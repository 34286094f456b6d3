# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters at inference: read from our files, PEFT folders and diffusers' files, and added to the weights.

W + weight * (alpha / rank) * B A, in float32, rounded once to the dtype of W however many adapters there are.
"""

import hashlib
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints import wan_names
from cosmos_predict2.checkpoints.card import read_card, safetensors_header
from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name
from cosmos_predict2.checkpoints.dit_weights import clean_name
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, LazyTensors, below, json_in, names_at, shape_of
from imaginaire.distributed.parallel import is_dtensor
from imaginaire.errors import CheckpointError, ConfigError, near, raised_as

_PREFIXES = ("base_model.model.", "transformer.", "model.diffusion_model.", "diffusion_model.", "net.", "net_ema.")
# kohya's names: a prefix, then the layer with "_" for each "."; these words have one of their own.
_KOHYA = re.compile(r"(lora_unet|lora_transformer|lycoris)_(?P<layer>\w+)")
_WORD = re.compile(
    r"(action_embedder_(B_3D|B_D|tokens)|adaln_modulation(_self_attn|_cross_attn|_mlp)?|(x|t)_embedder|patch_embed|time_embed"
    r"|final_layer|crossattn_proj|(self|cross)_attn|(q|k|v|output)_proj|linear_\d|transformer_blocks|norm_out|proj_out"
    r"|to_(q|k|v|out)|(k|v)_img|(patch|text|time)_embedding|time_projection|img_emb|[^_]+)(_|$)"
)
_OTHER_KINDS = {  # of adapters, by a part of their names
    "lokr_": "LoKr", "hada_": "LoHa", "oft_": "OFT", "dora_scale": "DoRA", "lora_mid": "LoCon with a middle factor",
    "lora_magnitude_vector": "DoRA", "lora_te": "LoRA of a text encoder", "text_encoder": "LoRA of a text encoder",
    "diff_b": "LoRA with differences of biases",
}  # fmt: skip
FILE_FORMAT = "lora-1"  # in the header of adapters that older versions wrote, with their rank and alpha
PEFT_CONFIG = "adapter_config.json"
PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_FACTOR = re.compile(r"(.+)\.lora[_.](A|B|down|up)(?:\.default)?\.weight")
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_KEY = "lora_adapter_metadata"  # in its header: settings of PEFT as JSON
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Factors:
    """B [out, rank] and A [rank, in] of one layer, read when they are asked for."""

    source: Mapping[str, Tensor]
    a: str
    b: str
    scaling: float  # alpha / rank, or as its file has it

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
        """scaling * B A in float32."""
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

    Everything is checked before anything changes. ``alpha`` is for files that do not record it, and an error where they
    record another; ``base`` is what the network's weights are called, where an adapter turns out to be of others.
    """
    parts = [parse_lora(text) for text in ([adapters] if isinstance(adapters, str) else adapters)]
    opened = [(read_adapter(path, alpha=alpha), weight) for path, weight in parts]
    targets = _linear_weights(net)
    for adapter, _ in opened:
        _require_fit(adapter, targets)
        _compare_base(adapter, targets, base)
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
    folder, _, last = path.rpartition("/")
    if last in PEFT_FILES and PEFT_CONFIG in names_at(folder or "."):
        path = folder or "."  # the scale is recorded beside the file
    names = names_at(path)
    if PEFT_CONFIG in names:
        return _read_peft(path, names, alpha)
    files = [name for name in names if name.endswith(TENSOR_SUFFIXES)]
    inner = [name for name in names if not files and PEFT_CONFIG in names_at(below(path, name))]
    if len(inner) > 1:
        raise CheckpointError(f"{path} holds several adapters: {', '.join(inner)}. Give the path of one of them.")
    if inner:  # PEFT saves one that is not called "default" in a folder of its own
        return read_adapter(below(path, inner[0]), alpha=alpha)
    file = next((below(path, name) for name in files if name == DIFFUSERS_FILE or len(files) == 1), path)
    source = weights.read(file)
    metadata = safetensors_header(file)
    settings: PeftSettings | None
    if metadata.get("format") == FILE_FORMAT:
        settings = PeftSettings.of({"r": metadata.get("rank"), "lora_alpha": metadata.get("alpha")}, file)
    elif any(".base_layer." in name for name in source):
        return _of_a_network(path, source, alpha, which)
    else:
        settings = _diffusers_settings(metadata, file)
    return _with_base(_adapter(path, source, settings, alpha), metadata)


def _of_a_network(path: str, source: Mapping[str, Tensor], alpha: float | None, which: str) -> Adapter:
    """The adapters of a checkpoint that holds the whole network, with what it records of their base."""
    card = read_card(path)
    known = agreed_alpha(path, card.lora_alpha, alpha)
    if known is None:
        raise CheckpointError(_no_alpha(path))
    with raised_as(CheckpointError, path, CheckpointError):
        chosen = weights.select(weights.renamed(source, clean_name), which)
    factors = weights.renamed(chosen, lambda name: name if ".lora_" in name else None)
    found = _adapter(path, factors, None, known)
    matrices = {f"{layer}.base_layer.weight": layer for layer in found.layers}
    base = weights.renamed(chosen, matrices.get)
    network = {name.replace(".base_layer.", ".").removesuffix(".weight") for name in chosen if name.endswith(".weight")}
    return replace(
        found,
        base=card.base,
        base_fingerprint=base_fingerprint(found.layers, base) if len(base) == len(matrices) else "",
        network=tuple(sorted(name for name in network if ".lora_" not in name)),
    )


def _with_base(adapter: Adapter, metadata: Mapping[str, str]) -> Adapter:
    return replace(adapter, base=metadata.get("base", ""), base_fingerprint=metadata.get("base_fingerprint", ""))


def merge_lora_state(
    source: Mapping[str, Tensor], alpha: float | None, *, where: str = "this file", dtype: torch.dtype | None = None
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


# PEFT settings --------------------------------------------------------------------------------------------------------

# PEFT keeps its configuration in adapter_config.json, diffusers in the header of its file. Only plain LoRA is
# W + scale * B A: a setting that is switched on and that is not known here is an error which names it.

# They say how the adapters were made or found, not what they add. Biases and other tensors of the file are counted by
# whoever reads it.
_OF_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "velora_config",
}  # fmt: skip
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the weights below the adapters too


@dataclass(frozen=True)
class PeftSettings:
    """Rank and alpha of every layer, by patterns where they differ, and how the scale follows from them."""

    where: str  # the file
    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False  # alpha / sqrt(rank) in place of alpha / rank

    @classmethod
    def of(cls, config: Any, where: str) -> "PeftSettings":
        """The settings of a configuration; an error for one that is not plain LoRA."""
        try:
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            ranks = {str(key): int(value) for key, value in (config.get("rank_pattern") or {}).items()}
            alphas = {str(key): float(value) for key, value in (config.get("alpha_pattern") or {}).items()}
            for pattern in [*ranks, *alphas]:
                re.compile(pattern)
        except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
            raise CheckpointError(f"{where} is not a PEFT configuration with r and lora_alpha: {error!r}.") from error
        if config.get("peft_type", "LORA") != "LORA":
            raise CheckpointError(f"{where} describes a {config['peft_type']} adapter; only LORA is known.")
        others = {key: value for key, value in config.items() if value and key not in _READ | _OF_NO_EFFECT}
        if config.get("init_lora_weights", True) not in _STARTS:
            others["init_lora_weights"] = config["init_lora_weights"]
        if others:
            shown = ", ".join(f"{key}={str(value)[:60]}" for key, value in others.items())
            raise CheckpointError(
                f"{where} has {shown}; only plain LoRA, W + scale * B A, can be added to the weights. Merge the adapter"
                " where it was trained (merge_and_unload of PEFT, fuse_lora of diffusers), and use the merged weights."
            )
        return cls(where, rank, alpha, ranks, alphas, bool(config.get("use_rslora")))

    def scaling(self, layer: str, rank: int) -> float:
        """Factor of B A in a layer, given its name in the file and the rank of its factors."""
        own_rank = _of_layer(self.ranks, layer, self.rank)
        if rank != own_rank:
            raise CheckpointError(f"{self.where}: {layer} has rank {rank}, the settings say {own_rank}.")
        alpha = _of_layer(self.alphas, layer, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def _of_layer(table: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that is the layer's name, or the end of it from a word on, as PEFT looks it up."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def patterns_of(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """A table for the layers that differ from what is usual; the names are matched from their beginning."""
    return {f"^{layer}": value for layer, value in values.items() if value != usual}


# Reading --------------------------------------------------------------------------------------------------------------


def _read_peft(path: str, names: Iterable[str], alpha: float | None) -> Adapter:
    file = next((name for name in PEFT_FILES if name in names), None)
    if file is None:
        raise CheckpointError(f"{path} has {PEFT_CONFIG}, but none of {', '.join(PEFT_FILES)}.")
    config = json_in(path, PEFT_CONFIG)
    settings = PeftSettings.of(config, below(path, PEFT_CONFIG))
    found = _adapter(path, weights.read(below(path, file)), settings, alpha)
    found = _with_base(found, safetensors_header(below(path, file)))
    return replace(found, base=found.base or config.get("base_model_name_or_path") or "")


def _diffusers_settings(metadata: Mapping[str, str], file: str) -> PeftSettings | None:
    """Settings that diffusers wrote into the header: of a pipeline's adapter with "transformer." before every key, of a
    transformer's own without it. None where there is nothing, as in its older files."""
    if DIFFUSERS_KEY not in metadata:
        return None
    with raised_as(CheckpointError, f"{file}: its {DIFFUSERS_KEY} cannot be read", ValueError, AttributeError):
        config = foreign_json.loads(metadata[DIFFUSERS_KEY])
        own = {key.removeprefix("transformer."): config[key] for key in config if key.startswith("transformer.")}
    return PeftSettings.of(own or config, f"{file} ({DIFFUSERS_KEY})")


def _adapter(path: str, source: Mapping[str, Tensor], settings: PeftSettings | None, alpha: float | None) -> Adapter:
    """Pairs A with B, each with the scale that the settings, or an ``.alpha`` beside them, record; else with ``alpha``,
    or its rank."""
    pairs: dict[str, dict[str, str]] = {}
    for name in source:
        if match := _FACTOR.fullmatch(name):
            pairs.setdefault(match[1], {})[{"down": "A", "up": "B"}.get(match[2], match[2])] = name
    own_alphas = {layer: f"{layer}.alpha" for layer in pairs if f"{layer}.alpha" in source}
    known = {*own_alphas.values(), *(name for pair in pairs.values() for name in pair.values())}
    others = [name for name in source if name not in known]
    if kinds := {kind for part, kind in _OTHER_KINDS.items() if any(part in name for name in others)}:
        raise CheckpointError(
            f"{path} is an adapter of another kind, {' and '.join(sorted(kinds))}; only plain LoRA, W + scale * B A, of"
            " the video network can be added. Merge it with the program that it is for, and give the merged weights as"
            " --dit_path."
        )
    if not pairs:
        raise CheckpointError(
            f"{path} holds no LoRA adapter, but {len(source)} other tensors. Give the run of an adapter"
            " (train_architecture=lora) or its file; a whole model is given as --dit_path."
        )
    if others:
        raise CheckpointError(
            f"{path} holds more than the factors A and B of plain LoRA: {', '.join(others[:5])} ({len(others)} in all)."
        )
    if settings is not None:
        agreed_alpha(settings.where, settings.alpha, alpha)
    elif alpha is None and len(own_alphas) < len(pairs):
        log.warning("%s records no alpha: taken as the rank of each layer, so that B A is added as it is", path)
    layers = {}
    for layer, pair in pairs.items():
        if len(pair) != 2:
            raise CheckpointError(f"{path} has only lora_{next(iter(pair))} of {layer}.")
        rank, other = shape_of(source, pair["A"])[0], shape_of(source, pair["B"])[1]
        if rank != other:
            raise CheckpointError(f"{path}: lora_A of {layer} has rank {rank}, its lora_B {other}.")
        own = float(source[own_alphas[layer]]) if layer in own_alphas else None
        scaling = _scaling(path, layer, rank, own, settings, alpha)
        layers[_our_layer(layer, path)] = Factors(source, pair["A"], pair["B"], scaling)
    return Adapter(path, layers)


def _scaling(
    path: str, layer: str, rank: int, own: float | None, settings: PeftSettings | None, alpha: float | None
) -> float:
    """Factor of B A in one layer; ``own`` is the alpha that stands beside its factors."""
    if settings is None:
        agreed_alpha(path, own, alpha)
        return (alpha or rank if own is None else own) / rank
    recorded = settings.scaling(layer.removeprefix("base_model.model.").removeprefix("transformer."), rank)
    if own is not None and not math.isclose(own / rank, recorded, rel_tol=1e-3):
        raise CheckpointError(
            f"{path} records two scales of {layer}: its .alpha makes it {own / rank:g}, {settings.where} {recorded:g}."
        )
    return recorded


def _our_layer(layer: str, path: str) -> str:
    for prefix in _PREFIXES:
        layer = layer.removeprefix(prefix)
    if kohya := _KOHYA.fullmatch(layer):
        layer = ".".join(match[1] for match in _WORD.finditer(kohya["layer"]))
    ours = from_diffusers_name(f"{layer}.weight") or wan_names.from_diffusers_name(f"{layer}.weight")
    if ours is None and not layer.startswith("transformer_blocks."):
        return layer
    if ours is None:
        raise CheckpointError(f"{path} has an adapter for {layer}, which this network does not have.")
    return ours.removesuffix(".weight")


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
        if is_dtensor(target):
            raise ConfigError("A sharded network cannot take adapters; add them before it is sharded.")
        if factors.shape != tuple(target.shape):
            raise CheckpointError(
                f"{adapter.path}: the adapter of {layer} is for a matrix of {list(factors.shape)}, "
                f"the network's is {list(target.shape)}. It was trained on another size of model."
            )


def base_fingerprint(layers: Collection[str], matrices: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits for the matrices of these layers, from samples of them.

    They are rounded to bfloat16 first, so that one set of weights has one fingerprint in float32, bfloat16, and in
    float32 read from a float16 file.
    """
    names = sorted(layers)
    digest = hashlib.sha256()
    for name in names[:: max(1, -(-len(names) // 16))]:  # of a file of 28 GB, some megabytes are read
        matrix = matrices[name].detach().flatten()
        sampled = matrix[:: max(1, matrix.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(matrices[name].shape)}".encode() + sampled.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _compare_base(adapter: Adapter, targets: Mapping[str, Tensor], name: str) -> None:
    """Warn where the matrices here, read from ``name``, are not those that an adapter was trained on."""
    if not adapter.base_fingerprint or any(targets[layer].dtype == torch.float16 for layer in adapter.layers):
        return  # rounded a second time, float16 does not give the bfloat16 of the base
    if (actual := base_fingerprint(adapter.layers, targets)) != adapter.base_fingerprint:
        log.warning(
            "%s was trained on %s (fingerprint %s), but is added to %s (fingerprint %s): what it learnt may not suit"
            " these weights",
            *(adapter.path, adapter.base or "other weights", adapter.base_fingerprint),
            *(name or "other weights", actual),
        )


def agreed_alpha(where: str, recorded: float | None, given: float | None) -> float | None:
    """The alpha of adapters: the recorded one, else the given one; an error where they differ."""
    if recorded is None:
        return given
    if given is not None and not math.isclose(given, recorded, rel_tol=1e-6):
        raise CheckpointError(
            f"{where} records alpha {recorded:g}, but --lora_alpha (lora_alpha in Python) is {given:g}. Leave it out:"
            " the recorded one is what the adapters were trained with. To make them weaker or stronger, give --lora"
            " PATH:WEIGHT at inference."
        )
    return recorded


def _no_alpha(where: str) -> str:
    return (
        f"{where} has LoRA adapters beside its weights and does not record their alpha, and no config.yaml of its run"
        " lies above it. Give the model.config.lora_alpha of the training: examples/video2world_lora.py --use_lora"
        f" --lora_alpha NUMBER, or merge them once: python -m scripts.convert {where} merged.pt --merge-lora"
        " --lora_alpha NUMBER"
    )
