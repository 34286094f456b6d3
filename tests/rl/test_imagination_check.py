# SPDX-License-Identifier: Apache-2.0
"""The gate: a world model that is true and one that is not, held against recordings of the toy world."""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.card import ModelCard
from cosmos_predict2.configs.rl import imagination
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.split import make_split, read_split, write_split
from cosmos_predict2.evaluation.metrics.agreement import Estimate
from cosmos_predict2.released import TINY_ACTION, TINY_POLICY
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.recorded_starts import RecordedStart, RecordedStarts, write_starts
from cosmos_predict2.rl.envs.replays import held, replayed, rested, whole_chunks, with_actions_of
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.policy_evaluation import film, held_out_starts
from cosmos_predict2.rl.imagined import check as imagination_check
from cosmos_predict2.rl.imagined.verdict import BOUNDS, CLONE, REWARD, TRY, WITHIN, judge
from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.null import NullPolicy, are_motions
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, read_reward, write_classifier
from cosmos_predict2.rl.trust import digest, read_card
from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.toy_world.physics import GRIPPER_X
from cosmos_predict2.toy_world.rendering import detect, render
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError, DataError
from scripts import check_imagination
from tests.data.lerobot_files import write_random
from tests.programs import call, finished, python
from tests.test_documentation import ROOT

NUM, FEW = 48, 12
ONE_VIEW: Any = SimpleNamespace(views=("",))  # of which nothing is imagined


class RingReward(FrameRewardDefaults):
    """How near the puck is to the ring, which it hides where it is on it."""

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        seen = detect(numpy.ascontiguousarray(frames_E_F_H_W_C.numpy()), ("puck", "ring")).position
        distance = numpy.nan_to_num(numpy.hypot(*numpy.moveaxis(seen["puck"] - seen["ring"], -1, 0)), nan=0.0)
        value = torch.from_numpy(-distance / 48)
        return Judgement(value.float(), value > -0.1)


class ConstantReward(FrameRewardDefaults):
    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        value = torch.ones(frames_E_F_H_W_C.shape[:2])
        return Judgement(value, value > 0)


def write_recordings(folder: Path, num: int = FEW, action_scale: float = 1.0) -> Path:
    """Recordings of either outcome, and their split beside them."""
    episodes, writer = make_episodes(num, 0, mix="outcomes", first=2**19), Writer(folder, 10.0)
    for i in range(num):
        pictures = torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2)
        rows = numpy.concatenate([episodes.actions[i], episodes.actions[i, -1:]]).astype(numpy.float32)
        done = numpy.zeros(len(rows), dtype=numpy.float32)
        done[-1] = episodes.success[i]
        writer.add(Recording({"action": rows * action_scale, "next.success": done}, {"front": pictures}, "push"))
    writer.finish()
    write_split(folder.parent / "split.json", make_split(folder, held_out=0.5))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recordings(tmp_path_factory.mktemp("gate") / "data", NUM)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recordings(tmp_path_factory.mktemp("few") / "data")


def check(data: Path, out: Path, *words: object, reward: str = f"{__name__}:RingReward") -> int:
    given = ("--split", data.parent / "split.json", "--world_model", TINY_ACTION, "--reward", reward)
    return call(check_imagination, "--data", data, *given, "--out", out, *words)


