# SPDX-License-Identifier: Apache-2.0
"""Video2World models: the numbers of the released ones and of the tiny one, and the choice of the one to run.

    config = get_cosmos_predict2_video2world_pipeline(model_size="2B", resolution="480", fps=10)
    choice = choose_model(VideoModel(dit_path="checkpoints/.../iter_000001000.pt"))

Numbers go by size, resolution and frame rate. The model to run is chosen by its name and size, by the run that the
weights come from, or by the weights: whatever no flag sets is as their card records it. Predict2.5 is trained and
sampled by flow times, reads Reason1 text through a projection, and may be given no frame at all.
"""

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_predict2.checkpoints.adapters import parse_lora
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.dit_weights import LATENT_CHANNELS
from cosmos_predict2.configs.base.config_wan2pt1 import SIZES as WAN_SIZES
from cosmos_predict2.configs.base.config_wan2pt1 import get_wan2pt1_pipeline
from cosmos_predict2.configs.base.sizes import TINY_SHIFT, Size
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.recorded_run import apply_card, place_tokenizer, read_and_warn
from cosmos_predict2.released import (
    NETWORKS,
    TINY_VIDEO2WORLD,
    checkpoint_dir,
    get_cosmos_predict2_video2world_checkpoint,
    get_cosmos_predict25_checkpoint,
    get_reason1_encoder_dir,
    get_t5_model_dir,
    get_tokenizer_checkpoint,
    released_but_absent,
)
from cosmos_predict2.released import PREDICT25 as PREDICT25_FILES
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.tokenizers.sizes import latent_frames, pixel_frames, size_of
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.assembly import apply_text
from cosmos_predict2.world_model.config import FlowConfig, SolverConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import Student, is_student
from cosmos_predict2.world_model.options import Model, SamplingOptions, VideoModel
from imaginaire.config import L
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

IMAGE, MULTIVIEW = "Text2Image", "multiview"  # kinds of networks, as `Family` has them
OTHER_PROGRAMS = {IMAGE: "text2image", MULTIVIEW: "multiview"}
STATE_T = {16: 24, 10: 16}  # latent frames by frame rate: 93 and 61 pixel frames


TINY_NET = dict(
    model_channels=128,
    num_blocks=4,
    num_heads=2,
    adaln_lora_dim=32,
    crossattn_emb_channels=64,
    rope_t_extrapolation_ratio=1.0,
    rope_h_extrapolation_ratio=1.0,
    rope_w_extrapolation_ratio=1.0,
    max_img_h=16,
    max_img_w=16,
    max_frames=16,
)
SIZES = {
    "2B": Size(NETWORKS["2B Video2World"], ("720", "480"), (16, 10), "16:9", "predict2_2b_720"),
    "14B": Size(NETWORKS["14B Video2World"], ("720", "480"), (16, 10), "16:9", "predict2_14b_720"),
    "tiny": Size(TINY_NET, ("48",), (10,), "1:1"),  # ours: learns the toy world on a CPU, in minutes
}


def get_cosmos_predict2_video2world_pipeline(
    *, model_size: str = "2B", resolution: str = "", fps: int = 0, natten: bool = False
) -> Video2WorldPipelineConfig:
    """The pipeline's config; an empty resolution and a rate of 0 mean the size's defaults (720 and 16)."""
    size = check_variant(model_size, resolution, fps, natten)
    is_tiny = model_size == "tiny"
    text_encoder = L(BytesEncoder)(num_tokens=64, width=64) if is_tiny else L(T5Encoder)(path=get_t5_model_dir())
    return pipeline_config(model_size, size, resolution, fps, natten=natten, text_encoder=text_encoder)


