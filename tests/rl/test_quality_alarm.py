# SPDX-License-Identifier: Apache-2.0
"""The alarm goes off when held-out quality falls while the reward rises, and only then."""

from pathlib import Path

import pytest

from cosmos_predict2.rl.quality_alarm import Measure, QualityAlarm
from cosmos_predict2.rl.rewards.verifiable import Agreement
from imaginaire.config import L
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks.wandb_tracker import WandbTracker
from tests.rl.runs import CONFIG, rl_options, run
from tests.training import train

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


# As the experiments have it, but seldom and short.
LOOKS = [
    "trainer.run_validation=true",
    "trainer.max_val_iter=1",
    "dataloader_val.batch_size=2",
    "dataloader_val.dataset.num_episodes=4",
]


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


def test_it_needs_held_out_clips(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quality_alarm"):
        train(tmp_path, _with_alarm(1, "trainer.run_validation=false"), config=CONFIG)


def test_it_can_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QualityAlarm, "_judge", lambda self, name, value, iteration: f"{name} fell.")
    with pytest.raises(TrainingError, match="agreement fell"):
        train(tmp_path, _with_alarm(1, f"{ALARM}.on_alarm=stop"), config=CONFIG)
