# SPDX-License-Identifier: Apache-2.0
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.video.media import read_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.tools.prepare.toy import folder as toy_folder
from cosmos_predict2.tools.prepare.toy import forms
from cosmos_predict2.tools.prepare.toy.folder import write_folder
from cosmos_predict2.tools.prepare.toy.settings import ToyFolder
from imaginaire.errors import ConfigError, DataError
from scripts import make_toy_world

SMALL = ToyFolder(episodes=4, frames=9, val_fraction=0.25, text_encoder="bytes", num_tokens=64, text_width=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "world"
    write_folder(str(out), SMALL, command="a command")
    return out


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_episode_has_its_files_and_nothing_else_is_written(folder: Path) -> None:
    expected = {"dataset.json", "README.md", "train/t5_xxl/embeddings.json", "val/t5_xxl/embeddings.json"}
    for index in range(4):
        split = "val" if index == 3 else "train"
        for kind in ("videos/{}.mp4", "metas/{}.txt", "annotation/{}.json", "t5_xxl/{}.pickle"):
            expected.add(f"{split}/{kind.format(f'episode_{index:06d}')}")
    assert names(folder) == expected


def test_files_say_what_the_simulator_did(folder: Path) -> None:
    episodes = SMALL.make(0, 4)
    for index in range(4):
        split = folder / ("val" if index == 3 else "train")
        name = f"episode_{index:06d}"
        video, fps = read_video(split / "videos" / f"{name}.mp4")
        assert fps == 10 and video.shape == (3, 9, 48, 48)
        error = video.permute(1, 2, 3, 0).float() - torch.from_numpy(episodes.render(index)).float()
        assert error.abs().mean() < 4  # of 255: the codec halves the resolution of colour
        annotation = json.loads((split / "annotation" / f"{name}.json").read_text())
        assert numpy.allclose(annotation["actions"], episodes.actions[index], atol=1e-6)
        states = numpy.array(annotation["states"], dtype=float)
        assert numpy.isnan(states[:, 6:8]).all()  # there is no box
        there = [0, 1, 2, 3, 4, 5, 8, 9]
        assert numpy.allclose(states[:, there], episodes.states[index][:, there], atol=1e-5)
        assert annotation["success"] == episodes.success[index] and len(annotation["rewards"]) == 8
        caption = episodes.captions[index]
        assert annotation["caption"] == caption == (split / "metas" / f"{name}.txt").read_text().strip()
        embedding = pickles.read(split / "t5_xxl" / f"{name}.pickle", 64)
        assert torch.equal(embedding, BytesEncoder(64, 32).encode([caption])[0])


def test_the_record_has_settings_counts_and_command(folder: Path) -> None:
    record = json.loads((folder / "dataset.json").read_text())
    assert record["is_complete"] and record["command"] == "a command"
    assert record["settings"]["frames"] == 9 and record["settings"]["tasks"] == ["push_puck"]
    assert (record["counts"]["train"], record["counts"]["val"]) == (3, 1)
    assert "a command" in (folder / "README.md").read_text()


def test_what_was_interrupted_goes_on_and_ends_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "world"
    written = []

    def stop_at_the_third(*args: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(args)
        write_video(*args)

    write_video = forms.write_video
    monkeypatch.setattr(forms, "write_video", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        write_folder(str(out), SMALL, command="a command")
    with pytest.raises(DataError, match=r"frames 9 \(now 13\)"):
        write_folder(str(out), ToyFolder(episodes=4, frames=13, val_fraction=0.25, text_encoder="bytes", text_width=32))
    (out / "train" / "metas" / ".x.txt.tmp-999999999").write_text("half")  # of a process that was killed
    monkeypatch.setattr(forms, "write_video", lambda *args: (written.append(args), write_video(*args)))
    write_folder(str(out), SMALL, command="a command")
    assert len(written) == 4  # the two that were there were not written again
    assert names(out) == names(folder)
    for name in names(out):
        if not name.endswith(".mp4"):
            assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_a_finished_folder_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "world"
    write_folder(str(out), ToyFolder(episodes=2, frames=5))
    (out / "mine.txt").write_text("kept")
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")}
    write_folder(str(out), ToyFolder(episodes=2, frames=5))  # the same again: nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")} == written
    with pytest.raises(DataError, match="episodes 2"):
        write_folder(str(out), ToyFolder(episodes=1, frames=5))
    write_folder(str(out), ToyFolder(episodes=1, frames=5), overwrite=True)
    assert len(list(out.rglob("*.mp4"))) == 1 and (out / "mine.txt").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="holds other files"):
            write_folder(str(tmp_path), SMALL, overwrite=overwrite)
    assert names(tmp_path) == {"dataset.json"}
    with pytest.raises(DataError, match="is a file"):
        write_folder(str(tmp_path / "dataset.json"), SMALL)
    with pytest.raises(ConfigError, match="local folder"):
        write_folder("s3://bucket/world", SMALL)


def test_a_disk_that_is_too_small_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_folder.storage, "free_bytes", lambda path: 10_000)
    with pytest.raises(DataError, match=r"4 episodes need about .* has 10.0 kB free"):
        write_folder(str(tmp_path / "world"), SMALL)
    assert not names(tmp_path)


def test_the_estimate_of_the_size_is_enough_but_not_absurd(folder: Path) -> None:
    taken = sum((path.stat().st_size + 4095) // 4096 * 4096 for path in folder.rglob("*") if path.is_file())
    assert taken / 2 < SMALL.bytes_needed() < 4 * taken


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_toy_world", *arguments])
    return make_toy_world.main()


def test_the_script_writes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "world")
    arguments = ["--episodes", "2", "--frames", "5", "--setting", "hard", "--tasks", "carry_box", "choose_puck"]
    assert run_script(monkeypatch, "--out", out, *arguments, "--action_dim", "7", "--mix", "expert") == 0
    record = json.loads((tmp_path / "world" / "dataset.json").read_text())
    assert record["settings"]["size"] == 64 and record["settings"]["action_dim"] == 7
    assert record["command"].startswith("python -m scripts.make_toy_world --out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episodes", "0"], "episodes must be >= 1"),
        (["--frames", "1"], "frames must be >= 2"),
        (["--size", "20"], "40 pixels"),
        (["--val_fraction", "1.5"], "val_fraction must be <= 1"),
        (["--form", "states", "--text_encoder", "bytes"], "error: The form 'states' keeps no embeddings"),
    ],
)
def test_a_wrong_number_is_an_error_that_names_it(
    arguments: list, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run_script(monkeypatch, "--out", str(tmp_path / "world"), *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "world").exists()
