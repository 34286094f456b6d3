# SPDX-License-Identifier: Apache-2.0
"""One network's weights from any form, by our names, with what the forms of others need besides: their names, their
``config.json``, and the arguments that the network is built with.

    network = open_network("exported/transformer")
    network.tensors, network.card, network.config(), network.build()

Three kinds of networks have forms of others: Cosmos' video network, Wan2.1's, and the tokenizer of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints import diffusers_names, wan_names
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.dit_weights import (
    Family,
    describe,
    inside_a_pipeline,
    network_of,
    open_weights,
    require_family,
)
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import NETWORKS, WAN_NETWORKS
from cosmos_predict2.tokenizers import wan_network
from cosmos_predict2.tokenizers.wan_network import LATENTS_MEAN, LATENTS_STD, WanConfig, WanVAE
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import json_in, shape_of
from imaginaire.errors import MISSHAPEN, CheckpointError, ConfigError, raised_as

CONFIG = "config.json"
Config = dict[str, Any]
Ratios = tuple[float, float, float]  # of RoPE: t, h, w


@dataclass(frozen=True, kw_only=True)
class Network:
    """The weights of one network, lazy, and what its forms need."""

    source: str
    described: str
    tensors: Mapping[str, Tensor]
    card: ModelCard
    prefix: str  # of its names in a single file, as released
    rename: Callable[[str], str | None]  # to the names of diffusers
    config: Callable[[], Config]  # config.json of diffusers; raises where it has no class for the network
    original_config: Callable[[], Config] | None = None  # config.json of the release, where that is a folder
    build: Callable[[], Any]  # the network, or a tokenizer with its weights


def open_network(source: str, which: str = "auto", rope_scale: Ratios | None = None) -> Network:
    """The network at an address of any form; of a pipeline the transformer."""
    found = open_weights(source)
    if _OURS in found or _THEIRS in found:
        return _tokenizer(source, found)
    tensors, card = network_of(found, source, which), read_card(source).opened()
    family = require_family(describe(tensors), None, source, tensors)
    arguments = partial(net_arguments, source, family, card, rope_scale)
    common: dict[str, Any] = dict(source=source, described=str(family), tensors=tensors, card=card, prefix="net.")
    if family.is_wan:
        return Network(
            **common,
            rename=wan_names.to_diffusers_name,
            config=lambda: wan_names.diffusers_config(arguments()),
            original_config=lambda: wan_names.original_config(arguments()),
            build=lambda: WanDiT(**arguments()),
        )

    def config() -> Config:
        _require_a_class(source, family)
        return diffusers_names.diffusers_config(arguments(), has_condition_mask=family.kind != "Text2Image")

    def build() -> nn.Module:
        known = card.network_class or {"Video2World": Video2WorldDiT, "Text2Image": DiT}.get(family.kind)
        if known is None:
            raise ConfigError(f"{source} is {family}, whose arguments no card records.")
        return known(**arguments())

    return Network(**common, rename=diffusers_names.to_diffusers_name, config=config, build=build)


def net_arguments(source: str, family: Family, card: ModelCard, rope_scale: Ratios | None = None) -> Config:
    """The arguments that a network was built with: from its shapes, and what these do not show (RoPE ratios, heads of
    Wan2.1) from the record, a config.json or the release."""
    recorded = {key: value for key, value in card.net.items() if not key.startswith("_")}
    recorded = recorded or diffusers_net(source)
    released = {**NETWORKS, **WAN_NETWORKS}.get(family.network or "", {})
    if rope_scale is not None and not family.is_wan:
        recorded = {**recorded, **{f"rope_{axis}_extrapolation_ratio": r for axis, r in zip("thw", rope_scale)}}
    if not (recorded or released):
        what = "number of heads is" if family.is_wan else "RoPE ratios are"
        cure = "Give the folder of the run." if family.is_wan else "Give them: --rope_scale T H W."
        raise ConfigError(
            f"{source} is {family}, which is no released size, and no config.yaml of its run lies above it, so its"
            f" {what} unknown. {cure}"
        )
    known = {**released, **recorded}
    if family.is_wan:
        known = {"out_channels": 16, "time_channels": 256, **known}
        return {**known, **family.net_arguments, "num_heads": known.get("num_heads", family.width // family.head_dim)}
    return {**known, **family.net_arguments}


def _require_a_class(source: str, family: Family) -> None:
    """diffusers' class holds Text2Image and Video2World networks of the published sizes and our own, no others."""
    if family.kind not in ("Text2Image", "Video2World") or family.size == "0.6B":
        raise CheckpointError(f"{source} is {family}: diffusers has no class for it. Export it as .pt or .safetensors.")
    if "-natten" in source.rpartition("/")[2]:
        raise CheckpointError(
            f"{source} holds weights for sparse (NATTEN) attention, which diffusers has no class for. Export them as"
            " .pt or .safetensors."
        )


