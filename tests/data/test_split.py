# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.split import PARTS, make_split, read_split, recorded_outcomes, write_split
from cosmos_predict2.pipelines.evaluation_data import read_recordings
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.policies.cloning import recorded_demonstrations
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, write_classifier
from imaginaire.errors import DataError
from scripts import make_reset_states, split_recordings
from tests.programs import call

LENGTH = 3


def written(folder: Path, outcomes: list[bool], **changes: Any) -> Path:
    """Episodes with these outcomes, the first half of them of another task."""
    writer = Writer(folder, 10.0)
    for i, outcome in enumerate(outcomes):
        writer.add(recording(i, outcome, f"task {2 * i // len(outcomes)}", **changes))
    writer.finish()
    return folder


def recording(number: int, outcome: bool, task: str, **changes: Any) -> Recording:
    success = numpy.zeros(LENGTH, dtype=numpy.float32)
    success[1] = outcome  # not on the last frame
    action = numpy.full((LENGTH, 2), number, dtype=numpy.float32)
    columns = {"action": action, "next.success": success, **changes.get("columns", {})}
    cameras = [f"observation.images.{name}" for name in changes.get("cameras", ("front",))]
    return Recording(columns, {camera: torch.zeros(3, LENGTH, 16, 16, dtype=torch.uint8) for camera in cameras}, task)


def rewritten(folder: Path, episode: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / f"data/chunk-000/episode_{episode:06d}.parquet"
    table = pyarrow.parquet.read_table(path)
    content = table.to_pydict()
    change(content)
    pyarrow.parquet.write_table(pyarrow.table(content, schema=table.schema), path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("recordings") / "mixed", [i % 3 == 0 for i in range(36)])


def test_every_episode_is_in_one_part_and_both_outcomes_in_each(mixed: Path, tmp_path: Path) -> None:
    split = make_split(mixed, held_out=0.3, seed=1)
    assert sorted((*split.train, *split.calibrate, *split.test)) == list(range(36))
    assert split.held_out == tuple(sorted((*split.calibrate, *split.test)))
    assert split.outcomes == tuple(i % 3 == 0 for i in range(36))
    counts = {part: (split.count(part, True), split.count(part, False)) for part in PARTS}
    assert counts == {"train": (8, 17), "calibrate": (2, 4), "test": (2, 3)}
    for outcome in (True, False):
        early = sum(i < 18 for i in split.held_out if split.outcomes[i] is outcome)
        assert 2 * early == pytest.approx(split.count("held_out", outcome), abs=1)  # half of them of each task
    assert make_split(mixed, seed=1) == split != make_split(mixed, seed=2)
    write_split(tmp_path / "split.json", split)
    assert read_split(tmp_path / "split.json") == split
    split.require(LeRobotSource.open(mixed))


def test_what_is_not_recorded_is_unknown_and_never_held_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "gaps", [i < 8 for i in range(16)])
    rewritten(folder, 9, lambda columns: columns.update({"next.success": [0.0, 0.0, None]}))
    rewritten(folder, 3, lambda columns: columns.update({"next.success": [None, 1.0, None]}))
    rewritten(folder, 10, lambda columns: columns.update({"next.success": [float("nan")] * 3}))
    outcomes = recorded_outcomes(LeRobotSource.open(folder), "next.success")
    assert outcomes == [True] * 8 + [False, None, None] + [False] * 5
    split = make_split(folder)
    assert {9, 10} <= set(split.train) and split.count("train", None) == 2
    last = recorded_outcomes(LeRobotSource.open(folder), "next.success", last=True)
    assert last[0] is False and last[3] is None and last[9] is None


