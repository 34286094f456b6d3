# SPDX-License-Identifier: Apache-2.0
"""The released models by name: where their files lie below one folder, which revision is meant, how they are built; and
the tiny models that come with the code, trained on the toy world, for any CPU.

The folder is an argument, else what ``COSMOS_PREDICT2_ARGS="--checkpoints DIR"`` has when it is read, else
``checkpoints``.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imaginaire import storage
from imaginaire.errors import ConfigError, near, raised_as
from imaginaire.storage.hub import absent

DEFAULT_DIR = "checkpoints"
SHIPPED = Path(__file__).with_name("checkpoints")  # README.md there: how the tiny models were made
# The first three are averaged weights in half precision, the fourth lies beside the config.yaml of its run, and the
# policy is of `scripts.train_policy`'s default kind, cloned from 20 demonstrations.
TINY_VIDEO2WORLD = str(SHIPPED / "tiny_video2world.safetensors")
TINY_TEXT2IMAGE = str(SHIPPED / "tiny_text2image.safetensors")
TINY_MULTIVIEW = str(SHIPPED / "tiny_multiview.safetensors")
TINY_ACTION = str(SHIPPED / "tiny_action" / "model.safetensors")
TINY_POLICY = str(SHIPPED / "tiny_policy.safetensors")
SETTINGS_VARIABLE = "COSMOS_PREDICT2_ARGS"
_SETTINGS = {"--checkpoints": "checkpoints", "--text_encoder": "text_encoder"}

SIZES = ("0.6B", "2B", "14B")
VIDEO_SIZES = ("2B", "14B")
RESOLUTIONS = ("480", "720")
FPS = (10, 16)
GROOT_VARIANTS = ("gr1", "droid")


@dataclass(frozen=True)
class Repository:
    """One repository of the hub, at the revision that the file names here were taken from."""

    name: str
    revision: str | None
    licence: str = "NVIDIA Open Model License"


_REPOSITORIES = [
    Repository("google-t5/t5-11b", "90f37703b3334dfe9d2b009bfcbfbf1ac9d28ea3", "Apache-2.0"),
    Repository(
        "meta-llama/Llama-Guard-3-8B", "7327bd9f6efbbe6101dc6cc4736302b3cbb6e425", "Llama 3.1 Community License"
    ),
    Repository("nvidia/Cosmos-Guardrail1", "d6d4bfa899a71454a700907664f3e88f503950cf"),
    Repository("nvidia/Cosmos-Reason1-7B", "8fe96c1fa10db9e666b6fa6a87fea57dd9635649"),
    Repository("nvidia/Cosmos-Predict2-0.6B-Text2Image", "80e9f1599778499e9b5435179861871b5a3561d4"),
    Repository("nvidia/Cosmos-Predict2-2B-Text2Image", "acdb5fde992a73ef0355f287977d002cbfd127e0"),
    Repository("nvidia/Cosmos-Predict2-14B-Text2Image", "015332720f70dd7b497c1cff9fd0c936a77f160b"),
    Repository("nvidia/Cosmos-Predict2-2B-Video2World", "f50c09f5d8ab133a90cac3f4886a6471e9ba3f18"),
    Repository("nvidia/Cosmos-Predict2-14B-Video2World", "03b03a377fede782647afac998f674d9f358e319"),
    Repository("nvidia/Cosmos-Predict2-2B-Multiview", "52f3731663eecdc998d9608f9b21ac4dcbdea6f1"),
    Repository("nvidia/Cosmos-Predict2-14B-Sample-GR00T-Dreams-GR1", "926f34dd83860c5406ab4b400e156c3fd6fe6c0d"),
    Repository("nvidia/Cosmos-Predict2-14B-Sample-GR00T-Dreams-DROID", "ebc29d30a3fab504bcc779a85bca073d14ad39f9"),
    Repository("nvidia/Cosmos-Predict2-2B-Sample-Action-Conditioned", None),  # no revision was ever named
    Repository("nvidia/Cosmos-Predict2.5-2B", None),
    Repository("nvidia/Cosmos-Predict2.5-14B", None),
]
REPOSITORIES = {repository.name: repository for repository in _REPOSITORIES}

T5 = "google-t5/t5-11b"
LLAMA_GUARD = "meta-llama/Llama-Guard-3-8B"
GUARDRAIL = "nvidia/Cosmos-Guardrail1"
REASON1 = "nvidia/Cosmos-Reason1-7B"  # the prompt refiner
REASON1_ENCODER_REVISION = "3210bec0495fdc7a8d3dbb8d58da5711eab4b423"  # the text encoder of Predict2.5: other weights
REASON1_ENCODER_DIR = f"{REASON1}-{REASON1_ENCODER_REVISION[:7]}"
PREDICT25_TOKENIZER_REVISION = "6787e176dce74a101d922174a95dba29fa5f0c55"

# Predict2.5: what users call a model -> (repository, file). The stems are part of the published names.
_P25_2B, _P25_14B = "nvidia/Cosmos-Predict2.5-2B", "nvidia/Cosmos-Predict2.5-14B"
PREDICT25 = {
    "2B/pre-trained": (_P25_2B, "base/pre-trained/d20b7120-df3e-4911-919d-db6e08bad31c_ema_bf16.pt"),
    "2B/post-trained": (_P25_2B, "base/post-trained/81edfebe-bd6a-4039-8c1d-737df1a790bf_ema_bf16.pt"),
    "2B/distilled": (_P25_2B, "base/distilled/575edf0f-d973-4c74-b52c-69929a08d0a5_ema_bf16.pt"),
    "2B/auto/multiview": (_P25_2B, "auto/multiview/524af350-2e43-496c-8590-3646ae1325da_ema_bf16.pt"),
    "2B/robot/action-cond": (_P25_2B, "robot/action-cond/38c6c645-7d41-4560-8eeb-6f4ddc0e6574_ema_bf16.pt"),
    "2B/robot/multiview-agibot": (_P25_2B, "robot/multiview-agibot/f740321e-2cd6-4370-bbfe-545f4eca2065_ema_bf16.pt"),
    "14B/pre-trained": (_P25_14B, "base/pre-trained/54937b8c-29de-4f04-862c-e67b04ec41e8_ema_bf16.pt"),
    "14B/post-trained": (_P25_14B, "base/post-trained/e21d2a49-4747-44c8-ba44-9f6f9243715f_ema_bf16.pt"),
}
PREDICT25_EMPTY_TEXT = "robot/action-cond/cr1_empty_string_text_embeddings.pt"

# What the guide of RLinf's world-model environment downloads, each into a folder of its own below models/.
EMBODIED_DIR = "models"
EMBODIED = {  # name -> (repository, folder)
    "cosmos_libero_spatial": ("tayalmanan/cosmos-robotics", "Cosmos-Predict2.5-LIBERO-Spatial"),
    "openvla_oft": ("RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora", "RLinf-OpenVLAOFT-LIBERO-130-Base-Lora"),
    "pi05": ("RLinf/RLinf-Pi05-LIBERO-SFT", "RLinf-Pi05-LIBERO-SFT"),
}

# What the released networks were built with, as arguments of cosmos_predict2.nn.dit; the rest has its default there.
_2B = dict(model_channels=2048, num_blocks=28, num_heads=16)
_14B = dict(model_channels=5120, num_blocks=36, num_heads=40)
_P25 = dict(crossattn_proj_in_channels=100352, use_wan_fp32_strategy=True)
_06B = dict(model_channels=1280, num_blocks=20, num_heads=20)
_ROPE = ("rope_t_extrapolation_ratio", "rope_h_extrapolation_ratio", "rope_w_extrapolation_ratio")


def _net(numbers: dict[str, int], rope: tuple[float, float, float], **others: int | bool) -> dict[str, Any]:
    return {**numbers, **dict(zip(_ROPE, rope)), **others}


NETWORKS: dict[str, dict[str, Any]] = {
    "2B Video2World": _net(_2B, (1.0, 3.0, 3.0)),
    "14B Video2World": _net(_14B, (20 / 24, 2.0, 2.0)),
    "0.6B Text2Image": _net(_06B, (1.0, 4.0, 4.0)),
    "2B Text2Image": _net(_2B, (1.0, 4.0, 4.0)),
    "14B Text2Image": _net(_14B, (1.0, 4.0, 4.0)),
    "2B multiview": _net(_2B, (8 / 24, 3.0, 3.0)),
    "2B Predict2.5": _net(_2B, (1.0, 3.0, 3.0), **_P25),
    "14B Predict2.5": _net(_14B, (1.0, 3.0, 3.0), **_P25),
}
_WAN_13B = dict(model_channels=1536, num_blocks=30, num_heads=12, ffn_channels=8960)
_WAN_14B = dict(model_channels=5120, num_blocks=40, num_heads=40, ffn_channels=13824)
WAN_NETWORKS: dict[str, dict[str, Any]] = {  # arguments of cosmos_predict2.nn.wan_dit
    "1.3B Wan2.1 T2V": _WAN_13B,
    "14B Wan2.1 T2V": _WAN_14B,
    "14B Wan2.1 I2V": {**_WAN_14B, "in_channels": 36, "image_channels": 1280},
}


# Part of the released models' behaviour: a functional constant, so every character counts.
DEFAULT_NEGATIVE_PROMPT = (
    "The video captures a series of frames showing ugly scenes, static with no motion, motion blur, over-saturation, "
    "shaky footage, low resolution, grainy texture, pixelated images, poorly lit areas, underexposed and overexposed "
    "scenes, poor color balance, washed out colors, choppy sequences, jerky movements, low frame rate, artifacting, "
    "color banding, unnatural transitions, outdated special effects, fake elements, unconvincing visuals, poorly "
    "edited content, jump cuts, visual noise, and flickering. Overall, the video is of poor quality."
)

# What was published and does not run here yet, by a word of its names (experiments, groups, models, files): what it is,
# and what to use in its place.
_TEXT2IMAGE = "Text2Image", "its pictures are made by examples/text2image.py"
_MULTIVIEW25 = "multi-view Predict2.5", "use that of Predict2 (examples/multiview.py)"
NOT_YET = {
    "0.6b": _TEXT2IMAGE,
    "auto/multiview": _MULTIVIEW25,
    "robot/multiview": _MULTIVIEW25,
    "dmd2": ("DMD2", "distil your own model by experiment=tiny_student (documentations/students.md)"),
}
_MULTIVIEW = "multiview", "use examples/multiview.py"
OF_OTHER_PROGRAMS = {"Text2Image": _TEXT2IMAGE, "-Multiview": _MULTIVIEW, "views-": _MULTIVIEW}


@dataclass(frozen=True)
class ModelType:
    """One kind of released model: its sizes and files."""

    suffix: str  # of its repositories
    sizes: tuple[str, ...]
    file: str = ""  # empty: one for each setting
    network: str = ""  # that the file is checked against; empty: a Video2World network of its size

    def repository(self, size: str) -> str:
        return f"nvidia/Cosmos-Predict2-{size}-{self.suffix}"


MODEL_TYPES = {  # by --model_types
    "text2image": ModelType("Text2Image", SIZES, "model.pt"),
    "video2world": ModelType("Video2World", VIDEO_SIZES),
    "sample_action_conditioned": ModelType(
        "Sample-Action-Conditioned", ("2B",), "model-480p-4fps.pt", "2B action-conditioned"
    ),
    "sample_gr00t_dreams_gr1": ModelType("Sample-GR00T-Dreams-GR1", ("14B",), "model-480p-16fps.pt"),
    "sample_gr00t_dreams_droid": ModelType("Sample-GR00T-Dreams-DROID", ("14B",), "model-480p-16fps.pt"),
    "multiview": ModelType("Multiview", ("2B",), "model-720p-10fps-7views-29frames.pt", "2B multiview"),
}
_VARIANT = re.compile(r"model-(\d+)p-(\d+)fps(-natten)?\.pt")


# Where things are -----------------------------------------------------------------------------------------------------


def checkpoint_dir(explicit: str | None = None) -> str:
    """The folder of the released weights: ``explicit``, else the environment's, else ``checkpoints``."""
    return explicit or environment_settings().get("checkpoints") or DEFAULT_DIR


