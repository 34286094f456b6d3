# SPDX-License-Identifier: Apache-2.0
"""Promises of every data set, whatever its source: the form of a sample, its draws, facts, checks and bad samples."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.actions.transforms import ActionTransform, controller
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import LiberoDataset
from cosmos_predict2.data.clip_dataset import ClipDataset, Source, Text, Windows
from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.dataset_latents import LatentDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.mock import MockImages, MockVideos
from cosmos_predict2.data.shards.dataset_shards import ShardedVideos
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.clips import Clip, open_clip
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tools.prepare.latent_cache import cache_latents
from imaginaire.data.facts import facts_of
from imaginaire.data.stream import DataStream, ResumableLoader
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, DataError
from tests.data import sources_lerobot
from tests.data.sources_bridge import bridge_tree
from tests.data.sources_libero import libero_tree
from tests.data.test_shards import members_of, write_shard
from tests.data.video_files import moving_pictures, same, video_folder
from tests.findings import problems

SIZE = (16, 32)
SMALL: dict[str, Any] = dict(num_frames=5, video_size=SIZE)


class Mine(Source):
    """The source of `clip_dataset`'s docstring, with lengths, actions and captions."""

    action_form = {"kind": "controller"}

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*.mp4"))
        self.lengths = [20 for _ in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        return open_clip(self.paths[i])

    def text(self, i: int, frame: int) -> Text:
        return Text(f"clip {i} from frame {frame}")

    def actions(self, i: int, frames: numpy.ndarray) -> numpy.ndarray:
        return numpy.stack([frames[:-1] / 20, numpy.ones(len(frames) - 1)], axis=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of every form."""
    root = tmp_path_factory.mktemp("sources")
    folder = video_folder(root / "video", dict.fromkeys("abc", 20))
    cache_latents(folder, TinyTokenizer(), num_frames=5, size=SIZE)
    write_shard(root / "shards/0.tar", members_of(folder, "abc"))
    shutil.copytree(folder / "t5_xxl", root / "image/t5_xxl")
    for stem, picture in zip("abc", moving_pictures(3), strict=True):
        (root / "image/images").mkdir(exist_ok=True)
        write_picture(root / f"image/images/{stem}.png", picture)
    bridge_tree(root / "bridge", episodes={"train": 3}, cameras=2)
    sources_lerobot.write_v2(root / "lerobot")
    libero_tree(root / "libero")
    return root


def write_picture(path: Path, picture: numpy.ndarray) -> None:
    from PIL import Image

    Image.fromarray(picture).save(path)


# class, arguments but the place, the argument of the place, the file of the second recording, its keys beside the usual
KINDS: dict[str, tuple[type, dict[str, Any], str, str, set[str]]] = {
    "folder": (Dataset, SMALL, "dataset_dir:video", "video/videos/b.mp4", {"video", "video_name"}),
    "latents": (LatentDataset, {}, "dataset_dir:video", "video/latents/b.safetensors",
                {"latents", "latent_probe", "video_name"}),
    "image": (ImageDataset, dict(image_size=SIZE), "dataset_dir:image", "image/images/b.png", {"images", "image_name"}),
    "shards": (ShardedVideos, SMALL, "shards:shards/0.tar", "", {"video", "video_name"}),
    "bridge": (ActionConditionedDataset, SMALL | dict(cam_ids=[0, 1]), "bridge", "bridge/videos/train/1", set()),
    "lerobot": (LeRobotActionDataset, SMALL | dict(camera="front", data_split="full"), "root:lerobot",
                f"lerobot/videos/chunk-000/{sources_lerobot.FRONT}/episode_000001.mp4", set()),
    "libero": (LiberoDataset, SMALL | dict(cameras=["agentview_rgb", "eye_in_hand_rgb"]), "root:libero", "", set()),
    "mine": (ClipDataset, SMALL | dict(text_width=4), "source:video/videos", "video/videos/b.mp4",
             {"video", "video_name", "action", "action_transform"}),
    "toy": (ToyWorldVideos, dict(num_episodes=3, num_frames=5), "", "",
            {"video", "video_name", "action", "action_transform"}),
    "mock": (MockVideos, SMALL | dict(num_items=3), "", "", {"video"}),
    "mock_images": (MockImages, dict(num_items=3, image_size=SIZE), "", "", {"images"}),
}  # fmt: skip
OF_ROBOTS = {"video", "video_name", "action", "action_transform", "__key__", "annotation_file"}
USUAL = {"t5_text_embeddings", "t5_text_mask", "fps", "num_frames", "image_size", "padding_mask"}
each = pytest.mark.parametrize("kind", KINDS)


def arguments_of(kind: str, root: Path) -> dict[str, Any]:
    _, own, place, _, _ = KINDS[kind]
    if place == "bridge":
        return own | dict(train_annotation_path=str(root / "bridge/annotation/train"), video_path=str(root / "bridge"))
    key, _, below = place.partition(":")
    value: Any = str(root / below)
    if key == "shards":
        own, value = own | dict(index_dir=str(root / "index")), [value]
    return own | ({key: Mine(value) if key == "source" else value} if key else {})


def made(kind: str, root: Path, **changes: Any) -> Any:
    return KINDS[kind][0](**arguments_of(kind, root) | changes)


@each
def test_a_sample_has_these_keys_and_types(kind: str, root: Path) -> None:
    item = made(kind, root)[0]
    wanted = USUAL | (KINDS[kind][4] or OF_ROBOTS)
    assert wanted <= item.keys() and ("action" in item) == ("action" in wanted)
    text, mask = item["t5_text_embeddings"], item["t5_text_mask"]
    assert text.dtype == torch.float32 and text.ndim == 2 and mask.dtype == torch.int64 and mask.shape == text.shape[:1]
    height, width = item["image_size"].tolist()[:2]
    assert item["image_size"].tolist() == [height, width] * 2 and item["image_size"].dtype == torch.int64
    assert torch.equal(item["padding_mask"], torch.zeros(1, height, width))
    if "video" in item:
        assert item["video"].dtype == torch.uint8 and item["video"].shape == (3, 5, height, width)
        assert item["num_frames"] == 5 and isinstance(item["fps"], float)
    if "action" in item:
        assert item["action"].dtype == torch.float32 and len(item["action"]) == 4
        assert ActionTransform.from_json(item["action_transform"]).dim == item["action"].shape[1]
    if "video_name" in item:
        assert set(item["video_name"]) >= {"video_path", "t5_embedding_path"}


@each
def test_a_sample_follows_from_its_index_and_numpys_generator(kind: str, root: Path) -> None:
    dataset, again = made(kind, root), made(kind, root)
    drawn: list[Any] = []
    for data in (dataset, again):
        numpy.random.seed(1)
        drawn.append([data[i] for i in (0, len(data) - 1)])
    assert all(map(same, *drawn)) and all(same(dataset[-1].keys(), one.keys()) for one in drawn[0][:1])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@each
def test_facts_are_known_before_it_is_built_and_never_raise(kind: str, root: Path) -> None:
    target, arguments = KINDS[kind][0], arguments_of(kind, root)
    if kind == "mine":
        arguments["source"] = dict(_target_=Mine, folder="")
        assert facts_of(dict(_target_=target)).kind == "ClipDataset"
    facts = facts_of(dict(_target_=target, **arguments))
    item = made(kind, root)[0]
    assert facts.kind and facts.num_true_frames is None
    if kind != "mine":  # whose class declares nothing
        assert facts.has_actions is ("action" in item)
        assert facts_of(dict(_target_=target, num_frames="x", dataset_dir=3, root=3)).kind == facts.kind
    if facts.action_dim is not None:
        assert facts.action_dim == item["action"].shape[1]
    if facts.rate is not None and "action" not in item:
        assert facts.rate == pytest.approx(item["fps"])


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if hasattr(row[0], "check")])
def test_the_check_finds_wrong_sizes_and_nothing_where_all_is_right(kind: str, root: Path) -> None:
    target, arguments = KINDS[kind][0], arguments_of(kind, root)
    assert problems(target, **arguments) == []
    for name in ("video_size", "image_size"):
        if name in arguments:
            assert f"{name}=[30, 32]" in problems(target, **arguments | {name: [30, 32]})[0]
            with pytest.raises(ConfigError, match="multiples of 16"):
                made(kind, root, **{name: [30, 32]})


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row[3]])
def test_a_broken_recording_is_named_or_replaced_by_the_next(
    kind: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(shutil.copytree(root, tmp_path / "own"))
    strict, lenient = made(kind, place), made(kind, place, skip_bad_samples=True)
    last = len(strict) - 1
    keys = [str(strict[i].get("__key__", i)) for i in range(len(strict))]
    second = next(i for i, key in enumerate(keys) if key != keys[0]) if kind != "mine" else 16
    for path in [place / KINDS[kind][3], *(place / KINDS[kind][3]).glob("*")]:
        if path.is_file():
            path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"(/1/rgb|episode_000001|b\.\w+).*skip_bad_samples=True"):
        strict[second]
    numpy.random.seed(0)
    skipped = lenient[second]
    assert "1 so far" in caplog.text and skipped.keys() == lenient[last].keys()
    named = str(skipped.get("video_name") or skipped["image_name"])
    assert "b." not in named and "/1/" not in named and "episode_000001" not in named


@pytest.mark.parametrize("kind", ["folder", "shards", "lerobot", "libero"])
def test_a_loader_resumes_at_its_place_with_any_workers(kind: str, root: Path) -> None:
    def batches(num: int, workers: int, state: Any = None) -> tuple[list[Any], Any]:
        loader = ResumableLoader(made(kind, root), batch_size=2, num_workers=workers)
        stream = DataStream(loader, 7, ParallelDims())
        stream.load_state_dict(state or {})
        read: Iterator[Any] = iter(stream)
        return [next(read) for _ in range(num)], stream.state_dict()

    (whole, _), (_, middle) = batches(4, 0), batches(2, 1)
    assert all(map(same, batches(2, 0, middle)[0], whole[2:]))
    assert whole[0]["video"].shape == (2, 3, 5, *SIZE)


@pytest.mark.parametrize("kind", ["bridge", "libero"])
def test_of_several_cameras_one_is_drawn_in_training_and_else_they_take_turns(kind: str, root: Path) -> None:
    numpy.random.seed(0)
    assert len({made(kind, root)[0]["video_name"]["video_path"] for _ in range(12)}) == 2
    turns = made(kind, root, **({"do_evaluate": True} if kind == "bridge" else {"mode": "all"}))
    paths = [turns[i % 2]["video_name"]["video_path"] for i in range(6)]
    assert len(set(paths[::2])) == len(set(paths[1::2])) == 1 and paths[0] != paths[1]


@pytest.mark.parametrize("kind", ["folder", "shards", "bridge", "libero"])
def test_an_index_of_many_recordings_holds_no_list_of_them(kind: str, root: Path) -> None:
    own = vars(made(kind, root).source)
    held = [value for name, value in own.items() if isinstance(value, list | dict) and name != "form"]
    assert not [value for value in held if len(value) > 2], "workers would copy it object by object"


def test_a_source_of_ones_own_has_windows_text_and_actions(root: Path) -> None:
    data = made("mine", root, stride=2, fps=4)
    assert len(data) == 3 * (20 - 8) and data[13]["ai_caption"] == "clip 1 from frame 1"
    assert data.action_transform.proposed and not data[0]["t5_text_embeddings"].any()
    raw = data.action_transform.undo(data[13]["action"])
    assert numpy.allclose(raw[:, 0], numpy.array([1, 3, 5, 7]) / 20) and data[13]["fps"] == 4
    given = made("mine", root, action_transform=controller(2, 2.0).to_dict(), sampling="random")
    assert len(given) == 3 and given.action_transform.scale == (2.0, 2.0) and given[0]["fps"] == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mine: setattr(mine, "lengths", None), "sampling=every needs the lengths .* but Mine has no lengths"),
        (lambda mine: setattr(mine, "actions", lambda i, frames: numpy.ones((2, 2))), r"actions \[2, 2\] for 5 frames"),
    ],
)
def test_a_source_that_breaks_its_contract_is_an_error(
    change: Callable[[Mine], None], message: str, root: Path
) -> None:
    mine = Mine(str(root / "video/videos"))
    change(mine)
    with pytest.raises((ConfigError, DataError), match=message):
        ClipDataset(mine, **SMALL, action_transform=controller(2))[0]


# ---- windows -------------------------------------------------------------------------------------------------------


def test_no_recordings_are_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="0 recordings"):
        Windows([], 5, stride=2, what="x")


@pytest.mark.parametrize("every", [1, 2])
def test_chosen_windows_are_of_all_recordings_and_overlap_only_where_there_are_too_few(every: int) -> None:
    lengths = [60, 9, 10, 33, 200]
    windows = Windows(lengths, 5, stride=2, every=every, what="x")  # of 9 frames each
    apart = sum(1 + (length - 9) // every * every // (9 + (every - 1)) for length in lengths)
    assert windows.num_recordings == 5 and windows.num_apart == apart
    for num in (1, 3, 5, 12, windows.num_apart, len(windows), 9999):
        chosen = windows.spread(num)
        assert len(chosen) == len(set(chosen)) == min(num, len(windows)) and chosen == sorted(chosen)
        places = [(recording, int(frames[0])) for recording, frames in map(windows.__getitem__, chosen)]
        assert len({recording for recording, _ in places}) == min(num, 5)
        gaps = [b[1] - a[1] for a, b in pairwise(places) if a[0] == b[0]]
        assert (min(gaps, default=9) >= 9) == (num <= windows.num_apart)
