# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.views: several cameras of a recording are one picture, the same in every reader."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.checkpoints.card import ModelCard, _of_run, _typed, card_texts
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import LiberoDataset
from cosmos_predict2.data.action_conditioned.recorded_episodes import open_episodes, read_windows
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.video.clips import stretch
from cosmos_predict2.data.views import require_same, split, views_of, views_of_data
from cosmos_predict2.evaluation.metrics.imagined_chunks import by_chunk
from cosmos_predict2.evaluation.reports.action_evaluation import _of_views
from cosmos_predict2.models.video2world_model import weight_of_views
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.errors import ConfigError, DataError
from tests.data import sources_lerobot as made
from tests.data.sources_lerobot import FRONT, WRIST
from tests.data.sources_libero import libero_tree
from tests.models.parts import make_batch, make_model

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
BOTH = "front+wrist"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_v2(tmp_path_factory.mktemp("views") / "set", modality=True)


def test_a_picture_of_two_cameras_holds_the_pictures_of_each(root: Path) -> None:
    source = LeRobotSource.open(root)
    key, fit = source.camera(BOTH), partial(stretch, size=(32, 48))
    assert key == f"{FRONT}+{WRIST}" and source.camera("ego_view+wrist") == key
    found = split(source.frames(1, key, [0, 3], fit=fit), 2)
    for view, camera in zip(found, (FRONT, WRIST), strict=True):
        assert torch.equal(view, source.frames(1, camera, [0, 3], fit=fit))
    native = source.frames(1, key, [0, 3])  # the second in the size of the first
    assert native.shape == (3, 2, 128, 64) and torch.equal(native[:, :, :64], source.frames(1, FRONT, [0, 3]))


def test_every_reader_of_recordings_shows_the_same_views(root: Path) -> None:
    shape = dict(num_frames=4, video_size=(32, 48), data_split="full")
    data, one = (LeRobotActionDataset(str(root), camera, **shape) for camera in (BOTH, "front"))  # type: ignore[arg-type]
    item, alone = data[3], one[3]
    assert item["video"].shape == (3, 4, 64, 48) and torch.equal(item["video"][:, :, :32], alone["video"])
    assert torch.equal(item["action"], alone["action"]) and item["__key__"] == alone["__key__"]
    episodes = open_episodes(root, camera=BOTH)
    windows = read_windows(episodes, [0], num=1, num_frames=4, size=(32, 48), num_views=2)
    shown = torch.from_numpy(windows.pictures[0]).permute(3, 0, 1, 2)
    assert shown.shape == data[0]["video"].shape and torch.equal(shown[:, :, :32], data[0]["video"][:, :, :32])
    assert read_windows(episodes, [0], num=1, num_frames=4, num_views=2).pictures.shape[2:4] == (128, 64)


def test_views_of_libero_are_one_of_the_cameras_that_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="needs h5py: pip install -e '.[data]'")
    libero_tree(tmp_path, num_demos=2)
    arguments = dict(num_frames=5, video_size=(16, 16), mode="all")
    both = LiberoDataset(str(tmp_path), cameras=["agentview_rgb+eye_in_hand_rgb"], **arguments)  # type: ignore[arg-type]
    for camera, view in zip(("agentview_rgb", "eye_in_hand_rgb"), split(both[0]["video"], 2), strict=True):
        assert torch.equal(view, LiberoDataset(str(tmp_path), cameras=[camera], **arguments)[0]["video"])  # type: ignore[arg-type]
    episode = open_episodes(tmp_path, camera="agentview_rgb+eye_in_hand_rgb")[0]
    assert numpy.array_equal(episode.pictures([0])[0], both[0]["video"][:, 0].permute(1, 2, 0).numpy())
    with pytest.raises(ConfigError, match="is no LeRobot data set, of which embodiment and units are"):
        open_episodes(tmp_path, units="degrees")
    with pytest.raises(ConfigError, match="as many views each"):
        LiberoDataset(str(tmp_path), cameras=["agentview_rgb+eye_in_hand_rgb", "agentview_rgb"], **arguments)  # type: ignore[arg-type]


def test_a_recording_that_lacks_a_camera_is_named_with_what_it_has(tmp_path: Path) -> None:
    root = made.write_v2(tmp_path / "set")
    source = LeRobotSource.open(root)
    source.file_of(1, FRONT).unlink()
    for read in (
        lambda: source.frames(1, source.camera("wrist+front"), [0]),
        lambda: LeRobotActionDataset(str(root), "wrist+front", num_frames=4, data_split="full"),
    ):
        with pytest.raises(DataError, match=f"episode_000001 has no {FRONT}, but {WRIST}"):
            read()
    with pytest.raises(ConfigError, match=r"there is no camera 'side'.*front"):
        source.camera("front+side")
    for wrong in ("front+front", "front+", "ego_view+front"):
        with pytest.raises(ConfigError, match="names of different cameras"):
            LeRobotSource.open(made.write_v2(tmp_path / f"m{wrong}", modality=True)).camera(wrong)


def test_cameras_of_bridge_are_views_by_their_numbers(tmp_path: Path) -> None:
    write_folder(str(tmp_path), ToyFolder(episodes=3, frames=15, form="bridge", action_dim=4))
    folder = next(tmp_path.glob("annotation/train"))
    videos: list[Any] = []
    for path in sorted(tmp_path.glob("annotation/*/*.json")):  # the second camera of each shows the recording before it
        content = json.loads(path.read_text())
        videos += content["videos"]
        path.write_text(json.dumps({**content, "videos": [videos[-1], videos[-2 if len(videos) > 1 else -1]]}))
    place: dict[str, Any] = dict(train_annotation_path=str(folder), video_path=str(tmp_path), num_frames=5)
    data = ActionConditionedDataset(**place, video_size=(48, 48), cam_id="0+1")
    for camera, view in enumerate(split(data[15]["video"], 2)):
        assert torch.equal(view, ActionConditionedDataset(**place, video_size=(48, 48), cam_id=camera)[15]["video"])
    assert data.source.num_cameras == 1 and views_of_data(dict(cam_id="0+1")) == ("0", "1")
    episode = open_episodes(tmp_path, camera="0+1")[1]
    assert episode.pictures([0]).shape == (1, 96, 48, 3)
    with pytest.raises(ConfigError, match=r"cam_id='front\+1': numbers"):
        ActionConditionedDataset(**place, video_size=(48, 48), cam_id="front+1")


