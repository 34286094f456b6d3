# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.tools.prepare.bridge and its command: from the archive to samples."""

import json
import random
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.tools.prepare import bridge
from cosmos_predict2.tools.prepare.bridge import fetch, look_up
from imaginaire.errors import DataError
from scripts import prepare_bridge_data
from tests.data.sources_bridge import bridge_archive, bridge_tree
from tests.tools.prepare.conftest import Start
from tests.tools.prepare.file_server import Served, serve


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return bridge_archive(folder / "bridge_train_data.tar.gz", bridge_tree(folder / "tree", num_frames=14))


@pytest.fixture
def run(start: Start):
    return lambda *arguments: start(prepare_bridge_data, *arguments, "--workers", 0)


def test_an_address_becomes_a_folder_that_trains(
    archive: Path, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "datasets" / "bridge"
    with serve(Served(archive.read_bytes(), most=5000, name=archive.name)) as served:
        monkeypatch.setattr(bridge, "time", SimpleNamespace(sleep=lambda seconds: None))
        assert run("--source", served.url, "--out", out) == 0
        assert len(served.starts) > 1
        served.starts.clear()
        assert run("--source", served.url, "--out", out) == 0 and not served.starts
    assert "1 test, 2 train, 1 val; 56 frames" in caplog.text
    assert sorted(path.name for path in out.iterdir()) == ["annotation", "dataset.json", "videos"]
    assert [path.name for path in out.parent.iterdir()] == ["bridge"]  # the archive is gone
    record = json.loads((out / "dataset.json").read_text())
    assert record["source"] == served.url and record["recordings"] == {"test": 1, "train": 2, "val": 1}
    dataset = ActionConditionedDataset(str(out / "annotation/train"), video_path=str(out), video_size=(32, 48))
    assert len(dataset) == 4 and dataset[3]["action"].shape == (12, 7)


def test_a_file_that_is_here_is_unpacked_and_kept(archive: Path, run, tmp_path: Path) -> None:
    (tmp_path / "bridge").mkdir()  # an empty folder is as good as none
    assert run("--source", archive, "--out", tmp_path / "bridge") == 0
    assert archive.exists() and (tmp_path / "bridge/videos/val/2/rgb.mp4").exists()


def test_a_dry_run_writes_nothing(archive: Path, run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(Served(archive.read_bytes(), name=archive.name)) as served:
        for source, words in ((served.url, "to fetch to"), (archive, "to unpack to")):
            assert run("--source", source, "--out", tmp_path / "bridge", "--dry_run") == 0 and words in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "out", "named"),
    [
        ("archive", "mine", "mine"),
        ("nothing.tar.gz", "bridge", "nothing.tar.gz"),
        ("other.tar.gz", "bridge", "it has mine"),
        ("evil.tar.gz", "bridge", "'../file'"),
        ("http://localhost:1/", "bridge", "http://localhost:1/"),
    ],
)
def test_other_contents_are_refused(
    source: str, out: str, named: str, archive: Path, run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for name, path, member in (("other", "mine", "mine"), ("evil", "mine/file", "../file")):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / path, arcname=member)
    place = {"archive": archive}.get(source, source if "//" in source else tmp_path / source)
    assert run("--source", place, "--out", tmp_path / out) == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "bridge").exists() and not list(tmp_path.glob(".bridge*"))


def test_a_full_disk_is_refused(
    archive: Path, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 100)
    assert run("--source", archive, "--out", tmp_path / "bridge") == 2
    assert "Unpacking" in capsys.readouterr().err and not (tmp_path / "bridge").exists()


def test_of_several_folders_the_one_called_bridge_is_taken_or_none(tmp_path: Path) -> None:
    for name in ("a/x", "a/y"):
        bridge_tree(tmp_path / "tree" / name, num_frames=2)
    with tarfile.open(tmp_path / "two.tar", "w") as tar:
        tar.add(tmp_path / "tree", arcname=".")
    with pytest.raises(DataError, match=r"several folders with annotation/: a/x, a/y\."):
        bridge.prepare(str(tmp_path / "two.tar"), tmp_path / "out", workers=0)
    with tarfile.open(tmp_path / "two.tar", "a") as tar:
        tar.add(tmp_path / "tree" / "a" / "x", arcname="z/bridge")
    assert bridge.prepare(str(tmp_path / "two.tar"), tmp_path / "out", workers=0).faults == []


