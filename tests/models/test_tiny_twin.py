# SPDX-License-Identifier: Apache-2.0
"""The registered tiny experiment: it composes, trains, stops, resumes exactly, and generates."""

import re
import sys
from pathlib import Path

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from imaginaire.config.compose import compose
from imaginaire.training import preflight
from tests.multiprocess import run_distributed
from tests.training import difference, losses, records, rewind, run_dir, saved, train

CONFIG = "cosmos_predict2/configs/base/config.py"
EXPERIMENT = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
NAME = "tiny_groot_gr1_480"
SHORT = [
    EXPERIMENT,
    "job.project=tests",
    "job.group=engine",
    "trainer.logging_iter=1",
    "trainer.validation_iter=2",
    "dataloader_train.batch_size=4",
    "dataloader_train.dataset.num_episodes=32",
    "dataloader_val.dataset.num_episodes=4",
    "checkpoint.save_iter=2",
]


def test_clips_that_are_too_short_show_before_anything_is_built() -> None:
    short = ["dataloader_train.dataset.num_frames=9", "dataloader_val.dataset.num_frames=5"]
    found = preflight.findings(compose(CONFIG, [*SHORT, *short]))
    assert [one.key for one in found] == ["dataloader_train.dataset", "dataloader_val.dataset"]
    assert "num_frames=9, but the model takes 13 (state_t=4). Set it to 13" in str(found[0])
    unused = preflight.findings(compose(CONFIG, [*SHORT, short[1], "trainer.run_validation=False"]))
    assert list(unused) == []  # validation data that is never built need not fit


def test_embeddings_that_the_network_does_not_take_show_before_anything_is_built(tmp_path: Path) -> None:
    media.write_video(tmp_path / "videos/a.mp4", torch.zeros(3, 13, 48, 48, dtype=torch.uint8), 10)
    embed_captions(tmp_path / "t5_xxl", {"a": "a robot"}, BytesEncoder(64, 32))
    folder = ["dataloader_train=folder", f"dataloader_train.dataset.dataset_dir={tmp_path}"]
    folder += ["trainer.run_validation=False"]  # it would be on the toy world, which draws a note
    ours = [EXPERIMENT, *SHORT[1:5], *folder, "dataloader_train.dataset.video_size=[48,48]"]
    found = sorted(one.text for one in preflight.findings(compose(CONFIG, ours)))
    large = compose(CONFIG, [*ours[:-1], "dataloader_train.dataset.video_size=[48,144]"])
    assert any("video_size=[48, 144] is beyond" in one.text for one in preflight.findings(large))
    assert len(found) == 2 and "but t5 was asked for" in found[0]
    assert (
        "have width 32, but the network takes 64" in found[1]
        and "--text_encoder bytes --num_tokens 512 --text_width 64" in found[1]
    )


LORA = "model.config.train_architecture=lora"
V2W = "predict2_video2world_training_tiny_"


@pytest.mark.parametrize(
    ("experiment", "overrides"),
    [
        pytest.param(f"{V2W}groot_gr1_480", [], marks=pytest.mark.slow),
        pytest.param("predict2_video2world_lora_training_tiny_cosmos_nemo_assets", [], marks=pytest.mark.long),
        pytest.param(f"{V2W}groot_gr1_480", [LORA], marks=pytest.mark.long),
        pytest.param("tiny_wan2pt1_i2v", [], marks=pytest.mark.long),
        pytest.param(f"{V2W}agibot_head_center_fisheye_color", [], marks=pytest.mark.long),
        pytest.param(f"{V2W}cosmos_nemo_assets", [], marks=pytest.mark.long),
        pytest.param(f"{V2W}video2world_data", [], marks=pytest.mark.long),
        pytest.param("predict2p5_video2world_training_tiny_groot_gr1_480", [], marks=pytest.mark.long),
    ],
)
def test_a_twin_resumes_as_if_it_had_not_stopped_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: str, overrides: list[str]
) -> None:
    """Also where samples are drawn in one of the two runs only."""
    from examples.video2world import main

    options = [f"experiment={experiment}", *SHORT[1:], *overrides, f"job.name={NAME}"]
    assert train(tmp_path / "whole", [*options, "trainer.max_iter=4"], config=CONFIG) == 0
    options += drawing(every_n=1, num_sampling_step=1, n_x0_level=1, n_viz_sample=1)
    folder = run_dir(tmp_path / "parts", NAME)
    rewind(run_dir(tmp_path / "whole", NAME), folder, 2)
    assert train(tmp_path / "parts", [*options, "trainer.max_iter=4"], config=CONFIG) == 0
    drawn = [path.name for path in sorted((folder / "samples").glob("*.mp4"))]
    assert drawn == [f"iter_00000000{i}_guidance_0.mp4" for i in (3, 4)]
    assert difference(saved(tmp_path / "whole", NAME), saved(tmp_path / "parts", NAME)) is None
    assert losses(tmp_path / "whole", NAME) == losses(tmp_path / "parts", NAME)
    weights, video = folder / "checkpoints/model/iter_000000004.pt", tmp_path / "video.mp4"
    arguments = ["--dit_path", str(weights), "--prompt", "push the red puck", "--num_steps", "2"]
    monkeypatch.setattr(sys, "argv", ["video2world.py", *arguments, "--save_path", str(video)])
    assert main() == 0
    assert media.read_video(video)[0].shape == (3, 13, 48, 48)


