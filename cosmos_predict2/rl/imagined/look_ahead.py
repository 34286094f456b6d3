# SPDX-License-Identifier: Apache-2.0
"""A policy that looks ahead: of several chunks that it could play, the one whose imagined end is worth most, where it
is clearly worth more than its own.

    policy = LookAhead(policy, imagination_of(world_model), read_reward(reward), candidates=8)

What is true is seen again before each decision, and nothing is learnt: mistakes of the imagination neither add up nor
are sought, as the choice is among what the policy would do anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import GivenStarts, whole_pictures
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.interfaces import (
    Decision,
    FrameReward,
    FrameRewardDefaults,
    Generators,
    LogProb,
    Mode,
    Observation,
    Policy,
    PolicyDefaults,
    completed,
    rows_of,
)
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError

MARGIN = 0.1  # of a value between 0 and 1
_SEEDS = 2**31


class LookAhead(PolicyDefaults):
    """Decides as ``policy`` does, and ``candidates - 1`` times by its draws; each is imagined ``chunks`` decisions far,
    behind the first one as the policy likes best. A decision is the first ``execute`` actions of the policy's (all),
    and is imagined as it is given, not clipped. ``fit`` brings the pictures that are seen to the size of the world
    model's.

    All candidates of a place share the world model's noise. A draw is played that is worth more by ``margin`` than the
    policy's own decision, in the reward's values: where an end is far off, all are worth about the same, and the best
    of them is a draw by chance, which succeeds less. A draw that is lost is no candidate.
    """

    def __init__(
        self,
        policy: Policy,
        imagination: Imagination,
        reward: FrameReward,
        candidates: int = 8,
        chunks: int = 1,
        execute: int | None = None,
        fit: Callable[[Tensor], Tensor] | None = None,
        margin: float = MARGIN,
    ) -> None:
        if candidates < 2 or chunks < 1:
            raise ConfigError(f"candidates={candidates}, chunks={chunks}: two candidates and one chunk at least.")
        if margin < 0:
            raise ConfigError(f"margin={margin}: how much more a draw must be worth than the policy's own, at least 0.")
        whole: Any = policy
        execute = whole.chunk if execute is None else execute
        if not 1 <= execute <= whole.chunk:
            raise ConfigError(f"execute={execute}: at least 1, and at most the {whole.chunk} actions of a decision.")
        self.margin = margin
        self.policy, self.imagination, self.fit = policy, imagination, fit
        self.reward = completed(reward, FrameRewardDefaults)
        self.reward.to(imagination.world.device)
        self.candidates, self.chunks, self.chunk, self.action_dim = candidates, chunks, execute, whole.action_dim
        self.sentences, self.views, self.contract = policy.sentences, policy.views, policy.contract
        self.reads_state, self.state_size, self.draws_when_greedy = policy.reads_state, policy.state_size, True
        self._env: WorldModelEnv | None = None

    @torch.no_grad()
    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        own = self.policy.act(observation, mode=mode, generators=generators, temperature=temperature)
        size, count = len(generators), self.candidates
        seeds_E_N = torch.stack([torch.randint(_SEEDS, (count,), generator=draws) for draws in generators])
        draws = [torch.Generator().manual_seed(int(seed)) for seed in seeds_E_N.flatten()]
        others = [row for row in range(size) for _ in range(count - 1)]
        drawn = self.policy.act(
            rows_of(observation, others),
            mode="sample",
            generators=[each for k, each in enumerate(draws) if k % count],
            temperature=temperature,
        )
        actions = drawn.actions_E_A_D
        if (is_lost := drawn.is_lost_E) is not None:  # the policy's own decision once more
            actions = torch.where(is_lost.to(actions.device)[:, None, None], own.actions_E_A_D[others], actions)
        actions_E_N_A_D = torch.cat([own.actions_E_A_D[:, None], actions.unflatten(0, (size, count - 1))], dim=1)
        many = rows_of(observation, [row for row in range(size) for _ in range(count)])
        value_E_N = self._values(many, actions_E_N_A_D.flatten(0, 1), seeds_E_N[:, :1].expand(-1, count), draws)
        value_E_N[:, 0] += self.margin
        best_E = value_E_N.argmax(dim=1)  # the first of equals
        return Decision(actions_E_N_A_D[torch.arange(size), best_E, : self.chunk], {}, is_lost_E=own.is_lost_E)

    def _values(self, observation: Observation, actions: Tensor, noise_E_N: Tensor, draws: Generators) -> Tensor:
        """The worth [E, N] of the pictures that the actions are imagined to lead to."""
        pictures = whole_pictures(observation, len(self.imagination.views), self.fit)
        states = observation["state"] if self.imagination.state_head is not None else None
        starts: Any = GivenStarts(pictures, observation["task_description"], states_E_S=states)
        if (env := self._env) is None or env.num_envs != len(pictures):
            how: Any = dict(scoring=Scoring(judge="last", reward_on="last"), clip_actions=False)
            steps = self.chunks * self.chunk
            env = self._env = WorldModelEnv(self.imagination, starts, self.reward, len(pictures), steps, **how)
            require_inputs(env, self.policy)
        env.starts = starts
        seeds = noise_E_N.flatten().tolist()
        imagined, _ = env.reset(options=dict(trial_ids=range(len(pictures)), seeds=seeds))
        for k in range(self.chunks):
            if k:
                actions = self.policy.act(imagined, mode="greedy", generators=draws).actions_E_A_D
            imagined, _, _, _, info = env.chunk_step(actions, execute=self.chunk)
        value: Tensor = info["value"]
        return value.unflatten(0, noise_E_N.shape)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the policy; the reward is where the world model is, which stays where it was built."""
        self.policy.to(*args, **kwargs)

    def log_prob(self, record: Any) -> LogProb:
        raise ConfigError("A policy that looks ahead is played, not trained: train the one that it asks.")
