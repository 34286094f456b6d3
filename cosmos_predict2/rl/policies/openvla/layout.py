# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's public folder: weights under timm's names, read with an account of every name and written back the same.

What nothing reads (the last block and final norm of each tower, the attention pooling) is kept aside for the writing.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.policies.openvla.inputs import statistics_for
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, is_hub, json_in, load_pt, local_file, names_at
from imaginaire.checkpoint.weight_files import below as below_address
from imaginaire.errors import CheckpointError

CONFIG, STATISTICS = "config.json", "dataset_statistics.json"
PROPRIO, HEAD = "proprio_projector", "action_head"  # which published folders have as files of their own
SHARD = 5 * 2**30  # bytes
# transformers' names -> timm's, newer releases first; q, k and v are thirds of one matrix
_OF_BLOCKS = [
    (r"attention\.(?:attention\.)?(q|k|v)_proj\.", r"attn.qkv.\1."),
    (
        r"attention\.attention\.(q)uery\.|attention\.attention\.(k)ey\.|attention\.attention\.(v)alue\.",
        r"attn.qkv.\1\2\3.",
    ),
    (r"attention\.(?:o_proj|output\.dense)\.", "attn.proj."),
    (r"self_attn\.(q|k|v)_proj\.", r"attn.qkv.\1."),
    (r"self_attn\.out_proj\.", "attn.proj."),
    (r"layer_scale(\d)\.lambda1", r"ls\1.scale_factor"),
    (r"layer_norm(\d)\.", r"norm\1."),
]
_OF_EMBEDDINGS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.position_embedding.weight": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "embeddings.patch_embedding.weight": "patch_embed.proj.weight",
    "embeddings.patch_embedding.bias": "patch_embed.proj.bias",
}
_TOWER = re.compile(r"(vision_backbone\.(?:fused_)?featurizer)\.(.*)")
_LAYER = re.compile(r"encoder\.layers?\.(\d+)\.(.*)")
_UNUSED = re.compile(r"vision_backbone\.(?:fused_)?featurizer\.(?:norm\.|attn_pool\.|blocks\.)")
MASK_TOKEN = "*.mask_token"  # of transformers alone


@dataclass(frozen=True)
class PublicTensor:
    """The place of a model's tensor in the public file: its name, and which third of it."""

    name: str
    third: int | None = None


def place_of(name: str) -> PublicTensor | None:
    """None for what only transformers has."""
    found = _TOWER.fullmatch(name)
    if found is None:
        return PublicTensor(name)
    tower, inner = found.groups()
    if inner.endswith("mask_token"):
        return None
    if inner in _OF_EMBEDDINGS:
        return PublicTensor(f"{tower}.{_OF_EMBEDDINGS[inner]}")
    layer = _LAYER.fullmatch(inner)
    if layer is None:
        raise CheckpointError(f"This release of transformers calls part of a vision tower {name}, which is not known.")
    block, rest = layer.groups()
    for pattern, public in _OF_BLOCKS:
        rest = re.sub(f"^(?:{pattern})", public, rest)
    third = re.fullmatch(r"attn\.qkv\.(q|k|v)\.(.*)", rest)
    if third is not None:
        return PublicTensor(f"{tower}.blocks.{block}.attn.qkv.{third[2]}", "qkv".index(third[1]))
    return PublicTensor(f"{tower}.blocks.{block}.{rest}")


@dataclass(frozen=True)
class Origin:
    """All for writing a policy back: tensors that nothing reads, the dtype of those that are read, and which of them
    are in a torch file beside the model, under which name."""

    aside: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    beside: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def from_public(model: nn.Module, source: Mapping[str, Tensor], path: str) -> Origin:
    """Load the model. Every name is used, kept aside or an error."""
    converted, used = {}, {}
    for name, target in model.state_dict().items():
        place = place_of(name)
        if place is None or place.name not in source:
            continue
        tensor = source[place.name]
        used[place.name] = tensor.dtype
        if place.third is not None:
            tensor = tensor.chunk(3)[place.third]
        elif name.endswith("embeddings.position_embeddings"):  # the class token's position is in the token
            tensor = torch.cat([tensor.new_zeros(1, 1, tensor.shape[-1]), tensor], dim=1)
        elif name.endswith("embeddings.position_embedding.weight"):
            tensor = tensor.reshape(target.shape)
        converted[name] = tensor
    left = [name for name in source if name not in used]
    unknown = [name for name in left if not _UNUSED.match(name)]
    if unknown:
        raise CheckpointError(
            f"{path} has {len(unknown)} tensors that this policy does not know: {', '.join(unknown[:5])}. See that its"
            " config.json is its own; proprio_projector needs policy.use_proprio=True, action_head policy.variant=l1."
        )
    cure = "The folder must hold the whole model in its public layout."
    new = [f"{HEAD}.*"] if not any(name.startswith(HEAD) for name in source) else []  # to be cloned
    weights.load_into(model.state_dict(), converted).require(allow_missing=[MASK_TOKEN, *new], source=path, cure=cure)
    return Origin({name: source[name] for name in left}, used)


