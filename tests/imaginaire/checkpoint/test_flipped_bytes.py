# SPDX-License-Identifier: Apache-2.0
"""A byte that a disk changes in a checkpoint is found when the run resumes, or changes nothing that is read."""

import os
import random
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.layout import KINDS, CheckpointSet, foreign_set, own_set
from imaginaire.checkpoint.weight_files import shape_of
from imaginaire.errors import CheckpointError
from scripts import convert
from tests.training import difference


def _trees(iteration: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(iteration)
    numbers = torch.randn(40, generator=generator)
    return {
        "model": {"net.w": numbers.bfloat16(), "net.b": numbers[:3]},
        "optim": {"state": {"net.w": {"step": 3, "exp_avg": numbers}}},
        "scheduler": {"last_epoch": iteration},
        "trainer": {"iteration": iteration, "generators": [torch.get_rng_state()[:64]]},
    }


def _written(folder: Path, dcp: bool) -> CheckpointSet:
    """Two complete sets, of which the pointer names the second."""
    for iteration in (1, 2):
        saved = CheckpointSet(str(folder), checkpoint_layout.set_name(iteration, dcp=dcp))
        (checkpoint_layout.write_dcp if dcp else checkpoint_layout.write_standard)(saved, _trees(iteration))
    checkpoint_layout.write_pointer(saved)
    return saved


def _files(saved: CheckpointSet) -> list[Path]:
    paths = [Path(saved.path(kind)) for kind in KINDS]
    return [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]


def _flips(file: Path, count: int) -> Iterator[int]:
    """Flip a bit of ``count`` bytes of a file, one at a time; of all bytes where there are fewer."""
    intact = file.read_bytes()
    draw = random.Random(file.name)
    for place in sorted(draw.sample(range(len(intact)), min(count, len(intact)))):
        changed = bytearray(intact)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        yield place
    file.write_bytes(intact)


@pytest.mark.parametrize(("dcp", "count"), [(False, 12), (True, 4)])
def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path, dcp: bool, count: int) -> None:
    saved = _written(tmp_path, dcp)
    expected = {kind: saved.read(kind) for kind in KINDS}
    older = checkpoint_layout.set_name(1, dcp=dcp)
    found = 0
    for file in _files(saved):
        for place in _flips(file, count):
            try:
                chosen = own_set(str(tmp_path), KINDS, fallback=False)
                assert chosen == saved
                read = {kind: chosen.read(kind) for kind in KINDS}
            except CheckpointError as error:
                assert str(file.parent) in str(error) and older in str(error), f"{file} {place}: {error}"
                assert "weights_only" not in str(error), "torch advises to load a damaged file without restrictions"
                found += 1
            else:
                assert difference(read, expected) is None, f"{file}: byte {place} changed what is read"
    assert found > 5
    assert own_set(str(tmp_path), KINDS, fallback=False) == saved


def test_of_many_damaged_parts_three_are_named(tmp_path: Path) -> None:
    saved = CheckpointSet(str(tmp_path), checkpoint_layout.set_name(1, dcp=True))
    model = {f"net.{number}": torch.randn(8) for number in range(9)}
    checkpoint_layout.write_dcp(saved, _trees(1) | {"model": model})
    (file,) = Path(saved.path("model")).glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="So are 7 more parts") as caught:
        checkpoint_layout.require_unchanged(saved, ["model"])
    assert str(caught.value).count(" is damaged") == 3


@pytest.mark.parametrize("dcp", [False, True])
def test_the_numbers_of_a_tensor_are_checked_and_fallback_takes_the_set_before(tmp_path: Path, dcp: bool) -> None:
    saved = _written(tmp_path, dcp)
    file = next(file for file in _files(saved) if not file.name.startswith(".") and "optim" in str(file))
    numbers = _trees(2)["optim"]["state"]["net.w"]["exp_avg"].numpy().tobytes()
    file.write_bytes(file.read_bytes().replace(numbers, bytes([numbers[0] ^ 1]) + numbers[1:]))
    assert not saved.faults(), "nothing else has changed"
    with pytest.raises(CheckpointError, match=r"optim.* is damaged: its bytes are not those that were saved"):
        own_set(str(tmp_path), KINDS, fallback=False)
    with pytest.raises(CheckpointError, match=r"load_path=.*optim.* is damaged.*set before it is .*iter_000000001"):
        foreign_set(str(tmp_path), KINDS)
    older = own_set(str(tmp_path), KINDS, fallback=True)
    assert older is not None and older.iteration == 1
    assert own_set(str(tmp_path), ["model"], fallback=False) == saved, "what is not read is not checked"
    assert [len(saved.damage(KINDS, (i, 3))) for i in range(3)].count(1) == 1, "three processes share the reading"