def test_recordings_without_frames_are_named(tmp_path: Path) -> None:
    (path := tmp_path / "annotation" / "train" / "1.json").parent.mkdir(parents=True)
    path.write_text(json.dumps({"state": [], "continuous_gripper_state": [], "videos": ["1.mp4"]}))
    assert "has no state" in bridge.look_through(tmp_path, workers=0).faults[0]


def test_faults_are_named_and_looked_for_again(run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = bridge_tree(tmp_path / "tree", episodes={"train": 3}, annotation="annotations", num_frames=3)
    (tree / "videos/train/1/rgb.mp4").unlink()
    (tree / "annotations/train/2.json").write_text("{}")
    archive = bridge_archive(tmp_path / "b.tar.gz", tree)
    out = tmp_path / "bridge"
    assert run("--source", archive, "--out", out) == 1
    assert "annotations/train/1.json: its video" in caplog.text and "2.json: it has no 'state'" in caplog.text
    assert not (out / "dataset.json").exists()
    for path in (out / "annotations/train/1.json", out / "annotations/train/2.json"):
        path.unlink()
    archive.unlink()  # it is not needed any more
    assert run("--source", archive, "--out", out) == 0


def test_looking_through_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither annotation/ nor annotations/"):
        bridge.look_through(tmp_path)
    (tmp_path / "annotation").mkdir()
    with pytest.raises(DataError, match="has no folder of a split"):
        bridge.look_through(tmp_path)


CONTENT = random.Random(0).randbytes(3_000)


def test_a_broken_connection_goes_on_where_it_was(tmp_path: Path) -> None:
    with serve(Served(CONTENT, most=1000)) as served:
        path = fetch(look_up(served.url), tmp_path / "file", wait=0)
    assert path.read_bytes() == CONTENT and served.starts == [0, 1000, 2000]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_later_call_goes_on_unless_the_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "TRIES", 1)
    for changes in (False, True):
        target = tmp_path / str(changes) / "file"
        with serve(Served(CONTENT, most=1000)) as served:
            remote = look_up(served.url)
            served.most = 0  # nothing arrives after the first piece
            target.parent.mkdir()
            target.with_name("file.part").write_bytes(CONTENT[:1000])
            with pytest.raises(DataError, match="stops at 0 of 3000 bytes"):
                fetch(remote, target, wait=0)  # the piece was of nobody knows what, and went
            target.with_name("file.part").write_bytes(CONTENT[:1000])
            served.most, served.starts = None, []
            if changes:
                served.content = CONTENT[::-1]
            fetch(look_up(served.url), target, wait=0)
            assert target.read_bytes() == served.content and served.starts == ([0] if changes else [1000])


def test_a_file_that_changes_meanwhile_is_fetched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Served(CONTENT, most=1000)) as served:

        def replace(seconds: float) -> None:
            served.content, served.most = CONTENT[::-1], None

        monkeypatch.setattr(bridge, "time", SimpleNamespace(sleep=replace))
        path = fetch(look_up(served.url), tmp_path / "file")
    assert path.read_bytes() == CONTENT[::-1]  # no half of each


def test_servers_without_ranges_or_length_do_too(tmp_path: Path) -> None:
    with serve(Served(CONTENT, has_ranges=False)) as served:
        remote = look_up(served.url)
        (tmp_path / "a.part").write_bytes(CONTENT[:1000])
        assert fetch(remote, tmp_path / "a", wait=0).read_bytes() == CONTENT
    with serve(Served(CONTENT, has_length=False)) as served:
        remote = look_up(served.url)
        assert remote.size is None and fetch(remote, tmp_path / "b", wait=0).read_bytes() == CONTENT


def test_a_file_or_server_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Served(CONTENT)) as served, pytest.raises(DataError, match=r"nothing_here cannot be reached.*404"):
        look_up(served.url.rpartition("/")[0] + "/nothing_here")
    with pytest.raises(DataError, match="cannot be reached"):
        look_up(served.url)  # the server has gone
    with pytest.raises(DataError, match="cannot be reached"):
        look_up("no address")