def to_public(state: Mapping[str, Tensor], origin: Origin) -> dict[str, Tensor]:
    """The model's weights and those kept aside, by public names, each in the dtype that it came in."""
    public: dict[str, Tensor] = {}
    thirds: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        place = place_of(name)
        tensor = tensor.detach().cpu()
        if place is None:
            continue
        if place.third is not None:
            thirds.setdefault(place.name, {})[place.third] = tensor
        elif name.endswith("embeddings.position_embeddings"):
            public[place.name] = tensor[:, 1:]
        elif name.endswith("embeddings.position_embedding.weight"):
            public[place.name] = tensor[None]
        else:
            public[place.name] = tensor
    for name, tensor in state.items():  # transformers trains a position of the class token; timm has none
        if name.endswith("embeddings.position_embeddings"):
            tower = name.removesuffix("embeddings.position_embeddings")
            public[f"{tower}cls_token"] = public[f"{tower}cls_token"] + tensor.detach().cpu()[:, :1]
    public |= {name: torch.cat([parts[i] for i in range(3)]) for name, parts in thirds.items()}
    written = {name: tensor.to(origin.dtypes.get(name, tensor.dtype)) for name, tensor in public.items()}
    return {name: tensor.contiguous() for name, tensor in sorted({**written, **origin.aside}.items())}


@dataclass(frozen=True)
class Folder:
    """A public folder, here or on the hub."""

    address: str

    def statistics(self, config: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]]:
        """Those of a data set, of their own file or of config.json; and its name."""
        return statistics_for(json_in(self.address, STATISTICS) or config.get("norm_stats", {}), key, self.address)

    def small_files(self) -> dict[str, Path]:
        """All that are no weights: settings, statistics, the tokenizer."""
        found = {}
        for name in names_at(self.address):
            is_weights = name.endswith((*TENSOR_SUFFIXES, ".index.json")) and not name.endswith("tokenizer.model")
            if not is_weights and "." in name and not name.startswith("."):
                found[name] = local_file(below_address(self.address, name))
        return {name: file for name, file in found.items() if file.is_file()}

    def tokenizer_folder(self) -> str:
        """The folder that transformers reads a tokenizer from."""
        if not is_hub(self.address):
            return self.address
        files = list(self.small_files().values())
        return str(files[0].parent) if files else self.address

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, tuple[str, str]]]:
        """Tensors of the model and of its parts with files of their own, never unpickled beyond tensors; and which file
        and name each of these has."""
        names = names_at(self.address)
        if not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{self.address} holds no weights (*.safetensors) of OpenVLA.")
        found = dict(weights.read(self.address))
        beside: dict[str, tuple[str, str]] = {}
        for part in (PROPRIO, HEAD):
            files = [name for name in names if part in name and "checkpoint" in name]
            if len(files) > 1:
                raise CheckpointError(f"{self.address} has several files of {part}: {', '.join(files)}. Keep one.")
            for file in files:
                for key, value in load_pt(local_file(below_address(self.address, file))).items():
                    name = f"{part}.{key.removeprefix('module.')}"
                    found[name], beside[name] = value, (file, key)
        return found, beside


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    small: Mapping[str, Path],
    shard: int = SHARD,
    beside: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """A public folder: safetensors, in shards with an index where they are large, torch files of what is ``beside`` the
    model, and the other files.

    Weights that were there are replaced when all new ones are complete: what is interrupted leaves the old ones.
    """
    writing = folder / ".writing"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        _write_weights(writing, tensors, shard, beside or {})
        for name, path in small.items():
            if path.resolve() != (folder / name).resolve():
                shutil.copyfile(path, folder / name)
        for old in folder.iterdir():
            is_part = any(part in old.name and "checkpoint" in old.name for part in (PROPRIO, HEAD))
            if old.name.endswith((".safetensors", ".safetensors.index.json")) or is_part:
                old.unlink()
        for new in writing.iterdir():
            new.rename(folder / new.name)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _write_weights(
    folder: Path, tensors: Mapping[str, Tensor], shard: int, beside: Mapping[str, tuple[str, str]]
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards  # which transformers brings

    own: dict[str, dict[str, Tensor]] = {}
    for name, (file, key) in beside.items():
        own.setdefault(file, {})[key] = tensors[name].clone()
    for file, state in own.items():
        torch.save(state, folder / file)
    kept = {name: tensor for name, tensor in tensors.items() if name not in beside}
    plan = split_torch_state_dict_into_shards(kept, max_shard_size=shard)
    for file, names in plan.filename_to_tensors.items():
        safetensors.torch.save_file({name: kept[name].clone() for name in names}, folder / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
