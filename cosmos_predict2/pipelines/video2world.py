# SPDX-License-Identifier: Apache-2.0
"""Video2World at inference: a picture or the end of a clip, and a prompt, become a video.

    pipe = Video2WorldPipeline.from_config(get_cosmos_predict2_video2world_pipeline(model_size="2B"), dit_path="...")
    video = pipe(input_path="image.jpg", prompt="The robot picks up the apple.")     # [1, 3, F, H, W] in [-1, 1]

A pipeline is a world model with a guardrail and a prompt refiner before it.

Several processes may make one video: rank 0 reads, encodes, decodes and writes (`lead`), and all sample a part each.
The others (`follow`) wait for what rank 0 sends: that there is work (`announce`), then the inputs of each sampling, at
last that it is over.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cosmos_predict2.checkpoints.adapters import apply_lora, parse_lora
from cosmos_predict2.data.video import media
from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.guardrail.runner import (
    GuardrailRunner,
    checked_frames,
    create_guardrail,
    create_prompt_refiner,
    require_safe,
    status_line,
)
from cosmos_predict2.interfaces import PromptRefiner
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.released import download_command
from cosmos_predict2.tokenizers.sizes import pixel_frames, size_of
from cosmos_predict2.world_model.assembly import check_parts, with_trained_text
from cosmos_predict2.world_model.config import EMAConfig, SolverConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.options import OF_MODEL, VideoForm
from cosmos_predict2.world_model.parallelize import ContextParallel
from cosmos_predict2.world_model.world_model import (
    GUIDED,
    OnStep,
    SamplingOptions,
    WorldModel,
    build_world_model,
    initial_noise,
    to_uint8,
)
from imaginaire import distributed
from imaginaire.distributed.parallel import divisors
from imaginaire.errors import ConfigError, DataError, UserError, near

__all__ = [  # with names that older code imports from here
    "EMAConfig",
    "SolverConfig",
    "Video2WorldPipeline",
    "Video2WorldPipelineConfig",
    "initial_noise",
    "to_uint8",
]

log = logging.getLogger(__name__)

AND = "+"  # between the files of an input that has one for each of several views


class Video2WorldPipeline:
    """A world model with what stands before it; call it, or `generate` with frames and embeddings at hand."""

    def __init__(
        self, world: WorldModel, guardrail: GuardrailRunner | None = None, refiner: PromptRefiner | None = None
    ) -> None:
        self.world = world
        self.config = world.config
        self.generate = world.generate
        self.guardrail = guardrail
        self.refiner = refiner

    @property
    def dit(self) -> DiT:
        return self.world.net

    @property
    def device(self) -> torch.device:
        return self.world.device

    @classmethod
    def from_config(
        cls,
        config: Video2WorldPipelineConfig,
        dit_path: str = "",
        use_text_encoder: bool = True,
        device: torch.device | str | None = None,
        torch_dtype: torch.dtype | None = None,
        load_ema_to_reg: bool = False,
        load_prompt_refiner: bool | None = False,
        *,
        lora: Sequence[str] = (),
        lora_alpha: float | None = None,
        offload_text_encoder: bool = False,
        downcast_text_encoder: bool | str = False,
        offload_tokenizer: bool = False,
        group: ProcessGroup | None = None,
        is_follower: bool = False,
    ) -> "Video2WorldPipeline":
        """The pipeline of a config with its weights, anything that `load_dit` reads, or random ones without a path.

        Prompts are encoded as the captions of the weights' run were. The precision is that of the config, on a CPU
        float32. ``lora_alpha`` is for adapters in the weights that record none. With a ``group``, videos are generated
        by its processes together; a follower has the network alone. ``load_prompt_refiner``: True, the config's,
        which must be there; None, where it was downloaded.
        """
        which = "net_ema" if load_ema_to_reg else "auto"
        check_parts(config.net, dit_path, [], which, lora_alpha)  # before a large text encoder is read
        config = with_trained_text(config, [dit_path, *(parse_lora(adapter)[0] for adapter in lora)])
        device = torch.device(device or distributed.device())
        dtype = torch_dtype or (config.dtype if device.type != "cpu" else torch.float32)
        guardrail = None if is_follower else create_guardrail(config.guardrail_config)
        refiner = None
        if load_prompt_refiner is not False and not is_follower:
            refiner = create_prompt_refiner(config.prompt_refiner_config, is_explicit=bool(load_prompt_refiner))
        parts = config.guardrail_config, config.prompt_refiner_config, guardrail, refiner
        if not is_follower:
            log.info("%s", status_line(*parts, is_released=download_command(dit_path) is not None))
        world = build_world_model(
            config,
            dtype=dtype,
            device=device,
            with_tokenizer=not is_follower,
            with_text_encoder=use_text_encoder and not is_follower,
            downcast_text_encoder=downcast_text_encoder,
            offload_tokenizer=offload_tokenizer,
            offload_text_encoder=offload_text_encoder,
            kind=LeadingWorld if group is not None and not is_follower else WorldModel,
        ).load(dit_path, which, lora_alpha=lora_alpha)
        if lora:
            merged = apply_lora(world.net, lora, base=dit_path)
            log.info("lora: %s merged into %d layers", ", ".join(lora), len(merged))
        world.context = ContextParallel(world.net, group)
        return cls(world) if is_follower else cls(world, guardrail, refiner)

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
        progress: bool = False,
        options: SamplingOptions | None = None,
        embeddings: Mapping[str, Tensor] | None = None,
        start_frame_idx: int | None = None,
        form: VideoForm = OF_MODEL,
        edited_path: str = "",
        edited_start: int = 0,
    ) -> Any:
        """[1, 3, F, H, W] in [-1, 1]; with ``return_prompt`` also the prompt as it was used, of refined chunks a list.

        ``num_conditional_frames`` counts pixel frames: 1, or 5 of a clip, the last ones or those from
        ``start_frame_idx`` on; for Predict2.5 also 0. ``embeddings`` has the prompts' embeddings by text, in place of
        an encoder. ``options`` counts more than the arguments that it has. A long ``form`` is made chunk by chunk, on
        the host. ``edited_path``: a clip that is edited by ``options.strength``, from ``edited_start`` on.
        """
        options = options or SamplingOptions(
            guidance=guidance,
            num_steps=num_sampling_step,
            solver=solver,
            use_cuda_graphs=use_cuda_graphs,
            progress=progress,
        )
        size = form.size or size_of(self.config.resolution, aspect_ratio)
        chunk_frames = form.chunk_frames or pixel_frames(self.config.state_t)
        overlap = num_conditional_frames if form.overlap is None else form.overlap
        frames: Tensor = torch.zeros(3, 0, self.world.net.num_views * size[0], size[1], dtype=torch.uint8)
        if num_conditional_frames:
            frames = self.read(input_path, num_conditional_frames, size, start_frame_idx)
        edited = self.read(edited_path, chunk_frames, size, edited_start)[None] if edited_path else None
        used: list[str] = []
        chunks: list[Tensor] = []
        for i in range(num_chunks := form.num_chunks(chunk_frames, overlap)):
            if not used or self.refiner is not None:
                used.append(self.checked_prompt(prompt, to_uint8(frames) if chunks else frames, seed + i))
                prompts = [used[-1], negative_prompt] if negative_prompt else used[-1:]
                text, *negative = self.encode(prompts, embeddings)
            chunk = self.world.generate(
                frames[None],
                text[None],
                negative[0][None] if negative else None,
                seed=seed + i,
                options=options,
                num_frames=chunk_frames,
                edited_B_C_F_H_W=edited,
                given_view=form.given_view,
            )
            frames = chunk[0, :, -overlap:]
            chunks.append(chunk if num_chunks == 1 else chunk[:, :, overlap if i else 0 :].cpu())
        video = self.checked_video(torch.cat(chunks, dim=2)[:, :, : form.num_frames])
        return (video, used if len(used) > 1 else used[0]) if return_prompt else video

    def read(self, path: str, num_frames: int, size: tuple[int, int], start: int | None = None) -> Tensor:
        """uint8 [3, num_frames, height, width] of an input, as `read_input` reads it."""
        return read_input(path, num_frames, size, start, fps=self.config.fps, crop=self.config.input_crop)

    def encode(self, prompts: Sequence[str], embeddings: Mapping[str, Tensor] | None = None) -> Tensor:
        """The texts [B, S, E] of prompts."""
        return self.world.encode_text(prompts, embeddings)

    def checked_prompt(self, prompt: str, frames_C_F_H_W: Tensor | None = None, seed: int = 0) -> str:
        """The prompt, refined where there are a refiner and frames; raises BlockedError where a guardrail blocks it."""
        if self.guardrail is not None:
            require_safe(self.guardrail, prompt)
        if self.refiner is None or frames_C_F_H_W is None or not frames_C_F_H_W.shape[1]:
            return prompt
        refined = self.refiner.refine(prompt, frames_C_F_H_W, seed)
        if self.guardrail is not None:
            require_safe(self.guardrail, refined, "refined prompt")
        return refined

    def checked_video(self, video_1_C_F_H_W: Tensor) -> Tensor:
        """The video in [-1, 1] as it may be shown; raises BlockedError where a guardrail refuses it."""
        frames = to_uint8(video_1_C_F_H_W[0])
        if (edited := checked_frames(self.guardrail, frames)) is frames or torch.equal(edited, frames.cpu()):
            return video_1_C_F_H_W
        return (edited[None].float() / 127.5 - 1).to(video_1_C_F_H_W)


# The input ------------------------------------------------------------------------------------------------------------


def check_input(path: str, num_frames: int, start: int | None = None) -> None:
    """Raise when the file cannot give ``num_frames`` frames, the last of a clip or those from ``start`` on.

    Of a clip only the header and a frame are read.
    """
    if start is not None and start < 0:
        raise ConfigError(f"start_frame_idx is {start}; it counts frames of the input from 0.")
    is_image = media.kind_of(path) == "image"
    if not os.path.isfile(path):
        raise DataError(f"There is no input file {path}.{_near_files(Path(path))}")
    if is_image:
        if num_frames > 1 or start:
            raise DataError(
                f"{path} is one picture, but --num_conditional_frames {num_frames} or --start_frame_idx {start} need a"
                " video. Give one, or --num_conditional_frames 1."
            )
        media.read_image(path)
        return
    found = media.probe_video(path)
    if (start or 0) + num_frames > found.num_frames:
        raise DataError(
            f"{path} has {found.num_frames} frames, but {num_frames} from frame {start or 0} on are needed"
            " (--num_conditional_frames, --start_frame_idx)."
        )


def input_files(path: str, num_views: int) -> list[str]:
    """The files of an input: one, or one for each view."""
    files = [path] if os.path.isfile(path) or num_views == 1 else path.split(AND)
    if len(files) not in (1, num_views):
        raise ConfigError(f"--input_path {path} names {len(files)} files for {num_views} views (--n_views).")
    if len(files) == 1 and num_views > 1 and media.kind_of(path) != "video":
        raise ConfigError(
            f"--input_path {path} is one picture, but there are {num_views} views: name a file for each, with {AND}"
            " between them, or a clip with the views one after another."
        )
    return files


def read_input(
    path: str,
    num_frames: int,
    size: tuple[int, int],
    start: int | None = None,
    *,
    fps: float | None = None,
    crop: str = "center",
) -> Tensor:
    """uint8 [3, num_frames, height, width]: the picture, or the clip's frames from ``start`` on (None: its last ones),
    brought to size by ``crop``. A clip of another rate than ``fps`` is a warning where it gives several frames."""
    check_input(path, num_frames, start)
    if media.kind_of(path) == "image":
        return brought_to_size(media.read_image(path)[:, None], size, crop, "input")
    total = media.probe_video(path).num_frames
    first = total - num_frames if start is None else start
    log.info("input: frames %d to %d of the %d (from 0) of %s", first, first + num_frames - 1, total, path)
    frames, rate = media.read_video(path, **({"last": num_frames} if start is None else {"first": start + num_frames}))
    if fps and num_frames > 1 and abs(rate / fps - 1) > 0.01:
        log.warning(
            "input: %s has %g frames per second, but the video %g: its frames show motion at another speed. Convert the"
            " clip, or condition on one frame.",
            *(path, rate, fps),
        )
    return brought_to_size(frames[:, -num_frames:], size, crop, "input")


def brought_to_size(frames: Tensor, size: tuple[int, int], crop: str, what: str) -> Tensor:
    """Frames stretched to the size, or cut at the centre, by one of CROPS; a change of their shape is logged."""
    (height, width), (to_height, to_width) = frames.shape[-2:], size
    if abs(height * to_width / (width * to_height) - 1) > 0.03:
        sizes = (height, width, to_height, to_width)
        log.info("%s: %dx%d (height x width) is brought to %dx%d by input_crop=%s", what, *sizes, crop)
    return CROPS[crop](frames, size)


def _near_files(path: Path) -> str:
    """The same name a folder deeper, where guides leave a folder out, or names beside it that are like it."""
    if deeper := sorted(path.parent.glob(f"*/{path.name}")):
        return f" There is {deeper[0]}."
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = near(path.name, names)
    return hint if "Did you mean" in hint else ""


# One video by several processes ---------------------------------------------------------------------------------------


Value = TypeVar("Value")
_OVER = None  # sent to followers in place of inputs


class SpreadError(RuntimeError):
    """Sampling failed on one process while the others are in the middle of it: nothing can go on."""


class LeadingWorld(WorldModel):
    """Rank 0's: whatever it samples, the followers sample with it."""

    def generate_latents(
        self,
        batch: Mapping[str, Tensor],
        given_B_C_T_H_W: Tensor,
        num_given: int,
        *,
        options: SamplingOptions = GUIDED,
        on_step: OnStep | None = None,
        **others: Any,
    ) -> Tensor:
        sent = {"options": replace(options, progress=False), **others}
        on_host = {name: value.cpu() for name, value in batch.items()}
        distributed.broadcast_object((on_host, given_B_C_T_H_W.cpu(), num_given, sent))
        given = (batch, given_B_C_T_H_W, num_given)
        try:
            return super().generate_latents(*given, options=options, on_step=on_step, **others)
        except (UserError, OSError, torch.OutOfMemoryError) as error:
            raise SpreadError(f"Rank 0 failed in sampling: {error}") from error


