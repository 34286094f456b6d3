# SPDX-License-Identifier: Apache-2.0
"""Video2World at inference: a picture or the end of a clip, and a prompt, become a video.

    pipe = Video2WorldPipeline.from_config(get_cosmos_predict2_video2world_pipeline(model_size="2B"), dit_path="...")
    video = pipe(input_path="image.jpg", prompt="The robot picks up the apple.")     # [1, 3, F, H, W] in [-1, 1]

The parts are assembled here: guardrail and refiner, text encoder, tokenizer, network, sampler. What a part does is in
its own module.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cosmos_predict2.auxiliary.guardrail.runner import GuardrailConfig, GuardrailRunner, create_guardrail, require_safe
from cosmos_predict2.auxiliary.prompt_refiner import PromptRefinerConfig, create_prompt_refiner
from cosmos_predict2.auxiliary.status import status_line
from cosmos_predict2.checkpoints import apply_lora, parse_lora
from cosmos_predict2.checkpoints.released import download_command
from cosmos_predict2.conditioner import NEGATIVE_TEXT_KEY, TEXT_KEY, Condition, Conditioner, ConditionerConfig
from cosmos_predict2.data.clips import CROPS
from cosmos_predict2.data.sizes import latent_frames, pixel_frames, size_of
from cosmos_predict2.interfaces import PromptRefiner, TextEncoder, VideoTokenizer
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.parallelize import ContextParallel
from cosmos_predict2.pipelines.assembly import build_net
from cosmos_predict2.pipelines.denoiser import Denoiser
from cosmos_predict2.pipelines.device_memory import clips_at_once
from cosmos_predict2.pipelines.flow import FlowConfig
from cosmos_predict2.pipelines.inputs import read_input
from cosmos_predict2.pipelines.sampling import Sampler
from cosmos_predict2.text.trained_text import NO_TEXT, other_text, with_tokens, with_trained_text
from imaginaire import lazy_config
from imaginaire.config import Section, above, at_least, one_of
from imaginaire.ema import check_rate
from imaginaire.errors import ConfigError
from imaginaire.names import target_of

log = logging.getLogger(__name__)

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@attrs.define(kw_only=True, slots=False)
class EMAConfig(Section):
    """The power-function average of the weights, kept in training."""

    enabled: bool = False
    rate: float = attrs.field(default=0.1, validator=check_rate)
    iteration_shift: int = attrs.field(default=0, validator=at_least(0))


@attrs.define(kw_only=True, slots=False)
class SolverConfig(Section):
    """Noise levels of sampling: from t_max down to t_min, evenly spaced in their 1/order-th powers."""

    nfe: int = attrs.field(default=35, validator=at_least(1))
    t_min: float = attrs.field(default=0.002, validator=above(0))
    t_max: float = attrs.field(default=80.0, validator=above(0))
    order: float = attrs.field(default=7.0, validator=above(0))

    def __attrs_post_init__(self) -> None:
        levels = (self.t_min, self.t_max)
        if all(isinstance(level, int | float) for level in levels) and self.t_min >= self.t_max:
            raise ConfigError(f"t_min={self.t_min}, but it must be below t_max={self.t_max}.")


@attrs.define(kw_only=True, slots=False)
class Video2WorldPipelineConfig(Section):
    net: Any = None  # lazy node of the network
    tokenizer: Any = None  # lazy node of a VideoTokenizer
    text_encoder: Any = None  # lazy node of a TextEncoder, used at inference only
    # What the weights were trained with, as their run recorded it; empty and null: unknown.
    text_encoder_name: str = ""
    num_text_tokens: int | None = None  # that the network reads of a text: longer ones are cut, shorter ones padded
    conditioner: ConditionerConfig = attrs.field(factory=ConditionerConfig)
    conditioning_strategy: str = attrs.field(
        default="frame_replace", validator=one_of("frame_replace", "channel_concat")
    )
    min_num_conditional_frames: int = attrs.field(default=1, validator=at_least(0))  # latent frames, in training
    max_num_conditional_frames: int = attrs.field(default=2, validator=at_least(0))
    # The noise level that the network is told for given frames.
    sigma_conditional: float = attrs.field(default=1e-4, validator=at_least(0))
    sigma_data: float = attrs.field(default=1.0, validator=above(0))
    state_ch: int = attrs.field(default=16, validator=at_least(1))
    state_t: int = attrs.field(default=24, validator=at_least(1))  # latent frames
    resolution: str = "720"
    # How an input of another shape is brought to size; of a run's weights, as its clips were.
    input_crop: str = attrs.field(default="center", validator=one_of(*CROPS))
    fps: float = attrs.field(default=16, validator=above(0))
    precision: str = attrs.field(default="bfloat16", validator=one_of(*PRECISIONS))
    adjust_video_noise: bool = True  # training noise of videos times sqrt(state_t)
    # Given: this factor in place of sqrt(state_t).
    video_noise_factor: float | None = attrs.field(default=None, validator=above(0))
    resize_online: bool = True  # cut a longer training clip to the frames of state_t
    rectified_flow_t_scaling_factor: float = attrs.field(default=1.0, validator=above(0))
    rectified_flow_loss_weight_uniform: bool = True
    timestamps: SolverConfig = attrs.field(factory=SolverConfig)
    flow: FlowConfig | None = None  # of a Predict2.5 network; None: it is asked by noise levels
    ema: EMAConfig = attrs.field(factory=EMAConfig)
    guardrail_config: GuardrailConfig = attrs.field(factory=GuardrailConfig)
    prompt_refiner_config: PromptRefinerConfig = attrs.field(factory=PromptRefinerConfig)
    input_video_key: str = "video"
    input_image_key: str = "images"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def denoiser(self, net: DiT) -> Denoiser:
        """A Predict2.5 network's is told of given frames as in its training, also where it is asked by noise levels."""
        flow = self.flow
        return Denoiser(
            net,
            sigma_data=self.sigma_data,
            sigma_conditional=self.sigma_conditional if flow is None else flow.sigma_conditional,
            conditioning_strategy=self.conditioning_strategy,
            t_scaling_factor=self.rectified_flow_t_scaling_factor if flow is None else flow.t_scaling_factor,
        )