@pytest.mark.parametrize("dcp", [False, True])
def test_every_reader_of_weights_checks_what_a_resume_checks(tmp_path: Path, dcp: bool) -> None:
    saved = _written(tmp_path / "run/checkpoints", dcp)
    expected, run = dict(saved.read("model")), str(tmp_path / "run")
    found = 0
    for file in _files(saved):
        for place in _flips(file, 5 if "model" in str(file.relative_to(saved.folder)) else 0):
            try:
                assert difference(dict(weights.read(run)), expected) is None, f"{file}: byte {place} changed them"
            except CheckpointError:
                found += 1
    assert found > 2 and difference(dict(weights.read(run)), expected) is None
    file = next(file for file in _files(saved) if not file.name.startswith(".") and "model" in str(file))
    numbers, intact = expected["net.b"].numpy().tobytes(), file.read_bytes()
    file.write_bytes(intact.replace(numbers, bytes([numbers[0] ^ 1]) + numbers[1:]))
    with pytest.raises(CheckpointError, match=r"is damaged: its bytes are not those that were saved.*iter_000000001"):
        convert.convert(run, str(tmp_path / "converted"), "standard" if dcp else "dcp")
    assert not (tmp_path / "converted").exists()
    file.write_bytes(intact)
    for kind in ("optim", "scheduler"):
        saved.remove(kind)
    assert difference(dict(weights.read(run)), expected) is None, "weights need no optimizer"
    saved.remove("trainer")
    assert difference(dict(weights.read(saved.path("model"))), expected) is None, "nor, copied alone, their record"


@pytest.mark.parametrize("dcp", [False, True])
def test_weights_that_were_read_are_checked_again_once_their_file_changes(tmp_path: Path, dcp: bool) -> None:
    saved = _written(tmp_path, dcp)
    path, numbers = saved.path("model"), _trees(2)["model"]["net.b"].numpy().tobytes()
    assert len(weights.read(path)["net.b"]) == 3
    file = next(file for file in _files(saved) if file.is_relative_to(path) and numbers in file.read_bytes())
    facts = file.stat()
    file.write_bytes(file.read_bytes().replace(numbers, bytes([numbers[0] ^ 1]) + numbers[1:]))  # of the same size
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000_000))
    with pytest.raises(CheckpointError, match="is damaged"):
        weights.read(path)["net.b"]


def test_weights_of_another_run_in_the_place_of_the_saved_ones_are_told(tmp_path: Path) -> None:
    saved, other = _written(tmp_path / "one", False), _written(tmp_path / "other", False)
    torch.save({"net.w": torch.zeros(40), "net.b": torch.zeros(3)}, other.path("model"))
    shutil.copy(other.path("model"), saved.path("model"))
    source = weights.read(saved.path("model"))
    assert source.keys() == {"net.w", "net.b"} and shape_of(source, "net.w") == (40,)
    with pytest.raises(CheckpointError, match=r"is not the file saved with this set.*iter_000000001"):
        source["net.w"]


def test_files_are_looked_at_once_for_all_tensors_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look lists the folder, which over a network takes as long as the tensor itself."""
    saved, looks = _written(tmp_path, dcp=True), []
    stamp = checkpoint_layout._stamp
    monkeypatch.setattr(checkpoint_layout, "_stamp", lambda *arguments: looks.append(1) or stamp(*arguments))
    assert len(dict(weights.read(saved.path("model")))) > 1
    assert len(looks) == 1


def test_a_record_is_read_to_its_end_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_layout, "CHUNK_BYTES", 4096)  # of a record of 20 kB
    file = tmp_path / "model.pt"
    torch.save({"w": torch.arange(5000.0)}, file)
    assert checkpoint_layout._damage_of([checkpoint_layout.Archive(file, "it")]) == []
    content, last = file.read_bytes(), torch.tensor(4999.0).numpy().tobytes()
    assert content.count(last) == 1
    file.write_bytes(content.replace(last, bytes(4)))
    (sentence,) = checkpoint_layout._damage_of([checkpoint_layout.Archive(file, "it")])
    assert sentence.startswith("it is damaged")


def test_a_thread_reads_a_zip_that_it_opened_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share one move its position in each other's way (Python 3.12): good files seem damaged."""

    class Watched(zipfile.ZipFile):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.thread = threading.get_ident()

        def open(self, *arguments: Any) -> Any:
            assert self.thread == threading.get_ident()
            return super().open(*arguments)

    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    monkeypatch.setattr(zipfile, "ZipFile", Watched)
    assert checkpoint_layout._damage_of([checkpoint_layout.Archive(tmp_path / "model.pt", "it")]) == []


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"iter_\x00000000002.pt", b"\n", b"\xc3\x28" * 500])
def test_a_pointer_of_other_bytes_is_named_with_the_complete_sets(tmp_path: Path, content: bytes) -> None:
    _written(tmp_path, dcp=False)
    (tmp_path / "latest_checkpoint.txt").write_bytes(content)
    readers = [
        lambda: own_set(str(tmp_path), KINDS, fallback=False),
        lambda: foreign_set(str(tmp_path), KINDS),
        lambda: weights.read(str(tmp_path)),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=r"(?s)latest_checkpoint\.txt.*iter_000000002\.pt") as caught:
            read()
        assert len(str(caught.value)) < 700
