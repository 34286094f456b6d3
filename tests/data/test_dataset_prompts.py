# SPDX-License-Identifier: Apache-2.0
"""Prompts as samples: text files, GenEval's lines, first frames, actions; faults name their line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.data.dataset_prompts import PromptDataset
from cosmos_predict2.data.video.media import write_image
from imaginaire.errors import ConfigError, DataError
from tests.findings import problems

SIZE = (16, 32)
TRANSFORM = controller(2, scale=1.0).to_dict()


def _lines(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def _dataset(path: str, **options: Any) -> PromptDataset:
    return PromptDataset(path, 5, SIZE, **options)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    data = _dataset(_lines(tmp_path / "prompts.txt", "\ufeffone", "", "  two "), fps=10)
    assert [data[i]["ai_caption"] for i in range(len(data))] == ["one", "two"]
    item = data[1]
    assert item["video"].shape == (3, 5, *SIZE) and item["video"].dtype == torch.uint8 and not item["video"].any()
    assert (item["num_true_frames"], item["fps"], item["num_frames"]) == (0, 10.0, 5)


def test_lines_of_geneval_and_first_frames_with_actions(tmp_path: Path) -> None:
    geneval = _dataset(_lines(tmp_path / "a.jsonl", {"tag": "single_object", "include": [], "prompt": "a photo"}))
    assert geneval[0]["ai_caption"] == "a photo"
    picture = torch.arange(3 * 32 * 64, dtype=torch.uint8).reshape(3, 32, 64)
    (tmp_path / "frames").mkdir()
    write_image(tmp_path / "frames/0.png", picture)
    action = [[0.5, -1.0]] * 4
    path = _lines(tmp_path / "b.jsonl", {"prompt": "push", "image": "frames/0.png", "action": action})
    data = _dataset(path, action_transform=TRANSFORM)
    item = data[0]
    assert data.facts(dict(path=path)).num_true_frames == item["num_true_frames"] == 1
    assert item["action"].tolist() == action and json.loads(item["action_transform"])["kind"] == "controller"
    assert all(torch.equal(item["video"][:, k], item["video"][:, 0]) for k in range(5)) and item["video"].any()


WRONG = {
    "no JSON": ('{"prompt": "a"}', "{"),
    "no prompt": ({"prompt": "a"}, {"text": "b"}),
    "an image": ({"prompt": "a"}, {"prompt": "b", "image": "x.png"}),
    "no image": ({"prompt": "a", "image": "x.png"}, {"prompt": "b"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_name_their_line(name: str, tmp_path: Path) -> None:
    path = _lines(tmp_path / "p.jsonl", *WRONG[name])
    with pytest.raises(DataError, match=f"line 2.*{name}"):
        _dataset(path)


def test_actions_fit_the_clip(tmp_path: Path) -> None:
    for action in ([[0.0, 1.0]], [[0.0]] * 4, None, [["a", "b"]] * 4):
        path = _lines(tmp_path / "p.jsonl", {"prompt": "a", "action": action})
        with pytest.raises(DataError, match="line 1"):
            _dataset(path, action_transform=TRANSFORM)


def test_wrong_arguments(tmp_path: Path) -> None:
    path = _lines(tmp_path / "p.txt", "a")
    with pytest.raises(ConfigError, match="text_encoder"):
        _dataset(path, text_encoder="t5")
    (tmp_path / "empty.txt").write_text("\n\n")
    for found, word in ((problems(PromptDataset, path=f"{tmp_path}/no.txt"), "not there"),
                        (problems(PromptDataset, path=f"{tmp_path}/empty.txt"), "no prompt"),
                        (problems(PromptDataset, path=path, video_size=(3, 3)), "video_size")):  # fmt: skip
        assert len(found) == 1 and word in found[0]
