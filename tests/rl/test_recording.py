# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts
from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
from cosmos_predict2.rl.episodes.recording import CAMERA, WRIST, recorded_episodes
from cosmos_predict2.rl.interfaces import Decision, EnvDefaults, PolicyDefaults
from imaginaire.errors import DataError
from scripts import collect
from tests.programs import call
from tests.rl.vla_runs import SMALL, run, starts
from tests.training import difference, run_dir, saved


class Wanderer(PolicyDefaults):
    """A driver of one's own: draws motions, some of them beyond the bounds."""

    action_dim, chunk = 4, 3

    def act(self, observation: Any, *, mode: Any, generators: Any, temperature: float = 1.0) -> Decision:
        draws = [torch.randn(self.chunk, self.action_dim, generator=generator) for generator in generators]
        return Decision(torch.stack(draws), {})


class Counting:
    """Pictures show the trial and how many actions were executed; trial t ends after t + 2 of them, and is lost if it
    is 3. A success lasts for one action, the second."""

    num_envs = 2

    def __init__(self) -> None:
        self.metadata = {"max_steps": 6, "action_dim": 4, "action_high": 0.5}
        self.trials: dict[int, int] = {}
        self.steps: dict[int, int] = {}

    def _seen(self, ids: list[int]) -> dict[str, Any]:
        shown = torch.tensor([[self.trials[i], self.steps[i], 0] for i in ids], dtype=torch.uint8)
        pictures = shown[:, None, None].expand(-1, 4, 4, -1)
        wrists = pictures[:, None].expand(-1, 2, -1, -1, -1)
        return dict(full_image=pictures, wrist_image=wrists, state=shown.float(), task_description=["go"] * len(ids))

    def reset(self, *, options: Any) -> tuple[Any, Any]:
        ids = options["env_ids"]
        self.trials |= dict(zip(ids, options["trial_ids"], strict=True))
        self.steps |= dict.fromkeys(ids, 0)
        return self._seen(ids), {}

    def chunk_step(self, actions: Tensor, env_ids: list[int], execute: int | None = None) -> tuple[Any, ...]:
        executed = torch.tensor([[self.steps[i] < self.trials[i] + 2] for i in env_ids])
        for i, one in zip(env_ids, executed, strict=True):
            self.steps[i] += int(one)
        info = {
            "executed": executed,
            "success": torch.tensor([self.steps[i] == 2 for i in env_ids]),
            "active": torch.tensor([self.steps[i] < self.trials[i] + 2 for i in env_ids]),
            "valid": torch.tensor([self.trials[i] != 3 for i in env_ids]),
        }
        zeros = torch.zeros(len(env_ids), 1)
        return self._seen(env_ids), zeros + executed, zeros.bool(), zeros.bool(), info


def test_rows_of_a_recording_match_its_pictures() -> None:
    found = list(recorded_episodes(Wanderer(), Counting(), starts(5)))  # type: ignore[arg-type]
    assert [recording is None for recording, _ in found].count(True) == 1 and len(found) == 5
    played = {}
    for recording, is_success in found:
        if recording is None:
            assert not is_success
            continue
        film = recording.videos[CAMERA]
        trial = int(film[0, 0, 0, 0])
        played[trial], length = recording, trial + 3
        assert film.shape == (3, length, 4, 4) and film[1, :, 0, 0].tolist() == list(range(length))
        assert recording.columns["observation.state"][:, 1].tolist() == list(range(length))
        assert recording.columns["next.success"].nonzero()[0].tolist() == [2] and is_success
        assert recording.columns["next.reward"].tolist() == [1] * (length - 1) + [0]
        assert recording.columns["next.done"].nonzero()[0].tolist() == [length - 1]
        actions = recording.columns["action"]
        assert actions.shape == (length, 4) and actions.max() <= 0.5 and actions.min() >= -1.0
        assert numpy.array_equal(actions[-1], actions[-2])
        assert sorted(recording.videos) == [CAMERA, WRIST, f"{WRIST}_2"] and recording.task == "go"
    assert sorted(played) == [0, 1, 2, 4]
    named = next(recorded_episodes(Wanderer(), Counting(), starts(5), camera="top+hand"))[0]  # type: ignore[arg-type]
    assert named is not None and sorted(named.videos) == ["hand", f"{WRIST}_2", "top"]


def test_a_success_that_does_not_last_counts_where_it_would_end_an_episode() -> None:
    counted = {}
    for is_last in (False, True):
        found = recorded_episodes(Wanderer(), Counting(), starts(5), is_last=is_last)  # type: ignore[arg-type]
        counted[is_last] = sorted(
            int(one.videos[CAMERA][0, 0, 0, 0]) for one, is_success in found if one and is_success
        )
    assert counted == {False: [0, 1, 2, 4], True: [0]}  # trial 0 ends with its success


