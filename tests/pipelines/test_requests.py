# SPDX-License-Identifier: Apache-2.0
"""Requests: what is refused before anything is built, what is skipped, and what is recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.guardrail.runner import BlockedError, GuardrailRunner
from cosmos_predict2.pipelines.requests import check_request, fingerprint, read_batch, run_all, write_contact_sheet
from cosmos_predict2.pipelines.video2world import check_input, read_input
from cosmos_predict2.world_model.options import Settings, VideoForm, VideoRequest
from cosmos_predict2.world_model.world_model import SamplingOptions
from imaginaire.errors import ConfigError, DataError
from tests.pipelines.test_video2world import NoPucks, Rewriter, make_pipeline

SETTINGS = Settings(aspect_ratio="1:1", fps=10, weights="random", sampling=SamplingOptions(num_steps=1))


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = str(tmp_path / "picture.png")
    media.write_image(path, torch.full((3, 40, 60), 90, dtype=torch.uint8))
    return path


@pytest.fixture
def clip(tmp_path: Path) -> str:
    path = str(tmp_path / "clip.mp4")
    ramp = (torch.arange(7, dtype=torch.uint8) * 30)[None, :, None, None].expand(3, 7, 48, 48)
    media.write_video(path, ramp, 10)
    return path


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The clips that contact sheets are made of."""
    found: list[torch.Tensor] = []

    def contact_sheet(clips: list[torch.Tensor], labels: list[str], columns: int) -> torch.Tensor:
        found.extend(clips)
        return clips[0][:, 0]

    monkeypatch.setattr(media, "contact_sheet", contact_sheet)
    return found


def request_for(path: str, tmp_path: Path, **options: Any) -> VideoRequest:
    return VideoRequest(**{"input_path": path, "prompt": "push", "save_path": str(tmp_path / "out.mp4"), **options})


def test_a_clip_is_continued_from_its_end_or_begins_where_it_is_asked_to(clip: str) -> None:
    last = read_input(clip, 5, (48, 48)).float().mean(dim=(0, 2, 3))
    assert torch.allclose(last, torch.tensor([60.0, 90, 120, 150, 180]), atol=4)
    for start, num_frames, first in ((None, 1, 180), (0, 1, 0), (0, 5, 0), (2, 5, 60), (6, 1, 180)):
        frames = read_input(clip, num_frames, (48, 48), start)
        assert frames.shape[1] == num_frames and abs(frames[:, 0].float().mean() - first) < 4


def test_a_record_names_the_file_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/model").mkdir(parents=True)
    saved = tmp_path / "checkpoints/model/iter_000000007.pt"
    saved.write_bytes(b"weights")
    (tmp_path / "checkpoints/latest_checkpoint.txt").write_text("iter_000000007.pt\n")
    assert fingerprint(str(tmp_path)).startswith(f"{saved} (7 bytes, ")


def test_frames_of_a_clip_of_another_rate_are_a_warning(clip: str, caplog: pytest.LogCaptureFixture) -> None:
    for num_frames, fps, warns in ((5, 10, False), (1, 16, False), (5, 16, True)):
        caplog.clear()
        read_input(clip, num_frames, (48, 48), fps=fps)
        assert [r.levelname for r in caplog.records if r.levelname == "WARNING"] == ["WARNING"] * warns


