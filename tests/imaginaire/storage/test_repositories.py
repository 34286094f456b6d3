# SPDX-License-Identifier: Apache-2.0
"""Repositories, from a hub on this machine."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from imaginaire.errors import ConfigError, DataError
from imaginaire.storage import repositories
from imaginaire.storage.hub import explained
from imaginaire.storage.repositories import fetch_absent, list_files
from tests.checkpoints.hub_server import Hub
from tests.tools.prepare.conftest import hub as empty_hub  # noqa: F401  (a fixture)
from tests.tools.prepare.conftest import names

NAME = "robots/arm"
FILES = {"videos/a.mp4": b"a" * 1000, "videos/b.mp4": b"b" * 2000, "videos/deep/c.mp4": b"c", "README.md": b"read"}


@pytest.fixture
def hub(empty_hub: Hub) -> Hub:  # noqa: F811
    empty_hub.repositories[NAME] = dict(FILES)
    return empty_hub


def download(target: Path, *patterns: str, dry_run: bool = False, licence: str = "") -> set[str]:
    """The names of the files that were fetched."""
    return set(fetch_absent(list_files(NAME, patterns=patterns, licence=licence), target, dry_run=dry_run))


def test_matching_files_arrive_once(hub: Hub, tmp_path: Path) -> None:
    videos = {name for name in FILES if name.startswith("videos/")}
    assert download(tmp_path / "t", "videos/*.mp4") == names(tmp_path / "t") == videos
    assert all((tmp_path / "t" / name).read_bytes() == FILES[name] for name in videos)
    assert list_files(NAME, patterns=["*"]).revision == hub.commit(NAME)
    hub.asked.clear()
    assert download(tmp_path / "t", "videos/*.mp4") == set() and not hub.asked


def test_a_file_that_is_missing_or_short_is_fetched_again_and_no_other(hub: Hub, tmp_path: Path) -> None:
    download(tmp_path, "videos/*")
    (tmp_path / "videos/a.mp4").write_bytes(b"a" * 10)
    (tmp_path / "videos/b.mp4").unlink()
    hub.asked.clear()
    assert download(tmp_path, "videos/*") == {"videos/a.mp4", "videos/b.mp4"}
    assert {name.rpartition("/")[2] for name in hub.asked} == {"a.mp4", "b.mp4"}
    assert (tmp_path / "videos/a.mp4").read_bytes() == FILES["videos/a.mp4"]


def test_a_dry_run_lists_and_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    assert download(tmp_path / "t", "*.md", "videos/a.mp4", dry_run=True) == {"README.md", "videos/a.mp4"}
    assert list_files(NAME, patterns=["videos/a.mp4"]).sizes == {"videos/a.mp4": 1000}
    assert not (tmp_path / "t").exists() and not hub.asked


@pytest.mark.slow  # the client tries five times
def test_a_broken_connection_is_an_error_and_the_next_call_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.cut.add("videos/b.mp4")
    with pytest.raises(DataError, match=NAME):
        download(tmp_path, "videos/*")
    assert "videos/a.mp4" in names(tmp_path) and "videos/b.mp4" not in names(tmp_path)
    hub.cut.clear()
    assert download(tmp_path, "videos/*") == {"videos/b.mp4"}
    assert (tmp_path / "videos/b.mp4").read_bytes() == FILES["videos/b.mp4"]


def test_what_killed_calls_left_half_written_goes(hub: Hub, tmp_path: Path) -> None:
    left = tmp_path / ".cache/huggingface/download/x.1234.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 60, time.time() - 60))
    download(tmp_path, "README.md")
    assert not left.exists()


def test_a_gated_repository_names_its_licence_its_page_and_the_login(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    with pytest.raises(
        DataError, match=r"accept the Arm Licence on https://huggingface\.co/datasets/robots/arm"
    ) as caught:
        download(tmp_path, "videos/*", licence="Arm Licence")
    assert "hf auth login" in str(caught.value) and "(3 of 3 files failed)" in str(caught.value)


def test_a_stranger_is_told_that_the_name_may_be_wrong_too() -> None:
    class Refused(Exception):
        response = SimpleNamespace(status_code=401)

    said = explained(Refused("401."), NAME, revision=None, licence="Arm Licence", kind="datasets")
    assert "not on the hub under that name, or it is private or gated" in said
    assert "accept the Arm Licence on https://huggingface.co/datasets/robots/arm" in said and "hf auth login" in said
    assert explained(OSError("Broken."), NAME, revision=None, licence="").endswith("OSError: Broken.")


@pytest.mark.parametrize(
    ("repository", "pattern", "named"),
    [
        ("robots/leg", "*", "robots/leg"),
        (NAME, "videos/*.tar", r"videos/\*\.tar"),
        (NAME, "observations/327/*.tar", "robots/arm"),
        ("robots/bad", "*out", r"\.\./out"),
    ],
)
def test_an_unknown_repository_pattern_or_a_bad_name_is_an_error(
    repository: str, pattern: str, named: str, hub: Hub
) -> None:
    hub.repositories["robots/bad"] = {"../../out": b"x"}
    with pytest.raises(DataError, match=named):
        list_files(repository, patterns=[pattern])


def test_no_network_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="Is there a network"):
        download(tmp_path, "*")


def test_a_full_disk_shows_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 10**6)
    with pytest.raises(DataError, match="Make room"):
        download(tmp_path, "videos/*")
    assert not hub.asked and repositories.RESERVE > 10**6


def test_without_the_client_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[weights\]'"):
        download(tmp_path, "*")