class Video2WorldPipeline:
    """The assembled parts; call it, or `generate` with frames and embeddings at hand."""

    def __init__(
        self,
        config: Video2WorldPipelineConfig,
        net: DiT,
        tokenizer: VideoTokenizer,
        text_encoder: TextEncoder | None = None,
        guardrail: GuardrailRunner | None = None,
        refiner: PromptRefiner | None = None,
        *,
        device: torch.device | str = "cpu",
        offload_text_encoder: bool = False,
        offload_tokenizer: bool = False,
        context: ContextParallel | None = None,
    ) -> None:
        """``context`` spreads the latent frames over its group, all of whose ranks then generate the same."""
        self.config = config
        self.dit = net
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.guardrail = guardrail
        self.refiner = refiner
        self.device = torch.device(device)
        self.conditioner = Conditioner(config.conditioner)
        self.context = context or ContextParallel(net, None)
        self.sampler = Sampler(config, net, self.device, self.context)
        self.denoiser = self.sampler.denoiser
        self._offload_text_encoder = offload_text_encoder
        self._offload_tokenizer = offload_tokenizer
        self._check_text()

    @classmethod
    def from_config(
        cls,
        config: Video2WorldPipelineConfig,
        dit_path: str = "",
        use_text_encoder: bool = True,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype | None = None,
        load_ema_to_reg: bool = False,
        load_prompt_refiner: bool = False,
        *,
        lora: Sequence[str] = (),
        offload_text_encoder: bool = False,
        downcast_text_encoder: bool = False,
        offload_tokenizer: bool = False,
        group: ProcessGroup | None = None,
        is_follower: bool = False,
    ) -> "Video2WorldPipeline":
        """The pipeline of a config with its weights.

        ``dit_path`` may be anything that holds weights of the network; without one they are random, and the log says
        so. Of weights in a run's folder, prompts are encoded as that run's captions were. The device is a GPU where
        there is one, the precision that of the config (float32 on a CPU); ``downcast_text_encoder`` loads the text
        encoder in bfloat16, where it has weights. With a ``group``, videos are generated by its processes together; a
        follower has the network alone.
        """
        config = with_trained_text(config, [dit_path, *(parse_lora(adapter)[0] for adapter in lora)])
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch_dtype or (config.dtype if device.type != "cpu" else torch.float32)
        guardrail = create_guardrail(config.guardrail_config)
        refiner = create_prompt_refiner(config.prompt_refiner_config, is_explicit=load_prompt_refiner)
        parts = config.guardrail_config, config.prompt_refiner_config, guardrail, refiner
        log.info("%s", status_line(*parts, is_released=download_command(dit_path) is not None))
        net = build_net(
            config.net, device=device, dtype=dtype, path=dit_path, which="net_ema" if load_ema_to_reg else "auto"
        )
        if lora:
            log.info("lora: %s merged into %d layers", ", ".join(lora), len(apply_lora(net, lora, base=dit_path)))
        context = ContextParallel(net, group)
        if is_follower:
            return cls(config, net, cast(VideoTokenizer, None), device=device, context=context)
        tokenizer = lazy_config.instantiate(config.tokenizer)
        tokenizer.to("cpu" if offload_tokenizer else device)
        text_encoder = None
        if use_text_encoder and config.text_encoder is not None:
            has_dtype = "dtype" in inspect.signature(target_of(config.text_encoder)).parameters
            dtype_of_text = {"dtype": "bfloat16"} if downcast_text_encoder and has_dtype else {}
            text_encoder = lazy_config.instantiate(config.text_encoder, **dtype_of_text)
            text_encoder.to("cpu" if offload_text_encoder else device)
        return cls(
            config,
            net,
            tokenizer,
            text_encoder,
            guardrail,
            refiner,
            device=device,
            offload_text_encoder=offload_text_encoder,
            offload_tokenizer=offload_tokenizer,
            context=context,
        )

    # --- one request

    def __call__(
        self,
        input_path: str,
        prompt: str,
        negative_prompt: str | None = None,
        aspect_ratio: str = "16:9",
        num_conditional_frames: int = 1,
        guidance: float = 7.0,
        num_sampling_step: int = 35,
        seed: int = 0,
        use_cuda_graphs: bool = False,
        return_prompt: bool = False,
        *,
        solver: str | None = None,
        embeddings: Mapping[str, Tensor] | None = None,
        start_frame_idx: int | None = None,
        progress: bool = False,
    ) -> Any:
        """[1, 3, F, H, W] in [-1, 1]; with ``return_prompt`` also the prompt as it was used.

        ``num_conditional_frames`` counts pixel frames: 1, or 5 of a clip; of networks that know it, 0. They are the
        last of a clip, or those from ``start_frame_idx`` on. Guidance leads
        away from the negative prompt, or without one from what the network makes of no text. ``embeddings`` gives the
        prompts' embeddings by text, so that no encoder is needed.
        """
        refined = self.checked_prompt(prompt, input_path)
        size = size_of(self.config.resolution, aspect_ratio)
        frames = torch.zeros(3, 0, *size, dtype=torch.uint8)
        if num_conditional_frames:
            rate, crop = self.config.fps, self.config.input_crop
            frames = read_input(input_path, num_conditional_frames, size, start_frame_idx, fps=rate, crop=crop)
        text, *negative = self.encode_text([refined, negative_prompt] if negative_prompt else [refined], embeddings)
        video = self.generate(
            frames[None],
            text[None],
            negative[0][None] if negative else None,
            guidance=guidance,
            num_steps=num_sampling_step,
            seed=seed,
            solver=solver,
            use_cuda_graphs=use_cuda_graphs,
            progress=progress,
        )
        return (video, refined) if return_prompt else video

    def checked_prompt(self, prompt: str, media_path: str) -> str:
        """The prompt, refined where a refiner is built in; raises BlockedError where a guardrail says so."""
        for stage in ("prompt", "refined prompt"):
            if self.guardrail is not None:
                require_safe(self.guardrail, prompt, stage)
            if self.refiner is None or stage == "refined prompt":
                break
            prompt = self.refiner.refine(prompt, media_path)
        return prompt

    def encode_text(self, prompts: Sequence[str], embeddings: Mapping[str, Tensor] | None = None) -> Tensor:
        """Embeddings [B, S, E]: those given by text, the rest by the encoder; each distinct prompt once."""
        known = dict(embeddings or {})
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if self.config.text_encoder_name == NO_TEXT:
            log.warning("prompt: all clips of the training had one and the same text, so that no prompt says anything")
        if missing:
            if self.text_encoder is None:
                raise ConfigError(
                    f"There is no text encoder and no embedding of {missing[0][:60]!r}{self._trained_by()}. Write one"
                    " with 'python -m scripts.encode_prompts' and give it with --prompt_embeddings FILE."
                )
            self.text_encoder.to(self.device)
            known |= dict(zip(missing, self.text_encoder.encode(missing)))
            if self._offload_text_encoder:
                self.text_encoder.to("cpu")
        return torch.stack([known[prompt].to(self.device) for prompt in prompts])

    @torch.no_grad()
    def generate(
        self,
        frames_B_C_F_H_W: Tensor,
        text_B_S_E: Tensor,
        negative_text_B_S_E: Tensor | None = None,
        *,
        guidance: float = 7.0,
        num_steps: int = 35,
        seed: int = 0,
        solver: str | None = None,
        use_cuda_graphs: bool = False,
        progress: bool = False,
        on_step: Callable[[int, Any], None] | None = None,
    ) -> Tensor:
        """Videos [B, 3, F, H, W] in [-1, 1] that begin with the given frames, uint8, 1 + 4k of them.

        A network that was trained without given frames, too, takes none of them: [B, 3, 0, H, W]. Without a negative
        text, the unconditional half of the guidance has a text of zeros.
        """
        num_tokens = self.config.num_text_tokens
        batch = {TEXT_KEY: with_tokens(text_B_S_E, num_tokens)}
        if negative_text_B_S_E is not None:
            batch[NEGATIVE_TEXT_KEY] = with_tokens(negative_text_B_S_E, num_tokens)
        size, _, num_given, height, width = frames_B_C_F_H_W.shape
        batch["padding_mask"] = torch.zeros(size, 1, height, width, device=self.device)
        batch["fps"] = torch.full((size,), float(self.config.fps), device=self.device)
        latent = self.generate_latents(
            batch,
            self._given_latents(frames_B_C_F_H_W),
            latent_frames(num_given) if num_given else 0,
            guidance=guidance,
            num_steps=num_steps,
            seed=seed,
            solver=solver,
            use_cuda_graphs=use_cuda_graphs,
            progress=progress,
            on_step=on_step,
        )
        return self.decode(latent)

    @torch.no_grad()
    def generate_latents(
        self,
        batch: Mapping[str, Tensor],
        given_B_C_T_H_W: Tensor,
        num_given: int,
        *,
        guidance: float = 7.0,
        num_steps: int = 35,
        seed: int | Sequence[int] = 0,
        solver: str | None = None,
        use_cuda_graphs: bool = False,
        progress: bool = False,
        on_step: Callable[[int, Any], None] | None = None,
    ) -> Tensor:
        """Latents [B, C, T, H, W] that begin with the first ``num_given`` latent frames of ``given_B_C_T_H_W``.

        ``batch`` has what the conditioner takes: text embeddings, fps, padding mask, and maybe a negative text. One
        seed is that of the whole batch's noise; with one for each sample, a sample does not depend on the others.
        The solver is "2ab", or of Predict2.5 networks (``config.flow``) "unipc"; these may be sampled by all of them.
        """
        given = given_B_C_T_H_W
        num_B = torch.full((given.shape[0],), num_given, device=self.device)
        on_device = {key: value.to(self.device) for key, value in batch.items()}
        conditional, unconditional = (
            condition.with_given_frames(given, num_B) for condition in self.conditioner.guidance_pair(on_device)
        )
        return self.sample_latents(
            conditional,
            unconditional,
            initial_noise(tuple(given.shape), seed).to(given),
            guidance=guidance,
            num_steps=num_steps,
            solver=solver,
            use_cuda_graphs=use_cuda_graphs,
            progress=progress,
            on_step=on_step,
        )

    @torch.no_grad()
    def sample_latents(
        self,
        conditional: Condition,
        unconditional: Condition,
        noise_B_C_T_H_W: Tensor,
        *,
        guidance: float = 7.0,
        num_steps: int = 35,
        solver: str | None = None,
        use_cuda_graphs: bool = False,
        progress: bool = False,
        on_step: Callable[[int, Any], None] | None = None,
    ) -> Tensor:
        """Latents [B, C, T, H, W] out of standard normal noise, all of whole clips; each rank may see its own frames.

        Where both conditions are the same, the network is asked once a step.
        """
        return self.sampler.sample(
            conditional,
            unconditional,
            noise_B_C_T_H_W,
            guidance=guidance,
            num_steps=num_steps,
            solver=solver,
            use_cuda_graphs=use_cuda_graphs,
            progress=progress,
            on_step=on_step,
        )

    def _given_latents(self, frames_B_C_F_H_W: Tensor, num_latent_frames: int | None = None) -> Tensor:
        """Latents of the whole clip in which only the given frames are filled: the rest is never looked at.

        The frames are uint8, or already in [-1, 1]; the clip is of ``state_t`` latent frames unless a number is given.
        """
        config, count = self.config, frames_B_C_F_H_W.shape[2]
        num_latent_frames = num_latent_frames or config.state_t
        total = pixel_frames(num_latent_frames)
        work_dtype = torch.promote_types(self.dit.dtype, torch.float32)
        if count == 0 and config.min_num_conditional_frames == 0:
            size, _, _, height, width = frames_B_C_F_H_W.shape
            factor = self.tokenizer.spatial_compression_factor
            shape = [size, self.tokenizer.latent_ch, num_latent_frames, height // factor, width // factor]
            return torch.zeros(shape, device=self.device, dtype=work_dtype)
        if not 0 < count < total or count % 4 != 1:
            raise ConfigError(
                f"{count} frames are given to condition on, but it must be 1, 5, ... frames and fewer than the"
                f" {total} of the video."
            )
        latent = self.encode(frames_B_C_F_H_W)
        shape = list(latent.shape)
        shape[2] = num_latent_frames
        given = latent.new_zeros(shape)
        given[:, :, : latent.shape[2]] = latent
        return given

    @torch.no_grad()
    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents of clips, uint8 or in [-1, 1], as the network sees them; on a GPU as many at a time as fit."""
        self.tokenizer.to(self.device)
        work_dtype = torch.promote_types(self.dit.dtype, torch.float32)
        batch, _, *shape = video_B_C_F_H_W.shape
        latents = []
        for part in video_B_C_F_H_W.split(batch if self.device.type == "cpu" else self.clips_at_once(*shape)):
            pixels = part.to(self.device, work_dtype)
            if not part.is_floating_point():
                pixels = pixels / 127.5 - 1
            latents.append(self.tokenizer.encode(pixels).to(work_dtype) * self.config.sigma_data)
        if self._offload_tokenizer:
            self.tokenizer.to("cpu")
        return latents[0] if len(latents) == 1 else torch.cat(latents)

    @torch.no_grad()
    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """Videos [B, 3, F, H, W] in [-1, 1]."""
        self.tokenizer.to(self.device)
        video = self.tokenizer.decode(latent_B_C_T_H_W / self.config.sigma_data)
        if self._offload_tokenizer:
            self.tokenizer.to("cpu")
        return video.clamp(-1, 1)

    def clips_at_once(self, num_frames: int, height: int, width: int) -> int:
        """How many clips of so many pixel frames the tokenizer takes together, for the memory that is free."""
        has_graphs = self.sampler.has_graphs
        return clips_at_once(self.device, self.tokenizer.dtype, num_frames, height, width, has_graphs=has_graphs)

    def _check_text(self) -> None:
        """Raise for a text encoder whose embeddings the network was not trained with."""
        width, encoder = self.dit.text_channels, self.text_encoder
        if encoder is None:
            return
        if encoder.width != width:
            raise ConfigError(
                f"The text encoder {encoder.name} gives embeddings of width {encoder.width}, but the network takes"
                f" {width}. Choose the encoder that it was trained with{self._trained_by(': ')}."
            )
        if (problem := other_text(self.config.text_encoder_name, encoder.name)) is not None:
            raise ConfigError(f"The text encoder {problem}")

    def _trained_by(self, before: str = ", and the network was trained with texts by ") -> str:
        name = self.config.text_encoder_name
        return f"{before}{name}" if name else ""


def initial_noise(shape: tuple[int, ...], seed: int | Sequence[int]) -> Tensor:
    """Standard normal float32 from NumPy's RandomState: the same on every device and number of processes.

    With a seed for each sample, each is what a batch of it alone gets.
    """
    if not isinstance(seed, int):
        if len(seed) != shape[0]:
            raise ConfigError(f"There are {len(seed)} seeds for a batch of {shape[0]}: one for each sample.")
        return torch.cat([initial_noise((1, *shape[1:]), int(one)) for one in seed])
    return torch.from_numpy(numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32))


def to_uint8(video: Tensor) -> Tensor:
    """[-1, 1] to 0 ... 255, rounded."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
