# SPDX-License-Identifier: Apache-2.0
"""A look at an environment before anything is recorded: its facts, and an exit code where it cannot be used."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from imaginaire import command_line
from scripts.check_environment import parser, run
from tests.rl.envs.test_contract import Line

HERE = "tests.scripts.test_check_environment"


class Same(Line):
    """Begins alike, whatever the trial is."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(options={**(options or {}), "trial_ids": [1] * self.num_envs})


class Unclipped(Line):
    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        return super().chunk_step(actions / 3, env_ids, execute)


def looked_at(suite: str, *more: str) -> int:
    return command_line.main(parser, run, ["--suite", suite, *more])


def test_an_environment_is_shown_with_its_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert looked_at("tests.rl.envs.test_contract:Line", "--save_path", str(tmp_path / "look.png")) == 0
    shown = capsys.readouterr().out
    assert "2 numbers from -1 to 1; at most 10 in an episode" in shown and "keeps all 17 rules" in shown
    assert "height 4, width 6; 3 of 3 starts differ" in shown
    assert (tmp_path / "look.png").stat().st_size


def test_equal_starts_and_broken_rules_are_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert looked_at(f"{HERE}:Same") == 1
    assert "1 of 3 starts differ" in capsys.readouterr().out
    assert looked_at(f"{HERE}:Unclipped") == 1
    assert "broken rule: check_actions_are_clipped: actions at their bounds" in capsys.readouterr().out


@pytest.mark.slow
def test_bounds_of_an_environment_are_shown_beside_those_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    suite = "gym:tests.rl.envs.gym_worlds:OurPoint-v0?kind=absolute&image_size=24"
    assert looked_at(suite) == 0
    assert "from -1 to 1, which are 0 to 512 of the environment" in capsys.readouterr().out
    assert looked_at(f"{suite}&actions=native") == 0
    assert "2 numbers from 0 to 512; at" in capsys.readouterr().out