def test_episodes_that_are_added_leave_the_others_in_their_parts(mixed: Path, tmp_path: Path) -> None:
    before, folder = make_split(mixed), tmp_path / "more"
    outcomes = [i % 3 == 0 for i in range(36)] + [i % 2 == 0 for i in range(11)]
    writer = Writer.after(Path(shutil.copytree(mixed, folder)))
    for i, outcome in enumerate(outcomes[36:]):
        writer.add(recording(40 + i, outcome, "task 9"))
    writer.finish()
    split = make_split(folder, before=before)
    for part in PARTS:
        assert tuple(i for i in split.of(part) if i < 36) == before.of(part)
        assert any(i >= 36 for i in split.of(part))
    assert split.outcomes == tuple(outcomes) and len(split.held_out) - len(before.held_out) == 4
    split.require(LeRobotSource.open(folder))
    other = written(tmp_path / "other", [True, False] * 20)
    for folder in (other, written(tmp_path / "short", [True, False] * 8)):
        with pytest.raises(DataError, match="does not begin with the 36 episodes"):
            make_split(folder, before=before)


def test_programs_take_their_part_of_a_split(mixed: Path, tmp_path: Path) -> None:
    split, out = make_split(mixed), tmp_path / "starts"
    file = str(tmp_path / "split.json")
    write_split(file, split)
    for data_split, numbers in (("train", split.train), ("val", split.calibrate), ("test", split.test)):
        data = LeRobotActionDataset(
            str(mixed), num_frames=2, video_size=(16, 16), data_split=data_split, split_file=file, text_width=8
        )
        assert tuple(data.recordings.tolist()) == numbers
    held_out = read_recordings(
        str(mixed), controller(2, scale=1.0), num=9, num_actions=1, size=(16, 16), split_file=file
    )
    assert {int(name.split("_")[1]) for name in held_out.origins} == set(split.test)
    cloned = recorded_demonstrations(mixed, split_file=file)
    assert [int(rows[0, 0]) for rows in cloned.actions] == list(split.successes("train"))
    assert call(make_reset_states, "--dataset", mixed, "--split", file, "--out", out) == 0
    starts = RecordedStarts(str(out), by_task=False)
    assert starts.split == split.digest
    assert tuple(starts.numbers("train")) == split.train
    assert tuple(starts.numbers("held_out")) == split.held_out
    for part, numbers in (("held_out", split.held_out), ("test", split.test)):
        alone = RecordedStarts(str(out), part=part)
        assert {int(name.split("_")[1]) for name in alone.names.values()} == set(numbers)
    assert call(make_reset_states, "--dataset", mixed, "--out", tmp_path / "whole") == 0
    with pytest.raises(DataError, match="no starts of the part 'test'"):
        RecordedStarts(str(tmp_path / "whole"), part="test")


def test_a_split_of_other_recordings_is_refused(mixed: Path, tmp_path: Path) -> None:
    split = make_split(mixed)
    fewer = written(tmp_path / "fewer", [True] * 4)
    with pytest.raises(DataError, match="has 4 episodes, but the split is of 36"):
        split.require(LeRobotSource.open(fewer))
    other = written(tmp_path / "other", [i % 3 == 1 for i in range(36)])
    with pytest.raises(DataError, match="other numbers in them"):
        split.require(LeRobotSource.open(other))
    write_split(tmp_path / "split.json", split)
    content = json.loads((tmp_path / "split.json").read_text())
    moved = {**content, "train": content["train"][1:], "test": [*content["test"], content["train"][0]]}
    (tmp_path / "moved.json").write_text(json.dumps(moved))
    for text, named in [
        ((tmp_path / "moved.json").read_text(), "was changed"),
        ("{}", "another format"),
        ("[", "cannot be read"),
        (json.dumps({"format": content["format"]}), "has no 'data'"),
    ]:
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(DataError, match=named):
            read_split(tmp_path / "broken.json")
    with pytest.raises(DataError, match="split_recordings DATA --out"):
        read_split(tmp_path / "absent.json")


