# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import default_collate

from cosmos_predict2.data import dataset_latents
from cosmos_predict2.data.dataset_latents import LatentDataset, is_same_tokenizer, probe
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.video.clips import read_frames
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tools.prepare.latent_cache import cache_latents, window_starts
from imaginaire.data.facts import facts_of
from imaginaire.data.stream import ResumableLoader
from imaginaire.errors import ConfigError, DataError
from scripts import cache_latents as script
from tests.data.video_files import same
from tests.findings import problems
from tests.models.parts import PooledPixels, make_model

SHAPE: dict[str, Any] = dict(num_frames=9, size=(32, 48))


def make_folder(folder: Path, lengths: tuple[int, ...] = (9, 14, 30), width: int = 48) -> Path:
    """Clips of noise that moves slowly, with captions and embeddings."""
    (folder / "videos").mkdir(parents=True)
    (folder / "metas").mkdir()
    captions = {}
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(i)
        video = torch.randint(0, 256, (3, 1, 32, width), dtype=torch.uint8, generator=generator)
        video = torch.cat([video.roll(k, dims=3) for k in range(length)], dim=1)
        write_video(folder / "videos" / f"clip_{i}.mp4", video, 10)
        captions[f"clip_{i}"] = f"clip number {i}"
        (folder / "metas" / f"clip_{i}.txt").write_text(captions[f"clip_{i}"])
    embed_captions(folder / "t5_xxl", captions, BytesEncoder(4, 8))
    return folder


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("cache") / "train")
    outcome = cache_latents(folder, TinyTokenizer(), **SHAPE, windows_per_clip=3, dtype="float32")
    assert outcome.faults == [] and outcome.results == ["clip_0", "clip_1", "clip_2"]
    return folder


def test_windows_are_evenly_apart_and_reach_both_ends() -> None:
    assert [window_starts(*case) for case in ((1, 4), (3, 4), (22, 3), (22, 1))] == [[0], [0, 1, 2], [0, 10, 21], [10]]


def test_latents_are_what_the_tokenizer_makes_of_the_same_frames(cached: Path) -> None:
    tokenizer = TinyTokenizer()
    dataset = LatentDataset(str(cached), num_tokens=4)
    assert len(dataset) == 3 and dataset.num_frames == 9
    assert facts_of(dict(_target_=LatentDataset, dataset_dir=str(cached))).rate == dataset[0]["fps"]
    for stem, starts in (("clip_0", [0]), ("clip_1", [0, 2, 5]), ("clip_2", [0, 10, 21])):
        with dataset_latents.open_latents(cached / "latents" / f"{stem}.safetensors") as clip:
            assert clip.num_windows == len(starts) and clip.fps == 10
            for which, start in enumerate(starts):
                latents, found = clip.window(which)
                frames = read_frames(cached / "videos" / f"{stem}.mp4", range(start, start + 9))
                assert found == start
                assert torch.equal(latents, tokenizer.encode(frames[None].float() / 127.5 - 1)[0])


def test_items_are_those_of_the_clips_but_for_the_pixels(cached: Path) -> None:
    videos = Dataset(str(cached), 9, (32, 48), num_tokens=4, sampling="first")
    latents = LatentDataset(str(cached), num_tokens=4)
    for index in range(3):
        expected, found = videos[index], latents[index]
        assert found["latents"].shape == (16, 3, 4, 6) and found["latents"].dtype == torch.float32
        assert found["video_name"].items() >= expected["video_name"].items()
        expected |= {key: found[key] for key in ("latents", "latent_probe", "video_name")}
        assert same({"video": expected["video"], **found}, expected)
    numpy.random.seed(0)
    starts = {latents[2]["video_name"]["start_frame"] for _ in range(30)}
    assert starts == {0, 10, 21}, "windows are drawn from NumPy's generator"
    assert len(list(ResumableLoader(latents, batch_size=2, num_workers=1))) == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_the_loss_is_that_of_the_clips(cached: Path, tmp_path: Path, dtype: str, tolerance: float) -> None:
    folder = cached
    if dtype != "float32":
        folder = make_folder(tmp_path / "train")
        cache_latents(folder, TinyTokenizer(), **SHAPE, windows_per_clip=1, dtype=dtype)
    model = make_model(state_t=3)
    model.world.tokenizer = TinyTokenizer()
    videos = Dataset(str(folder), 9, (32, 48), num_tokens=4)
    latents = LatentDataset(str(folder), num_tokens=4)
    batches = [default_collate([{**dataset[0], "sample_position": 5}]) for dataset in (videos, latents)]
    assert not torch.is_tensor(batches[1].get("video")) and batches[0]["video"].shape == (1, 3, 9, 32, 48)
    losses = [model.training_step(batch, 0)[1].item() for batch in batches]
    assert losses[0] > 0
    assert abs(losses[1] / losses[0] - 1) <= tolerance
    validation = [model.validation_step(batch, 0)[1].item() for batch in batches]
    assert abs(validation[1] / validation[0] - 1) <= tolerance


