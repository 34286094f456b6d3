# SPDX-License-Identifier: Apache-2.0
"""Folders of embeddings: what is written is read, nothing is mixed, nothing is done twice, a stop loses little."""

import json
import logging
import pickle
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings import encode
from cosmos_predict2.text.embeddings import folder as embedding_folder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, caption_hash, find_embedding_dir
from imaginaire.errors import DataError
from tests.programs import warm_python
from tests.text.folders import Counting

ROOT = Path(__file__).parents[2]
CAPTIONS = {"a": "push the puck", "b": "push the box to the left", "c": "push the puck", "d.1": "ende"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["pickle", "safetensors"])
def test_what_is_written_is_read(form: str, tmp_path: Path) -> None:
    encoder = BytesEncoder(64, 32)
    counts = embed_captions(tmp_path / "t5_xxl", CAPTIONS, encoder, form=form)
    assert (counts.written, counts.encoded, counts.unchanged, counts.orphans) == (4, 3, 0, ())
    folder = EmbeddingFolder(tmp_path / "t5_xxl")
    assert folder.stems() == sorted(CAPTIONS) and folder.width == 32
    for stem, caption in CAPTIONS.items():
        assert folder.find(stem) == tmp_path / "t5_xxl" / f"{stem}.{form}"
        embedding, mask = folder.read(stem, 64)
        assert embedding.dtype == torch.float32 and mask.dtype == torch.int64
        assert torch.equal(embedding, encoder.encode(caption)[0])
        assert mask.tolist() == [1] * (len(caption) + 1) + [0] * (63 - len(caption))
    record = folder.record
    assert record is not None and (record.encoder, record.width, record.num_tokens) == (encoder.name, 32, 64)
    assert record.captions == {stem: caption_hash(caption) for stem, caption in CAPTIONS.items()}
    (tmp_path / "t5_xxl/a.pkl").touch()
    with pytest.raises(DataError, match=r"a\.pkl.* of one clip"):
        folder.stems()


def test_folders_from_elsewhere_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_embedding_dir(tmp_path) is None
    folder = tmp_path / "text_embedding"
    folder.mkdir()
    array = np.random.RandomState(0).standard_normal((5, 8)).astype(np.float16)
    (folder / "old.pkl").write_bytes(pickle.dumps([array], protocol=2))
    save_file({"anything": torch.from_numpy(array).to(torch.bfloat16)}, folder / "new.safetensors")
    assert find_embedding_dir(tmp_path) == folder
    (tmp_path / "t5_xxl").mkdir()
    assert find_embedding_dir(tmp_path) == tmp_path / "t5_xxl"
    with caplog.at_level(logging.INFO):
        read = EmbeddingFolder(folder)
        embedding, mask = read.read("old", 4)  # cut
        assert torch.equal(embedding, torch.from_numpy(array[:4]).float()) and mask.tolist() == [1] * 4
        embedding, mask = read.read("new", 6)
        assert torch.equal(embedding[:5], torch.from_numpy(array).bfloat16().float()) and mask.tolist() == [1] * 5 + [0]
        assert read.record is None
        read.require_encoder("t5")  # unknown
    assert caplog.text.count("its encoder is unknown") == 1 and caplog.text.count("cut to 4") == 1


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    before = contents(tmp_path)
    encoder = Counting()
    counts = embed_captions(tmp_path, CAPTIONS, encoder)
    assert (counts.written, counts.unchanged) == (0, 4) and not encoder.asked
    assert contents(tmp_path) == before

    def never() -> Counting:
        raise AssertionError("the encoder is loaded only when something is missing")

    embed_captions(tmp_path, CAPTIONS, never, kind="bytes")


