# SPDX-License-Identifier: Apache-2.0
"""The alarm goes off when held-out quality falls while the reward rises, and only then."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.clips import quality_alarm
from cosmos_predict2.rl.clips.quality_alarm import Measure, QualityAlarm
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import Agreement, Random
from imaginaire import distributed
from imaginaire.checkpoint.weight_files import load_pt
from imaginaire.config import L
from imaginaire.distributed.parallel import full_tensor
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks.trackers import WandbTracker
from tests.multiprocess import run_distributed
from tests.rl.runs import NAME, RL, rl_options, run
from tests.training import difference, rewind, run_dir, saved

MEASURES = {"agreement": Measure(make=L(Agreement)(), tolerance=0.5)}
ALARM = "trainer.callbacks.quality_alarm"


def _alarm() -> QualityAlarm:
    return QualityAlarm(MEASURES, every_n=1)


@pytest.mark.parametrize(
    ("reward", "quality", "is_raised"),
    [(2.0, 13.0, True), (0.5, 13.0, False), (2.0, 13.8, False), (2.0, 15.0, False)],
    ids=["hacked", "both fall", "within the tolerance", "both rise"],
)
def test_what_raises_the_alarm(reward: float, quality: float, is_raised: bool) -> None:
    alarm = _alarm()
    alarm._reward = 1.0
    assert alarm._judge("agreement", 14.0, 1) is None
    alarm._reward = reward
    text = alarm._judge("agreement", quality, 20)
    assert (text is not None) == is_raised
    other = _alarm()
    other.load_state_dict(alarm.state_dict())
    assert other.state_dict() == alarm.state_dict()


def test_after_going_back_the_reward_is_that_of_then() -> None:
    """The reward of the weights that are gone would set the alarm off again, for a quality that was there before."""
    alarm = _alarm()
    alarm.trainer, alarm._base_rates = mock.MagicMock(), [1.0]
    good = dict(iteration=2, measured=2, values={"agreement": 14.0}, reward=1.0)
    alarm.load_state_dict(dict(reward=2.0, best={"agreement": [14.0, 2.0, 1.0]}, saved=[good], num_back=0))
    assert alarm._judge("agreement", 13.0, 3) is not None
    alarm._go_back(None, "agreement", 3)
    assert alarm._judge("agreement", 13.0, 4) is None


def test_a_fall_by_the_tolerance_is_none_and_a_best_is_the_first_of_equals() -> None:
    alarm = _alarm()
    for reward, value, iteration in ((1.0, 14.0, 1), (2.0, 14.0, 2), (3.0, 13.5, 3)):
        alarm._reward = reward
        assert alarm._judge("agreement", value, iteration) is None
    assert alarm._best["agreement"] == [14.0, 1.0, 1.0]
    alarm._reward = 1.0  # as at the best: it did not rise
    assert alarm._judge("agreement", 0.0, 4) is None


class Schedule:
    """A scheduler as the alarm uses it: the next step's rates are of ``base_lrs`` when the state was loaded."""

    def __init__(self) -> None:
        self.base_lrs, self.rates = [1.0, 0.5], [1.0, 0.5]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = list(self.base_lrs)


