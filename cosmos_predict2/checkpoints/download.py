# SPDX-License-Identifier: Apache-2.0
"""Fetching what a plan lists from the hub, and checking the names and shapes in what lies here."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.dit_weights import LATENT_CHANNELS, describe, open_dit, require_family
from cosmos_predict2.checkpoints.download_plan import Download, DownloadPlan
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.released import GUARDRAIL, NETWORKS, REPOSITORIES
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, ConfigError, near
from imaginaire.storage import hub

log = logging.getLogger(__name__)

RESERVE = 2**30  # bytes of the disk that a download leaves free


@dataclass(frozen=True)
class Listed:
    """A part with the files that its repository has of it: bytes by name."""

    part: Download
    sizes: dict[str, int]
    folder: Path

    @property
    def absent(self) -> dict[str, int]:
        """Files that do not lie here in their full size."""
        return {
            name: size
            for name, size in self.sizes.items()
            if not (self.folder / name).is_file() or (self.folder / name).stat().st_size != size
        }


def fetch(plan: DownloadPlan, checkpoint_dir: str) -> list[str]:
    """Download the plan's files; one sentence for each part that failed. The other parts are fetched all the same."""
    client = hub.client()
    listed: list[Listed] = []
    faults: list[str] = []
    for part in plan.parts:
        try:
            listed.append(_list(client, part, Path(checkpoint_dir)))
        except Exception as error:
            faults.append(_explained(part, error))
    _require_space(listed, checkpoint_dir)
    for each in listed:
        if not each.absent:
            log.info("%s: there already", each.part.repository)
            continue
        size = sum(each.absent.values())
        log.info("%s: fetching %d files, %.3g GB", each.part.repository, len(each.absent), size / 1e9)
        try:
            client.snapshot_download(
                repo_id=each.part.repository,
                revision=each.part.revision,
                local_dir=str(each.folder),
                allow_patterns=sorted(each.sizes),
            )
        except Exception as error:
            faults.append(_explained(each.part, error))
            continue
        if left := each.absent:
            faults.append(f"{each.part.repository}: {', '.join(list(left)[:3])} did not arrive in full. Run it again.")
    return faults


def check(plan: DownloadPlan, checkpoint_dir: str) -> Iterator[tuple[str, list[str], str]]:
    """Path, faults and a note of each entry of the plan; looks at local files only."""
    for part in plan.parts:
        folder = Path(checkpoint_dir) / part.folder
        for file in part.files:
            path = folder / file.name
            yield str(path), *_check_file(path, file.network)
        for pattern in part.patterns if part.files else ():
            found = sum(1 for _ in folder.glob(pattern))
            yield str(folder / pattern), [] if found else [f"{folder / pattern}: there is none."], f"{found} files"
        if not part.files:
            yield str(folder), *_check_folder(folder, part)


def _check_file(path: Path, network: str) -> tuple[list[str], str]:
    if not path.is_file():
        return [f"{path} is missing."], ""
    if network:
        return file_faults(str(path), network)
    if path.suffix == ".json":
        try:
            foreign_json.load(path)
        except ValueError as error:  # of the encoding, or of JSON
            return [f"{path} is not JSON: {error}."], ""
        return [], ""
    try:
        return [], dtype_note(weights.read(str(path)))
    except CheckpointError as error:
        return [str(error)], ""


def _check_folder(folder: Path, part: Download) -> tuple[list[str], str]:
    """A folder of the hub: its configuration, its tokenizer, and every shard of its weights."""
    if not folder.is_dir():
        return [f"{folder} is missing."], ""
    if part.repository == GUARDRAIL:
        words = folder / "blocklist" / "custom"
        return ([], "blocklist") if words.exists() else ([f"{words} is missing."], "")
    names = {path.name for path in folder.iterdir()}
    faults = [] if "config.json" in names else [f"{folder}/config.json is missing."]
    if not any(name.startswith(("tokenizer", "spiece")) for name in names):
        faults.append(f"{folder} has no tokenizer (tokenizer.json or spiece.model).")
    try:
        note = f"{len(weights.read(str(folder)))} tensors"
    except CheckpointError as error:
        return [*faults, str(error)], ""
    return faults, note


# The hub --------------------------------------------------------------------------------------------------------------


