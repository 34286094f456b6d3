# SPDX-License-Identifier: Apache-2.0
"""Policies in the order of what is imagined of them, where that order can be trusted."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.evaluation.metrics.agreement import Estimate
from cosmos_predict2.released import TINY_ACTION, TINY_POLICY
from cosmos_predict2.rl.envs.first_frames import RecordedFacts
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStart, write_starts
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.imagined.ranking import Ranked, have_failures, ranked, refusal, table
from cosmos_predict2.rl.interfaces import Decision
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, write_classifier
from cosmos_predict2.rl.trust import LEARNT_IN
from scripts import rank_policies
from tests.programs import call


def rows(values: list[float], truths: list[float | None], refused: str = "") -> list[Ranked]:
    found = []
    for i, (value, truth) in enumerate(zip(values, truths, strict=True)):
        true = None if truth is None else Estimate(truth, truth, truth, 100)
        found.append(Ranked(f"p{i}", Estimate(value, value, value, 100), true, refused))
    return found


def test_values_that_follow_the_truth_are_calibrated_by_the_other_policies() -> None:
    found = ranked(rows([0.5, 0.1, 0.3, 0.2, 0.4], [0.9, 0.1, 0.5, 0.3, None]), has_failures=True)
    assert [row.policy for row in found.rows] == ["p0", "p4", "p2", "p3", "p1"] and not found.problem
    assert found.expected["p4"] == pytest.approx(0.7) and found.expected["p0"] == pytest.approx(0.9)
    assert found.figures["pearson"].value == pytest.approx(1) and found.figures["rank_violation"] == 0
    assert "0.70" in table(found)


def test_an_order_that_is_not_to_be_trusted_says_so() -> None:
    reversed_ = ranked(rows([0.1, 0.2, 0.3, 0.4], [0.9, 0.5, 0.4, 0.1]), has_failures=True)
    assert "values do not follow true success: Pearson -0.9" in reversed_.problem and not reversed_.expected
    assert ["p0", "p3"] in reversed_.figures["misordered"] and ["p1", "p2"] not in reversed_.figures["misordered"]
    loose = ranked(rows([0.1, 0.2, 0.3, 0.4], [0.1, 0.6, 0.3, 0.8]), has_failures=True)
    assert 0.6 < loose.figures["pearson"].value < 0.8 and "0.8 is needed" in loose.problem and not loose.expected
    assert "no failures" in ranked(rows([0.1, 0.2], [None, None]), has_failures=False).problem
    assert not ranked(rows([0.1, 0.2], [None, None]), has_failures=None).problem
    taught = [*rows([0.9], [0.0], "it learnt from this world model"), *rows([0.2, 0.1], [None, None])]
    assert ranked(taught, True).rows[-1].refused and "not judged" in table(ranked(taught, True))


@pytest.mark.parametrize("values", [[math.nan, 0.2, 0.5], [0.2, math.nan, 0.5], [0.5, 0.2, math.nan]])
def test_a_policy_of_unknown_value_is_never_the_best(values: list[float]) -> None:
    found = [row.value.value for row in ranked(rows(values, [None] * 3), has_failures=True).rows]
    assert found[:2] == [0.5, 0.2] and math.isnan(found[2])


@pytest.mark.parametrize(
    "numbers", ["0.8", "[0.8, 10]", "[8, 0]", "[12, 10]", "[-1, 5]", "[1]", '["x", 3]', "[true, 3]"]
)
def test_truth_that_is_no_count_of_successes_is_refused(
    numbers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = tmp_path / "truth.json"
    truth.write_text(f'{{"a": {numbers}}}')
    words = ["--world_model", "w", "--policies", "a", "b", "--truth", truth]
    assert call(rank_policies, *words) == 2
    assert f"a has {numbers}; expected [successes, episodes]" in capsys.readouterr().err
    truth.write_text('{"a": ')
    assert call(rank_policies, *words) == 2
    assert f"--truth {truth} cannot be read" in capsys.readouterr().err


def learner(folder: Path, learnt_in: dict[str, str] | None, dit_path: str = "gone") -> str:
    folder.mkdir(parents=True)
    env = f"{{imagination: {{dit_path: {dit_path}}}, reward: {{path: other}}}}"
    (folder / "config.yaml").write_text(f"model: {{config: {{env: {env}}}}}\n")
    (folder / "runs.jsonl").write_text(json.dumps({LEARNT_IN: learnt_in} if learnt_in else {}) + "\n")
    return str(folder)


def test_a_policy_is_not_judged_by_its_teacher(tmp_path: Path) -> None:
    inputs = {"world_model": {"aa", "ab"}, "reward": {"bb"}}
    places = {"world_model": str(tmp_path / "w"), "reward": "r"}
    (tmp_path / "w" / "checkpoints").mkdir(parents=True)
    cases = {
        "both": ({"world_model": "ab", "reward": "bb"}, "gone", "it learnt from this world model and this reward"),
        "reward": ({"world_model": "cc", "reward": "bb"}, "gone", "it learnt from this reward"),
        "other": ({"world_model": "cc", "reward": "dd"}, "gone", ""),
        "earlier": ({"world_model": "cc"}, str(tmp_path / "w" / "checkpoints"), "it learnt from this world model"),
        "old": (None, str(tmp_path / "w"), "it learnt from this world model"),
    }
    for name, (known, path, text) in cases.items():
        assert refusal(learner(tmp_path / name, known, path), inputs, places) == text, name
    assert refusal(str(tmp_path), inputs, places) == "", "no run"
    assert refusal("openpi://host:8000", inputs, places) == "", "it records nothing"


DRIVER = """
import torch
from cosmos_predict2.rl.interfaces import Decision