def test_the_command_counts_as_an_evaluation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(*given: Any, is_last: bool) -> Any:
        asked.append((is_last, given[1].terminate_on_success))
        return recorded_episodes(*given, is_last=is_last)

    monkeypatch.setattr("cosmos_predict2.rl.episodes.recording.recorded_episodes", recorded)
    words = ("--policy", f"{__name__}:Wanderer", "--episodes", 1)
    assert call(collect, "--suite", "toy", *words, "--out", tmp_path / "toy") == 0
    ends = partialmethod(ToyEnv.__init__, terminate_on_success=True)  # as simulators do
    monkeypatch.setattr(ToyEnv, "__init__", ends)
    assert call(collect, "--suite", "toy", *words, "--out", tmp_path / "ends") == 0
    assert call(collect, "--suite", "toy", *words, "--out", tmp_path / "cut", "--until_success") == 0
    assert asked == [(True, False), (False, False), (False, True)]


class Leaving(Wanderer):
    """Has no decision from its second one on."""

    def act(self, observation: Any, **options: Any) -> Decision:
        return replace(super().act(observation, **options), is_lost_E=observation["state"][:, 1] >= self.chunk)


def test_an_episode_without_a_decision_is_not_recorded() -> None:
    of_two = Starts([0] * 2, [0, 2], [0, 2], [100, 102])
    found = list(recorded_episodes(Leaving(), Counting(), of_two))  # type: ignore[arg-type]
    assert sorted(recording is None for recording, _ in found) == [False, True]


def test_what_is_recorded_is_what_an_evaluation_plays() -> None:
    some = held_out_starts(3, 1, seed=5, first=7)
    played = LocalRollout(Wanderer(), ToyEnv(3), keep_record=False).collect(some, "sample")
    found = [recording for recording, _ in recorded_episodes(Wanderer(), ToyEnv(3), some)]
    assert float(played.actions_M_E_A_D.abs().max()) > 1
    for i, recording in enumerate(found):
        assert recording is not None
        actions = played.actions_M_E_A_D[:, i].flatten(0, 1).clamp(-1, 1)
        assert torch.equal(torch.from_numpy(recording.columns["action"][:-1]), actions)
        assert bool(recording.columns["next.success"][-1]) == bool(played.success_E[i])


def test_the_command_writes_a_data_set_and_adds_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    words = ("--suite", "toy_covered", "--policy", f"{__name__}:Wanderer", "--episodes", 3, "--out", out)
    words += ("--batch_size", 2)
    (tmp_path / "data.unfinished").mkdir()
    (tmp_path / "data.unfinished" / "left").write_text("by a collection that was killed")
    assert call(collect, *words) == 0
    assert "3 episodes" in capsys.readouterr().out and not (tmp_path / "data.unfinished").exists()
    assert not (out / "left").exists()
    assert call(collect, *words) == 2 and "--append" in capsys.readouterr().err
    before = LeRobotSource.open(out)
    rows = [before.columns(i, ["action"])["action"] for i in range(3)]
    stray = out / "data" / "chunk-000" / "episode_000003.parquet"
    stray.write_bytes(b"of a collection that was killed")
    assert call(collect, *words, "--append", "--first", 20_000) == 0
    after = LeRobotSource.open(out)
    assert len(after) == 6 and after.info.splits == {"train": "0:6"}
    for i, table in enumerate(rows):
        assert numpy.array_equal(after.columns(i, ["action"])["action"], table)
    assert not numpy.array_equal(after.columns(3, ["action"])["action"], rows[0])
    assert after.columns(5, ["index"])["index"][-1] == sum(after.episodes.lengths) - 1
    assert after.frames(4, CAMERA, [0, 1]).shape == (3, 2, 48, 48)
    record = json.loads((out / "collection.json").read_text())["collections"]
    facts = [tuple(one[key] for key in ("from_episode", "episodes", "first", "split")) for one in record]
    assert facts == [(0, 3, 10_000, "train"), (3, 3, 20_000, "train")]


def robots(folder: Path, camera: str, **more: Any) -> Path:
    """A recording of a robot, whose success is a number."""
    writer = Writer(folder, fps=8)
    columns = {"action": numpy.zeros((5, 4), numpy.float32), "next.success": numpy.ones(5, numpy.float32), **more}
    writer.add(Recording(columns, {camera: torch.zeros(3, 5, 48, 48, dtype=torch.uint8)}, "push"))
    writer.finish()
    return folder


