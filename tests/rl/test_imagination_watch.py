# SPDX-License-Identifier: Apache-2.0
"""A policy that leaves what its imagination can be trusted in: the run goes back to its best look, and ends."""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.split import read_split
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Trajectories, without_unreliable
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.imagination_gap import ImaginationAlarm
from cosmos_predict2.rl.imagined import check
from cosmos_predict2.rl.imagined.watch import FILE, ImaginationWatch, Limit
from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.trust import corrected
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.config import L
from imaginaire.errors import ConfigError, TrainingError
from tests.rl.test_imagination_check import RingReward, write_recordings
from tests.rl.test_vla_experience import Imagining
from tests.rl.vla_runs import NAME, RL, batch, collected, starts
from tests.training import difference, run_dir, saved, train

# --- what a look finds decides


class Planted(ImaginationWatch):
    """Looks that find what a test says, in the simulator."""

    def __init__(self, found: Any, **options: Any) -> None:
        super().__init__(data="", **options)
        self.found = [[float(value) for value in row] for row in found]  # greedy value and obedience of each look

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        super(ImaginationWatch, self).on_train_start(model, iteration)

    def _figures(self, model: Any) -> dict[str, float]:
        return dict(zip(("greedy_value", "obedience", "greedy_imagined_success"), self.found[len(self.looks)]))


def watched(root: Path, found: list[list[float]], *options: str, on_alarm: str = "best") -> int:
    node = f"{{_target_: {__name__}.Planted, found: {found}, limits: {{obedience: {{least: 0.5, why: it sleeps}}}}"
    words = [f"{RL}.kl_beta=0", f"{RL}.updates=1", f"{RL}.minibatches=2", "trainer.max_iter=10"]
    words += ["trainer.run_validation=true", "trainer.validation_iter=2", "dataloader_val.batch_size=2"]
    words += ["dataloader_val.dataset.num=2", f"+trainer.callbacks.watch={node}, on_alarm: {on_alarm}}}"]
    return train(root, ["experiment=toy_policy", *words, *options], config="tests/rl/vla_runs.py")


FOUND = [[0.3, 0.9], [0.5, 0.9], [0.4, 0.8], [0.9, 0.2]]  # at iterations 2, 4, 6 and 8


def test_a_run_ends_with_the_weights_of_its_best_look_which_every_program_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched(tmp_path, FOUND) == 0
    text = "at iteration 8, with the weights of iteration 4, the best that was right"
    assert text in caplog.text and "obedience is 0.2, below 0.5 (at first 0.9): it sleeps" in caplog.text
    folder = run_dir(tmp_path, NAME)
    assert (folder / "checkpoints" / "latest_checkpoint.txt").read_text().strip() == "iter_000000008.pt"
    last, best = (
        read_policy(str(folder / "checkpoints" / "model" / f"iter_{i:09d}.pt"))[0].state_dict() for i in (8, 4)
    )
    chosen = read_policy(str(folder))[0].state_dict()
    assert all(torch.equal(chosen[name], best[name]) and torch.equal(last[name], best[name]) for name in best)
    found = json.loads((folder / FILE).read_text())
    assert [look["iteration"] for look in found["looks"]] == [2, 4, 6, 8] and text in found["ended"]
    caplog.clear()
    assert watched(tmp_path, FOUND) == 0, "and is not gone on with"
    assert text in caplog.text and "the run has ended at iteration 8, before trainer.max_iter" in caplog.text


FULL = [[0.3, 0.9, 0.8], [0.5, 0.9, 0.96], [0.4, 0.8, 1.0], [0.9, 0.9, 1.0]]


def test_a_run_ends_where_all_that_is_played_is_imagined_to_succeed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched(tmp_path / "ends", FULL) == 0
    assert "100% of what is played is imagined to succeed" in caplog.text and "ended at iteration 6" in caplog.text
    folder = run_dir(tmp_path / "ends", NAME)
    assert (folder / "checkpoints" / "latest_checkpoint.txt").read_text().strip() == "iter_000000006.pt"
    assert watched(tmp_path / "on", FULL, "+trainer.callbacks.watch.ends_full=false", "trainer.max_iter=8") == 0
    other = run_dir(tmp_path / "on", NAME)
    assert (other / "checkpoints" / "latest_checkpoint.txt").read_text().strip() == "iter_000000008.pt"
    then, now = (
        read_policy(str(one / "checkpoints/model/iter_000000006.pt"))[0].state_dict() for one in (other, folder)
    )
    assert all(torch.equal(then[name], now[name]) for name in then), "with the weights of then"


