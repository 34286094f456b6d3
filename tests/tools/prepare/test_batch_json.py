# SPDX-License-Identifier: Apache-2.0
"""A folder of pictures with prompts becomes a batch that the inference script accepts."""

import json
from pathlib import Path

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.pipelines.requests import check_request, read_batch
from cosmos_predict2.world_model.options import VideoRequest
from scripts import prepare_batch_input_json as script
from tests.tools.prepare.conftest import Start


def _pictures(folder: Path, **prompts: str | bytes | None) -> Path:
    """Pictures of these names (a_jpg is a.jpg), with the files NAME.txt beside them."""
    for name, prompt in prompts.items():
        stem, _, suffix = name.rpartition("_")
        media.write_image(folder / f"{stem}.{suffix}", torch.full((3, 16, 24), 90, dtype=torch.uint8))
        if prompt is not None:
            (folder / f"{stem}.txt").write_bytes(prompt if isinstance(prompt, bytes) else prompt.encode())
    return folder


@pytest.fixture
def prepare(start: Start, tmp_path: Path):
    def run(folder: Path, *more: object, save: str = "videos", out: str = "new/batch.json") -> int:
        return start(script, "--data", folder, "--save_path", tmp_path / save, "--out", tmp_path / out, *more)

    return run


def test_the_batch_is_what_the_inference_script_reads(
    prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _pictures(tmp_path / "pictures", b_jpg=None, a_PNG="  a robot\n", c_jpeg="c", alone_webp=None)
    (folder / "b..txt").write_text("müde Äpfel\n\n")
    assert prepare(folder, "--dry_run") == 0 and not (tmp_path / "new").exists()
    assert prepare(folder) == 0 and "1 pictures" in caplog.text and "alone.webp" in caplog.text
    requests = read_batch(str(tmp_path / "new" / "batch.json"), VideoRequest("", "", "output/x.mp4"))
    assert [(Path(r.input_path).name, r.prompt, Path(r.save_path).name) for r in requests] == [
        ("a.PNG", "a robot", "a.mp4"),
        ("b.jpg", "müde Äpfel", "b.mp4"),
        ("c.jpeg", "c", "c.mp4"),
    ]
    for request in requests:
        check_request(request)


def test_a_broken_prompt_is_exit_1_and_the_others_are_written(
    prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _pictures(tmp_path / "pictures", a_jpg=b"\xff\xfe")
    assert prepare(folder) == 1 and "a.txt" in caplog.text and not (tmp_path / "new").exists()
    _pictures(folder, a_jpg=" \n", b_jpg="b")
    assert prepare(folder) == 1 and "a.txt" in caplog.text
    assert [entry["prompt"] for entry in json.loads((tmp_path / "new" / "batch.json").read_text())] == ["b"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"save": "pictures"}, "--save_path"),
        ({"out": "batch.jsonl"}, "batch.jsonl"),
        ({"out": "pictures"}, "pictures: --out"),
        ({"folder": "absent"}, "absent"),
        ({"folder": "pictuers"}, "Did you mean pictures?"),
        ({"folder": "empty"}, "empty"),
        ({"folder": "twice"}, "a.png"),
    ],
)
def test_wrong_input_is_exit_2_and_named(
    changes: dict[str, str], named: str, prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _pictures(tmp_path / "pictures", a_jpg="a")
    _pictures(tmp_path / "twice", a_jpg="a", a_png="a")
    (tmp_path / "empty").mkdir()
    assert prepare(tmp_path / changes.pop("folder", "pictures"), **changes) == 2
    assert named in capsys.readouterr().err
