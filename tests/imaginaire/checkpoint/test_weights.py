# SPDX-License-Identifier: Apache-2.0
"""Reading weights from every kind of file and folder, and loading them with an account of every name."""

import io
import json
import math
import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from imaginaire import storage
from imaginaire.checkpoint import weight_files, weights
from imaginaire.checkpoint.checkpointer import StandardCheckpointer
from imaginaire.checkpoint.dcp import _ALLOWED, DcpTensors, SafeFileSystemReader, SafeLoadPlanner, dcp_writer
from imaginaire.config.schema import CheckpointConfig
from imaginaire.distributed import parallel
from imaginaire.errors import CheckpointError, ConfigError, TrainingError, UserError
from imaginaire.training.callbacks import CallbackGroup
from imaginaire.training.model import ImaginaireModel, PowerEMA
from tests.multiprocess import run_distributed


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def state(**extra: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "net.a.weight": torch.randn(4, 3, generator=generator),
        "net.a.bias": torch.randn(4, generator=generator).bfloat16(),
        **extra,
    }


def assert_same(found: Any, expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# Files ----------------------------------------------------------------------------------------------------------------


def test_torch_file_is_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"big": torch.zeros(4_000_000)}, path)
    before = _anonymous_kilobytes()
    source = weights.read(str(path))
    target = {"big": torch.ones(4_000_000, dtype=torch.bfloat16)}
    weights.load_into(target, source).require()
    assert not target["big"].any()
    assert _anonymous_kilobytes() - before < 12_000  # the target's 8 MB, and not the source's 16 MB


def _anonymous_kilobytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize("wrap", ["flat", "model", "state_dict", "module", "model.state_dict", "old format"])
def test_torch_files_of_every_form_read(tmp_path: Path, wrap: str) -> None:
    tree: Any = state()
    for key in reversed(wrap.split(".") if wrap not in ("flat", "old format") else []):
        tree = {key: tree, "optimizer": {"state": {}}, "iteration": 5}
    torch.save(tree, tmp_path / "m.pth", _use_new_zipfile_serialization=wrap != "old format")
    assert_same(weights.read(str(tmp_path / "m.pth")), state())


def test_released_file_with_extra_state_reads(tmp_path: Path) -> None:
    extra_state = io.BytesIO(b"transformer engine")
    torch.save(state(**{"net.a._extra_state": extra_state, "net.b._extra_state": None}), tmp_path / "m.pt")
    before = set(torch.serialization.get_safe_globals())
    assert_same(weights.read(str(tmp_path / "m.pt")), state())
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("new_format", [True, False])
def test_an_object_is_refused_by_name_and_not_run(tmp_path: Path, new_format: bool) -> None:
    path = tmp_path / "m.pt"
    torch.save(state(bad=Malicious(tmp_path / "ran")), path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match=r"m\.pt holds the object 'posix\.mkdir'.*torch\.save\(") as caught:
        weights.read(str(path))
    assert not (tmp_path / "ran").exists() and "weights_only=False" not in str(caught.value)


@pytest.mark.parametrize("is_allowed_by_others", [False, True])
def test_numpy_content_is_refused_by_name(tmp_path: Path, is_allowed_by_others: bool) -> None:
    from_numpy = [numpy.ones(2).__reduce__()[0], numpy.ndarray, numpy.dtype, type(numpy.dtype(float))]
    torch.save({"w": torch.ones(2), "x": numpy.ones(2)}, tmp_path / "m.pt")
    with torch.serialization.safe_globals(from_numpy if is_allowed_by_others else []):
        before = torch.serialization.get_safe_globals()
        with pytest.raises(CheckpointError, match=r"'numpy\.[\w.]*_reconstruct'"):
            weights.read(str(tmp_path / "m.pt"))
        assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_shard_of_plain_arrays_is_named(tmp_path: Path, is_alone: bool, protocol: int) -> None:
    array = numpy.ones((2, 3), dtype=numpy.float32)
    file = tmp_path / "pytorch_model-00001-of-00001.bin"
    file.write_bytes(pickle.dumps(array if is_alone else {"net.w": array}, protocol=protocol))
    named = r"pickled NumPy array \[2, 3\]" if is_alone else "pickled dict"
    with pytest.raises(CheckpointError, match=rf"00001\.bin (holds a NumPy array|is a {named}).*torch\.save\("):
        weights.read(str(tmp_path))


