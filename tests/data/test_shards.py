# SPDX-License-Identifier: Apache-2.0
"""Clips in tar shards: which samples there are, that they are those of the folder, and every fault by name."""

import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.shards import dataset_shards
from cosmos_predict2.data.shards.dataset_shards import ShardedVideos, expand_braces, list_shards, read_members
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError
from tests.data.sources_agibot import archive
from tests.data.video_files import same, video_folder
from tests.findings import problems

STEMS = ["a", "b", "c", "d", "e"]
SIZE = (16, 32)
CREDENTIALS = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION_NAME": "us-east-1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_folder(tmp_path_factory.mktemp("folder"), dict.fromkeys(STEMS, 20))


def write_shard(path: Path, members: Iterable[tuple[str, bytes]], form: Any = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive(dict(members), form=form))
    return path


def members_of(folder: Path, stems: Iterable[str]) -> list[tuple[str, bytes]]:
    found = []
    for stem in stems:
        for name in (f"videos/{stem}.mp4", f"t5_xxl/{stem}.pickle", f"metas/{stem}.txt"):
            found.append((f"part/{Path(name).name}", (folder / name).read_bytes()))
    return found


@pytest.fixture
def sharded(folder: Path, tmp_path: Path) -> Path:
    """The clips of the folder in two shards."""
    write_shard(tmp_path / "set/0.tar", members_of(folder, STEMS[:3]))
    write_shard(tmp_path / "set/1.tar", members_of(folder, STEMS[3:]), tarfile.PAX_FORMAT)
    return tmp_path / "set"


def _dataset(place: Any, tmp_path: Path, **options: Any) -> ShardedVideos:
    return ShardedVideos([f"{place}/{{0..1}}.tar"], 13, SIZE, index_dir=str(tmp_path / "index"), **options)


def _same(found: Any, wanted: Any) -> None:
    for i in range(len(wanted)):
        numpy.random.seed(i)
        own = found[i]
        numpy.random.seed(i)
        other = wanted[i]
        assert same({**own, "video_name": other["video_name"]}, other)


def test_samples_are_those_of_the_folder(folder: Path, sharded: Path, tmp_path: Path) -> None:
    few = {"num_frames": 7, "text_encoder": "none", "fps": 10.0, "crop": "center", "sampling": "center"}
    for options in ({}, few):
        arguments: dict[str, Any] = {"num_frames": 13, "video_size": SIZE} | options
        found = ShardedVideos([str(sharded / "*.tar")], **arguments, index_dir=str(tmp_path / "index"))
        _same(found, Dataset(str(folder), **arguments))
        assert found[3]["video_name"]["video_path"] == f"{sharded}/1.tar: part/d.mp4"


def test_an_object_store_gives_the_same_with_the_variables_of_the_guide(
    sharded: Path, tmp_path: Path, s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3_server)
    for path in sharded.iterdir():
        client.upload_file(str(path), s3_bucket.removeprefix("s3://"), f"set/{path.name}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    for name, value in {**CREDENTIALS, "ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)
    remote = _dataset(f"{s3_bucket}/set", tmp_path)
    _same(remote, _dataset(sharded, tmp_path))
    assert list_shards(f"{s3_bucket}/set/*.tar") == [f"{s3_bucket}/set/0.tar", f"{s3_bucket}/set/1.tar"]
    written = "".join(path.read_text() for path in (tmp_path / "index").glob("*.json"))
    assert len(list((tmp_path / "index").glob("*.json"))) == 4 and "secret" not in written
    assert storage.exists(f"{s3_bucket}/set/1.tar")


def test_shards_are_indexed_once_and_again_when_they_change(
    folder: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(dataset_shards, "read_members", lambda shard: (read.append(shard), read_members(shard))[1])
    assert len(_dataset(sharded, tmp_path)) == len(_dataset(sharded, tmp_path)) == 5
    assert sorted(read) == [f"{sharded}/0.tar", f"{sharded}/1.tar"]
    write_shard(sharded / "1.tar", members_of(folder, ["e"]))
    assert len(_dataset(sharded, tmp_path)) == 4 and read[2:] == [f"{sharded}/1.tar"]
    for path in (tmp_path / "index").glob("*.json"):
        path.write_text("{")
    assert len(_dataset(sharded, tmp_path)) == 4


def _cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def _damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + 8] = b"\xff" * 8
    path.write_bytes(content)


