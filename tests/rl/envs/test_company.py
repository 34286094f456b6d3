# SPDX-License-Identifier: Apache-2.0
"""An episode is the same in any company: whichever environments are reset and stepped beside it, and in which order.

What a world model imagines is here a sum of where it begins, actions and seed, which is exact in any batch.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.rl.envs.first_frames import FirstFrames
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.interfaces import Judgement
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig

CHUNK, MAX_STEPS = 6, 13


class Numbered:
    """Starts whose pictures, sentences and context name task and trial."""

    num_tasks, has_actions = 3, True

    def __init__(self, history: int = 1) -> None:
        self.history = history

    def __len__(self) -> int:
        return 50

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        trials = torch.tensor(trial_ids)
        pictures = (trials[:, None] + torch.arange(self.history)) % 256
        shape = pictures[:, :, None, None, None].expand(-1, -1, 2, 2, 3).to(torch.uint8)
        rows = 0.01 * (trials[:, None, None] % 7 + torch.arange(8.0).reshape(4, 2))
        actions = rows if self.history > 1 and self.has_actions else None
        return FirstFrames(shape.clone(), actions, [f"task {i}" for i in task_ids], {"goal": trials[:, None].float()})


class ByContext:
    """Judges a picture by itself, the goal and the sentence of its episode."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        self.shown.append(frames_E_F_H_W_C[:, :, 0, 0, 0])
        task = torch.tensor([float(sentence[-1]) for sentence in context["task_description"]])
        number = frames_E_F_H_W_C[:, :, 0, 0, 0].float() + 17 * context["goal"] + 5 * task[:, None]
        value = number % 11 / 10
        return Judgement(value, value > 0.45)


class Summed(WorldModelEnv):
    """Imagines pictures that are sums, each of a clip's first pictures, of the actions until then and of the seed."""

    def _generate(self, first: Tensor, actions: Tensor, seeds: Sequence[int], text: Any, frames: range) -> Tensor:
        history, is_float = first.shape[2], first.is_floating_point()
        first = ((first + 1) * 127.5).round() if is_float else first
        whole = [first.float()]
        weights = torch.arange(1.0, history + 1).reshape(1, 1, -1, 1, 1)
        begin = (weights * first.float()).sum(dim=2, keepdim=True) + torch.tensor(seeds).reshape(-1, 1, 1, 1, 1) % 251
        sums = (100 * actions).round().sum(dim=2).cumsum(dim=1)
        for k in range(history - 1, actions.shape[1]):
            whole.append((begin + (k + 1) * 7 + sums[:, k].reshape(-1, 1, 1, 1, 1)) % 256)
        video = torch.cat(whole, dim=2)[:, :, frames.start : frames.stop]
        return video / 127.5 - 1 if is_float else video.to(torch.uint8)


def imagined(num_envs: int, history: int = 1, scoring: Any = None, kind: Any = Summed, **options: Any) -> Any:
    imagination: Any = SimpleNamespace(
        config=Video2WorldActionPipelineConfig(chunk_size=CHUNK + history - 1),
        transform=controller(2),
        views=("",),
        state_head=None,
        world=SimpleNamespace(device=torch.device("cpu"), move=lambda device: None),
        transformed=torch.from_numpy,
    )
    scoring = Scoring(**scoring or {})
    return kind(imagination, Numbered(history), ByContext(), num_envs, MAX_STEPS, scoring=scoring, **options)


def toy(num_envs: int, **options: Any) -> ToyEnv:
    return ToyEnv(num_envs, tasks=["push_puck", "touch_puck"], num_steps=MAX_STEPS, reward_on="each", **options)


