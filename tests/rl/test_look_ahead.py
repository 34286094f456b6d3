# SPDX-License-Identifier: Apache-2.0
"""A policy that looks ahead plays what is imagined to be worth most, of what it would do anyway."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.configs.rl.imagination import imagination_of, look_ahead_of
from cosmos_predict2.released import tiny_action_path
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.imagined.look_ahead import LookAhead
from cosmos_predict2.rl.interfaces import Decision, FrameRewardDefaults, Judgement
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError
from scripts import evaluate_policy
from tests.programs import call


class Left(FrameRewardDefaults):
    """Pictures whose left half is bright are worth more; with ``scale`` 0 all are worth the same."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def judge(self, frames_E_F_H_W_C: torch.Tensor, context: Any) -> Judgement:
        value = self.scale * frames_E_F_H_W_C[:, :, :, :24].double().mean(dim=(2, 3, 4))
        return Judgement(value.float(), value > 0)


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    return imagination_of(device="cpu")


def draws(num: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(7 + k) for k in range(num)]


def seen(num: int) -> dict[str, Any]:
    first = ToyStarts(split="val").starts([0] * num, list(range(num)))
    pictures, empty = first.pictures_E_F_H_W_C[:, -1], torch.zeros(num, 0)
    return dict(full_image=pictures, wrist_image=empty, state=empty, task_description=["push"] * num)


@pytest.mark.parametrize(
    ("chunks", "execute", "margin"), [(1, None, 0.0), (1, None, 0.37), (2, None, 0.0), (2, 6, 0.0)]
)
def test_the_best_of_the_candidates_is_played(
    imagination: Imagination, chunks: int, execute: int | None, margin: float
) -> None:
    torch.manual_seed(1)  # by which draws are worth 0.28 and 0.47 more at two of the places
    policy, observation = ToyPolicy(path=""), seen(3)
    large = {**observation, "full_image": torch.nn.functional.pad(observation["full_image"], (0, 0, 5, 0))}
    cut: Any = dict(fit=lambda view: view[..., 5:])  # and the policy sees the same of both
    policy.features = lambda image: ToyPolicy.features(policy, image[:, :, -48:])  # type: ignore[method-assign]
    ahead = LookAhead(policy, imagination, Left(), 4, chunks, execute, margin=margin, **cut)
    found = ahead.act(large, mode="greedy", generators=draws(3))
    own = policy.act(observation, mode="greedy", generators=draws(3)).actions_E_A_D
    worth = []
    for k in range(3):  # each place by itself, every candidate drawn and imagined anew
        seeds = torch.randint(2**31, (4,), generator=draws(3)[k])
        some = [
            own[k],
            *(
                policy.act(
                    {name: value[k : k + 1] for name, value in observation.items()},
                    mode="sample",
                    generators=[torch.Generator().manual_seed(int(seed))],
                ).actions_E_A_D[0]
                for seed in seeds[1:]
            ),
        ]
        values = []
        for actions in some:
            starts: Any = GivenStarts(observation["full_image"][k : k + 1], ["push"])
            how: Any = dict(scoring=Scoring(judge="last", reward_on="last"), clip_actions=False)
            env = WorldModelEnv(imagination, starts, Left(), 1, (execute or 12) * chunks, **how)
            shown, _ = env.reset(options=dict(trial_ids=[0], seeds=[int(seeds[0])]))
            for step in range(chunks):
                chunk = policy.act(shown, mode="greedy", generators=draws(1)).actions_E_A_D if step else actions[None]
                shown, _, _, _, info = env.chunk_step(chunk, execute=execute)
            values.append(float(info["value"]))
        best = max(range(4), key=lambda n: values[n])
        best = best if values[best] > values[0] + margin else 0
        torch.testing.assert_close(found.actions_E_A_D[k], some[best][:execute], rtol=0, atol=1e-5)
        worth.append(best)
    assert ahead.chunk == found.actions_E_A_D.shape[1]
    assert any(worth), "else the policy's own decision is always the best one, and nothing is tested"


def test_of_equals_the_policy_s_own_decision_is_played_and_places_do_not_mix(imagination: Imagination) -> None:
    policy, observation = ToyPolicy(path=""), seen(2)
    own = policy.act(observation, mode="greedy", generators=draws(2)).actions_E_A_D
    same = LookAhead(policy, imagination, Left(0.0), 3).act(observation, mode="greedy", generators=draws(2))
    assert torch.equal(same.actions_E_A_D, own)
    ahead = LookAhead(policy, imagination, Left(), 3)
    cold = ahead.act(observation, mode="greedy", generators=draws(2), temperature=0.0)
    torch.testing.assert_close(cold.actions_E_A_D, own, rtol=0, atol=1e-5)  # draws as cold as asked for
    both = ahead.act(observation, mode="greedy", generators=draws(2)).actions_E_A_D
    alone = ahead.act({name: value[1:] for name, value in observation.items()}, mode="greedy", generators=draws(2)[1:])
    torch.testing.assert_close(alone.actions_E_A_D[0], both[1], rtol=0, atol=1e-5)
    for wrong, named in (
        (dict(candidates=1), "two candidates"),
        (dict(execute=0), "execute=0"),
        (dict(execute=13), "at most the 12 actions"),
        (dict(margin=-0.1), "margin=-0.1: .*at least 0"),
    ):
        with pytest.raises(ConfigError, match=named):
            LookAhead(policy, imagination, Left(), **wrong)
    with pytest.raises(ConfigError, match="not trained"):
        ahead.log_prob({})


def test_a_draw_that_is_lost_is_no_candidate(imagination: Imagination) -> None:
    class Loses(ToyPolicy):
        def act(self, observation: Any, *, mode: Any, generators: Any, temperature: float = 1.0) -> Decision:
            found = super().act(observation, mode=mode, generators=generators, temperature=temperature)
            if mode == "greedy":
                return found
            return replace(
                found, actions_E_A_D=found.actions_E_A_D + math.nan, is_lost_E=torch.ones(len(generators)) > 0
            )

    policy, observation = Loses(), seen(2)
    own = policy.act(observation, mode="greedy", generators=draws(2)).actions_E_A_D
    found = LookAhead(policy, imagination, Left(), 3).act(observation, mode="greedy", generators=draws(2))
    assert torch.equal(found.actions_E_A_D, own)


def test_programs_take_a_policy_that_looks_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Path(tiny_action_path()).parents[1] / "tiny_policy.safetensors"
    words = ["--policy", "cosmos_predict2.configs.rl.imagination:look_ahead_of", "--episodes", "2", "--draws", "1"]
    given = [f"policy={tiny}", f"world_model={tiny_action_path()}", "reward=tests.rl.test_look_ahead:Left"]
    out = ["--out", str(tmp_path / "out")]
    assert call(evaluate_policy, *words, "--options", *given, "candidates=2", *out) == 0
    assert (tmp_path / "out/evaluation.json").exists()
    values: Any = dict(word.split("=") for word in given)
    assert (look_ahead_of(**values).margin, look_ahead_of(**values, margin=0.3).margin) == (0.1, 0.3)
    assert call(evaluate_policy, *words, "--options", *given[:2]) == 2
    assert "look_ahead_of: reward has no default" in capsys.readouterr().err
    assert call(evaluate_policy, *words, "--options", "policy=openpi://127.0.0.1:9", *given[1:]) == 2
    assert "look ahead where it is served" in capsys.readouterr().err
