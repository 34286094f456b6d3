# SPDX-License-Identifier: Apache-2.0
"""A Video2World model on held-out clips, before and after its training, beside linear denoisers and a standstill."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.dit_weights import described_weights
from cosmos_predict2.data.sizes import frame_rate
from cosmos_predict2.evaluation.metrics import held_out
from cosmos_predict2.evaluation.reports.held_out_report import AFTER, BEFORE, TRUTH, Figures
from cosmos_predict2.models.text import TrainingText
from cosmos_predict2.pipelines.composed_run import dataset_node, described_dataset, held_out_doubt, held_out_node
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire.checkpoint.weight_files import latest
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

NUM_TRAINING_CLIPS = 256  # that the linear denoisers are fitted to
WIDEST = 1024  # network that is evaluated here


@dataclass(frozen=True)
class HeldOutEvaluation:
    """The figures, and the clips by name (held_out_report.TRUTH, BEFORE, AFTER): uint8 [B, 3, F, H, W]."""

    figures: Figures
    videos: dict[str, Tensor]
    movement: list[float]  # of each clip
    fps: float


def evaluate(
    config: Any, dit_path: str, *, data: str = "", which: str = "auto", num_clips: int = 64, num_steps: int = 35
) -> HeldOutEvaluation:
    """Measure the weights at ``dit_path`` with the model and the data of a configuration; ``data``: another folder."""
    _require_small(config)
    training_node, node = dataset_node(config, "dataloader_train"), held_out_node(config, data)
    if caution := held_out_doubt(training_node, node):
        log.warning("%s", caution)
    model = lazy_config.instantiate(config.model["config"])
    sigmas, pipe_config = model.validation_sigmas, model.pipe_config
    start = config.checkpoint.load_path or model.model_manager_config.dit_path
    of_start = "net_ema" if config.checkpoint.load_ema_to_reg else "auto"
    before = build_world_model(pipe_config, dtype=torch.float32).load(start, of_start, is_baseline=True)
    clips = _clips(node, num_clips, before, model)
    training = _clips(training_node, NUM_TRAINING_CLIPS, before, model)
    trained = (latest(dit_path), which)
    after = build_world_model(pipe_config, dtype=torch.float32).load(*trained)
    worlds = {BEFORE: before, AFTER: after}
    videos = {name: held_out.generate(world, clips, num_steps=num_steps) for name, world in worlds.items()}
    figures = Figures(
        sigmas=list(sigmas),
        before=held_out.losses(before, clips, sigmas),
        after=held_out.losses(after, clips, sigmas),
        linear=held_out.linear_losses(training, clips, sigmas),
        psnr=held_out.moving_psnr(videos[AFTER], clips),
        psnr_before=held_out.moving_psnr(videos[BEFORE], clips),
        psnr_repeat=held_out.moving_psnr(held_out.repeated(clips), clips),
        num_clips=len(clips),
        data=described_dataset(node),
        training_data=described_dataset(training_node),
        weights=described_weights(*trained),
        start=described_weights(start, of_start),
        num_steps=num_steps,
        cautions=(caution,) if caution else (),
    )
    fps = frame_rate(node) or pipe_config.fps
    return HeldOutEvaluation(figures, {TRUTH: clips.video_B_C_F_H_W, **videos}, held_out.movement(clips), fps)


def _require_small(config: Any) -> None:
    if (width := config.model["config"]["pipe_config"]["net"].get("model_channels") or 0) > WIDEST:
        raise ConfigError(
            f"The network is {width} wide, but this evaluation computes on the CPU with all clips in memory, which tiny"
            " models allow. See clips beside the truth: examples/video2world.py --input_path CLIP --compare_to CLIP."
        )


def _clips(node: Any, num: int, world: Any, model: Any) -> held_out.Clips:
    """The first clips of a data set, with the text of training."""
    with_text = partial(TrainingText(model.text).added_to, device=torch.device("cpu")) if model.text.is_set else None
    made = {"num_episodes": num} if "num_episodes" in node else {}  # no more than needed
    dataset = lazy_config.instantiate({**node, **made})
    return held_out.read_clips(dataset, world.tokenizer, model.pipe_config, num, with_text=with_text)
