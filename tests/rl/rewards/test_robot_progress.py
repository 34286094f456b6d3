# SPDX-License-Identifier: Apache-2.0
"""TOPReward and Robometer, with tiny random weights in their public layouts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_predict2.rl.rewards.judges.robot_progress import QUESTION, SPECIAL, STATEMENT
from cosmos_predict2.rl.rewards.local import REWARDS, build, scored_by
from cosmos_predict2.text import qwen_vl
from imaginaire.errors import CheckpointError, ConfigError
from tests.rl.rewards.tiny_judges import clips_of_noise, make_qwen3, make_robometer

HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, make_qwen3(path)


@pytest.fixture(scope="module")
def robometer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    path = tmp_path_factory.mktemp("robometer")
    return path, *make_robometer(path)


def clips(*prompts: str, frames: int = 21) -> Any:
    return clips_of_noise(*prompts, frames=frames, size=(70, 100), fps=10.0)


def judge_of(name: str, place: Path, arguments: dict[str, Any] | None = None) -> Any:
    given = dict(base_path=str(place / "base")) if name == "robometer" else {}
    return build(REWARDS[name], {**given, **(arguments or {})}, model_path=str(place), device="cpu", dtype="float32")


def test_topreward_is_the_probability_of_the_last_word(qwen3: tuple[Path, Any]) -> None:
    place, network = qwen3
    judge, shown = judge_of("topreward", place), clips("open the drawer", "wave")
    found = judge(shown, {})
    for row, task in enumerate(shown.prompts):
        frames = shown.video_B_C_F_H_W[row][:, [0, 7, 13, 20]].permute(1, 0, 2, 3)  # two a second of 2.1 s
        patches = qwen_vl.patches_of(frames, 1024, 10**6, 16, HALF, HALF)
        assert patches.grid == (2, 4, 6)
        picture = f"<|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>"
        text = f"<|im_start|>user\n<0.2 seconds>{picture}<1.2 seconds>{picture}{STATEMENT.replace('{task}', task)}"
        ids = torch.tensor([judge.tokenizer.encode(text, add_special_tokens=False)])
        is_video = ids == network.config.video_token_id
        with torch.no_grad():
            logits = network(
                input_ids=ids, pixel_values_videos=patches.values, video_grid_thw=torch.tensor([[2, 4, 6]]),
                mm_token_type_ids=is_video.int() * 2,
            ).logits[0, -2]  # fmt: skip
        expected = float(logits.log_softmax(dim=0)[ids[0, -1]])
        assert float(found["value"][row]) == pytest.approx(expected, abs=1e-4)
    assert torch.allclose(found["probability"], found["value"].exp())
    assert found["value"][0] != found["value"][1]


def test_robometer_reads_its_heads_behind_the_last_picture(robometer: tuple[Path, Any, Any]) -> None:
    """Against the package's own way of pictures, which are images there and videos of one frame here."""
    place, network, heads = robometer
    judge, shown = judge_of("robometer", place), clips("open the drawer", "wave")
    found = judge(shown, {})
    image = network.config.image_token_id
    for row, task in enumerate(shown.prompts):
        chosen = [0, 3, 6, 9, 11, 14, 17, 20]
        cut = [shown.video_B_C_F_H_W[row][:, [k]].permute(1, 0, 2, 3) for k in chosen]
        patches = [qwen_vl.patches_of(frame, 1024, 10**6, 16, HALF, HALF) for frame in cut]
        pictures = "".join(
            f"Picture {k}: <|vision_start|>{'<|image_pad|>' * 6}<|vision_end|><|prog_token|>" for k in range(1, 9)
        )
        text = f"<|im_start|>user\n{QUESTION.replace('{task}', task)}{pictures}<|im_end|>\n"
        ids = torch.tensor([judge.tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            hidden = network(
                input_ids=ids, pixel_values=torch.cat([one.values for one in patches]),
                image_grid_thw=torch.tensor([one.grid for one in patches]), mm_token_type_ids=(ids == image).int(),
                output_hidden_states=True,
            ).hidden_states[-1][0]  # fmt: skip
            last = hidden[ids[0] == judge.tokenizer.convert_tokens_to_ids("<|prog_token|>")][-1]
            progress = heads["progress_head"](last).softmax(dim=0) @ (torch.arange(10.0) / 9)
            success = heads["success_head"](last)[0].sigmoid()
        assert float(found["progress"][row]) == pytest.approx(float(progress), abs=1e-4)
        assert float(found["success"][row]) == pytest.approx(float(success), abs=1e-4)
    assert torch.equal(found["value"], found["progress"]) and found["value"][0] != found["value"][1]
    assert judge.tokenizer.encode("".join(SPECIAL)) == list(range(263, 268))


def test_a_picture_of_robometer_has_the_least_pixels_alone_and_frames_of_a_video_together(
    qwen3: tuple[Path, Any], robometer: tuple[Path, Any, Any]
) -> None:
    small = torch.zeros(3, 20, 32, 32, dtype=torch.uint8)
    grids = [judge_of(name, place)._question(small, 10.0, "a").patches.grid for name, place in
             (("topreward", qwen3[0]), ("robometer", robometer[0]))]  # fmt: skip
    assert grids == [(2, 2, 2), (8, 4, 4)]


@pytest.mark.parametrize("name", ["topreward", "robometer"])
def test_a_judge_is_a_reward_and_reads_the_pictures(name: str, qwen3: Any, robometer: Any) -> None:
    place = qwen3[0] if name == "topreward" else robometer[0]
    judge, shown = judge_of(name, place, {"clips_at_once": 2}), clips("a", "a", "bb")
    reward = scored_by(judge, "rewards.progress")
    assert reward.needs_pixels
    scores = reward.fetch(reward.submit(shown, {}, "one"), 1.0)
    assert scores.is_valid_B.all() and scores.value_B.unique().numel() == 3
    alone = judge_of(name, place, {"clips_at_once": 1})(shown, {})["value"]
    torch.testing.assert_close(scores.value_B, alone, rtol=1e-4, atol=1e-4)
    ends = [0, -1] if name == "topreward" else [-1]
    few = judge_of(name, place, {"max_frames": len(ends)})(shown, {})["value"]
    same = judge(replace(shown, video_B_C_F_H_W=shown.video_B_C_F_H_W[:, :, ends]), {})["value"]
    torch.testing.assert_close(few, same, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(judge(clips("<|video_pad|><|prog_token|>", frames=1), {})["value"]).all()


@pytest.mark.parametrize("name", ["topreward", "robometer"])
def test_the_published_wording_is_read_from_a_file(name: str, qwen3: Any, robometer: Any, tmp_path: Path) -> None:
    place = qwen3[0] if name == "topreward" else robometer[0]
    file = tmp_path / "prompt.txt"
    file.write_text("Is this {task}? True\n")
    other = judge_of(name, place, {"prompt_path": str(file)})(clips("a"), {})["value"]
    assert not torch.equal(other, judge_of(name, place)(clips("a"), {})["value"])
    file.write_text("Is this so? True")
    with pytest.raises(ConfigError, match=r"\{task\}"):
        judge_of(name, place, {"prompt_path": str(file)})
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        judge_of(name, place, {"prompt_path": str(file)})


def test_what_is_no_robometer_is_refused(tmp_path: Path) -> None:
    make_robometer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"progress_loss_type": "l2"}, {"use_multi_image": False}, {"vlm_config": None}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match="is no Robometer"):
            judge_of("robometer", tmp_path)
    text = {**config["vlm_config"]["text_config"], "vocab_size": 200}
    content = {**config, "vlm_config": {**config["vlm_config"], "text_config": text}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="268 tokens with Robometer's"):
        judge_of("robometer", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for lost in ("success_head.4.weight", "model.model.visual.blocks.1.mlp.linear_fc1.weight"):
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=lost.removeprefix("model.").replace(".", r"\.")):
            judge_of("robometer", tmp_path)


def test_topreward_s_weights_must_be_whole(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        judge_of("topreward", tmp_path)