@pytest.mark.slow
def test_a_true_imagination_is_told_from_one_that_moves_the_other_way(
    data: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagination_check, "GROUPS", 8)
    monkeypatch.setattr(imagination_check, "TRUE_GROUPS", 8)
    words = ("--policy", TINY_POLICY, "--played", few, "--suite", "toy")
    assert check(data, tmp_path / "card.json", *words) == 0
    good = read_card(str(tmp_path / "card.json"))
    shown = capsys.readouterr().out
    assert shown.startswith(good.verdict) and good.verdict != "no"
    assert good.figures["ends_imagined"]["value"] > 0.72 and good.figures["obedience"] > 0.4
    assert good.figures["played_ends"]["value"] > 0.72 and good.figures["played_episodes"] == FEW
    of_policy = {name: one["value"] for name, one in good.figures["policy"].items() if isinstance(one, dict)}
    assert of_policy["within_starts"] > 0.2
    assert 0 < of_policy["true_above_nothing"] <= of_policy["true_success"]
    lies = of_policy["greedy_imagined_success"] - of_policy["greedy_success_once"]
    assert of_policy["imagined_above_true"] == pytest.approx(lies)
    assert good.inputs["policy"] == digest(TINY_POLICY) and {"split", "tokenizer"} <= set(good.inputs)

    straight = imagination_check.replayed

    def mirrored(imagination: Any, first: Tensor, actions: Tensor, **options: Any) -> Tensor:
        return straight(imagination, first, -actions, **options)

    monkeypatch.setattr(imagination_check, "replayed", mirrored)
    monkeypatch.setattr(imagination_check, "_other_actions", lambda *given: {})
    for name, number in (("GROUPS", 2), ("TRUE_GROUPS", 2), ("GREEDY", 4)):
        monkeypatch.setattr(imagination_check, name, number)
    still = (*words[:2], *words[4:], "--options", "noise=1e-6")  # attempts that are what it plays
    assert check(data, tmp_path / "bad.json", *still) == 1
    bad = read_card(str(tmp_path / "bad.json"))
    assert bad.verdict == "no" and bad.figures["obedience"] < 0
    assert any("actions seen in imagined pictures" in reason for reason in bad.reasons)
    assert bad.figures["ends_imagined"]["value"] < good.figures["ends_imagined"]["value"] - 0.1
    assert any("area under the curve, imagined ends" in reason for reason in bad.reasons)
    attempts = bad.figures["policy"]
    assert attempts["greedy_above_sampled"]["value"] == attempts["spread"] == 0


def test_true_pictures_obey_wholly_in_every_chunk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of actions has seen all chunks: one of the first chunks is wrong where the robot is elsewhere."""
    source = LeRobotSource.open(data)
    episodes = imagination_check.read_episodes(source, None, range(24), [True] * NUM, 0)
    found = imagination_check.obedience(episodes.films, episodes, episodes, 12)
    assert found["obedience"] == found["obedience_last"] == 1
    assert found["actions_seen_by_chunk"] == found["actions_seen_true_by_chunk"]
    assert len(found["actions_seen_by_chunk"]) == 2 and min(found["actions_seen_by_chunk"]) > 0.2
    short = replace(episodes, actions=[episodes.actions[0][:6], *episodes.actions[1:]])
    films = [episodes.films[0][:7], *episodes.films[1:]]
    assert imagination_check.obedience(films, replace(short, films=films), episodes, 12)["obedience_last"] == 1
    fitted: list[int] = []
    monkeypatch.setattr(imagination_check, "fit_probe", lambda pictures, actions: fitted.append(len(actions)))
    imagination_check.action_probe(short, 12)
    assert fitted == [2 * (len(episodes.films) - 1)], "a short recording does not hide the later chunks of others"


@pytest.fixture
def attempted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The figures of a policy's true attempts in the toy world, whose imagined ends have values that rise evenly."""
    made = make_episodes(4, 0, mix="outcomes", first=2**19)
    actions = [torch.from_numpy(made.actions[i]).float() for i in range(4)]
    learnt = imagination_check.OutcomeEpisodes(torch.zeros(4), [], [], actions, made.success, ["push"] * 4)
    monkeypatch.setattr(imagination_check, "TRUE_GROUPS", 16)

    def found(policy: Any) -> Any:
        values = numpy.linspace(0, 1, imagination_check.TRUE_GROUPS * imagination_check.MEMBERS)

        def ends(_: Any, pictures: Any, *given: Any) -> Any:
            return pictures, []

        def judged(reward: Any, pictures: Any, tasks: Any) -> Any:
            assert len(pictures) == len(tasks)
            return values[: len(pictures)], None

        monkeypatch.setattr(imagination_check, "imagined_ends", ends)
        monkeypatch.setattr(imagination_check, "judge", judged)
        with closing(suites.find("toy").env(64, SimpleNamespace(action_dim=4))) as env:
            return imagination_check.true_attempts(policy, env, ONE_VIEW, None, learnt)

    return found