@pytest.mark.parametrize(
    ("start", "true"), [(None, [180]), (0, [0, 30, 60, 90, 120, 150, 180]), (2, [60, 90, 120, 150, 180])]
)
def test_a_clip_is_compared_with_from_the_frame_that_was_taken(
    start: int | None, true: list[int], clip: str, tmp_path: Path, rows: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    generated = torch.zeros(3, 9, 48, 48, dtype=torch.uint8)
    write_contact_sheet(request_for(clip, tmp_path, compare_to=clip, start_frame_idx=start), generated, 10)
    assert torch.allclose(rows[0].float().mean(dim=(0, 2, 3)), torch.tensor(true).float(), atol=4)
    assert ("start_frame_idx 0" in caplog.text) == (start is None)
    other = tmp_path / "other.mp4"
    other.write_bytes(Path(clip).read_bytes())
    write_contact_sheet(request_for(str(other), tmp_path, compare_to=clip, start_frame_idx=start), generated, 10)
    assert rows[2].shape[1] == 7, "another clip is shown from its beginning"
    write_contact_sheet(request_for(str(other), tmp_path, compare_to=clip), generated, 4)
    shown = rows[4].float().mean(dim=(0, 2, 3))
    assert torch.allclose(shown, torch.tensor([0.0, 60, 150]), atol=4), "of 10 frames per second, at the moments of 4"


def test_what_is_near_the_edge_stays_where_the_input_is_stretched(
    tmp_path: Path, rows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = torch.zeros(3, 5, 48, 96, dtype=torch.uint8)
    wide[..., :16] = 255
    media.write_image(str(tmp_path / "wide.png"), wide[:, 0])
    media.write_video(str(tmp_path / "wide.mp4"), wide, 10)
    pipe = make_pipeline()
    given: list[torch.Tensor] = []

    def generate(frames: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        given.append(frames[0])
        return torch.zeros(1, 3, 5, 48, 48)

    monkeypatch.setattr(pipe.world, "generate", generate)
    request = request_for(str(tmp_path / "wide.png"), tmp_path, compare_to=str(tmp_path / "wide.mp4"))
    for crop, edge in (("stretch", 255), ("center", 0)):
        pipe.config.input_crop = crop
        assert run_all(lambda: pipe, [request], SETTINGS) == 0
        for frames in (given.pop(), rows[0]):
            assert frames.shape[-2:] == (48, 48) and abs(frames[..., :4].float().mean() - edge) < 8
        rows.clear()


def test_inputs_that_cannot_be_used(picture: str, clip: str, tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    for path, num_frames, start, named in [
        (str(tmp_path / "picture.pmg"), 1, None, "'.pmg'"),
        (str(tmp_path / "pictures.png"), 1, None, "picture.png"),
        (str(tmp_path / "broken.mp4"), 1, None, "broken.mp4"),
        (str(tmp_path / "broken.png"), 1, None, "broken.png"),
        (picture, 5, None, "one picture"),
        (picture, 1, 3, "one picture"),
        (clip, 9, None, "has 7 frames"),
        (clip, 5, 3, "has 7 frames"),
    ]:
        with pytest.raises(DataError, match=named):
            check_input(path, num_frames, start)
    with pytest.raises(ConfigError, match="start_frame_idx is -1"):
        check_input(clip, 1, -1)
    check_input(picture, 1, 0)


def test_requests_are_checked(picture: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options, error, named in (
        (dict(prompt=" "), ConfigError, "prompt"),
        (dict(seed=-1), ConfigError, "seed"),
        (dict(seed=2**32), ConfigError, "seed"),
        (dict(num_conditional_frames=2), ConfigError, "num_conditional_frames"),
        (dict(save_path=str(tmp_path / "out.avi")), DataError, r"\.avi"),
        (dict(save_path=str(tmp_path / "file" / "out.mp4")), DataError, "file"),
    ):
        with pytest.raises(error, match=named):
            check_request(request_for(picture, tmp_path, **options))


def test_what_is_read_is_never_replaced(picture: str, clip: str, tmp_path: Path) -> None:
    beside = request_for(picture, tmp_path, save_path=str(tmp_path / "picture.mp4"))
    check_request(beside)
    with pytest.raises(ConfigError, match=r"would replace .*picture\.png"):
        check_request(beside, contact_sheet=True)
    for options in (dict(input_path=clip), dict(compare_to=clip)):
        with pytest.raises(ConfigError, match=r"would replace .*clip\.mp4"):
            check_request(request_for(picture, tmp_path, save_path=clip, **options))
    batch = tmp_path / "out.json"  # where the record of out.mp4 would go
    batch.write_text(json.dumps([{"input_video": picture, "prompt": "x", "output_video": str(tmp_path / "out.mp4")}]))
    with pytest.raises(DataError, match=r"would replace .*out\.json"):
        read_batch(str(batch), VideoRequest(input_path="", prompt="", save_path="x.mp4"))


def test_a_batch_file_is_read_strictly(tmp_path: Path) -> None:
    default = VideoRequest(input_path="", prompt="", save_path=str(tmp_path / "generated.mp4"), seed=4)
    path = tmp_path / "batch.json"
    path.write_text(
        json.dumps(
            [
                {"input_video": "a.png", "prompt": "one"},
                {"input_video": "b.png", "prompt": "two", "output_video": "b.mp4", "seed": 9, "start_frame_idx": 0},
            ]
        )
    )
    first, second = read_batch(str(path), default)
    assert (first.save_path, first.seed) == (str(tmp_path / "output_0.mp4"), 4)
    assert (second.save_path, second.seed) == ("b.mp4", 9)
    assert (first.start_frame_idx, second.start_frame_idx) == (None, 0)
    for content, text in [
        ('[{"input_video": "a.png"}]', "entry 0: no prompt"),
        ('[{"input_video": "a.png", "prompt": "x", "ouput_video": "y"}]', "Did you mean output_video"),
        (json.dumps([dict(input_video=name, prompt="x", output_video="y") for name in "ab"]), "y is the output"),
        ('{"input_video": "a.png"}', "must hold a list"),
        ("[", "cannot be read"),
        ("[]", "must hold a list"),
        ('[{"input_video": "a.png", "prompt": "x", "seed": "7"}]', "seed is '7'"),
        ('[{"input_video": "a.png", "prompt": "x", "seed": true}]', "seed is True"),
        ('[{"input_video": "a.png", "prompt": ["x", "y"]}]', "prompt is "),
    ]:
        path.write_text(content)
        with pytest.raises(DataError, match=text):
            read_batch(str(path), default)
    path.write_bytes(b"\xff\xfe[")
    with pytest.raises(DataError, match="cannot be read"):
        read_batch(str(path), default)
    default = replace(default, negative_prompt="blurred")
    for text, negative in (("null", "blurred"), ('""', "")):
        path.write_text(f'[{{"input_video": "a.png", "prompt": "x", "negative_prompt": {text}, "seed": null}}]')
        (request,) = read_batch(str(path), default)
        assert (request.negative_prompt, request.seed) == (negative, 4)


def never() -> Any:
    raise AssertionError("built")


def test_a_batch_skips_what_exists_and_goes_on_after_a_failure(picture: str, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"{name}.mp4") for name in ("good", "bad", "there")}
    Path(paths["there"]).write_text("made before")
    requests = [request_for(picture, tmp_path, save_path=paths[name]) for name in ("there", "good")]
    requests.insert(0, request_for(str(tmp_path / "absent.png"), tmp_path, save_path=paths["bad"]))
    assert run_all(make_pipeline, requests, SETTINGS, skip_existing=True) == 1
    made = media.probe_video(paths["good"])
    assert (made.num_frames, made.fps) == (9, 10) and not Path(paths["bad"]).exists()
    assert run_all(never, requests, SETTINGS, skip_existing=True) == 1
    assert Path(paths["there"]).read_text() == "made before"


def test_a_single_request_raises_before_anything_is_built(picture: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.png"):
        run_all(never, [request_for(str(tmp_path / "absent.png"), tmp_path)], SETTINGS)
    request = request_for(picture, tmp_path, prompt="push the puck")
    with pytest.raises(BlockedError, match="no pucks"):
        run_all(never, [request], SETTINGS, guardrail=GuardrailRunner([NoPucks()]))


def test_a_video_is_made_as_asked_and_how_is_written_beside_it(clip: str, tmp_path: Path) -> None:
    asked = dict(negative_prompt="blurred", seed=3, num_conditional_frames=5, start_frame_idx=2)
    request = request_for(clip, tmp_path, compare_to=clip, **asked)
    made = make_pipeline()
    pipe = mock.Mock(wraps=made, config=made.config)
    texts: dict[str, torch.Tensor] = {}
    assert run_all(lambda: pipe, [request], SETTINGS, embeddings=texts) == 0
    told = pipe.call_args.kwargs
    assert told | asked | {"input_path": clip, "prompt": "push", "aspect_ratio": "1:1"} == told
    assert told["options"] is SETTINGS.sampling and told["embeddings"] is texts
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["seed"], record["num_steps"], record["num_frames"], record["weights"]) == (3, 1, 9, "random")
    assert "[Negative Prompt]\nblurred\n" in (tmp_path / "out.txt").read_text()
    assert media.read_image(str(tmp_path / "out.png")).shape[1] > 200  # two labelled rows


def test_prompts_are_recorded_as_they_were_refined_for_each_chunk(picture: str, tmp_path: Path) -> None:
    one = VideoForm(size=(32, 32), num_frames=9, chunk_frames=9)
    for form, titles in ((one, ["Refined Prompt"]), (replace(one, num_frames=17), ["Refined Prompt for chunk 0"] * 2)):
        request = request_for(picture, tmp_path, form=form)
        assert run_all(lambda: make_pipeline(refiner=Rewriter()), [request], SETTINGS) == 0
        refined = json.loads((tmp_path / "out.json").read_text())["refined_prompt"]
        chunks = [refined] if isinstance(refined, str) else refined
        assert [text.partition(":")[0] for text in chunks] == [f"push, {i}" for i in range(len(titles))]
        assert f"[{titles[0]}]\n{chunks[0]}\n" in (tmp_path / "out.txt").read_text()
