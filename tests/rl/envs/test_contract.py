# SPDX-License-Identifier: Apache-2.0
"""The contract of environments: kept by ours and by one that is defined here, and each broken rule is seen."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.contract import ContractError, check_environment
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from imaginaire import command_line
from imaginaire.errors import DataError
from scripts.check_environment import parser, run


class Line:
    """A point on a line, outside the packages of this repository: an environment of a user."""

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs = num_envs
        self.metadata = dict(suite="line", action_dim=2, chunk=4, max_steps=10)
        self.at, self.steps = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.long)
        self.over = torch.ones(num_envs, dtype=torch.bool)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        options = options or {}
        ids = list(options.get("env_ids", range(self.num_envs)))
        trials = options.get("trial_ids", range(len(ids)))
        self.at[ids] = torch.tensor([(trial * 0.37) % 1.0 for trial in trials]).float()
        self.steps[ids], self.over[ids] = 0, False
        return self.observe(ids), self.info(ids)

    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        if not torch.isfinite(actions).all():
            raise DataError("The actions are not finite.")
        ids = list(range(self.num_envs)) if env_ids is None else list(env_ids)
        size = actions.shape[:2]
        reward, executed = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
        terminated, truncated = executed.clone(), executed.clone()
        for k in range(execute or size[1]):
            for row, i in enumerate(ids):
                if self.over[i]:
                    continue
                self.at[i] = (self.at[i] + 0.05 * actions[row, k, 0].clamp(-1, 1)).clamp(0, 1)
                self.steps[i] += 1
                executed[row, k] = True
                is_last = self.steps[i] >= self.metadata["max_steps"]
                reward[row, k] = float(self.at[i] > 0.5)
                if is_last:
                    self.over[i] = True
                    (terminated if self.at[i] > 0.5 else truncated)[row, k] = True
        return self.observe(ids), reward, terminated, truncated, {**self.info(ids), "executed": executed}

    def info(self, ids: list[int]) -> dict[str, Tensor]:
        over = self.over[ids]
        return {
            "success": self.at[ids] > 0.5,
            "active": ~over,
            "finish_step": torch.where(over, self.steps[ids], -torch.ones_like(self.steps[ids])),
        }

    def observe(self, ids: list[int]) -> dict[str, Any]:
        pictures = (self.at[ids] * 255).to(torch.uint8)[:, None, None, None].expand(-1, 4, 6, 3)
        return {
            "full_image": pictures,
            "wrist_image": pictures[:, None].expand(-1, 2, -1, -1, -1),
            "state": self.at[ids][:, None].clone(),
            "task_description": ["move"] * len(ids),
        }

    def get_state(self) -> bytes:
        return json.dumps([self.at.tolist(), self.steps.tolist(), self.over.tolist()]).encode()

    def load_state(self, state: bytes) -> None:
        at, steps, over = json.loads(state)
        self.at, self.steps, self.over = torch.tensor(at), torch.tensor(steps), torch.tensor(over)

    def close(self) -> None:
        pass


def test_an_environment_of_a_user_keeps_the_contract() -> None:
    check_environment(Line())
    check_environment(Broken())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"terminate_on_success": True, "reward_on": "each", "tasks": ("touch_puck", "carry_box")},
        {"setting": "hard", "action_dim": 7, "num_steps": 30, "keep_frames": True},
    ],
)
def test_the_toy_world_keeps_it(options: dict) -> None:
    check_environment(ToyEnv(3, **options))


def test_a_world_model_keeps_it() -> None:
    options: Any = dict(scoring=Scoring(judge="last", reward_on="last"), num_noises=2)
    env = WorldModelEnv(imagination_of(device="cpu"), ToyStarts(), ToyDetectorReward(), 3, 20, **options)
    check_environment(env, picture_levels=1)


class Broken(Line):
    """With one fault, by its name."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        if fault == "no chunk in metadata":
            del self.metadata["chunk"]
        if fault == "a fractional cost of resets":
            self.metadata["reset_chunks"] = 2.5
        if fault == "never ends":
            self.metadata["max_steps"] = 100
        if fault in ("films nothing", "films the start"):
            self.keep_frames = False

    def observe(self, ids: list[int]) -> dict[str, Any]:
        observed = super().observe(ids)
        if self.fault == "no text":
            observed["task_description"] = [""] * len(ids)
        if self.fault == "float pictures":
            observed["full_image"] = observed["full_image"].float()
        return observed

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        steps = self.steps.clone()
        if self.fault == "resets all":
            super().reset(options={"trial_ids": [0] * self.num_envs})
        if self.fault == "one trial":
            options = {**(options or {}), "trial_ids": [1] * 3}
        result = super().reset(seed=seed, options=options)
        if self.fault == "keeps steps" and "env_ids" in (options or {}):  # the next episode of one, while others go on
            self.steps = steps
        return result

    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        ids = list(range(self.num_envs)) if env_ids is None else list(env_ids)
        was_over, before = self.over[ids], super().observe(ids)["full_image"]
        if self.fault == "does not clip":
            self.at += 0.01 * (actions.abs().max() > 1)
        if self.fault == "takes what is no number":
            actions = actions.nan_to_num()
        if self.fault == "draws":
            actions = actions + 0.2 * torch.rand(())
        if self.fault == "by number":
            actions = actions.clamp(-1, 1) * torch.tensor([1.0 + i for i in ids])[:, None, None] / 4
        if self.fault == "by company":
            actions = actions.clamp(-1, 1) / len(actions)
        execute = None if self.fault == "takes all" else execute
        observed, reward, terminated, truncated, info = super().chunk_step(actions, env_ids, execute)
        if self.fault == "steps finished ones":
            reward[was_over] += 1.0
        if self.fault == "never ends":
            self.steps[:] = 0
        if self.fault == "truncates successes":
            terminated, truncated = terminated & False, truncated | terminated
        if self.fault == "films the start" and self.keep_frames:
            info["frames"] = before[:, None].expand(-1, actions.shape[1], -1, -1, -1)
        return observed, reward, terminated, truncated, info

    def load_state(self, state: bytes) -> None:
        super().load_state(state)
        if self.fault == "forgets its state":
            self.at = self.at * 0.9

    def close(self) -> None:
        if self.fault == "closes once":
            del self.at


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("no text", "check_observations"),
        ("float pictures", "check_observations"),
        ("no chunk in metadata", "check_metadata"),
        ("a fractional cost of resets", "check_metadata"),
        ("keeps steps", "check_episodes_of_different_age"),
        ("resets all", "check_others_are_untouched"),
        ("steps finished ones", "check_a_finished_episode_stays"),
        ("never ends", "check_episodes_end"),
        ("truncates successes", "check_success_wins"),
        ("takes all", "check_execute"),
        ("does not clip", "check_actions_are_clipped"),
        ("takes what is no number", "check_actions_are_clipped"),
        ("draws", "check_others_are_untouched"),
        ("one trial", "check_observations"),
        ("by number", "check_order_does_not_matter"),
        ("by company", "check_company_does_not_matter"),
        ("films nothing", "check_frames: keep_frames is true, but info has no 'frames'"),
        ("films the start", "check_frames: the last of info"),
        ("forgets its state", "check_others_are_untouched"),
        ("closes once", "check_closing_twice"),
    ],
)
def test_an_environment_that_breaks_a_rule_is_told_which(fault: str, rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        check_environment(Broken(fault))


HERE = "tests.rl.envs.test_contract"


class Same(Line):
    """Begins alike, whatever the trial is."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(options={**(options or {}), "trial_ids": [1] * self.num_envs})


class Unclipped(Line):
    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        return super().chunk_step(actions / 3, env_ids, execute)


class Easy(Line):
    """Whatever is done succeeds."""

    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        *found, info = super().chunk_step(actions, env_ids, execute)
        return *found, {**info, "success": torch.ones_like(info["success"])}


class Stale(Line):
    """Draws at first where its point was before the reset placed it."""

    def observe(self, ids: list[int]) -> dict[str, Any]:
        found = super().observe(ids)
        is_first = (self.steps[ids] == 0)[:, None, None, None]
        return {**found, "full_image": torch.where(is_first, 255 - found["full_image"] // 4, found["full_image"] // 8)}


def looked_at(suite: str, *more: str) -> int:
    return command_line.main(parser, run, ["--suite", suite, *more])


def test_an_environment_is_shown_with_its_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert looked_at("tests.rl.envs.test_contract:Line", "--save_path", str(tmp_path / "look.png")) == 0
    shown = capsys.readouterr().out
    assert "2 numbers from -1 to 1; at most 10 in an episode" in shown and "keeps all 17 rules" in shown
    assert "height 4, width 6; 3 of 3 starts differ" in shown
    assert (tmp_path / "look.png").stat().st_size and "first picture" not in shown and "ask for the task" not in shown
    looked_at(f"{HERE}:Easy")
    assert "3 of 3 episodes of random actions: does it ask for the task? By this" in capsys.readouterr().out
    looked_at(f"{HERE}:Stale")
    assert "the first picture is unlike all later ones: does it show things where" in capsys.readouterr().out


def test_equal_starts_and_broken_rules_are_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert looked_at(f"{HERE}:Same") == 1
    assert "1 of 3 starts differ" in capsys.readouterr().out
    assert looked_at(f"{HERE}:Unclipped") == 1
    shown = capsys.readouterr().out
    assert "broken rule: check_actions_are_clipped: actions at their bounds" in shown
    assert ". Actions beyond their bounds are as those at them; those that are not finite" in shown, "the rule itself"


def test_an_exception_of_an_environment_is_named_by_its_class_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout goes on without the episode, which the first rule on ends would be blamed for here."""
    assert looked_at("tests.rl.envs.task_envs:Stuck") == 2
    told = capsys.readouterr()
    assert r"RuntimeError: motor 3 does not answer (Stuck._observed). Mend it, or end" in told.err and not told.out
    assert looked_at("tests.rl.envs.task_envs:Unlicensed") == 2
    assert "(char 0) (Unlicensed.reset). Mend it.\n" in capsys.readouterr().err, "of a library, before the episode"


@pytest.mark.slow
def test_bounds_of_an_environment_are_shown_beside_those_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    suite = "gym:tests.rl.envs.gym_worlds:OurPoint-v0?kind=absolute&image_size=24"
    assert looked_at(suite) == 0
    assert "from -1 to 1, which are 0 to 512 of the environment" in capsys.readouterr().out
    assert looked_at(f"{suite}&actions=native") == 0
    assert "2 numbers from 0 to 512; at" in capsys.readouterr().out