def read_config(address: str) -> Config:
    """The config.json of a folder, or of the transformer in a pipeline; {} where there is none."""
    return json_in(inside_a_pipeline(address), CONFIG)


def diffusers_net(source: str) -> Config:
    """Our network's arguments from the config.json of a folder of diffusers or of Wan2.1; {} for other sources."""
    config = read_config(source)
    if not {"num_attention_heads", "num_heads"} & set(config):
        return {}
    of = wan_names if config.get("_class_name") in wan_names.CLASS_NAMES else diffusers_names
    try:
        return of.net_kwargs(config)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{source}/{CONFIG} is not of a Cosmos or Wan2.1 network: {error!r}.") from error


# The tokenizer --------------------------------------------------------------------------------------------------------

_SIZES = {"dim": "base_dim"} | {
    name: name for name in ("z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample", "dropout")
}
_FIXED: Config = {  # of every tokenizer of Wan2.1: another value is another network
    "decoder_base_dim": None, "is_residual": False, "in_channels": 3, "out_channels": 3, "patch_size": None,
}  # fmt: skip
_OURS, _THEIRS = "encoder.conv1.weight", "encoder.conv_in.weight"


def _tokenizer(source: str, found: Mapping[str, Tensor]) -> Network:
    """The tokenizer; its latents' constants are those of the release where no config.json has others."""
    is_theirs = _THEIRS in found
    config = read_config(source) if is_theirs else {}
    if others := {name: config[name] for name, value in _FIXED.items() if config.get(name, value) != value}:
        raise CheckpointError(f"{source}/{CONFIG} has {others}: it is of another tokenizer than Wan2.1's.")
    with raised_as(CheckpointError, f"{source} is not a tokenizer of Wan2.1", *MISSHAPEN, RuntimeError):
        if is_theirs:
            sizes = WanConfig(**{ours: config[theirs] for ours, theirs in _SIZES.items() if theirs in config})
        else:
            dim, z_dim = shape_of(found, _OURS)[0], shape_of(found, "decoder.conv1.weight")[1]
            sizes = WanConfig(dim=dim, z_dim=z_dim)
        if sizes.num_res_blocks * len(sizes.dim_mult) > len(found):
            raise ValueError(f"{sizes} has more layers than there are tensors")
        with torch.device("meta"):
            net = WanVAE(sizes)
        mean, std = (list(config.get(f"latents_{k}", v)) for k, v in (("mean", LATENTS_MEAN), ("std", LATENTS_STD)))
    rename = partial(wan_network.to_diffusers_name, num_res_blocks=sizes.num_res_blocks)
    if is_theirs:
        ours = {rename(name): name for name in net.state_dict()}
        found = weights.renamed(found, lambda name: ours.get(name, name))
    weights.account(net.state_dict(), found).require(source=source, cure="Give the tokenizer of Wan2.1.")
    described = {theirs: getattr(sizes, ours) for ours, theirs in _SIZES.items()}
    described = {name: list(value) if isinstance(value, list | tuple) else value for name, value in described.items()}
    factors = dict(scale_factor_temporal=sizes.temporal_factor, scale_factor_spatial=sizes.spatial_factor)
    constants: Config = dict(latents_mean=mean, latents_std=std)
    return Network(
        source=source,
        described=f"tokenizer of Wan2.1, width {sizes.dim}",
        tensors=found,
        card=ModelCard(path=source),
        prefix="",
        rename=rename,
        config=lambda: {"_class_name": "AutoencoderKLWan", **described, **_FIXED, **factors, **constants},
        build=lambda: WanTokenizer(source, config=sizes, **constants),
    )


def require_constants(network: Network) -> None:
    """Raise for a tokenizer whose constants of the latents a single file would lose: they are not the released ones."""
    if network.prefix:
        return
    config = network.config()
    if (tuple(config["latents_mean"]), tuple(config["latents_std"])) != (LATENTS_MEAN, LATENTS_STD):
        raise CheckpointError(
            f"{network.source}/{CONFIG} has other latents_mean and latents_std than the released tokenizer, for which a"
            " single file has no place: --to diffusers."
        )