class Still:
    action_dim, chunk = 4, 12

    def act(self, observation, *, mode="sample", generators=None, temperature=1.0):
        return Decision(torch.zeros(len(observation["task_description"]), self.chunk, self.action_dim), {})


class Long(Still):
    chunk, decisions = 24, 0

    def act(self, observation, **options):
        Long.decisions += 1
        return super().act(observation)
"""


def test_the_program_ranks_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = ToyStarts().starts([0] * 4, [0, 1, 2, 3]).pictures_E_F_H_W_C.numpy()
    recorded = RecordedFacts(4, [-1.0] * 4, [1.0] * 4)
    starts = [RecordedStart(f"{i}", "push", one, part="test") for i, one in enumerate(pictures)]
    write_starts(tmp_path / "starts" / FILE, starts, recorded=recorded)
    write_classifier(tmp_path / "reward.safetensors", SuccessClassifier((4, 4, 4, 4, 4)), {})
    other = tmp_path / "other.safetensors"
    other.write_bytes(Path(TINY_POLICY).read_bytes())
    words = ["--world_model", TINY_ACTION, "--reward", tmp_path / "reward.safetensors"]
    words += ["--starts", tmp_path / "starts", "--policies", TINY_POLICY]
    assert call(rank_policies, *words, other, "--out", tmp_path / "ranking.json") == 0
    found = json.loads((tmp_path / "ranking.json").read_text())["policies"]
    assert found[0]["value"] == found[1]["value"] and found[0]["value"]["value"] > 0
    (tmp_path / "truth.json").write_text('{"nobody": [1, 2]}')
    assert call(rank_policies, *words) == 2
    assert call(rank_policies, *words, other, "--truth", tmp_path / "truth.json") == 2
    assert "names nobody" in capsys.readouterr().err
    assert have_failures(TINY_ACTION) is None
    (tmp_path / "drivers.py").write_text(DRIVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call(rank_policies, *words, "drivers:Still") == 0 and "drivers:Still" in capsys.readouterr().out
    assert call(rank_policies, *words[:-1], "drivers:Long", "drivers:Still", "--suite", "toy") == 2
    assert "24 actions are to be executed, but" in capsys.readouterr().err
    assert importlib.import_module("drivers").Long.decisions == 1, "refused before it plays truly"

    def one_number(self: Any, observation: Any, **options: Any) -> Decision:
        return Decision(torch.zeros(len(observation["task_description"]), 4, 1), {})

    monkeypatch.setattr(type(read_policy(TINY_POLICY)[0]), "act", one_number)
    assert call(rank_policies, *words, other) == 2
    assert f"--policies {TINY_POLICY}: Actions of shape [4, 4, 1], but" in capsys.readouterr().err


def test_episodes_that_were_lost_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in what is imagined of a policy, nor in its true success."""
    kept, env = torch.tensor([True, False]), SimpleNamespace(close=lambda: None, metadata={"num_tasks": 2})
    played: list[Any] = []
    found = SimpleNamespace(return_E=torch.tensor([1.0, 0.0]), success_E=kept, is_valid_E=kept)
    stand_ins: dict[str, Any] = {
        "rl.episodes.episodes.LocalRollout": lambda *of, **how: SimpleNamespace(
            collect=lambda *of: played.append(of[0]) or found
        ),
        "rl.envs.world_model.require_inputs": lambda *of: None,
        "rl.envs.first_frames.SimulatedStarts": lambda *of: SimpleNamespace(),
        "rl.envs.suites.find": lambda *of, **how: SimpleNamespace(env=lambda *of: env),
        "rl.imagined.check.imagined_env": lambda *of: env,
        "configs.rl.imagination.fit_of": lambda path: None,
    }
    for name, one in stand_ins.items():
        monkeypatch.setattr(f"cosmos_predict2.{name}", one)
    args: Any = SimpleNamespace(suite="toy", image_size=None, episodes=2, seed=0, first=0, world_model="w")
    world, starts = SimpleNamespace(views=("",)), SimpleNamespace(recorded=None)
    value, true = rank_policies._played(args, None, world, object(), starts)
    assert (value.value, value.count) == (true.value, true.count) == (1, 1)
    assert [one.task_ids for one in played] == [[0, 1]] * 2, "of a suite all tasks in turn"
