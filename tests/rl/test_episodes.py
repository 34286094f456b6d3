# SPDX-License-Identifier: Apache-2.0
"""The loop in which a policy plays episodes: their starts, environments that never wait, and what is left of each."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.scoring import Book, Chunk
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts, settle_num_tasks
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Trajectories, replayed
from cosmos_predict2.rl.interfaces import Decision
from imaginaire.errors import ConfigError
from tests.rl.vla_runs import starts, tensors_of

CHUNK = 2


class Counter:
    """Environments that count: trial t lasts ``lengths[t]`` steps, and its picture is the number of its steps.

    Trials of ``lost`` are lost at their third step. Something moves at every step.
    """

    is_ended = False  # before its end, for want of a decision
    is_replayed = False  # by all decisions, after an end as well

    def __init__(
        self, num_envs: int, lengths: Sequence[int], reset_chunks: int | None = None, lost: Sequence[int] = ()
    ) -> None:
        self.num_envs, self.lengths, self.lost = num_envs, lengths, lost
        self.metadata = dict(suite="counter", action_dim=1, chunk=CHUNK, max_steps=max(lengths))
        if reset_chunks is not None:
            self.metadata["reset_chunks"] = reset_chunks
        self.book = Book(num_envs, num_tasks=1, num_trials=len(lengths), max_steps=max(lengths), seed=0)
        self.resets: list[int] = []  # episodes that begin together
        self.chunks: list[int] = []  # environments that are stepped together

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        is_playing = (self.book.has_begun & ~self.book.is_over)[options["env_ids"]]
        assert self.is_ended or not is_playing.any()  # nobody ends an episode
        ids = self.book.begin(seed, options)
        self.book.limits[ids] = [self.lengths[trial] for trial in self.book.trial_ids[ids]]
        self.resets.append(len(ids))
        return self.observation(ids), self.book.info(ids)

    def chunk_step(self, actions: Tensor, env_ids: Any = None, execute: int | None = None) -> Any:
        ids = self.book.ids(env_ids)
        assert self.is_replayed or not self.book.is_over[ids].any()  # no policy steps an episode that is over
        chunk, frames = Chunk.empty(len(ids), CHUNK), []
        moved = torch.zeros(len(ids), CHUNK, dtype=torch.bool)
        for k in range(CHUNK):
            rows = numpy.flatnonzero(~self.book.is_over[ids])
            if rows.size and k < (execute or CHUNK):
                self.book.steps[ids[rows]] += 1
                terminated, _ = self.book.end(ids[rows], self.book.trial_ids[ids[rows]] % 2 == 0, False)
                is_lost = numpy.isin(self.book.trial_ids[ids], self.lost) & (self.book.steps[ids] == 3)
                self.book.is_over[ids] |= is_lost
                chunk.executed_E_A[rows, k], moved[rows, k] = True, True
                chunk.reward_E_A[rows, k] = torch.from_numpy(terminated).float()
            frames.append(self.pictures(ids))
        self.chunks.append(len(ids))
        info = {**self.book.info(ids, chunk), "frames": torch.stack(frames, dim=1), "moved": moved}
        info["valid"] = torch.from_numpy(~(numpy.isin(self.book.trial_ids[ids], self.lost) & self.book.is_over[ids]))
        info["success"] &= info["valid"]
        return self.observation(ids), chunk.reward_E_A, chunk.terminated_E_A, chunk.truncated_E_A, info

    def pictures(self, ids: Any) -> Tensor:
        steps = torch.from_numpy(self.book.steps[ids]).to(torch.uint8)
        return steps[:, None, None, None].expand(-1, 2, 2, 3).clone()

    def observation(self, ids: Any) -> Any:
        state = torch.from_numpy(numpy.stack([self.book.trial_ids[ids], self.book.steps[ids]], axis=1))
        sentences = [str(trial) for trial in self.book.trial_ids[ids]]
        return {"full_image": self.pictures(ids), "state": state, "task_description": sentences}


class Notes:
    """Decides nothing, and notes what it saw and drew."""

    calls = 0

    def act(self, observation: Any, *, generators: Sequence[torch.Generator], **options: Any) -> Decision:
        self.calls += 1
        self.options = options
        drawn = torch.stack([torch.rand(1, generator=one) for one in generators])
        assert len(drawn) == len(observation["state"])
        assert observation["task_description"] == [str(trial) for trial in observation["state"][:, 0].tolist()]
        record = {"seen": observation["state"], "drawn": drawn}
        return Decision(drawn[:, None].expand(-1, CHUNK, -1), record, drawn[:, None])


def played(env: Counter, num: int, policy: Any = None, **options: Any) -> Trajectories:
    return LocalRollout(policy or Notes(), env, **options).collect(starts(num))  # type: ignore[arg-type]


def require_equal(found: Trajectories, expected: Trajectories) -> None:
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=0, atol=0)


def test_a_policy_is_not_asked_by_words_that_it_was_not_cloned_on() -> None:
    """A clone of one sentence has .92 by it and .00 by the name of the environment."""
    policy: Any = Notes()
    policy.sentences = ("0", "2")
    with pytest.raises(ConfigError, match=r"calls its task '1', which no recording.* Known: 0, 2.*\?sentence="):
        played(Counter(1, [2, 2, 2]), 3, policy)
    policy.sentences = ("0", "1", "2")
    assert len(played(Counter(1, [2, 2, 2]), 3, policy)) == 3


class Forgetful(Notes):
    """Has no decision for an episode that has had one, where its trial is among those."""

    def __init__(self, *trials: int) -> None:
        self.trials = torch.tensor(trials)

    def act(self, observation: Any, **options: Any) -> Decision:
        trial_E, step_E = observation["state"].unbind(1)
        is_lost_E = (step_E > 0) & torch.isin(trial_E, self.trials)
        return replace(super().act(observation, **options), is_lost_E=is_lost_E)


def test_an_episode_without_a_decision_is_over_and_does_not_count() -> None:
    env = Counter(2, [9] * 4)
    env.is_ended = True
    found = played(env, 4, Forgetful(1, 2))
    whole = played(Counter(2, [9] * 4), 4)
    assert found.is_valid_E.tolist() == [True, False, False, True] and whole.is_valid_E.all()
    rows = torch.tensor([0, 3])
    require_equal(found.rows(rows), whole.rows(rows))


LENGTHS = [7, 1, 12, 3, 9, 2, 12, 5]


@pytest.mark.parametrize("reset_chunks", [0, 2, 100])
@pytest.mark.parametrize("num_envs", [1, 3, 8, 9])
@pytest.mark.parametrize("execute", [None, 1])
def test_episodes_are_the_same_in_any_company(num_envs: int, reset_chunks: int, execute: int | None) -> None:
    alone = [
        LocalRollout(Notes(), Counter(1, LENGTHS), execute, keep_frames=True).collect(starts(8).part(slice(i, i + 1)))  # type: ignore[arg-type]
        for i in range(8)
    ]
    env = Counter(num_envs, LENGTHS, reset_chunks)
    found = played(env, 8, execute=execute, keep_frames=True)
    for i, one in enumerate(alone):
        require_equal(found.rows(torch.tensor([i])), one)
    decisions = [-(-length // (execute or CHUNK)) for length in LENGTHS]
    assert sum(env.chunks) == sum(decisions)
    for i, count in enumerate(decisions):
        seen = found.record["seen"][:, i]
        assert seen[:, 0].eq(i).all() and seen[:count, 1].tolist() == list(range(0, LENGTHS[i], execute or CHUNK))


def test_what_follows_an_episodes_end_was_not_executed() -> None:
    found = played(Counter(3, LENGTHS), 8, keep_frames=True)
    assert found.executed_M_E_A.shape == (6, 8, CHUNK) and found.finish_step_E.tolist() == LENGTHS
    is_within = torch.arange(12)[:, None] < torch.tensor(LENGTHS)
    assert torch.equal(found.executed_M_E_A.transpose(1, 2).flatten(0, 1), is_within)
    assert found.moved_E_L is not None and torch.equal(found.moved_E_L, is_within.T)
    assert found.return_E.tolist() == found.success_E.float().tolist() == [1.0, 0.0] * 4  # each end is paid once
    frames = found.frames_E_F_H_W_C
    assert frames is not None and frames.shape == (8, 13, 2, 2, 3)
    assert torch.equal(frames[..., 0, 0, 0].long(), torch.arange(13).minimum(torch.tensor(LENGTHS)[:, None]))
    for i, length in enumerate(LENGTHS):  # the last decision stays
        last = -(-length // CHUNK) - 1
        for value in (found.actions_M_E_A_D[:, i], *(value[:, i] for value in found.record.values())):
            assert torch.equal(value[last:], value[last].expand_as(value[last:]))
        assert len(found.record["drawn"][: last + 1, i].unique()) == last + 1  # and each one was drawn anew
    assert found.log_prob_M_E_K_N is not None and torch.equal(found.log_prob_M_E_K_N[:, :, 0], found.record["drawn"])


def test_a_lost_episode_frees_its_environment() -> None:
    env = Counter(2, LENGTHS, lost=[0, 2])
    found = played(env, 8)
    lasts = [3, 1, 3, *LENGTHS[3:]]
    assert found.is_valid_E.tolist() == [False, True, False] + [True] * 5
    assert found.executed_M_E_A.sum(dim=(0, 2)).tolist() == lasts
    assert not found.success_E[[0, 2]].any() and not found.return_E[[0, 2]].any()
    assert sum(env.chunks) == sum(-(-last // CHUNK) for last in lasts)


def test_a_replay_says_which_of_its_episodes_were_lost() -> None:
    actions = torch.zeros(6, 8, CHUNK, 1)
    env: Any = Counter(3, LENGTHS, lost=[0, 2])
    env.is_replayed = True
    success, total, valid = replayed(env, starts(8), actions)
    assert valid.tolist() == [False, True, False] + [True] * 5
    assert success.nonzero().flatten().tolist() == [4, 6] and torch.equal(total, success.float())


def test_no_environment_waits_for_the_slowest() -> None:
    """64 episodes of 3 to 64 decisions in 8 environments, which waves play in 8 times the longest of eight."""
    draw = random.Random(0)
    decisions = [draw.randint(3, 64) for _ in range(64)]
    lengths, waves = [CHUNK * n for n in decisions], sum(max(decisions[i : i + 8]) for i in range(0, 64, 8))
    env, policy = Counter(8, lengths), Notes()
    played(env, 64, policy)
    assert policy.calls == len(env.chunks) <= sum(decisions) / 8 + 64  # all are busy until the last starts are taken
    assert len(env.chunks) < 0.75 * waves
    dear = Counter(8, lengths, reset_chunks=10**6)
    played(dear, 64)
    assert dear.resets == [8] * 8 and len(dear.chunks) == waves  # which is what is best there
    for cost in (1, 2, 4, 8):  # chunks that all wait for a reset
        some = Counter(8, lengths, reset_chunks=cost)
        played(some, 64)
        spent, at_once = (len(one.chunks) + cost * len(one.resets) for one in (some, env))
        assert spent < waves + cost * 8 and (spent < at_once or cost == 1)


def test_a_policy_is_asked_in_the_mode_and_at_the_temperature_of_the_rollout() -> None:
    policy = Notes()
    LocalRollout(policy, Counter(3, LENGTHS), temperature=0.5).collect(starts(8), "greedy")  # type: ignore[arg-type]
    assert policy.options == dict(mode="greedy", temperature=0.5)


def test_evaluations_keep_no_pictures() -> None:
    whole, bare = played(Counter(3, LENGTHS), 8), played(Counter(3, LENGTHS), 8, keep_record=False)
    assert not bare.record and bare.log_prob_M_E_K_N is None
    assert torch.equal(bare.actions_M_E_A_D, whole.actions_M_E_A_D)


# --- which starts are played

TASKS = ["push_puck", "touch_puck"]


def _settled(data: EpisodeStarts, env: Any, is_remote: bool = False) -> list[tuple[int, int]]:
    settle_num_tasks([SimpleNamespace(dataset=data)], [env], is_remote=is_remote)
    return [(one["task_id"], one["trial_id"]) for one in (data[i] for i in range(len(data)))]


def test_all_tasks_of_the_environment_are_played_in_turn() -> None:
    env = ToyEnv(2, tasks=TASKS)
    assert _settled(EpisodeStarts(5), env) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert _settled(EpisodeStarts(3, first=5), env) == [(1, 2), (0, 3), (1, 3)]
    assert _settled(EpisodeStarts(2), SimpleNamespace(metadata={})) == [(0, 0), (0, 1)]  # one of a user's
    assert _settled(EpisodeStarts(3, num_tasks=2), env) == [(0, 0), (1, 0), (0, 1)]


def test_another_number_of_tasks_than_the_environment_has_is_refused() -> None:
    for num_tasks in (1, 3):
        with pytest.raises(ConfigError, match=rf"dataloader_train.dataset.num_tasks={num_tasks}.*has 2 tasks.*null"):
            _settled(EpisodeStarts(5, num_tasks), ToyEnv(2, tasks=TASKS))
    assert _settled(EpisodeStarts(2, num_tasks=3), None, is_remote=True) == [(0, 0), (1, 0)]  # which asks nobody
    with pytest.raises(ConfigError, match="num_tasks is null"):
        EpisodeStarts(5)[0]


def test_the_simulators_of_validation_are_released_after_they_were_asked_and_those_of_training_stay() -> None:
    released: list[str] = []
    envs: list[Any] = [
        SimpleNamespace(metadata={"num_tasks": num}, release=lambda num=num: released.append(str(num)))
        for num in (2, 3)
    ]
    loaders = [SimpleNamespace(dataset=EpisodeStarts(4)) for _ in envs]
    settle_num_tasks(loaders, envs, is_remote=False)
    assert [loader.dataset.num_tasks for loader in loaders] == [2, 3] and released == ["3"]
