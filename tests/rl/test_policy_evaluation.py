# SPDX-License-Identifier: Apache-2.0
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import GAP, HEADER
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.video import media
from cosmos_predict2.data.video.media import read_video
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.first_frames import SimulatedStarts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes import policy_evaluation
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, replayed
from cosmos_predict2.rl.episodes.policy_evaluation import (
    Comparison,
    Evaluation,
    Rate,
    draws_of,
    evaluate,
    film,
    held_out_starts,
    imagined_along,
    played_along,
)
from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.rl.policies import files
from cosmos_predict2.rl.policies.files import PolicyCard, write_policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.errors import ConfigError, DataError
from scripts import evaluate_policy
from tests.programs import call

BRIGHT = 0.713  # which divides the four episodes


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (360, 800, 0.4158, 0.4847)],
)
def test_intervals_are_wilsons(successes: int, episodes: int, low: float, high: float) -> None:
    assert Rate(successes, episodes).interval == pytest.approx((low, high), abs=2e-4)


def test_an_interval_of_several_draws_is_over_the_starts() -> None:
    """As wide as of the starts where these decide, as narrow as of all episodes where they do not matter."""
    starts = held_out_starts(200, 1, seed=0, draws=4)
    assert len(starts) == 800 and len(set(starts.draws)) == 800 and len(set(starts.seeds)) == 200
    assert starts.part(slice(0, None, 4)) == held_out_starts(200, 1, seed=0)
    valid = torch.ones(800, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    decided = (torch.rand(200, generator=generator) < 0.4).repeat_interleave(4)
    free = torch.rand(800, generator=generator) < 0.4
    for success, independent in ((decided, 200), (free, 800), (~free & False, 200)):
        found = Rate.of(success, valid, starts)
        assert (found.successes, found.episodes, found.starts) == (int(success.sum()), 800, 200)
        assert found.independent == pytest.approx(independent, rel=0.15)
    low, high = Rate.of(decided, valid, starts).interval
    expected = Rate(int(decided.sum()) // 4, 200).interval
    assert (low, high) == pytest.approx(expected, abs=2e-3)
    valid[1::4] = valid[2::4] = valid[3::4] = False  # lost
    assert Rate.of(free, valid, starts) == Rate(int(free[::4].sum()), 200)


def test_the_number_of_independent_episodes_follows_from_the_spread_between_starts() -> None:
    """Three starts of two draws each. With 2, 1 and 0 successes the variance of the mean is 2 * 3 / 2 / 6^2."""
    starts, everyone = Starts([0] * 6, [0, 0, 1, 1, 2, 2], [0] * 6, list(range(6))), torch.ones(6, dtype=torch.bool)
    found = Rate.of(torch.tensor([True, True, True, False, False, False]), everyone, starts)
    assert found.independent == pytest.approx(0.25 / (2 * 3 / 2 / 6**2)) == 3
    found = Rate.of(torch.tensor([True, True, True, False, True, False]), everyone, starts)
    assert found.independent == 6, "where starts are more alike than chance makes them, all episodes"


def test_policies_that_draw_noise_are_played_several_times() -> None:
    policy = ToyPolicy(width=8)
    assert (draws_of(policy, "greedy"), draws_of(policy, "sample"), draws_of(policy, "sample", 1)) == (1, 4, 1)
    policy.draws_when_greedy = True  # type: ignore[assignment]
    assert draws_of(policy, "greedy") == 4


def test_a_rate_of_no_episodes_is_unknown() -> None:
    assert math.isnan(Rate(0, 0).rate) and all(map(math.isnan, Rate(0, 0).interval))


def test_shares_of_agreement() -> None:
    imagined = torch.tensor([1, 1, 1, 0, 0], dtype=torch.bool)
    true = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    valid = torch.ones(5, dtype=torch.bool)
    found = Comparison.of(imagined, true, valid)
    assert (found.true_rate, found.imagined_rate, found.agreement) == pytest.approx((0.6, 0.6, 0.6))
    assert (found.true_positive_rate, found.false_positive_rate) == pytest.approx((2 / 3, 0.5))
    assert math.isnan(Comparison.of(imagined, torch.ones(5), valid).false_positive_rate)
    found = Comparison.of(imagined, true, torch.tensor([True, True, True, False, True]))  # one was lost
    assert (found.episodes, found.true_rate, found.true_positive_rate) == (4, 0.5, 1.0)


def test_success_is_counted_by_task_and_does_not_depend_on_how_many_play_together() -> None:
    torch.manual_seed(0)
    policy, tasks = ToyPolicy(width=32, noise=1.0), ["touch_puck", "push_puck"]
    starts = held_out_starts(12, len(tasks), seed=3)
    found = [evaluate(policy, ToyEnv(size, tasks=tasks, split="val"), starts, tasks, "sample") for size in (12, 5)]
    assert torch.equal(found[0].played.success_E, found[1].played.success_E)
    done: list[str] = []
    evaluate(policy, ToyEnv(5, tasks=tasks), starts, tasks, "sample", execute=3, on_progress=done.append)
    counts = [int(text.split()[0]) for text in done]
    assert counts == sorted(counts) and counts[-1] == 12 and len(counts) > 12
    torch.testing.assert_close(found[0].played.actions_M_E_A_D, found[1].played.actions_M_E_A_D)
    assert {name: rate.episodes for name, rate in found[0].tasks.items()} == {"touch_puck": 6, "push_puck": 6}
    assert found[0].tasks["touch_puck"].successes == int(found[0].played.success_E[::2].sum())
    assert found[0].total == Rate(int(found[0].played.success_E.sum()), 12)


def test_starts_that_come_again_are_no_more_evidence() -> None:
    """Of a suite with few starts more episodes are the same starts again, as its environment takes them."""
    env: Any = ToyEnv(20, tasks=["touch_puck"])
    env.metadata = {**env.metadata, "num_trials": 5}
    found = evaluate(ToyPolicy(width=32), env, held_out_starts(20, 1, seed=0), ["touch_puck"])
    assert (found.total.episodes, found.total.starts) == (20, 5)
    env.metadata = {**env.metadata, "num_trials": 2**31}
    assert evaluate(ToyPolicy(width=32), env, held_out_starts(20, 1, seed=0), ["touch_puck"]).total.starts is None


def test_a_lost_episode_is_neither_a_success_nor_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, tasks = LocalRollout.collect, ["touch_puck", "push_puck"]

    def collected(*arguments: Any) -> Any:
        success, valid = ([True, False, True, False], [True, True, False, True])
        return replace(collect(*arguments), success_E=torch.tensor(success), is_valid_E=torch.tensor(valid))

    monkeypatch.setattr(LocalRollout, "collect", collected)
    found = evaluate(ToyPolicy(width=32), ToyEnv(4, tasks=tasks), held_out_starts(4, 2, seed=0), tasks)
    assert found.tasks == {"touch_puck": Rate(1, 1), "push_puck": Rate(0, 2)} and found.total == Rate(1, 3)

    def all_lost(*arguments: Any) -> Any:
        return replace(collected(*arguments), is_valid_E=torch.zeros(4, dtype=torch.bool))

    monkeypatch.setattr(LocalRollout, "collect", all_lost)
    with pytest.raises(DataError, match=r"All 4 episodes were lost.*check_environment"):
        evaluate(ToyPolicy(width=32), ToyEnv(4, tasks=tasks), held_out_starts(4, 2, seed=0), tasks)


@pytest.mark.parametrize(("size", "is_other"), [((48, 64), True), ((64, 48), True), ((96, 96), False), ((), False)])
def test_pictures_of_another_shape_than_a_clone_has_seen_are_refused(size: tuple[int, ...], is_other: bool) -> None:
    """Another size of the same shape is what a policy brings to its own."""
    policy, tasks = ToyPolicy(width=32), ["push_puck"]
    policy.recorded_size = size
    with pytest.raises(ConfigError, match=r"recorded pictures have .*image_size=") if is_other else nullcontext():
        evaluate(policy, ToyEnv(2, tasks=tasks), held_out_starts(2, 1, seed=0), tasks)


def test_the_same_actions_in_the_same_world_agree() -> None:
    torch.manual_seed(0)
    env, starts = ToyEnv(6, split="val"), held_out_starts(6, 1, seed=0)
    found = evaluate(ToyPolicy(width=32), env, starts, ["push_puck"]).played
    for comparison in (imagined_along(found, starts, env), played_along(found, starts, env)):
        assert comparison.agreement == 1 and comparison.true_rate == comparison.imagined_rate


@pytest.mark.parametrize(("execute", "size"), [(None, 3), (2, 2)])
def test_a_robot_rests_behind_the_end_of_its_true_episode(execute: int | None, size: int) -> None:
    """Else the replay of an episode that ended at success goes on with the action that was decided last."""
    actions = torch.rand(2, 3, 3, 4) - 0.5
    executed = torch.ones(2, 3, 3, dtype=torch.bool)
    executed[:, :, size:] = False
    executed[1, 0, 1:] = executed[1, 1] = False  # the second ended with its first decision, the third never did
    played: Any = SimpleNamespace(actions_M_E_A_D=actions, executed_M_E_A=executed)
    found = policy_evaluation._with_rest(played, execute)
    assert torch.equal(found[executed], actions[executed]) and torch.equal(found[:, 2], actions[:, 2])
    assert not found[1, 0, 1:size, :-1].any() and (found[1, 0, 1:size, -1] == actions[1, 0, 0, -1]).all()
    assert not found[1, 1, :size, :-1].any() and (found[1, 1, :size, -1] == actions[0, 1, size - 1, -1]).all()


def test_what_is_imagined_and_what_is_true_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    success, others = torch.tensor([True, True, True, False, True]), torch.tensor([True, False, False, False, True])
    played: Any = SimpleNamespace(success_E=success, is_valid_E=torch.tensor([1, 1, 1, 1, 0]).bool(), actions_M_E_A_D=0)
    monkeypatch.setattr(policy_evaluation, "_with_rest", lambda played, _: played.actions_M_E_A_D)
    monkeypatch.setattr(policy_evaluation, "replayed", lambda *_: (others, None, torch.tensor([0, 1, 1, 1, 1]).bool()))
    given: Any = (played, held_out_starts(5, 1, seed=0), None)
    for comparison, rates in ((imagined_along(*given), (2 / 3, 0.0)), (played_along(*given), (0.0, 2 / 3))):
        assert (comparison.true_rate, comparison.imagined_rate) == pytest.approx(rates)
        assert comparison.episodes == 3  # that neither lost


def test_a_film_has_the_first_picture_and_one_for_each_action() -> None:
    starts = held_out_starts(2, 1, seed=0)
    actions = torch.zeros(2, 2, 12, 4)
    actions[1, :, :, 0] = 1.0
    both, one = (ToyEnv(num, split="val") for num in (2, 1))
    pictures = film(both, starts, actions)
    assert torch.equal(film(one, starts, actions), pictures)
    some = film(both, starts, actions, execute=5)
    assert some.shape == (2, 3, 11, 48, 48)
    assert torch.equal(some[:, :, :6], pictures[:, :, :6])
    assert not both.keep_frames  # as before
    assert pictures.shape == (2, 3, 25, 48, 48) and pictures.dtype == torch.uint8
    first, still, moved = (pictures[:, :, k] for k in (0, 12, 13))
    assert torch.equal(first, still) and not torch.equal(still, moved)


def test_nobody_decides_for_an_episode_that_is_over() -> None:
    class Counting(ToyPolicy):
        rows = 0

        def act(self, observation: Any, **options: Any) -> Any:
            self.rows += len(observation["full_image"])
            return super().act(observation, **options)

    torch.manual_seed(0)
    policy, starts = Counting(width=32, noise=1.0), held_out_starts(40, 1, seed=3)
    world = dict(tasks=["touch_puck"], terminate_on_success=True, num_steps=60)
    env = ToyEnv(40, **world)
    played = LocalRollout(policy, env).collect(starts)
    needed = int(played.executed_M_E_A.any(dim=2).sum())
    assert policy.rows == needed < 40 * 5
    success, total, _ = replayed(env, starts, played.actions_M_E_A_D)  # by all decisions, after an end as well
    assert torch.equal(success, played.success_E) and torch.equal(total, played.return_E)


def test_the_starts_of_a_task_can_stand_together() -> None:
    turns, blocks = (held_out_starts(7, 3, seed=1, in_blocks=in_blocks) for in_blocks in (False, True))
    assert blocks.task_ids == [0, 0, 0, 1, 1, 2, 2] and blocks.trial_ids == [0, 1, 2, 0, 1, 0, 1]
    pairs = [set(zip(one.task_ids, one.trial_ids, one.seeds, one.draws)) for one in (turns, blocks)]
    assert pairs[0] == pairs[1]


def test_starts_go_on_where_others_ended_and_draw_by_their_own_numbers() -> None:
    whole, rest = held_out_starts(7, 2, seed=1), held_out_starts(3, 2, seed=1, first=4)
    assert rest == whole.part(slice(4, 7))
    other = held_out_starts(7, 2, seed=2)
    assert (other.task_ids, other.trial_ids) == (whole.task_ids, whole.trial_ids)
    assert len({*whole.draws, *other.draws}) == len({*whole.seeds, *other.seeds}) == 14


def test_the_toy_suite_has_held_out_starts() -> None:
    place = suites.find("toy", ["push_puck", "touch_box"], max_steps=9)
    env, other = place.env(3, ToyPolicy(width=8)), ToyEnv(3, tasks=["push_puck", "touch_box"], split="val")
    begin = dict(task_ids=[0, 1, 1], trial_ids=[0, 1, 2])
    assert torch.equal(*(one.reset(options=begin)[1]["states"] for one in (env, other)))
    assert (place.episodes, place.at_once, place.in_blocks, env.metadata["max_steps"]) == (800, 200, False, 9)


class TwoTasks(ToyEnv):
    num_trials = 7

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, tasks=["push_puck", "touch_box"])


def test_a_suite_of_ones_own_plays_each_start_once_and_no_task_that_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    name, policy = f"{__name__}:TwoTasks", ToyPolicy(width=8)
    one, two = suites.find(name), suites.find(name, ["first", "second"])
    assert (one.tasks, one.episodes, two.episodes) == (["TwoTasks"], 7, 14)
    two.env(1, policy)
    assert not caplog.records
    one.env(1, policy)
    assert "1 of the 2 tasks of TwoTasks" in caplog.text
    with pytest.raises(ConfigError, match="--tasks names 3, but TwoTasks has 2"):
        suites.find(name, ["first", "second", "third"]).env(1, policy)


def test_the_command_compares_with_the_world_model_that_ships(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    write_policy(tmp_path / "policy", ToyPolicy(width=32), {"seed": 7})
    out = tmp_path / "out"
    words = ("--policy", str(tmp_path / "policy"), "--episodes", "4", "--videos", "1", "--out", str(out))
    assert call(evaluate_policy, *words, "--world_model") == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert found["about"]["seed"] == 7 and "torch" in found["versions"]["libraries"]
    assert found["success"]["episodes"] == 4
    for way in ("actions_chosen_in_the_simulator", "actions_chosen_in_imagination"):
        assert found["world_model"][way]["episodes"] == 4
    video, _ = read_video(out / found["videos"][0])
    assert video.shape == (3, 25, HEADER + 192 + GAP, GAP + 2 * (192 + GAP)), "true beside imagined"
    printed = capsys.readouterr().out
    assert "push_puck: " in printed and "actions chosen in imagination: imagined" in printed
    assert "NaN" not in (out / "evaluation.json").read_text()  # shares of nothing


class Brightness(FrameRewardDefaults):
    """A judge of one's own: success is a bright upper half."""

    def judge(self, frames_E_F_H_W_C: Tensor, context: Any) -> Judgement:
        value_E_F = frames_E_F_H_W_C[:, :, :24].float().mean(dim=(2, 3, 4)) / 255
        return Judgement(value_E_F, value_E_F > BRIGHT)


@pytest.mark.parametrize(("env", "split"), [("cosmos_predict2.rl.envs.toy:ToyEnv", "train"), ("toy", "val")])
def test_the_command_compares_in_any_simulator_from_its_own_first_pictures(
    env: str, split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy world as somebody's own simulator is imagined from the same starts, by the same actions."""
    torch.manual_seed(0)
    write_policy(tmp_path / "policy", ToyPolicy(width=32), {})
    out = tmp_path / "out"
    words = ("--policy", str(tmp_path / "policy"), "--suite", env, "--episodes", "4", "--out", str(out))
    reward = f"{__name__}:{Brightness.__name__}"
    assert call(evaluate_policy, *words, "--world_model", TINY_ACTION, "--reward", reward) == 0
    found = json.loads((out / "evaluation.json").read_text())["world_model"]
    starts = held_out_starts(4, 1, 0)
    policy, simulator = files.read_policy(str(tmp_path / "policy"))[0], ToyEnv(4, split=split)
    played = evaluate(policy, simulator, starts, ["push_puck"]).played
    judged = Scoring(judge="last", reward_on="last")
    imagined = WorldModelEnv(imagination_of(), ToyStarts(split=split), Brightness(), 4, 24, scoring=judged)
    expected = asdict(imagined_along(played, starts, imagined))
    assert 0 < expected["imagined_rate"] < 1  # or nothing is compared
    expected.pop("true_positive_rate")  # nothing succeeds
    assert found["actions_chosen_in_the_simulator"] == {"true_positive_rate": None} | expected
    few = SimulatedStarts(ToyEnv(3), 1).starts([0] * 4, [7, 8, 9, 10])  # more than the simulator has places
    same = ToyStarts().starts([0] * 4, [7, 8, 9, 10])
    assert torch.equal(few.pictures_E_F_H_W_C, same.pictures_E_F_H_W_C)
    assert few.task_description == same.task_description
    fit = partial(media.resize, size=(32, 40))
    fitted = SimulatedStarts(ToyEnv(3), 1, fit).starts([0] * 4, [7, 8, 9, 10]).pictures_E_F_H_W_C
    assert fitted.shape == (4, 1, 32, 40, 3)
    assert torch.equal(fitted[2, 0].permute(2, 0, 1), fit(same.pictures_E_F_H_W_C[2, 0].permute(2, 0, 1)))


def test_a_world_model_and_its_judge_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(tmp_path / "policy", ToyPolicy(width=32), {})
    words = ("--policy", str(tmp_path / "policy"), "--suite", "cosmos_predict2.rl.envs.toy:ToyEnv")
    reward = f"{__name__}:{Brightness.__name__}"
    for more, message in (
        (["--world_model", TINY_ACTION], "--world_model PATH --reward PATH go together in --suite"),
        (["--reward", reward], "go together"),
        (["--world_model", "--reward", reward], "the model that ships is of the toy world"),
        (["--world_model", TINY_ACTION, "--reward", "collections:OrderedDict"], "has no judge(frames, context)"),
        (["--suite", "toy", "--reward", reward], "go together"),
    ):
        assert call(evaluate_policy, *words, *more) == 2
        assert message in capsys.readouterr().err


def test_a_policy_of_a_run_executes_what_it_did_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = PolicyCard("ToyPolicy", {}, {"run": "run", "execute": 6})
    monkeypatch.setattr(files, "read_policy", lambda *_: (ToyPolicy(width=32), card))
    for words, executed in (((), 6), (("--execute", "12"), 12)):
        assert call(evaluate_policy, "--policy", "run", "--episodes", "1", "--out", str(tmp_path), *words) == 0
        assert json.loads((tmp_path / "evaluation.json").read_text())["execute"] == executed
    assert capsys.readouterr().out.count("--execute 6, as the policy's run had it") == 1


def test_the_command_evaluates_by_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Any] = {}
    tasks = ["touch_puck", "push_puck"]

    def evaluated(*given: Any) -> Evaluation:
        calls["evaluate"] = given[1:6]
        found = evaluate(*given)
        return replace(found, played=replace(found.played, success_E=torch.tensor([True, False, False, True])))

    monkeypatch.setattr(policy_evaluation, "evaluate", evaluated)
    read = lambda *given: calls.update(read=given) or (ToyPolicy(width=8), PolicyCard("", {}))  # noqa: E731
    monkeypatch.setattr(files, "read_policy", read)
    monkeypatch.setattr(media, "write_video", lambda path, *_: calls.setdefault("videos", []).append(path.name))
    words = ["--policy", "mine", "--load_ema", "--tasks", *tasks, "--episodes", "4", "--first", "7", "--seed", "3"]
    words += ["--out", str(tmp_path), "--draws", "1", "--mode", "sample", "--execute", "6"]
    words += ["--videos", "4", "--setting", "hard"]
    with mock.patch.object(suites, "find", wraps=suites.find) as find:
        assert call(evaluate_policy, *words) == 0
    assert find.call_args.kwargs["setting"] == "hard" and calls["read"] == ("mine", "net_ema", {})
    assert calls["evaluate"][1:] == (held_out_starts(4, 2, 3, 7), tasks, "sample", 6)
    names = [("push_puck", 3, "true"), ("touch_puck", 4, "false"), ("push_puck", 4, "false"), ("touch_puck", 5, "true")]
    assert calls["videos"] == [f"task={task}_trial_{i}--success={outcome}.mp4" for task, i, outcome in names]
    assert (
        evaluate_policy.video_name("gym_pusht/PushT-v0", 4, True) == "task=gym_pusht_PushT-v0_trial_4--success=true.mp4"
    )


def test_options_of_a_policy_replace_those_that_it_was_written_with(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy", ToyPolicy(width=32, noise=0.2), {})
    assert files.read_policy(str(tmp_path / "policy"), options={"noise": 0.5})[0].arguments["noise"] == 0.5
    words = ("--policy", str(tmp_path / "policy"), "--episodes", "2", "--mode", "sample", "--out", str(tmp_path))
    assert call(evaluate_policy, *words, "--options", "noise=0.5") == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["options"] == ["noise=0.5"]


def test_wrong_flags_and_missing_policies_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_policy(tmp_path / "policy", ToyPolicy(width=32, action_dim=7), {})
    policy = ("--policy", str(tmp_path / "policy"), "--episodes", "1")
    for words, named in [
        (("--policy", str(tmp_path / "nowhere")), "nowhere"),
        ((*policy, "--suite", "nowhere"), "No suite is called 'nowhere'"),
        ((*policy, "--videos", "1"), "--videos 1 needs --out"),
        ((*policy, "--setting", "hart"), "hart"),
        ((*policy, "--suite", "toy_covered", "--setting", "hard"), "is covered. Leave --setting out, or use"),
        ((*policy, "--split", "test"), "split 'test'"),
        ((*policy, "--tasks", "push_pluck"), "push_pluck"),
        ((*policy, "--tasks", "push_puck", "push_puck"), "--tasks names push_puck twice"),
        ((*policy, "--options", "noise"), "--options noise: expected KEY=VALUE"),
        ((*policy, "--options", "nose=1.0"), "nose"),
        ((*policy, "--world_model"), "have 4 numbers, those of the policy 7"),
    ]:
        assert call(evaluate_policy, *words) == 2
        assert named in capsys.readouterr().err
