# SPDX-License-Identifier: Apache-2.0
"""Training and inference commands as published guides print them, with the tiny twin and two processes put in place."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cosmos_predict2.data.video import media
from imaginaire.distributed import free_port
from tests.guides import follow, linked, start
from tests.programs import HANG_S

# What the guides print. A test puts other names and numbers in place and leaves the rest as it is.
TRAIN = """
EXP=predict2_video2world_training_2b_agibot_head_center_fisheye_color
torchrun --nproc_per_node=8 --master_port=12341 -m scripts.train --config=cosmos_predict2/configs/base/config.py -- experiment=${EXP}
"""  # noqa: E501
TRAIN_GROOT = """
# Set experiment name
export EXP=predict2_video2world_training_2b_groot_gr1_480

# Run training
torchrun --nproc_per_node=8 --master_port=12341 -m scripts.train --config=cosmos_predict2/configs/base/config.py -- experiment=${EXP}
"""  # noqa: E501
TRAIN_ON_NODES = """
EXP=predict2_video2world_training_14b_agibot_head_center_fisheye_color
torchrun --nproc_per_node=8 --nnodes=4 --rdzv_id 123 --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:1234 \\
-m scripts.train --config=cosmos_predict2/configs/base/config.py -- experiment=${EXP}
"""
RUNS = "checkpoints/posttraining/video2world"
INFER = """
PROMPT="The video captures a humanoid robot positioned in front of a fruit stand in a supermarket environment."

CUDA_HOME=$CONDA_PREFIX PYTHONPATH=$(pwd) python examples/video2world.py \\
  --model_size 2B \\
  --dit_path "checkpoints/posttraining/video2world/predict2_video2world_training_2b_agibot_head_center_fisheye_color/checkpoints/model/iter_000001000.pt" \\
  --prompt "${PROMPT}" \\
  --input_path "datasets/agibot_head_center_fisheye_color/val/task_327_episode_685393_window_0_frame_0-149.mp4" \\
  --num_conditional_frmaes 1 \\
  --save_path results/agibot_head_center_fisheye_color/generated_video_2b.mp4
"""  # noqa: E501
INFER_GROOT = """
python examples/video2world.py \\
  --model_size 2B \\
  --dit_path "checkpoints/posttraining/video2world/your_experiment/checkpoints/model/iter_001000.pt" \\
  --prompt "Your descriptive prompt" \\
  --input_path "path/to/input.jpg" \\
  --save_path "path/to/output.mp4"
"""

AGIBOT, GROOT = "agibot_head_center_fisheye_color", "groot_gr1_480"
CLIP = "task_327_episode_685393_window_0_frame_0-149.mp4"
SHORT = (
    " trainer.max_iter=2 checkpoint.save_iter=1 dataloader_train.batch_size=2 dataloader_train.dataset.num_episodes=32"
)
SHORT += " dataloader_val.dataset.num_episodes=4 trainer.validation_iter=2"


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like a checkout, with one clip where AgiBot's preparation puts it."""
    linked(tmp_path, "examples")
    frames = torch.randint(255, (3, 20, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    clip = tmp_path / f"datasets/{AGIBOT}/val/videos/{CLIP}"
    clip.parent.mkdir(parents=True)
    media.write_video(str(clip), frames, fps=10)
    (tmp_path / "path/to").mkdir(parents=True)
    media.write_image(str(tmp_path / "path/to/input.jpg"), frames[:, 0])
    yield tmp_path


def tiny(command: str, *more: str) -> str:
    """The command of a guide for the tiny twin, two processes, a free port and a run of two iterations."""
    command = re.sub(r"training_(2b|14b)_", "training_tiny_", command.strip())
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2").replace("12341", str(free_port()))
    command = command.replace("--model_size 2B", "--model_size tiny --num_steps 2")
    assert "tiny" in command
    return command + "".join(more)


def frames_of(path: Path) -> int:
    return media.probe_video(str(path)).num_frames


@pytest.mark.slow
def test_train_and_generate_as_the_first_guide_says(checkout: Path) -> None:
    follow(checkout, tiny(TRAIN_GROOT, SHORT))
    made = checkout / RUNS / "tiny_groot_gr1_480/checkpoints/model/iter_000000002.pt"
    assert made.is_file()
    command = (
        tiny(INFER_GROOT).replace("your_experiment", "tiny_groot_gr1_480").replace("iter_001000", "iter_000000002")
    )
    follow(checkout, command)
    assert frames_of(checkout / "path/to/output.mp4") == 13
    wrong = command.replace("iter_000000002", "iter_000002")
    assert f"There is {made.relative_to(checkout)}." in follow(checkout, wrong, code=2)


@pytest.mark.long
def test_the_guide_of_agibot_from_training_to_a_video(checkout: Path) -> None:
    printed = follow(checkout, tiny(TRAIN, SHORT))
    run = f"{RUNS}/tiny_{AGIBOT}"
    assert (checkout / run / "checkpoints/latest_checkpoint.txt").read_text().strip() == "iter_000000002.pt"
    assert {path.name for path in (checkout / run / "checkpoints").iterdir()} == {
        "model", "optim", "scheduler", "trainer", "latest_checkpoint.txt"
    }  # fmt: skip
    assert "cpu x2" in printed

    # Each of the two printed paths is wrong in its way; the errors name the files that are meant.
    command = tiny(INFER).replace("iter_000001000", "iter_000000002")
    clip = f"datasets/{AGIBOT}/val/videos/{CLIP}"
    assert f"There is {clip}." in follow(checkout, command, code=2)
    command = command.replace(f"val/{CLIP}", f"val/videos/{CLIP}")
    file = f"{run}/checkpoints/model/iter_000000002.pt"
    assert f"There is {file}." in follow(checkout, command, code=2)
    command = command.replace("predict2_video2world_training_tiny_", "tiny_")
    printed = follow(checkout, command)
    assert "--num_conditional_frmaes is read as --num_conditional_frames" in printed
    assert frames_of(checkout / f"results/{AGIBOT}/generated_video_2b.mp4") == 13
    shorter = command.replace("iter_000000002", "iter_000002")
    assert f"There is {file}." in follow(checkout, shorter, code=2)


@pytest.mark.long
def test_the_command_for_several_nodes_on_two_that_share_a_machine(checkout: Path) -> None:
    port = free_port()
    command = tiny(TRAIN_ON_NODES, SHORT).replace("--nproc_per_node=2 --nnodes=4", "--nproc_per_node=1 --nnodes=2")
    command = command.replace(":1234", f":{port}")
    nodes = [start(checkout, command, MASTER_ADDR="localhost") for _ in range(2)]
    printed = [node.communicate(timeout=HANG_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed[0][-3000:] + printed[1][-3000:]
    log = (checkout / RUNS / f"tiny_{AGIBOT}/stdout.log").read_text()
    assert "cpu x2" in log and "finished: iteration 2" in log