def environment_settings() -> dict[str, str]:
    """``checkpoints`` and ``text_encoder`` as ``COSMOS_PREDICT2_ARGS`` sets them now; one that it does not set is left
    out."""
    text = os.environ.get(SETTINGS_VARIABLE, "")
    with raised_as(ConfigError, f"{SETTINGS_VARIABLE}={text!r} cannot be split into words", ValueError):
        words = shlex.split(text)
    settings: dict[str, str] = {}
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag not in _SETTINGS:
            raise ConfigError(f"{SETTINGS_VARIABLE}={text!r} has '{flag}'.{near(flag, _SETTINGS)}")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        if not value:
            raise ConfigError(f"{SETTINGS_VARIABLE}={text!r}: {flag} needs a value, such as {flag} /data/{flag[2:]}.")
        settings[_SETTINGS[flag]] = value
    return settings


def get_cosmos_predict2_text2image_checkpoint(
    *, model_size: str = "2B", fast_tokenizer: bool = False, distilled: bool = False, root: str | None = None
) -> str:
    """``<root>/nvidia/Cosmos-Predict2-2B-Text2Image/model.pt`` and its variants."""
    _one_of("model_size", model_size, SIZES)
    if (fast_tokenizer or distilled) and model_size != "0.6B":
        raise ConfigError(f"The fast-tokenizer and distilled Text2Image models are 0.6B, not {model_size}.")
    name = "model" + "_fast_tokenizer" * fast_tokenizer + "_distilled" * distilled + ".pt"
    return _below(root, MODEL_TYPES["text2image"].repository(model_size), name)


