# SPDX-License-Identifier: Apache-2.0
"""The judges, with tiny random weights in their public layouts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from fastapi.testclient import TestClient

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import remote, wire
from cosmos_predict2.rl.rewards.judges import video_align
from cosmos_predict2.rl.rewards.judges.reason1_reward import patches_and_pace
from cosmos_predict2.rl.rewards.local import REWARDS, build
from cosmos_predict2.rl.rewards.remote import Answer
from cosmos_predict2.rl.rewards.service.scoring import Scorer, build_decoder
from cosmos_predict2.rl.rewards.service.server import create_app
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings
from cosmos_predict2.text import qwen_vl
from cosmos_predict2.text.qwen_vl import Patches, VideoQuestion, patches_of, size_within
from imaginaire.config import instantiate
from imaginaire.config.compose import compose
from imaginaire.errors import CheckpointError, ConfigError
from tests.rl.rewards.service.here import Here
from tests.rl.rewards.tiny_judges import REWARD_TOKENS, STATISTICS, clips_of_noise, make_reason1, make_video_align


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    make_reason1(path)
    return path


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("video_align")
    return path, make_video_align(path)


def clips(*prompts: str, frames: int = 9) -> Any:
    return clips_of_noise(*prompts, frames=frames, size=(40, 60), fps=16.0)


def test_a_verdict_and_its_logits(folder: Path) -> None:
    judge: Any = build(REWARDS["cosmos_reason1"], model_path=str(folder), device="cpu")
    found = judge(clips("a", "b"), {})
    for k in range(2):
        yes, no = float(found["yes_logit"][k]), float(found["no_logit"][k])
        assert float(found["no_score"][k]) == pytest.approx(math.exp(no) / (math.exp(yes) + math.exp(no)), abs=1e-6)
        assert found["prediction"][k] == ("Bad" if yes > no else "Good")
    assert found["yes_logit"][0] != found["yes_logit"][1]  # it sees the video
    body = wire.encode(clips("a"), {"cosmos_reason1": 1.0}, media="video")
    (result,) = Scorer("cosmos_reason1", judge, lambda: None).score([body])  # type: ignore[arg-type, return-value]
    assert isinstance(result, dict)  # with the published keys
    assert set(result["scores"]) == {"cosmos_reason1", "no_score", "yes_logit", "no_logit", "prediction"}
    again = judge(clips("c", "d"), {})
    assert torch.equal(found["value"], again["value"])  # and asks its question, whatever the caption
    asking: Any = build(REWARDS["cosmos_reason1"], {"asks_caption": True}, model_path=str(folder), device="cpu")
    with pytest.raises(ConfigError, match="system_prompt_path nowhere cannot be read"):
        build(REWARDS["cosmos_reason1"], {"system_prompt_path": "nowhere"}, model_path=str(folder), device="cpu")
    captions = ["a", "<|video_pad|>"]
    assert torch.isfinite(asking(clips(*captions), {})["value"]).all()
    assert not torch.equal(asking(clips("a", "b"), {})["value"], asking(clips("c", "d"), {})["value"])


def judged(place: Path, **arguments: Any) -> Any:
    return build(REWARDS["dance_grpo"], dict(base_path=str(place / "base"), **arguments), model_path=str(place))


def test_video_align_scores_as_its_network_with_live_adapters_does(released: tuple[Path, Any]) -> None:
    place, adapted = released
    judge = judged(place, device="cpu")
    found = judge(clips("a red ball", "b", frames=33), {})
    video = clips("a red ball", "b", frames=33).video_B_C_F_H_W
    network = adapted.base_model.model
    for row, prompt in enumerate(["a red ball", "b"]):
        patches = patches_of(video[row][:, [0, 11, 21, 32]].permute(1, 0, 2, 3), 100_352, 200_704)
        text = qwen_vl.conversation(video_align.SYSTEM, video_align.INSTRUCTION.replace(video_align.TEXT, prompt))
        token_id = network.config.video_token_id
        asked = qwen_vl.question_of(judge.tokenizer, text, patches, token_id)
        given = qwen_vl.model_input([asked], token_id, network)
        places = torch.arange(given["input_ids"].shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            hidden = network.model(**given, position_ids=places).last_hidden_state[0]
            scores = network.rm_head(hidden)[:, 0].float()
        for token, name in zip(REWARD_TOKENS, ("VQ", "MQ", "TA"), strict=True):
            (at,) = (given["input_ids"][0] == judge.tokenizer.convert_tokens_to_ids(token)).nonzero()
            expected = (float(scores[at]) - STATISTICS[f"{name}_mean"]) / STATISTICS[f"{name}_std"]
            assert float(found[f"{name.lower()}_reward"][row]) == pytest.approx(expected, abs=1e-4)
    parts = found["vq_reward"] + found["mq_reward"] + found["ta_reward"]
    assert torch.equal(found["overall_reward"], found["value"])
    assert torch.allclose(found["value"], parts)


def test_video_align_reads_the_prompt_and_only_text_alignment_changes(released: tuple[Path, Any]) -> None:
    judge = judged(released[0])
    one, two = judge(clips("a"), {}), judge(clips("<|video_pad|><|TA_reward|>"), {})
    for name in ("vq_reward", "mq_reward"):  # read before the prompt
        assert torch.allclose(one[name], two[name], atol=1e-5)
    assert not torch.allclose(one["ta_reward"], two["ta_reward"], atol=1e-4)


@pytest.mark.parametrize("name", ["cosmos_reason1", "dance_grpo"])
def test_judges_see_clips_of_one_form_together_and_score_them_as_alone(
    name: str, folder: Path, released: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(clips_at_once: int) -> Any:
        if name == "dance_grpo":
            return judged(released[0], device="cpu", clips_at_once=clips_at_once)
        arguments = dict(asks_caption=True, clips_at_once=clips_at_once)
        return build(REWARDS[name], arguments, model_path=str(folder), device="cpu")

    shown = clips("a ball", "something longer", "a cube", "a cone")
    sizes: list[int] = []
    together, alone = judge(2), judge(1)
    method = "_scores" if name == "dance_grpo" else "_logits"
    real = getattr(together, method)
    monkeypatch.setattr(together, method, lambda batch: sizes.append(len(batch)) or real(batch))
    found, expected = together(shown, {}), alone(shown, {})
    assert sizes == [2, 1, 1]  # three prompts of one length, and one of its own
    assert expected["value"].unique().numel() == 4
    # batched kernels may add in another order; float32 sums of some hundred terms
    torch.testing.assert_close(found["value"], expected["value"], rtol=1e-4, atol=1e-4)


def test_video_align_takes_the_published_instruction(released: tuple[Path, Any], tmp_path: Path) -> None:
    file = tmp_path / "instruction.txt"
    file.write_text("Rate. <|VQ_reward|> <|MQ_reward|> {text_prompt} <|TA_reward|>")
    other = judged(released[0], instruction_path=str(file))(clips("a"), {})
    assert not torch.equal(other["vq_reward"], judged(released[0])(clips("a"), {})["vq_reward"])
    tokens = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>", "{text_prompt}"]
    for lost in tokens:
        file.write_text(" ".join(token for token in tokens if token != lost))
        with pytest.raises(ConfigError, match=re.escape(lost)):
            judged(released[0], instruction_path=str(file))


@pytest.mark.parametrize(
    ("frames", "fps", "expected"), [(1, 16.0, [0]), (3, 16.0, [0, 2]), (33, 16.0, [0, 11, 21, 32]), (93, 16.0, 12)]
)
def test_video_align_sees_two_frames_a_second(frames: int, fps: float, expected: list[int] | int) -> None:
    found = video_align.evenly_spaced(frames, fps, 2.0)
    assert len(found) == expected if isinstance(expected, int) else found == expected


def test_what_is_no_video_align_is_refused(released: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint-N"):
        judged(tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "model_config.json").write_text(json.dumps({"data_config": {}}))
    with pytest.raises(CheckpointError, match="model_config"):
        judged(tmp_path)


def test_the_reward_of_an_experiment_is_scored_by_our_service(
    released: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged(released[0], device="cpu")
    made = Here(tmp_path, ["dance_grpo"], judge, DecodeSettings(model_path="tiny"))
    for name in ("ENQUEUE", "FETCH"):
        monkeypatch.setenv(f"WFM_REWARD_{name}_URL", f"http://x/api/reward/{name.lower().replace('fetch', 'pull')}")
    config = compose("cosmos_predict2/configs/base/config.py", ["experiment=predict2p5_2b_flow_grpo"])
    reward = instantiate(config.model.config.rl.rewards["dance_grpo"].make)
    latents = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    with TestClient(create_app(made.service)) as client:

        def asked(url: str, data: bytes, headers: Any, timeout: float) -> Answer:
            answer = client.post(urlsplit(url).path, content=data, headers=headers)
            return Answer(answer.status_code, answer.json())

        monkeypatch.setattr(remote, "ask", asked)
        made.work()
        scores = reward.fetch(reward.submit(Clips(latents, None, ["a", "b"], 16.0), {}, "one"), 120.0)
    made.close()
    assert scores.is_valid_B.all()
    assert set(scores.parts) == {"dance_grpo", "vq_reward", "mq_reward", "ta_reward", "overall_reward"}
    pixels = build_decoder(DecodeSettings(model_path="tiny"), "cpu").decode(latents).float().clamp(-1, 1)
    video = ((pixels + 1) * 127.5).round().to(torch.uint8)
    here = judge(Clips(None, video, ["a", "b"], 16.0), {})
    assert scores.value_B.tolist() == pytest.approx(here["value"].tolist(), abs=1e-4)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        build(REWARDS["cosmos_reason1"], model_path=str(tmp_path))
    with pytest.raises(ConfigError, match="int4"):
        build(REWARDS["cosmos_reason1"], model_path=str(tmp_path), dtype="int4")


def test_patches_hold_all_pixels_in_blocks_of_tokens() -> None:
    video = torch.zeros(3, 4, 224, 336, dtype=torch.uint8)
    video[:, 2:, 14:28, 28:42] = 255  # second frames; third patch of the second token
    found, seconds = patches_and_pace(video, 8.0)
    assert found.grid == (2, 16, 24) and found.values.shape == (2 * 16 * 24, 3 * 2 * 14 * 14)
    assert seconds == 0.25 and found.num_tokens == 2 * 8 * 12
    bright = (found.values.amax(dim=1) > 1).nonzero().flatten().tolist()
    assert bright == [16 * 24 + 4 + 2]


@pytest.mark.parametrize(("frames", "kept"), [(1, 1), (5, 2), (93, 46), (161, 40), (400, 67)])
def test_frames_are_even_and_limited(frames: int, kept: int) -> None:
    video = torch.zeros(3, frames, 28, 28, dtype=torch.uint8)
    found, _ = patches_and_pace(video, 16.0)
    assert found.grid[0] == kept and found.num_tokens <= 9216


def test_sides_are_multiples_of_28_within_the_limits() -> None:
    assert size_within(480, 832, 25_088, 10**6) == (476, 840)
    height, width = size_within(1080, 1920, 25_088, 300_000)
    assert height % 28 == width % 28 == 0 and height * width <= 300_000
    height, width = size_within(40, 60, 25_088, 10**6)
    assert height * width >= 25_088
    assert size_within(83, 83, 0, 7000) == (56, 56)  # also where sides round beyond them
    assert size_within(28, 28, 1000, 10**9) == (56, 56)
    assert size_within(40, 40, 0, 1000) == (28, 28)


def test_the_newest_checkpoint_is_that_of_the_largest_number(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-last", "other-11"):
        (tmp_path / name).mkdir()
    assert video_align._newest_checkpoint(str(tmp_path)) == "checkpoint-10"


def test_questions_pass_together_where_length_grid_and_pace_agree() -> None:
    one = VideoQuestion([1, 2], Patches(torch.zeros(4, 3), (1, 2, 2)), 0.5)
    others = [
        replace(one, ids=[1, 2, 3]),
        replace(one, patches=Patches(torch.zeros(4, 3), (1, 4, 1))),
        replace(one, seconds=0.25),
    ]
    assert one.form() == replace(one, ids=[7, 8]).form()
    assert len({one.form(), *(other.form() for other in others)}) == 4


def test_a_patch_holds_colours_frames_rows_and_columns_in_this_order() -> None:
    """28 x 56 pixels: two tokens beside each other, of two by two patches each."""
    frames = torch.randint(0, 256, (3, 3, 28, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = patches_of(frames, 0, 10**9)
    assert found.grid == (1, 2, 4)  # the odd frame is left out
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    corners = [(y, token + x) for token in (0, 28) for y in (0, 14) for x in (0, 14)]
    for patch, (y, x) in zip(found.values, corners, strict=True):
        cut = frames[:2, :, y : y + 14, x : x + 14].double() / 255
        expected = torch.stack([(cut[:, c] - mean[c]) / deviation[c] for c in range(3)]).flatten()
        torch.testing.assert_close(patch.double(), expected, rtol=1e-5, atol=1e-5)
    single = patches_of(frames[:1], 0, 10**9).values.unflatten(1, (3, 2, -1))
    assert torch.equal(single[:, :, 0], single[:, :, 1])
    smaller = patches_of(frames[:2], 0, 28 * 28).values.unflatten(1, (3, -1)).double()
    levels = 255 * (smaller * torch.tensor(deviation)[:, None] + torch.tensor(mean)[:, None])
    assert (levels - levels.round()).abs().max() < 1e-3  # as pictures of whole levels
    assert 100 < float(levels.mean()) < 155 and float(levels.std()) < 65  # of all pixels, not of some (74)


def test_a_question_is_asked_as_the_network_takes_it() -> None:
    asks = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>why?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen_vl.conversation("", "why?") == asks
    assert qwen_vl.conversation("be brief", "why?") == f"<|im_start|>system\nbe brief<|im_end|>\n{asks}"
    assert qwen_vl.plain("a <|video_pad|>") == "a < |video_pad|>"
    patches = patches_of(torch.zeros(4, 3, 28, 56, dtype=torch.uint8), 0, 10**9)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [1, 7, 2])
    asked = [qwen_vl.question_of(tokenizer, "", patches, 7, seconds) for seconds in (0.5, 0.25)]
    assert asked[0].ids == [1, 7, 7, 7, 7, 2]
    given = qwen_vl.model_input(asked, 7, SimpleNamespace(device="cpu", dtype=torch.float16))
    assert given["mm_token_type_ids"].tolist() == [[0, 2, 2, 2, 2, 0]] * 2  # 1 is a picture
    assert given["video_grid_thw"].tolist() == [[2, 2, 4]] * 2 and given["attention_mask"].all()
    assert given["pixel_values_videos"].shape == (32, 3 * 2 * 14 * 14)
    assert given["pixel_values_videos"].dtype == torch.float16
