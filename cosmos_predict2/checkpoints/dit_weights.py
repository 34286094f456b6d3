# SPDX-License-Identifier: Apache-2.0
"""Weights of the video network from wherever they are, under the network's own names; the network that they show by
names and shapes, and why it does not fit another one.

Every argument that takes weights goes through ``open_dit``: released ``.pt`` files, training checkpoints and run
folders, DCP folders, safetensors, hub ids, and diffusers' pipeline or transformer folders.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isqrt
from typing import Any

from torch import Tensor

from cosmos_predict2.checkpoints import wan_names
from cosmos_predict2.checkpoints.diffusers_names import from_diffusers_name
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.released import NETWORKS, describe_missing, download_command, runs_nowhere
from imaginaire import storage
from imaginaire.checkpoint import weight_files, weights
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, below, names_at, shape_of
from imaginaire.errors import CheckpointError, listed, raised_as

log = logging.getLogger(__name__)

WHICH = ("auto", "net", "net_ema")
WORLD_MODEL = "world_model."  # of a run whose ``net.`` is a policy
# The first layer of a network, in our names or diffusers', and what other programs put before it.
_FIRST_LAYER = re.compile(
    r"(?P<prefix>((model|diffusion_model|module)\.)*)((net|net_ema)\.)?"
    r"(x_embedder\.proj\.1|patch_embed\.proj|patch_embedding)\."
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
    with raised_as(CheckpointError, path, CheckpointError):
        return weights.select(source, which)


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
    """True if the names are those of a transformer of diffusers."""
    names = set(names)
    is_cosmos = "patch_embed.proj.weight" in names and any(name.startswith("transformer_blocks.") for name in names)
    return is_cosmos or _WAN_TIME in names


def _from_diffusers(source: Mapping[str, Tensor], address: str, which: str) -> Mapping[str, Tensor]:
    if which == "net_ema":
        raise CheckpointError(
            f"{address} is in diffusers' layout, which holds no averaged copy: leave --load_ema out (in Python: ask for"
            " 'net')."
        )
    rename = wan_names.from_diffusers_name if _WAN_TIME in source else from_diffusers_name
    source = weights.renamed(source, lambda name: None if name.endswith(wan_names.IGNORED) else name)
    if unknown := [name for name in source if rename(name) is None]:
        raise CheckpointError(
            f"{address} is a diffusers transformer with {len(unknown)} names that this network does not have:"
            f" {', '.join(unknown[:5])}."
        )
    return weights.renamed(source, rename)


# The network that names and shapes show -------------------------------------------------------------------------------


LATENT_CHANNELS = 16
RATIO = 4  # pixel frames, and so actions, that make a latent frame
ACTION_SIZES = {
    7: "pose and gripper",
    8: "with a quaternion",
    10: "with rot6d",
    29: "GR1",
    43: "G1",
}  # numbers of known data
_SIZES = {(1280, 20): "0.6B", (2048, 28): "2B", (5120, 36): "14B", (1536, 30): "1.3B", (5120, 40): "14B"}
# Channels that enter the patch embedding: latents, condition mask, padding mask, seven views.
_KINDS = {17: "Text2Image", 18: "Video2World", 25: "multiview"}

_PATCH = "x_embedder.proj.1.weight"
_FINAL = "final_layer.linear.weight"
ACTION_EMBEDDERS = "action_embedder_*"
_ACTION = "action_embedder_B_D.fc1.weight"
_ACTION_ON_TOKENS = "action_embedder_tokens.fc1.weight"
_PROJECTION = "crossattn_proj.0.weight"
_WAN_PATCH, _WAN_FINAL, _WAN_IMAGE = "patch_embedding.weight", "head.head.weight", "img_emb.proj.1.weight"
_WAN_TIME = "condition_embedder.time_proj.weight"  # in diffusers' layout
_WAN_HEAD_DIM = 128  # of released networks; their shapes do not show it


@dataclass(frozen=True)
class Family:
    """Properties of a network that show in the shapes of its weights."""

    width: int
    num_blocks: int
    head_dim: int
    input_channels: int
    patch_volume: int
    text_width: int
    mlp_width: int
    text_projection_from: int | None = None  # width before the projection, of Predict2.5
    adaln_rank: int | None = None  # None without AdaLN-LoRA
    action_inputs: int | None = None  # numbers that the embedders of an action-conditioned network read at once
    action_hidden: int | None = None  # width of their hidden layer
    has_action_tokens: bool = False  # a third embedder adds to the tokens
    has_extra_positions: bool = False
    is_wan: bool = False
    image_width: int | None = None  # of the features that an image-to-video network of Wan2.1 reads

    @property
    def size(self) -> str | None:
        """ "2B", "14B" or "0.6B"; None for a size that was not released."""
        return _SIZES.get((self.width, self.num_blocks))

    @property
    def kind(self) -> str:
        if self.action_inputs is not None:
            return "action-conditioned Video2World"
        if self.is_wan:
            return f"Wan2.1 {'T2V' if self.input_channels == LATENT_CHANNELS else 'I2V'}"
        return _KINDS.get(self.input_channels, f"network with {self.input_channels} input channels")

    @property
    def network(self) -> str | None:
        """The key in ``released.NETWORKS``, for a network that was released; derived ones give their base."""
        if self.size is None:
            return None
        if self.is_wan:
            return f"{self.size} {self.kind}"
        if self.text_projection_from is not None:
            return f"{self.size} Predict2.5"
        return f"{self.size} {self.kind if self.kind in _KINDS.values() else _KINDS[18]}"

    @property
    def net_arguments(self) -> dict[str, Any]:
        """Arguments of the network that show in its shapes, without those for actions."""
        common: dict[str, Any] = dict(
            model_channels=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.width // self.head_dim,
            crossattn_emb_channels=self.text_width,
        )
        if self.is_wan:
            sizes = dict(ffn_channels=self.mlp_width, image_channels=self.image_width)
            return dict(in_channels=self.input_channels, **common, **sizes)
        return dict(
            in_channels=self.input_channels - {"Text2Image": 1, "multiview": 9}.get(self.kind, 2),
            **common,
            mlp_ratio=self.mlp_width / self.width,
            crossattn_proj_in_channels=self.text_projection_from,
            use_adaln_lora=self.adaln_rank is not None,
            adaln_lora_dim=self.adaln_rank,
            extra_per_block_abs_pos_emb=self.has_extra_positions,
        )

    def __str__(self) -> str:
        release = "Predict2.5 " if self.text_projection_from is not None else ""
        size = f"{self.size} " if self.size else ""
        actions = "" if self.action_inputs is None else f", {self.action_inputs} numbers of actions at once"
        return f"{size}{release}{self.kind}, width {self.width}, {self.num_blocks} blocks{actions}"


def describe(source: Mapping[str, Tensor]) -> Family | None:
    """The network of the weights, by our names without ``net.``; None if they are of none of this family."""
    names = {name.replace(".base_layer.", "."): name for name in source}

    def shape(name: str) -> tuple[int, ...] | None:
        return shape_of(source, names[name]) if name in names else None

    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    patch, final = shape(_WAN_PATCH), shape(_WAN_FINAL)
    text, mlp, image = shape("text_embedding.0.weight"), shape("blocks.0.ffn.0.weight"), shape(_WAN_IMAGE)
    if patch is not None and len(patch) == 5 and final is not None and text is not None and mlp is not None:
        return Family(
            width=patch[0],
            num_blocks=len(blocks),
            head_dim=min(_WAN_HEAD_DIM, patch[0]),
            input_channels=patch[1],
            patch_volume=patch[2] * patch[3] * patch[4],
            text_width=text[1],
            mlp_width=mlp[0],
            is_wan=True,
            image_width=None if image is None else image[1],
        )
    patch, final = shape(_PATCH), shape(_FINAL)
    keys, mlp = shape("blocks.0.cross_attn.k_proj.weight"), shape("blocks.0.mlp.layer1.weight")
    norm = shape("blocks.0.self_attn.q_norm.weight")
    if patch is None or final is None or keys is None or mlp is None or norm is None:
        return None
    volume = max(1, final[0] // LATENT_CHANNELS)
    lora = shape("blocks.0.adaln_modulation_self_attn.2.weight")
    projection, action = shape(_PROJECTION), shape(_ACTION)
    return Family(
        width=patch[0],
        num_blocks=len(blocks),
        head_dim=norm[0],
        input_channels=patch[1] // volume,
        patch_volume=volume,
        text_width=keys[1],
        text_projection_from=None if projection is None else projection[1],
        adaln_rank=None if lora is None else lora[1],
        mlp_width=mlp[0],
        action_inputs=None if action is None else action[1],
        action_hidden=None if action is None else action[0],
        has_action_tokens=_ACTION_ON_TOKENS in names,
        has_extra_positions=any(name.startswith("extra_pos_embedder.") for name in names),
    )


def require_family(
    found: Family | None,
    wanted: Family | None,
    source: str,
    names: Mapping[str, Any],
    *,
    actions_may_begin: bool = False,
) -> Family:
    """The family that was found; raises where the weights are of another network altogether, in one sentence.

    ``actions_may_begin``: a network with actions may take weights of one without, whose embedders then begin anew.
    """
    if found is None:
        what = f"'{_PATCH}' and its kin are missing. Its names: {listed(list(names), 4) or 'none'}"
        if is_adapter(names):
            what = "it is a LoRA adapter, so give it with --lora, beside the weights that it was trained on"
        raise CheckpointError(f"{source} does not hold the weights of a video network: {what}.")
    if wanted is None:
        return found
    file, net = f"{source} is {_article(found)}", f"The network is {_article(wanted)}"
    if found.is_wan != wanted.is_wan:
        raise CheckpointError(f"{file}. {net}. Choose the model of the file, or another file.")
    if (found.width, found.num_blocks) != (wanted.width, wanted.num_blocks):
        raise CheckpointError(f"{file}. {net}. Choose the model size of the file, or another file.")
    if found.input_channels != wanted.input_channels:
        absent = f"{found.kind} models are not yet here" if runs_nowhere(found.kind) else "choose the program for it"
        cure = f"Its first layer takes other channels: {absent}, or choose another file."
        raise CheckpointError(f"{file}. {net}. {cure}")
    if found.text_projection_from is not None and wanted.text_projection_from is None:
        raise CheckpointError(
            f"{file}: it reads Reason1 text of width {found.text_projection_from} through a projection (crossattn_proj)"
            f" that the network lacks. Set net.crossattn_proj_in_channels={found.text_projection_from}, with that text"
            " encoder."
        )
    if found.action_inputs is not None and wanted.action_inputs is None:
        raise CheckpointError(f"{file}. {net}: without actions. Choose an action-conditioned model for this file.")
    if found.action_inputs is None and wanted.action_inputs is not None and not actions_may_begin:
        cure = "Training may start from it, and learns what actions do; to generate, choose weights that know them."
        raise CheckpointError(f"{file}, without actions. {net}. {cure}")
    if found.action_inputs is not None and found.action_inputs != wanted.action_inputs:
        raise CheckpointError(f"{file} ({'; '.join(action_readings(found.action_inputs))}). {net}. {_OTHER_ACTIONS}")
    must_agree = _MUST_AGREE + (("action_hidden", "has_action_tokens") if found.action_inputs is not None else ())
    differences = [
        f"{field.name.replace('_', ' ')} {getattr(found, field.name)} in the file and {getattr(wanted, field.name)}"
        " in the network"
        for field in fields(Family)
        if field.name in must_agree and getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if differences:
        raise CheckpointError(f"{source} is of another network: {'; '.join(differences)}.")
    return found


def action_network(
    family: Family | None, action_dim: int = 7, num_actions: int = 12, *, source: str = "the file"
) -> tuple[type[ActionDiT], dict[str, Any]]:
    """The class of the network that reads clips of ``num_actions`` actions, four to a latent frame, and its
    arguments as far as shapes or a release show them (RoPE ratios of other sizes they do not).

    Shapes do not show how the numbers are arranged, so the sizes of the data decide.
    """
    if family is None or family.action_inputs is None:
        found = "no video network" if family is None else f"a {family}, without actions"
        raise CheckpointError(f"{source} is {found}. Choose weights of an action-conditioned network.")
    reads = {"flat": num_actions * action_dim, "chunk": RATIO * action_dim}
    fits = [name for name in reads if reads[name] == family.action_inputs]
    if not fits:
        actions = f"{num_actions} actions of {action_dim} numbers"
        raise CheckpointError(
            f"{source} reads {family.action_inputs} numbers of actions at once. {actions.capitalize()} are"
            f" {reads['flat']} in one vector (flat) or {reads['chunk']} for each latent frame (chunk). What would"
            f" fit: {'; '.join(action_readings(family.action_inputs))}."
        )
    if len(fits) > 1:
        raise CheckpointError(
            f"{source} reads {family.action_inputs} numbers of actions at once, which a flat and a chunk network both"
            f" do with {num_actions} actions of {action_dim} numbers: give the folder of its run, which records it."
        )
    hidden = family.action_hidden if family.action_hidden != 4 * family.width else None
    arguments: dict[str, Any] = {
        **NETWORKS.get(family.network or "", {}),
        **family.net_arguments,
        "action_dim": action_dim,
        "hidden_dim_in_action_embedder": hidden,
        "action_on_tokens": family.has_action_tokens,
        "patch_spatial": isqrt(family.patch_volume),  # in time, actions have patches of one frame
    }
    if fits == ["chunk"]:
        return ChunkActionDiT, {**arguments, "temporal_compression_ratio": RATIO}
    return FlatActionDiT, {**arguments, "num_action_per_chunk": num_actions}


def action_readings(inputs: int) -> list[str]:
    """Possible arrangements of so many action numbers at once, for the sizes of an action that are known."""
    found = []
    for size, what in ACTION_SIZES.items():
        if inputs == RATIO * size:
            found.append(f"{RATIO} actions of {size} numbers ({what}) for each latent frame (chunk)")
        elif inputs % (RATIO * size) == 0:
            found.append(f"{inputs // size} actions of {size} numbers ({what}) in one vector (flat)")
    return found or [f"none of {', '.join(map(str, ACTION_SIZES))} numbers for each action"]


_OTHER_ACTIONS = (
    "Choose net.action_dim, and net.num_action_per_chunk or net.temporal_compression_ratio, as the file has them."
)
_MUST_AGREE = ("head_dim", "patch_volume", "text_width", "adaln_rank", "mlp_width", "image_width")


def is_adapter(names: Collection[str]) -> bool:
    """True if the names are those of LoRA factors alone."""
    return bool(names) and all(".lora_" in name or name.endswith(".alpha") for name in names)


def _article(family: Family) -> str:
    text = str(family)
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"
