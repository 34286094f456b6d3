# SPDX-License-Identifier: Apache-2.0
"""Samples of a model while it trains, from the same validation clips every time, beside the truth.

In names of metrics and columns ``ema`` are the averaged weights, ``reg`` the weights as they are. The noise of clip i
follows from ``seed`` + i, so pictures differ by the weights alone, in every layout of processes. Training goes on as if
nothing had been drawn.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import FixedClip, GivesClips, apart, first_clips
from cosmos_predict2.data.video import media
from cosmos_predict2.diffusion.rectified_flow import add_noise
from cosmos_predict2.evaluation.metrics.held_out import HeldOutClips, moving_psnr, repeated
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, to_uint8
from imaginaire import distributed, random, storage
from imaginaire.config import lazy_config
from imaginaire.data.facts import facts_of
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.log import tracked
from imaginaire.training import preflight
from imaginaire.training.callbacks import EveryN, SideChannel

log = logging.getLogger(__name__)

FOLDER = "samples"
GAP = 4  # pixels between clips
HEADER = 22
LEAST, MOST = 192, 512  # pixels of a clip's longer side, about
X0_RANGE = (0.5, 80.0)  # noise levels, where the model names none to validate at
Latents = dict[tuple[str, float], Tensor]  # (kind, guidance or noise level) -> [1, C, T, H, W]


@dataclass
class Drawing:
    """The samples and predictions of one clip."""

    samples: Latents
    predictions: Latents
    errors: dict[tuple[str, float], float]  # of the predictions


class DrawSamples(EveryN):
    """Draws samples of the first ``n_viz_sample`` validation clips; of the training data where there are none.

    ``is_ema`` chooses the averaged weights (True), those as they are (False) or both (None). ``is_sample`` draws whole
    videos with ``num_sampling_step`` steps, once for each ``guidance``; ``is_x0`` predictions in one step at
    ``n_x0_level`` noise levels. ``fps`` is that of the clips unless given. The ranks share the clips, and those of a
    context-parallel group each of theirs.
    """

    def __init__(
        self,
        every_n: int | None = 5000,
        step_size: int = 1,
        n_viz_sample: int = 2,
        num_sampling_step: int = 35,
        guidance: Sequence[float] = (0.0,),
        is_sample: bool = True,
        is_x0: bool = True,
        n_x0_level: int = 4,
        is_ema: bool | None = None,
        fps: float | None = None,
        seed: int = 0,
        run_at_start: bool = False,
    ) -> None:
        super().__init__(every_n=every_n, step_size=step_size, run_at_start=run_at_start)
        if min(n_viz_sample, num_sampling_step, n_x0_level) < 1 or (is_sample and not guidance):
            raise ConfigError(
                f"draw_samples: n_viz_sample={n_viz_sample}, num_sampling_step={num_sampling_step} and n_x0_level="
                f"{n_x0_level} must be at least 1, and guidance={list(guidance)} names at least one value."
            )
        self.num_clips = n_viz_sample
        self.num_steps = num_sampling_step
        self.guidance = [float(value) for value in guidance] if is_sample else []
        self.num_levels = n_x0_level if is_x0 else 0
        self.is_ema = is_ema
        self.fps = fps
        self.seed = seed
        self._clips: list[FixedClip] | None = None
        self._channel = SideChannel("samples")

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if self.is_ema and model.ema is None:
            raise ConfigError(
                f"trainer.callbacks.{self.name}.is_ema=True, but the run keeps no average of the weights. Choose"
                " ema=power, or is_ema=False."
            )
        if not isinstance(model, GivesClips):
            raise ConfigError(
                f"trainer.callbacks.{self.name} draws videos, which {type(model).__name__} does not make (it has no"
                f" clean_clips). Switch it off: trainer.callbacks.{self.name}=null."
            )

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
        if trainer.interrupted:
            log.info("no samples at iteration %d: the run was asked to stop", iteration)
            return
        with apart(trainer, model):
            random.seed_all(self.config.trainer.seed, 0, "samples")
            in_step, place = parallel.is_in_step(model, trainer.dims), f"at iteration {iteration}"
            drawn = self._channel.together(place, lambda: self._drawn(model, iteration), in_step=in_step)
            if drawn is not None:
                clips, mine = drawn
                parts = distributed.all_gather_object(mine if self.trainer.dims.cp_rank == 0 else {})
                everyone = {index: drawing for part in parts for index, drawing in part.items()}
                drawings = [everyone[index] for index in range(len(clips))]
                if distributed.is_rank0():
                    with self._channel.attempt():
                        self._show(model, clips, drawings, iteration)

    def _drawn(self, model: Any, iteration: int) -> tuple[list[FixedClip], dict[int, Drawing]]:
        if self._clips is None:
            self._clips = first_clips(lambda: self._loader(model), model, self.num_clips)
        return self._clips, self._draw(model, self._clips, iteration)

    # --- what is drawn

    def _loader(self, model: Any) -> Any:
        """The validation data, or, where the run has none, that of training."""
        if self.trainer.dataloader_val is not None:
            return self.trainer.dataloader_val
        loader = lazy_config.instantiate(self.config.dataloader_val or self.config.dataloader_train)
        model.on_data(loader)
        return loader

    def _kinds(self, model: Any) -> list[str]:
        both = ["reg"] if model.ema is None else ["ema", "reg"]
        return both if self.is_ema is None else ["ema"] if self.is_ema else ["reg"]

    def _draw(self, model: Any, clips: Sequence[FixedClip], iteration: int) -> dict[int, Drawing]:
        """This rank's drawings. All ranks run the network equally often, as sharded ones must."""
        dims = self.trainer.dims
        mine = {index: Drawing({}, {}, {}) for index in range(dims.dp_rank, len(clips), dims.dp_size)}
        turns = [(kind, first) for kind in self._kinds(model) for first in range(0, len(clips), dims.dp_size)]
        ends = model.validation_sigmas or X0_RANGE
        levels = [float(f"{sigma:.3g}") for sigma in numpy.geomspace(min(ends), max(ends), self.num_levels)]
        is_shown = distributed.is_rank0()
        for kind, first in tracked(turns, "samples", unit="clip", leave=False, is_shown=is_shown):
            place = f"samples at iteration {iteration}, clip {first + 1} of {len(clips)}"
            self.trainer.watchdog.beat(place, long=True)
            index = first + dims.dp_rank
            drawing = mine.get(index, Drawing({}, {}, {}))
            with model.ema_scope() if kind == "ema" else nullcontext():
                self._draw_clip(model.world, levels, clips[min(index, len(clips) - 1)], index, kind, drawing)
        return mine

    def _draw_clip(
        self, world: WorldModel, levels: Sequence[float], clip: FixedClip, index: int, kind: str, drawing: Drawing
    ) -> None:
        x0, condition = clip.x0_1_C_T_H_W.to(world.device), clip.condition_on(world.device)
        for guidance in self.guidance:
            options = SamplingOptions(guidance=guidance, num_steps=self.num_steps)
            latents = world.generate_latents(
                clip.conditions(), x0, clip.num_given, seed=self.seed + index, options=options
            )
            drawing.samples[kind, guidance] = latents.cpu()
        world.context.activate(False)
        epsilon = torch.randn(x0.shape, generator=random.generator(self.seed, index, "draw_samples/x0")).to(x0)
        for sigma in levels:
            sigma_1_1 = torch.full((1, 1), sigma, device=x0.device, dtype=x0.dtype)
            x0_pred = world.denoiser(add_noise(x0, epsilon, sigma_1_1), sigma_1_1, condition)
            drawing.predictions[kind, sigma] = x0_pred.cpu()
            drawing.errors[kind, sigma] = float((x0_pred - x0)[:, :, clip.num_given :].square().mean())

    # --- how it is shown

    def _show(self, model: Any, clips: Sequence[FixedClip], drawings: Sequence[Drawing], iteration: int) -> None:
        def decoded(latent_1_C_T_H_W: Tensor) -> Tensor:
            return to_uint8(model.world.decode(latent_1_C_T_H_W.to(self.trainer.device))).cpu()

        kinds = self._kinds(model)
        sets = preflight.data_sets(self.config.dataloader_val or self.config.dataloader_train)
        # The rate of the data's frames, whose label may be another.
        fps = self.fps or next(filter(None, (facts_of(data).rate for data in sets)), clips[0].fps)
        values: dict[str, float] = {}
        truths = [decoded(clip.x0_1_C_T_H_W) if (v := clip.video_1_C_F_H_W) is None else v for clip in clips]
        for guidance in self.guidance:
            suffix = "" if len(self.guidance) == 1 else f"_guidance_{guidance:g}"
            videos = [[decoded(drawing.samples[kind, guidance]) for kind in kinds] for drawing in drawings]
            values |= _quality(clips, truths, kinds, videos, suffix)
            rows = [[truth[0], *(video[0] for video in row)] for truth, row in zip(truths, videos)]
            self._write(f"guidance_{guidance:g}", rows, ["truth", *kinds], fps, iteration)
        if self.num_levels:
            self._write_predictions(truths, drawings, decoded, iteration)
        for place in drawings[0].errors:
            mean = sum(drawing.errors[place] for drawing in drawings) / len(drawings)
            values[f"{FOLDER}/x0_mse_{place[0]}_sigma_{place[1]:g}"] = mean
        self.trainer.metrics.log(values, iteration)
        figures = [f", {name.partition('/')[2]} {value:.2f}" for name, value in values.items() if "psnr" in name]
        folder = storage.join(self.trainer.run_dir, FOLDER)
        log.info("samples of iteration %d: %s%s", iteration, folder, "".join(figures))

    def _write(
        self, name: str, rows: Sequence[Sequence[Tensor]], labels: Sequence[str], fps: float, iteration: int
    ) -> None:
        """The video and the contact sheet of one guidance."""
        video = side_by_side(rows, labels)
        media.write_video(self._path(f"{name}.mp4", iteration), video, fps)
        frames = video.transpose(0, 1).contiguous().numpy()
        self.trainer.metrics.log_video(f"{FOLDER}/{name}_video", frames, iteration, max(1, round(fps)))
        row_labels = [f"clip {i} {label}" for i in range(len(rows)) for label in labels]
        self._write_sheet(name, [clip for row in rows for clip in row], row_labels, iteration)

    def _write_predictions(
        self, truths: Sequence[Tensor], drawings: Sequence[Drawing], decoded: Callable[[Tensor], Tensor], iteration: int
    ) -> None:
        clips, labels = [], []
        for i, (truth, drawing) in enumerate(zip(truths, drawings)):
            clips.append(truth[0])
            labels.append(f"clip {i} truth")
            for (kind, sigma), latent in drawing.predictions.items():
                clips.append(decoded(latent)[0])
                labels.append(f"clip {i} {kind}\nsigma {sigma:g}")
        self._write_sheet("x0", clips, labels, iteration)

    def _write_sheet(self, name: str, clips: Sequence[Tensor], labels: Sequence[str], iteration: int) -> None:
        sheet = media.contact_sheet(clips, labels)
        media.write_image(self._path(f"{name}.png", iteration), sheet)
        self.trainer.metrics.log_image(f"{FOLDER}/{name}", sheet.permute(1, 2, 0).contiguous().numpy(), iteration)

    def _path(self, name: str, iteration: int) -> str:
        return storage.join(self.trainer.run_dir, FOLDER, f"iter_{iteration:09d}_{name}")


