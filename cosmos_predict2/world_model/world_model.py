# SPDX-License-Identifier: Apache-2.0
"""The assembled world model: network, tokenizer, conditioning, text, objective, denoiser, sampler, parallel context.

    world = build_world_model(config, dtype=torch.bfloat16, device=device).load(dit_path)
    video = world.generate(frames, text, seed=0, options=SamplingOptions(guidance=7.0))

Training, inference, callbacks and evaluation hold this object; none of them assembles it again.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy
import torch
from einops import rearrange
from torch import Tensor

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.conditioner import (
    GIVEN_VIEW_KEY,
    IMAGE_KEY,
    NEGATIVE_TEXT_KEY,
    TEXT_KEY,
    Condition,
    Conditioner,
    first_frames_as_channels,
)
from cosmos_predict2.diffusion.rectified_flow import add_noise
from cosmos_predict2.diffusion.solvers import Step, guide, sample
from cosmos_predict2.interfaces import TextEncoder, TokenizerDefaults, VideoTokenizer
from cosmos_predict2.nn.blocks import KeysValues
from cosmos_predict2.nn.dit import DiT, Prepared
from cosmos_predict2.text.trained_text import NO_TEXT, other_text, with_tokens
from cosmos_predict2.tokenizers.each_view import EachView
from cosmos_predict2.tokenizers.sizes import latent_frame, latent_frames, pixel_frames
from cosmos_predict2.tokenizers.wan_vae import LIVE_FRAMES
from cosmos_predict2.world_model.assembly import network_of, other_parts, settle_attention
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig, WanPipelineConfig
from cosmos_predict2.world_model.cuda_graph import GraphedNetwork
from cosmos_predict2.world_model.objectives import Predict, SamplingPath, Student, chosen_solver, objective_of
from cosmos_predict2.world_model.options import GUIDED, UNGUIDED, SamplingOptions
from cosmos_predict2.world_model.parallelize import ContextParallel, compile_blocks
from imaginaire import distributed
from imaginaire.buildable import completed, target_of
from imaginaire.config import lazy_config
from imaginaire.distributed.parallel import is_fsdp
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.log import Progress
from imaginaire.training.memory import free_memory

log = logging.getLogger(__name__)

OnStep = Callable[[int, Step], None]


def build_world_model(
    config: Video2WorldPipelineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    adapt: Callable[[DiT], None] | None = None,
    with_tokenizer: bool = True,
    with_text_encoder: bool = False,
    downcast_text_encoder: bool | str = False,
    offload_tokenizer: bool = False,
    offload_text_encoder: bool = False,
    kind: "type[WorldModel] | None" = None,
) -> "WorldModel":
    """The world model of a config, its network on the meta device; ``adapt`` puts adapters into that network.

    Offloaded parts stay on the host between calls. ``downcast_text_encoder``, for an encoder that
    has weights: True for bfloat16, or "int8".
    """
    net = network_of(config.net).to(dtype)
    if adapt is not None:
        adapt(net)
    tokenizer = tokenizer_of(config.tokenizer) if with_tokenizer else None
    text_encoder = None
    if with_text_encoder and config.text_encoder is not None:
        has_dtype = "dtype" in inspect.signature(target_of(config.text_encoder)).parameters
        downcast = "bfloat16" if downcast_text_encoder is True else downcast_text_encoder
        dtype_of_text = {"dtype": downcast} if downcast and has_dtype else {}
        text_encoder = lazy_config.instantiate(config.text_encoder, **dtype_of_text)
    return (kind or WorldModel)(
        config,
        net,
        tokenizer,
        text_encoder,
        device=device,
        offload_tokenizer=offload_tokenizer,
        offload_text_encoder=offload_text_encoder,
    )


def tokenizer_of(node: Any) -> VideoTokenizer:
    """The tokenizer of a lazy node, for programs that need no more of the model."""
    tokenizer: VideoTokenizer = lazy_config.instantiate(node)
    return tokenizer


class WorldModel:
    """The assembled parts. Not a module: what is trained and saved is ``net`` alone."""

    def __init__(
        self,
        config: Video2WorldPipelineConfig,
        net: DiT,
        tokenizer: VideoTokenizer | None = None,
        text_encoder: TextEncoder | None = None,
        *,
        device: torch.device | str = "cpu",
        offload_tokenizer: bool = False,
        offload_text_encoder: bool = False,
    ) -> None:
        self.config = config
        self.net = net
        # None on the followers of a context-parallel group
        self.tokenizer = completed(cast(VideoTokenizer, tokenizer), TokenizerDefaults)
        if tokenizer is not None and net.num_views > 1:
            self.tokenizer = EachView(self.tokenizer, net.num_views)
        self.text_encoder = text_encoder
        self.device = torch.device(device)
        self.objective = objective_of(config)
        if isinstance(self.objective, Student) and self.objective.causal:
            net.be_causal()
        self.denoiser = self.objective.denoiser(net)
        self.conditioner = Conditioner(config.conditioner)
        self.context = ContextParallel(net, None)
        self.offload_tokenizer = offload_tokenizer
        self._offload_text_encoder = offload_text_encoder
        self._graphed: GraphedNetwork | None = None
        self._is_compiled = False
        self._image_encoder: Any = None  # built at the first picture
        self._check_text_width()

    # --- weights

    def load(
        self, path: str = "", which: str = "auto", *, is_baseline: bool = False, lora_alpha: float | None = None
    ) -> "WorldModel":
        """Give the network memory on the device and weights from ``path``, or random ones, for inference.

        Weights that were trained with other parts than this model's are an error, but as a baseline.
        """
        if path and not is_baseline:
            for problem in other_parts(read_card(path), self.config, self.tokenizer):
                raise CheckpointError(problem)
        net = self.net.to_empty(device=self.device)
        net.reset_buffers()
        settle_attention(net, self.device, net.dtype)
        if path:
            report = load_dit(net, path, which, lora_alpha=lora_alpha)
            log.info("weights: %s (%s%s)", path, "averaged, net_ema.; " if which == "net_ema" else "", report.summary())
        else:
            net.init_weights(torch.Generator(self.device).manual_seed(0))
            level = logging.INFO if is_baseline else logging.WARNING
            log.log(level, "weights: random, as asked for: what is generated is noise")
        net.eval().requires_grad_(False)
        return self

    def move(self, device: torch.device | str) -> None:
        """Bring network and tokenizer to a device, such as to the host while others need the GPU; what was captured
        is forgotten. What runs, runs where the model was built for: bring it back before."""
        self.net.to(device)
        if self.tokenizer is not None:
            self.tokenizer.to(device)
        self._graphed = None

    # --- text

    def encode_text(self, prompts: Sequence[str], embeddings: Mapping[str, Tensor] | None = None) -> Tensor:
        """Embeddings [B, S, E]: of ``embeddings``, by text, the rest by the encoder; each distinct prompt once."""
        known = dict(embeddings or {})
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if self.config.text_encoder_name == NO_TEXT:
            log.warning("prompt: all clips of the training had one and the same text, so that no prompt has an effect")
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

    def _with_tokens(self, text_B_S_E: Tensor) -> Tensor:
        """A text as long as in training, that of each view."""
        of_views = text_B_S_E.unflatten(1, (self.net.num_views, -1)).flatten(0, 1)
        return with_tokens(of_views, self.config.num_text_tokens).unflatten(0, (len(text_B_S_E), -1)).flatten(1, 2)

    def _check_text_width(self) -> None:
        """Raise for a text encoder whose embeddings the network was not trained with."""
        width, encoder = self.net.text_channels, self.text_encoder
        if encoder is None:
            return
        if encoder.width != width:
            raise ConfigError(
                f"The text encoder {encoder.name} gives embeddings of width {encoder.width}, but the network takes"
                f" {width}{self._trained_by()}."
            )
        if (problem := other_text(self.config.text_encoder_name, encoder.name)) is not None:
            raise ConfigError(f"The text encoder {problem}")

    def _trained_by(self) -> str:
        name = self.config.text_encoder_name
        return f", and the network was trained with texts by {name}" if name else ""

    # --- pixels and latents

    @torch.no_grad()
    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents of clips, uint8 or in [-1, 1], as the network sees them; on a GPU as many at a time as fit."""
        self.tokenizer.to(self.device)
        work_dtype = torch.promote_types(self.net.dtype, torch.float32)
        batch, _, *shape = video_B_C_F_H_W.shape
        latents = []
        for part in video_B_C_F_H_W.split(batch if self.device.type == "cpu" else self.clips_at_once(*shape)):
            pixels = part.to(self.device, work_dtype)
            if not part.is_floating_point():
                pixels = pixels / 127.5 - 1
            latents.append(self.tokenizer.encode(pixels).to(work_dtype) * self.config.sigma_data)
        if self.offload_tokenizer:
            self.tokenizer.to("cpu")
        return torch.cat(latents)

    @torch.no_grad()
    def decode(self, latent_B_C_T_H_W: Tensor, frames: range | None = None) -> Tensor:
        """Videos [B, 3, F, H, W] in [-1, 1], of all frames or of some that follow each other.

        A causal tokenizer need not see what comes behind them, nor one that has `decode_groups` what lies before.
        """
        self.tokenizer.to(self.device)
        latent, first = latent_B_C_T_H_W / self.config.sigma_data, 0
        if frames is not None and self.tokenizer.is_causal:
            latent = latent[:, :, : latent_frame(frames[-1]) + 1]
        if frames is not None and self.tokenizer.decode_groups is not None and frames[0] > 0:
            number = latent_frame(frames[0])
            video, first = self.tokenizer.decode_groups(latent[:, :, number:]), pixel_frames(number)
        else:
            video = self.tokenizer.decode(latent)
        if frames is not None:
            video = video[:, :, frames[0] - first : frames[-1] + 1 - first]
        if self.offload_tokenizer:
            self.tokenizer.to("cpu")
        return video.clamp(-1, 1)

    def clips_at_once(self, num_frames: int, height: int, width: int) -> int:
        """The number of clips of so many pixel frames that the tokenizer encodes or decodes together."""
        if self.device.type != "cuda":
            return CLIPS_AT_ONCE
        pixels = height * width
        needed = pixels * VALUES_PER_PIXEL * torch.finfo(self.tokenizer.dtype).bits // 8
        needed += VALUES_PER_COLOUR * 3 * num_frames * pixels * 4
        free = free_memory(self.device, has_graphs=self._graphed is not None)
        return max(1, int(SHARE_OF_TOKENIZER * free / needed))

    def first_frames(self, frames_B_C_F_H_W: Tensor, num_frames: int) -> dict[str, Tensor]:
        """The first frames of clips, uint8 or in [-1, 1], as a batch has them for a network of image to video."""
        frames = frames_B_C_F_H_W.to(self.device)
        frames = frames if frames.is_floating_point() else frames.float() / 127.5 - 1
        return first_frames_as_channels(self.encode, frames, num_frames) | self.image_features(frames[:, :, 0])

    def image_features(self, picture_B_C_H_W: Tensor) -> dict[str, Tensor]:
        """Features of a picture in [-1, 1], for a network that reads them."""
        if self.net.image_channels is None:
            return {}
        if self._image_encoder is None:
            encoder = self.config.image_encoder if isinstance(self.config, WanPipelineConfig) else None
            if encoder is None:
                raise ConfigError("pipe_config.image_encoder is null, but the network reads features of a picture.")
            self._image_encoder = lazy_config.instantiate(encoder)
        self._image_encoder.to(self.device)
        return {IMAGE_KEY: self._image_encoder.encode(picture_B_C_H_W)}

    def given_latents(self, frames_B_C_F_H_W: Tensor, num_latent_frames: int | None = None) -> Tensor:
        """Latents of the whole clip in which only the conditioning frames, uint8 or in [-1, 1], are filled."""
        size, _, count, height, width = frames_B_C_F_H_W.shape
        num_latent_frames = num_latent_frames or self.config.state_t
        total = pixel_frames(num_latent_frames)
        self.config.require_conditioning(count)
        if count and (count >= total or count % 4 != 1):
            raise ConfigError(
                f"{count} frames are given to condition on, but it must be 1, 5, ... frames and fewer than the"
                f" {total} of the video."
            )
        factor = self.tokenizer.spatial_compression_factor
        shape = [size, self.tokenizer.latent_ch, num_latent_frames, height // factor, width // factor]
        work_dtype = torch.promote_types(self.net.dtype, torch.float32)
        given = torch.zeros(shape, device=self.device, dtype=work_dtype)
        if count:
            latent = self.encode(frames_B_C_F_H_W)
            given[:, :, : latent.shape[2]] = latent
        return given

    # --- sampling

    @torch.no_grad()
    def generate(
        self,
        frames_B_C_F_H_W: Tensor,
        text_B_S_E: Tensor,
        negative_text_B_S_E: Tensor | None = None,
        *,
        seed: int = 0,
        options: SamplingOptions = GUIDED,
        on_step: OnStep | None = None,
        num_frames: int | None = None,
        edited_B_C_F_H_W: Tensor | None = None,
        given_view: int | None = None,
    ) -> Tensor:
        """Videos [B, 3, F, H, W] in [-1, 1] that begin with the conditioning frames, 1 + 4k of them, uint8 or floats.

        Without a negative text, the unconditional half of the guidance has a text of zeros. ``num_frames`` replaces the
        model's. With a whole clip ``edited``, sampling begins in it, by ``options.strength``; of its ``given_view`` all
        frames are conditioning frames.
        """
        batch = {TEXT_KEY: self._with_tokens(text_B_S_E)}
        if negative_text_B_S_E is not None:
            batch[NEGATIVE_TEXT_KEY] = self._with_tokens(negative_text_B_S_E)
        size, _, num_given, height, width = frames_B_C_F_H_W.shape
        batch["padding_mask"] = torch.zeros(size, 1, height, width, device=self.device)
        batch["fps"] = torch.full((size,), float(self.config.rate_of_positions), device=self.device)
        given = self.given_latents(frames_B_C_F_H_W, latent_frames(num_frames) if num_frames else None)
        num_latent = latent_frames(num_given) if num_given else 0
        if self.net.extra_channels:
            batch |= self.first_frames(frames_B_C_F_H_W, pixel_frames(given.shape[2]))
            num_latent = 0  # such a network makes all frames, the given ones too
        if edited_B_C_F_H_W is not None:
            given[:, :, num_latent:] = self.encode(edited_B_C_F_H_W)[:, :, num_latent:]
        if given_view is not None:
            if edited_B_C_F_H_W is None:
                raise ConfigError(f"given_view={given_view}, but the clip that has its frames, edited, is None.")
            batch[GIVEN_VIEW_KEY] = torch.full((size,), given_view)
        latent = self.generate_latents(batch, given, num_latent, seed=seed, options=options, on_step=on_step)
        return self.decode(latent)

    @torch.no_grad()
    def generate_latents(
        self,
        batch: Mapping[str, Tensor],
        given_B_C_T_H_W: Tensor,
        num_given: int,
        *,
        seed: int | Sequence[int] = 0,
        options: SamplingOptions = GUIDED,
        on_step: OnStep | None = None,
        is_without_text: bool = False,
    ) -> Tensor:
        """Latents [B, C, T, H, W] that begin with the first ``num_given`` latent frames of ``given_B_C_T_H_W``.

        ``batch`` has what the conditioner takes; ``is_without_text``: all its texts are zeros. With a seed for
        each sample, a sample does not depend on the others.
        """
        given = given_B_C_T_H_W
        num_B = torch.full((given.shape[0],), num_given, device=self.device)
        on_device = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        conditional, unconditional = (
            replace(condition.with_conditioning_frames(given, num_B), is_without_text=is_without_text)
            for condition in self.conditioner.guidance_pair(on_device)
        )
        if GIVEN_VIEW_KEY in on_device:
            view_B = on_device[GIVEN_VIEW_KEY], self.net.num_views
            conditional, unconditional = conditional.with_given_view(*view_B), unconditional.with_given_view(*view_B)
        noise = initial_noise(tuple(given.shape), seed, self.net.num_views).to(given, non_blocking=True)
        return self.sample(conditional, unconditional, noise, options, on_step)

    @torch.no_grad()
    def sample(
        self,
        conditional: Condition,
        unconditional: Condition,
        noise_B_C_T_H_W: Tensor,
        options: SamplingOptions = UNGUIDED,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Latents [B, C, T, H, W] out of standard normal noise, both of whole clips."""
        path = self.sampling_path(conditional, unconditional, noise_B_C_T_H_W, options)
        with Progress("sampling", options.num_steps, unit="step", leave=False, is_shown=options.progress) as bar:

            def report(i: int, step: Step) -> None:
                bar.update()
                if on_step is not None:
                    on_step(i, step)

            sigmas = path.sigmas[:-1] if path.sigmas[-1] > 0 and not options.final_evaluation else path.sigmas
            latent = sample(path.denoise, path.start_B_C_T_H_W, sigmas, path.stepper, report)
        return self.context.gather_frames(path.finish(latent))

    def sampling_path(
        self,
        conditional: Condition,
        unconditional: Condition | None,
        noise_B_C_T_H_W: Tensor,
        options: SamplingOptions = UNGUIDED,
    ) -> SamplingPath:
        """The way from this rank's part of the noise to latents; gradients go through it if the caller has them on."""
        solver = chosen_solver(self.objective, options.solver)
        if options.num_steps < 1:
            raise ConfigError(f"num_steps={options.num_steps}: sampling takes at least 1 step.")
        is_student = isinstance(self.objective, Student)  # whose teacher was guided
        is_guided = options.guidance != 0 and not is_student
        is_guided = is_guided and not self._on_all_ranks(unconditional is None or conditional.equals(unconditional))
        self.context.activate(True)
        condition = self.context.part_of(conditional)
        other = self.context.part_of(unconditional) if is_guided and unconditional is not None else None
        path = self.objective.sampling_path(
            lambda predict: self.guided(predict, condition, other, options),
            condition,
            self.context.split_frames(noise_B_C_T_H_W),
            solver,
            options.num_steps,
        )
        if options.strength == 1:
            return path
        assert condition.gt_frames_B_C_T_H_W is not None
        return path.editing(condition.gt_frames_B_C_T_H_W, options.strength)

    def guided(
        self,
        predict: Predict,
        conditional: Condition,
        unconditional: Condition | None,
        options: SamplingOptions = UNGUIDED,
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """(x_t, levels) -> what ``predict`` gives, with guidance unless ``unconditional`` is None.

        Both halves are one batch where memory allows, their texts are equally long and nothing must be repeatable.
        """
        given = conditional.gt_frames_B_C_T_H_W
        assert given is not None
        shape = (given.shape[2], given.shape[3], given.shape[4])
        if options.compile_network and not self._is_compiled:
            compile_blocks(self.net)
            self._is_compiled = True
        denoiser = self.objective.denoiser(self._graphed_net()) if options.use_cuda_graphs else self.denoiser

        def run(condition: Condition) -> Callable[[Tensor, Tensor], Tensor]:
            is_sharded: bool = is_fsdp(self.net)
            if is_sharded:  # its weights are whole only inside its own forward pass
                if not condition.is_without_text:
                    self.net.require_readable(condition.crossattn_emb_B_S_E)
                prepared = None
            else:
                prepared = self._prepared(condition, shape)
            return lambda x, level_B: predict(denoiser, x, level_B, condition, prepared)

        if unconditional is None:
            return run(conditional)
        lengths = {one.crossattn_emb_B_S_E.shape[1] for one in (conditional, unconditional)}
        if len(lengths) == 1 and not options.is_repeatable and self._fits_doubled(given):
            both = run(conditional.stacked_with(unconditional))

            def guided_together(x: Tensor, level_B: Tensor) -> Tensor:
                positive, negative = both(torch.cat([x, x]), torch.cat([level_B, level_B])).chunk(2)
                return guide(positive, negative, options.guidance)

            return guided_together
        positive, negative = run(conditional), run(unconditional)
        return lambda x, level_B: guide(positive(x, level_B), negative(x, level_B), options.guidance)

    def predict_clean(
        self, x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, sigma_B_1: Tensor, condition: Condition
    ) -> Tensor:
        """Clean latents [B, C, T, H, W], of whole clips, predicted from latents with so much noise."""
        context = self.context
        context.activate(True)
        xt = context.split_frames(add_noise(x0_B_C_T_H_W, epsilon_B_C_T_H_W, sigma_B_1))
        predicted = self.denoiser(xt, sigma_B_1, context.part_of(condition))
        predicted = context.gather_frames(predicted)
        context.activate(False)
        return predicted

    def _prepared(self, condition: Condition, latent_shape: tuple[int, int, int]) -> Prepared:
        """The part of a condition's computation that all steps share; of one text for all samples it is made once."""
        text_B_S_E = condition.crossattn_emb_B_S_E
        size = text_B_S_E.shape[0]
        reads_image = self.net.image_channels is not None
        image = {"image_B_S_E": condition.image_B_S_E} if reads_image else {}
        is_one = size > 1 and text_B_S_E.stride(0) == 0 and not reads_image
        text = (text_B_S_E[:1] if is_one else text_B_S_E).to(self.net.dtype)
        try:
            prepared = self.net.prepare(
                text,
                latent_shape=latent_shape,
                fps_B=condition.fps_B,
                skip_no_text=True,
                is_without_text=condition.is_without_text,
                **image,
            )
        except ValueError as error:  # frames or a text that this network does not take
            raise DataError(f"This network cannot make such a video. {error}") from error
        if not is_one:
            return prepared
        cross = (kept and tuple(value.expand(size, -1, -1, -1) for value in kept) for kept in prepared.cross)
        return replace(prepared, cross=cast("tuple[KeysValues | None, ...]", tuple(cross)))

    def _fits_doubled(self, latent_B_C_T_H_W: Tensor) -> bool:
        """True where the activations of a batch of twice the size fit into the free memory, on all ranks."""
        if self.device.type != "cuda":
            return True
        needed = 2 * activation_bytes(self.net, latent_B_C_T_H_W[:, 0].numel())
        return self._on_all_ranks(needed < free_memory(self.device))

    def samples_at_once(self, num_latent: int, height: int, width: int) -> int:
        """The number of samples whose activations, of both halves of a guidance, fit into the free memory of a GPU."""
        if self.device.type != "cuda":
            return 1 << 30
        if not self.offload_tokenizer:
            self.tokenizer.to(self.device)  # before the free memory is read
        factor = self.tokenizer.spatial_compression_factor
        needed = 2 * activation_bytes(self.net, num_latent * (height // factor) * (width // factor))
        return max(1, int(0.8 * free_memory(self.device)) // needed)

    def _graphed_net(self) -> DiT:
        """The network that replays captured passes; what it has captured is kept from one sampling to the next."""
        if self._graphed is None or not self._graphed.fits(self.net):
            self._graphed = GraphedNetwork(self.net, self.device)
        return cast(DiT, self._graphed)

    def _on_all_ranks(self, value: bool) -> bool:
        """True where ``value`` is, on all ranks that share this one's forward passes: with sharded weights, on all."""
        found, is_sharded = torch.tensor(float(value)), is_fsdp(self.net)
        if is_sharded or self.context.size > 1:
            distributed.all_reduce_(found, "min", None if is_sharded else self.context.group)
        return bool(found)


# Noise, memory, bytes -------------------------------------------------------------------------------------------------


CLIPS_AT_ONCE = 16  # of a tokenizer on a CPU
SHARE_OF_TOKENIZER = 0.25  # of the free memory: what it fills is kept by PyTorch, and the network comes next
# Of the published tokenizer: activations 96 wide, for each of 4 frames in work, and for the frames before them.
VALUES_PER_PIXEL = max(96 * (4 * in_work + remembered) for in_work, remembered in LIVE_FRAMES.values())
VALUES_PER_COLOUR = 3  # the clip as it is given, as it was made, and clamped


def initial_noise(shape: tuple[int, ...], seed: int | Sequence[int], num_views: int = 1) -> Tensor:
    """Standard normal float32 from NumPy's RandomState: the same on every device and number of processes.

    With a seed for each sample, each is what a batch of it alone gets. Views are drawn one after the other in time.
    """
    if not isinstance(seed, int):
        if len(seed) != shape[0]:
            raise ConfigError(f"There are {len(seed)} seeds for a batch of {shape[0]}: one for each sample.")
        return torch.cat([initial_noise((1, *shape[1:]), int(one), num_views) for one in seed])
    if num_views > 1:
        batch, channels, frames, height, width = shape
        noise = initial_noise((batch, channels, num_views * frames, height // num_views, width), seed)
        return rearrange(noise, "b c (v t) h w -> b c t (v h) w", v=num_views)
    return torch.from_numpy(numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32))


def activation_bytes(net: DiT, num_values: int) -> int:
    """An estimate of the bytes that a forward pass takes, for so many positions of latents."""
    tokens = num_values // (net.patch_spatial**2 * net.patch_temporal)
    return tokens * net.model_channels * 24 * torch.finfo(net.dtype).bits // 8


def to_uint8(video: Tensor) -> Tensor:
    """[-1, 1] to 0 ... 255, rounded."""
    return video.float().clamp(-1, 1).add_(1).mul_(127.5).round_().to(torch.uint8)
