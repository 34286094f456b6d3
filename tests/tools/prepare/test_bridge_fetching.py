# SPDX-License-Identifier: Apache-2.0
"""The archive of Bridge is fetched in pieces."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_predict2.tools.prepare import bridge
from cosmos_predict2.tools.prepare.bridge import fetch, look_up
from imaginaire.errors import DataError
from tests.tools.prepare.file_server import Served, serve

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
