# SPDX-License-Identifier: Apache-2.0
"""Files and objects: atomic writes, clear errors, retries, credentials."""

import errno
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from imaginaire import storage
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS, CheckpointSet
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.storage import object_store

MB = 2**20


# Local ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Events that reach the disk from now on, in order: ("sync", path) and ("rename", target); both still happen."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_replace(source: Any, target: Any) -> None:
        seen.append(("rename", f"{os.fspath(source)} {os.fspath(target)}"))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return seen


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, disk: list[tuple[str, str]]) -> None:
    path = tmp_path / "a.txt"
    storage.write_bytes(path, b"hello")
    (what, temporary), *rest = disk
    assert what == "sync" and Path(temporary).parent == tmp_path and temporary != str(path)
    assert rest == [("rename", f"{temporary} {path}"), ("sync", str(tmp_path))]


@pytest.mark.parametrize("is_dcp", [False, True], ids=["standard", "dcp"])
def test_a_checkpoint_is_on_the_disk_before_its_pointer(is_dcp: bool, tmp_path: Path, disk: list[Any]) -> None:
    saved = CheckpointSet(str(tmp_path), checkpoint_layout.set_name(5, dcp=is_dcp))
    trees: dict[str, Any] = {kind: {"weight": torch.ones(3), "iteration": 5} for kind in KINDS}
    (checkpoint_layout.write_dcp if is_dcp else checkpoint_layout.write_standard)(saved, trees)
    written = {str(path) for path in tmp_path.rglob("*")}
    on_disk: set[str] = set()
    for what, place in disk:
        source, _, target = place.partition(" ")
        if what == "sync":
            on_disk.add(place)
        elif source in on_disk:
            on_disk.add(target)
    assert len(written) >= 8 and written <= on_disk  # files, and the folders that hold their names
    disk.clear()
    checkpoint_layout.write_pointer(saved)
    assert saved.faults() == [] and disk[-1] == ("sync", str(tmp_path))


def test_local_round_trip(tmp_path: Path) -> None:
    path = storage.join(tmp_path, "a", "b.txt")
    storage.write_bytes(path, b"hello")
    assert storage.exists(path) and storage.size(path) == 5 and storage.read_text(path) == "hello"
    with storage.open(path) as file:
        assert file.read() == b"hello"
    with storage.open(f"file://{path}", "r") as file:
        assert file.read() == "hello"
    assert storage.listdir(tmp_path / "a") == ["b.txt"]
    assert storage.local_copy(path) == Path(path)
    assert storage.listdir(tmp_path / "absent") == [] and not storage.exists(tmp_path / "absent")
    assert (storage.free_bytes(tmp_path / "x" / "y") or 0) > 0
    storage.require_space(tmp_path / "x" / "y", 10, "nothing")
    with pytest.raises(DataError, match=str(tmp_path)):
        storage.require_space(tmp_path, 2**70, "everything")


def test_failed_local_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fails(file: BinaryIO) -> None:
        file.write(b"new, half of it")
        raise FileNotFoundError("raised by the caller's own code")

    with pytest.raises(FileNotFoundError, match="own code"):
        storage.write_atomically(path, fails)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def _killed_in_mid_write(path: str) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        file.flush()
        os._exit(9)

    storage.write_atomically(path, write)


def test_a_killed_writer_leaves_the_old_file_and_a_temporary_that_is_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    child = multiprocessing.get_context("fork").Process(target=_killed_in_mid_write, args=(str(path),))
    child.start()
    child.join()
    assert path.read_bytes() == b"old"
    (temporary,) = [name for name in os.listdir(tmp_path) if name != "f"]
    assert temporary == f".f.tmp-{child.pid}"
    (tmp_path / f".g.tmp-{os.getpid()}").write_bytes(b"ours, still being written")
    (tmp_path / ".hidden").write_bytes(b"not ours")
    (tmp_path / f".h.tmp-{os.getppid()}").write_bytes(b"of another process that is at work")
    (tmp_path / f".i.tmp-{os.getpid()}").write_bytes(b"of a killed process, whose number another one got later")
    os.utime(tmp_path / f".i.tmp-{os.getpid()}", times=(1.0, 1.0))
    storage.remove_stale_temporaries(tmp_path)
    kept = [f".g.tmp-{os.getpid()}", f".h.tmp-{os.getppid()}", ".hidden", "f"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_remove_takes_files_folders_and_absent_paths(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"x")
    (tmp_path / "keep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "keep")
    for name in ("d", "link", "absent"):
        storage.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["keep"]


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda d: storage.read_text(d / "absent"), "absent"),
        (lambda d: storage.size(d / "absent"), "absent"),
        (lambda d: storage.open(d), "folder; a file"),
        (lambda d: storage.write_bytes(d / "file" / "below" / "f", b"x"), "file/below"),
        (lambda d: storage.makedirs("/proc/no/such/place"), "/proc/no/such/place.*IMAGINAIRE_OUTPUT_ROOT"),
    ],
)
def test_local_mistakes_are_one_clear_error(tmp_path: Path, mistake: Any, named: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=named):
        mistake(tmp_path)