def test_what_an_episode_does_not_show_is_black_and_masked_in_training_alone(tmp_path: Path) -> None:
    root = made.write_v2(tmp_path / "set")
    whole = LeRobotActionDataset(str(root), "wrist+front", num_frames=4, video_size=(32, 48), data_split="full")
    source, before = LeRobotSource.open(root), [*whole]
    source.file_of(1, FRONT).unlink()
    shape: dict[str, Any] = dict(num_frames=4, video_size=(32, 48), missing_cameras="mask")
    masked = LeRobotActionDataset(str(root), "wrist+front", **shape, data_split="full")
    assert len(masked) == len(whole) and masked.recordings.tolist() == whole.recordings.tolist()
    for k, item in enumerate(masked):
        wrist, front = split(item["video"], 2)
        lacks = masked.windows[k][0] == 1
        assert item["shown"].tolist() == [1.0, 0.0 if lacks else 1.0]
        assert torch.equal(wrist, split(before[k]["video"], 2)[0])
        assert torch.equal(front, torch.zeros_like(front) if lacks else split(before[k]["video"], 2)[1])
    held_out = LeRobotActionDataset(str(root), "wrist+front", **shape, data_split="val", val_fraction=0.9)
    assert 1 not in held_out.recordings.tolist() and len(held_out.recordings)
    source.file_of(1, WRIST).unlink()
    with pytest.raises(DataError, match=r"episode_000001 has no .*, but none"):
        LeRobotActionDataset(str(root), "wrist+front", **shape, data_split="full")
    skipped = LeRobotActionDataset(str(root), "wrist+front", **shape, data_split="full", skip_bad_samples=True)
    assert skipped.recordings.tolist() == [i for i in whole.recordings.tolist() if i != 1]
    with pytest.raises(ConfigError, match="missing_cameras is 'black'"):
        LeRobotActionDataset(str(root), "wrist+front", num_frames=4, missing_cameras="black")


def test_no_error_counts_where_nothing_was_filmed() -> None:
    model, batch = make_model(), make_batch(2, positions=[0, 1])
    shown = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    plain, masked = (model.training_step(one, 0)[0] for one in (batch, {**batch, "shown": shown}))
    error = (plain["x0_pred"] - plain["x0"]).square()
    weight = weight_of_views(shown, error.shape[3])
    assert weight[:, 0, 0, :, 0].tolist() == [[1.0] * 4, [2.0, 2.0, 0.0, 0.0]]
    assert torch.allclose(masked["edm_loss_per_frame"][0], plain["edm_loss_per_frame"][0])
    assert not torch.allclose(masked["edm_loss_per_frame"][1], plain["edm_loss_per_frame"][1])
    other = {**batch, "video": batch["video"].clone(), "shown": shown}
    other["video"][1, :, :, 16:] = 255 - other["video"][1, :, :, 16:]
    other_seen = model.training_step(other, 0)[0]
    assert torch.equal(other_seen["edm_loss_per_frame"][0], masked["edm_loss_per_frame"][0])
    with pytest.raises(DataError, match="do not hold 3 views"):
        model.training_step({**batch, "shown": torch.ones(2, 3)}, 0)


def test_a_run_records_its_views_and_so_do_exported_weights() -> None:
    node = {"camera": f"{FRONT}+{WRIST}", "video_size": [32, 48]}
    found = _typed(_of_run({"dataloader_train": {"dataset": node}}, {}), "run")
    assert found["views"] == ("front", "wrist") and found["video_size"] == (32, 48)
    card = ModelCard(views=found["views"])
    assert '"views":["front","wrist"]' in card_texts(card)["model_card"] and not card_texts(ModelCard())
    assert "views" not in _typed(_of_run({"dataloader_train": {"dataset": {"camera": "front"}}}, {}), "run")


def test_one_view_and_two_do_not_fit_and_order_counts() -> None:
    require_same(views_of("front"), views_of(None), "the run", "the policy", "")
    for other in ("front", "wrist+front", None):
        with pytest.raises(ConfigError, match=r"the run has 2 views \(front\+wrist\), but the policy .* clone it anew"):
            require_same(views_of(BOTH), views_of(other), "the run", "the policy", "clone it anew")


def test_keys_that_end_alike_are_two_views_in_an_order() -> None:
    left, right = "observation.images.left.rgb", "observation.images.right.rgb"
    with pytest.raises(ConfigError, match="clone it anew"):
        require_same(views_of(f"{left}+{right}"), views_of(f"{right}+{left}"), "the run", "the policy", "clone it anew")


def test_figures_are_given_of_each_view_and_together() -> None:
    truth = torch.randint(0, 255, (2, 3, 5, 32, 16), dtype=torch.uint8)
    imagined = truth.clone()
    imagined[..., 16:, :] //= 2
    found = _of_views(partial(by_chunk, chunk=4), imagined, truth, ("front", "wrist"))
    assert found["PSNR, front"] == [100.0] and found["PSNR, wrist"][0] < found["PSNR"][0] < 100
    assert "PSNR, front" not in _of_views(partial(by_chunk, chunk=4), imagined, truth, ("",))