def lead(work: Callable[[], Value]) -> Value:
    """The result of ``work``; afterwards the followers are let go, but for an error in the middle of sampling."""
    try:
        value = work()
    except UserError:
        distributed.broadcast_object(_OVER)
        raise
    distributed.broadcast_object(_OVER)
    return value


def announce() -> None:
    """Let the followers build their pipelines; called by rank 0 before it builds its own."""
    distributed.broadcast_object(True)


def follow(make_world: Callable[[], WorldModel]) -> int:
    """Take part in the samplings of rank 0 until it is done, as another rank; gives their number."""
    count = 0
    if distributed.broadcast_object(None) is _OVER:
        return count
    world = make_world()
    while (inputs := distributed.broadcast_object(None)) is not _OVER:
        batch, given_B_C_T_H_W, num_given, settings = inputs
        world.generate_latents(batch, given_B_C_T_H_W.to(world.device), num_given, **settings)
        count += 1
    return count


agreed = partial(distributed.agreed, kind=ConfigError)  # by this name examples import it


def check_num_gpus(num_gpus: int, num_heads: int, state_t: int) -> None:
    """Raise for a number of GPUs that the network's heads or the latent frames of a video cannot be divided by."""
    if num_heads % num_gpus or state_t % num_gpus:
        works = ", ".join(str(number) for number in divisors(num_heads) if state_t % number == 0)
        raise ConfigError(
            f"--num_gpus {num_gpus} must divide the {num_heads} attention heads of this network and the {state_t}"
            f" latent frames of its videos. These numbers do: {works}."
        )
