# SPDX-License-Identifier: Apache-2.0
"""Repositories, files and sizes that a set of released models needs. Asks nobody."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cosmos_predict2.released import (
    EMBODIED,
    EMBODIED_DIR,
    FPS,
    GUARDRAIL,
    LLAMA_GUARD,
    MODEL_TYPES,
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
    not_yet_here,
)
from imaginaire.command_line import flag
from imaginaire.errors import ConfigError

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
    if absent := [name for name in (*types, *flags.predict2_5) if not_yet_here(name)]:
        plan.notes.append(f"{', '.join(absent)}: not yet here, no program of this version runs these weights")
    if flags.tokenizer_only:
        return plan
    if not flags.no_text_encoder:
        if types:
            plan.add(_folder(T5, "text encoder", 45, ignored=("tf_model.h5",)))
        if flags.predict2_5:
            plan.add(
                Download(
                    REASON1, REASON1_ENCODER_DIR, REASON1_ENCODER_REVISION, "text encoder of Predict2.5", estimate=16
                )
            )
    if not flags.no_guardrail or flags.all_guardrails:
        if flags.all_guardrails:
            plan.add(_folder(GUARDRAIL, "guardrails", 6))
            plan.add(_folder(LLAMA_GUARD, "guardrail", 16, ignored=("original/*",)))
        else:
            plan.add(_folder(GUARDRAIL, "guardrail: blocklist", 0.02, patterns=("blocklist/*",)))
            plan.notes.append(
                "Llama-Guard-3, video filter and face blur: left out, this version has no use for them yet"
                " (--all_guardrails adds them, about 22 GB)"
            )
    if flags.prompt_refiner:
        plan.add(_folder(REASON1, "prompt refiner", 16))
    elif "video2world" in types:
        plan.notes.append(
            "prompt refiner (Cosmos-Reason1-7B): left out, this version has no use for it yet (--prompt_refiner adds"
            " it, about 16 GB)"
        )
    return plan


def _add_model(plan: DownloadPlan, model_type: str, size: str, flags: DownloadFlags) -> None:
    if model_type == "text2image":
        _add_text2image(plan, size, flags)
        return
    model, video = MODEL_TYPES[model_type], MODEL_TYPES["video2world"].repository(size)
    tokenizer = File(_TOKENIZER, _TOKENIZER_GIGABYTES, "tokenizer")
    plan.add(_part(video, "tokenizer" if model_type != "video2world" else model_type, (tokenizer,)))
    if flags.tokenizer_only:
        return
    if model_type != "video2world":
        file = File(model.file, _GIGABYTES[size], model.network or f"{size} Video2World")
        plan.add(_part(model.repository(size), model_type, (file,)))
        return
    names = [f"model-{resolution}p-{fps}fps.pt" for resolution in flags.resolution for fps in flags.fps]
    if flags.natten:
        names += [f"model-720p-{fps}fps-natten.pt" for fps in flags.fps]
    files = [File(name, _GIGABYTES[size], f"{size} Video2World") for name in names]
    plan.add(_part(video, model_type, tuple(files)))


def _add_text2image(plan: DownloadPlan, size: str, flags: DownloadFlags) -> None:
    files = [File(_TOKENIZER, _TOKENIZER_GIGABYTES, "tokenizer")]
    if not flags.tokenizer_only:
        files.append(File("model.pt", _GIGABYTES[size], f"{size} Text2Image"))
    part = _part(MODEL_TYPES["text2image"].repository(size), "text2image", tuple(files))
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
    plan.add(_part(repository, f"Predict2.5 {name}", tuple(files)))


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


def _part(repository: str, purpose: str, files: tuple[File, ...]) -> Download:
    return Download(repository, repository, REPOSITORIES[repository].revision, purpose, files)


def _folder(
    repository: str, purpose: str, estimate: float, *, patterns: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> Download:
    revision = REPOSITORIES[repository].revision
    return Download(repository, repository, revision, purpose, (), patterns, ignored, estimate)