def test_broken_shards_are_named_with_their_last_good_member(sharded: Path, tmp_path: Path) -> None:
    place = sharded / "0.tar"
    whole, members = place.read_bytes(), read_members(str(place))
    middle = members["part/b"][".mp4"][0]
    for damage, member in (
        (lambda: _cut(place, middle + 100), "part/b.mp4"),
        (lambda: _cut(place, middle - dataset_shards.BLOCK), "part/a.txt"),  # between two members
        (lambda: _damage(place, middle - dataset_shards.BLOCK + 148), "part/a.txt"),  # the checksum of a header
        (lambda: place.write_bytes(b"no tar at all" * 100), "its beginning"),
        (lambda: place.write_bytes(b""), "its beginning"),
    ):
        place.write_bytes(whole)
        damage()
        with pytest.raises(DataError) as found:
            _dataset(sharded, tmp_path)
        assert str(place) in str(found.value) and member in str(found.value)


def test_a_broken_clip_and_a_shard_that_changes_meanwhile_are_named(sharded: Path, tmp_path: Path) -> None:
    place = sharded / "0.tar"
    start, length = read_members(str(place))["part/b"][".mp4"]
    content = bytearray(place.read_bytes())
    content[start : start + length] = bytes(length)
    place.write_bytes(content)
    dataset = _dataset(sharded, tmp_path)
    with pytest.raises(DataError, match=f"{place}: part/b.mp4 is not a video"):
        dataset[1]
    assert _dataset(sharded, tmp_path, skip_bad_samples=True)[1]["ai_caption"] == "what c shows"
    shutil.copy(sharded / "1.tar", place)
    with pytest.raises(DataError, match=f"{place}: part/c.mp4 is not where it was"):
        dataset[2]


def test_samples_without_text_are_an_error_or_excluded(folder: Path, sharded: Path, tmp_path: Path) -> None:
    write_shard(sharded / "1.tar", members_of(folder, ["d"])[:1] + members_of(folder, ["e"]))
    for options in ({}, {"text_encoder": "none"}):
        with pytest.raises(DataError, match=f"{sharded}/1.tar: part/d has no"):
            _dataset(sharded, tmp_path, **options)
        assert len(_dataset(sharded, tmp_path, skip_bad_samples=True, **options)) == 4


def test_captions_are_texts_or_json(folder: Path, tmp_path: Path) -> None:
    clip = (folder / "videos/a.mp4").read_bytes()
    captions = {"a.txt": b" one \n", "b.json": json.dumps({"caption": "two"}).encode(), "c.json": b"{}", "d.txt": b" "}
    members = [item for name, text in captions.items() for item in ((f"{name[0]}.mp4", clip), (name, text))]
    place = write_shard(tmp_path / "0.tar", members)
    dataset = ShardedVideos([str(place)], 13, SIZE, text_encoder="none", index_dir=str(tmp_path / "index"))
    assert [dataset[i]["ai_caption"] for i in range(2)] == ["one", "two"]
    for i, member in ((2, "c.json"), (3, "d.txt")):
        with pytest.raises(DataError, match=f"{place}: {member} is no caption"):
            dataset[i]


def test_lists_of_shards(tmp_path: Path) -> None:
    assert list(expand_braces("s3://b/{08..10}-{x,yy}.tar")) == [
        f"s3://b/{number}-{text}.tar" for number in ("08", "09", "10") for text in ("x", "yy")
    ]
    assert list_shards(["b.tar", "a.tar", "b.tar"]) == ["b.tar", "a.tar"]
    for wrong in ([], ["{9..1}.tar"], ["{0..99999999}.tar"]):
        with pytest.raises(ConfigError):
            list_shards(wrong)
    with pytest.raises(DataError, match="No shard fits"):
        list_shards([f"{tmp_path}/*.tar"])
    assert problems(ShardedVideos, shards=[f"{tmp_path}/0.tar"], crop="none") == [
        "node: There is no crop 'none'. Known: center, stretch.",
        f"node: {tmp_path}/0.tar does not exist",
    ]