class Plan:
    """A plan of calls: the environments that are reset or stepped, the actions and lengths of every chunk."""

    def __init__(self, num_envs: int, num_calls: int = 40, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.calls: list[tuple[str, list[int], int]] = [("reset", list(range(num_envs)), 0)]
        for _ in range(num_calls):
            ids = draw.sample(range(num_envs), draw.randint(1, num_envs))
            kind = "reset" if draw.random() < 0.35 else "step"
            self.calls.append((kind, ids, draw.choice([2, 3, CHUNK])))

    def played(self, env: Any, only: int | None = None) -> dict[int, list[Any]]:
        """Pictures and rewards of each environment, call after call; only those of ``only``, where it is given."""
        found: dict[int, list[Any]] = {}
        for number, (kind, ids, count) in enumerate(self.calls):
            ids = [i for i in ids if only in (None, i)]
            if not ids:
                continue
            if kind == "reset":
                trials = [(31 * i + 7 * number) % 50 for i in ids]
                options = dict(env_ids=ids, trial_ids=trials, seeds=[3 * t for t in trials])
                options["task_ids"] = [t % 3 for t in trials]
                observed, info = env.reset(options=options)
                results: tuple[Any, ...] = ()
            else:
                shape = CHUNK, env.action_dim
                rows = [numpy.random.RandomState(100 * number + i).uniform(-1, 1, shape) for i in ids]
                actions = torch.from_numpy(numpy.stack(rows)).float().mul(100).round().div(100)
                observed, *results, info = env.chunk_step(actions, ids, count)  # type: ignore[assignment]
            values = [*observed.values(), *results, *(info[key] for key in sorted(info))]
            for row, i in enumerate(ids):
                one = [value[row].tolist() if isinstance(value, Tensor) else value[row] for value in values]
                found.setdefault(i, []).append(one)
        return found


SCORINGS: list[dict[str, Any]] = [
    dict(),
    dict(judge="last", reward_on="last", terminate_on_success=True, confirm=2),
    dict(use_rel_reward=True, confirm=2),
    dict(judge="last", use_rel_reward=True, success_threshold=0.4),
    dict(reward_on="last", sparse=True, confirm=3, terminate_on_success=True),
]


FORMS: list[dict[str, Any]] = [dict(), dict(num_noises=2, keep_frames=True), dict(history=5, keep_first=True)]


@pytest.mark.parametrize(
    ("options", "scoring"),
    [
        *((FORMS[0], scoring) for scoring in SCORINGS),
        *itertools.product([*FORMS[1:], dict(num_noises=2, hand_over="float")], (SCORINGS[0], SCORINGS[-1])),
    ],
)
def test_an_imagined_episode_is_the_same_in_any_company(options: dict[str, Any], scoring: dict[str, Any]) -> None:
    plan = Plan(5)
    found = plan.played(imagined(5, scoring=scoring, **options))
    assert imagined(1).sampling.is_repeatable
    for i in (1, 4):
        alone = plan.played(imagined(5, scoring=scoring, **options), only=i)
        assert alone == {i: found[i]}


@pytest.mark.parametrize("options", [dict(), dict(terminate_on_success=True, keep_frames=True, ring_elsewhere=0.5)])
def test_an_episode_of_the_toy_world_is_the_same_in_any_company(options: dict[str, Any]) -> None:
    plan = Plan(4, num_calls=16)
    found = plan.played(toy(4, **options))
    for i in (0, 3):
        alone = plan.played(toy(4, **options), only=i)[i]
        for one, expected in zip(alone, found[i], strict=True):
            pairs = zip(one, expected, strict=True)
            assert all(a == b if isinstance(a, str) else numpy.allclose(a, b) for a, b in pairs)


@pytest.mark.parametrize("hand_over", ["uint8", "float"])
def test_a_second_noise_goes_on_from_its_own_end_and_the_policy_sees_the_first(hand_over: str) -> None:
    """As two environments would whose seeds are as far apart."""
    both, first, second = (imagined(2, num_noises=n, hand_over=hand_over) for n in (2, 1, 1))
    for env, shift in ((both, 0), (first, 0), (second, 2**31)):
        env.reset(options=dict(task_ids=[0, 1], trial_ids=[3, 9], seeds=[40 + shift, 50 + shift]))
    for number in range(2):
        actions = torch.full((2, CHUNK, 2), 0.1 * number)
        seen = [env.chunk_step(actions)[0]["full_image"] for env in (both, first, second)]
        shown = [env.reward.shown[-1] for env in (both, first, second)]  # type: ignore[attr-defined]
        assert torch.equal(shown[0], torch.cat(shown[1:])) and not torch.equal(shown[1], shown[2])
        assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    "options", [dict(), dict(history=5), dict(history=5, keep_first=True), dict(num_noises=2), dict(hand_over="float")]
)
def test_a_chunk_begins_where_what_was_executed_ended(options: dict[str, Any]) -> None:
    """Executing five actions and then others shows what a state that was taken over in between goes on with."""
    for scoring in SCORINGS[:3]:
        env, other = (imagined(2, scoring=scoring, keep_frames=True, **options) for _ in range(2))
        env.reset(options=dict(task_ids=[0, 1], trial_ids=[3, 9], seeds=[4, 5]))
        env.chunk_step(torch.full((2, CHUNK, 2), 0.3), execute=4)
        env.chunk_step(torch.full((1, CHUNK, 2), 0.1), [1], execute=2)
        other.load_state(env.get_state())
        for count in (3, 5):
            actions = torch.arange(2 * CHUNK * 2.0).reshape(2, CHUNK, 2) / 100
            (one, *results, info), (again, *others, of_other) = (
                each.chunk_step(actions, None, count) for each in (env, other)
            )
            assert torch.equal(one["full_image"], again["full_image"])
            assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
            assert all(torch.equal(info[key], of_other[key]) for key in info)
            assert torch.equal(info["frames"][:, count - 1], one["full_image"])
            rest = one["full_image"][:, None].expand(-1, CHUNK - count, -1, -1, -1)
            assert torch.equal(info["frames"][:, count:], rest)