def test_an_episode_that_was_lost_is_no_failure(attempted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is left out; where too many are, nothing is judged."""
    policy, attempts = read_policy(TINY_POLICY)[0], imagination_check.attempts
    whole = attempted(policy)

    def lost(every: int) -> Any:
        def play(*given: Any) -> Any:
            found = attempts(*given)
            is_lost = torch.arange(len(found)) % (every * len(found) // imagination_check.TRUE_GROUPS) == 0
            return replace(found, is_valid_E=found.is_valid_E & ~is_lost, success_E=found.success_E & ~is_lost)

        return play

    monkeypatch.setattr(imagination_check, "attempts", lost(4))
    some = attempted(policy)
    assert some["true_success"].count == 12 and some["greedy_success"].count == 12
    assert some["true_success"].value == pytest.approx(whole["true_success"].value, abs=0.15)
    monkeypatch.setattr(imagination_check, "attempts", lost(1))
    with pytest.raises(DataError, match="Of 16 of 16 starts an episode was lost"):
        attempted(policy)


def test_doing_nothing_is_not_better_than_nothing(attempted: Callable[..., Any]) -> None:
    """A clone that stands still has the success of starts at which the goal is met, and nothing to teach it by."""
    found = attempted(NullPolicy("still", torch.zeros(1, 12, 4)))
    assert found["true_above_nothing"].value == 0 and math.isnan(found["within_starts"].value)
    assert found["greedy_above_sampled"].value == 0
    about = dict(explained=0.04, low=-0.04, high=0.13, recordings=17)
    blind = imagination_check.clone_figures(about)
    assert judge(figures(), {"policy": blind}).verdict == "no", "its interval reaches 0"
    assert judge(figures(), {"policy": imagination_check.clone_figures({**about, "recordings": 2})}).verdict != "no"
    seen = judge(figures(), {"policy": {**blind, "true_above_nothing": Estimate(0.04, 0.03, 0.06)}})
    assert seen.verdict == "doubtful" and "true success less" in seen.reasons[0], "true attempts know it better"
    assert any("as one does that sees nothing" in text for text in seen.warnings), "and it is named all the same"
    assert imagination_check.clone_figures({}) == {}, "not a clone of recordings"
    judged = judge(figures(), {"policy": found})
    assert judged.verdict == "no" and any("that of doing nothing" in reason for reason in judged.reasons)
    assert any("for the figure inside a" in text for text in judged.warnings)
    assert any("attempts from one start" in reason for reason in judged.reasons)


def test_obedience_that_nothing_shows_is_noted() -> None:
    dark = {name: value for name, value in figures().items() if name != "obedience"}
    noted = [any("hardly show the actions" in text for text in judge(found).warnings) for found in (dark, figures())]
    assert noted == [True, False] and judge(dark).verdict == "go"


@pytest.mark.parametrize(("recall", "is_noted"), [(0.45, True), (0.5, False)])
def test_a_threshold_that_finds_few_imagined_successes_is_noted(recall: float, is_noted: bool) -> None:
    notes = judge({**figures(), "recall_imagined": recall}).warnings
    assert any(f"success at {recall:.2f} of imagined successes" in text for text in notes) is is_noted


def judged_figures(of: Path, out: Path, *words: object) -> Mapping[str, Any]:
    """The figures of a card, with a few short episodes of the tiny policy."""
    check(of, out, "--policy", TINY_POLICY, "--episodes", 6, *words)
    return read_card(str(out)).figures


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("GROUPS", 2), ("TRUE_GROUPS", 2), ("GREEDY", 4)):
        monkeypatch.setattr(imagination_check, name, number)
    monkeypatch.setattr(imagination_check, "_other_actions", lambda *given: {})


@pytest.mark.slow
def test_held_out_recordings_are_judged_beside_what_a_robot_played(
    few: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, parts = imagination_check.read_episodes, list[list[int]]()
    monkeypatch.setattr(imagination_check, "read_episodes", lambda *given: parts.append([*given[2]]) or read(*given))
    true = Estimate(0.7, 0.7, 0.7, FEW)
    monkeypatch.setattr(
        imagination_check, "played_figures", lambda *given: {"played_episodes": FEW, "played_success": true}
    )
    found = judged_figures(few, tmp_path / "card.json", "--played", few)
    learnt, judged, played = parts
    split = read_split(few.parent / "split.json")
    assert {*learnt} <= {*split.train} and {*judged} <= {*split.held_out} and played == [*range(FEW)]
    lies = found["policy"]["greedy_imagined_success"]["value"] - 0.7
    assert found["policy"]["imagined_above_true"]["value"] == pytest.approx(lies)


@pytest.mark.slow
def test_imagined_success_is_held_against_success_at_any_time(
    few: Path, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a robot stops at its first one; a clone may lose it again."""
    true = {name: Estimate(value, value, value, 8) for name, value in (("greedy_success", 0.2), ("within_starts", 0.5))}
    true["greedy_success_once"] = Estimate(0.9, 0.9, 0.9, 8)
    monkeypatch.setattr(imagination_check, "true_attempts", lambda *given: dict(true))
    found = judged_figures(few, tmp_path / "card.json", "--suite", "toy")["policy"]
    lies = found["greedy_imagined_success"]["value"] - 0.9
    assert found["imagined_above_true"]["value"] == pytest.approx(lies)


def test_an_end_is_the_picture_behind_the_last_action(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(imagination: Any, first: Tensor, actions: Tensor, **options: Any) -> Tensor:
        numbers = torch.arange(actions.shape[1] + 1, dtype=torch.uint8)
        return numbers[None, :, None, None, None].expand(len(first), -1, 2, 2, 3)

    monkeypatch.setattr(imagination_check, "replayed", counted)
    world: Any = SimpleNamespace(config=SimpleNamespace(chunk_size=12))
    lengths = (5, 24, 12, 13)
    actions = [torch.zeros(length, 2) for length in lengths]
    first = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    ends, films = imagination_check.imagined_ends(world, first, actions, 0, num_films=2)
    assert ends[:, 0, 0, 0].tolist() == [*lengths]
    assert [len(film) for film in films] == [6, 25]


@pytest.mark.slow
def test_the_gate_knows_nothing_of_the_toy_world(few: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_classifier(tmp_path / "reward" / "reward_model.safetensors", SuccessClassifier((4, 4, 4, 4, 4)), {})
    program = (
        "import sys; sys.modules['cosmos_predict2.toy_world'] = None; from scripts import check_imagination as program;"
        " import scripts.rank_policies, cosmos_predict2.rl.envs.suites, cosmos_predict2.rl.imagined.ranking;"
        " sys.exit(program.command_line.main(program.parser, program.run))"
    )
    words = ["--data", few, "--split", few.parent / "split.json", "--world_model", TINY_ACTION]
    words += ["--reward", tmp_path / "reward", "--out", tmp_path / "card.json", "--episodes", 2]
    done = finished(python(), "-c", program, *words)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads((tmp_path / "card.json").read_text())["figures"]["episodes"] == 2


def test_a_robot_rests_by_no_motion_or_at_its_last_place() -> None:
    motions, places = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([[40.0, 2.0], [50.0, 1.0]])
    gripped = torch.cat([motions, motions], dim=1)  # four numbers, the last a gripper's
    for actions, expected in ((motions, [0.0, 0.0]), (gripped, [0.0, 0.0, 0.0, 1.0]), (places, [50.0, 1.0])):
        longer = rested(actions, 4, are_motions(actions))
        assert torch.equal(longer[:2], actions) and longer[2:].tolist() == [expected, expected]
    still = NullPolicy("still", torch.stack([places, places + 2]))
    seen = {"full_image": torch.zeros(3, 1, 1, 3)}
    assert still.act(seen, mode="greedy", generators=[]).actions_E_A_D.tolist() == [[[46.0, 2.5]] * 2] * 3


def test_true_attempts_are_played_on_after_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut there, the ends of what succeeds are those of other lengths, and were valued below failures."""
    env: Any = SimpleNamespace(metadata={}, terminate_on_success=True)

    def play(policy: Any, env: Any, starts: Any, *given: Any) -> Any:
        assert min(starts.trial_ids) >= 100_000, "not those that recordings begin with"
        raise ConfigError(f"plays on: {not env.terminate_on_success}")

    monkeypatch.setattr(imagination_check, "attempts", play)
    monkeypatch.setattr(imagination_check, "SimulatedStarts", lambda *given: SimpleNamespace(starts=lambda *of: None))
    with pytest.raises(ConfigError, match="plays on: True"):
        imagination_check.true_attempts(None, env, ONE_VIEW, *[None] * 2)  # type: ignore[arg-type]


def test_a_clone_that_passes_through_success_is_known(
    attempted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A robot that stops at its first success never shows it; imagination, paid by last pictures, calls it failure."""
    policy, _ = read_policy(TINY_POLICY)
    play = imagination_check.attempts

    def passing(policy: Any, env: Any, *given: Any, **options: Any) -> Any:
        played = play(policy, env, *given, **options)
        return replace(played, success_E=torch.ones_like(played.success_E)) if env.terminate_on_success else played

    assert abs(attempted(policy)["success_lost"].value) < 0.2
    monkeypatch.setattr(imagination_check, "attempts", passing)
    found = attempted(policy)
    at_the_end = found["true_success"].value + found["greedy_above_sampled"].value
    assert found["success_lost"].value == pytest.approx(1 - at_the_end)
    assert found["greedy_success_once"].value == 1, "what imagined success is held against"
    judged = judge(figures(), {"policy": {"success_lost": Estimate(0.62, 0.5, 0.75, 48)}})
    assert judged.verdict == "no" and "lose it again" in judged.reasons[0] and "keep the clone" in judged.next_step


def figures(**changes: Any) -> dict[str, Any]:
    right = {bound.name: bound.go for bound in BOUNDS}
    return {"episodes": 90, "successes": 20, **right, **changes}


def test_attempts_that_succeed_far_less_than_what_is_played_forbid_learning(
    attempted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = read_policy(TINY_POLICY)
    act = policy.act

    def shaken(observation: Any, *, mode: Any, generators: Any, temperature: float = 1.0) -> Any:
        decision = act(observation, mode=mode, generators=generators, temperature=temperature)
        return decision if mode == "greedy" else replace(decision, actions_E_A_D=-decision.actions_E_A_D)

    monkeypatch.setattr(policy, "act", shaken)
    found = attempted(policy)
    assert found["true_success"].value < 0.1 < found["greedy_above_sampled"].value
    gap = found["greedy_above_sampled"]
    assert "within_above_gap" not in found, "attempts that never succeed have no order"
    assert judge(figures(), {"policy": {"greedy_above_sampled": gap}}).verdict != "go"
    known = {"greedy_above_sampled": gap, "within_above_gap": Estimate(0.2, 0.1, 0.3)}
    assert judge(figures(), {"policy": known}).verdict == "go"
    monkeypatch.setattr(imagination_check, "NullPolicy", lambda *given: policy)  # nothing is as good as what it plays
    again = attempted(policy)
    assert again["true_above_nothing"].value == pytest.approx(-found["greedy_above_sampled"].value)


@pytest.mark.parametrize(
    ("within", "gap", "verdict"),
    [
        (Estimate(0.61, 0.54, 0.68), Estimate(0.10, 0.02, 0.18), "go"),  # a hammer's rose from .435 to .915,
        (Estimate(0.55, 0.49, 0.61), Estimate(0.53, 0.45, 0.59), "doubtful"),  # .895 to .995: a no by the gap alone
        (Estimate(0.10, 0.01, 0.20), Estimate(0.29, 0.19, 0.38), "no"),  # fell from .70 to .46: right by the gap
    ],
)
def test_the_order_of_attempts_must_outweigh_what_they_lack(within: Estimate, gap: Estimate, verdict: str) -> None:
    both = within.less(gap)
    assert both.value == pytest.approx(within.value - gap.value) and both.low < both.value < both.high
    assert judge(figures(), {"policy": {"within_above_gap": both}}).verdict == verdict


def test_the_page_has_the_bounds() -> None:
    page = (ROOT / "documentations/trust.md").read_text()
    rows = re.findall(r"^\| .*?\(`(\w+)`\).*? \| ([≥≤]) ([\d.-]+) \| (.*?) ?\| ", page, re.MULTILINE)
    found = {name: (sign == "≥", float(go), float(no.split()[-1]) if no else None) for name, sign, go, no in rows}
    assert found == {one.name: (one.is_least, one.go, one.no and round(one.no, 2)) for one in BOUNDS}


def test_the_verdict_follows_the_bounds() -> None:
    assert judge(figures()).verdict == "go" and judge(figures()).reasons == ()
    doubtful = judge(figures(ends_true=Estimate(0.74, 0.66, 0.8, 90)))
    assert doubtful.verdict == "doubtful" and "0.74 [0.66, 0.80]" in doubtful.reasons[0]
    for bound in BOUNDS:
        if bound.no is not None:
            found = figures(**{bound.name: bound.no + (-0.01 if bound.is_least else 0.01)})
            found.pop(bound.unless, None)
            wrong = judge(found)
            assert wrong.verdict == "no" and wrong.next_step == bound.cure and bound.why in wrong.reasons[0]
            unknown = judge(figures(**{bound.name: float("nan")}))
            assert unknown.verdict == ("doubtful" if bound.name == WITHIN else "go"), "not measured"
    for name, surely, hardly in (
        ("ends_true", Estimate(0.75, 0.67, 0.8, 90), Estimate(0.75, 0.64, 0.8, 90)),
        ("nothing_valued", Estimate(0.1, 0.0, 0.3, 90), Estimate(0.1, 0.0, 0.4, 90)),
    ):
        assert judge(figures(**{name: surely})).verdict == "go"
        wide = judge(figures(**{name: hardly}))
        assert wide.verdict == "doubtful" and "its interval" in wide.reasons[0]
    assert judge(figures(), {"policy": {"like_success": 0.6}}).verdict == "doubtful"
    assert judge(figures(), {"policy": {"like_success": 0.6, "true_ends": 0.9}}).verdict == "go", "asked directly"
    full = {"greedy_imagined_success": Estimate(1.0)}
    assert judge(figures(), {"policy": full}).verdict == "no", "nothing is left to learn there"
    assert judge(figures(), {"policy": {**full, "imagined_above_true": 0.3}}).verdict == "go", "asked directly"
    unseen = judge(figures(**{WITHIN: math.nan}), {"policy": {"played_ends": 0.9}})
    assert (unseen.verdict, unseen.next_step) == ("doubtful", TRY) and "attempts from one start" in unseen.reasons[0]
    assert judge(figures(), {"policy/1": {}, "policy/2": {WITHIN: Estimate(math.nan)}}).verdict == "doubtful"
    assert judge(figures(**{WITHIN: math.nan}), allowed=[WITHIN]).verdict == "go"
    bad = dict(ends_imagined=0.5)
    assert judge(figures(**bad)).verdict == judge(figures(**bad), {"policy": {WITHIN: 0.2}}).verdict == "go"
    assert judge(figures(**bad), {"policy": {WITHIN: math.nan}}).verdict == "no", "too few attempts to know it better"
    assert judge(figures(**bad, **{WITHIN: math.nan}), {"policy/1": {WITHIN: 0.2}, "policy/2": {}}).verdict == "no"
    assert "beside its clone" in judge(figures()).next_step and "small steps" in judge(figures()).next_step
    assert "where it is, as improve_policy does, the world model longer" in judge(figures(nothing_valued=0.4)).next_step
    assert judge(figures(ends_true=0.5), allowed=["ends_true"]).verdict == "go"
    assert judge(figures(), {"policy/1": {}, "policy/2": {"spread": 0.0}}).verdict == "no"
    hardly = {"true_above_nothing": Estimate(0.085, 0.005, 0.165, 48)}
    assert judge(figures(ends_true=0.7), {"policy": hardly}).next_step == CLONE, "few successes tell a reward little"
    assert judge(figures(ends_true=0.6), {"policy": hardly}).next_step == REWARD, "what forbids comes first"
    known = judge(figures(leaks=["the reward was trained by no split"]))
    assert known.verdict == "doubtful" and known.reasons == ("the reward was trained by no split",)
    few = judge(figures(successes=3, ends_true=0.5))
    assert few.verdict == "doubtful" and "only 3 held-out" in few.reasons[0] and "3 times as many" in few.next_step


def test_what_is_paid_for_nothing_is_a_false_success(few: Path, tiny_imagination: Imagination) -> None:
    outcomes = [True, False, True]
    some = imagination_check.read_episodes(LeRobotSource.open(few), None, range(3), outcomes, 12)
    found, _ = imagination_check.replays(tiny_imagination, ConstantReward(), some)
    assert found["nothing_success"] == found["false_success_imagined"] == found["nothing_valued"].value == 1
    assert found["ends_imagined"].value == 0.5


def test_wrong_inputs_are_named(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_recordings(tmp_path / "other", action_scale=0.5)
    for words, text in (
        (("--allow", "ends_imagned"), "Did you mean ends_imagined"),
        (("--data", other), "but other numbers in them"),
        (("--reward", tmp_path / "none"), "does not exist"),
        (("--suite", "toy"), "--suite needs --policy"),
    ):
        assert check(few, tmp_path / "card.json", *words) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds 0 safetensors"):
        read_reward(str(tmp_path))


def test_recordings_are_imagined_in_the_size_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 96 rows were imagined with 96 rows by a world model that knows 64: every verdict was no. Training,
    starts and gate see the same pictures."""
    folder, size = write_recordings(tmp_path / "data"), (32, 48)
    source = LeRobotSource.open(folder)
    card = ModelCard(video_size=size, input_crop="center")  # as cards had it of every run with actions
    monkeypatch.setattr(imagination, "read_card", lambda path: card)
    fit = imagination.fit_of("RUN")
    found = imagination_check.read_episodes(source, None, [0, 1], [True, False], 4, fit)
    sizes = {tuple(one.shape[-3:]) for one in (found.first_E_H_W_C, *found.films, *found.tails)}
    assert sizes == {(*size, 3)}
    trained = LeRobotActionDataset(root=str(folder), num_frames=5, video_size=size, val_fraction=0)
    assert torch.equal(found.films[0][:5], trained[0]["video"].permute(1, 2, 3, 0))
    start = RecordedStart("one", "push", source.frames(0, "front", [0]).permute(1, 2, 3, 0).numpy())
    write_starts(tmp_path / "starts.safetensors", [start])
    shown = RecordedStarts(str(tmp_path / "starts.safetensors"), size=size).starts([0], [0])
    assert torch.equal(shown.pictures_E_F_H_W_C[0, 0], found.first_E_H_W_C[0])
    monkeypatch.setattr(imagination, "read_card", lambda path: ModelCard())
    assert imagination.fit_of("FILE") is None


@pytest.fixture(scope="module")
def tiny_imagination() -> Imagination:
    return imagination_of(device="cpu")


def test_pictures_of_a_policy_are_those_of_its_ends(
    few: Path, tiny_imagination: Imagination, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, play = list[Any](), imagination_check.attempts
    monkeypatch.setattr(imagination_check, "attempts", lambda *of, **how: played.append(play(*of, **how)) or played[-1])
    familiar = SimpleNamespace(unlike=torch.clone, faded=torch.clone)
    monkeypatch.setattr(imagination_check, "PictureDistances", lambda *of: familiar)
    some = imagination_check.read_episodes(LeRobotSource.open(few), None, range(2), [True] * 2, 0)
    policy, _ = read_policy(TINY_POLICY)
    found = imagination_check.policy_figures(policy, tiny_imagination, RingReward(), some, some)
    for name in ("pictures_outside", "pictures_faded"):
        assert torch.equal(found[name], played[0].frames_E_F_H_W_C[:, -1])
    assert found["greedy_imagined_success"].value == played[0].success_E.double().mean()


def test_replays_are_what_a_policy_learns_from(tiny_imagination: Imagination) -> None:
    """Bit for bit the pictures of an environment with the same starts, seeds and actions, two of three at a time."""
    starts = held_out_starts(3, 1, seed=0)
    actions = torch.rand(2, 3, 12, 4, generator=torch.Generator().manual_seed(0)) * 3 - 1.5  # not clipped
    env = WorldModelEnv(tiny_imagination, ToyStarts(), ToyDetectorReward(), 2, 24, clip_actions=False)
    expected = film(env, starts, actions)
    first = ToyStarts().starts(starts.task_ids, starts.trial_ids).pictures_E_F_H_W_C[:, 0]
    whole = actions.transpose(0, 1).flatten(1, 2)
    video = replayed(tiny_imagination, first, whole, seeds=starts.seeds, batch_size=2)
    assert torch.equal(video.permute(0, 4, 1, 2, 3), expected)
    assert not torch.equal(replayed(tiny_imagination, first, whole, seeds=[0, 1, 2], batch_size=2), video)


def test_a_short_last_chunk_repeats_its_last_action_and_more_evaluations_are_made(
    tiny_imagination: Imagination,
) -> None:
    first = ToyStarts().starts([0], [0]).pictures_E_F_H_W_C[:, 0]
    actions = torch.rand(1, 14, 4, generator=torch.Generator().manual_seed(0))
    video = replayed(tiny_imagination, first, actions, seeds=[5], num_steps=2)
    assert video.shape == (1, 15, *first.shape[1:]) and torch.equal(video[:, 0], first)
    still = torch.cat([actions, actions[:, -1:].expand(-1, 10, -1)], dim=1)
    options = dict(num_steps=2, final_evaluation=False)
    clip = tiny_imagination.rollout(
        first.permute(0, 3, 1, 2)[:, :, None],
        tiny_imagination.transformed(still.numpy()),
        [5],
        type(ONE_EVALUATION)(**options, is_repeatable=True),
    )
    assert torch.equal(video[:, 1:], clip.permute(0, 2, 3, 4, 1)[:, 1:15])
    with pytest.raises(DataError, match="1 first pictures, 1 sequences of 14 actions and 2 seeds"):
        replayed(tiny_imagination, first, actions, seeds=[1, 2])


def test_episodes_of_as_many_chunks_are_imagined_together_and_repeat_their_last_action() -> None:
    parts = [*whole_chunks([3, 12, 13, 24, 5, 12], 12, lambda count: 24 // count)]
    assert parts == [(12, [0, 1]), (12, [4, 5]), (24, [2]), (24, [3])]
    assert held(torch.arange(6.0).reshape(2, 3), 4).tolist() == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]


def test_recordings_are_not_imagined_by_a_world_model_that_begins_with_five_pictures(
    tiny_imagination: Imagination, tmp_path: Path
) -> None:
    """It is said before any of them is read."""
    source = LeRobotSource.open(write_random(tmp_path / "my_data", 1, ["front"], 32))
    with_actions_of(source, tiny_imagination)
    config = attrs.evolve(tiny_imagination.config, min_num_conditional_frames=2)
    other: Any = SimpleNamespace(config=config, transform=tiny_imagination.transform, action_keys=None)
    with pytest.raises(ConfigError, match="5 at least"):
        with_actions_of(source, other)


def test_pictures_without_their_gripper_are_near_to_recordings_and_are_known_all_the_same() -> None:
    learnt, held = (make_episodes(48, seed=seed).states for seed in (1, 2))
    empty = held.copy()
    empty[..., GRIPPER_X] = -1000.0
    films, true, faded = (torch.from_numpy(render(states, 48)).flatten(0, 1) for states in (learnt, held, empty))
    ends = torch.from_numpy(render(held[:, -1], 48))
    read: Any = (SimpleNamespace(last_E_H_W_C=ends), SimpleNamespace(films=[films], tails=[]))
    familiar = imagination_check.PictureDistances(*read)
    assert familiar.unlike(faded) <= 0.1 and familiar.unlike(true) <= 0.1
    assert familiar.faded(faded) >= 0.9 and familiar.faded(true) <= 0.1
