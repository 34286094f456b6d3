# SPDX-License-Identifier: Apache-2.0
"""examples/multiview.py: frames and texts of several views become their videos, side by side."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.base.config_multiview import choose_multiview, get_cosmos_predict2_multiview_pipeline
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video import media
from cosmos_predict2.guardrail.runner import GuardrailRunner
from cosmos_predict2.interfaces import Verdict
from cosmos_predict2.pipelines.multiview import MultiviewPipeline
from cosmos_predict2.released import TINY_MULTIVIEW
from cosmos_predict2.world_model.options import VideoForm, VideoModel
from examples import multiview, video2world
from imaginaire.errors import ConfigError, DataError
from tests.examples.records import frames_of
from tests.programs import exit_code

TINY = ["--model_size", "tiny", "--num_steps", "2", "--disable_guardrail"]
PROMPT = ["--prompt", "push the red puck to the green ring"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views of one clip: a file for each, and both in one, one after the other."""
    folder = tmp_path_factory.mktemp("clips")
    views = ToyWorldVideos(num_episodes=1, views=2, split="val", start=0)[0]["video"].chunk(2, dim=2)
    media.write_video(folder / "in_time.mp4", torch.cat(views, dim=1), 10)
    for i, view in enumerate(views):
        media.write_video(folder / f"view{i}.mp4", view, 10)
        media.write_image(folder / f"view{i}.png", view[:, -1])
    return folder


def made(path: Path, flags: list[str]) -> str:
    return frames_of(path, multiview.main, *TINY, *PROMPT, *flags)


def test_one_file_and_a_file_for_each_view_are_the_same_input(clips: Path, tmp_path: Path) -> None:
    pipe, each = _pipe(), f"{clips / 'view0.mp4'}+{clips / 'view1.mp4'}"
    for num_frames, start in ((1, None), (5, None), (5, 2)):
        together = pipe.read(str(clips / "in_time.mp4"), num_frames, (48, 48), start)
        found = pipe.read(each, num_frames, (48, 48), start)
        assert together.shape == (3, num_frames, 96, 48)
        assert (together.float() - found.float()).abs().mean() < 3  # of another mp4
    with pytest.raises(DataError, match="frames of each view, but 99 from frame"):
        pipe.read(str(clips / "in_time.mp4"), 99, (48, 48))
    pictures = f"{clips / 'view0.png'}+{clips / 'view1.png'}"
    shas = [made(tmp_path / "a.mp4", ["--input_path", path]) for path in (str(clips / "in_time.mp4"), pictures)]
    assert media.read_video(tmp_path / "a.mp4")[0].shape == (3, 13, 48, 96)
    shas += [made(tmp_path / "b.mp4", ["--input_path", each, "--num_conditional_frames", "5"])]
    assert len({*shas, made(tmp_path / "c.mp4", ["--num_conditional_frames", "0"])}) == 4


def _pipe(**net: Any) -> MultiviewPipeline:
    config = get_cosmos_predict2_multiview_pipeline(model_size="tiny")
    config.net.update(net)
    config.guardrail_config.enabled = False
    return MultiviewPipeline.from_config(config, "" if net else TINY_MULTIVIEW)