def get_cosmos_predict2_video2world_checkpoint(
    *,
    model_size: str = "2B",
    resolution: str | int = "720",
    fps: int = 16,
    natten: bool = False,
    root: str | None = None,
) -> str:
    """``<root>/nvidia/Cosmos-Predict2-2B-Video2World/model-720p-16fps.pt`` and its variants."""
    _one_of("model_size", model_size, VIDEO_SIZES)
    _one_of("resolution", str(resolution), RESOLUTIONS)
    _one_of("fps", fps, FPS)
    if natten and str(resolution) != "720":
        raise ConfigError(f"The NATTEN weights are for resolution 720 (16:9), not {resolution}.")
    name = f"model-{resolution}p-{fps}fps{'-natten' * natten}.pt"
    return _below(root, MODEL_TYPES["video2world"].repository(model_size), name)


def get_cosmos_predict2_action_conditioned_checkpoint(*, root: str | None = None) -> str:
    return _only_file("sample_action_conditioned", root)


def get_cosmos_predict2_gr00t_checkpoint(*, gr00t_variant: str, root: str | None = None) -> str:
    _one_of("gr00t_variant", gr00t_variant, GROOT_VARIANTS)
    return _only_file(f"sample_gr00t_dreams_{gr00t_variant}", root)


def get_cosmos_predict2_multiview_checkpoint(*, root: str | None = None) -> str:
    return _only_file("multiview", root)