def test_a_changed_caption_is_encoded_again_and_a_lost_one_is_reported(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    encoder = Counting()
    changed = {"a": "lift the puck", "b": CAPTIONS["b"], "e": "new"}
    counts = embed_captions(tmp_path, changed, encoder, form="safetensors")
    assert sorted(encoder.asked) == ["lift the puck", "new"]
    assert (counts.written, counts.unchanged, counts.orphans) == (2, 1, ("c", "d.1"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.safetensors", "b.pickle", "c.pickle", "d.1.pickle", "e.safetensors", "embeddings.json",
    }  # fmt: skip
    folder = EmbeddingFolder(tmp_path)
    assert torch.equal(folder.read("a", 64)[0], BytesEncoder(64, 32).encode("lift the puck")[0])
    record = folder.record
    assert record is not None and record.captions["a"] == caption_hash("lift the puck") and "c" in record.captions


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_what_was_interrupted_goes_on_and_ends_the_same(stop_after: int, tmp_path: Path) -> None:
    embed_captions(tmp_path / "whole", CAPTIONS, Counting())
    with pytest.raises(KeyboardInterrupt):
        embed_captions(tmp_path / "part", CAPTIONS, Counting(stop_after=stop_after), batch_size=1)
    encoder = Counting()
    embed_captions(tmp_path / "part", CAPTIONS, encoder, batch_size=1)
    assert len(encoder.asked) == 3 - stop_after
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")


def test_a_kill_between_file_and_record_leaves_no_stale_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    changed = CAPTIONS | {"a": "lift the puck", "new": "a new one"}
    whole = tmp_path.parent / f"{tmp_path.name}-whole"
    embed_captions(whole, changed, Counting())
    with monkeypatch.context() as context:  # the record of the start is the last one that reaches the disk
        writes: list[int] = []
        write_record = embedding_folder.write_record
        context.setattr(
            encode,
            "write_record",
            lambda *args: writes.append(1) or (write_record(*args) if len(writes) == 1 else None),
        )
        embed_captions(tmp_path, changed, Counting())
    assert len(writes) == 2
    assert (tmp_path / "new.pickle").exists() and "new" not in EmbeddingFolder(tmp_path).record.captions
    for path in tmp_path.glob("new.*"):
        path.write_bytes(b"torn")  # nothing trusts it
    assert embed_captions(tmp_path, changed, Counting()).written == 2
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_shards_together_equal_one_run(num_shards: int, tmp_path: Path) -> None:
    embed_captions(tmp_path / "whole", CAPTIONS, Counting())
    asked: list[str] = []
    for i in range(num_shards):
        encoder = Counting()
        embed_captions(tmp_path / "parts", CAPTIONS, encoder, shard=(i, num_shards))
        asked += encoder.asked
    assert len(asked) <= 4
    assert EmbeddingFolder(tmp_path / "parts").record == EmbeddingFolder(tmp_path / "whole").record
    assert not (tmp_path / "parts" / "embeddings.json").exists()
    encoder = Counting()
    embed_captions(tmp_path / "parts", CAPTIONS | {"e": "ende"}, encoder)  # one process makes one record of them
    assert encoder.asked == ["ende"]
    embed_captions(tmp_path / "whole", CAPTIONS | {"e": "ende"}, Counting())
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_of_records_that_disagree_the_newer_counts(tmp_path: Path) -> None:
    """Captions change between runs of one, two and three processes, in every order."""
    first = dict.fromkeys("abcdef", "one")
    embed_captions(tmp_path, first, Counting())
    for text, num_shards in [("two", 2), ("three", 3), ("one", 2), ("two", 3), ("four", 1), ("one", 2)]:
        captions = dict.fromkeys("abcdef", text)
        for i in range(num_shards):
            embed_captions(tmp_path, captions, Counting(), shard=(i, num_shards))
        record = EmbeddingFolder(tmp_path).record
        assert record is not None and set(record.captions.values()) == {caption_hash(text)}
        for i in range(num_shards):
            assert embed_captions(tmp_path, captions, Counting(), shard=(i, num_shards)).written == 0
        assert torch.equal(EmbeddingFolder(tmp_path).read("f", 64)[0], BytesEncoder(64, 32).encode(text)[0])


def test_equal_captions_are_encoded_once(tmp_path: Path) -> None:
    encoder = Counting()
    embed_captions(tmp_path, CAPTIONS, encoder)
    assert sorted(encoder.asked) == sorted(set(CAPTIONS.values()))


def test_encoders_are_never_mixed(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    before = contents(tmp_path)
    for other in (Counting(width=16), BytesEncoder(65, 32)):
        with pytest.raises(DataError, match=rf"by bytes-v1-64x32; those by {other.name} must not.*Delete the folder"):
            embed_captions(tmp_path, CAPTIONS | {"e": "more"}, other)
    with pytest.raises(DataError, match="those by t5 must not be mixed in"):
        embed_captions(tmp_path, CAPTIONS, Counting(), kind="t5")  # although nothing is missing
    assert contents(tmp_path) == before
    folder = EmbeddingFolder(tmp_path)
    folder.require_encoder("bytes")
    folder.require_encoder("bytes-v1-64x32")
    for wrong in ("t5", "bytes-v1-64x3", "byte"):
        with pytest.raises(DataError, match=f"by bytes-v1-64x32, but {wrong} was asked for"):
            folder.require_encoder(wrong)


def test_two_records_of_different_encoders_are_refused(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting(), shard=(0, 2))
    other = json.loads((tmp_path / "embeddings.shard-0-of-2.json").read_text()) | {"encoder": "t5-0"}
    (tmp_path / "embeddings.shard-1-of-2.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match=r"mixes embeddings: .* bytes-v1-64x32, .* t5-0"):
        EmbeddingFolder(tmp_path).record


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}', '{"format": "text_embeddings/1"}'])
def test_a_damaged_record_is_an_error_that_names_it(content: str, tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    (tmp_path / embedding_folder.RECORD).write_text(content)
    with pytest.raises(DataError, match=r"embeddings\.json"):
        EmbeddingFolder(tmp_path).read("a")
    with pytest.raises(DataError, match=r"embeddings\.json"):
        embed_captions(tmp_path, CAPTIONS, Counting())


def test_a_folder_without_a_record_grows_only_when_it_is_adopted(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    (tmp_path / "embeddings.json").unlink()
    assert embed_captions(tmp_path, CAPTIONS, Counting()).unchanged == 4  # nothing to add: as it is
    assert not (tmp_path / "embeddings.json").exists()
    more = CAPTIONS | {"e": "more"}
    with pytest.raises(DataError, match=r"--adopt"):
        embed_captions(tmp_path, more, Counting())
    for stranger in (Counting(width=16), _Shuffled()):
        with pytest.raises(DataError, match=r"a\.pickle"):
            embed_captions(tmp_path, more, stranger, adopt=True)
    with pytest.raises(DataError, match=r"c\.pickle"):
        embed_captions(tmp_path, {"c": "other"}, Counting(), adopt=True)
    counts = embed_captions(tmp_path, more, Counting(), adopt=True)
    assert (counts.written, counts.unchanged) == (1, 4)
    assert EmbeddingFolder(tmp_path).record.captions == {stem: caption_hash(text) for stem, text in more.items()}


class _Shuffled(Counting):
    """As many tokens and as wide, but other numbers."""

    def encode(self, prompts: Sequence[str]) -> Tensor:
        return super().encode(prompts).roll(1, dims=-1)


def test_what_cannot_be_read_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    embed_captions(tmp_path, CAPTIONS, Counting())
    folder = EmbeddingFolder(tmp_path)
    with pytest.raises(DataError, match="'z'"):
        folder.read("z")
    faults = {
        "width": [np.ones((3, 16), np.float16)],
        "nan": [np.full((3, 32), np.nan, np.float16)],
        "inf": [np.full((3, 32), np.inf, np.float16)],
        "flat": [np.ones(32, np.float16)],
    }
    for name, content in faults.items():
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(content))
        with pytest.raises(DataError, match=rf"{name}\.pickle"):
            folder.read(name)
    save_file({"x": torch.zeros(2, 32), "y": torch.zeros(2, 32)}, tmp_path / "two.safetensors")
    save_file({"x": torch.zeros(2, 32, dtype=torch.int32)}, tmp_path / "whole_numbers.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "two.safetensors").read_bytes()[:-9])
    for name in ("two", "whole_numbers", "torn"):
        with pytest.raises(DataError, match=rf"{name}\.safetensors"):
            folder.read(name)
    with pytest.raises(DataError, match="There is no folder"):
        EmbeddingFolder(tmp_path / "nowhere")


def test_numbers_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not fit float16"):
        embed_captions(tmp_path, CAPTIONS, Counting(factor=1e5))
    assert not list(tmp_path.glob("*.pickle"))


_PROCESS = """
import sys
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
captions = {f"clip_{i:04d}": f"caption {i}" for i in range(2000)}
print(embed_captions(sys.argv[1], captions, BytesEncoder(64, 64), shard=(int(sys.argv[2]), 2)).written)
"""


@pytest.mark.slow
def test_processes_at_the_same_time_of_which_one_is_killed_end_as_one_run(tmp_path: Path) -> None:
    captions = {f"clip_{i:04d}": f"caption {i}" for i in range(2000)}
    embed_captions(tmp_path / "whole", captions, BytesEncoder(64, 64))
    folder = tmp_path / "parts"

    def start(i: int) -> subprocess.Popen:
        command = [warm_python(), "-c", _PROCESS, str(folder), str(i)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    killed, other = start(0), start(1)
    while len(list(folder.glob("clip_*[02468].pickle"))) < 50:
        assert killed.poll() is None, "it was to be killed before its end"
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert other.communicate()[0].strip() == "1000"
    again = start(0)
    assert 0 < int(again.communicate()[0]) <= 1000 and again.returncode == 0
    assert embed_captions(folder, captions | {"clip_0000": "another"}, BytesEncoder(64, 64)).written == 1
    embed_captions(tmp_path / "whole", captions | {"clip_0000": "another"}, BytesEncoder(64, 64))
    assert contents(folder) == contents(tmp_path / "whole")
