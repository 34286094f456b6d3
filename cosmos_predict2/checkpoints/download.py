# SPDX-License-Identifier: Apache-2.0
"""Released models: the plan of what a set of them needs, fetched from the hub, and checked where it lies here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.dit_weights import describe, open_dit, require_family
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.released import (
    EMBODIED,
    EMBODIED_DIR,
    FPS,
    GUARDRAIL,
    LLAMA_GUARD,
    MODEL_TYPES,
    NETWORKS,
    PREDICT25,
    PREDICT25_EMPTY_TEXT,
    PREDICT25_TOKENIZER_REVISION,
    REASON1,
    REASON1_ENCODER_DIR,
    REASON1_ENCODER_REVISION,
    REPOSITORIES,
    RESOLUTIONS,
    SIZES,
    T5,
    VIDEO_SIZES,
    runs_nowhere,
)
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.command_line import flag
from imaginaire.errors import CheckpointError, ConfigError, DataError, near
from imaginaire.storage import repositories

_GIGABYTES = {"0.6B": 1.2, "2B": 3.92, "14B": 28.6}  # of one DiT in bfloat16
_GIGABYTES_25 = {"2B": 4.13, "14B": 28.8}  # with the projection of the text
_GIGABYTES_OF_POLICY = {"openvla_oft": 15.4, "pi05": 7.5}
_TOKENIZER, _TOKENIZER_GIGABYTES = "tokenizer/tokenizer.pth", 0.51


@dataclass(frozen=True)
class File:
    """One file of a plan; ``network`` is what its keys and shapes are checked against."""

    name: str
    gigabytes: float
    network: str = ""


@dataclass(frozen=True)
class Download:
    """Files of one repository, and their folder below the checkpoint folder."""

    repository: str
    folder: str
    revision: str | None
    purpose: str
    files: tuple[File, ...] = ()  # exactly these; none: all that the patterns let through
    patterns: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    estimate: float = 0.0  # gigabytes of what the patterns let through

    @property
    def gigabytes(self) -> float:
        return self.estimate + sum(file.gigabytes for file in self.files)

    @property
    def allowed(self) -> list[str] | None:
        return [*(file.name for file in self.files), *self.patterns] or None

    def __str__(self) -> str:
        what = ", ".join(self.allowed or ["all files"])
        without = f" without {', '.join(self.ignored)}" if self.ignored else ""
        revision = (self.revision or "newest")[:12]
        place = f" -> {self.folder}" if self.folder != self.repository else ""
        return f"{self.repository} @ {revision}{place}: {what}{without}; about {self.gigabytes:.3g} GB ({self.purpose})"


_NAMES = dict(nargs="+", metavar="NAME")


@dataclass(frozen=True)
class DownloadFlags:
    model_sizes: Sequence[str] = flag((), "sizes (default: 2B 14B)", nargs="+", choices=SIZES)
    model_types: Sequence[str] = flag((), "kinds (default: all)", nargs="+", choices=tuple(MODEL_TYPES))
    fps: Sequence[int] = flag((16,), "of video2world (default: 16)", nargs="+", type=int, choices=FPS)
    resolution: Sequence[str] = flag(("720",), "of video2world (default: 720)", nargs="+", choices=RESOLUTIONS)
    natten: bool = flag(False, "video2world's weights for sparse attention too (720)")
    predict2_5: Sequence[str] = flag(
        (),
        f"Predict2.5 models: {', '.join(PREDICT25)}; alone, nothing else is fetched",
        choices=tuple(PREDICT25),
        **_NAMES,
    )
    embodied: Sequence[str] = flag(
        (),
        f"a world model that policies learn in, and policies: {', '.join(EMBODIED)}; alone, into {EMBODIED_DIR}/",
        choices=tuple(EMBODIED),
        **_NAMES,
    )
    no_text_encoder: bool = flag(False, "leave out T5-11B (45 GB) and Reason1")
    no_guardrail: bool = flag(False, "leave out the blocklist")
    all_guardrails: bool = flag(False, "Llama-Guard-3 and the video guardrails too")
    prompt_refiner: bool = flag(False, "Cosmos-Reason1-7B for the refiner too")
    tokenizer_only: bool = flag(False, "nothing but the video tokenizer")


@dataclass
class DownloadPlan:
    parts: list[Download] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gigabytes(self) -> float:
        return sum(part.gigabytes for part in self.parts)

    def add(self, part: Download) -> None:
        """Files of one folder are one part, each file once."""
        for i, old in enumerate(self.parts):
            if (old.repository, old.folder, old.revision) == (part.repository, part.folder, part.revision):
                purpose = ", ".join(dict.fromkeys([*old.purpose.split(", "), part.purpose]))
                self.parts[i] = replace(old, files=tuple(dict.fromkeys([*old.files, *part.files])), purpose=purpose)
                return
        self.parts.append(part)


def make_plan(flags: DownloadFlags) -> DownloadPlan:
    """The plan of these flags; an error if they contradict each other."""
    if flags.embodied:
        return _embodied(flags)
    plan = DownloadPlan()
    sizes = flags.model_sizes or VIDEO_SIZES
    types = flags.model_types or (() if flags.predict2_5 else tuple(MODEL_TYPES))
    for model_type in types:
        fitting = [size for size in sizes if size in MODEL_TYPES[model_type].sizes]
        if not fitting:
            there = ", ".join(MODEL_TYPES[model_type].sizes)
            if not flags.model_types:
                plan.notes.append(f"{model_type}: left out, it exists as {there} only")
                continue
            raise ConfigError(
                f"--model_types {model_type} exists as {there}, not as {', '.join(sizes)} (--model_sizes)."
            )
        for size in fitting:
            _add_model(plan, model_type, size, flags)
    for name in flags.predict2_5:
        _add_predict25(plan, name, flags)
    if absent := [name for name in (*types, *flags.predict2_5) if runs_nowhere(name)]:
        plan.notes.append(f"{', '.join(absent)}: not yet here, no program of this version runs these weights")
    if flags.tokenizer_only:
        return plan
    if not flags.no_text_encoder:
        if types:
            plan.add(_part(T5, "text encoder", estimate=45, ignored=("tf_model.h5",)))
        if flags.predict2_5:
            where = (REASON1, REASON1_ENCODER_DIR, REASON1_ENCODER_REVISION)
            plan.add(Download(*where, "text encoder of Predict2.5", estimate=16))
    if not flags.no_guardrail or flags.all_guardrails:
        if flags.all_guardrails:
            plan.add(_part(GUARDRAIL, "guardrails", estimate=6))
            plan.add(_part(LLAMA_GUARD, "guardrail", estimate=16, ignored=("original/*",)))
        else:
            plan.add(_part(GUARDRAIL, "guardrail: blocklist", estimate=0.02, patterns=("blocklist/*",)))
            plan.notes.append(
                "Llama-Guard-3, video filter and face blur: left out (--all_guardrails adds them, about 22 GB)"
            )
    if flags.prompt_refiner:
        plan.add(_part(REASON1, "prompt refiner", estimate=16))
    elif "video2world" in types:
        plan.notes.append("prompt refiner (Cosmos-Reason1-7B): left out (--prompt_refiner adds it, about 16 GB)")
    return plan


def _add_model(plan: DownloadPlan, model_type: str, size: str, flags: DownloadFlags) -> None:
    if model_type == "text2image":
        _add_text2image(plan, size, flags)
        return
    model, video = MODEL_TYPES[model_type], MODEL_TYPES["video2world"].repository(size)
    tokenizer = File(_TOKENIZER, _TOKENIZER_GIGABYTES, "tokenizer")
    plan.add(_part(video, "tokenizer" if model_type != "video2world" else model_type, tokenizer))
    if flags.tokenizer_only:
        return
    if model_type != "video2world":
        file = File(model.file, _GIGABYTES[size], model.network or f"{size} Video2World")
        plan.add(_part(model.repository(size), model_type, file))
        return
    names = [f"model-{resolution}p-{fps}fps.pt" for resolution in flags.resolution for fps in flags.fps]
    if flags.natten:
        names += [f"model-720p-{fps}fps-natten.pt" for fps in flags.fps]
    plan.add(_part(video, model_type, *(File(name, _GIGABYTES[size], f"{size} Video2World") for name in names)))


def _add_text2image(plan: DownloadPlan, size: str, flags: DownloadFlags) -> None:
    files = [File(_TOKENIZER, _TOKENIZER_GIGABYTES, "tokenizer")]
    if not flags.tokenizer_only:
        files.append(File("model.pt", _GIGABYTES[size], f"{size} Text2Image"))
    part = _part(MODEL_TYPES["text2image"].repository(size), "text2image", *files)
    if size == "0.6B" and not flags.tokenizer_only:  # with variants for another tokenizer, and distilled ones
        part = replace(part, patterns=("model_*.pt", "tokenizer_fast/tokenizer.pth"), estimate=4.1)
    plan.add(part)


def _add_predict25(plan: DownloadPlan, name: str, flags: DownloadFlags) -> None:
    repository, file = PREDICT25[name]
    base = "nvidia/Cosmos-Predict2.5-2B"
    tokenizer = File("tokenizer.pth", _TOKENIZER_GIGABYTES, "tokenizer")
    plan.add(Download(base, base, PREDICT25_TOKENIZER_REVISION, "tokenizer of Predict2.5", (tokenizer,)))
    if flags.tokenizer_only:
        return
    size = name.partition("/")[0]
    # What the multi-camera networks look like is not published beside them: they are checked for being readable.
    network = f"{size} Predict2.5" if "multiview" not in name else ""
    files = [File(file, 4.3 if name.endswith("action-cond") else _GIGABYTES_25[size], network)]
    if name.endswith("action-cond"):
        files = [replace(files[0], network="2B Predict2.5 action-conditioned"), File(PREDICT25_EMPTY_TEXT, 0.1)]
    plan.add(_part(repository, f"Predict2.5 {name}", *files))


def _embodied(flags: DownloadFlags) -> DownloadPlan:
    """A world model that a policy learns in, with all that it needs; and policies."""
    if flags.model_types or flags.predict2_5:
        raise ConfigError(
            "--embodied goes into models/, --model_types and --predict2_5 into checkpoints/: ask for each."
        )
    plan = DownloadPlan()
    for name in flags.embodied:
        repository, folder = EMBODIED[name]
        if name != "cosmos_libero_spatial":
            plan.add(Download(repository, folder, None, "policy", estimate=_GIGABYTES_OF_POLICY[name]))
            continue
        files = (
            File("libero-spatial-2b-19k.pt", 12.77, "2B Predict2.5 whole-chunk"),
            File("resnet_rm.pth", 0.045),
            File(_TOKENIZER, _TOKENIZER_GIGABYTES, "tokenizer"),
            File("dataset_statistics.json", 0.0),
        )
        plan.add(Download(repository, folder, None, "world model and reward", files, ("dataset/*.npy",), (), 0.08))
    return plan


def _part(repository: str, purpose: str, *files: File, **options: Any) -> Download:
    return Download(repository, repository, REPOSITORIES[repository].revision, purpose, files, **options)


# Fetching and checking ------------------------------------------------------------------------------------------------


def fetch(plan: DownloadPlan, checkpoint_dir: str) -> list[str]:
    """Download the plan's files; one sentence for each part that failed. The other parts are fetched all the same."""
    listed: list[tuple[repositories.Listing, Path]] = []
    faults: list[str] = []
    for part in plan.parts:
        known = REPOSITORIES.get(part.repository)
        own: dict[str, Any] = dict(licence=known.licence if known else "", revision=part.revision)
        own |= dict(patterns=part.allowed or ["*"], ignored=part.ignored)
        try:
            listing = repositories.list_files(part.repository, kind="model", **own)
        except DataError as error:
            faults.append(str(error))
            continue
        listed.append((listing, Path(checkpoint_dir) / part.folder))
    if needed := sum(sum(listing.absent(folder).values()) for listing, folder in listed):
        storage.require_space(checkpoint_dir, needed + repositories.RESERVE, "The download")
    for listing, folder in listed:
        try:
            repositories.fetch_absent(listing, folder)
        except DataError as error:
            faults.append(str(error))
    return faults