def test_a_prompt_is_the_first_views_or_a_line_for_each_or_embeddings(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(f"{PROMPT[1]}\n\n")
    (tmp_path / "both.txt").write_text(f"{PROMPT[1]}\n{PROMPT[1]}\n")
    pipe = _pipe()
    (text,) = pipe.encode([PROMPT[1]])
    assert text.shape == (128, 64) and text[:64].any() and not text[64:].any()
    assert torch.equal(pipe.encode([f"\n{PROMPT[1]}"])[0], text.roll(64, 0))
    torch.save(text[None], tmp_path / "text.pt")
    none = ["--num_conditional_frames", "0"]
    given = {name: ["--prompt", str(tmp_path / name)] for name in ("lines.txt", "both.txt", "text.pt")}
    found = {name: made(tmp_path / f"{name}.mp4", [*none, *flags]) for name, flags in given.items()}
    assert found["lines.txt"] == found["text.pt"] == made(tmp_path / "plain.mp4", none)
    assert found["both.txt"] != found["lines.txt"]
    assert "push the red puck" in (tmp_path / "lines.txt.txt").read_text()
    torch.save(text[None, :127], tmp_path / "odd.pt")
    with pytest.raises(DataError, match="2 views take as many tokens"):
        pipe.encode([str(tmp_path / "odd.pt")])


def test_one_prompt_is_the_front_camera_s() -> None:
    for view_ids, front in (([0, 1], 0), ([1, 0], 1), ([2, 1], 0)):
        (text,) = _pipe(view_ids=view_ids).encode([PROMPT[1]])
        assert [bool(part.any()) for part in text.chunk(2)] == [view == front for view in range(2)]


def test_weights_that_were_trained_without_a_given_view_say_so(clips: Path, tmp_path: Path, caplog: Any) -> None:
    given = ["--given_view", "0", "--input_path", str(clips / "in_time.mp4"), "--num_conditional_frames", "0"]
    made(tmp_path / "a.mp4", given)
    assert "--given_view 0, but the weights were trained with condition_locations=['first_random_n']" in caplog.text
    caplog.clear()
    made(tmp_path / "b.mp4", given[4:])
    assert "condition_locations" not in caplog.text


def test_a_given_view_is_shown_as_it_is(clips: Path) -> None:
    pipe = _pipe()
    path, form = str(clips / "in_time.mp4"), VideoForm(chunk_frames=13, num_views=2, given_view=1)
    made = pipe(path, PROMPT[1], num_sampling_step=1, guidance=0.0, edited_path=path, form=form, aspect_ratio="1:1")
    true = pipe.world.decode(pipe.world.encode(pipe.read(path, 13, (48, 48))[None])).chunk(2, dim=3)
    left, right = made.chunk(2, dim=4)
    assert (right - true[1]).abs().mean() < 0.01 < 0.03 < (left - true[0]).abs().mean()
    with pytest.raises(ConfigError, match="given_view=1"):
        pipe("", PROMPT[1], num_conditional_frames=0, form=form, aspect_ratio="1:1")


class EyeOfOneSquare:
    """Sees squares of 48 pixels alone, and hides the second view."""

    name = "eye"

    def check_video(self, frames_F_H_W_C: Tensor) -> Verdict:
        return Verdict(frames_F_H_W_C.shape[1:3] == (48, 48), f"pictures of {list(frames_F_H_W_C.shape)}")

    def postprocess(self, frames_F_H_W_C: Tensor) -> Tensor:
        first, second = frames_F_H_W_C.chunk(2)
        return torch.cat([first, torch.zeros_like(second)])


def test_guardrails_see_each_view_alone() -> None:
    pipe, video = _pipe(), torch.rand(1, 3, 5, 96, 48)
    pipe.guardrail = GuardrailRunner([EyeOfOneSquare()])
    first, second = pipe.checked_video(video).chunk(2, dim=3)
    assert (first - video[:, :, :, :48]).abs().max() < 0.01 and (second == -1).all()


def test_released_numbers() -> None:
    config = get_cosmos_predict2_multiview_pipeline()
    assert (config.state_t, config.fps, config.rate_of_positions, config.resolution) == (8, 10, 30.0, "720")
    assert (config.timestamps.t_min, config.timestamps.t_max) == (0.01, 200.0)
    flags = VideoModel(model_size="2B", random_weights=True)
    assert choose_multiview(flags, None).config.net.view_ids == [0]  # as published inference
    assert config.net.view_ids == [0, 1, 2, 3, 4, 5, 6] and config.net.rope_t_extrapolation_ratio == 8 / 24


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num_conditional_frames", "0", "--n_views", "3"], "--n_views 3, but this model has 2 views"),
        (["--num_conditional_frames", "0", "--n_views", "1"], "--n_views 1, but this model has 2 views"),
        (["--n_views", "0"], "--n_views"),
        ([], "no bundled clip of several cameras"),
        (["--input_path", "PICTURE"], "is one picture, but there are 2 views"),
        (["--input_path", "a.mp4+b.mp4+c.mp4"], "3 files for 2 views"),
        (["--input_path", "a.mp4+absent.mp4"], "no input file a.mp4"),
        (["--num_conditional_frames", "0", "--prompt", "absent.txt"], "absent.txt cannot be read"),
        (["--num_conditional_frames", "0", "--prompt", "THREE"], "3 lines for 2 views"),
        (["--num_conditional_frames", "0", "--given_view", "2"], "there are views 0 to 1"),
        (["--num_conditional_frames", "0", "--given_view", "1"], "--given_view 1: its frames are those of a clip"),
        (["--num_conditional_frames", "0", "--model_size", "14B"], "--model_size"),
        (["--num_conditional_frames", "0", "--model_size", "2B"], "--model_types multiview --model_sizes 2B"),
        (["--input_path", "ODD"], "not 2 views of equal length"),
    ],
)
def test_wrong_flags_name_what_is_wrong(
    flags: list[str], named: str, clips: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSMOS_PREDICT2_ARGS", f"--checkpoints {tmp_path}")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    media.write_video(tmp_path / "odd.mp4", torch.zeros(3, 3, 48, 48, dtype=torch.uint8), 10)
    places = {"PICTURE": clips / "view0.png", "THREE": tmp_path / "three.txt", "ODD": tmp_path / "odd.mp4"}
    arguments = [*TINY, *PROMPT, *(places.get(flag, flag) for flag in flags), "--save_path", tmp_path / "out.mp4"]
    assert exit_code(multiview.main, *arguments) == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out.mp4").exists()


def test_weights_of_several_views_name_their_program(capsys: Any) -> None:
    assert video2world.main(["--dit_path", TINY_MULTIVIEW, *PROMPT]) == 2
    assert "use examples/multiview.py" in capsys.readouterr().err
