# SPDX-License-Identifier: Apache-2.0
"""Episodes of LeRobot data sets as rollouts begin with them: frames and actions are those of training."""

from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import torch

from cosmos_predict2.actions.statistics import column_statistics
from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.pipelines.action_inputs import LeRobotRecordings, dataset_of_run
from cosmos_predict2.world_model.options import Reading
from imaginaire.errors import ConfigError, DataError
from tests.data import sources_lerobot as made

FIXTURES = Path(__file__).resolve().parent.parent / "data" / "fixtures"
TRAINED: dict[str, Any] = dict(camera="front", stride=2, combine_actions="last", video_size=[32, 48], val_fraction=0.5)
TRAINED |= dict(_target_=f"{LeRobotActionDataset.__module__}.LeRobotActionDataset", root="elsewhere", num_frames=4)
OWN, BOTH = controller(3, 2.0), "front+wrist"
pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")


def opened(name: str, **said: Any) -> LeRobotRecordings:
    return LeRobotRecordings.open(
        str(FIXTURES / name), OWN, dataset_of_run({"dataloader_train": {"dataset": TRAINED}}), **said
    )


@pytest.mark.parametrize("name", ["lerobot_v2_1", "lerobot_v3"])
def test_an_episode_is_read_as_the_run_read_it(name: str) -> None:
    recordings = LeRobotRecordings.open(str(FIXTURES / name), OWN, dataset_of_run({"dataloader_train": {"x": TRAINED}}))
    episode = recordings.read(2, Reading(OWN, size=(32, 48), start=1))
    assert (
        episode.frames == [1, 3, 5, 7]
        and episode.fps == made.FPS / 2
        and episode.first_frames_C_F_H_W.shape == (3, 1, 32, 48)
    )
    raw = made.action(2)[[2, 4, 6]].astype(numpy.float64)
    assert torch.equal(episode.actions_L_D, torch.from_numpy(2 * raw).float())
    true = episode.true_frames(4)
    assert episode.has_truth and torch.equal(true[:, :1], episode.first_frames_C_F_H_W)
    assert true.float().mean((0, 2, 3)).tolist() == pytest.approx([made.grey(2, k) for k in episode.frames], abs=5)
    assert "rows of 'action', last of every 2 rows, camera 'observation.images.front'" in episode.source
    assert recordings.chosen([1, 0]) == [1, 0] and len(recordings.chosen([], TRAINED)) == 2


def test_flags_go_before_the_run_and_what_is_no_such_episode_is_told() -> None:
    one = opened("lerobot_v3", camera="wrist", stride=1)
    wrist = one.read(0, Reading(OWN, size=(16, 32), most_actions=4, num_given=5))
    assert wrist.frames == [0, 1, 2, 3, 4] and wrist.first_frames_C_F_H_W.shape == (3, 5, 16, 32)
    assert not wrist.has_truth and "'observation.images.wrist'" in wrist.source
    with pytest.raises(DataError, match=r"--episodes 7: .* from 0 to 2"):
        one.chosen([0, 7])
    with pytest.raises(DataError, match=r"episode_000001: it has 5 frames, of which 0 are left"):
        one.read(1, Reading(OWN, size=(16, 32), start=6))
    with pytest.raises(DataError, match=r"frames of 16x24, but height and width must be multiples of 16"):
        one.read(0, Reading(OWN))
    of_run = LeRobotRecordings.open(str(FIXTURES / "lerobot_v3"), OWN, TRAINED, stride=3)
    assert of_run.data.source.combine == "last"
    with pytest.raises(ConfigError, match=r"With stride 3, .*--combine_actions\) is last for absolute targets"):
        LeRobotRecordings.open(str(FIXTURES / "lerobot_v3"), OWN, camera="front", stride=3)
    with pytest.raises(ConfigError, match="there is no camera 'side'"):
        opened("lerobot_v3", camera="side")
    with pytest.raises(DataError, match=r"trained with relative_pose of 7 numbers"):
        LeRobotRecordings.open(str(FIXTURES / "lerobot_v3"), relative_pose())
    with pytest.raises(DataError, match=r"an action has 3 numbers, .* with 2: --action_key"):
        LeRobotRecordings.open(str(FIXTURES / "lerobot_v3"), controller(2), camera="front")


def test_each_of_two_views_is_brought_to_size_in_given_and_true_frames() -> None:
    two, one = (opened("lerobot_v3", camera=camera).read(2, Reading(OWN, size=(32, 48))) for camera in (BOTH, "wrist"))
    assert two.first_frames_C_F_H_W.shape == (3, 1, 64, 48)
    assert torch.equal(two.first_frames_C_F_H_W[:, :, 32:], one.first_frames_C_F_H_W)
    assert torch.equal(two.true_frames(3)[:, :, 32:], one.true_frames(3))
    with pytest.raises(DataError, match="frames of 24x24, but height and width must be multiples of 16"):
        opened("lerobot_v3", camera=BOTH).read(0, Reading(OWN, size=(24, 24)))


def test_actions_in_other_units_than_those_of_the_weights_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    raw = numpy.concatenate([made.action(episode) for episode in range(3)])
    for factor, is_told in ((1.0, False), (1e-3, True)):  # what the weights were trained with, beside these
        own = attrs.evolve(OWN, stats=column_statistics(raw * factor).to_dict())
        LeRobotRecordings.open(str(FIXTURES / "lerobot_v3"), own, camera="front")
        assert ("lerobot_v3: the raw actions lie in other ranges" in caplog.text) == is_told
