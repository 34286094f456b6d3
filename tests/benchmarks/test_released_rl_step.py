# SPDX-License-Identifier: Apache-2.0
"""The benchmark of published recipes of reinforcement learning, on their tiny twins."""

import re
import sys
from argparse import Namespace
from typing import Any

import pytest

from benchmarks import machine, rl_step
from cosmos_predict2.rl.config import ANY, RLConfig
from imaginaire.errors import ConfigError, TrainingError


def test_a_recipe_is_measured_and_one_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--released", "--size", "tiny", "--architecture", "lora"]
    words += ["--experiment", "predict2p5_2b_none", "predict2p5_2b_ddrl"]
    monkeypatch.setattr(sys, "argv", ["rl_step", *words])
    monkeypatch.setattr(machine, "quiet_trainer", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        rl_step.main()
    found = capsys.readouterr().out
    assert stopped.value.code == 1 and found.count("FAILED") == 1
    assert "num_rollout 8 -> 2" in found and "trained base -> lora" in found and "its encoder -> random" in found
    assert re.search(r"an experience of 2 clips: .* gradient \d+\.\d\d s \((?!0%)", found)
    ours, plain = re.findall(r"\((\d+) evaluations\), sampled plainly [\d.]+ s \((\d+)\)", found)[0]
    assert ours == plain == "5"  # and the rollout takes as long as the same steps of the sampler


def test_ratios_that_are_not_one_are_reported_and_the_recipe_is_timed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def measure(experiment: str, architecture: str, arguments: Any, *others: str) -> None:
        asked.append(others)
        if not others:
            raise TrainingError("it differs by 0.1 (model.config.rl.ratio_tolerance=0.001)")

    monkeypatch.setattr(rl_step, "measure_released", measure)
    with pytest.raises(SystemExit):
        rl_step.run_released(Namespace(size="tiny", experiment=["one"], architecture=["base"]))
    assert asked == [(), (rl_step.LOOSE,)] and capsys.readouterr().out.count("FAILED") == 1


def test_an_experiment_without_rewards_of_clips_is_named() -> None:
    with pytest.raises(ConfigError, match="makes no clips to learn from"):
        rl_step.measure(["experiment=predict2_video2world_training_tiny_cosmos_nemo_assets"], 1)


def test_steps_that_a_short_chain_does_not_have_are_left_out() -> None:
    def steps(**options: Any) -> list[str]:
        return [one for one in rl_step.reduced(RLConfig(**options)) if "train_on" in one or "times" in one]

    assert steps(train_on=[0, 5, 9], sample_steps=10) == ["model.config.rl.train_on=[0]"]
    assert steps(train_on=[ANY, ANY], sample_steps=10) == [f"model.config.rl.train_on={[ANY]}"]
    assert steps(objective="nft", transition="ode") == ["model.config.rl.num_timesteps=1"]