def test_full_disk_names_path_and_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def __init__(self, file: BinaryIO) -> None:
            self.file, self.left = file, 1000

        def write(self, data: bytes) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    original = storage.create
    monkeypatch.setattr(storage, "create", lambda path: FullDisk(original(path)))
    monkeypatch.setattr(storage, "free_bytes", lambda path: 0)
    expected = r"big was not written: the disk or quota is full \(0 bytes free\)\. Free space, .*checkpoint\.keep_last"
    with pytest.raises(CheckpointError, match=expected):
        storage.write_atomically(tmp_path / "big", lambda file: torch.save(torch.zeros(5000), file))
    assert os.listdir(tmp_path) == []


# Object store ---------------------------------------------------------------------------------------------------------


def test_s3_round_trip(s3_bucket: str) -> None:
    path = storage.join(s3_bucket, "run", "model", "a.txt")
    assert not storage.exists(path) and storage.listdir(storage.join(s3_bucket, "run")) == []
    storage.makedirs(storage.join(s3_bucket, "run"))
    storage.write_bytes(path, b"hello")
    assert storage.exists(path) and storage.size(path) == 5 and storage.read_text(path) == "hello"
    assert storage.listdir(storage.join(s3_bucket, "run")) == ["model"]
    assert storage.is_folder(storage.join(s3_bucket, "run")) and not storage.is_folder(path)
    storage.write_bytes(path, b"changed")
    assert storage.read_text(path) == "changed"  # nothing is cached
    with storage.open(path) as file:
        assert file.read(3) == b"cha"
    assert storage.free_bytes(path) is None
    storage.write_bytes(storage.join(s3_bucket, "run", "empty"), b"")
    assert storage.size(storage.join(s3_bucket, "run", "empty")) == 0


def test_s3_remove_takes_the_folder_and_not_its_namesakes(s3_bucket: str) -> None:
    for name in ("iter_1/a", "iter_1/b/c", "iter_10/a"):
        storage.write_bytes(storage.join(s3_bucket, name), b"x")
    storage.remove(storage.join(s3_bucket, "iter_1"))
    storage.remove(storage.join(s3_bucket, "absent"))
    assert storage.listdir(s3_bucket) == ["iter_10"]
    storage.remove(storage.join(s3_bucket, "iter_10", "a"))
    assert storage.listdir(s3_bucket) == []