def get_cosmos_predict25_checkpoint(name: str, *, root: str | None = None) -> str:
    """The file of a Predict2.5 model by its public name, such as ``2B/post-trained``."""
    _one_of("Predict2.5 model", name, tuple(PREDICT25))
    return _below(root, *PREDICT25[name])


def get_predict25_empty_text(*, root: str | None = None) -> str:
    """The embedding of the empty prompt, which the action-conditioned Predict2.5 model was trained with."""
    return _below(root, _P25_2B, PREDICT25_EMPTY_TEXT)


def get_tokenizer_checkpoint(*, model_size: str = "2B", root: str | None = None) -> str:
    """The video tokenizer: the same file in every repository, so the first place that has it counts."""
    _one_of("model_size", model_size, VIDEO_SIZES)
    folders = [MODEL_TYPES["video2world"].repository(size) for size in (model_size, *VIDEO_SIZES)]
    folders += [MODEL_TYPES["text2image"].repository(size) for size in SIZES]
    files = [*(f"{folder}/tokenizer/tokenizer.pth" for folder in folders), f"{_P25_2B}/tokenizer.pth"]
    paths = [_below(root, file) for file in [*files, f"{_P25_14B}/tokenizer.pth"]]
    return next(filter(storage.exists, paths), paths[0])


def get_t5_model_dir(*, root: str | None = None) -> str:
    return _below(root, T5)