LAYOUTS = {  # of two processes, for four samples a step
    "replicated": ["dataloader_train.batch_size=2"],
    "spread_and_sharded": [
        "model_parallel.context_parallel_size=2",
        "trainer.distributed_parallelism=fsdp",
        "model.config.fsdp_shard_size=2",
        "model.config.pipe_config.net.sac_config.mode=block_wise",
    ],
}


def drawing(**options: int) -> list[str]:
    """The overrides that set draw_samples."""
    return [f"trainer.callbacks.draw_samples.{key}={value}" for key, value in options.items()]


def _train_layouts(root: Path, layouts: dict[str, list[str]], experiment: str = EXPERIMENT) -> None:
    short = [*SHORT, *drawing(every_n=3, num_sampling_step=2, n_x0_level=2, n_viz_sample=3)]
    options = [
        experiment,
        *short[1:],
        "dataloader_val.dataset.num_episodes=5",
        "optimizer=adamw",
        "~optimizer.adam_lr",
        "optimizer.lr=1e-3",
        "trainer.max_iter=3",
    ]
    for name, layout in layouts.items():
        assert train(root, [*options, *layout, f"job.name={name}"], config=CONFIG) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "experiment",
    [
        EXPERIMENT,
        EXPERIMENT.replace("predict2_", "predict2p5_"),
        "experiment=predict2_multiview_training_tiny_waymo5views",
    ],
)
def test_two_processes_train_what_one_does(tmp_path: Path, experiment: str) -> None:
    run_distributed(_train_layouts, 2, (tmp_path, LAYOUTS, experiment))
    _train_layouts(tmp_path, {"one": []}, experiment)
    one = saved(tmp_path, "one")["model"]
    assert int(one["net.accum_video_sample_counter"]) == 12
    # Of whole clips, also where each rank has the loss of its own frames.
    assert _first_losses(tmp_path, "one") == pytest.approx(_first_losses(tmp_path, "spread_and_sharded"), abs=2e-4)
    for layout in LAYOUTS:
        torch.testing.assert_close(saved(tmp_path, layout)["model"], one, rtol=1e-5, atol=2e-5)
        of_one, of_two = ([value for _, value in losses(tmp_path, name)] for name in ("one", layout))
        assert of_one == pytest.approx(of_two, rel=1e-5)  # of training and of validation
        of_one, of_two = (_measured(run_dir(tmp_path, name)) for name in ("one", layout))
        assert of_one == pytest.approx(of_two, rel=2e-5)
        assert {
            "val/loss_sigma_80",
            "val/video_loss",
            "samples/psnr_ema",
            "samples/x0_mse_reg_sigma_80",
        } <= of_one.keys()


def _first_losses(root: Path, name: str) -> list[float]:
    """The losses of the first steps, as logged."""
    text = (run_dir(root, name) / "stdout.log").read_text()
    found = [float(loss) for loss in re.findall(r"Hit counter: \d/5 \| Loss: ([\d.]+)", text)]
    assert found
    return found


def _measured(folder: Path) -> dict[str, float]:
    """The last measurements of validation and samples."""
    found: dict[str, float] = {}
    for record in records(folder):
        found |= {name: value for name, value in record.items() if name.startswith(("val/", "samples/"))}
    return found