def test_the_beginning_of_a_window_serves_a_shorter_model(cached: Path) -> None:
    short = LatentDataset(str(cached), num_frames=5, num_tokens=4)[0]
    videos = Dataset(str(cached), 5, (32, 48), num_tokens=4, sampling="first")[0]
    expected = TinyTokenizer().encode(videos["video"][None].float() / 127.5 - 1)[0]
    assert short["num_frames"] == 5 and torch.allclose(short["latents"], expected, atol=1e-5)
    model = make_model(state_t=2)
    model.world.tokenizer = TinyTokenizer()
    whole = default_collate([{**LatentDataset(str(cached), num_tokens=4)[0], "sample_position": 5}])
    cut = default_collate([{**short, "sample_position": 5}])
    losses = [model.training_step(batch, 0)[1].item() for batch in (whole, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and model.world.offload_tokenizer  # it has nothing to do


def test_a_model_refuses_latents_of_another_tokenizer_and_of_too_few_frames(cached: Path) -> None:
    batch = default_collate([LatentDataset(str(cached), num_tokens=4)[0]])
    with pytest.raises(DataError, match=r"not those of the model's tokenizer .PooledPixels"):
        make_model(state_t=3).training_step(batch, 0)
    model = make_model(state_t=4)
    model.world.tokenizer = TinyTokenizer()
    with pytest.raises(DataError, match=r"have 9 frames, but the model takes 13"):
        model.training_step(batch, 0)
    model = make_model(state_t=3)
    with pytest.raises(DataError, match="'latent_probe'"):
        model.training_step({key: value for key, value in batch.items() if key != "latent_probe"}, 0)


def test_a_probe_depends_on_the_weights_and_not_their_rounding(cached: Path) -> None:
    tiny = TinyTokenizer()
    assert is_same_tokenizer(probe(tiny), probe(TinyTokenizer(dtype=torch.bfloat16)))
    assert not is_same_tokenizer(probe(tiny), probe(PooledPixels()))
    other = TinyTokenizer()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.net.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    assert not is_same_tokenizer(probe(tiny), probe(other))
    with pytest.raises(DataError, match="holds latents with another tokenizer or other weights"):
        cache_latents(cached, other, **SHAPE, windows_per_clip=3, dtype="float32")


def test_what_is_there_is_kept_and_what_changed_is_encoded_anew(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", (9, 10, 11))

    def cache(**options: Any) -> list[str]:
        return cache_latents(folder, TinyTokenizer(), **{**SHAPE, **options}).results

    assert cache(dry_run=True) == [] and not (folder / "latents").exists()
    assert cache(shard=(1, 2)) == ["clip_1"]
    assert cache() == ["clip_0", "clip_2"]
    assert cache() == []
    (folder / "latents" / "clip_0.safetensors").write_bytes(b"damaged")
    write_video(folder / "videos" / "clip_2.mp4", torch.zeros(3, 12, 32, 48, dtype=torch.uint8), 10)
    dataset = LatentDataset(str(folder), num_tokens=4)
    with pytest.raises(DataError, match=r"clip_0\.safetensors"):
        dataset[0]
    with pytest.raises(DataError, match=r"clip_2\.mp4"):
        dataset[2]
    skipping = LatentDataset(str(folder), num_tokens=4, skip_bad_samples=True)
    assert skipping[0]["video_name"]["video_path"].endswith("clip_1.mp4")
    assert cache() == ["clip_0", "clip_2"]
    (folder / "videos" / "clip_1.mp4").unlink()
    assert LatentDataset(str(folder), num_tokens=4)[1]["num_frames"] == 9, "training needs the latents alone"
    for changed, words in (
        (dict(num_frames=5), "num_frames=9, now 5"),
        (dict(crop="center"), "crop=stretch, now center"),
    ):
        with pytest.raises(DataError, match=words):
            cache(**changed)
    with pytest.raises(DataError, match=r"another tokenizer or other weights .TinyTokenizer, now PooledPixels"):
        cache_latents(folder, PooledPixels(), **SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path, dtype: str) -> None:
    folder = make_folder(tmp_path / "train", (10,))
    cache_latents(folder, TinyTokenizer(), **SHAPE, windows_per_clip=2, dtype=dtype)
    path = folder / "latents" / "clip_0.safetensors"

    def windows() -> list[Any]:
        with dataset_latents.open_latents(path) as clip:
            return [(*clip.window(which), clip.fps, clip.require_video(folder / "videos").name) for which in range(2)]

    intact, expected = path.read_bytes(), windows()
    header = 8 + int.from_bytes(intact[:8], "little")
    places = [*range(0, header, 5), *range(header, len(intact), 701), len(intact) - 1]
    harmless = []
    for place in places:
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << place % 7]) + intact[place + 1 :])
        try:
            found = windows()
        except DataError as error:
            assert str(path) in str(error) and "encode it again" in str(error).lower().replace("write", "encode")
            continue
        harmless.append(place)
        for now, then in zip(found, expected, strict=True):
            assert now[0].equal(then[0]) and now[1:3] == then[1:3], f"byte {place} changed a window"
    assert harmless == [] or max(harmless) < header
    assert len(harmless) < len(places) / 3


