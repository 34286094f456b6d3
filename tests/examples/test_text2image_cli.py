# SPDX-License-Identifier: Apache-2.0
"""examples/text2image.py and text2world.py: pictures from prompts, and videos that begin with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.configs.base.config_text2image import get_cosmos_predict2_text2image_pipeline
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.released import SIZES, tiny_text2image_path
from cosmos_predict2.toy_world.rendering import detect
from cosmos_predict2.world_model.assembly import network_of
from examples import text2image, text2world, video2world

PROMPT = "push the red puck to the green ring"
TINY = ["--model_size", "tiny", "--prompt", PROMPT]


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return found


def test_a_picture_of_the_toy_world_and_a_batch_makes_the_same(tmp_path: Path) -> None:
    for ending in (".jpg", ".png"):
        assert text2image.main([*TINY, "--seed", "1", "--save_path", str(tmp_path / f"one{ending}")]) == 0
    assert media.read_image(tmp_path / "one.jpg").shape == (3, 48, 48)
    entries = [{"prompt": PROMPT, "seed": seed, "output_image": str(tmp_path / f"{seed}.png")} for seed in range(4)]
    (tmp_path / "batch.json").write_text(json.dumps([*entries, {"prompt": PROMPT}]))
    batch = ["--batch_input_json", str(tmp_path / "batch.json"), "--save_path", str(tmp_path / "x.png")]
    assert text2image.main([*TINY, *batch]) == 0
    assert record(tmp_path / "1.png")["frames_sha256"] == record(tmp_path / "one.png")["frames_sha256"]
    assert (tmp_path / "output_4.png").exists()
    pictures = torch.stack([media.read_image(tmp_path / f"{seed}.png") for seed in range(4)]).permute(0, 2, 3, 1)
    seen = detect(numpy.ascontiguousarray(pictures[:, None].numpy()), ("puck",)).position["puck"]
    assert int((~numpy.isnan(seen[..., 0])).sum()) >= 3


def test_a_video_begins_with_the_picture_of_its_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    flags = [*TINY, "--seed", "3", "--num_steps", "4"]
    assert text2world.main([*flags, "--save_path", str(out)]) == 0
    assert text2image.main([*flags, "--save_path", str(tmp_path / "same.jpg")]) == 0
    assert (tmp_path / "out_temp.jpg").read_bytes() == (tmp_path / "same.jpg").read_bytes()
    of_picture = ["--input_path", str(tmp_path / "same.jpg"), "--save_path", str(tmp_path / "video.mp4")]
    assert video2world.main([*flags, *of_picture]) == 0
    assert record(out)["frames_sha256"] == record(tmp_path / "video.mp4")["frames_sha256"]
    entries = [{"prompt": PROMPT, "output_video": str(tmp_path / f"{i}.mp4"), "seed": 3 + i} for i in range(2)]
    (tmp_path / "batch.json").write_text(json.dumps(entries))
    assert text2world.main([*flags, "--batch_input_json", str(tmp_path / "batch.json")]) == 0
    assert record(tmp_path / "0.mp4")["frames_sha256"] == record(out)["frames_sha256"]


def test_configs_of_all_sizes_are_of_one_frame_without_a_mask_of_frames() -> None:
    for size in (*SIZES, "tiny"):
        config = get_cosmos_predict2_text2image_pipeline(model_size=size)
        assert type(network_of(config.net)) is DiT and config.state_t == 1


def test_a_picture_from_python() -> None:
    config = get_cosmos_predict2_text2image_pipeline(model_size="tiny")
    pipe = Video2WorldPipeline.from_config(config, tiny_text2image_path())
    picture = pipe("", PROMPT, aspect_ratio="1:1", num_conditional_frames=0, guidance=0.0, num_sampling_step=2)
    assert picture.shape == (1, 3, 1, 48, 48)


@pytest.mark.parametrize(
    ("main", "arguments", "text"),
    [
        (text2image.main, ["--save_path", "a.mp4"], ".mp4"),
        (text2image.main, ["--prompt", ""], "prompt is empty"),
        (text2image.main, ["--distill_steps", "4"], "--distill_steps"),
        (text2image.main, ["--distill_steps", "9"], "--distill_steps"),
        (text2image.main, ["--use_fast_tokenizer"], "--use_fast_tokenizer"),
        (text2image.main, ["--input_path", "a.jpg"], "from the prompt alone"),
        (text2image.main, ["--num_gpus", "2"], "These numbers do: 1."),
        (text2image.main, ["--model_size", "0.6B"], "--model_types text2image --model_sizes 0.6B"),
        (text2image.main, ["--model_size", "3B"], "--model_size"),
        (text2image.main, ["--dit_path", "absent.pt"], "absent.pt"),
        (text2world.main, ["--input_path", "a.jpg"], "begins with a prompt"),
        (text2world.main, ["--model_size", "2B"], "download_checkpoints"),
        (text2world.main, ["--dit_path_text2image", "absent.pt"], "absent.pt"),
        (video2world.main, ["--dit_path", "TINY_IMAGE"], "Text2Image"),
        (text2image.main, ["--dit_path", "TINY_VIDEO"], "Video2World"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    main: Callable[[list[str]], int], arguments: list[str], text: str, tmp_path: Path, capsys: Any
) -> None:
    from cosmos_predict2.released import tiny_video2world_path

    places = {"TINY_IMAGE": tiny_text2image_path(), "TINY_VIDEO": tiny_video2world_path()}
    ending = ".jpg" if main is text2image.main else ".mp4"
    output = [] if "--save_path" in arguments else ["--save_path", str(tmp_path / f"out{ending}")]
    try:
        code: Any = main([*TINY, *(places.get(word, word) for word in arguments), *output])
    except SystemExit as left:
        code = left.code
    error = capsys.readouterr().err
    assert code == 2 and text in error and "Traceback" not in error, error