class Planned:
    """A run of the alarm in which it is planned what each iteration measures and earns."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        state: Any = None,
        on_alarm: Any = "rollback",
        keep_last: int | None = None,
        dataloader_val: Any = (),
    ) -> None:
        monkeypatch.setattr(quality_alarm, "apart", lambda *_: nullcontext())
        monkeypatch.setattr(quality_alarm, "GivesClips", object)
        measures = {name: Measure(make=L(Random)(), tolerance=0.5) for name in ("a", "b")}
        self.alarm = QualityAlarm(measures, every_n=1, on_alarm=on_alarm)
        self.restored: list[int] = []
        self.trainer: Any = mock.MagicMock(save_wanted=False, scheduler=Schedule(), dataloader_val=dataloader_val)
        self.trainer.optimizer.state = {"moments": 1}
        self.trainer.checkpointer.restore_weights = lambda model, target: self.restored.append(target)
        self.model: Any = mock.MagicMock()
        self.alarm.trainer, self.alarm.name = self.trainer, "quality_alarm"
        self.alarm.config = mock.MagicMock()
        self.alarm.config.checkpoint.keep_last = keep_last
        if state is not None:
            self.alarm.load_state_dict(state)
        self.alarm.on_train_start(self.model)

    def step(self, iteration: int, reward: float, a: float, b: float, *, is_end: bool = True) -> None:
        """Saves are made after the step, where the experience is at its end."""
        self.model.at_boundary.return_value = is_end
        self.alarm.on_training_step_batch_end(self.model, None, {"reward_mean": reward}, torch.zeros(()), iteration)
        with mock.patch.object(self.alarm, "_measured", return_value={"a": a, "b": b}):
            self.alarm.on_training_step_end(self.model, None, {}, torch.zeros(()), iteration)
        assert self.model.ema_scope.called, "averaged weights are measured"
        if is_end:
            self.alarm.on_save_checkpoint_start(self.model, iteration)
            self.trainer.save_wanted = False


def test_it_goes_back_to_before_the_first_measure_fell_once_the_experience_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned(monkeypatch)
    planned.step(1, 1.0, a=1.0, b=1.0, is_end=False)  # saved at 2, after another measurement
    planned.step(2, 1.0, a=0.9, b=0.9)
    planned.step(3, 2.0, a=2.0, b=0.9)
    planned.step(4, 2.0, a=1.9, b=0.9)  # no best: not saved
    assert [(one["iteration"], one["measured"]) for one in planned.alarm._saved] == [(2, 2), (3, 3)]
    planned.alarm._saved[0]["measured"] = 1  # as where the save alone waited for the end
    planned.alarm._saved[0]["values"] = {"a": 1.0, "b": 1.0}
    planned.step(5, 9.0, a=1.0, b=0.2, is_end=False)
    assert planned.restored == [] and planned.trainer.scheduler.rates == [1.0, 0.5]
    with mock.patch.object(planned.alarm, "fires_at", return_value=False):
        planned.step(6, 9.0, a=1.0, b=0.2)
        assert planned.restored == [2] and planned.trainer.scheduler.rates == [0.5, 0.25]
        assert planned.trainer.optimizer.state == {} and planned.alarm._reward == pytest.approx(
            planned.alarm._saved[0]["reward"]
        )
        assert planned.alarm._best == {"a": [1.0, 1.0, planned.alarm._reward], "b": [1.0, 1.0, 1.0]}
        planned.step(7, 9.0, a=1.0, b=0.2)
        assert planned.restored == [2], "once"
    planned.step(8, 20.0, a=1.0, b=0.1)
    assert planned.restored == [2, 2] and planned.trainer.scheduler.rates == [0.25, 0.125]
    again = Planned(monkeypatch, planned.alarm.state_dict())
    assert again.trainer.scheduler.rates == [0.25, 0.125] and again.alarm._saved == planned.alarm._saved


def test_a_best_of_one_measure_is_not_kept_where_another_fell(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch, on_alarm="rollback")
    planned.step(1, 1.0, a=1.0, b=1.0)
    planned.step(2, 9.0, a=3.0, b=0.2)
    assert [one["iteration"] for one in planned.alarm._saved] == [1] and planned.restored == [1]
    warned = Planned(monkeypatch, on_alarm="warn")
    warned.step(1, 1.0, a=1.0, b=1.0)
    warned.step(2, 9.0, a=3.0, b=0.2)
    assert warned.restored == [] and warned.alarm._saved == []


def test_it_can_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch, on_alarm="stop")
    planned.step(1, 1.0, a=1.0, b=1.0)
    with pytest.raises(TrainingError, match="on held-out clips b fell from 1 to"):
        planned.step(2, 9.0, a=3.0, b=0.2)


@pytest.mark.parametrize(
    ("options", "named"), [(dict(dataloader_val=None), "quality_alarm"), (dict(keep_last=2), "keep_last")]
)
def test_it_needs_held_out_clips_and_checkpoints_that_stay(
    options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=named):
        Planned(monkeypatch, **options)


def test_the_reward_is_smoothed_over_steps_and_the_mean_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    planned.step(1, 1.0, a=1.0, b=1.0)
    planned.step(2, 2.0, a=1.0, b=1.0)
    assert planned.alarm._reward == pytest.approx(0.7 * 1.0 + 0.3 * 2.0)
    monkeypatch.setattr(distributed, "all_gather_object", lambda mine: [({"a": 5.0, "b": 5.0}, 3.0), (mine[0], 5.0)])
    planned.step(3, 2.0, a=1.0, b=1.0)
    assert planned.alarm._reward == 4.0 and planned.alarm._values == {"a": 5.0, "b": 5.0}


def test_a_measure_without_a_valid_score_has_no_value() -> None:
    """Not a number, it would be a best that nothing is above, and below which everything is."""
    alarm = QualityAlarm({**MEASURES, "chance": Measure(make=L(Random)())}, every_n=1, seed=7)
    still, seeds = torch.zeros(1, 4, 2, 2, 2), []
    given = SimpleNamespace(gt_frames_B_C_T_H_W=still)
    clip = SimpleNamespace(conditions=dict, condition_on=lambda device: given, x0_1_C_T_H_W=still, num_given=1, fps=8.0)
    alarm._clips = [clip, clip]  # type: ignore[list-item]
    pixels = torch.zeros(1, 3, 5, 8, 8)
    generate = lambda *_, seed, **options: seeds.append(seed) or still  # noqa: E731
    world = SimpleNamespace(device="cpu", generate_latents=generate, decode=lambda latents: pixels)
    of_one = float(Random()(Clips(still, None, [""], 8.0), {}))
    assert alarm._measured(SimpleNamespace(world=world)) == pytest.approx({"chance": of_one}), "the mean of both clips"
    assert seeds == [[7], [8]]


# As the experiments have it, but seldom and short.
LOOKS = ["trainer.run_validation=true", "trainer.max_val_iter=1"]
LOOKS += ["dataloader_val.batch_size=2", "dataloader_val.dataset.num_episodes=4"]


def _with_alarm(every_n: int, *more: str) -> list[str]:
    options = [item for item in rl_options() if ALARM not in item and "run_validation" not in item]
    return [*options, *LOOKS, f"{ALARM}.every_n={every_n}", f"{ALARM}.num_clips=2", *more]


def test_a_run_measures_held_out_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, float] = {}
    monkeypatch.setattr(WandbTracker, "log", lambda self, values, iteration: shown.update(values))
    records = [record for record in run(tmp_path, *_with_alarm(1)) if record["iteration"] > 0]
    assert all(record["quality/alarm"] == 0 for record in records)
    assert {"quality/agreement", "quality/positions", "quality/permanence"} <= records[0].keys()
    assert {"train/agreement_p10", "train/agreement_p90"} <= records[0].keys()
    assert not any(name.startswith("GRPO") for name in records[0])
    published = ["reward_mean", "log_prob_ratio", "policy_loss", "agreement", "agreement_std", "agreement_valid_rate"]
    assert {name: shown[f"GRPO/{name}"] for name in published} == {n: shown[f"train/{n}"] for n in published}


PLANTED: dict[str, Any] = {}  # of the two below


class Falling:
    """A measure that says what the test wants to see."""

    def __call__(self, clips: Clips, context: Any) -> Tensor:
        return torch.full((len(clips.prompts),), float(PLANTED["values"].pop(0)))


class Rising:
    """A reward that rises whatever the clips are."""

    def __call__(self, clips: Clips, context: Any) -> Tensor:
        assert clips.latents_B_C_T_H_W is not None
        PLANTED["calls"] += 1
        return PLANTED["calls"] + clips.latents_B_C_T_H_W.float().mean(dim=(1, 2, 3, 4))


HERE = "tests.rl.test_quality_alarm"
BACK = [
    f"{ALARM}.on_alarm=rollback",
    f"+{ALARM}.measures.planted={{make: {{_target_: {HERE}.Falling}}, tolerance: 0.5}}",
    *(f"~{ALARM}.measures.{name}" for name in ("agreement", "positions", "permanence")),
    *(f"{RL}.rewards.{name}=null" for name in ("agreement", "positions", "background")),
    f"+{RL}.rewards.planted={{make: {{_target_: {HERE}.Rising}}}}",
    *(f"{ALARM}.num_clips=1", f"{ALARM}.num_sampling_step=1"),
    *("trainer.run_validation=true", "trainer.validation_iter=100", "checkpoint.save_iter=1", "optimizer.lr=1e-3"),
]


def require_second_again(folder: Path) -> None:
    """The third iteration's weights are those of the second, and the fourth's are others."""
    second, third, fourth = (load_pt(folder / f"checkpoints/model/iter_{k:09d}.pt") for k in (2, 3, 4))
    assert difference(second, third) is None and difference(third, fourth) is not None


@pytest.mark.slow
def test_it_can_go_back_and_a_resumed_run_equals_a_whole_one(tmp_path: Path) -> None:
    from cosmos_predict2.evaluation.reports.run_report import write_report

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    values = [1.0, 1.2, 0.0, 1.1, 1.1]
    PLANTED.update(values=list(values), calls=0)
    records = run(whole, *_with_alarm(1, *BACK, "trainer.max_iter=5"))
    rewind(run_dir(whole, NAME), run_dir(parts, NAME), 4)
    PLANTED.update(values=values[4:], calls=PLANTED["calls"] * 4 // 5)  # as many in each iteration
    run(parts, *_with_alarm(1, *BACK, "trainer.max_iter=5"))
    assert difference(saved(whole, NAME), saved(parts, NAME)) is None
    found = [(r["iteration"], r["quality/alarm"], r.get("quality/rolled_back_to")) for r in records if r["iteration"]]
    assert found == [(1, 0, None), (2, 0, None), (3, 1, 2), (4, 0, None), (5, 0, None)]
    page = Path(write_report(str(run_dir(whole, NAME)))).read_text()
    assert "Alarm at iteration 3" in page and "went back from iteration 3 to 2" in page
    require_second_again(run_dir(whole, NAME))
    rates = {r["iteration"]: r["optim/lr_0"] for r in records if "optim/lr_0" in r}
    assert rates[4] < 0.6 * rates[3]


Back = list[tuple[int, float, list[float]]]  # at each return: the iteration, a digest of the weights, learning rates


def _gone_back(root: str, layouts: dict[str, list[str]]) -> dict[str, Back]:
    """The returns of a run of each layout; rank 1 measures on its own what gives no alarm."""
    found: dict[str, Back] = {layout: [] for layout in layouts}
    go_back = QualityAlarm._go_back
    for layout, options in layouts.items():
        PLANTED.update(values=[1.0, 1.2, 0.0, 1.1, 1.1] if distributed.is_rank0() else [2.0] * 5, calls=0)

        def recorded(self: QualityAlarm, model: Any, name: str, iteration: int, layout: str = layout) -> None:
            go_back(self, model, name, iteration)
            with torch.no_grad():
                digest = sum(float(full_tensor(weight).double().abs().sum()) for weight in model.net.parameters())
            rates = [group["lr"] for group in self.trainer.optimizer.param_groups]
            found[layout].append((iteration, digest, rates))

        with mock.patch.object(QualityAlarm, "_go_back", recorded):
            run(Path(root) / layout, *options)
    return found


@pytest.mark.long
def test_two_processes_go_back_together(tmp_path: Path) -> None:
    more = ("trainer.max_iter=4", "dataloader_train.batch_size=1", "trainer.grad_accum_iter=2")
    options = [*_with_alarm(1, *BACK), *more]
    layouts = {name: [*options, f"model.config.fsdp_shard_size={k}"] for name, k in (("replicated", 0), ("sharded", 2))}
    first, other = run_distributed(_gone_back, 2, (str(tmp_path), layouts))
    for layout in layouts:
        assert first[layout] == other[layout] and [iteration for iteration, *_ in first[layout]] == [3]
        require_second_again(run_dir(tmp_path / layout, NAME))
