# SPDX-License-Identifier: Apache-2.0
"""The commands of the data recipes, as the pages have them, on miniature sources: a hub on this machine, and a T5 as
wide as the real one where the real one would lie."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_predict2.data.dataset_image import ImageDataset
from cosmos_predict2.data.dataset_video import Dataset
from tests import guides
from tests.checkpoints.hub_server import Hub, serve
from tests.data import sources_agibot, sources_hub_videos
from tests.test_documentation import ROOT, blocks
from tests.text.folders import t5_folder

pytestmark = pytest.mark.slow
PAGES = ROOT / "documentations"
AGIBOT = "datasets/agibot_head_center_fisheye_color"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that looks like a checkout, whose data the guides make; HF_ENDPOINT there is the hub below."""
    folder = guides.linked(tmp_path_factory.mktemp("checkout"), "examples", "assets", "prompts")
    t5_folder(folder / "checkpoints/google-t5/t5-11b", d_model=1024, num_layers=1, d_ff=32)
    (folder / "scratch").mkdir()
    repositories = {
        "agibot-world/AgiBotWorld-Alpha": agibot_repository(),
        "nvidia/GR1-100": sources_hub_videos.groot_files(folder / "scratch"),
        "nvidia/Cosmos-NeMo-Assets": sources_hub_videos.nemo_files(folder / "scratch"),
    }
    with serve(Hub(repositories)) as hub:
        (folder / "endpoint").write_text(hub.url)
        yield folder


def agibot_repository() -> dict[str, bytes]:
    """Two episodes of ten seconds: two windows of five each."""
    files = {}
    for episode in sources_agibot.EPISODES:
        content = sources_agibot.archive(sources_agibot.episode_files((episode,), seconds=10.0))
        files[f"observations/327/{episode}-{episode}.tar"] = content
    return {**files, "task_info/task_327.json": sources_agibot.task_info()}


def needing(page: str) -> list[str]:
    """The blocks of a page that need a network or weights."""
    return [text for language, text in blocks(PAGES / page) if language == "bash" and text.startswith("# needs")]


def follow(checkout: Path, *commands: str, code: int = 0) -> str:
    """Run commands, all of which must end with this exit code; what they printed."""
    hub = dict(HF_ENDPOINT=(checkout / "endpoint").read_text(), HF_HOME=str(checkout / "home"))
    hub |= dict(HF_TOKEN="", HF_HUB_OFFLINE="0")
    return "".join(guides.follow(checkout, f"set -u\n{command}", code, **hub) for command in commands)


def prepared(folder: Path) -> dict[str, bytes]:
    """The visible files of a data set before its captions are encoded."""
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith((".", "metas/", "t5_xxl/"))}


def assert_same_by_hand(checkout: Path, page: str, folder: Path, made: Path) -> None:
    """The page's download by hand and the first command of its recipe give the same data set."""
    recipe, by_hand = needing(page)[:2]
    expected = prepared(folder)
    shutil.rmtree(made)
    follow(checkout, by_hand, recipe.splitlines()[1])
    assert expected and prepared(folder) == expected


def test_the_agibot_guide_from_download_to_samples(checkout: Path) -> None:
    """The page's commands, which are those that published guides print, to the letter."""
    page = "post-training_video2world_agibot_fisheye.md"
    for command in (
        "python scripts/prepare_agibot_fisheye_data.py",
        "python scripts/prepare_agibot_fisheye_data.py --delete-only",
        "python scripts/prepare_agibot_fisheye_data.py --split-only --val_episode_ids 685393",
        "rm -rf datasets/agibot",
        f"PYTHONPATH=$(pwd) python scripts/get_t5_embeddings.py --dataset_path {AGIBOT}/train",
        f"PYTHONPATH=$(pwd) python scripts/get_t5_embeddings.py --dataset_path {AGIBOT}/val",
    ):
        assert f"\n{command}\n" in (PAGES / page).read_text()
    assert "no faults" in follow(checkout, *needing(page)[:2])
    assert not (checkout / "datasets/agibot").exists()  # its last line removes the source
    for split, episode in (("train", "648642"), ("val", "685393")):
        samples = Dataset(str(checkout / AGIBOT / split), 93, (32, 64), text_encoder="t5")
        assert len(samples) == 2
        sample = samples[0]
        assert sample["video"].shape == (3, 93, 32, 64) and sample["fps"] == 30
        assert sample["t5_text_embeddings"].shape == (512, 1024) and sample["t5_text_mask"].sum() > 1
        assert f"episode_{episode}_" in str(sample["video_name"]["video_path"])

    # A published guide then names a clip where it is not.
    name = "task_327_episode_685393_window_0_frame_0-149.mp4"
    assert (checkout / AGIBOT / "val/videos" / name).exists()
    flags = "--model_size tiny --prompt 'The video captures a robot.' --num_conditional_frmaes 1 --save_path out.mp4"
    command = f"python examples/video2world.py {flags} --input_path {AGIBOT}/val/{name}"
    assert f"{AGIBOT}/val/videos/{name}" in follow(checkout, command, code=2)


def test_the_groot_guide(checkout: Path) -> None:
    page = "post-training_video2world_gr00t.md"
    assert "no faults" in follow(checkout, needing(page)[0].replace("--num_frames 93", "--num_frames 9"))
    folder = checkout / "datasets/benchmark_train/gr1"
    samples = Dataset(str(folder), 9, (32, 48), text_encoder="t5")
    assert len(samples) == len(sources_hub_videos.PROMPTS)
    prefix = "The robot arm is performing a task. "
    texts = {path.stem: path.read_text().strip() for path in (folder / "metas").iterdir()}
    assert texts == {name: prefix + prompt for name, prompt in sources_hub_videos.PROMPTS.items()}
    assert_same_by_hand(checkout, page, folder, folder.parent)


@pytest.mark.long
def test_the_nemo_guide(checkout: Path) -> None:
    page = "post-training_video2world_cosmos_nemo_assets.md"
    assert "no faults" in follow(checkout, needing(page)[0].replace("--num_frames 93", "--num_frames 12"))
    folder = checkout / "datasets/cosmos_nemo_assets"
    samples = Dataset(str(folder), 12, (32, 48), text_encoder="t5")
    assert len(samples) == len(sources_hub_videos.NEMO_STEMS)
    assert_same_by_hand(checkout, page, folder, folder)


@pytest.mark.long
def test_the_guide_for_pictures(checkout: Path) -> None:
    (recipe,) = needing("post-training_text2image_cosmos_nemo_assets.md")[:1]
    follow(checkout, recipe.replace("--stride 30", "--stride 5"))
    pictures = ImageDataset(str(checkout / "datasets/cosmos_nemo_assets_images"), (32, 48))
    assert len(pictures) == 3 * len(sources_hub_videos.NEMO_STEMS)
    assert pictures[0]["images"].shape == (3, 32, 48) and re.search(r"_\d{8}\.jpg$", str(sorted(
        (checkout / "datasets/cosmos_nemo_assets_images/images").iterdir())[0]))  # fmt: skip