class LooksAtStart(ImaginationAlarm):
    """Finds each look wrong, also that before the first step."""

    def __init__(self) -> None:
        super().__init__("best")

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        self.settle(model, "it dreams.", 0.5, iteration)


def test_a_look_before_the_first_save_that_is_wrong_ends_the_run_with_what_it_began_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["trainer.run_validation=true", "trainer.validate_at_start=true", "trainer.max_iter=4"]
    words += [f"+trainer.callbacks.look={{_target_: {__name__}.LooksAtStart}}"]
    assert train(tmp_path, ["experiment=toy_policy", *words], config="tests/rl/vla_runs.py") == 0
    assert "it dreams. So the run has ended at iteration 0, with the weights that it began with" in caplog.text
    assert (run_dir(tmp_path, NAME) / "checkpoints/model/iter_000000000.pt").exists()


def test_an_alarm_that_comes_to_a_resumed_run_names_the_iteration_that_it_goes_back_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["trainer.run_validation=true", "trainer.validation_iter=4", "checkpoint.save_iter=2"]
    look = f"+trainer.callbacks.look={{_target_: {__name__}.LooksAtStart}}"
    for last, more in ((2, []), (6, [look])):
        options = ["experiment=toy_policy", *words, f"trainer.max_iter={last}", *more]
        assert train(tmp_path, options, config="tests/rl/vla_runs.py") == 0
    assert "ended at iteration 4, with the weights of iteration 2, before its first look" in caplog.text


def test_a_resumed_watch_is_as_one_without_interruption(tmp_path: Path) -> None:
    right = [[0.1 * k, 0.9] for k in range(4)] + [[0.9, 0.3]]
    watched(tmp_path / "whole", right)
    for last in (0, 4, 6, 10):
        watched(tmp_path / "parts", right, f"trainer.max_iter={last}")
    assert difference(saved(tmp_path / "whole", NAME), saved(tmp_path / "parts", NAME)) is None
    files = [(run_dir(tmp_path / part, NAME) / FILE).read_text() for part in ("whole", "parts")]
    assert files[0] == files[1] and len(json.loads(files[0])["looks"]) == 5


def test_a_first_look_that_is_wrong_warns_or_stops_or_goes_back_to_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "imagined episodes cannot be trusted at iteration 2: obedience is 0.1"
    with pytest.raises(TrainingError, match=text):
        watched(tmp_path / "stop", [[0.3, 0.1]], on_alarm="stop")
    assert watched(tmp_path / "best", [[0.3, 0.1]]) == 0
    assert "ended at iteration 2, with the weights that it began with" in caplog.text
    folder = run_dir(tmp_path / "best", NAME)
    first = read_policy(str(folder / "checkpoints/model/iter_000000000.pt"))[0].state_dict()
    newest = read_policy(str(folder))[0].state_dict()
    assert all(torch.equal(newest[name], first[name]) for name in first)
    assert watched(tmp_path / "warn", [[0.3, 0.1]] * 5, on_alarm="warn") == 0 and text in caplog.text
    with pytest.raises(ConfigError, match="keep_last=2"):
        watched(tmp_path / "keep", FOUND, "checkpoint.keep_last=2")


@pytest.mark.parametrize(
    ("limit", "value", "is_wrong"),
    [
        (dict(most=0.02), 0.03, True),
        (dict(most=0.02), 0.01, False),
        (dict(fall=0.3), 0.1, True),
        (dict(fall=0.3), 0.2, False),
        (dict(rise=0.3, most=9.0), 0.8, True),
        (dict(least=0.1), math.nan, True),
    ],
)
def test_a_limit_is_a_bound_or_a_change_since_the_first_look(limit: Any, value: float, is_wrong: bool) -> None:
    assert bool(Limit(**limit).problem("figure", value, 0.45)) == is_wrong


def test_a_change_since_a_look_that_measured_nothing_is_none() -> None:
    for options in (dict(fall=0.5), dict(rise=0.3), dict(fall=0.5, least=0.1)):
        assert not Limit(**options).problem("noise_agreement", 0.8, math.nan)
    assert Limit(fall=0.5, least=0.1).problem("noise_agreement", 0.05, math.nan)


