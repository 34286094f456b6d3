# SPDX-License-Identifier: Apache-2.0
"""The tiny model with actions learns what they do: its default run, measured on episodes that training never draws."""

from pathlib import Path

import pytest
import torch

from cosmos_predict2.pipelines.imagined_episodes import (
    held_out_episodes,
    imagined,
    psnr_by_horizon,
    repeat_first,
    windows_of,
)
from cosmos_predict2.pipelines.imagined_figures import (
    MIXTURE,
    MODEL,
    WEAK,
    ImaginedFigures,
    imagination,
    measure,
)
from cosmos_predict2.pipelines.video2world_action import (
    Video2WorldActionConditionedPipeline,
    Video2WorldActionPipelineConfig,
)
from imaginaire import lazy_config
from imaginaire.compose import compose
from tests.training import losses, run_dir, train

CONFIG = "cosmos_predict2/configs/action_conditioned/config.py"
TOLD = "predict2_video2world_tiny_action_conditioned_training"
BLIND = "predict2_video2world_tiny_action_blind_training"
SHORT = [
    "dataloader_train.dataset.num_episodes=32",
    "dataloader_val.dataset.num_episodes=4",
    "trainer.max_iter=12",
    "trainer.validation_iter=12",
    "trainer.logging_iter=1",
]


def trained(root: Path, experiment: str, *overrides: str) -> Video2WorldActionConditionedPipeline:
    """The averaged weights of a run of the experiment in another folder, ready to imagine."""
    options = [f"experiment={experiment}", *overrides]
    named = ["job.project=tests", "job.group=engine", "job.name=learning"]
    assert train(root, [*options, *named], config=CONFIG) == 0
    config: Video2WorldActionPipelineConfig = lazy_config.instantiate(
        compose(CONFIG, options).model["config"]
    ).pipe_config
    return Video2WorldActionConditionedPipeline.from_config(
        config, str(run_dir(root, "learning")), use_text_encoder=False, device="cpu", load_ema_to_reg=True
    )


def default_run(root: Path, experiment: str, *overrides: str) -> ImaginedFigures:
    """The figures of the experiment's run as it is registered."""
    figures = measure(trained(root, experiment, *overrides))
    print(figures.as_text())
    return figures


@pytest.mark.slow
def test_a_short_run_makes_the_loss_smaller_and_imagines(tmp_path: Path) -> None:
    pipe = trained(
        tmp_path, TOLD, *SHORT, "trainer.max_iter=12", "trainer.validation_iter=12", "trainer.logging_iter=1"
    )
    found = [loss for _, loss in losses(tmp_path, "learning")]
    assert found[-1] < 0.8 * found[0]
    assert pipe.transform.dim == 4 and pipe.config.timestamps.nfe == 1
    assert not pipe.dit.reads_text and pipe.dit.patch_spatial == 1
    figures = measure(pipe, num_episodes=4)
    assert figures.gap is not None and figures.gap.num_samples == 4


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_imagines_what_actions_do(tmp_path: Path, seed: int) -> None:
    figures = default_run(tmp_path, TOLD, f"trainer.seed={seed}", f"dataloader_train.dataset.seed={seed}")
    assert figures.gain(1) >= 2 and figures.gain(12) >= 6
    for other in ("repeat first frame", "repeat last motion, coded"):
        for region in figures.horizons[MODEL]:
            # After one frame things are nearly where they were, and the tokenizer hides the rest.
            least = [0.2, 1.0, *[2.0] * 10]
            gains = [figures.gain(h, other, region) for h in range(1, 13)]
            assert all(gain >= wanted for gain, wanted in zip(gains, least, strict=True)), (other, region, gains)
    assert figures.gap is not None and figures.gap.mean >= 5
    assert all(ends.agreement >= 0.99 for ends in figures.detector.values())
    mixture, weak = figures.ends[MIXTURE], figures.ends[WEAK]
    assert mixture.agreement >= 0.82 and mixture.false_positive_rate <= 0.11
    assert weak.agreement >= 0.80 and weak.false_positive_rate <= 0.15


@pytest.mark.long
def test_without_its_actions_the_same_run_imagines_little(tmp_path: Path) -> None:
    imagine, windows = imagination(trained(tmp_path, BLIND), 1), windows_of(held_out_episodes())
    first = windows.video_B_C_F_H_W[:, :, :1]
    video = imagined(imagine, first, torch.zeros_like(windows.action_B_A_D))
    ours = psnr_by_horizon(video, windows)["all"]
    still = psnr_by_horizon(repeat_first(first, windows.action_B_A_D), windows)["all"]
    print(ours, still)
    assert still[-1] < ours[-1] <= still[-1] + 4, "2 dB below what the run with actions must reach"
