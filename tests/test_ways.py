# SPDX-License-Identifier: Apache-2.0
"""The lists of `documentations/files_that_run.md` have the files that run: a clip, a checkpoint, a request, steps."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_predict2.data.clip_dataset import ClipDataset
from cosmos_predict2.data.video import media
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from examples import video2world
from imaginaire.checkpoint.checkpointer import Checkpointer
from imaginaire.training.trainer import ImaginaireTrainer
from tests.rl.runs import rl_options
from tests.rl.vla_runs import RL, SMALL
from tests.training import train

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "documentations/files_that_run.md"
CONFIG = "cosmos_predict2/configs/base/config.py"
LOOP = {"imaginaire/training/trainer.py", "imaginaire/data/stream.py"}  # they surround the way of a clip
Ran = dict[Callable[..., Any], set[str]]


def listed(title: str) -> set[str]:
    """The files of one list, and its packages: its first column, and whole lines from the word "also" on."""
    found = set()
    (block,) = re.findall(rf"\*\*{re.escape(title)}\*\*[^`]*\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rows, _, others = block.partition("also ")
    for line in [*(re.split(r"  | \(", row)[0] for row in rows.split("\n")), *others.split("\n")]:
        folder = ""
        for entry in re.findall(r"[\w/.]+", line):
            folder = entry.rpartition("/")[0] if "/" in entry else folder
            places = (entry, f"cosmos_predict2/{entry}", f"{folder}/{entry}", f"cosmos_predict2/{folder}/{entry}")
            path = next((place for place in places if (ROOT / place).exists()), None)
            assert path is not None, f"'{title}' lists {entry}"
            found.add(path)
    return found


@contextmanager
def traced(*functions: Callable[..., Any]) -> Iterator[Ran]:
    """Our files that run inside the last call of each function, in the thread of the call; imports do not count."""
    regions: dict[CodeType, set[str]] = {function.__code__: set() for function in functions}
    here, root = threading.local(), f"{ROOT}/"
    ours = tuple(root + name for name in ("cosmos_predict2/", "imaginaire/", "examples/"))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ours):
            return
        path = code.co_filename[len(root) :]
        inside = here.__dict__.setdefault("inside", [])  # functions and imports that this thread is in
        if code in regions or code.co_name == "<module>":
            if event == "return":
                inside.pop()
                return
            if code in regions and code not in inside:
                regions[code].clear()
            inside.append(code)
        if event == "call" and all(one in regions for one in inside):
            for one in inside:
                regions[one].add(path)

    found: Ran = {function: regions[function.__code__] for function in functions}
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def of_training(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A folder of one clip with its embedding: an iteration of the tiny twin, saved, and resumed for another."""
    root = tmp_path_factory.mktemp("clips")
    media.write_video(root / "videos/a.mp4", torch.zeros(3, 13, 48, 48, dtype=torch.uint8), 10)
    embed_captions(root / "t5_xxl", {"a": "a robot"}, BytesEncoder(64, 64))
    data = dict(dataset_dir=root, num_frames=13, video_size="[48,48]", num_tokens=64, text_encoder="bytes")
    words = ["experiment=predict2_video2world_training_tiny_groot_gr1_480", "dataloader_train=folder"]
    words += [f"dataloader_train.dataset.{key}={value}" for key, value in data.items()]
    words += ["dataloader_train.batch_size=1", "dataloader_train.num_workers=0", "trainer.run_validation=false"]
    words += ["dataloader_train.prefetch_factor=null", "trainer.callbacks.draw_samples=null", "checkpoint.save_iter=1"]
    way = (ClipDataset.__getitem__, Video2WorldModel.training_step, Checkpointer.save, Checkpointer.load)
    with traced(*way, Checkpointer._write_and_report) as ran:
        for iterations in (1, 2):
            assert train(root, [*words, f"trainer.max_iter={iterations}"], config=CONFIG) == 0
    return ran


def check_list(title: str, ran: set[str]) -> None:
    names = listed(title)
    packages = tuple(f"{name}/" for name in names if not name.endswith(".py"))
    ran = {next((one[:-1] for one in packages if path.startswith(one)), path) for path in ran}
    ran.discard("imaginaire/renamed.py")  # where a module is first imported by an older name
    lines = [f"runs, but is not listed: {path}" for path in sorted(ran - names)]
    lines += [f"is listed, but does not run: {path}" for path in sorted(names - ran)]
    assert not lines, "\n".join([title, *lines])


def test_a_clip_becomes_a_loss_in_the_files_of_its_list(of_training: Ran) -> None:
    ran = of_training[ClipDataset.__getitem__] | of_training[Video2WorldModel.training_step]
    check_list("A clip becomes a loss.", ran | LOOP)


def test_a_checkpoint_goes_to_disk_and_back_in_the_files_of_its_list(of_training: Ran) -> None:
    saved = of_training[Checkpointer.save] | of_training[Checkpointer._write_and_report]
    check_list("A checkpoint goes to disk and back.", saved | of_training[Checkpointer.load])


def test_a_request_becomes_an_mp4_in_the_files_of_its_list(tmp_path: Path) -> None:
    words = ["video2world", "--model_size", "tiny", "--num_steps", "2", "--prompt", "push"]
    with traced(video2world.main) as ran, mock.patch.object(sys, "argv", [*words, "--save_path", f"{tmp_path}/a.mp4"]):
        assert [video2world.main() for _ in range(2)] == [0, 0]
    check_list("A request becomes an mp4.", ran[video2world.main])


POLICY = "experiment=tiny_vla_grpo_world_model_frozen"
STEPS = {
    "A FlowGRPO step.": rl_options(),
    "A policy's step in imagination.": [
        POLICY,
        *(word for word in SMALL if "refinement" not in word),
        f"{RL}.minibatches=1",
    ],
}


@pytest.mark.parametrize("title", STEPS)
def test_a_step_of_reinforcement_learning_runs_the_files_of_its_list(title: str, tmp_path: Path) -> None:
    with traced(ImaginaireTrainer._step) as ran:
        assert train(tmp_path, [*STEPS[title], "trainer.max_iter=1", "checkpoint.save_iter=100"], config=CONFIG) == 0
    check_list(title, ran[ImaginaireTrainer._step])


@pytest.mark.parametrize("title", ["`optimizer.lr` becomes a step.", "An action becomes a modulation."])
def test_the_files_of_the_other_lists_exist(title: str) -> None:
    assert len(listed(title)) > 4