def check(plan: DownloadPlan, checkpoint_dir: str) -> Iterator[tuple[str, list[str], str]]:
    """Path, faults and a note of each entry of the plan; looks at local files only."""
    for part in plan.parts:
        folder = Path(checkpoint_dir) / part.folder
        for file in part.files:
            path = folder / file.name
            yield str(path), *file_faults(path, file.network)
        for pattern in part.patterns if part.files else ():
            found = sum(1 for _ in folder.glob(pattern))
            yield str(folder / pattern), [] if found else [f"{folder / pattern}: there is none."], f"{found} files"
        if not part.files:
            yield str(folder), *_check_folder(folder, part)


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
    kinds = {"Text2Image": DiT, "multiview": MultiViewDiT}
    return _state_of(kinds.get(network.rpartition(" ")[2], Video2WorldDiT), **NETWORKS[network])


def manifest_of(network: str) -> dict[str, Tensor]:
    """The weights of a released network, of one derived from it (``2B action-conditioned``), or of ``tokenizer``."""
    base = network.removesuffix(" action-conditioned").removesuffix(" whole-chunk")
    base = base if base in NETWORKS else f"{base} Video2World"
    if network == "tokenizer":
        from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE

        return _state_of(WanVAE, WanConfig())
    if network.endswith((" action-conditioned", " whole-chunk")):
        cls, actions = ACTIONS["2B Video2World" if network.endswith("whole-chunk") else base]
        state = _state_of(cls, **NETWORKS[base], **actions)
    else:
        state = dit_manifest(base)
    return {name: tensor for name, tensor in state.items() if not weights.is_extra(name)}


def _state_of(cls: type[nn.Module], *arguments: Any, **options: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(cls(*arguments, **options).state_dict())


def file_faults(path: Path, network: str = "") -> tuple[list[str], str]:
    """Faults of a released file, of a ``network`` by its names and shapes; and its dtypes, as a note."""
    if not path.is_file():
        return [f"{path} is missing."], ""
    manifest = manifest_of(network) if network else {}
    try:
        if path.suffix == ".json":
            foreign_json.load(path)
            return [], ""
        source = weights.read(str(path)) if network in ("", "tokenizer") else open_dit(str(path))
        if network not in ("", "tokenizer"):
            require_family(describe(source), describe(manifest), str(path), source)
        if network:
            weights.account(manifest, source).require(source=str(path))
    except CheckpointError as error:
        return [str(error)], ""
    except ValueError as error:  # of the encoding, or of JSON
        return [f"{path} is not JSON: {error}."], ""
    counts = Counter(str(source[name].dtype).removeprefix("torch.") for name in source)
    kinds = ", ".join(dtype if len(counts) == 1 else f"{count} {dtype}" for dtype, count in counts.most_common())
    return [], f"{len(source)} tensors, {kinds}"