def test_content_decides_and_not_the_suffix(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "m.pt")
    torch.save(state(), tmp_path / "m.safetensors")
    assert_same(weights.read(str(tmp_path / "m.pt")), state())
    assert_same(weights.read(str(tmp_path / "m.safetensors")), state())


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut": (_cut, "is cut short"),
    "page": (lambda path: path.write_bytes(b"<!DOCTYPE html><html>Sign in</html>"), "is a web page"),
    "xml": (lambda path: path.write_bytes(b"<?xml version='1.0'?><Error>AccessDenied</Error>"), "error message"),
    "lfs": (
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
        "is a git-lfs pointer.*git lfs pull",
    ),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), "begins with zeros"),
    "text": (lambda path: path.write_bytes(b"hello, this is text"), r"neither a torch file nor safetensors \(19 bytes"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "damaged|not written by|pickle"),
    "other zip": (lambda path: path.write_bytes(_zip()), "was not written by torch.save"),
}


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "x" * 100)
    return buffer.getvalue()


@pytest.mark.parametrize("second_byte", [1, 2, 3, 4, 5])
def test_a_safetensors_file_whose_header_looks_like_a_pickle_is_read(tmp_path: Path, second_byte: int) -> None:
    """The first two bytes of the file are then those of torch's old format."""
    wanted, path = second_byte * 256 + 0x80, tmp_path / "m.safetensors"
    content = {"x": torch.arange(3.0)}
    save_file(content, path, metadata={"note": ""})
    save_file(content, path, metadata={"note": "x" * (wanted - int.from_bytes(path.read_bytes()[:8], "little"))})
    assert path.read_bytes()[:2] == bytes([0x80, second_byte])
    assert_same(weights.read(str(path)), content)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_is_not_weights_says_what_it_looks_like(tmp_path: Path, damage: str, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    if suffix == ".pt":
        torch.save(state(), path)
    else:
        save_file(state(), path)
    apply, message = DAMAGE[damage]
    apply(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        weights.read(str(path))
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400
    if suffix == ".pt":
        with pytest.raises(CheckpointError, match=message):
            weight_files.load_pt(path)


# Folders --------------------------------------------------------------------------------------------------------------


def _save_shards(folder: Path, *, index: bool) -> dict[str, Tensor]:
    tensors = {f"blocks.{i}.weight": torch.full((3, 2), float(i)) for i in range(3)}
    names = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (key, value) in zip(names, tensors.items()):
        save_file({key: value}, folder / name)
    if index:
        table = {"metadata": {}, "weight_map": dict(zip(tensors, names))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    return tensors


@pytest.mark.parametrize("index", [True, False])
def test_sharded_folder_reads_and_names_a_missing_shard(tmp_path: Path, index: bool) -> None:
    expected = _save_shards(tmp_path, index=index)
    (tmp_path / "config.json").write_text("{}")
    assert_same(weights.read(str(tmp_path)), expected)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing: model-00002-of-00003\.safetensors"):
        weights.read(str(tmp_path))


def test_folders_resolve_by_inspection(tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    save_file(state(), single / "diffusion_pytorch_model.safetensors")
    assert_same(weights.read(str(single)), state())

    pipeline = tmp_path / "pipeline"
    expected = _save_shards(pipeline / "transformer", index=True)
    (pipeline / "scheduler").mkdir()
    (pipeline / "model_index.json").write_text("{}")
    assert_same(weights.read(str(pipeline)), expected)


def test_a_training_run_gives_its_latest_weights(tmp_path: Path) -> None:
    model = tmp_path / "run" / "checkpoints" / "model"
    model.mkdir(parents=True)
    torch.save({"net.a": torch.zeros(2)}, model / "iter_000000500.pt")
    torch.save({"net.a": torch.ones(2)}, model / "iter_000001000.pt")
    pointer = tmp_path / "run" / "checkpoints" / "latest_checkpoint.txt"
    pointer.write_text("iter_000000500.pt\n")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert_same(weights.read(str(path)), {"net.a": torch.zeros(2)})


# DCP ------------------------------------------------------------------------------------------------------------------


def save_dcp(folder: Path, tree: dict[str, Any]) -> None:
    dcp.save(tree, checkpoint_id=str(folder), no_dist=True)


def test_dcp_folder_reads_with_entries_that_are_not_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "iter_000000005" / "model"
    tensors = state(scalar=torch.tensor(3), empty=torch.zeros(0, 3))
    save_dcp(folder, {**tensors, "iteration": 5, "notes": ["a", {"b": None}], "net.a._extra_state": io.BytesIO(b"x")})
    assert_same(DcpTensors(folder), tensors)
    for path in (folder, folder.parent):
        assert_same(weights.read(str(path)), tensors)
    (tmp_path / "latest_checkpoint.txt").write_text("iter_000000005")
    assert_same(weights.read(str(tmp_path)), tensors)


def test_dcp_tensor_is_read_when_asked_for(tmp_path: Path) -> None:
    save_dcp(tmp_path / "d", state())
    source = weights.read(str(tmp_path / "d"))
    (tmp_path / "d" / "__0_0.distcp").unlink()
    assert weights.account({"net.a.weight": torch.empty(4, 3)}, source).unexpected == ("net.a.bias",)
    with pytest.raises(CheckpointError, match="cannot be read"):
        source["net.a.weight"]


def test_malicious_dcp_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    save_dcp(tmp_path / "d", state())
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    for read in (DcpTensors, lambda path: SafeFileSystemReader(path).read_metadata()):
        with pytest.raises(CheckpointError, match=r"'posix\.mkdir', which is not read for safety"):
            read(tmp_path / "d")
    assert not (tmp_path / "ran").exists()


def test_malicious_dcp_entry_is_refused_and_not_run(tmp_path: Path) -> None:
    save_dcp(tmp_path / "d", {"w": torch.ones(2), "bad": Malicious(tmp_path / "ran")})
    assert_same(DcpTensors(tmp_path / "d"), {"w": torch.ones(2)})
    reader, planner = SafeFileSystemReader(tmp_path / "d"), SafeLoadPlanner()
    with pytest.raises(BaseException, match=r"entry 'bad' is no tensor"):
        dcp.load({"w": torch.empty(2), "bad": None}, storage_reader=reader, planner=planner, no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pathlib.PosixPath", *sorted(_ALLOWED - {"pathlib.PosixPath"})])
def test_dcp_metadata_changes_no_class_or_function(tmp_path: Path, name: str) -> None:
    """BUILD with the state (None, {...}) sets attributes; so a path was made that is never outside of its folder."""
    secret, folder = {"w": torch.ones(3)}, tmp_path / "d"
    save_dcp(tmp_path / "secret", secret)
    save_dcp(folder, {"w": torch.zeros(3)})
    genuine = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(genuine)
    for info in metadata.storage_data.values():
        info.relative_path = f"../secret/{info.relative_path}"
    module, _, attribute = name.rpartition(".")
    blind = b"cbuiltins\ndict\n"  # is_absolute() is then {}, and parts is empty
    change = b"N}X\x05\x00\x00\x00parts)sX\x0b\x00\x00\x00is_absolute" + blind + b"s\x86b0"
    outside = pickle.dumps(metadata, protocol=2)
    crafted = outside[:2] + f"c{module}\n{attribute}\n".encode() + change + outside[2:]
    for content, message in ((crafted, rf"a change of {name}"), (outside, "points outside its folder")):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            DcpTensors(folder)["w"]
    (folder / ".metadata").write_bytes(genuine)
    assert_same(DcpTensors(folder), {"w": torch.zeros(3)})
    save_dcp(tmp_path / "later", secret)
    assert_same(DcpTensors(tmp_path / "later"), secret)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.state_dict_metadata["net.a.weight"], "size", torch.Size([2**40, 3])), "do not make up"),
        (
            lambda m: m.state_dict_metadata["net.a.weight"].chunks[0].__dict__.update(offsets=torch.Size([1, 0])),
            "outside",
        ),
        (lambda m: setattr(m.state_dict_metadata["net.a.weight"], "size", (-1, 3)), "a size of"),
        (lambda m: _grow(m, 2**40), "of which .* are stored"),
        (lambda m: [setattr(info, "length", "1") for info in m.storage_data.values()], "in place of int"),
        (lambda m: [setattr(info, "offset", -1) for info in m.storage_data.values()], "bytes at -1"),
        (lambda m: m.__dict__.pop("storage_data"), "without storage_data"),
        (lambda m: setattr(m, "state_dict_metadata", {("net", "a"): 1}), "a tuple as a key"),
        (lambda m: setattr(m, "state_dict_metadata", {1: 2}), "is damaged"),
    ],
)
def test_dcp_metadata_that_cannot_be_is_damage(tmp_path: Path, change: Any, message: str) -> None:
    save_dcp(tmp_path / "d", state())
    path = tmp_path / "d" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        DcpTensors(tmp_path / "d")["net.a.weight"]


def _grow(metadata: Any, rows: int) -> None:
    """A few bytes of file that say terabytes."""
    entry = metadata.state_dict_metadata["net.a.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([rows, 3])


FORMS: dict[str, Callable[[Path], Path]] = {  # the file of a set of weights that is written into an empty folder
    "pt": lambda d: (torch.save(state(), d / "a.pt"), d / "a.pt")[1],
    "old pt": lambda d: (torch.save(state(), d / "a.pt", _use_new_zipfile_serialization=False), d / "a.pt")[1],
    "safetensors": lambda d: (save_file(state(), d / "a.safetensors"), d / "a.safetensors")[1],
    "dcp metadata": lambda d: (save_dcp(d, state()), d / ".metadata")[1],
    "dcp": lambda d: (save_dcp(d, state()), d / "__0_0.distcp")[1],
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_or_missing_byte_is_damage_or_read_and_no_other_error(tmp_path: Path, form: str) -> None:
    file = FORMS[form](tmp_path)
    intact = file.read_bytes()
    draw = random.Random(form)
    directory = intact.find(b"PK\1\2")  # of a zip: its fields are what readers trust
    places = [*draw.sample(range(len(intact)), 50), *(range(directory, directory + 40) if directory > 0 else ())]
    for place in [*places, *range(len(intact) - 22, len(intact))]:
        flipped = intact[:place] + bytes([intact[place] ^ 1 << draw.randrange(8)]) + intact[place + 1 :]
        for content in (flipped, intact[:place]):
            file.write_bytes(content)
            try:
                dict(weights.read(str(tmp_path)))
            except CheckpointError as error:
                assert str(tmp_path) in str(error)


def _index(folder: Path, places: dict[str, str]) -> None:
    """Three shards, whose index has these places as well."""
    _save_shards(folder, index=True)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] |= places
    index.write_text(json.dumps(table))


def _saved(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state(), folder / name)


def _run(folder: Path, pointer: str) -> None:
    _saved(folder / "checkpoints" / "model", "iter_000000500.pt", "iter_000001000.pt")
    (folder / "checkpoints" / "latest_checkpoint.txt").write_text(pointer)


def _dcp(folder: Path, name: str, content: bytes | None = None) -> None:
    """A DCP folder with this content in one of its files, by default half of its own."""
    save_dcp(folder, state())
    if content is None:
        _cut(folder / name)
    else:
        (folder / name).write_bytes(content)


UNREADABLE: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [  # what fills a folder, what the error names
    (lambda d: torch.save({"iteration": 5, "lr": 0.1}, d / "a.pt"), ("a.pt", "'iteration', 'lr'")),
    (lambda d: torch.save(torch.ones(3), d / "a.pt"), ("a.pt", "Tensor")),
    (lambda d: (d / "README.md").write_text(""), ("README.md",)),
    (lambda d: _saved(d, "model-480p.pt", "model-720p.pt"), ("/model-480p.pt", "/model-720p.pt")),
    (lambda d: _saved(d, "transformer/a.pt", "vae/a.pt"), ("/transformer", "/vae")),
    (lambda d: _index(d, {"x": "../../secret.safetensors"}), ("../../secret.safetensors",)),
    (lambda d: _index(d, {"extra.weight": "model-00001-of-00003.safetensors"}), ("extra.weight",)),
    (lambda d: _run(d, "iter_000002000.pt\n"), ("iter_000002000.pt", "iter_000001000.pt, iter_000000500.pt")),
    (lambda d: _run(d, "../../elsewhere.pt"), ("latest_checkpoint.txt", "../../elsewhere.pt")),
    (lambda d: _dcp(d, ".metadata", b""), (".metadata",)),
    (lambda d: _dcp(d, ".metadata"), (".metadata",)),
    (lambda d: _dcp(d, ".metadata", pickle.dumps({})), (".metadata", "dict")),
    (lambda d: _dcp(d, "__0_0.distcp"), ("__0_0.distcp",)),
    (lambda d: (_dcp(d, "x", b""), (d / "__0_0.distcp").unlink()), ("1 of 1 files", "__0_0.distcp")),
    *(
        (
            lambda d, content=content: (d / "m.safetensors.index.json").write_bytes(content),
            ("m.safetensors.index.json",),
        )
        for content in (
            *(b"[1]", b'{"weight_map": 3}', b'{"weight_map": {"a": ["x"]}}'),
            *(b'{"weight_map": {"a": 1, "b": "x"}}', b"[" * 100_000, b"\xff"),
        )
    ),
]


@pytest.mark.parametrize("case", range(len(UNREADABLE)))
def test_a_folder_that_cannot_be_read_is_one_error_that_names_the_file(tmp_path: Path, case: int) -> None:
    fill, named = UNREADABLE[case]
    fill(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        weights.read(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and all(token in str(caught.value) for token in named)


# Remote and hub -------------------------------------------------------------------------------------------------------


def test_s3_files_folders_and_dcp_read(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = storage.join(s3_bucket, "run", "checkpoints", "model", "iter_000000005.pt")
    storage.write_atomically(file, lambda f: torch.save(state(), f))
    pointer = storage.join(s3_bucket, "run", "checkpoints", "latest_checkpoint.txt")
    storage.write_text(pointer, "iter_000000005.pt")
    for path in (file, storage.join(s3_bucket, "run")):
        assert_same(weights.read(path), state())

    folder = storage.join(s3_bucket, "dcp", "model")
    writer = dcp_writer(folder)
    dcp.save({**state(), "iteration": 5}, storage_writer=writer, no_dist=True)
    assert_same(weights.read(folder), state())

    with pytest.raises(CheckpointError, match=r"Did you mean iter_000000005\.pt"):
        weights.read(file.replace("5.pt", "6.pt"))


class FakeHub:
    """Stands for the network side of huggingface_hub: a folder of repositories."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def HfApi(self) -> "FakeHub":
        return self

    def list_repo_files(self, repository: str, revision: str | None = None) -> list[str]:
        if not (self.root / repository).exists():
            raise type("RepositoryNotFoundError", (Exception,), {})("404")
        return [str(p.relative_to(self.root / repository)) for p in (self.root / repository).rglob("*") if p.is_file()]

    def hf_hub_download(self, repository: str, name: str, revision: str | None = None) -> str:
        return str(self.root / repository / name)


def test_hub_ids_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", FakeHub(tmp_path))
    (tmp_path / "org" / "pt").mkdir(parents=True)
    for name in ("model-480p.pt", "model-720p.pt"):
        torch.save(state(), tmp_path / "org" / "pt" / name)
    expected = _save_shards(tmp_path / "org" / "diffusers" / "transformer", index=True)
    assert_same(weights.read("hf://org/pt/model-480p.pt"), state())
    assert_same(weights.read("hf://org/diffusers@main/transformer"), expected)
    for address, named in (
        ("org/pt", "hf://org/pt/model-480p.pt"),
        ("hf://org/pt/model-480.pt", "Did you mean model-480p.pt"),
        ("org/absent", "org/absent"),
        ("hf://org", "hf://organisation/name"),
    ):
        with pytest.raises(UserError, match=re.escape(named)):
            weights.read(address)


# Names ----------------------------------------------------------------------------------------------------------------


def test_select_takes_one_network_and_drops_the_extras(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one, two = torch.ones(1), torch.full((1,), 2.0)
    extras = dict.fromkeys(("net.pos_embedder.seq", "net.accum_iteration", "net.x._extra_state"), one)
    both = {"net.a": one, "net_ema.a": two, **extras}
    assert_same(weights.select(both, "net"), {"a": one})
    assert_same(weights.select(both, "auto"), {"a": one})
    assert_same(weights.select(both, "net_ema"), {"a": two})
    assert_same(weights.select({"net_ema.a": two}, "auto"), {"a": two})
    assert_same(weights.select({"a": one}, "auto"), {"a": one})
    with pytest.raises(ConfigError, match=r"'ema'.*net_ema"):
        weights.select(both, "ema")
    said = ["weights: net; the file holds net and net_ema (asked: auto)"]
    said += ["weights: net_ema; the file holds net_ema (asked: auto)"]  # and nothing where there is nothing to choose
    assert [record.getMessage() for record in caplog.records] == said
    assert_same(weights.select({"a": one}, "net"), {"a": one})
    assert_same(weights.select({"net.a": one, "head": two}, "net"), {"a": one, "head": two})
    assert_same(weights.select({**both, "net_ref.a": two, "net_old.a": two}, "auto"), {"a": one})
    with pytest.raises(CheckpointError, match=r"'net_ema\.'; 1 begin with 'net\.'\. .*leave --load_ema out"):
        weights.select({"net.a": one}, "net_ema")
    with pytest.raises(CheckpointError, match="Ask for 'net_ema'"):
        weights.select({"net_ema.a": one}, "net")


def test_two_entries_are_not_given_one_name() -> None:
    with pytest.raises(CheckpointError, match="both be loaded as 'x'"):
        weights.renamed({"a": torch.ones(1), "b": torch.ones(1)}, lambda name: "x")


# Loading --------------------------------------------------------------------------------------------------------------


def test_load_into_copies_casts_and_accounts() -> None:
    targets = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(3), "c": torch.zeros(4)}
    targets["scalar"] = torch.zeros(())
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    source = {"a": torch.ones(2), "b": torch.ones(4), "scalar": torch.tensor(5.0)}
    source |= {"z": torch.ones(1), "x._extra_state": torch.ones(1)}
    report = weights.load_into(targets, source)
    assert report == weights.account(targets, source)
    assert report.matched == ("a", "scalar") and report.missing == ("c",)
    assert report.unexpected == ("z",) and report.wrong_shape == {"b": ((4,), (3,))}
    assert report.summary() == "2 matched, 1 missing, 1 unexpected, 1 wrong shape"
    assert torch.equal(targets["a"], torch.ones(2, dtype=torch.bfloat16)) and targets["scalar"] == 5
    assert not targets["b"].any() and not targets["c"].any()
    assert addresses == {name: tensor.data_ptr() for name, tensor in targets.items()}


def test_load_into_refuses_meta_targets_and_floats_for_integers() -> None:
    with pytest.raises(CheckpointError, match="'a' is on the meta device"):
        weights.load_into({"a": torch.empty(2, device="meta")}, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"'a' is torch\.float32 in the file and torch\.int64"):
        weights.load_into({"a": torch.zeros(2, dtype=torch.int64)}, {"a": torch.ones(2)})


def _require_error(report: weights.LoadReport, **allowed: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        report.require(source="m.pt", **allowed)
    text = str(caught.value)
    assert len(text.splitlines()) <= 25, text
    return text


def test_require_lists_names_counts_and_shapes() -> None:
    targets = {f"blocks.{i}.weight": torch.zeros(2) for i in range(100)}
    source = {f"layers.{i}.weight": torch.zeros(2) for i in range(50)} | {"blocks.0.weight": torch.zeros(3)}
    source |= {"blocks.1.weight": torch.zeros(2)}
    text = _require_error(weights.account(targets, source))
    assert "m.pt does not fit the model (1 matched, 98 missing, 50 unexpected, 1 wrong shape)" in text
    assert "98 in the model, missing in the file:" in text and "blocks.2.weight" in text and "and 93 more" in text
    assert "job.name" in text and "checkpoint.strict_resume=False" in text
    assert "blocks.0.weight: file [3], model [2]" in text


def test_require_lets_listed_patterns_pass() -> None:
    report = weights.LoadReport(
        matched=("a",), missing=("new.x", "new.y"), unexpected=("old.z",), wrong_shape={"w": ((1,), (2,))}
    )
    report.require(["new.*"], ["old.*"], allow_wrong_shape=True)
    text = _require_error(report, allow_missing=["new.x"], allow_unexpected=["*"], allow_wrong_shape=True)
    assert "new.y" in text and "  new.x" not in text and "old.z" not in text
    weights.LoadReport(matched=("a",)).require()


def test_require_never_accepts_a_file_of_which_nothing_fits() -> None:
    report = weights.LoadReport(missing=("a",), unexpected=("b",))
    text = _require_error(report, allow_missing=["*"], allow_unexpected=["*"])
    assert "0 matched, 1 missing, 1 unexpected" in text
    text = _require_error(weights.LoadReport(wrong_shape={"w": ((1,), (2,))}), allow_wrong_shape=True)
    assert "0 matched, 1 wrong shape" in text and "w: file [1], model [2]" in text


# Shards ---------------------------------------------------------------------------------------------------------------


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)  # 5 rows over 2 ranks
        self.b = nn.Linear(5, 1)  # 1 row: the second rank's shard is empty
        self.register_buffer("scale", torch.zeros(3))


def _load_shards(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    expected = torch.load(f"{folder}/model.pt", weights_only=True)
    meshes = [init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))]
    if world == 2:  # both are two-dimensional: replicated twice, and a single replica
        meshes.append(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        meshes.append(init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    else:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        for name in ("model.pt", "model.safetensors", "dcp"):
            module = _Uneven()
            fully_shard(module, mesh=mesh)
            if name == "dcp":
                module = module.bfloat16()
            targets = dict(module.state_dict())
            weights.load_into(targets, weights.read(f"{folder}/{name}")).require(source=name)
            for key, value in module.state_dict().items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(full, expected[key].to(full.dtype)), (mesh, name, key)
    plain = distribute_tensor(torch.zeros(4, 7), meshes[0], [Shard(1)])  # not along the first dimension
    weights.load_into({"x": plain}, {"x": torch.arange(28.0).view(4, 7)}).require()
    assert torch.equal(plain.full_tensor(), torch.arange(28.0).view(4, 7))


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
def test_sharded_targets_take_their_own_piece(tmp_path: Path, world: int) -> None:
    tensors = {name: torch.randn_like(value) for name, value in _Uneven().state_dict().items()}
    torch.save(tensors, tmp_path / "model.pt")
    save_file(tensors, tmp_path / "model.safetensors")
    save_dcp(tmp_path / "dcp", tensors)
    run_distributed(_load_shards, world, args=(str(tmp_path),))


# Numbers that are not finite ------------------------------------------------------------------------------------------


class Masked(ImaginaireModel):
    """Holds what may be in a checkpoint beside weights: masks of -inf, a count, and an average of all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.net.register_buffer("mask", torch.full((2,), -math.inf))
        self.net.register_buffer("count", torch.tensor(7))
        self.net.register_parameter("empty", nn.Parameter(torch.zeros(0)))
        self.net.register_parameter("frozen", nn.Parameter(torch.full((2,), -math.inf), requires_grad=False))
        self.ema = PowerEMA(self.net)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["net.weight", "net.bias", "net_ema.weight"])
def test_each_part_counts_but_for_what_training_does_not_change(tmp_path: Path, part: str, value: float) -> None:
    checkpointer = StandardCheckpointer(CheckpointConfig(), str(tmp_path), callbacks=CallbackGroup)
    model = Masked()
    model.ema.update(model.net, 3)
    assert torch.equal(model.ema.shadows["frozen"], model.net.frozen), "no NaN, of inf - inf"
    checkpointer._require_finite(model, 5)
    model.checkpoint_state()[part].view(-1)[-1] = value
    with pytest.raises(TrainingError, match=rf"Iteration 5 is not saved: 1 of 6 tensors .*such as {part}\. .*Nothing"):
        checkpointer._require_finite(model, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_floating_dtype_is_looked_at(dtype: torch.dtype) -> None:
    fine = torch.linspace(-3, 3, 7).to(dtype)
    broken = torch.tensor([1.0, math.nan, 2.0]).to(dtype)
    found = {"fine": fine, "broken": broken, "whole": torch.tensor([1, 2]), "empty": fine[:0]}
    assert parallel.not_finite(found) == ("broken",) and parallel.not_finite({}) == ()
