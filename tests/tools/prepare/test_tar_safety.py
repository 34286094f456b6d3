# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.tools.prepare.tar_safety: a whole and harmless archive, or nothing."""

import os
import re
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from cosmos_predict2.tools.prepare.tar_safety import extract_checked, member_files
from imaginaire.errors import DataError
from tests.data.sources_agibot import archive

FILES = {"a/one.txt": b"1" * 3000, "a/b/two.txt": b"22", "three.txt": b""}


def _archive(path: Path, files: dict[str, bytes], *more: tarfile.TarInfo) -> Path:
    mode = {".gz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2"}.get(path.suffix, "w")
    path.write_bytes(archive(files, *more, mode=mode))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.bz2", ".tar.xz"])
def test_an_archive_is_unpacked_whole(suffix: str, tmp_path: Path) -> None:
    archive = _archive(tmp_path / f"x{suffix}", FILES)
    target = tmp_path / "deep" / "target"
    assert {str(path) for path in extract_checked(archive, target)} == set(FILES)
    assert _tree(target) == FILES
    assert (target / "a/one.txt").stat().st_mode & 0o6000 == 0
    assert {str(path) for path in member_files(archive)} == set(FILES)


def test_what_lies_there_is_replaced_by_name_and_the_rest_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "a").mkdir(parents=True)
    (target / "a/one.txt").write_bytes(b"old")
    (target / "a/mine.txt").write_bytes(b"mine")
    (target / ".x.tar.unpacking" / "a").mkdir(parents=True)  # of a process that was killed
    (target / ".x.tar.unpacking" / "a/half.txt").write_bytes(b"half")
    extract_checked(_archive(tmp_path / "x.tar", FILES), target)
    assert _tree(target) == {**FILES, "a/mine.txt": b"mine"}


def test_files_can_be_left_out(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "x.tar", FILES, _member("./empty", tarfile.DIRTYPE))
    assert extract_checked(archive, tmp_path / "t", keep=lambda path: path.name == "two.txt") == [
        PurePosixPath("a/b/two.txt")
    ]
    assert _tree(tmp_path / "t") == {"a/b/two.txt": b"22"}


@pytest.mark.parametrize(
    "member",
    [
        _member("../out.txt"),
        _member("a/../../out.txt"),
        _member("/tmp/out.txt"),
        _member("link", tarfile.SYMTYPE, "/etc"),
        _member("link", tarfile.LNKTYPE, "a/one.txt"),
        _member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_a_bad_member_is_named_and_nothing_is_written(member: tarfile.TarInfo, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    archive = _archive(folder / "x.tar", FILES, member)
    (folder / "target/a").mkdir(parents=True)
    (folder / "target/a/one.txt").write_bytes(b"old")
    for use in (lambda: extract_checked(archive, folder / "target"), lambda: member_files(archive)):
        with pytest.raises(DataError, match=re.escape(f"'{member.name}' is refused")):
            use()
    assert _tree(folder / "target") == {"a/one.txt": b"old"} and os.listdir(tmp_path) == ["inner"]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_cut_or_damaged_archive_is_an_error_wherever_it_is_cut(suffix: str, tmp_path: Path) -> None:
    whole = _archive(tmp_path / f"x{suffix}", {f"{i}.bin": os.urandom(700) for i in range(4)}).read_bytes()
    cuts = [0, 100, 512, 1000, 1536, 2000, 3072] if suffix == ".tar" else [0, 5, len(whole) // 2, len(whole) - 1]
    for i, cut in enumerate(cuts):
        archive = tmp_path / f"cut{i}{suffix}"
        archive.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"cut{i}"):
            extract_checked(archive, tmp_path / "target")
    assert not _tree(tmp_path / "target")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").write_bytes(b"file")
    with pytest.raises(DataError, match=r"x\.tar cannot be unpacked"):
        extract_checked(_archive(tmp_path / "x.tar", FILES), tmp_path / "t")
    with pytest.raises(DataError, match="does not exist"):
        extract_checked(tmp_path / "absent.tar", tmp_path / "t")


def test_a_python_without_the_filter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(DataError, match=r"x\.tar is not unpacked: Python 3\.10\.12, 3\.11\.4 or newer"):
        extract_checked(_archive(tmp_path / "x.tar", FILES), tmp_path / "target")
    assert not list((tmp_path / "target").rglob("*"))
