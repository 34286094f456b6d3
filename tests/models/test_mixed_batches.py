# SPDX-License-Identifier: Apache-2.0
"""Batches of images between batches of videos, through the whole trainer, with and without processes to share them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess import run_distributed
from tests.training import difference, records, run_dir, saved, train

CONFIG = "cosmos_predict2/configs/base/config.py"
MIXED = [
    "experiment=predict2_video2world_training_tiny_groot_gr1_480",
    "job.project=tests",
    "job.group=engine",
    "optimizer=adamw",
    "~optimizer.adam_lr",
    "optimizer.lr=1e-3",
    "trainer.logging_iter=1",
    "trainer.grad_accum_iter=3",
    "trainer.validation_iter=3",
    "trainer.max_val_iter=4",
    "trainer.callbacks.draw_samples.every_n=3",
    "trainer.callbacks.draw_samples.num_sampling_step=1",
    "trainer.callbacks.draw_samples.n_x0_level=1",
    "checkpoint.save_iter=100",
]
LAYOUTS = {  # of two processes
    "replicated": ["{batch}={{image_data:2,video_data:1}}"],
    "spread": ["{batch}={{image_data:4,video_data:2}}", "model_parallel.context_parallel_size=2"],
}
ONE = ["{batch}={{image_data:4,video_data:2}}"]


def mock(loader: str) -> list[str]:
    """Images and videos in turn, of the tiny model's sizes."""
    text = dict(num_tokens=8, width=64)
    sizes: dict[str, dict[str, Any]] = {
        "image_data": dict(image_size="[48,48]", num_items=64, **text),
        "video_data": dict(video_size="[48,48]", num_items=64, **text),
    }
    values = [f"{loader}.datasets.{name}.{key}={v}" for name, of in sizes.items() for key, v in of.items()]
    return [f"{loader}=mock", *values]


def _train(root: Path, layouts: dict[str, list[str]], *more: str) -> None:
    data = [*mock("dataloader_train"), *mock("dataloader_val")]
    for name, layout in layouts.items():
        sizes = [item.format(batch="dataloader_train.batch_size") for item in layout]
        assert train(root, [*MIXED, *data, *sizes, f"job.name={name}", *more], config=CONFIG) == 0


@pytest.mark.long
def test_images_and_videos_train_together_in_every_layout(tmp_path: Path) -> None:
    _train(tmp_path, {"one": ONE}, "trainer.max_iter=4")
    _train(tmp_path, {"parts": ONE}, "trainer.max_iter=2")
    _train(tmp_path, {"parts": ONE}, "trainer.max_iter=4")
    assert difference(saved(tmp_path, "one"), saved(tmp_path, "parts")) is None
    run_distributed(_train, 2, (tmp_path, LAYOUTS, "trainer.max_iter=4"))

    state, steps = saved(tmp_path, "one")["model"], records(run_dir(tmp_path, "one"))
    # Twelve micro-batches in turn: six of four images, six of two videos.
    assert int(state["net.accum_image_sample_counter"]) == 24
    assert int(state["net.accum_video_sample_counter"]) == 12
    assert all({"train/image_loss", "train/video_loss"} <= step.keys() for step in steps if step["iteration"])
    assert not any("clip_grad_norm/image" in step for step in steps), "every step has both"
    validated = [step for step in steps if "val/loss" in step]
    assert [step["iteration"] for step in validated] == [0, 3, 4]
    assert all({"val/image_loss", "val/video_loss", "val/loss_sigma_80"} <= step.keys() for step in validated)
    assert (run_dir(tmp_path, "one") / "samples/iter_000000003_guidance_0.mp4").is_file(), "the images are passed over"

    for layout in LAYOUTS:
        torch.testing.assert_close(saved(tmp_path, layout)["model"], state, rtol=1e-5, atol=2e-5)
        for mine, theirs in zip(steps, records(run_dir(tmp_path, layout)), strict=True):
            for name in mine.keys() & {"train/loss", "train/image_loss", "train/video_loss"}:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4), f"{layout}: {name}"
