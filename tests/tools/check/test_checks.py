# SPDX-License-Identifier: Apache-2.0
"""Every planted fault of a data set is found and its file named; a clean one of each form passes."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.dataset_forms import form_of
from cosmos_predict2.data.lerobot.writer import write_table
from cosmos_predict2.data.video import media
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import read_embedding
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tools.check.dataset import DatasetReport, as_text
from cosmos_predict2.tools.prepare.latent_cache import cache_latents
from imaginaire.errors import DataError
from scripts import check_dataset as script
from scripts import get_t5_embeddings, prepare_lerobot_data
from tests.data import sources_lerobot as made
from tests.data.video_files import remux
from tests.programs import call

ROOT = Path(__file__).resolve().parents[3]
ENCODER = BytesEncoder(64, 32)
CAPTIONS = {"a": "push the red puck", "b": "push the blue box to the ring", "c": "wait", "d": "open the drawer"}


def _video(path: Path, num_frames: int = 9, fps: float = 10, size: tuple[int, int] = (32, 48)) -> None:
    noise = torch.randint(0, 256, (3, num_frames, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    media.write_video(path, noise, fps)


def _embed(folder: Path, captions: dict[str, str] = CAPTIONS) -> None:
    for stem, caption in captions.items():
        (folder / "metas").mkdir(exist_ok=True)
        (folder / "metas" / f"{stem}.txt").write_text(caption + "\n")
    embed_captions(folder / "t5_xxl", captions, ENCODER)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "train"
    for stem in CAPTIONS:
        _video(folder / "videos" / f"{stem}.mp4")
    _embed(folder)
    return folder


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    shutil.copytree(clean, tmp_path / "train")
    return tmp_path / "train"


def check(folder: Path, *more: str) -> tuple[int, dict]:
    """Exit code and the JSON; its "found" has the kind of each fault and its file, relative to the folder."""
    record = folder.parent / "report" / "check.json"
    record.unlink(missing_ok=True)
    code = call(script, folder, "--json", record, "--workers", 0, *more)
    values = json.loads(record.read_text()) if record.is_file() else {"faults": []}
    place = f"{folder}/"
    return code, values | {"found": [(one["kind"], one["file"].removeprefix(place)) for one in values["faults"]]}


def test_a_clean_folder_passes_and_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = check(folder, "--num_frames", "9", "--fps", "10", "--text_encoder", "bytes")
    assert code == 0 and record["faults"] == record["notes"] == []
    assert record["counts"] == {"clips": 4, "captions": 4, "embeddings": 4}
    assert (record["form"], record["encoder"]) == ("video", ENCODER.name)
    assert (record["sizes"], record["fps"], record["num_frames"]) == ({"32x48": 4}, {"10.0": 4}, {"9": 4})
    assert record["seconds"] == pytest.approx(3.6)
    said = capsys.readouterr().out
    assert "4 clips, 4 captions, 4 embeddings" in said and "no faults" in said
    assert check(folder, "--fast")[0] == 0


TINY = "predict2_video2world_training_tiny_video2world_data"


def test_an_experiment_says_what_its_model_takes(folder: Path) -> None:
    """Its frames, its size and the width of its texts, with the command that mends it; a text that fits is no fault."""
    code, record = check(folder, "--experiment", TINY)
    assert code == 1 and any("another shape than 48x48" in note for note in record["notes"])
    assert sum("has 9 frames, but training takes 13" in fault["message"] for fault in record["faults"]) == 4
    (fault,) = (fault for fault in record["faults"] if fault["kind"] == "wrong_encoder")
    assert "width 32 by bytes-v1-64x32, but the model takes 64" in fault["message"]
    assert f"--data {folder} --text_encoder bytes --num_tokens 512 --text_width 64" in fault["message"]

    shutil.rmtree(folder / "t5_xxl")
    embed_captions(folder / "t5_xxl", CAPTIONS, BytesEncoder(512, 64))
    assert check(folder, "--experiment", TINY, "--num_frames", "9")[0] == 0
    _, record = check(folder, "--experiment", TINY.replace("tiny", "2b"), "--num_frames", "9")
    assert [kind for kind, _ in record["found"]] == ["wrong_encoder"], "one cause, one fault"
    shutil.rmtree(folder / "t5_xxl")
    _, record = check(folder, "--experiment", TINY, "--num_frames", "9")
    assert "--text_encoder bytes --num_tokens 512 --text_width 64" in record["faults"][0]["message"]
    _, record = check(folder, "--experiment", TINY, "--num_frames", "9", "--num_tokens", "64")
    assert "--text_encoder bytes --num_tokens 64 --text_width 64" in record["faults"][0]["message"]
    in_training = "predict2p5_video2world_training_tiny_groot_gr1_480"
    assert check(folder, "--experiment", in_training, "--num_frames", "9")[0] == 0, "it encodes captions itself"


def test_a_size_across_the_clips_is_noted(folder: Path) -> None:
    code, record = check(folder, "--video_size", "48", "32")
    assert code == 0
    assert any(note.endswith("was [32, 48] meant? (4 of 4)") for note in record["notes"])


def test_cures_name_the_encoder_of_the_folder(folder: Path) -> None:
    """And following them mends the folder: the default encoder is another one, which would be refused."""
    (folder / "t5_xxl" / "a.pickle").unlink()
    (folder / "metas" / "b.txt").write_text("another text")
    pickles.write(folder / "t5_xxl" / "c.pickle", torch.ones(5, 48))
    _, record = check(folder)
    messages = {fault["kind"]: fault["message"] for fault in record["faults"]}
    assert sorted(messages) == ["caption_changed", "no_embedding", "wrong_encoder"]
    command = f"scripts.get_t5_embeddings --data {folder} --text_encoder bytes --num_tokens 64 --text_width 32"
    assert all(command in message for message in messages.values())
    assert "Delete it" in messages["wrong_encoder"]
    (folder / "t5_xxl" / "c.pickle").unlink()
    flags = command.removeprefix("scripts.get_t5_embeddings ").split()
    assert get_t5_embeddings.run(get_t5_embeddings.parser.parse_args(flags)) == 0
    assert check(folder)[0] == 0


def _truncate(folder: Path) -> None:
    path = folder / "videos" / "a.mp4"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _index_first_and_cut(folder: Path) -> None:
    """Cut off, but with an index that promises all of it."""
    path, whole = folder / "videos" / "a.mp4", folder / "x.mp4"
    remux(path, whole, options={"movflags": "faststart"})
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 3 // 4])
    whole.unlink()


def _no_frames(folder: Path) -> None:
    import av

    with av.open(str(folder / "videos" / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 48, 32
        container.start_encoding()


EMBEDDING, RECORD = "t5_xxl/a.pickle", "t5_xxl/embeddings.json"


def _write_embedding(folder: Path, rows: torch.Tensor, *, with_record: bool = True) -> None:
    path = folder / EMBEDDING
    if not with_record:
        (folder / RECORD).unlink()
    path.write_bytes(pickle.dumps([rows.numpy().astype(np.float16)], protocol=4))


def _malicious(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {folder}/run",)

    (folder / "t5_xxl" / "a.pickle").write_bytes(pickle.dumps([Evil()]))


def _nan(folder: Path) -> None:
    rows = read_embedding(folder / EMBEDDING)
    rows[3, 5] = float("nan")
    _write_embedding(folder, rows)


def _bytes(path: str, content: bytes) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)

    return plant


def _remove(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink() if (folder / path).is_file() else shutil.rmtree(folder / path)


def _folder(path: str) -> Callable[[Path], None]:
    return lambda folder: ((folder / path).unlink(), (folder / path).mkdir())


PLANTED = {
    "truncated": (_truncate, "unreadable", "videos/a.mp4"),
    "cut_off_behind_its_index": (_index_first_and_cut, "unreadable", "videos/a.mp4"),
    "zero_frames": (_no_frames, "unreadable", "videos/a.mp4"),
    "zero_bytes": (_bytes("videos/a.mp4", b""), "unreadable", "videos/a.mp4"),
    "no_video_at_all": (_bytes("videos/a.mp4", b"text"), "unreadable", "videos/a.mp4"),
    "mixed_fps": (lambda f: _video(f / "videos" / "a.mp4", fps=24), "mixed_fps", "videos/a.mp4"),
    "caption_without_clip": (_bytes("metas/z.txt", b"z"), "no_clip", "metas/z.txt"),
    "clip_without_caption": (_remove("metas/a.txt"), "no_caption", "metas/a.txt"),
    "no_captions_and_embeddings": (
        lambda f: (shutil.rmtree(f / "metas"), shutil.rmtree(f / "t5_xxl")), "no_caption", "metas",
    ),
    "embedding_without_clip": (_remove("videos/a.mp4"), "no_clip", EMBEDDING),
    "empty_caption": (_bytes("metas/a.txt", b" \n"), "caption", "metas/a.txt"),
    "not_utf8": (_bytes("metas/a.txt", b"caf\xe9"), "caption", "metas/a.txt"),
    "changed_caption": (_bytes("metas/a.txt", b"something else"), "caption_changed", EMBEDDING),
    "missing_embedding": (_remove(EMBEDDING), "no_embedding", EMBEDDING),
    "no_embeddings": (_remove("t5_xxl"), "no_embedding", "t5_xxl"),
    "nan": (_nan, "embedding", EMBEDDING),
    "zeros": (lambda f: _write_embedding(f, torch.zeros(20, 32)), "embedding", EMBEDDING),
    "no_pickle": (_bytes(EMBEDDING, b"\x80\x04half"), "embedding", EMBEDDING),
    "malicious_pickle": (_malicious, "embedding", EMBEDDING),
    "other_width": (lambda f: _write_embedding(f, torch.randn(20, 48)), "wrong_encoder", EMBEDDING),
    "other_width_without_record": (
        lambda f: _write_embedding(f, torch.randn(20, 48), with_record=False), "wrong_encoder", EMBEDDING,
    ),
    "other_encoder": (lambda f: _write_embedding(f, torch.randn(20, 32)), "wrong_encoder", EMBEDDING),
    "damaged_record": (_bytes(RECORD, b"{"), "record", RECORD),
    "folder_for_embedding": (_folder(EMBEDDING), "embedding", EMBEDDING),
    "link_to_nothing": (lambda f: (f / "videos/z.mp4").symlink_to("absent.mp4"), "unreadable", "videos/z.mp4"),
    "folder_for_clip": (lambda f: (f / "videos" / "z.mp4").mkdir(), "unreadable", "videos/z.mp4"),
    "same_stem": (lambda f: shutil.copy(f / "videos/a.mp4", f / "videos/a.mov"), "same_stem", "videos/a.mp4"),
    "no_clips": (_remove("videos"), "empty", "videos"),
    "annotation": (_bytes("annotation/a.json", b"{"), "annotation", "annotation/a.json"),
    "annotation_without_clip": (_bytes("annotation/z.json", b"{}"), "no_clip", "annotation/z.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_file_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, kind, file = PLANTED[name]
    plant(folder)
    if name == "no_clips":
        (folder / "videos").mkdir()
    code, record = check(folder)
    assert code == 1
    assert (kind, file) in record["found"]
    assert all(str(folder) in fault["message"] for fault in record["faults"])
    said = capsys.readouterr().out
    assert str(folder / file) in said and f"{kind}: " in said
    assert not (folder / "run").exists()
    lonely = {"embedding_without_clip", "no_clips", "no_captions_and_embeddings"}
    assert len(record["faults"]) == 1 or name in lonely, "one fault is told once"


def test_names_of_any_bytes_are_told_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "videos" / "\udcff.mp4"  # the byte ff: no UTF-8
    path.write_bytes(b"text")
    code, record = check(folder)
    assert code == 1 and str(path) in [fault["file"] for fault in record["faults"]]
    assert "videos/\\udcff.mp4 is not a video" in capsys.readouterr().out


def test_what_is_asked_for_is_held_against_the_clips(folder: Path) -> None:
    _video(folder / "videos" / "a.mp4", num_frames=5)
    for flags, found in (
        (["--num_frames", "9"], [("too_short", "videos/a.mp4")]),
        (["--fps", "16"], [("mixed_fps", f"videos/{stem}.mp4") for stem in CAPTIONS]),
        (["--text_encoder", "t5"], [("wrong_encoder", "t5_xxl")]),
    ):
        code, record = check(folder, *flags)
        assert code == 1 and record["found"] == found
    assert check(folder, "--fps", "16", "--any_fps")[0] == 0
    code, record = check(folder, "--video_size", "64", "64")
    assert code == 0
    assert "4 are smaller than 64x64" in record["notes"][0] and "training stretches them" in record["notes"][1]
    shutil.rmtree(folder / "t5_xxl")
    assert check(folder, "--no_embeddings")[0] == 0


def test_embeddings_from_elsewhere_pass_with_a_note(folder: Path) -> None:
    (folder / RECORD).unlink()
    code, record = check(folder)
    assert code == 0 and "no embeddings.json" in record["notes"][0]
    assert check(folder, "--text_encoder", "bytes")[0] == 0
    code, record = check(folder, "--text_encoder", "t5")  # told apart by its numbers
    assert code == 1 and {kind for kind, _ in record["found"]} == {"wrong_encoder"}
    shutil.rmtree(folder / "metas")
    code, record = check(folder)
    assert code == 0 and any("training does not need them" in note for note in record["notes"])


def test_fast_finds_what_first_and_last_frame_show(folder: Path) -> None:
    _index_first_and_cut(folder)
    code, record = check(folder, "--fast")
    assert code == 1 and record["found"][0][1] == "videos/a.mp4"


def test_train_and_val_are_both_checked(folder: Path) -> None:
    parent = folder.parent
    shutil.copytree(folder, parent / "val")
    code, record = check(parent)
    assert code == 0 and [part["folder"] for part in record["parts"]] == [str(parent / "train"), str(parent / "val")]
    assert "share 4 names" in record["notes"][0]
    (parent / "val" / "videos" / "b.mp4").write_bytes(b"")
    code, record = check(parent)
    assert code == 1 and record["parts"][1]["faults"][0]["file"] == str(parent / "val" / "videos" / "b.mp4")
    shutil.rmtree(parent / "val")
    (parent / "val").mkdir()
    code, record = check(parent)
    assert code == 1 and record["faults"][0]["kind"] == "unknown_form"


def test_pictures_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "images_set"
    for stem in CAPTIONS:
        media.write_image(folder / "images" / f"{stem}.jpg", torch.zeros(3, 16, 24, dtype=torch.uint8))
    _embed(folder)
    code, record = check(folder, "--num_frames", "93")
    assert code == 0 and record["form"] == "image" and record["sizes"] == {"16x24": 4}
    (folder / "images" / "c.jpg").write_bytes(b"\xff\xd8 not a picture")
    code, record = check(folder)
    assert code == 1 and record["found"][0][1] == "images/c.jpg"


def test_cached_latents_are_checked_with_their_clips_and_without(folder: Path) -> None:
    cache_latents(folder, TinyTokenizer(), num_frames=9, size=(32, 48), windows_per_clip=1)
    code, record = check(folder)
    assert code == 0 and record["counts"]["latents"] == 4 and not record["notes"]
    (folder / "latents" / "a.safetensors").write_bytes(b"damaged")
    (folder / "latents" / "b.safetensors").unlink()
    _video(folder / "videos" / "c.mp4", num_frames=12)
    code, record = check(folder)
    assert code == 1
    assert [Path(file).name for _, file in record["found"]] == ["a.safetensors", "c.safetensors"]
    assert "has changed" in record["faults"][1]["message"] and "1 clips have no latents" in record["notes"][0]
    shutil.rmtree(folder / "videos")
    code, record = check(folder)
    assert code == 1 and record["form"] == "latents" and record["sizes"] == {"32x48": 2}
    assert {Path(file).name for _, file in record["found"]} == {"a.safetensors", "b.txt", "b.pickle"}
    (folder / "latents" / "latents.json").unlink()
    assert "record" in dict(check(folder)[1]["found"])


def test_clips_of_several_cameras_are_refused_by_name(tmp_path: Path) -> None:
    _video(tmp_path / "videos" / "front" / "a.mp4")
    with pytest.raises(DataError, match=r"each camera \(front\): a multi-view model trains on it"):
        form_of(tmp_path)


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    folder = tmp_path / "bridge"
    for split, names in (("train", ("1", "2")), ("val", ("3",))):
        for name in names:
            video = f"videos/{split}/{name}/rgb.mp4"
            _video(folder / video, num_frames=6)
            annotation = {
                "state": [[0.1 * k * (name != "1"), 0, 0, 0, 0, 0.1] for k in range(6)],
                "continuous_gripper_state": [0.0] * 6,
                "action": [[0.0] * 7] * 5,
                "videos": [{"video_path": video}],
                "episode_id": name,
            }
            path = folder / "annotation" / split / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(annotation))
    return folder


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


LAST, FIRST_VIDEO = "annotation/val/3.json", "videos/train/1/rgb.mp4"


@pytest.mark.parametrize(
    ("plant", "kind", "file"),
    [
        (_remove(FIRST_VIDEO), "missing_video", FIRST_VIDEO),
        (_bytes(FIRST_VIDEO, b"x"), "unreadable", FIRST_VIDEO),
        (lambda f: _video(f / FIRST_VIDEO, num_frames=5), "too_short", FIRST_VIDEO),
        (_bytes(LAST, b"{"), "annotation", LAST),
        (_bytes(LAST, b"[" * 100_000), "annotation", LAST),
        (lambda f: _edit(f / LAST, continuous_gripper_state=[0.0]), "annotation", LAST),
        (lambda f: _edit(f / LAST, action=[[0.0] * 7]), "annotation", LAST),
        (lambda f: _edit(f / LAST, action=[[float("nan")] * 7] * 5), "annotation", LAST),
        (lambda f: _edit(f / LAST, videos=[]), "annotation", LAST),
        (lambda f: _edit(f / LAST, state=[], continuous_gripper_state=[], action=[]), "annotation", LAST),
    ],
)
def test_recordings_are_checked(bridge: Path, plant: Callable[[Path], None], kind: str, file: str) -> None:
    code, record = check(bridge, "--num_frames", "6")
    assert code == 0 and record["form"] == "bridge" and record["counts"] == {"recordings": 3, "clips": 3}
    assert [kind for kind, _ in check(bridge, "--num_frames", "7")[1]["found"]] == ["too_short"] * 3
    plant(bridge)
    code, record = check(bridge)
    assert code == 1
    assert record["found"] == [(kind, file)]


def test_the_numbers_of_poses_are_shown_with_units_that_are_hardly_meant(bridge: Path, capsys: Any) -> None:
    _, record = check(bridge)
    (table,) = record["actions"]
    assert table["names"][:2] == ["dx (m)", "dy (m)"] and table["num_transitions"] == 15
    assert table["action"]["mean"][:2] == pytest.approx([0.2 / 3 * np.cos(0.1), -0.2 / 3 * np.sin(0.1)])
    printed = capsys.readouterr().out
    assert " 0.0995" in printed and "0.1" not in "".join(record["notes"])
    assert "relative_pose of 7 numbers, scale [8, 128, 1" in printed
    assert "dataset.action_transform=statistics); with bridge_train as" in printed
    states = [[100.0 * k, 0, 0, 0, 0, 90.0] for k in range(6)]
    _edit(bridge / "annotation/train/1.json", state=states, continuous_gripper_state=[80.0] * 6)
    notes = "; ".join(check(bridge)[1]["notes"])
    assert "position changes by 100; metres are expected" in notes and "states lie between 0 and 80" in notes
    assert "angles reach 90; radians are expected" in notes
    assert "differences of 'state' reach 1.8e+03" in notes and "train with dataloader_train=bridge_json_train" in notes


@pytest.fixture
def robot(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
    return made.write_v2(tmp_path / "robot")


def test_the_actions_of_a_lerobot_data_set_are_shown(robot: Path, capsys: Any, caplog: Any) -> None:
    rows = np.concatenate([made.action(i) for i in range(3)]).astype(np.float64)
    for folder in (robot, ROOT / "tests/data/fixtures/lerobot_v3"):
        assert call(script, folder, "--workers", 0) == 0
        out = capsys.readouterr().out
        lengths = sorted(len(made.action(i)) for i in range(3))
        assert f"  frames    {lengths[0]} to {lengths[-1]}, median {lengths[1]};" in out  # a file may have several
        assert "3 episodes, 21 frames, 2 tasks" in out and "'action': 3 numbers, 21 rows of 3 recordings" in out
        figures = [float(word) for word in next(line for line in out.splitlines() if " dy " in line).split()[1:]]
        column = rows[:, 1]
        quantiles = np.quantile(column, [0.01, 0.99])
        expected = [column.min(), quantiles[0], column.mean(), quantiles[1], column.max(), column.std()]
        assert figures == pytest.approx(expected, rel=1e-3)
        assert "seen by a model as controller of 3 numbers, scale 1" in out
    made.write_json(robot / "meta/modality.json", made.MODALITY)
    assert check(robot)[1]["actions"][0]["names"] == ["dx", "dy", "grip"]
    caplog.set_level("INFO")
    assert prepare_lerobot_data._look_at(robot, None) == 0
    assert "actions: 'action': 3 numbers" in caplog.text and " dy " in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_rates_that_contradict_each_other_and_constant_numbers_are_told(robot: Path, caplog: Any) -> None:
    info = json.loads((robot / "meta/info.json").read_text())
    made.write_json(robot / "meta/info.json", {**info, "fps": 2 * info["fps"]})
    for i in range(3):
        table = made.table(i)
        table["action"] = made.action(i) * np.float32([1, 0, 1])
        write_table(robot / f"data/chunk-000/episode_{i:06d}.parquet", table)
    told = f"meta/info.json has fps 20, but the videos of '{made.FRONT}' have 10 frames per second", "never changes"
    notes = "; ".join(check(robot)[1]["notes"])
    assert prepare_lerobot_data._look_at(robot, None) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(words in notes and sum(words in line for line in warnings) == 1 for words in told)
    caplog.clear()
    LeRobotActionDataset(str(robot), "front", num_frames=4, data_split="full")
    assert told[0] in caplog.text


@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        (_remove(f"videos/chunk-000/{made.FRONT}/episode_000001.mp4"), "missing_file", "the index of"),
        (_bytes(f"videos/chunk-000/{made.FRONT}/episode_000001.mp4", b"x"), "unreadable", "episode_000001.mp4"),
        (
            lambda f: _video(f / f"videos/chunk-000/{made.FRONT}/episode_000002.mp4", num_frames=8),
            "too_short",
            "has 8 frames, but the 9 of episode_000002 end at frame 9. Record the episode again",
        ),
        (
            lambda f: _video(f / f"videos/chunk-000/{made.FRONT}/episode_000002.mp4", num_frames=10),
            "too_long",
            "has 10 frames, but episode_000002 has 9 rows",
        ),
        (
            lambda f: _video(f / f"videos/chunk-000/{made.FRONT}/episode_000000.mp4", num_frames=20, fps=30),
            "index",
            "30 frames per second, but meta/info.json has 10",
        ),
    ],
)
def test_faults_of_a_lerobot_data_set_are_found(
    robot: Path, plant: Callable[[Path], None], kind: str, words: str
) -> None:
    plant(robot)
    code, record = check(robot, "--any_fps")
    assert code == 1 and [kind for kind, _ in record["found"]] == [kind]
    assert words in record["faults"][0]["message"]


def test_tables_that_the_index_does_not_name_and_states_of_another_width_are_faults(robot: Path) -> None:
    """As of a recording that was written over another, and of an episode of another recorder."""
    shutil.copy(robot / "data/chunk-000/episode_000001.parquet", robot / "data/chunk-000/episode_000007.parquet")
    table = made.table(1)
    table["observation.state"] = np.concatenate([table["observation.state"], table["observation.state"][:, :1]], axis=1)
    write_table(robot / "data/chunk-000/episode_000001.parquet", table)
    code, record = check(robot, "--any_fps")
    found = {fault["kind"]: fault["message"] for fault in record["faults"]}
    assert code == 1 and "names none of 1 tables, such as" in found["not_in_index"]
    assert re.search(r"episode_000001 has \d+ numbers of 'observation.state' in a row where", found["actions"])


def test_numbers_of_an_action_that_are_none_are_a_fault(robot: Path) -> None:
    table = made.table(1)
    table["action"] = np.where(np.arange(5)[:, None] == 3, np.nan, made.action(1))
    write_table(robot / "data/chunk-000/episode_000001.parquet", table)
    code, record = check(robot, "--num_frames", "6")
    found = {fault["kind"]: fault["message"] for fault in record["faults"]}
    assert code == 1 and "episode_000001 has a number that is not finite in row 3" in found["actions"]
    assert "episode_000001 has 5 frames, but training takes 6" in found["too_short"] and len(found) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num_frames", "0"], "num_frames=0"),
        (["--video_size", "50", "64"], "multiples of 16"),
        (["--fps", "-1"], "fps=-1"),
    ],
)
def test_wrong_wishes_are_exit_2(folder: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, *flags)[0] == 2
    assert text in capsys.readouterr().err


def test_a_folder_of_no_known_form_says_what_was_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train" / "clips").mkdir(parents=True)
    assert check(tmp_path / "train")[0] == 2
    said = capsys.readouterr().err
    assert "videos/*.mp4" in said and "It holds clips" in said
    assert check(tmp_path / "trian")[0] == 2 and "Did you mean train?" in capsys.readouterr().err
    (tmp_path / "robot" / "meta").mkdir(parents=True)
    (tmp_path / "robot" / "meta" / "info.json").write_text("{}")
    assert check(tmp_path / "robot")[0] == 2 and "codebase_version" in capsys.readouterr().err


def test_many_faults_are_counted_and_the_first_told() -> None:
    report = DatasetReport("folder", "video")
    for i in range(60):
        report.fault(f"videos/{i}.mp4", "too_short", f"videos/{i}.mp4 is short")
    said = as_text(report, most_faults=5)
    assert "60 faults: 60 too_short" in said and "videos/4.mp4" in said and "videos/5.mp4" not in said
    assert "... and 55 more" in said