def _quality(
    clips: Sequence[FixedClip],
    truths: Sequence[Tensor],
    kinds: Sequence[str],
    videos: Sequence[Sequence[Tensor]],
    suffix: str,
) -> dict[str, float]:
    """PSNR of each kind, as metrics; those without a value (no conditioning frame, nothing moves) are excluded."""
    found: dict[str, list[float]] = {}
    for clip, truth, row in zip(clips, truths, videos):
        known = HeldOutClips(truth, clip.x0_1_C_T_H_W, clip.condition, [""], clip.num_given)
        for kind, video in zip(kinds, row):
            found.setdefault(f"{FOLDER}/psnr_{kind}{suffix}", []).append(_psnr(video, truth, clip.num_given))
            if clip.num_given:
                found.setdefault(f"{FOLDER}/moving_psnr_{kind}{suffix}", []).append(moving_psnr(video, known))
        if clip.num_given:
            found.setdefault(f"{FOLDER}/moving_psnr_repeat", []).append(moving_psnr(repeated(known), known))
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in found.items()}
    return {name: sum(values) / len(values) for name, values in finite.items() if values}


def _psnr(video_1_C_F_H_W: Tensor, truth_1_C_F_H_W: Tensor, num_given: int) -> float:
    """The PSNR in dB, over the frames without the conditioning ones."""
    first = pixel_frames(num_given) if num_given else 0
    difference = (video_1_C_F_H_W.float() - truth_1_C_F_H_W.float())[:, :, first:]
    return float(10 * torch.log10(255**2 / difference.square().double().mean()))


