# SPDX-License-Identifier: Apache-2.0
"""Rewards in this process: a function of clips, several of pictures as one, and what a name or a path builds."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, Judgement, Ticket
from cosmos_predict2.rl.rewards.frames import WeightedReward
from cosmos_predict2.rl.rewards.local import LocalReward, build, path_of
from cosmos_predict2.rl.rewards.remote import RemoteReward
from imaginaire.errors import ConfigError, DataError
from tests.rl.rewards.doubles import clips_of

HERE = __name__


def test_a_function_gives_its_numbers_and_parts_and_says_which_are_valid() -> None:
    weight = torch.ones((), requires_grad=True)
    given = [torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]), torch.arange(4)]
    parts = {"part": torch.tensor([1, 2, 3, 4]), "list": [1, 2, 3, 4], "words": ["Good"] * 4}
    reward = LocalReward(lambda clips, context: {"value": given.pop(0) * weight, **parts})
    assert not reward.needs_pixels
    tickets = [reward.submit(clips_of(*"abcd"), {}, "id") for _ in range(2)]
    first, second = (reward.fetch(ticket, 0.0) for ticket in tickets)
    assert first.value_B.tolist() == [1, 0, 0, 0] and first.is_valid_B.tolist() == [True, False, False, False]
    assert second.value_B.tolist() == [0, 1, 2, 3] and second.is_valid_B.all()
    assert not first.value_B.requires_grad and first.value_B.dtype == torch.float32
    assert {name: part.tolist() for name, part in first.parts.items()} == dict(part=[1, 2, 3, 4], list=[1, 2, 3, 4])
    for wrong in (torch.ones(4, 1), torch.ones(())):
        with pytest.raises(DataError, match="4 clips"):
            LocalReward(lambda clips, context, wrong=wrong: wrong).submit(clips_of(*"abcd"), {}, "id")  # type: ignore


@pytest.mark.parametrize(
    "reward",
    [LocalReward(lambda clips, context: torch.ones(1)), RemoteReward(enqueue_url="http://x", fetch_url="http://x")],
)
def test_a_ticket_of_another_reward_is_refused(reward: Any) -> None:
    with pytest.raises(ConfigError, match="the ticket that submit gave"):
        reward.fetch(Ticket("id"), 1.0)


def test_what_fails_here_is_invalid_and_no_zero() -> None:
    reward = LocalReward(lambda clips, context: 1 / 0)  # type: ignore[arg-type, return-value]
    scores = reward.fetch(reward.submit(clips_of("a", "b"), {}, "id"), 0.0)
    assert scores.value_B.tolist() == [0, 0] and not scores.is_valid_B.any()


class Judge:
    """Says so much of each picture, and moves."""

    def __init__(self, value: float, success: bool) -> None:
        self.value, self.success, self.places = value, success, []  # type: tuple[float, bool, list[Any]]

    def judge(self, frames: Tensor, context: Mapping[str, Any]) -> Judgement:
        return Judgement(torch.full(frames.shape[:2], self.value), torch.full(frames.shape[:2], self.success))

    def to(self, device: Any) -> None:
        self.places.append(device)


def test_rewards_are_summed_by_their_weights_and_the_first_judge_says_what_is_done() -> None:
    seen: list[Any] = []

    def of_clips(clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        seen.append((clips, context))
        return {"part": torch.tensor([7.0, 7.0]), "value": torch.tensor([1.0, 2.0])}

    first, second = Judge(0.5, False), Judge(100.0, True)
    rewards, weights = dict(of_clips=of_clips, first=first, second=second), dict(second=0.5, of_clips=10.0)
    whole = WeightedReward(rewards, weights, fps=4.0)
    frames = torch.arange(2 * 3 * 4 * 5 * 3).reshape(2, 3, 4, 5, 3).to(torch.uint8)
    found = whole.judge(frames, {"task_description": ["a", "b"], "goal": 1})
    assert found.value_E_F.tolist() == [[60.5] * 3, [70.5] * 3] and not found.success_E_F.any()
    clips, context = seen[0]
    assert torch.equal(clips.video_B_C_F_H_W, frames.permute(0, 4, 1, 2, 3)) and clips.latents_B_C_T_H_W is None
    assert (clips.prompts, clips.fps, context["goal"]) == (["a", "b"], 4.0, 1)
    assert context["num_conditional_frames"].tolist() == [0, 0]  # all of them were generated
    assert whole.to("cuda:3") is whole and first.places == second.places == ["cuda:3"]
    for wrong in (torch.tensor([1.0, float("nan")]), torch.ones(3), torch.ones(2, 1)):
        with pytest.raises(DataError, match="'wrong' must give a finite number for each of 2"):
            WeightedReward(dict(wrong=lambda *_, wrong=wrong: wrong, first=first)).judge(frames, {})


class Made:
    def __init__(self, scale: float = 1.0, dtype: str = "none") -> None:
        self.told = scale, dtype

    def __call__(self, clips: Clips, context: Any) -> Tensor:
        return torch.ones(1)


class Silent:
    """Not a reward."""


def test_a_reward_is_built_of_a_name_or_a_path_with_what_it_takes() -> None:
    made: Any = build(f"{HERE}:Made", {"scale": 2.0}, dtype="float16", device="cpu", model_path="")
    assert made.told == (2.0, "float16")
    defaults: Any = build(f"{HERE}:Made", None, dtype="", device=None)
    assert defaults.told == (1.0, "none")
    assert build(f"{HERE}:test_what_fails_here_is_invalid_and_no_zero") is test_what_fails_here_is_invalid_and_no_zero
    assert path_of(f"{HERE}.Made") == ("Made", f"{HERE}:Made")
    assert path_of(f"mine={HERE}:Made") == ("mine", f"{HERE}:Made")
    assert path_of("smoothness") == ("smoothness", "cosmos_predict2.rl.rewards.verifiable:Smoothness")
    for path, arguments, named in (
        (f"{HERE}:Silent", None, "callable"),
        (f"{HERE}:Made", {"scal": 2.0}, "scale"),
        (f"{HERE}:HERE", None, "takes no arguments"),
        (f"{HERE}:test_what_fails_here_is_invalid_and_no_zero", {"scale": 1.0}, "takes no arguments"),
    ):
        with pytest.raises(ConfigError, match=named):
            build(path, arguments)
    for name in ("=module:Class", "name=module", "name=:Class", "name=module:"):
        with pytest.raises(ConfigError, match="NAME=module:Class"):
            path_of(name)