@pytest.mark.parametrize("megabytes", [1, 12], ids=["one put", "several parts"])
def test_s3_write_appears_only_when_complete(
    s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    import boto3

    monkeypatch.setattr(storage, "UPLOAD_PART_BYTES", 5 * MB)
    path = storage.join(s3_bucket, "w.bin")
    seen = []

    def write(file: BinaryIO, *, fail: bool) -> None:
        for _ in range(megabytes):
            file.write(bytes(MB))
        seen.append(storage.exists(path))
        if fail:
            raise RuntimeError("stopped half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        storage.write_atomically(path, lambda file: write(file, fail=True))
    assert not storage.exists(path)
    client = boto3.client("s3", endpoint_url=s3_server)
    assert not client.list_multipart_uploads(Bucket=s3_bucket.removeprefix("s3://")).get("Uploads")
    storage.write_atomically(path, lambda file: write(file, fail=False))
    assert seen == [False, False] and storage.size(path) == megabytes * MB


def test_unfinished_uploads_of_a_killed_process_are_aborted(s3_bucket: str, s3_server: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=s3_server)
    bucket = s3_bucket.removeprefix("s3://")
    for key in ("run/model/a.pt", "run/optim/a.pt", "other/a.pt"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    storage.remove_stale_temporaries(storage.join(s3_bucket, "run", "model"))
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == ["other/a.pt", "run/optim/a.pt"]


def test_s3_takes_torch_save_and_gives_a_local_copy_once(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage.tempfile, "tempdir", str(tmp_path))
    path = storage.join(s3_bucket, "w.pt")
    weights = {"w": torch.randn(100, 100)}
    storage.write_atomically(path, lambda file: torch.save(weights, file))
    with caplog.at_level(logging.INFO, logger="imaginaire.storage"):
        copies = {storage.local_copy(path) for _ in range(3)}
        threads = [threading.Thread(target=storage.local_copy, args=(path,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (copy,) = copies
    assert copy.name == "w.pt" and copy.is_relative_to(tmp_path)
    assert torch.equal(torch.load(copy, mmap=True, weights_only=True)["w"], weights["w"])
    assert sum("fetched" in record.message for record in caplog.records) == 1

    storage.write_atomically(path, lambda file: torch.save({"w": torch.zeros(3)}, file))
    assert torch.equal(torch.load(storage.local_copy(path), weights_only=True)["w"], torch.zeros(3))
    with pytest.raises(CheckpointError, match="absent does not exist"):
        storage.local_copy(storage.join(s3_bucket, "absent"))


def test_other_fsspec_addresses_work() -> None:
    storage.write_bytes("memory://folder/a", b"abc")
    assert storage.read_text("memory://folder/a") == "abc" and storage.listdir("memory://folder") == ["a"]
    storage.remove("memory://folder")
    assert not storage.exists("memory://folder/a")
    with pytest.raises(ConfigError, match="nonsense://x"):
        storage.exists("nonsense://x")


# Credentials ----------------------------------------------------------------------------------------------------------


def project_variables(server: str) -> dict[str, str]:
    return {
        "PROD_S3_CHECKPOINT_ACCESS_KEY_ID": "project-key",
        "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": "project-secret",
        "PROD_S3_CHECKPOINT_ENDPOINT_URL": server,
        "PROD_S3_CHECKPOINT_REGION_NAME": "eu-west-1",
    }


def test_project_variables_reach_the_store(s3_bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    for name, value in project_variables(s3_server).items():
        monkeypatch.setenv(name, value)
    options = object_store.filesystem_options(s3_bucket)
    assert (options["key"], options["secret"], options["endpoint_url"]) == ("project-key", "project-secret", s3_server)
    assert options["client_kwargs"] == {"region_name": "eu-west-1"}
    storage.write_bytes(storage.join(s3_bucket, "f"), b"x")
    assert storage.read_text(storage.join(s3_bucket, "f")) == "x"


def test_standard_pair_wins_and_does_not_mix_with_the_project_endpoint(
    no_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("PROD_S3_CHECKPOINT_ENDPOINT_URL", "http://project")
    assert object_store.filesystem_options("s3://b")["endpoint_url"] == "http://project"  # the project has no pair
    for name, value in project_variables("http://project").items():
        monkeypatch.setenv(name, value)
    options = object_store.filesystem_options("s3://b")
    assert options["key"] == "k" and options["endpoint_url"] is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": "very-secret"}, "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "AWS_ACCESS_KEY_ID"),
    ],
    ids=["half a pair", "none"],
)
def test_missing_credentials_are_named(
    no_credentials: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"\b{named}\b") as caught:
        storage.exists("s3://b/k")
    assert "very-secret" not in str(caught.value)


def test_missing_bucket_is_named_at_once(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=waits.append))
    for attempt in (
        lambda: storage.write_bytes("s3://no-such-bucket-here/k", b"x"),
        lambda: storage.listdir("s3://no-such-bucket-here/folder"),
    ):
        with pytest.raises(CheckpointError, match=r"no-such-bucket-here.*bucket does not exist") as caught:
            attempt()
        assert "AWS_ACCESS_KEY_ID (set)" in str(caught.value) and "test-secret" not in str(caught.value)
    assert waits == []  # there is nothing to try again for
    with pytest.raises(CheckpointError, match="absent does not exist"):
        storage.read_text(storage.join(s3_bucket, "absent"))


def test_missing_s3fs_names_the_extra(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'s3fs' is not installed.*\.\[s3\]"):
        storage.exists("s3://b/k")


# Failures that may pass -----------------------------------------------------------------------------------------------


class FlakyServer:
    """An S3 server with the session server's content that answers the first ``failures`` requests with ``answer``."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.failures, self.answer, self.failed = 0, "503 Service Unavailable", 0
        self.application = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self.respond, threaded=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def respond(self, environ: dict[str, Any], start_response: Any) -> Any:
        if self.failed >= self.failures:
            return self.application(environ, start_response)
        self.failed += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(self.answer, [("Content-Length", "0")])
        return []


@pytest.fixture
def flaky(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyServer]:
    server = FlakyServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.01)
    yield server
    server.server.shutdown()
    server.server.server_close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "imaginaire.storage.object_store"]


@pytest.fixture
def one_request_per_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off botocore's own tries, so that the number of requests is ours."""
    original = object_store.filesystem_options

    def options(path: object_store.StrPath) -> dict[str, Any]:
        return original(path) | {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}

    monkeypatch.setattr(object_store, "filesystem_options", options)


def test_write_survives_a_server_that_is_busy_twice(
    s3_bucket: str, flaky: FlakyServer, one_request_per_try: None, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.failures = 2
    path = storage.join(s3_bucket, "f")
    storage.write_bytes(path, b"content")
    assert storage.read_text(path) == "content"
    messages = warnings_of(caplog)
    assert len(messages) == 2 and all(path in message for message in messages)


@pytest.mark.parametrize(
    ("answer", "tries", "named"),
    [("503 Service Unavailable", 3, "3 times"), ("403 Forbidden", 1, "PROD_S3_CHECKPOINT_ACCESS_KEY_ID")],
)
def test_a_server_that_stays_busy_is_tried_three_times_and_a_refusal_once(
    s3_bucket: str,
    flaky: FlakyServer,
    one_request_per_try: None,
    caplog: pytest.LogCaptureFixture,
    answer: str,
    tries: int,
    named: str,
) -> None:
    flaky.failures, flaky.answer = 1000, answer
    with pytest.raises(CheckpointError, match=named):
        storage.write_bytes(storage.join(s3_bucket, "f"), b"content")
    assert flaky.failed == tries and len(warnings_of(caplog)) == tries - 1