def _list(client: Any, part: Download, root: Path) -> Listed:
    info = client.HfApi().model_info(part.repository, revision=part.revision, files_metadata=True)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings}
    if lost := [file.name for file in part.files if file.name not in sizes]:
        raise CheckpointError(f"it has no {', '.join(lost)}")
    allowed = part.allowed
    wanted = {
        name: size
        for name, size in sizes.items()
        if (allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed))
        and not any(fnmatchcase(name, pattern) for pattern in part.ignored)
    }
    if not wanted:
        raise CheckpointError(f"it has nothing that matches {', '.join(allowed or ['*'])}")
    return Listed(part, wanted, root / part.folder)


def _require_space(listed: list[Listed], checkpoint_dir: str) -> None:
    needed = sum(sum(each.absent.values()) for each in listed)
    free = storage.free_bytes(checkpoint_dir)
    if free is not None and needed and needed + RESERVE > free:
        raise CheckpointError(
            f"The download needs {needed / 1e9:.3g} GB and {checkpoint_dir} has {free / 1e9:.3g} GB free. Choose"
            " another place (--checkpoint_dir), or fewer models (--model_types, --model_sizes, --no_text_encoder)."
        )


def _explained(part: Download, error: Exception) -> str:
    """Cure of a failure of the hub."""
    known = REPOSITORIES.get(part.repository)
    licence = known.licence if known else ""
    return hub.explained(error, part.repository, revision=part.revision, licence=licence)


# What a released file must hold ---------------------------------------------------------------------------------------

# How the released networks with actions read these: Predict2 a chunk of 12 actions of 7 numbers, Predict2.5 the 4
# actions of one latent frame. Older weights of Predict2.5 read a chunk of 12, too.
ACTIONS: dict[str, tuple[type[ActionDiT], dict[str, int]]] = {
    "2B Video2World": (FlatActionDiT, dict(action_dim=7, num_action_per_chunk=12)),
    "2B Predict2.5": (ChunkActionDiT, dict(action_dim=7, temporal_compression_ratio=4)),
}


def dit_manifest(network: str) -> dict[str, Tensor]:
    """Every entry of a released network's state dict by name, without memory (meta tensors)."""
    if network not in NETWORKS:
        raise ConfigError(f"There is no released network '{network}'.{near(network, NETWORKS)}")
    return _state_of(DiT if network.endswith("Text2Image") else Video2WorldDiT, **NETWORKS[network])


def manifest_of(network: str) -> dict[str, Tensor]:
    """The weights of a released network, of one derived from it (``2B action-conditioned``), or of ``tokenizer``."""
    base = network.removesuffix(" action-conditioned").removesuffix(" whole-chunk")
    base = base if base in NETWORKS else f"{base} Video2World"
    if network == "tokenizer":
        from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE

        return _state_of(WanVAE, WanConfig())
    if network == "2B multiview":
        net = {**NETWORKS["2B Video2World"], "in_channels": LATENT_CHANNELS + 7}
        state = _state_of(Video2WorldDiT, **net) | {"view_embeddings.weight": torch.empty(7, 7, device="meta")}
    elif network.endswith((" action-conditioned", " whole-chunk")):
        cls, actions = ACTIONS["2B Video2World" if network.endswith("whole-chunk") else base]
        state = _state_of(cls, **NETWORKS[base], **actions)
    else:
        state = dit_manifest(base)
    return {name: tensor for name, tensor in state.items() if not weights.is_extra(name)}


def _state_of(cls: type[nn.Module], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(cls(*arguments, **options).state_dict())


def file_faults(path: str, network: str) -> tuple[list[str], str]:
    """Faults of a released file by its names and shapes; and its dtypes, as a note."""
    manifest = manifest_of(network)
    try:
        if network == "tokenizer":
            source = weights.read(path)
        else:
            source = open_dit(path)
            require_family(describe(source), describe(manifest), path, source)
        allowed = ("pos_embedder_options.*",) if network == "2B multiview" else ()
        weights.account(manifest, source).require(source=path, allow_unexpected=allowed)
    except CheckpointError as error:
        return [str(error)], ""
    return [], dtype_note(source)


def dtype_note(source: Mapping[str, Tensor]) -> str:
    """``567 tensors, bfloat16``; with several dtypes, how many of each."""
    counts = Counter(str(source[name].dtype).removeprefix("torch.") for name in source)
    kinds = ", ".join(dtype if len(counts) == 1 else f"{count} {dtype}" for dtype, count in counts.most_common())
    return f"{len(source)} tensors, {kinds}"