def get_umt5_model_dir(*, root: str | None = None) -> str:
    """The folder of the smallest Wan2.1; all of them have the same text encoder."""
    return _below(root, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")


def get_cosmos_reason1_model_dir(*, root: str | None = None) -> str:
    """The prompt refiner's folder."""
    return _below(root, REASON1)


def get_reason1_encoder_dir(*, root: str | None = None) -> str:
    """The folder of Predict2.5's text encoder, which is another revision than the prompt refiner's."""
    return _below(root, REASON1_ENCODER_DIR)


def get_guardrail_dir(*, root: str | None = None) -> str:
    return _below(root, GUARDRAIL)


def not_yet_here(name: str, absent: Mapping[str, tuple[str, str]] = NOT_YET) -> str | None:
    """A sentence on a published name of what this version does not run; None for any other name."""
    what, use = next((found for word, found in absent.items() if word.lower() in name.lower()), ("", ""))
    return f"{name} is not yet here: this program has no {what} models; {use}" if what else None


def runs_nowhere(name: str) -> bool:
    """True for a published name whose weights no program takes."""
    return not_yet_here(name) is not None and _TEXT2IMAGE[1] not in str(not_yet_here(name))


def released_but_absent(path: str) -> str | None:
    """The same of a published file or repository that no program of videos takes, wherever it lies; None for weights of
    one's own, whatever their path is called."""
    file = path.rstrip("/").rpartition("/")[2]
    model = next((model for model, (_, place) in PREDICT25.items() if path.endswith(place)), "")
    is_published = re.search(r"(^|/)(Cosmos-Predict2-[\d.]+B-\w+)", path) or re.fullmatch(r"model-.+views.*\.pt", file)
    return not_yet_here(model) if model else not_yet_here(path, OF_OTHER_PROGRAMS) if is_published else None


def download_command(path: str) -> str | None:
    """The command that fetches a released file to ``path``; None for a path that no release has."""
    for name, (_, folder) in EMBODIED.items():
        root, found, _ = f"/{path}/".partition(f"/{folder}/")
        if found:
            place = "" if root[1:] in ("", EMBODIED_DIR) else f" --checkpoint_dir {shlex.quote(root[1:])}"
            return f"python -m scripts.download_checkpoints --embodied {name}{place}"
    for name in [*REPOSITORIES, REASON1_ENCODER_DIR]:
        root, found, file = f"/{path}".partition(f"/{name}/")
        if not found:
            continue
        words = ["python -m scripts.download_checkpoints"]
        match = re.fullmatch(r"nvidia/Cosmos-Predict2-(0\.6B|2B|14B)-(.+)", name)
        if match is None and "Predict2.5" not in name:
            return None
        if match is None:
            with_it = (_P25_2B, PREDICT25_EMPTY_TEXT), "2B/robot/action-cond"  # fetched with the weights that read it
            model = dict([*((place, model) for model, place in PREDICT25.items()), with_it]).get((name, file))
            words.append(f"--predict2_5 {model or name.rpartition('-')[2] + '/post-trained'}")
        else:
            model_type = next(name for name, each in MODEL_TYPES.items() if each.suffix == match[2])
            words.append(f"--model_types {model_type} --model_sizes {match[1]}")
            variant = _VARIANT.fullmatch(file)
            if match[2] == "Video2World" and variant:
                words.append(f"--resolution {variant[1]} --fps {variant[2]}{' --natten' * bool(variant[3])}")
            elif file.endswith("tokenizer.pth"):
                words.append("--tokenizer_only")
        if root.removeprefix("/") not in ("", DEFAULT_DIR):
            words.append(f"--checkpoint_dir {shlex.quote(root[1:])}")
        return " ".join(words)
    return None


def describe_missing(path: str) -> str:
    """A sentence on a path of weights that does not exist: where it stops being right, and how to fetch it."""
    command = download_command(path)
    if command is None:
        return str(absent(path))
    is_near = storage.is_folder(path.rpartition("/")[0])
    note = " (no program here runs it yet, scripts.convert alone reads it)" if runs_nowhere(path) else ""
    return f"{absent(path) if is_near else f'{path} does not exist.'} Download it: {command}{note}"


def _only_file(model_type: str, root: str | None) -> str:
    model = MODEL_TYPES[model_type]
    return _below(root, model.repository(model.sizes[0]), model.file)


def _below(root: str | None, *parts: str) -> str:
    return storage.join(checkpoint_dir(root), *parts)


def _one_of(what: str, value: object, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what} is {value!r}; expected one of {', '.join(map(str, known))}.")