def test_the_distance_of_a_look_is_the_mean_of_the_steps_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apart", "gathered"):
        monkeypatch.setattr(f"{ImaginationWatch.__module__}.{name}", lambda *of: nullcontext())
    watch: Any = Planted([[0.1, 0.9]] * 3, limits={"approx_kl": Limit(most=0.5)}, on_alarm="warn")
    watch.trainer = SimpleNamespace(metrics=mock.Mock(), run_dir=str(tmp_path), interrupted=False)
    model = SimpleNamespace(ema_scope=nullcontext, net=None, env=mock.Mock())
    for iteration, distances in enumerate(((0.4, 0.2), (0.1,), ()), start=1):
        for one in distances:
            watch.on_training_step_batch_end(model, None, {"approx_kl": torch.tensor(one)}, torch.zeros(()))
        watch.on_validation_end(model, iteration)
    assert [look.get("approx_kl") for look in watch.looks] == [pytest.approx(0.3), pytest.approx(0.1), None]


# --- what a look finds


class Noise(FrameRewardDefaults):
    """Pays for what hardly can be seen."""

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        value = frames_E_F_H_W_C.double().sum(dim=(2, 3, 4)) * 0.37 % 1
        return Judgement(value.float(), value > 0.5)


def recorded(numbers: range, act: Any = lambda actions: actions) -> check.OutcomeEpisodes:
    made = make_episodes(16, 0, mix="mixed", first=2**19)
    films = [torch.from_numpy(made.render(i)) for i in numbers]
    actions = [act(torch.from_numpy(made.actions[i]).float()) for i in numbers]
    success = made.success[list(numbers)]
    return check.OutcomeEpisodes(
        torch.stack([f[0] for f in films]), films, films, actions, success, ["push"] * len(films)
    )


def look(reward: Any, policy: Any, **options: Any) -> dict[str, Any]:
    watch = ImaginationWatch(limits={}, data="")
    watch._learnt, watch._held_out = recorded(range(8)), recorded(range(8, 16))
    imagination = imagination_of(device="cpu")
    chunk = imagination.config.chunk_size
    watch._probe = check.action_probe(watch._learnt, chunk)
    watch._seen_true = check.actions_seen(watch._probe, watch._held_out.films, watch._held_out.actions, chunk)
    with mock.patch.multiple(f"{ImaginationWatch.__module__}", STARTS=4, ATTEMPTS=4):
        return watch._of_own_episodes(policy, imagination, reward)


