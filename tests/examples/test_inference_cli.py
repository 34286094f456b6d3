# SPDX-License-Identifier: Apache-2.0
"""examples/inference.py: files of samples in the form of Predict2.5."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.data.video import media
from examples import video2world
from examples.inference import main
from tests.examples.records import frames_of, record_of

ROOT = Path(__file__).parents[2]
PICTURE = str(ROOT / "assets/toy_world/first_frame.png")
SAMPLE = {
    "name": "a",
    "inference_type": "image2world",
    "prompt": "push the puck",
    "input_path": PICTURE,
    "num_steps": 2,
    "seed": 5,
}


def written(path: Path, *samples: Any) -> str:
    lines = "\n".join(json.dumps(sample) for sample in samples)
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(samples[0] if len(samples) == 1 else samples))
    return str(path)


def test_samples_of_several_files_are_the_videos_of_single_requests(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("push the puck\n")
    by_path = {**SAMPLE, "name": "sub/b", "prompt_path": "prompt.txt", "seed": 7}
    del by_path["prompt"]
    long = dict(num_output_frames=30, enable_autoregressive=True, chunk_size=13, chunk_overlap=5, resolution="48,64")
    short = {**SAMPLE, "name": "short", "num_output_frames": 7}  # of 9, the least that there are
    files = [
        written(tmp_path / "one.json", SAMPLE),
        written(tmp_path / "two.jsonl", by_path, {**SAMPLE, "name": "long", **long}, short),
    ]
    (tmp_path / "three.yaml").write_text("\n".join(f"{key}: {value}" for key, value in {**SAMPLE, "name": "y"}.items()))
    out = tmp_path / "out"
    arguments = ["-i", *files, str(tmp_path / "three.yaml"), "-o", str(out), "--model_size", "tiny"]
    assert main([*arguments, "--disable-guardrails"]) == 0
    info = media.probe_video(out / "long.mp4")
    assert (info.num_frames, info.height, info.width) == (30, 48, 64)
    assert media.probe_video(out / "short.mp4").num_frames == 7
    assert record_of(out / "short.mp4")["form"]["chunk_frames"] == 9, "made at once, and cut"
    assert frames_of(out / "y.json") == frames_of(out / "a.json")
    single = ["--model_size", "tiny", "--prompt", "push the puck", "--num_steps", "2", "--seed", "7"]
    alone = frames_of(tmp_path / "single.mp4", video2world.main, *single)
    assert frames_of(out / "sub/b.json") == alone
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")}
    assert main([*arguments, "--skip-existing-output", "--no-keep-going"]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")} == before
    assert main([*arguments, "--seed", "7"]) == 0  # for every sample
    assert frames_of(out / "a.json") == alone


def test_one_failure_stops_the_others_only_if_asked(tmp_path: Path) -> None:
    absent = {**SAMPLE, "name": "absent", "input_path": "absent.png"}
    samples = written(tmp_path / "s.json", absent, SAMPLE)
    arguments = ["-i", samples, "--model_size", "tiny", "-o"]
    assert main([*arguments, str(tmp_path / "all")]) == 1
    assert [path.name for path in (tmp_path / "all").glob("*.mp4")] == ["a.mp4"]
    assert main([*arguments, str(tmp_path / "none"), "--no-keep-going"]) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"promt": "x"}, "unknown field 'promt'. Did you mean prompt"),
        ({"seed": "1"}, "seed is '1'; int is expected"),
        ({"seed": True}, "seed is True"),
        ({"guidance": "high"}, "float is expected"),
        ({"name": None}, "name is ''"),
        ({"name": "../a"}, "name is '../a'"),
        ({"inference_type": "text2image"}, "inference_type is 'text2image'"),
        ({"inference_type": "text2world"}, "--model 2B/post-trained"),  # not of Predict2
        ({"prompt": None}, "neither prompt nor prompt_path"),
        ({"prompt": None, "prompt_path": "absent.txt"}, "absent.txt"),
        ({"prompt_path": "prompt.txt"}, "it has prompt and prompt_path: leave one out"),
        ({"input_path": None}, "image2world needs an input_path"),
        ({"resolution": "720"}, "(height, width)"),
        ({"resolution": "wide"}, "(height, width)"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"num_output_frames": 0}, "num_output_frames 0"),
        ({"enable_autoregressive": True, "chunk_size": 12}, "chunk_size 12"),
        ({"enable_autoregressive": True, "chunk_overlap": 13}, "chunk_overlap 13"),
        ({"name": "b"}, "the name b stands twice"),
    ],
)
def test_a_fault_of_a_sample_is_refused_before_any_video(
    change: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = written(tmp_path / "s.jsonl", {**SAMPLE, "name": "b"}, {**SAMPLE, **change})
    code = main(["-i", samples, "-o", str(tmp_path / "out"), "--model_size", "tiny"])
    error = capsys.readouterr().err
    assert code == 2 and text in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "[]", "[1]", "3", "{", "\x00"])
def test_a_file_that_holds_no_samples_is_one_message(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s.json", "s.yaml", "s.jsonl"):
        (tmp_path / name).write_text(content)
        assert main(["-i", str(tmp_path / name), "-o", str(tmp_path / "out"), "--model_size", "tiny"]) == 2
        error = capsys.readouterr().err
        assert name in error and "Traceback" not in error