def pipeline_config(
    model_size: str, size: Size, resolution: str, fps: int, *, natten: bool = False, **own: Any
) -> Video2WorldPipelineConfig:
    """The pipeline's config of a variant that there is; ``own`` are the fields that the families do not share."""
    resolution, fps = resolution or size.resolutions[0], fps or size.rates[0]
    is_tiny = model_size == "tiny"
    backend = "natten" if natten else "auto" if is_tiny else "minimal_a2a"
    sac_config = dict(mode=size.sac_mode, every_n_blocks=1)
    if is_tiny:
        tokenizer = L(TinyTokenizer)()
    else:
        vae_pth = get_tokenizer_checkpoint(model_size=model_size)
        tokenizer = L(WanTokenizer)(
            vae_pth=vae_pth, chunk_duration=81, load_mean_std=False, temporal_window=16, tile_size="auto"
        )
    return Video2WorldPipelineConfig(
        net=L(Video2WorldDiT)(**{"atten_backend": backend, **size.net}, sac_config=sac_config),
        tokenizer=tokenizer,
        state_t=4 if is_tiny else STATE_T[fps],
        resolution=resolution,
        fps=fps,
        precision="float32" if is_tiny else "bfloat16",
        # The tiny models are trained near pure noise; they have seen little of levels below 1.
        timestamps=SolverConfig(t_min=1.0) if is_tiny else SolverConfig(),
        **own,
    )


def get_dit_path(*, model_size: str, resolution: str = "", fps: int = 0, natten: bool = False) -> str:
    """The path of a variant's weights: the released ones, or those of the tiny model, which come with the code."""
    size = check_variant(model_size, resolution, fps, natten)
    if model_size == "tiny":
        return TINY_VIDEO2WORLD
    return get_cosmos_predict2_video2world_checkpoint(
        model_size=model_size, resolution=resolution or size.resolutions[0], fps=fps or size.rates[0], natten=natten
    )


def check_variant(model_size: str, resolution: str = "", fps: int = 0, natten: bool = False) -> Size:
    """The size, or an error that lists the variants."""
    size = find_size(SIZES, "Predict2 Video2World", model_size, resolution, fps)
    if natten and (model_size == "tiny" or (resolution or size.resolutions[0]) != "720"):
        raise ConfigError("The natten weights exist for the 2B and 14B models at resolution 720 only.")
    return size


def find_size(sizes: Mapping[str, Size], family: str, model_size: str, resolution: str = "", fps: int = 0) -> Size:
    """The size of a family, or an error that lists its variants."""
    if model_size not in sizes:
        raise ConfigError(f"There is no {family} model of size '{model_size}'. There are: {', '.join(sizes)}.")
    size = sizes[model_size]
    if (resolution and resolution not in size.resolutions) or (fps and fps not in size.rates):
        asked = f"resolution {resolution or size.resolutions[0]} and {fps or size.rates[0]} frames per second"
        known = f"Resolutions: {', '.join(size.resolutions)}; rates: {', '.join(map(str, size.rates))}."
        raise ConfigError(f"The {model_size} model of {family} has no variant with {asked}. {known}")
    return size


# Predict2.5 -----------------------------------------------------------------------------------------------------------


PREDICT25 = "Predict2.5 Video2World"
RELEASES = ("pre-trained", "post-trained")
DISTILLED_MODEL, DISTILLED_NUM_STEPS = "2B/distilled", 4
NUM_FRAMES = 77  # of a video that is made with the released weights, by default; they were trained with 93
# A narrow text behind a projection, as in the released networks.
TINY_TEXT = dict(crossattn_emb_channels=32, crossattn_proj_in_channels=64, use_wan_fp32_strategy=True)
PREDICT25_SIZES = {
    "2B": Size(NETWORKS["2B Predict2.5"], ("720", "480"), (16,), "16:9", "predict2_2b_720"),
    "14B": Size(NETWORKS["14B Predict2.5"], ("720", "480"), (16,), "16:9", "predict2_14b_720"),
    "tiny": Size({**TINY_NET, **TINY_TEXT}, ("48",), (10,), "1:1"),
}


