# SPDX-License-Identifier: Apache-2.0
"""A world model to learn in out of one folder: its parts are found, and each one that is missing is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cosmos_predict2.configs.rl.model_dir import find_parts, from_model_dir
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.errors import UserError

INIT_STATES = Path(__file__).parents[1] / "golden" / "action" / "init_states"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The published layout, with tiny parts."""
    place = tmp_path / "model"
    shutil.copytree(INIT_STATES, place / "dataset")
    shutil.copy(TINY_ACTION, place / "world.safetensors")
    (place / "tokenizer").mkdir()
    torch.save(TinyTokenizer().net.state_dict(), place / "tokenizer" / "tokenizer.pth")
    torch.manual_seed(0)
    torch.save({"model_state_dict": SuccessClassifier([4, 4, 4, 4, 4]).state_dict()}, place / "resnet_rm.pth")
    (place / "dataset_statistics.json").write_text(json.dumps({"libero": {}}))
    return place


def test_an_environment_is_made_of_the_folder_alone(folder: Path) -> None:
    env = from_model_dir(str(folder), 2, 24, action_transform="", size=(48, 48), device="cpu")
    observed, _ = env.reset(options={"trial_ids": [0, 0], "task_ids": [0, 3]})
    assert observed["task_description"] == ["pick up object 0", "pick up object 1"]
    observed, reward, _, _, info = env.chunk_step(torch.zeros(2, 12, 4))
    assert observed["full_image"].shape == (2, 48, 48, 3) and reward.abs().max() <= 1
    assert set(info["values"].unique().tolist()) <= {0.0, 1.0}  # rounded, as published


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("world.safetensors", "none of .*download_checkpoints"),
        ("resnet_rm.pth", "resnet_rm.pth is missing.*train_reward_model"),
        ("tokenizer/tokenizer.pth", "tokenizer.pth is missing.*download_checkpoints"),
        ("dataset", "no recorded first states.*make_reset_states"),
        ("dataset_statistics.json", "dataset_statistics.json is missing"),
    ],
)
def test_a_missing_part_is_named_with_what_brings_it(folder: Path, missing: str, words: str) -> None:
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match=words):
        find_parts(str(folder))


def test_a_folder_that_is_not_there_and_two_weights_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*modl.*Did you mean .*model"):
        find_parts(str(folder.with_name("modl")))
    with pytest.raises(UserError, match="--embodied pi05"):
        find_parts("RLinf/RLinf-Pi05-LIBERO-SFT")
    for name in ("a.pt", "b.pt"):
        (folder / name).touch()
    with pytest.raises(UserError, match=r"a.pt, b.pt of \*.pt"):
        find_parts(str(folder))
