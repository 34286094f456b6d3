# SPDX-License-Identifier: Apache-2.0
"""The prompt refiner, with tiny random weights in the public layout."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.guardrail import PromptRefinerConfig, refiner, status_line
from cosmos_predict2.guardrail.refiner import Reason1Refiner, UnusableAnswerError, prompt_of
from cosmos_predict2.guardrail.runner import GuardrailConfig, create_prompt_refiner
from cosmos_predict2.released import REASON1
from cosmos_predict2.text import qwen_vl
from cosmos_predict2.text.tiny_reason1 import write_tiny_reason1
from imaginaire.errors import CheckpointError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints whose refiner draws its answers, as the released one may."""
    path = tmp_path_factory.mktemp("refiner")
    write_tiny_reason1(path / REASON1)
    settings = {"do_sample": True, "temperature": 2.0, "eos_token_id": 258, "pad_token_id": 256}
    (path / REASON1 / "generation_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def tiny(root: Path, monkeypatch: pytest.MonkeyPatch) -> Reason1Refiner:
    monkeypatch.setattr(refiner, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(refiner, "LEAST", 4 * qwen_vl.SIDE**2)
    return Reason1Refiner(str(root / REASON1))


def frames(count: int = 1) -> Tensor:
    return torch.randint(0, 256, (3, count, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("A robot  lifts\nan apple. ", "A robot lifts an apple."),
        ("<think>\nIt is red.\n</think>\n\n<answer>\nA robot.\n</answer> done", "A robot."),
        ("<think>It is red.</think> A robot.", "A robot."),
        ("<answer>A robot.", "A robot."),
        ("the red ball and then the red ball", "the red ball and then the red ball"),
    ],
)
def test_the_prompt_is_what_the_answer_gives_it_as(answer: str, prompt: str) -> None:
    assert prompt_of(answer) == prompt


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "no words"),
        ("<answer> ... </answer>", "no words"),
        ("<think>It is red, so", "reasoning has no end"),
        ("The arm moves left and then right. " * 3, "the arm moves left and then' 3 times"),
        ("c" * 61, "more than 60 letters"),
    ],
)
def test_an_answer_that_is_no_prompt_says_why(answer: str, why: str) -> None:
    with pytest.raises(UnusableAnswerError, match=why):
        prompt_of(answer)


def test_an_unusable_answer_leaves_the_prompt_with_a_warning(
    tiny: Reason1Refiner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for answer, why in ((("...", True), "no words"), (("A robot", False), "no end after 12 tokens")):
        monkeypatch.setattr(tiny, "answer", lambda *_, found=answer: found)
        assert tiny.refine("push", frames()) == "push" and why in caplog.text
    monkeypatch.setattr(tiny, "answer", lambda *_: ("A robot", True))
    assert tiny.refine("push", frames()) == "A robot"


def test_draws_are_of_the_seed_and_leave_those_of_others_as_they_were(tiny: Reason1Refiner) -> None:
    before = torch.random.get_rng_state()
    first = tiny.answer("push", frames(), 3)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1)
    assert first == tiny.answer("push", frames(), 3) != tiny.answer("push", frames(), 4)
    assert first[0].isascii() and not first[1]  # after all tokens that it may have, no end


def test_a_picture_and_a_clip_are_as_the_package_takes_them(
    tiny: Reason1Refiner, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture as an image of the package's own network, of a clip the last frames, in pairs."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    tiny._model.generation_config.do_sample = False
    seen: list[dict[str, Any]] = []
    real = tiny._model.generate
    monkeypatch.setattr(tiny._model, "generate", lambda **given: seen.append(given) or real(**given))
    answers = [tiny.answer("push <|video_pad|>", frames(count))[0] for count in (1, 5)]
    assert "<|vision_end|>push < |video_pad|><|im_end|>" in tiny._tokenizer.decode(seen[0]["input_ids"][0])
    assert [one["video_grid_thw"].tolist() for one in seen] == [[[1, 4, 4]], [[2, 4, 4]]]
    assert seen[1]["second_per_grid_ts"].tolist() == [2 / 16], "of two frames at 16 a second"
    assert torch.equal(
        seen[1]["pixel_values_videos"],
        qwen_vl.patches_of(frames(5)[:, 1:].permute(1, 0, 2, 3), refiner.LEAST, refiner.MOST).values,
    )
    package: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(root / REASON1).eval()
    ids = seen[0]["input_ids"].clone()
    is_picture = ids == package.config.video_token_id
    ids[is_picture] = package.config.image_token_id
    made = package.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=is_picture.int(),
        pixel_values=seen[0]["pixel_values_videos"], image_grid_thw=seen[0]["video_grid_thw"], do_sample=False,
        max_new_tokens=12, suppress_tokens=tiny._foreign,
    )  # fmt: skip
    assert tiny._tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == answers[0]


def test_a_refiner_is_there_where_it_was_downloaded(root: Path, tmp_path: Path) -> None:
    here, absent = PromptRefinerConfig(checkpoint_dir=str(root)), PromptRefinerConfig(checkpoint_dir=str(tmp_path))
    made = create_prompt_refiner(here)
    assert isinstance(made, Reason1Refiner) and made._offload
    assert create_prompt_refiner(absent) is None
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}.*hf download .*8fe96c1f.*--disable_prompt"):
        create_prompt_refiner(absent, is_explicit=True)
    off = PromptRefinerConfig(checkpoint_dir=str(root), enabled=False)
    assert create_prompt_refiner(off, is_explicit=True) is None
    ends = {"on, asked: on": (here, made), "(not loaded)": (here, None), "(not downloaded)": (absent, None)}
    for end, (config, given) in ({**ends, "off, asked: off": (off, None)}).items():
        assert status_line(GuardrailConfig(enabled=False), config, None, given).endswith(end)
    (tmp_path / REASON1).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="Reason1-7B"):
        create_prompt_refiner(absent)  # a download that stopped


def test_names_of_weights_are_accounted_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_reason1(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "visual.patch_embed.proj.weight" in state and "model.norm.weight" in state
    state["model.more"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)model\.language_model\.norm.*model\.language_model\.more"):
        Reason1Refiner(str(tmp_path))