def get_cosmos_predict2p5_video2world_pipeline(
    *, model_size: str = "2B", resolution: str = "", fps: int = 0
) -> Video2WorldPipelineConfig:
    """The pipeline's config, for clips of 93 frames; an empty resolution and a rate of 0 mean 720 and 16."""
    size = find_size(PREDICT25_SIZES, PREDICT25, model_size, resolution, fps)
    return pipeline_config(
        model_size,
        size,
        resolution,
        fps,
        text_encoder=predict2p5_text_encoder(model_size),
        min_num_conditional_frames=0,
        max_num_conditional_frames=2,
        flow=FlowConfig(shift=TINY_SHIFT) if model_size == "tiny" else FlowConfig(),
    )


def predict2p5_text_encoder(model_size: str) -> Any:
    """The lazy node of the encoder whose text a size reads."""
    if model_size == "tiny":
        return L(BytesEncoder)(num_tokens=64, width=64)
    return L(Reason1Encoder)(path=get_reason1_encoder_dir())


def get_predict2p5_dit_path(*, model_size: str = "2B", release: str = "post-trained") -> str:
    """The path of the released weights of a size: "pre-trained" to train on from, "post-trained" to make videos."""
    find_size(PREDICT25_SIZES, PREDICT25, model_size)
    if model_size == "tiny":
        raise ConfigError(
            "The tiny Predict2.5 model comes without weights. Train it: python -m scripts.train --"
            " experiment=predict2p5_video2world_training_tiny_groot_gr1_480, and give its run folder as --dit_path."
        )
    if release not in RELEASES:
        raise ConfigError(f"There are no '{release}' weights of Predict2.5. There are: {', '.join(RELEASES)}.")
    return get_cosmos_predict25_checkpoint(f"{model_size}/{release}")


# Choice of the model to run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The model that the flags choose."""

    config: Any  # Video2WorldPipelineConfig, or one for actions, its action_transform set
    dit_path: str  # empty: random weights
    model_size: str
    card: ModelCard  # of the weights
    aspect_ratio: str = ""

    @property
    def num_steps(self) -> int:
        """Steps of sampling where none are asked for: those of a student, else of the released models."""
        return int(self.config.timestamps.nfe) if is_student(self.config) else SamplingOptions.num_steps

    @property
    def run(self) -> ModelCard | None:
        """The card, where it suffices to build the pipeline; else None."""
        return self.card if self.card.has_pipeline else None

    @property
    def video_size(self) -> tuple[int, int] | None:
        """(height, width) of the clips that the run was trained on."""
        return None if self.run is None else self.run.video_size

    @property
    def fps(self) -> float:
        """Frames per second of the clips that the run was trained on, or of the model's."""
        return float(self.config.fps if self.run is None else self.run.fps)