@pytest.mark.parametrize("clips", [True, False])
def test_actions_beyond_1_count_as_1_unless_they_are_not_clipped(clips: bool) -> None:
    shown = []
    for value in (1.0, 1.5):
        env = imagined(1, clip_actions=clips)
        env.reset(options=dict(trial_ids=[3], seeds=[4]))
        shown.append(env.chunk_step(torch.full((1, CHUNK, 2), value))[0]["full_image"])
    assert torch.equal(*shown) == clips


class Noted(Summed):
    """Notes what clips begin with."""

    def _generate(self, first: Tensor, actions: Tensor, *rest: Any) -> Tensor:
        self.given = [*getattr(self, "given", []), (first, actions)]
        return super()._generate(first, actions, *rest)


@pytest.mark.parametrize("keep_first", [False, True])
def test_five_pictures_are_handed_on_with_the_actions_between_them(keep_first: bool) -> None:
    """After three executed actions: the last five pictures, or the first one and the last four."""
    env = imagined(1, 5, kind=Noted, keep_first=keep_first)
    env.reset(options=dict(task_ids=[0], trial_ids=[20], seeds=[4]))
    actions = torch.arange(CHUNK * 2.0).reshape(1, CHUNK, 2) / 100
    env.chunk_step(actions, execute=3)
    env.chunk_step(actions)
    (first, begun), (second, handed_on) = env.given
    assert first[0, 0, :, 0, 0].tolist() == [20, 21, 22, 23, 24]
    assert second[0, 0, 0, 0, 0] == (20 if keep_first else 23) and second[0, 0, 1, 0, 0] == 24
    torch.testing.assert_close(handed_on[:, :4], torch.cat([begun[:, 3:4], actions[:, :3]], dim=1))
    env.starts.has_actions = False  # type: ignore[attr-defined]
    env.reset(options=dict(task_ids=[0], trial_ids=[20], seeds=[4]))
    env.chunk_step(actions)
    assert not env.given[-1][1][:, :4].any(), "actions of the episode before"


def test_what_is_imagined_beyond_a_chunk_repeats_each_environments_own_last_action() -> None:
    """Zeros would be a far place where actions are places. Of a longer chunk, of which few are executed, the first
    actions alone."""
    for padding in ("hold", "zeros"):
        env = imagined(2, kind=Noted, padding=padding)
        env.reset(options=dict(task_ids=[0, 1], trial_ids=[20, 21], seeds=[4, 5]))
        actions = torch.arange(2 * 8 * 2.0).reshape(2, 8, 2) / 100
        env.chunk_step(actions[:, :4])
        env.chunk_step(actions, execute=3)
        (_, short), (_, long) = env.given
        assert torch.equal(short[:, :4], actions[:, :4]) and torch.equal(long, actions[:, :CHUNK])
        held = actions[:, 3:4].expand(-1, CHUNK - 4, -1) * (padding == "hold")
        assert torch.equal(short[:, 4:], held)


def test_what_is_imagined_goes_no_further_than_the_episode() -> None:
    """Thirteen steps: two chunks and one more action, however long the chunk is."""
    env = imagined(2, keep_frames=True, scoring=dict(reward_on="last"))
    env.reset(options=dict(task_ids=[0, 1], trial_ids=[3, 9], seeds=[4, 5]))
    env.chunk_step(torch.zeros(1, CHUNK, 2), [1], execute=2)
    for counts, expected in (([6, 6], []), ([6, 5], [[1, 4]]), ([1, 0], [[0, 0]])):
        _, reward, terminated, truncated, info = env.chunk_step(torch.zeros(2, CHUNK, 2))
        assert info["executed"].sum(dim=1).tolist() == counts
        assert env.reward.shown[-1].shape == (sum(count > 0 for count in counts), max(counts))  # type: ignore[attr-defined]
        assert reward.nonzero().tolist() == expected, "the end alone is paid"
        assert (terminated | truncated).nonzero().tolist() == expected and not (terminated & truncated).any()
    assert info["finish_step"].tolist() == [13, 13] and not info["active"].any()
    short = imagined(1, keep_frames=True)
    assert short.metadata["chunk"] == CHUNK
    assert Summed(short.imagination, Numbered(), ByContext(), 1, 4).metadata["chunk"] == 4