# Clips in rows and columns --------------------------------------------------------------------------------------------


def side_by_side(rows: Sequence[Sequence[Tensor]], labels: Sequence[str]) -> Tensor:
    """uint8 [3, F, H, W] of clips [3, F, h, w]: those of one kind in a column under its label, those of one subject in
    a row; shorter ones hold their last frame.

    Small clips are magnified in whole steps until their longer side has about LEAST pixels, large ones are made smaller
    until it has MOST.
    """
    assert rows and all(len(row) == len(labels) for row in rows), (
        f"{[len(row) for row in rows]} clips, {len(labels)} labels"
    )
    tiles = [[_tile(clip) for clip in row] for row in rows]
    num_frames = max(tile.shape[1] for row in tiles for tile in row)
    widths = [max(row[i].shape[-1] for row in tiles) for i in range(len(labels))]
    heights = [max(tile.shape[-2] for tile in row) for row in tiles]
    header = _header(labels, widths)
    canvas = torch.full(
        (3, num_frames, HEADER + sum(heights) + GAP * len(heights), header.shape[-1]), 255, dtype=torch.uint8
    )
    canvas[:, :, :HEADER] = header[:, None]
    top = HEADER
    for row, height in zip(tiles, heights):
        left = GAP
        for tile, width in zip(row, widths):
            count = tile.shape[1]
            area = canvas[:, :, top : top + tile.shape[-2], left : left + tile.shape[-1]]
            area[:, :count] = tile
            area[:, count:] = tile[:, -1:]
            left += width + GAP
        top += height + GAP
    return canvas


def _tile(clip: Tensor) -> Tensor:
    longest = max(clip.shape[-2:])
    if longest > MOST:
        return media.resize(clip, (max(1, clip.shape[-2] * MOST // longest), max(1, clip.shape[-1] * MOST // longest)))
    times = max(1, round(LEAST / longest))
    return clip.repeat_interleave(times, -1).repeat_interleave(times, -2)


def _header(labels: Sequence[str], widths: Sequence[int]) -> Tensor:
    """The names of the columns, uint8 [3, HEADER, W]."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (sum(widths) + GAP * (len(widths) + 1), HEADER), (255, 255, 255))
    draw, font, left = ImageDraw.Draw(picture), ImageFont.load_default(14), GAP
    for label, width in zip(labels, widths):
        draw.text((left, 2), label, fill=(0, 0, 0), font=font)
        left += width + GAP
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)