def choose_model(flags: VideoModel, input_path: str | None = None) -> Choice:
    """The Video2World pipeline's config and weights; of a run that recorded no frame rate, that of an input clip."""
    use_checkpoint_dir(flags)
    if flags.dit_path and (flags.model or flags.random_weights):
        other = f"--model {flags.model}" if flags.model else "--random_weights"
        raise ConfigError(f"{other} and --dit_path {flags.dit_path}: both name weights; give one of them.")
    card = ModelCard() if flags.model else _card_of(flags)
    if card.family is not None and (program := OTHER_PROGRAMS.get(card.family.kind)):
        raise ConfigError(f"--dit_path {flags.dit_path} is of a {card.family.kind} network: use examples/{program}.py.")
    is_predict2p5 = bool(flags.model) or card.is_predict2p5
    if card.problem and not card.has_pipeline:  # loading reports it; until then the path decides
        is_predict2p5 = is_predict2p5 or "Predict2.5" in card.path
    sizes, kind = PREDICT25_SIZES if is_predict2p5 else SIZES, ""
    if card.is_wan:
        channels = card.net.get("in_channels") or (card.family.input_channels if card.family else LATENT_CHANNELS)
        kind = "i2v" if channels > LATENT_CHANNELS else "t2v"
        sizes = WAN_SIZES[kind]
    trained = flags.model.partition("/")[0] if flags.model else _size_of(card, sizes)
    size = agreed_size(flags, trained)
    fps = int(flags.fps) if flags.fps and flags.fps in sizes[size].rates else 0
    variant: dict[str, Any] = dict(model_size=size, resolution=flags.resolution or "", fps=fps)
    if is_predict2p5:
        if flags.natten:
            raise ConfigError("--natten is a variant of Predict2; Predict2.5 has none.")
        config = get_cosmos_predict2p5_video2world_pipeline(**variant)
        config.state_t = config.state_t if size == "tiny" else latent_frames(NUM_FRAMES)
        if flags.model == DISTILLED_MODEL or flags.dit_path.endswith(PREDICT25_FILES[DISTILLED_MODEL][1]):
            _as_distilled(config)
        log.info("model: Predict2.5 %s", flags.model or size)
    elif card.is_wan:
        resolution = flags.resolution or sizes[size].resolutions[0]
        config = get_wan2pt1_pipeline(kind=kind, model_size=size, resolution=resolution)
        log.info("model: Wan2.1 %s %s", kind.upper(), size)
    else:
        variant["natten"] = flags.natten
        config = get_cosmos_predict2_video2world_pipeline(**variant)
    run = card if card.has_pipeline else None
    aspect_ratio = flags.aspect_ratio or sizes[size].aspect_ratio
    if run is not None:
        aspect_ratio = _follow(run, config, flags, aspect_ratio)
    elif flags.tokenizer_path:
        place_tokenizer(config, flags.tokenizer_path)
    for adapter in flags.lora if flags.dit_path else ():
        if (of_adapter := read_card(parse_lora(adapter)[0])).texts:  # adapters were trained last, so theirs counts
            apply_text(of_adapter, config)
    if flags.fps is not None:
        if run is None and not fps:
            log.warning("--fps %g is the rate of the mp4: the weights make %g frames per second", flags.fps, config.fps)
        config.fps = flags.fps
    elif run is not None and run.frame_rate is None and input_path and media.kind_of(input_path) == "video":
        config.fps = media.probe_video(input_path).fps
    if flags.num_frames is not None:
        if flags.num_frames < 5 or flags.num_frames % 4 != 1:
            own = pixel_frames(config.state_t)
            raise ConfigError(f"--num_frames {flags.num_frames}: 1 + 4k, 5 at least; this model makes {own}.")
        config.state_t = latent_frames(flags.num_frames)
    config.guardrail_config.checkpoint_dir = config.prompt_refiner_config.checkpoint_dir = checkpoint_dir()
    config.prompt_refiner_config.enabled = size != "tiny" and not is_predict2p5 and not card.is_wan  # as published
    return Choice(config, _video_weights(flags, run, is_predict2p5, variant), size, card, aspect_ratio)


def choose_of_kind(
    flags: VideoModel,
    kind: str,
    sizes: Mapping[str, Size],
    get_pipeline: Callable[..., Any],
    get_path: Callable[..., str],
) -> Choice:
    """The same of a kind of network that has a program of its own."""
    use_checkpoint_dir(flags)
    card: Any = read_and_warn(flags.dit_path) if flags.dit_path else ModelCard()
    if card.family is not None and card.family.kind != kind:
        found = f"--dit_path {flags.dit_path} is of a {card.family.kind} network"
        raise ConfigError(f"{found}: use examples/video2world.py.")
    size = agreed_size(flags, card.model_size(sizes) if card.has_pipeline else None)
    config, resolution = get_pipeline(model_size=size), sizes[size].resolutions[0]
    if card.has_pipeline:
        apply_card(card, config, tokenizer_path=flags.tokenizer_path)
        resolution = card.shape[0]
    elif flags.tokenizer_path:
        place_tokenizer(config, flags.tokenizer_path)
    config.resolution = flags.resolution or resolution
    config.guardrail_config.checkpoint_dir = checkpoint_dir()
    dit_path = flags.dit_path or ("" if flags.random_weights else get_path(model_size=size))
    return Choice(config, dit_path, size, card, flags.aspect_ratio or sizes[size].aspect_ratio)


