# SPDX-License-Identifier: Apache-2.0
"""A policy that looks ahead: of several chunks that it could play, the one whose imagined end is worth most.

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
    Generators,
    LogProb,
    Mode,
    Observation,
    Policy,
    PolicyDefaults,
    rows_of,
)
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError

_SEEDS = 2**31


class LookAhead(PolicyDefaults):
    """Decides as ``policy`` does, and ``candidates - 1`` times by its draws; each is imagined ``chunks`` decisions far,
    behind the first one as the policy likes best. A decision is the first ``execute`` actions of the policy's (all).
    ``fit`` brings the pictures that are seen to the size of the world model's.

    All candidates of a place share the world model's noise; of equals the policy's own decision is played.
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
    ) -> None:
        if candidates < 2 or chunks < 1:
            raise ConfigError(f"candidates={candidates}, chunks={chunks}: two candidates and one chunk at least.")
        self.policy, self.imagination, self.reward, self.fit = policy, imagination, reward, fit
        self.candidates, self.chunks = candidates, chunks
        whole: Any = policy
        self.action_dim, self.chunk = whole.action_dim, execute or whole.chunk
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
        many = rows_of(observation, [row for row in range(size) for _ in range(count)])
        drawn = self.policy.act(many, mode="sample", generators=draws, temperature=temperature)
        actions_E_N_A_D = drawn.actions_E_A_D.unflatten(0, (size, count)).clone()
        actions_E_N_A_D[:, 0] = own.actions_E_A_D
        value_E_N = self._values(many, actions_E_N_A_D.flatten(0, 1), seeds_E_N[:, :1].expand(-1, count), draws)
        best_E = value_E_N.argmax(dim=1)  # the first of equals
        return Decision(actions_E_N_A_D[torch.arange(size), best_E, : self.chunk], {}, is_lost_E=own.is_lost_E)

    def _values(self, observation: Observation, actions: Tensor, noise_E_N: Tensor, draws: Generators) -> Tensor:
        """What is imagined of the actions is worth, [E, N]."""
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

    def log_prob(self, record: Any) -> LogProb:
        raise ConfigError("A policy that looks ahead is played, not trained: train the one that it asks.")
