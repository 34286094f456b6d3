# SPDX-License-Identifier: Apache-2.0
"""The three scripts that encode captions: which captions, which files, which exit code."""

import os
from pathlib import Path

import pytest
import torch

from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.text.trained_text import ENCODERS, encode_command
from scripts import get_t5_embeddings, get_t5_embeddings_from_cosmos_nemo_assets, get_t5_embeddings_from_groot_dataset
from tests.text.folders import Letters, t5_folder
from tests.tools.prepare.conftest import Start

ROOT = Path(__file__).parents[3]
BYTES = ("--text_encoder", "bytes", "--num_tokens", "128", "--text_width", "32")
CAPTIONS = {"one": "push the puck", "two": "push the box", "three": "push the puck"}
GUIDE = "datasets/agibot_head_center_fisheye_color"


def dataset(folder: Path, captions: dict[str, str], clips: tuple[str, ...] = (), kind: str = "videos") -> Path:
    """metas/ and files in place of clips, which nothing here opens."""
    for name, text in captions.items():
        (folder / "metas").mkdir(parents=True, exist_ok=True)
        (folder / "metas" / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    (folder / kind).mkdir(parents=True, exist_ok=True)
    for name in clips or tuple(captions):
        (folder / kind / (f"{name}.mp4" if kind == "videos" else f"{name}.jpg")).touch()
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    t5_folder(folder, d_model=1024, num_layers=1, d_ff=32)
    return folder


def test_captions_become_embeddings(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    for shard, written in (("0/2", 2), ("1/2", 1)):
        assert start(get_t5_embeddings, "--data", folder, *BYTES, "--shard", shard) == 0
        assert f"embeddings written: {written}, of {written} different captions; kept as they are: 0" in caplog.text
    embeddings = EmbeddingFolder(folder / "t5_xxl")
    for stem, caption in CAPTIONS.items():
        assert embeddings.find(stem) == folder / "t5_xxl" / f"{stem}.pickle"
        assert torch.equal(embeddings.read(stem, 128)[0], BytesEncoder(128, 32).encode(caption)[0])
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    assert "embeddings written: 0, of 0 different captions; kept as they are: 3" in caplog.text
    (folder / "metas" / "two.txt").write_text("lift the box")
    assert start(get_t5_embeddings, "--data", folder, *BYTES, "--form", "safetensors") == 0
    assert embeddings.find("two") == folder / "t5_xxl" / "two.safetensors"


def test_the_splits_of_a_folder_are_encoded_by_one_command(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], get_t5_embeddings.make_encoder
    monkeypatch.setattr(get_t5_embeddings, "make_encoder", lambda args: made.append(args) or make(args))
    for split in ("train", "val"):
        dataset(tmp_path / split, CAPTIONS)
    assert start(get_t5_embeddings, "--data", tmp_path, *BYTES) == 0
    assert len(made) == 1, "an encoder that takes minutes to load"
    for split in ("train", "val"):
        assert sorted(path.stem for path in (tmp_path / split / "t5_xxl").glob("*.pickle")) == sorted(CAPTIONS)
    (tmp_path / "val/metas/two.txt").write_text("")  # the worst of both is the exit code
    assert start(get_t5_embeddings, "--data", tmp_path, *BYTES) == 1


def test_an_encoder_of_ones_own_has_its_names_kind(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    monkeypatch.setitem(ENCODERS, "letters", Letters)
    for name, written in ((f"{Letters.__module__}:Letters", 3), ("letters", 0)):
        assert start(get_t5_embeddings, "--data", folder, "--text_encoder", name) == 0
        assert f"embeddings written: {written}," in caplog.text
    assert start(get_t5_embeddings, "--data", folder, "--text_encoder", "bytes") == 2
    assert encode_command(folder, "letters-v1-3x8").endswith("--text_encoder letters --text_width 8")
    assert encode_command(folder, "letters-v1-512x4").endswith(" --num_tokens 512 --text_width 4")
    monkeypatch.setitem(ENCODERS, "plain", type("Plain", (), {}))
    assert encode_command(folder, "plain-v1-3x4").endswith("--text_encoder plain")


def test_the_guides_command_encodes_with_t5_at_its_usual_place(
    start: Start, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path / GUIDE / "train", CAPTIONS)
    Path("checkpoints/google-t5").mkdir(parents=True)
    os.symlink(t5, "checkpoints/google-t5/t5-11b")
    assert start(get_t5_embeddings, "--data", f"{GUIDE}/train") == 0
    folder = EmbeddingFolder(f"{GUIDE}/train/t5_xxl")
    encoder = T5Encoder(str(t5))
    assert folder.record.encoder == encoder.name and folder.width == 1024
    for stem, caption in CAPTIONS.items():
        embedding, mask = folder.read(stem)
        expected = encoder.encode(caption)[0]
        torch.testing.assert_close(embedding, expected, rtol=1e-3, atol=1e-3)  # rounded to float16
        assert torch.equal(mask.bool(), (expected != 0).any(dim=-1))
    before = {path: path.read_bytes() for path in folder.folder.iterdir()}
    assert start(get_t5_embeddings, "--data", f"{GUIDE}/train", "--cache_dir", "nowhere") == 0  # nothing to do
    (tmp_path / GUIDE / "train" / "metas" / "four.txt").write_text("push")
    assert start(get_t5_embeddings, "--data", f"{GUIDE}/train", "--dtype", "bfloat16") == 2  # another encoder
    assert {path: path.read_bytes() for path in folder.folder.iterdir()} == before


def test_weights_that_are_not_there_are_an_error_with_the_cures(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    for extra in ([], ["--dry-run"]):
        assert start(get_t5_embeddings, "--data", folder, "--cache_dir", tmp_path / "t5", *extra) == 2
        error = capsys.readouterr().err
        for words in (str(tmp_path / "t5"), "hf download google-t5/t5-11b", "--text_encoder bytes"):
            assert words in error
        assert not (folder / "t5_xxl").exists()


def test_without_captions_nothing_is_written_and_the_exit_code_is_1(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bare" / "videos").mkdir(parents=True)
    (tmp_path / "empty" / "metas").mkdir(parents=True)
    dataset(tmp_path / "blank", {"a": "", "b": " "})
    for name, words in {
        "bare": ["no folder", str(tmp_path / "bare" / "metas")],
        "empty": [str(tmp_path / "empty" / "metas"), "no captions"],
        "blank": [str(Path("metas") / "a.txt") + " is empty", "2 of 2 captions failed", "no caption that can be used"],
        "splt": [f"no folder {tmp_path / 'splt' / 'metas'}"],
    }.items():
        assert start(get_t5_embeddings, "--data", tmp_path / name, *BYTES) == 1
        for word in [*words, "nothing was written"]:
            assert word in caplog.text, (name, word)
    assert not list(tmp_path.rglob("t5_xxl"))


def test_one_bad_caption_does_not_stop_the_others(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    (folder / "metas" / "two.txt").write_bytes("Käse".encode("latin-1"))
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 1
    assert "two.txt is not UTF-8" in caplog.text and "1 of 3 captions failed" in caplog.text
    assert EmbeddingFolder(folder / "t5_xxl").stems() == ["one", "three"]


def test_what_does_not_fit_together_is_counted_and_named(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = dataset(tmp_path, CAPTIONS, clips=("one", "two", "clip_7", *(f"more_{i}" for i in range(9))))
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    assert "clips without a caption: 10 of 12 (clip_7, more_0, more_1, more_2," in caplog.text
    assert "more_6 and 2 more)" in caplog.text
    assert "captions without a file in videos/: 1 (three)" in caplog.text
    (folder / "metas" / "three.txt").unlink()
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    assert "embeddings of no caption: 1 (three)" in caplog.text
    for path in (folder / "videos").iterdir():
        path.unlink()
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    assert "no file in videos/ or images/: 2" in caplog.text


def test_the_folder_of_embeddings_that_is_there_is_the_one_that_grows(start: Start, tmp_path: Path) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    (folder / "t5_xxl").rename(folder / "text_embedding")
    (folder / "metas" / "four.txt").write_text("lift")
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 0
    assert EmbeddingFolder(folder / "text_embedding").find("four") and not (folder / "t5_xxl").exists()
    (folder / "text_embedding" / "embeddings.json").unlink()
    (folder / "metas" / "five.txt").write_text("turn")
    assert start(get_t5_embeddings, "--data", folder, *BYTES) == 2
    assert start(get_t5_embeddings, "--data", folder, *BYTES, "--adopt") == 0
    assert EmbeddingFolder(folder / "text_embedding").record.captions.keys() == CAPTIONS.keys() | {"four", "five"}


TABLE = '''\
file_name,text
0.mp4,"Pick up the cup, then put it down."
gr1/1.mp4,Open the "blue" box
2,  "Say ""hello"""

3.mp4,Ende, 終わり
'''


def groot(folder: Path, table: str = TABLE) -> Path:
    dataset(folder, {}, clips=("0", "1", "2", "3"))
    (folder / "metadata.csv").write_text("\ufeff" + table, encoding="utf-8")
    return folder


def metas(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in (folder / "metas").iterdir()}


def test_groot_prompts_come_from_the_table(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = groot(tmp_path)
    script = get_t5_embeddings_from_groot_dataset
    prompts = {
        "0": "Pick up the cup, then put it down.",
        "1": 'Open the "blue" box',
        "2": 'Say "hello"',
        "3": "Ende, 終わり",
    }
    assert start(script, "--data", folder, *BYTES, "--dry-run") == 0
    assert "that would be written: 4" in caplog.text and not (folder / "metas").exists()
    for prefix, flag in (
        ("The robot arm is performing a task. ", []),
        ("A robot: ", ["--prompt_prefix", "A robot: "]),  # all is encoded again
    ):
        assert start(script, "--data", folder, *BYTES, *flag) == 0
        assert "embeddings written: 4" in caplog.text and "WARNING" not in caplog.text
        assert metas(folder) == {stem: prefix + prompt for stem, prompt in prompts.items()}
        for stem, prompt in prompts.items():
            expected = BytesEncoder(128, 32).encode(prefix + prompt)[0]
            assert torch.equal(EmbeddingFolder(folder / "t5_xxl").read(stem, 128)[0], expected)
    assert start(script, "--data", folder, *BYTES, "--prompt_prefix", "A robot: ") == 0
    assert "embeddings written: 0" in caplog.text


def test_groot_tables_may_lie_elsewhere_and_faults_name_the_line(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, table = groot(tmp_path / "gr1"), tmp_path / "other.csv"
    script = get_t5_embeddings_from_groot_dataset
    table.write_text("name,text\n0.mp4,wave\n1.mp4\n0.mp4,jump\n,x\n9.mp4,wave\n")
    assert start(script, "--data", folder, *BYTES, "--meta_csv", table) == 1
    for words in (":3 is '1.mp4'", ":4 has a second, different prompt for '0'", ":5 is ',x'"):
        assert words in caplog.text
    assert "clips without a caption: 3 of 4 (1, 2, 3)" in caplog.text
    assert "captions without a file in videos/: 1 (9)" in caplog.text
    assert metas(folder).keys() == {"0", "9"}
    table.write_text('name,text\n0.mp4,"wave\n1.mp4,jump\u2028high\x85er\n', encoding="utf-8")
    assert start(script, "--data", folder, *BYTES, "--meta_csv", table) == 1
    assert "no closing quote" in caplog.text
    assert metas(folder)["1"] == "The robot arm is performing a task. jump\u2028high\x85er"
    for content, words in (("name,text\n", "no clips below"), ("0.mp4,wave\n1.mp4,x\n", "begins with a clip")):
        table.write_text(content)
        assert start(script, "--data", folder, *BYTES, "--meta_csv", table) == 1
        assert words in caplog.text and "nothing was written" in caplog.text
    assert start(script, "--data", tmp_path, *BYTES) == 1
    assert str(tmp_path / "metadata.csv") in caplog.text and "--meta_csv" in caplog.text


@pytest.mark.parametrize("kind", ["videos", "images"])
def test_nemo_clips_share_a_prompt_but_captions_by_hand_stay(
    kind: str, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = dataset(tmp_path, {}, clips=("a", "b", "c"), kind=kind)
    script, flag = get_t5_embeddings_from_cosmos_nemo_assets, ["--is_image"] if kind == "images" else []
    assert start(script, "--data", folder, *BYTES, *flag) == 0
    assert metas(folder) == dict.fromkeys("abc", "A video of sks teal robot.")
    assert "written: 3, of 1 different" in caplog.text
    (folder / "metas" / "b.txt").write_text("mine")
    assert start(script, "--data", folder, *BYTES, *flag) == 0
    assert "kept: 1 (b)" in caplog.text and metas(folder)["b"] == "mine"
    expected = BytesEncoder(128, 32).encode("mine")[0]
    assert torch.equal(EmbeddingFolder(folder / "t5_xxl").read("b", 128)[0], expected)
    assert start(script, "--data", folder, *BYTES, *([] if flag else ["--is_image"])) == 1
    assert "nothing was written" in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shard", "8/8"], "0/8"),
        (["--shard", "half"], "0/8"),
        (["--text_width", "64"], "--text_width has no meaning for --text_encoder t5"),
        (["--text_encoder", "letter"], "No encoder is called 'letter'"),
        (["--device", "tpu"], "--device tpu"),
        (["--dataset_pth", "x"], "Did you mean --data"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], words: str, start: Start, t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = dataset(tmp_path, CAPTIONS)
    assert start(get_t5_embeddings, "--data", folder, "--cache_dir", t5, *flags) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "t5_xxl").exists()


def test_captions_alone_need_no_encoder(start: Start, tmp_path: Path) -> None:
    folder = dataset(tmp_path, {}, ("a", "b"))
    flags = ("--data", folder, "--prompt", "a robot", "--text_encoder", "none")
    assert start(get_t5_embeddings_from_cosmos_nemo_assets, *flags) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["metas", "videos"]
    assert [(folder / f"metas/{stem}.txt").read_text().strip() for stem in "ab"] == ["a robot"] * 2