def _as_distilled(config: Any) -> None:
    """Make a pipeline's config that of the released student of four steps. Its guidance is in the weights."""
    config.objective, config.timestamps.nfe = L(Student)(), DISTILLED_NUM_STEPS
    config.state_t = 24  # of its training
    config.flow.conditional_frame_timestep = 0.1  # next to no noise, a level of 1e-4
    config.net.use_wan_fp32_strategy = False


def use_checkpoint_dir(flags: Model) -> None:
    """Look for released weights where the flag says."""
    if flags.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(flags.checkpoint_dir)}"


def _card_of(flags: Model) -> ModelCard:
    """The card of the weights; where only adapters are named, of the first one that lies in a run."""
    if why := released_but_absent(flags.dit_path):
        raise ConfigError(f"--dit_path {flags.dit_path}: {why}.")
    if flags.dit_path:
        return read_and_warn(flags.dit_path)
    cards = (read_and_warn(parse_lora(adapter)[0]) for adapter in flags.lora)
    return next((card for card in cards if card.has_pipeline), ModelCard())


def _size_of(card: ModelCard, sizes: Mapping[str, Any]) -> str | None:
    """The name of the size of weights, by their record or their shapes; None where they have another, or none."""
    if card.has_pipeline:
        return card.model_size(sizes)
    found = card.family and (card.family.width, card.family.num_blocks)
    return next((n for n, size in sizes.items() if (size.net["model_channels"], size.net["num_blocks"]) == found), None)


def agreed_size(flags: Model, trained: str | None) -> str:
    """The size of the flag, which must be that of the weights."""
    size = flags.model_size or trained or "2B"
    if trained not in (None, size):
        raise ConfigError(f"--model_size {size}, but the weights are of a {trained} model. Leave --model_size out.")
    return size


def _video_weights(flags: VideoModel, run: ModelCard | None, is_predict2p5: bool, variant: Mapping[str, Any]) -> str:
    """The path of the weights; empty for random ones."""
    if flags.dit_path or flags.random_weights:
        return flags.dit_path
    if run is not None and run.base and os.path.exists(run.base):
        return run.base
    if flags.model:
        return get_cosmos_predict25_checkpoint(flags.model)
    if is_predict2p5:
        return get_predict2p5_dit_path(model_size=variant["model_size"], release="pre-trained")
    return get_dit_path(**variant)


def _follow(run: ModelCard, config: Any, flags: VideoModel, aspect_ratio: str) -> str:
    """Make the config that of the run but for the flags, with a warning where they differ; gives the aspect ratio."""
    state_t, fps = config.state_t, config.fps
    resolution, ratio = run.shape
    apply_card(run, config, tokenizer_path=flags.tokenizer_path)
    log.info("run: %s: %s", run.source, run)
    for flag, wanted, trained in (
        ("--resolution", flags.resolution, resolution),
        ("--aspect_ratio", flags.aspect_ratio, ratio),
        ("--fps", flags.fps and f"{flags.fps:g}", f"{run.fps:g}"),
        ("--num_frames", flags.num_frames, pixel_frames(run.state_t)),
    ):
        if None not in (wanted, trained) and wanted != trained:
            log.warning("%s %s, but %s was trained at %s: %s", flag, wanted, run.source, trained, run)
    if fps == flags.fps != run.fps:  # the length of the released model of this rate
        config.state_t = state_t
    config.resolution = flags.resolution or resolution
    if ratio is None:
        warn_of_size(run, size_of(config.resolution, aspect_ratio))
        return aspect_ratio
    return flags.aspect_ratio or ratio


def warn_of_size(run: ModelCard, size: tuple[int, int]) -> None:
    """Warn of frames of another (height, width) than the run's clips, where those are recorded."""
    if run.video_size is None:
        return
    trained = (len(run.views) * run.video_size[0], run.video_size[1])
    if trained != tuple(size):
        log.warning("frames of %d,%d (height, width), but %s was trained at %d,%d", *size, run.source, *trained)