def test_a_data_set_begins_with_a_copy_of_recordings_of_a_robot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"next.reward": numpy.zeros(5, numpy.float32), "next.done": numpy.arange(5) == 4}  # as lerobot's
    mine = robots(tmp_path / "mine", "observation.images.top", **more)  # another name of the camera
    words = ("--suite", "toy", "--policy", f"{__name__}:Wanderer", "--episodes", 2, "--base", mine)
    assert call(collect, *words, "--out", tmp_path / "all", "--camera", "top") == 0
    found = LeRobotSource.open(tmp_path / "all")
    assert len(found) == 3 and len(LeRobotSource.open(tmp_path / "mine")) == 1
    assert found.columns(1, ["next.success"])["next.success"].dtype == numpy.float32
    assert found.frames(2, "observation.images.top", [0]).shape == (3, 1, 48, 48)
    played = found.columns(1, ["next.reward", "next.done"])
    assert played["next.done"].tolist() == [False] * 24 + [True]
    assert played["next.reward"].nonzero()[0].tolist() == [23]  # the toy world pays for the last action
    older = {"observation.state": numpy.zeros((5, 3), numpy.float32)}
    for name, columns, code in (("older", older, 0), ("without its state", {}, 2)):  # no rewards in either
        more_words = (*words[:-2], "--append", "--out", robots(tmp_path / name, CAMERA, **columns))
        assert call(collect, *more_words) == code
    assert "next.reward" not in LeRobotSource.open(tmp_path / "older").info.features
    assert call(collect, *words, "--out", tmp_path / "other") == 2  # without the name of the camera
    told = capsys.readouterr().err
    assert "'observation.images.top', which episodes that are played in this suite do not have" in told


def test_recordings_have_no_column_that_the_suite_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found before an episode is played."""
    mine = robots(tmp_path / "mine", CAMERA, **{"observation.effort": numpy.zeros(5, numpy.float32)})
    words = ("--suite", "toy", "--policy", f"{__name__}:Wanderer", "--episodes", 2, "--base", mine)
    assert call(collect, *words, "--out", tmp_path / "all") == 2
    told = capsys.readouterr().err
    assert "'observation.effort', which episodes that are played in this suite do not have. Leave it out" in told


class OfItsOwn(EnvDefaults):
    chunk_step, metadata = ToyEnv.chunk_step, {"num_tasks": 1, "action_dim": Wanderer.action_dim}

    def __init__(self, num_envs: int) -> None: ...


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--policy", f"{__name__}:Counting"], "has no 'act'"),
        (["--until_success"], None),
        (["--until_success", "--suite", f"{__name__}:OfItsOwn"], "OfItsOwn ends its episodes by itself"),
        (["--append"], "no meta/info.json"),
        (["--append", "--base", "mine"], "begins a new data set"),
        (["--options", "chunk"], "KEY=VALUE"),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], named: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--suite", "toy", "--policy", f"{__name__}:Wanderer", "--episodes", "1", "--out", str(tmp_path / "x")]
    assert call(collect, *given, *words) == (0 if named is None else 2)
    assert named is None or named in capsys.readouterr().err


def _played(folder: Path, first: int) -> None:
    writer = Writer(folder, 8.0)
    for recording, _ in recorded_episodes(Wanderer(), ToyEnv(4), held_out_starts(4, 1, seed=0, first=first)):
        assert recording is not None
        success = numpy.arange(len(recording)) == len(recording) - 1 + len(writer) % 2  # of every second one
        writer.add(Recording({**recording.columns, "next.success": success}, recording.videos, recording.task))
    writer.finish()


@pytest.mark.slow
def test_a_refinement_waits_for_the_robot_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """An experience, a phase of two steps, an experience and another phase; one run has all episodes from the start."""
    robot, waiting = tmp_path / "robot", tmp_path / "robot of the other"

    def go(root: Path, folder: Path) -> list[dict[str, Any]]:
        own = [f"model.config.refinement.recordings={folder}", "trainer.max_iter=8"]
        return run(root, *SMALL, *own, name="of_recordings")

    for phase in (1, 2):
        _played(robot / f"phase_{phase:03d}", first=100 * phase)
    records = go(tmp_path / "whole", robot)
    kinds = ["world_model" if "train/world_model_loss" in record else "policy" for record in records[:8]]
    assert kinds == (["policy"] * 2 + ["world_model"] * 2) * 2
    assert records[2]["train/robot_success"] == 0.5 and 0 <= records[2]["train/robot_area"] <= 1
    assert records[2]["train/robot_imagined_success"] == 1 and "train/robot_success" not in records[3]
    for phase in (1, 2):
        with pytest.raises(DataError, match=rf"Phase {phase} .*phase_00{phase} has 0 of 4.*scripts.collect") as waited:
            go(tmp_path / "parts", waiting)
        assert str(run_dir(tmp_path / "parts", "vla")) in str(waited.value)
        assert saved(tmp_path / "parts", "vla")["trainer"]["iteration"] == 4 * phase - 2
        shutil.copytree(robot / f"phase_{phase:03d}", waiting / f"phase_{phase:03d}")
    go(tmp_path / "parts", waiting)
    assert difference(saved(tmp_path / "whole", "vla"), saved(tmp_path / "parts", "vla")) is None