def test_the_watch_looks_from_recordings_that_calibrate_and_at_none_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the test part nothing is chosen, and what ends a run is a choice."""
    data = write_recordings(tmp_path / "data")
    split = read_split(tmp_path / "split.json")
    read, seen = check.read_episodes, list[set[int]]()

    def noted(source: Any, camera: Any, numbers: Any, *of: Any) -> check.OutcomeEpisodes:
        seen.append(set(numbers))
        return read(source, camera, numbers, *of)

    monkeypatch.setattr(check, "read_episodes", noted)
    some = recorded(range(2))
    env = check.imagined_env(imagination_of(device="cpu"), RingReward(), check.starts_of(some, some))
    watch = ImaginationWatch(limits={}, data=str(data), split=str(tmp_path / "split.json"), on_alarm="warn")
    watch.on_train_start(SimpleNamespace(env=env))
    assert seen == [set(split.train), set(split.calibrate)] and not set.union(*seen) & set(split.test)


def test_two_noises_agree_about_a_true_reward_and_not_about_one_that_pays_for_noise() -> None:
    torch.manual_seed(0)
    policy = ToyPolicy(width=16, noise=1.0)
    agreement = [look(reward, policy)["noise_agreement"].value for reward in (RingReward(), Noise())]
    assert agreement[0] > 0.6 and abs(agreement[1]) < 0.5, agreement


# --- rates, and decisions that are not to be relied on


@pytest.mark.parametrize(
    ("rate", "recall", "false", "expected"),
    [(0.5, 0.8, 0.3, 0.4), (0.9, 0.8, 0.3, 1.0), (0.1, 0.8, 0.3, 0.0), (0.5, 0.4, 0.3, None), (0.5, None, 0.3, None)],
)
def test_an_imagined_rate_is_corrected_by_the_card(rate: float, recall: Any, false: float, expected: Any) -> None:
    found = corrected(rate, {"recall_imagined": recall, "false_success_imagined": false})
    assert found == (None if expected is None else pytest.approx(expected))


def test_corrected_rates_stand_beside_imagined_ones_and_in_the_log() -> None:
    given = dict(policy=L(ToyPolicy)(width=16, noise=1.0), env=L(Imagining)(num_envs=8), rl=VLARLConfig(group_size=4))
    card = SimpleNamespace(figures={"recall_imagined": 0.9, "false_success_imagined": 0.4})
    where = "cosmos_predict2.rl.trust"
    with (
        mock.patch(f"{where}.require_card", return_value=card),
        mock.patch(f"{where}.learning_inputs", return_value=({"reward": "0"}, {"reward": "here"})),
    ):
        one = VLAGRPOModel(VLAGRPOConfig(**given, card="card.json"))
    played = one._judged(one.env, starts(4), "sample")
    half = replace(played, success_E=torch.tensor([True, True, False, False]))
    assert one._facts(half)["success_corrected"] == pytest.approx(0.2)
    assert one.validation_note.format(imagined_greedy_success_corrected=0.2) == "corrected 0.2"
    one.learnt_in.figures = {"recall_imagined": 0.5, "false_success_imagined": 0.4}
    assert "success_corrected" not in one._facts(half)


def episodes(rewards: list[list[float]], disagrees: list[list[bool]]) -> Trajectories:
    """Two decisions of each episode, of which the last action is paid; rows are episodes."""
    played = collected()[1].rows(torch.arange(len(rewards)))
    reward_M_E_A = torch.zeros_like(played.reward_M_E_A)
    reward_M_E_A[..., -1] = torch.tensor(rewards).T
    return replace(played, reward_M_E_A=reward_M_E_A, disagrees_M_E=torch.tensor(disagrees).T)


def test_decisions_on_which_noises_disagree_count_in_no_return_and_no_advantage() -> None:
    played = episodes([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]], [[False, False], [True, False], [True, True]])
    each = without_unreliable(played, is_paid_last=False)
    assert each.return_E.tolist() == [4.0, 6.0, 0.0], "the mean of the reliable ones, of as many"
    assert each.is_valid_E.tolist() == [True, True, False]
    assert each.executed_M_E_A[:, :, 0].T.tolist() == [[True, True], [False, True], [False, False]]
    late = episodes([[0.0, 3.0], [0.0, 3.0]], [[True, False], [False, True]])
    last = without_unreliable(late, is_paid_last=True)
    assert last.return_E.tolist() == [3.0, 0.0] and last.is_valid_E.tolist() == [True, False]


def two_noises() -> WorldModelEnv:
    starts_of = check.starts_of(recorded(range(8, 12)), recorded(range(8)))
    scoring = Scoring(judge="last", reward_on="last")
    return WorldModelEnv(imagination_of(device="cpu"), starts_of, Noise(), 4, 24, scoring=scoring, num_noises=2)


def test_disagreement_of_two_noises_is_kept_of_each_decision_and_masks() -> None:
    assert LocalRollout(ToyPolicy(width=16), ToyEnv(4)).collect(starts(4)).disagrees_M_E is None
    torch.manual_seed(0)
    rl = VLARLConfig(group_size=4, mask_unreliable=True)
    one = VLAGRPOModel(VLAGRPOConfig(policy=L(ToyPolicy)(width=16, noise=1.0), env=L(two_noises)(), rl=rl))
    found = one.collect(batch(size=1))
    masked = found.record.disagrees_M_E
    assert masked.shape == (2, 4) and 0 < found.facts["unreliable_rate"] == masked.float().mean() < 1
    assert not found.record.executed_M_E_A[masked].any() and found.record.executed_M_E_A[~masked].all()
    assert (found.advantage_G_M.flatten()[masked[-1]] == 0).all()


def test_a_mask_needs_two_noises() -> None:
    rl = VLARLConfig(group_size=4, mask_unreliable=True)
    with pytest.raises(ConfigError, match=r"mask_unreliable=true.*num_noises.*set it to 2"):
        VLAGRPOModel(VLAGRPOConfig(policy=L(ToyPolicy)(width=16), env=L(Imagining)(num_envs=8), rl=rl))