def made_earlier(path: Path) -> None:
    """Leave out of a file of latents what earlier versions did not write."""
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name not in ("crc32", "reading")}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata)


def test_latents_with_wrong_last_columns_are_to_be_made_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", (9, 9), 56)
    cache_latents(folder, TinyTokenizer(), **SHAPE, windows_per_clip=1)
    made_earlier(folder / "latents" / "clip_1.safetensors")
    (found,) = problems(LatentDataset, dataset_dir=str(folder))
    assert "clip_1.safetensors was made by an earlier version" in found
    with pytest.raises(DataError, match=r"clip_1\.mp4"):
        LatentDataset(str(folder), num_tokens=4)[1]
    assert cache_latents(folder, TinyTokenizer(), **SHAPE, windows_per_clip=1).results == ["clip_1"]
    assert problems(LatentDataset, dataset_dir=str(folder)) == []


def test_a_cache_of_an_earlier_version_is_read_and_a_record_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", (9,))
    cache_latents(folder, TinyTokenizer(), **SHAPE)
    expected = LatentDataset(str(folder), num_tokens=4)[0]
    made_earlier(folder / "latents" / "clip_0.safetensors")
    assert LatentDataset(str(folder), num_tokens=4)[0]["latents"].equal(expected["latents"])
    record = folder / "latents" / "latents.json"
    record.write_text(record.read_text().replace('"num_frames": 9', '"num_frames": 5'))
    with pytest.raises(DataError, match=r"latents\.json"):
        LatentDataset(str(folder), num_tokens=4)[0]


def test_bad_clips_are_named_and_the_others_written(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", (9, 8, 40))
    whole = (folder / "videos" / "clip_2.mp4").read_bytes()
    (folder / "videos" / "clip_2.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "videos" / "clip_3.mp4").write_bytes(b"no video")
    outcome = cache_latents(folder, TinyTokenizer(), **SHAPE, workers=1)
    assert outcome.results == ["clip_0"] and outcome.report("clips") == 1
    faults = "\n".join(outcome.faults)
    assert "clip_1.mp4 has 8 frames" in faults and "clip_2.mp4" in faults and "clip_3.mp4" in faults
    assert len(outcome.faults) == 3, "one sentence a clip"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_frames=8), "8 frames cannot be encoded"),
        (dict(size=(30, 48)), r"size=\(30"),
        (dict(windows_per_clip=0), "windows_per_clip=0"),
        (dict(dtype="int8"), "float16, bfloat16, float32"),
        (dict(shard=(2, 2)), "i of n"),
        (dict(decoder="pyva"), "'pyva'"),
    ],
)
def test_wrong_wishes_are_errors(cached: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        cache_latents(cached, TinyTokenizer(), **{**SHAPE, **change})


def test_folders_without_latents_name_the_command(cached: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", (9,))
    with pytest.raises(DataError, match="cache_latents"):
        LatentDataset(str(folder))
    with pytest.raises(DataError, match="There is no folder"):
        LatentDataset(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="num_frames=13"):
        LatentDataset(str(cached), num_frames=13)
    assert problems(LatentDataset, dataset_dir=str(cached)) == []
    assert len(problems(LatentDataset, dataset_dir=str(cached), num_frames=8)) == 1
    assert "cache_latents" in problems(LatentDataset, dataset_dir=str(folder))[0]


def test_the_script_writes_what_training_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_folder(tmp_path / "train")
    arguments = ["--dataset_path", str(folder), "--tokenizer", "tiny", "--num_frames", "9", "--size", "32", "48"]
    args = script.parser.parse_args([*arguments, "--workers", "1", "--device", "cpu"])
    with caplog.at_level("INFO"):
        assert script.run(args) == script.run(args) == 0
    assert "wrote the latents of 3 clips" in caplog.text and "0 of 3 clips are to be encoded" in caplog.text
    assert len(LatentDataset(str(folder), num_tokens=4)) == 3
