# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStarts
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from imaginaire.errors import ConfigError, DataError


def _frame(number: int, **others) -> dict:
    rng = numpy.random.default_rng(number)
    return {
        "image": rng.integers(0, 255, (16, 24, 3), dtype=numpy.uint8),
        "instruction": f"task {number % 2}",
        "delta_action": rng.standard_normal(7).astype(numpy.float32),
        "init_ee_pose": rng.standard_normal(8).astype(numpy.float32),
        **others,
    }


def _save(path: Path, frames: list[dict]) -> list[dict]:
    array = numpy.empty(len(frames), dtype=object)
    array[:] = frames
    numpy.save(path, array, allow_pickle=True)
    return frames


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(4):
        _save(tmp_path / f"traj{i}.npy", [_frame(i)])
    return tmp_path


def test_the_toy_worlds_starts_are_those_of_its_simulator() -> None:
    for split, setting in (("train", "default"), ("val", "covered")):
        options = {"trial_ids": [0, 7, 3], "task_ids": [0, 1, 1]}
        arguments = dict(tasks=("push_puck", "carry_box"), setting=setting, split=split, seed=2)
        observed, info = ToyEnv(3, **arguments).reset(options=options)
        starts = ToyStarts(**arguments).starts(options["task_ids"], options["trial_ids"])
        assert torch.equal(starts.pictures_E_F_H_W_C[:, 0], observed["full_image"])
        assert starts.task_description == observed["task_description"]
        assert torch.equal(starts.context["goal"], info["goal"])


def test_published_files_are_converted_once_and_read_by_task_and_trial(folder: Path) -> None:
    starts = RecordedStarts(str(folder))
    assert (folder / FILE).is_file() and len(starts) == 4 and starts.num_tasks == 2
    first = starts.starts([0, 1, 1, 0], [0, 0, 1, 2])
    assert first.task_description == ["task 0", "task 1", "task 1", "task 0"] and first.actions_E_A_D is None
    for row, number in enumerate([0, 1, 3, 0]):  # trials are modulo those of the task
        frame = _frame(number)
        assert numpy.array_equal(first.pictures_E_F_H_W_C[row, 0], frame["image"])
        assert numpy.array_equal(first.context["init_ee_pose"][row], frame["init_ee_pose"])
    written = (folder / FILE).stat().st_mtime_ns
    RecordedStarts(str(folder))
    assert (folder / FILE).stat().st_mtime_ns == written
    _save(folder / "traj9.npy", [_frame(9)])
    assert len(RecordedStarts(str(folder))) == 5
    assert RecordedStarts(str(folder), by_task=False).starts([3], [4]).task_description == ["task 1"]


def test_keyframe_files_give_the_first_picture_and_the_last_four_with_their_actions(folder: Path) -> None:
    frames = _save(folder / "traj0_kir.npy", [_frame(2 * i) for i in range(9)])
    starts = RecordedStarts(str(folder), history=5)
    assert len(starts) == 5 and len(RecordedStarts(str(folder), keyframes=False)) == 4
    trial = ["traj0", "traj0_kir", "traj2"].index("traj0_kir")  # of the first task, by name
    found = starts.starts([0], [trial])
    expected = [frames[0], *frames[-4:]]
    assert numpy.array_equal(found.pictures_E_F_H_W_C[0], numpy.stack([frame["image"] for frame in expected]))
    assert numpy.array_equal(found.actions_E_A_D[0], numpy.stack([frame["delta_action"] for frame in frames[-4:]]))
    alone = RecordedStarts(str(folder)).starts([0], [trial])
    assert numpy.array_equal(alone.pictures_E_F_H_W_C[0, 0], frames[-1]["image"])
    other = starts.starts([0], [0])
    assert (other.pictures_E_F_H_W_C == other.pictures_E_F_H_W_C[:, :1]).all() and not other.actions_E_A_D.any()


def test_the_actions_of_a_start_do_not_depend_on_those_it_is_asked_with(folder: Path) -> None:
    _save(folder / "traj0_kir.npy", [_frame(2 * i) for i in range(9)])
    bare = _frame(8)
    del bare["delta_action"]
    _save(folder / "traj8.npy", [bare])
    starts = RecordedStarts(str(folder), history=5)
    alone, beside = starts.starts([0], [1]), starts.starts([0, 0], [1, 3])
    assert starts.starts([0], [3]).actions_E_A_D is None and alone.actions_E_A_D.any()
    assert torch.equal(beside.actions_E_A_D[:1], alone.actions_E_A_D) and not beside.actions_E_A_D[1].any()


def test_what_only_some_starts_have_is_known_of_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(folder / "traj7.npy", [_frame(7, init_ee_pose=None)])
    starts = RecordedStarts(str(folder))
    assert starts.starts([0, 0], [0, 1]).context == {} and "not all starts have init_ee_pose" in caplog.text


def test_pictures_are_stretched_to_a_size_and_need_one_where_they_differ(folder: Path) -> None:
    assert RecordedStarts(str(folder), size=(8, 32)).starts([0], [0]).pictures_E_F_H_W_C.shape == (1, 1, 8, 32, 3)
    _save(folder / "traj5.npy", [_frame(5, image=numpy.zeros((8, 8, 3), numpy.uint8))])
    starts = RecordedStarts(str(folder))
    with pytest.raises(DataError, match=r"traj5.*size"):
        starts.starts([1, 1], [0, 2])


class _Harm:
    def __reduce__(self):
        return os.mkdir, ("/tmp/never",)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([_Harm()], "posix.mkdir"),
        ([_frame(0, image=numpy.zeros((4, 4), numpy.uint8))], "image of frame 0"),
        ([_frame(0, instruction=None)], "instruction"),
        ([3], "dictionaries"),
    ],
)
def test_files_that_are_not_reset_states_are_refused_by_name(tmp_path: Path, content: list, word: str) -> None:
    _save(tmp_path / "traj0.npy", content)
    with pytest.raises(DataError, match=f"traj0.npy.*{word}"):
        RecordedStarts(str(tmp_path))
    assert not (tmp_path / FILE).exists()


def test_wrong_places_and_arguments_are_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.*make_reset_states"):
        RecordedStarts(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="history=4"):
        RecordedStarts(str(folder), history=4)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(DataError, match=r"broken.safetensors"):
        RecordedStarts(str(tmp_path / "broken.safetensors"))
    _save(folder / "traj8_kir.npy", [_frame(0)] * 3)
    with pytest.raises(DataError, match=r"traj8_kir.npy has 3 frames"):
        RecordedStarts(str(folder))