def _bad(folder: Path, name: str) -> Path:
    if name == "nan":
        columns = {"action": numpy.array([[0, numpy.nan]] * LENGTH, dtype=numpy.float32)}
        return written(folder, [True, False] * 8, columns=columns)
    if name == "width":  # of the action of one episode
        path = sorted(written(folder, [True, False] * 8).glob("data/*/*.parquet"))[3]
        table = pyarrow.parquet.read_table(path)
        place, wide = table.schema.get_field_index("action"), [[*row, 0.0] for row in table["action"].to_pylist()]
        kind = pyarrow.list_(pyarrow.float32())
        pyarrow.parquet.write_table(table.set_column(place, "action", pyarrow.array(wide, kind)), path)
        return folder
    outcomes = {"one": [True], "no failures": [True] * 16, "no successes": [False] * 16, "few": [True] * 12 + [False]}
    return written(folder, outcomes.get(name, [True, False] * 8), cameras=("a", "b") if name == "cameras" else ("a",))


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("one", [], "has 1 episode"),
        ("no failures", [], "16 succeeded and 0 failed, but 6 of each.*Record 6 more that failed.*imagined one"),
        ("no successes", [], "0 succeeded and 16 failed.*Record 6 more that succeeded"),
        ("few", [], "12 succeeded and 1 failed.*Record 5 more that failed"),
        ("nan", [], r"actions that are not finite: number 1 of row 0 is nan"),
        ("width", [], r"episode_000003 has \d numbers of 'action' in a row where meta/info.json says \d"),
        ("cameras", [], "2 cameras.*--camera.*observation.images.a, observation.images.b"),
        ("good", ["--success_column", "next.sucess"], "no column 'next.sucess'.*Did you mean next.success"),
        ("good", ["--held_out", "1"], "--held_out 1"),
    ],
)
def test_recordings_that_cannot_be_split_are_named(
    name: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(_bad(tmp_path / "data", name)), *words, "--out", str(tmp_path / "split.json")]
    assert call(split_recordings, *words) == 2
    assert re.search(named, capsys.readouterr().err) and not (tmp_path / "split.json").exists()


def test_a_classifier_judges_the_last_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [i % 2 == 0 for i in range(14)]
    writer = Writer(tmp_path / "data", 10.0)
    for i, outcome in enumerate(outcomes):
        video = torch.zeros(3, LENGTH, 16, 16, dtype=torch.uint8)
        video[:, -1 if outcome else 0] = 255  # a failure is bright at first
        made = recording(i, False, "go")
        writer.add(Recording({"action": made.columns["action"]}, {"observation.images.front": video}, "go"))
    writer.finish()
    write_classifier(tmp_path / "reward.safetensors", SuccessClassifier((8,) * 5), {"threshold": 0.5})
    monkeypatch.setattr(SuccessClassifier, "logits", lambda self, images: images.mean(dim=(1, 2, 3))[:, None])
    assert call(split_recordings, str(tmp_path / "data"), "--out", str(tmp_path / "split.json")) == 2
    assert "judge last pictures: --classifier FILE" in capsys.readouterr().err, "there is no column of success"
    words = ("--classifier", str(tmp_path / "reward.safetensors"), "--out", str(tmp_path / "split.json"))
    assert call(split_recordings, str(tmp_path / "data"), *words) == 0
    split = read_split(tmp_path / "split.json")
    assert split.outcomes == tuple(outcomes) and split.judged_by == "reward.safetensors, last picture"


def test_the_command_writes_one_file_and_counts(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "split.json")
    assert call(split_recordings, str(mixed), "--out", out) == 0
    text = capsys.readouterr().out
    assert "train" in text and "Only 4 of one outcome are among the 11 held-out episodes" in text
    assert read_split(out).digest in text
    assert call(split_recordings, str(mixed), "--out", out) == 2 and "--overwrite" in capsys.readouterr().err
    assert call(split_recordings, str(mixed), "--out", out, "--overwrite", "--held_out", "0.9") == 0
    assert "Both outcomes are in every part" in capsys.readouterr().out
